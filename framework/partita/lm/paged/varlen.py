"""Attention to a paged KV cache with torch's kernel for rows of different lengths, on GPUs.

Written from the source of torch 2.13, and not run on a GPU: `torch.nn.attention.varlen` takes a block table with
FlashAttention 3 and 4, which are separate packages, and not with the FlashAttention 2 that torch ships.
"""

import importlib
import logging
from functools import cache

import torch

from partita.lm.paged.attention import Scoring
from partita.lm.paged.cache import PagedPass
from partita_schema.common.text import describe_error

logger = logging.getLogger(__name__)

KERNELS = {9: ("FA3", "flash_attn_interface"), 10: ("FA4", "flash_attn.cute")}
"""Name and module of the kernel that takes a block table, by the major number of the GPU's compute capability."""
TYPES = (torch.float16, torch.bfloat16)
BLOCK_TOKENS = 128
"""Tokens of a block: FlashAttention 4 reads tiles of 128."""


def why_no_varlen(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the kernel cannot be used; None if it can."""
    if device.type != "cuda":
        return f"torch's varlen attention needs a GPU, and the model is on {device.type}"
    if dtype not in TYPES:
        return f"torch's varlen attention needs dtype: bfloat16 or float16, and the model has {dtype}"
    major = torch.cuda.get_device_capability(device)[0]
    if major not in KERNELS:
        return f"no kernel of torch's varlen attention takes a block table on GPUs of compute capability {major}"
    name, module = KERNELS[major]
    problem = import_problem(module)
    return f"torch's varlen attention takes a block table from {name} only, and {problem}" if problem else None


@cache
def import_problem(module: str) -> str | None:
    """Return why a module cannot be imported, such as one that was compiled for another torch; None if it can."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        return f"the module {error.name} is missing"
    except Exception as error:  # of any kind: the module initializes CUDA code
        return f"the module {module} cannot be imported: {describe_error(error)}"
    return None


class VarlenAttention:
    """Attention with `torch.nn.attention.varlen.varlen_attn`."""

    block_tokens = BLOCK_TOKENS

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.activated = False

    def open(self) -> None:
        """Activate the kernel that takes a block table, if the process has not chosen one."""
        from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl

        if self.device.type == "cuda" and current_flash_attention_impl() is None:
            activate_flash_attention_impl(KERNELS[torch.cuda.get_device_capability(self.device)[0]][0])
            self.activated = True

    def __call__(
        self,
        query_THD: torch.Tensor,
        keys_PKHD: torch.Tensor,
        values_PKHD: torch.Tensor,
        now: PagedPass,
        scoring: Scoring,
    ) -> torch.Tensor:
        """Return the output of all tokens [T, H * G, D]; see `PagedAttention`.

        Raises:
            NotImplementedError: The layer limits its scores or has sinks.
        """
        from torch.nn.attention.varlen import varlen_attn

        if scoring.softcap is not None or scoring.sinks is not None:
            raise NotImplementedError("torch's varlen attention has neither a limit of the scores nor sinks")
        # The window of the kernel is the number of tokens before the token itself.
        before = -1 if scoring.window is None else scoring.window - 1
        output = varlen_attn(
            query_THD,
            keys_PKHD,
            values_PKHD,
            now.starts_Nplus1,
            None,
            now.longest_part,
            now.tables_NM.shape[1] * self.block_tokens,
            scale=scoring.scale,
            window_size=(before, 0),
            enable_gqa=query_THD.shape[1] != keys_PKHD.shape[2],
            seqused_k=now.lengths_N,
            block_table=now.tables_NM,
        )
        assert isinstance(output, torch.Tensor)  # with return_aux it is a tuple
        return output

    def close(self) -> None:
        """Restore the kernel that torch ships."""
        from torch.nn.attention import restore_flash_attention_impl

        if self.activated:
            restore_flash_attention_impl()
            self.activated = False
