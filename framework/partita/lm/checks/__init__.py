"""Tests of a loaded model on a few random rows, before faster computation is used on it."""
