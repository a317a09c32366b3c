"""How weights change, or do not: trainers, their registry, checkpoints."""
