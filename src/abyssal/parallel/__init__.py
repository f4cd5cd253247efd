"""Many ranks: who computes which part of a model, and who gets which request."""
