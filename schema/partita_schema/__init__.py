"""The configuration of a run: the YAML file as checked models, its errors, and serialized records. Imports no torch."""
