"""The run directory: configuration, state and results of a run."""
