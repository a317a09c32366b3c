"""The cross-entropy of a batch, and last layers computed only where it needs them."""
