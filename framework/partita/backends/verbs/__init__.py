"""Implementations of the public methods of `Model`, as functions of its runtime."""
