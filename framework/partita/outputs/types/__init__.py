"""The output types: what an answer is read as, its columns, and its metrics."""
