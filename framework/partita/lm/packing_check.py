"""Test of how a model separates packed rows.

transformers detects packed rows by positions that restart, if there is no attention mask and no cache, and most
architectures then mask attention between rows. Some need a mask of token pairs instead, and some cannot do it:
recurrent and convolutional layers carry the state of a row into the next one. None of them raises; they would only
learn something else. So before training, two short rows are computed in one line and alone.

Shapes: B lines, T tokens of the longest.
"""

import logging
from typing import Any, Literal

import torch
from torch import nn

from partita.lm.loaded_model import LoadedModel, TextModel
from partita.lm.precision import quantized_layers
from partita.lm.products.int8_linear import int8_layers
from partita.lm.transformers_internals import attention_of
from partita_schema.errors import ModelError
from partita_schema.rules.adapters import NOT_PACKED

logger = logging.getLogger(__name__)

Isolation = Literal["positions", "mask"]
"""Model inputs in addition to the ids: positions only, or also a mask of token pairs."""

LENGTHS = (7, 9)
"""Tokens of the two rows."""
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4}
"""Relative error of the logits that rounding can explain, by dtype of unquantized weights."""
ROUGH_TOLERANCE = 0.03
"""The same for other dtypes, and for weights that bitsandbytes quantized."""
INT8_TOLERANCE = 0.06
"""The same if inputs are rounded to int8; 0.02 was measured in a model of 12 layers."""
ADVICE = "write data.batching: {type: bucket}"


def packed_inputs(positions_BT: torch.Tensor, *, isolation: Isolation, model: Any) -> dict[str, torch.Tensor]:
    """Return the model inputs of packed rows in addition to the ids, on the device of `positions_BT`."""
    if isolation == "positions":
        return {"position_ids": positions_BT}
    return {"position_ids": positions_BT, "attention_mask": pair_mask(positions_BT, model=model)}


def pair_mask(positions_BT: torch.Tensor, *, model: Any) -> torch.Tensor:
    """Return the attention mask [B, 1, T, T], causal within each row; additive unless attention is sdpa."""
    numbers_BT = (positions_BT == 0).cumsum(dim=1)
    seen_BTT = (numbers_BT[:, :, None] == numbers_BT[:, None, :]).tril()[:, None]
    if attention_of(model.config) == "sdpa":
        return seen_BTT
    dtype = model.dtype
    return torch.zeros(seen_BTT.shape, dtype=dtype, device=seen_BTT.device).masked_fill(
        ~seen_BTT, torch.finfo(dtype).min
    )


def find_isolation(lm: TextModel) -> Isolation:
    """Return how this model separates packed rows. Raise ModelError if it cannot."""
    name = type(lm.base).__name__
    if lm.virtual_tokens:
        raise ModelError(f"data.batching.type: {NOT_PACKED.format(lm.adapter_method)}")
    attention = attention_of(lm.base.config)
    if attention not in ("sdpa", "eager"):
        raise ModelError(
            f"data.batching.type: rows are packed with sdpa or eager attention only, and {name} has {attention}; write "
            f"model_parameters.attention: sdpa, or {ADVICE}"
        )
    candidates: list[Isolation] = ["positions"]
    if sees_all_before(lm.base.config.get_text_config()):
        candidates.append("mask")
    errors = [isolation_error(lm, isolation) for isolation in candidates]
    limit = rounding_limit(lm)
    for isolation, error in zip(candidates, errors, strict=True):
        if error is not None and error <= limit:
            logger.info(
                "packed rows are kept apart by %s: logits as alone, but for %.1e of their spread", isolation, error
            )
            return isolation
    problem = (
        "takes no positions, which tell where a row begins"
        if errors[0] is None
        else f"changes the logits of a row by {min(filter(None, errors)):.0%} if another row precedes it"
    )
    raise ModelError(f"data.batching.type: rows cannot be packed: {name} {problem}; {ADVICE}")


def rounding_limit(lm: LoadedModel) -> float:
    """Return the relative error of a model's logits that rounding can explain."""
    if int8_layers(lm.module):
        return INT8_TOLERANCE
    exact = not quantized_layers(lm.module)
    return TOLERANCE.get(lm.base.dtype, ROUGH_TOLERANCE) if exact else ROUGH_TOLERANCE


def sees_all_before(config: Any) -> bool:
    """Return whether every layer has full causal attention, so that one mask is right for all of them."""
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    kinds = getattr(config, "layer_types", None) or ()
    return not any(windows) and all(kind == "full_attention" for kind in kinds)


@torch.no_grad()
def isolation_error(lm: TextModel, isolation: Isolation) -> float | None:
    """Return the root mean square difference between packed and single logits of two rows, over their spread.

    Two lines contain the rows in either order, followed by a padding token. Returns None if the model rejects the
    inputs.
    """
    chance = torch.Generator().manual_seed(0)
    ordinary = torch.tensor(lm.token_ids)
    first, second = (ordinary[torch.randint(len(ordinary), (length,), generator=chance)] for length in LENGTHS)
    end = torch.full((2,), int(ordinary[0]))
    lines = [torch.cat([first, second, end[:1]]), torch.cat([second, first, end[:1]])]
    positions = [
        torch.cat([torch.arange(len(row)) for row in rows])
        for rows in ((first, second, end[:1]), (second, first, end[:1]))
    ]
    ids_BT, positions_BT = torch.stack(lines).to(lm.device), torch.stack(positions).to(lm.device)
    inputs = packed_inputs(positions_BT, isolation=isolation, model=lm.base)
    with lm.evaluating():
        alone = [logits_of(lm.module, row[None].to(lm.device))[0] for row in (first, second)]
        try:
            packed = logits_of(lm.module, ids_BT, **inputs)
        except (TypeError, ValueError, RuntimeError, IndexError) as refusal:
            logger.debug("packed rows by %s: %s", isolation, refusal)
            return None
    a, b = LENGTHS
    together = [packed[0, :a], packed[0, a : a + b], packed[1, :b], packed[1, b : a + b]]
    return relative_error(torch.cat(together), torch.cat([*alone, *alone[::-1]]))


def relative_error(together_NV: torch.Tensor, alone_NV: torch.Tensor) -> float | None:
    """Return the root mean square difference of logits over their spread; None if it is not finite."""
    spread = (alone_NV - alone_NV.mean(dim=-1, keepdim=True)).std()
    error = (together_NV - alone_NV).square().mean().sqrt() / spread
    return float(error) if torch.isfinite(error) else None


def logits_of(module: nn.Module, ids_BT: torch.Tensor, **given: torch.Tensor) -> torch.Tensor:
    """Return the logits [B, T, V] of a forward pass without KV cache, in float64."""
    logits: torch.Tensor = module(input_ids=ids_BT, use_cache=False, **given).logits.double()
    return logits
