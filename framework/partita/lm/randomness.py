"""Seeded random numbers that preserve the global random state."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int, *, device: torch.device) -> Iterator[None]:
    """Seed torch on the CPU and on `device` in this context, and restore the random state on exit."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    states = [generator.get_state() for generator in generators]
    # MPS has functions for its generator, but not the generator itself.
    mps_state = torch.mps.get_rng_state() if device.type == "mps" else None
    try:
        for generator in generators:
            generator.manual_seed(seed)
        if mps_state is not None:
            torch.mps.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        if mps_state is not None:
            torch.mps.set_rng_state(mps_state)
