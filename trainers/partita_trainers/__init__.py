"""Trainers, their registry, and checkpoints."""
