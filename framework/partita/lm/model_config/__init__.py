"""What the config.json of a model says: architecture, kind, context length, attention windows, memory."""
