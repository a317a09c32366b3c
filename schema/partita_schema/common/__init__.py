"""Helpers that all three packages use."""
