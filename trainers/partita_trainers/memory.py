"""How a device says that its memory is full."""

import torch

TEXTS = ("can't allocate memory", "not enough memory", "out of memory")
"""What allocators write that raise a plain RuntimeError: torch's on CPUs, and those of MPS and XPU."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is full, and not that something else is wrong."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in TEXTS)
