"""Base models with the configured dtype and device, and the choice of number formats."""
