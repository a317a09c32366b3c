"""Output types: how an answer becomes values, and how values are scored."""
