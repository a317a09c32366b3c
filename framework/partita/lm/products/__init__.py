"""Matrix products on a CPU: which one is fastest here, and layers that use it."""
