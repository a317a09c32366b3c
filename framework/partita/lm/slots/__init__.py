"""Continuous batching: rows join and leave a batch of slots, each with its part of the KV cache."""
