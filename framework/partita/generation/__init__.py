"""Prediction: engines, journal and output tables."""
