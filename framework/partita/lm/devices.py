"""The device of a model, and random numbers from a seed on it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from partita.distributed.init import local_device_index
from partita.lm.products.fast_linear import keep_few_kernels
from partita_schema.errors import ModelError
from partita_schema.sections.model import ModelParameters
from partita_trainers.libraries.torch_internals import allocator_settings, set_allocator_settings


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


def find_device(parameters: ModelParameters) -> torch.device:
    """Return the configured device; auto is the first accelerator that torch finds.

    A CUDA device becomes the current one of torch, whose allocator is set to expandable segments unless it has other
    settings, and whose attention is not computed by cuDNN. On a CPU the oneDNN kernel cache is limited.

    Raises:
        ModelError: The device does not exist.
    """
    device = asked_device(parameters)
    if device.type == "cuda":
        grow_segments()
        torch.cuda.set_device(device)
        # On recent GPUs torch prefers cuDNN, which plans each new shape. Here batches differ in rows and width, and the
        # width grows in each decode step.
        torch.backends.cuda.enable_cudnn_sdp(False)
    elif device.type == "cpu":
        keep_few_kernels()
    return device


def grow_segments() -> None:
    """Enable expandable segments of CUDA's allocator, unless the user or their program configured it.

    The setting is changed directly, because PYTORCH_ALLOC_CONF is ignored once CUDA is initialized, as it is under
    torchrun and Ray.
    """
    # On other platforms torch only warns that it is not supported.
    able = sys.platform == "linux" and torch.version.hip is None
    if able and allocator_settings() == "":
        set_allocator_settings("expandable_segments:True")


def asked_device(parameters: ModelParameters) -> torch.device:
    """Return the configured device without setting it up. Raise ModelError if it does not exist."""
    wanted = parameters.device
    if wanted == "auto":
        for kind in ("cuda", "xpu", "mps"):
            if is_there(kind):
                return torch.device(kind, local_device_index(kind)) if kind != "mps" else torch.device(kind)
        return torch.device("cpu")
    device = torch.device(wanted)
    if device.type in ("cuda", "xpu") and device.index is None:
        device = torch.device(device.type, local_device_index(device.type) if is_there(device.type) else 0)
    if device.type != "cpu" and not is_there(device.type):
        raise ModelError(f"model_parameters.device: torch sees no {device.type} device here; write auto or cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(
            f"model_parameters.device: there is no {wanted}; torch sees {torch.cuda.device_count()} cuda devices"
        )
    return device


def is_there(kind: str) -> bool:
    """Return whether torch finds a device of this type."""
    backend = torch.backends.mps if kind == "mps" else getattr(torch, kind)
    return bool(backend.is_available())
