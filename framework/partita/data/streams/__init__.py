"""Rows that are read while they are used, from any position."""
