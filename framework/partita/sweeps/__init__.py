"""Sweeps: several runs of one file with other values, chosen, placed, compared."""
