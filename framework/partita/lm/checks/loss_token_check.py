"""Test of whether a model can compute its last layer for the tokens that predict a label only.

Shapes: B sequences, T tokens of the longest, K selected tokens, V vocabulary.
"""

import logging

import torch

from partita.lm.checks.logit_check import REFUSALS, logits_of, random_rows, relative_error, rounding_limit
from partita.lm.loaded_model import TextModel
from partita.lm.losses.last_layer import last_layer
from partita.lm.losses.loss_token_layer import ATTENTION, LossTokenHook
from partita.lm.transformers_internals import attention_of
from partita_schema.sections.trainer import FinetuneTrainer

logger = logging.getLogger(__name__)

LINES, LENGTH = 3, 9
"""Shape of the batch that is tested."""
SELECTED = (3, 4, 7, 19, 22)
"""Indices of the selected tokens in the flattened sequences; none is in the second sequence."""


def find_loss_token_layer(lm: TextModel) -> LossTokenHook | None:
    """Return the last layer if it can be computed for selected tokens only, tested on random rows; None if not."""
    reason = why_not(lm)
    found = last_layer(lm.base) if reason is None else None
    if found is None:
        logger.debug("the last layer computes all tokens: %s", reason or "it cannot be identified")
        return None
    layer = LossTokenHook(found[0], lm.base.config)
    error = selection_error(lm, layer)
    if error is not None and error <= rounding_limit(lm):
        logger.debug("the last layer computes loss tokens only; relative difference of the logits: %.1e", error)
        return layer
    layer.close()
    logger.debug("the last layer computes all tokens; relative difference of the logits of selected tokens: %s", error)
    return None


def why_not(lm: TextModel) -> str | None:
    """Return why the last layer must compute all tokens; None if no reason is known."""
    trainer = lm.config.trainer
    if lm.device.type != "cpu":
        return "on a GPU a mask would cost more than is saved in one of many layers"
    if attention_of(lm.base.config) != ATTENTION:
        return f"attention is {attention_of(lm.base.config)}"
    if lm.virtual_tokens:
        return "virtual tokens precede the rows"
    if isinstance(trainer, FinetuneTrainer) and trainer.gradient_checkpointing:
        return "layers are computed again in the backward pass"
    if isinstance(trainer, FinetuneTrainer) and trainer.compile:
        return "compiled models cannot stop within a layer"
    if getattr(lm.base.config.get_text_config(), "output_router_logits", False):
        return "the loss of the router is over all tokens"
    return None


@torch.no_grad()
def selection_error(lm: TextModel, layer: LossTokenHook) -> float | None:
    """Return the difference of the logits between a pass that computes all tokens and one that computes selected ones.

    It is the root mean square, divided by the standard deviation of the logits. Returns None if the model does not
    support it.
    """
    ids_BT = torch.stack(random_rows(lm.token_ids, [LENGTH] * LINES)).to(lm.device)
    indices_K = torch.tensor(SELECTED)
    with lm.evaluating():
        try:
            all_KV = logits_of(lm.module, ids_BT).flatten(0, 1)[indices_K]
            with layer.only(indices_K):
                selected_1KV = logits_of(lm.module, ids_BT)
        except REFUSALS as refusal:
            logger.debug("the last layer for selected tokens: %s", refusal)
            return None
    if selected_1KV.shape != (1, *all_KV.shape):
        return None
    return relative_error(selected_1KV[0], all_KV)
