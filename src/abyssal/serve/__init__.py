"""The OpenAI-compatible server: an API process, and an engine process beside it."""
