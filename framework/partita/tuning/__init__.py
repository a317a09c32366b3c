"""Selection of batch sizes: what is probed, and where results are cached."""
