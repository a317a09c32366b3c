"""Objectives on answers that are compared, and the trainers that use them: preferences, rewards, embeddings."""
