"""KV memory: record layouts, cache kinds, page pools, and the facts of one engine step."""
