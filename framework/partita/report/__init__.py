"""Measurements in words, tables and pictures."""
