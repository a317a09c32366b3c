"""Dialogues: history limits, and expansion into rows."""
