"""Where a verb runs: in this process, under torchrun, on Ray, or on a server."""
