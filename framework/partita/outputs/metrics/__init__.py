"""Metrics that several output types share, or that need a file of their own."""
