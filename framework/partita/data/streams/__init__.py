"""Rows that are read while they are used, resumable at any position."""
