"""Heads of models that predict labels, numbers, scores or embeddings."""
