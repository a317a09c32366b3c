"""From files to batches: sources, splits, prompts, tokenization, planning, and a data position that survives kills."""
