"""What each public method of `Model` does, as functions on its runtime."""
