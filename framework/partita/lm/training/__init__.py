"""What training adds to a model: frozen parameters, noise on embeddings, checkpoints, and the export of its result."""
