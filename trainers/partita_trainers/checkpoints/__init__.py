"""Checkpoints: atomic writing, checksums, and state that is restored bit for bit."""
