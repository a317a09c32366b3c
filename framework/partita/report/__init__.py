"""Measurements as text, tables and charts."""
