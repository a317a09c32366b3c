"""The run directory: what a run was told, what it did, and where it stands."""
