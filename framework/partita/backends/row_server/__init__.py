"""Predictions with a model that `partita serve` serves: rows are sent, and answers come back."""
