"""From a configuration to a model that is ready: building, batch sizes, evaluation and fingerprints."""
