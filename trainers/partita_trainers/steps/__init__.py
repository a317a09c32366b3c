"""One optimizer step: its micro-batches, its gradients, and its record."""
