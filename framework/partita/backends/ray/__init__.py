"""Generation on a pool of worker processes: assignments, messages, and worker states."""
