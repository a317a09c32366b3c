"""Branches: several answers to one prompt in one row, which is computed once.

Tokens are in depth-first order, and each branch continues at the position after its prompt. Positions alone then say
what a token attends to: token i attends to token j <= i exactly if all tokens after j, up to i, have larger positions
than j. This holds for packed rows too, whose positions restart at 0.

transformers separates packed rows by positions, but not branches, so a model gets an attention mask for each type of
layer. A model that does not take one, or computes something else with it, gets each branch as a separate row, with
the prompt before it.

Shapes: B sequences, T tokens of the longest, S starts of rows and branches in a sequence, N branches.
"""

import logging
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from partita.lm.checks.logit_check import REFUSALS, logits_of, random_rows, relative_error, rounding_limit
from partita.lm.loaded_model import LoadedModel
from partita.lm.model_config.attention_windows import AttentionSpan, spans_of
from partita.lm.transformers_internals import attention_of
from partita_trainers.base import Batch

logger = logging.getLogger(__name__)

PROMPT_LENGTHS = (5, 3)
"""Tokens of the prompts of the rows that are tested ..."""
BRANCH_LENGTHS = ((4, 6), (3, 1))
"""... and of their branches."""


@dataclass(frozen=True)
class BranchSupport:
    """How a model computes rows with branches."""

    reason: str | None = None
    """Why each branch is computed as a separate row; None if the prompt is computed once."""


def find_branch_support(lm: LoadedModel) -> BranchSupport:
    """Return how a model computes rows with branches, tested on two short rows."""
    if lm.virtual_tokens:
        return BranchSupport(f"{lm.adapter_method} puts virtual tokens before each row")
    attention = attention_of(lm.base.config)
    if attention not in ("sdpa", "eager"):
        return BranchSupport(f"attention is {attention}, and masks of branches are for sdpa and eager")
    error = branch_error(lm)
    if error is None:
        return BranchSupport(f"{type(lm.base).__name__} takes no mask of pairs of tokens")
    if error > rounding_limit(lm):
        return BranchSupport(f"a mask of pairs of tokens changes the logits of {type(lm.base).__name__} by {error:.0%}")
    logger.info("a prompt is computed once for its branches: logits as alone, but for %.1e of their spread", error)
    return BranchSupport()


@torch.no_grad()
def branch_error(lm: LoadedModel) -> float | None:
    """Return the root mean square difference of the outputs of branches, with a mask and as rows, over their spread.

    Returns None if the model rejects the mask.
    """
    batch = probe_rows(lm.token_ids)
    rows = separate_rows(batch)
    assert batch.position_ids_BT is not None
    with lm.evaluating():
        alone_NTV = outputs_of(lm, rows.input_ids_BT.to(lm.device))
        try:
            ends_BT = ends_of_sight(batch.position_ids_BT).to(lm.device)
            inputs = branch_inputs(batch.position_ids_BT.to(lm.device), ends_BT, model=lm.base)
            together_BTV = outputs_of(lm, batch.input_ids_BT.to(lm.device), **inputs)
        except REFUSALS as refusal:
            logger.debug("branches with a mask: %s", refusal)
            return None
    return relative_error(together_BTV[batch.labels_BT != -100], alone_NTV[rows.labels_BT != -100])


def outputs_of(lm: LoadedModel, ids_BT: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """Return what a model computes for each token in float64: logits [B, T, V], or the hidden states below a head."""
    if lm.head is None:
        return logits_of(lm.module, ids_BT, **inputs)
    without_head = getattr(lm.base, lm.base.base_model_prefix)
    hidden_BTH: torch.Tensor = without_head(input_ids=ids_BT, use_cache=False, **inputs).last_hidden_state
    return hidden_BTH.double()


def probe_rows(token_ids: Any) -> Batch:
    """Return two random rows with two branches each, packed in one sequence, and once more in another with padding."""
    lengths = [prompt + sum(branches) for prompt, branches in zip(PROMPT_LENGTHS, BRANCH_LENGTHS, strict=True)]
    labels, positions = list[int](), list[torch.Tensor]()
    for prompt, branches in zip(PROMPT_LENGTHS, BRANCH_LENGTHS, strict=True):
        labels += [0] * prompt + [1] * sum(branches)
        positions += [torch.arange(prompt), *(prompt + torch.arange(branch) for branch in branches)]
    ids_T, positions_T = torch.cat(random_rows(token_ids, lengths)), torch.cat(positions)
    is_label_T = torch.tensor(labels).bool()
    first = lengths[0]
    shorter = torch.arange(len(ids_T)) < first
    ids_BT = torch.stack([ids_T, torch.where(shorter, ids_T, token_ids[0])])
    is_label_BT = torch.stack([is_label_T, is_label_T & shorter])
    return Batch(
        ids_BT,
        torch.where(is_label_BT, ids_BT, -100),
        torch.tensor([len(ids_T), first]),
        ("0", "1", "2"),
        torch.stack([positions_T, torch.where(shorter, positions_T, 0)]),
    )


def branch_inputs(positions_BT: torch.Tensor, ends_BT: torch.Tensor, *, model: Any) -> dict[str, Any]:
    """Return the model inputs of rows with branches in addition to the ids, on the device of `positions_BT`.

    The attention mask [B, 1, T, T] is one tensor, or one for each type of layer if the model has several types.

    Args:
        positions_BT: Positions of the tokens.
        ends_BT: Result of `ends_of_sight` for them, on the same device.
        model: The model.
    """
    spans = spans_of(model.config.get_text_config())
    masks = {kind: additive(mask(positions_BT, ends_BT, span), model=model) for kind, span in spans.items()}
    attention_mask = masks if len(masks) > 1 else next(iter(masks.values()))
    return {"position_ids": positions_BT, "attention_mask": attention_mask}


def mask(positions_BT: torch.Tensor, ends_BT: torch.Tensor, span: AttentionSpan) -> torch.Tensor:
    """Return what tokens of packed rows and branches attend to in a layer, bool [B, 1, T, T]."""
    seen_BTT = seen_tokens(ends_BT)
    if (near_BTT := span.visible(positions_BT[:, :, None], positions_BT[:, None, :])) is not None:
        seen_BTT &= near_BTT
    return seen_BTT[:, None]


def seen_tokens(ends_BT: torch.Tensor) -> torch.Tensor:
    """Return for each token which tokens of its row and branch it follows, with itself, bool [B, T, T]."""
    columns_T = torch.arange(ends_BT.shape[1], device=ends_BT.device)
    seen_BTT: torch.Tensor = columns_T[:, None] < ends_BT[:, None, :]
    return seen_BTT.tril_()


def ends_of_sight(positions_BT: torch.Tensor) -> torch.Tensor:
    """Return for each token the first later one whose position is not larger, which does not attend to it; T if none.

    Call it with positions on the host, because it reads how many starts there are. Between starts of rows and branches
    positions increase, so that one is always a start.
    """
    width = positions_BT.shape[1]
    columns_T = torch.arange(width, device=positions_BT.device)
    is_start_BT = positions_BT.diff(dim=1, prepend=positions_BT[:, :1] - 2) != 1
    most = int(is_start_BT.sum(1).max()) if positions_BT.numel() else 0
    starts_BS = torch.where(is_start_BT, columns_T, width).sort(dim=1).values[:, :most]
    start_positions_BS = positions_BT.gather(1, starts_BS.clamp(max=width - 1))
    hides_BST = (start_positions_BS[:, :, None] <= positions_BT[:, None, :]) & (starts_BS[:, :, None] > columns_T)
    first_BT = hides_BST.to(torch.uint8).argmax(dim=1)
    return torch.where(hides_BST.any(1), starts_BS.gather(1, first_BT), width)


def additive(mask_B1TT: torch.Tensor, *, model: Any) -> torch.Tensor:
    """Return a mask as the attention of a model takes it: bool for sdpa, numbers that are added for eager."""
    if attention_of(model.config) == "sdpa":
        return mask_B1TT
    empty = torch.zeros(mask_B1TT.shape, dtype=model.dtype, device=mask_B1TT.device)
    return empty.masked_fill(~mask_B1TT, torch.finfo(model.dtype).min)


def separate_rows(batch: Batch) -> Batch:
    """Return the branches of a batch as rows, each with its prompt before it; loss tokens keep their order."""
    assert batch.position_ids_BT is not None
    row_starts_BT, branch_starts_BT = batch.row_starts(), batch.branch_starts()
    ids, labels, keys = list[torch.Tensor](), list[torch.Tensor](), list[str]()
    names = iter(batch.keys)
    for sequence, length in enumerate(batch.lengths_B.tolist()):
        starts = row_starts_BT[sequence].nonzero()[:, 0].tolist()
        for start, end in zip(starts, [*starts[1:], length], strict=True):
            row, key = slice(start, end), next(names)
            ids_T, labels_T = batch.input_ids_BT[sequence, row], batch.labels_BT[sequence, row]
            others = branch_starts_BT[sequence, row].nonzero()[:, 0].tolist()
            prompt = int(batch.position_ids_BT[sequence, start + others[0]]) if others else 0
            bounds = [prompt, *others, end - start]
            for first, last in pairwise(bounds):
                ids.append(torch.cat([ids_T[:prompt], ids_T[first:last]]))
                before = torch.full((prompt,), -100) if first > prompt else labels_T[:prompt]
                labels.append(torch.cat([before, labels_T[first:last]]))
                keys.append(key)
    return Batch(
        torch.nn.utils.rnn.pad_sequence(ids, batch_first=True),
        torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100),
        torch.tensor([len(row) for row in ids]),
        tuple(keys),
    )
