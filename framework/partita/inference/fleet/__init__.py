"""A model in other processes that this one deals rows to: what is dealt, what a worker does, who holds what."""
