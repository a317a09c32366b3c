"""Batch sizes that are measured: what fits the memory at the worst case, and what is fastest on the data."""
