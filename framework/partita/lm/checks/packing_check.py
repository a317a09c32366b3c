"""Test of how a model separates packed rows.

transformers detects packed rows by positions that restart, if there is no attention mask and no cache, and most
architectures then mask attention between rows. Some need a mask of token pairs instead, and some cannot do it:
recurrent and convolutional layers carry the state of a row into the next one. None of them raises; they would only
learn something else. So before training, two short rows are computed in one sequence and alone.

Shapes: B sequences, T tokens of the longest.
"""

import logging
from typing import Any, Literal

import torch

from partita.lm.checks.logit_check import REFUSALS, logits_of, random_rows, relative_error, rounding_limit
from partita.lm.loaded_model import TextModel
from partita.lm.transformers_internals import attention_of
from partita_schema.errors import ModelError
from partita_schema.rules.adapters import NOT_PACKED

logger = logging.getLogger(__name__)

Isolation = Literal["positions", "mask"]
"""Model inputs in addition to the ids: positions only, or also a mask of token pairs."""

LENGTHS = (7, 9)
"""Tokens of the two rows."""
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


def sees_all_before(config: Any) -> bool:
    """Return whether every layer has full causal attention, so that one mask is right for all of them."""
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    kinds = getattr(config, "layer_types", None) or ()
    return not any(windows) and all(kind == "full_attention" for kind in kinds)


@torch.no_grad()
def isolation_error(lm: TextModel, isolation: Isolation) -> float | None:
    """Return the root mean square difference between packed and single logits of two rows, over their spread.

    Two sequences contain the rows in either order, followed by a padding token. Returns None if the model rejects the
    inputs.
    """
    first, second = random_rows(lm.token_ids, LENGTHS)
    padding = torch.tensor(lm.token_ids[:1])
    sequences = [(first, second, padding), (second, first, padding)]
    ids_BT = torch.stack([torch.cat(rows) for rows in sequences]).to(lm.device)
    positions_BT = torch.stack([torch.cat([torch.arange(len(row)) for row in rows]) for rows in sequences]).to(
        lm.device
    )
    inputs = packed_inputs(positions_BT, isolation=isolation, model=lm.base)
    with lm.evaluating():
        alone = [logits_of(lm.module, row[None].to(lm.device))[0] for row in (first, second)]
        try:
            packed = logits_of(lm.module, ids_BT, **inputs)
        except REFUSALS as refusal:
            logger.debug("packed rows by %s: %s", isolation, refusal)
            return None
    a, b = LENGTHS
    together = [packed[0, :a], packed[0, a : a + b], packed[1, :b], packed[1, b : a + b]]
    return relative_error(torch.cat(together), torch.cat([*alone, *alone[::-1]]))
