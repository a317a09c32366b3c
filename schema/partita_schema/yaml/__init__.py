"""Reading YAML: positions, strict scalars, variables and overrides."""
