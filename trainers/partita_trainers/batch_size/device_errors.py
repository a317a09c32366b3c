"""Errors that mean that a device is full, that there are too many rows for a kernel, or that the device is broken."""

import gc
import sys
from collections.abc import Callable
from typing import TypeVar

import torch

from partita_trainers.batch_size import linux

T = TypeVar("T")

FULL = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "cudnn_status_internal_error_device_allocation_failed",
    "cudnn_status_internal_error_host_allocation_failed",
    "handles_.at",
    "ur_result_error_out_of_",
    "nvml_success == r",
    "bad_alloc",
    "could not create a primitive",
    "could not create a memory object",
)
"""Texts of plain RuntimeErrors that mean out of memory.

A handle pool asserts, the report of a full device fails itself if NVML does not answer, and oneDNN cannot create a
primitive. The errors of NCCL contain that of CUDA.
"""

TOO_LARGE = (
    "invalid configuration argument",
    "canuse32bitindexmath",
    "integer out of range",
    "indexed with int32",
    "without overflow",
    "32-bit index",
    "2^31",
    "2**31",
    "int_max",
    "invalid buffer size",
    "cudnn_status_not_supported",
    "cublas_status_not_initialized when calling `cublascreate",
)
"""Messages of errors that may disappear with fewer rows.

Some kernels cannot index all elements of a large batch. cuDNN reports an unsupported operation, and cuBLAS a missing
initialization, if inputs are too large or memory is full, but also for other reasons.
"""

BROKEN = (
    "illegal memory access",
    "device-side assert",
    "misaligned address",
    "unspecified launch failure",
    "illegal instruction",
    "uncorrectable ecc",
    "device kernel image is invalid",
    "launch timed out",
    "ur_result_error_device_lost",
)
"""Texts of errors after which a device no longer works."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory is full, and not another failure."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return says(error, FULL) and not is_broken_device(error)


def is_too_large(error: BaseException) -> bool:
    """Return whether an error means that there are too many rows for a kernel, or may mean it; fewer rows may work."""
    return says(error, TOO_LARGE) and not is_out_of_memory(error) and not is_broken_device(error)


def is_broken_device(error: BaseException) -> bool:
    """Return whether all later work on this device would fail as well."""
    return says(error, BROKEN) or (
        isinstance(error, torch.AcceleratorError) and not says(error, FULL) and not says(error, TOO_LARGE)
    )


def says(error: BaseException, texts: tuple[str, ...]) -> bool:
    """Return whether a RuntimeError contains one of the texts. Errors of other types do not come from devices."""
    if not isinstance(error, RuntimeError):
        return False
    message = str(error).lower()
    return any(text in message for text in texts)


def attempt(call: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return the result of a call, or the error if it does not fit on the device, after freeing what the call held.

    Other errors are raised.
    """
    try:
        return call(), None
    except Exception as error:
        if not (is_out_of_memory(error) or is_too_large(error)):
            raise
        failure = error
    # The error's traceback references the frames of the call, and keeps their tensors alive.
    failure.__traceback__ = failure.__context__ = failure.__cause__ = None
    free_everything()
    return None, failure


def free_everything() -> None:
    """Collect garbage and release cached memory of the allocators."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.xpu.is_available():
        torch.xpu.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()
    if sys.platform == "linux":
        linux.give_back()
