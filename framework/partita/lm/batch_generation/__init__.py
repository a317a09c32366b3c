"""Generation in batches of rows that start and end together, and what files show of it before a run."""
