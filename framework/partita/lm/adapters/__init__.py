"""Adapters: LoRA and its family, their initialization, and merging."""
