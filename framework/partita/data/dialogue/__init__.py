"""Dialogues: their formats, and the rows that are made of them."""
