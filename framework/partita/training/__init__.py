"""A training run: its datasets, its batches, and the rounds of self-training."""
