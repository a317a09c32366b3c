"""Prediction: engines, journal, decoder, metrics and output tables."""
