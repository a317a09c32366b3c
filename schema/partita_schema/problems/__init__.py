"""Explanations of pydantic's errors in terms of the file."""
