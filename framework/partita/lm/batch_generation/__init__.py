"""Generation in batches of rows that start and end together, and what files show of best-of-n before a run."""
