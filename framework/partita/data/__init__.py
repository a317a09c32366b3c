"""From files to batches: sources, splits, prompts, encoding, planning, and a position that survives a kill."""
