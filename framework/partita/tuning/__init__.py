"""Which batch sizes a run needs, with what they are tried, and where they are kept."""
