"""Batch size tuning by measurement: what fits in memory in the worst case, and what is fastest on the data."""
