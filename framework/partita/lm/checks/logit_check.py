"""What all checks of a model on a few random rows share: the rows, the error of the logits, and its limit.

The checks run once, before the first use. They find out whether the model computes the same logits for rows in a batch,
in slots or in a packed sequence as for each row alone.
"""

from collections.abc import Sequence

import torch
from torch import nn

from partita.lm.loaded_model import LoadedModel
from partita.lm.precision import quantized_layers
from partita.lm.products.int8_linear import int8_layers

REFUSALS = (TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError)
"""Exceptions that models raise for unsupported inputs."""
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4}
"""Relative error of the logits that rounding can explain, by dtype of unquantized weights."""
ROUGH_TOLERANCE = 0.03
"""The same for other dtypes, and for weights that bitsandbytes quantized."""
INT8_TOLERANCE = 0.06
"""The same if inputs are rounded to int8; 0.02 was measured in a model of 12 layers."""


def rounding_limit(lm: LoadedModel) -> float:
    """Return the relative error of a model's logits that rounding can explain."""
    if int8_layers(lm.module):
        return INT8_TOLERANCE
    exact = not quantized_layers(lm.module)
    return TOLERANCE.get(lm.base.dtype, ROUGH_TOLERANCE) if exact else ROUGH_TOLERANCE


def random_rows(token_ids: Sequence[int], lengths: Sequence[int], *, seed: int = 0) -> list[torch.Tensor]:
    """Return rows of random tokens, one [T] for each length, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    ids_V = torch.tensor(token_ids)
    return [ids_V[torch.randint(len(ids_V), (length,), generator=generator)] for length in lengths]


def logits_of(module: nn.Module, ids_BT: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
    """Return the logits [B, T, V] of a forward pass without KV cache, in float64."""
    logits: torch.Tensor = module(input_ids=ids_BT, use_cache=False, **inputs).logits.double()
    return logits


def spread_of(logits_NV: torch.Tensor) -> torch.Tensor:
    """Return the standard deviation of logits [..., V], each around the mean of its token."""
    return (logits_NV - logits_NV.mean(dim=-1, keepdim=True)).std()


def relative_error(found_NV: torch.Tensor, alone_NV: torch.Tensor) -> float | None:
    """Return the root mean square difference of logits over their spread; None if it is not finite."""
    error = (found_NV - alone_NV).square().mean().sqrt() / spread_of(alone_NV)
    return float(error) if torch.isfinite(error) else None


def too_small(rows: int, tokens: int) -> str:
    """Return the error message of a device that has no memory for the rows of a check."""
    return (
        f"{rows} rows of {tokens} tokens do not fit in memory next to the model; free some, or write "
        "quantization: {bits: 4} or a smaller base_model"
    )


def largest_or_infinity(errors: torch.Tensor) -> float:
    """Return the largest error; infinity if one is NaN."""
    worst = float(errors.max())
    return worst if worst == worst else float("inf")
