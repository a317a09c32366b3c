"""One optimizer step over any number of batches, the same whatever the number.

The loss of a step is the sum over all its loss tokens divided by their count, so that cutting the same rows into more
batches changes nothing but the order of a sum.
"""

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator

from partita_schema.errors import TrainingError
from partita_schema.trainer import GradientClipping
from partita_trainers.base import Batch, LanguageModel, Step


@dataclass(frozen=True)
class Outcome:
    """What a step was."""

    loss: float
    """Mean cross-entropy of the step's loss tokens, in nats."""
    gradient_norm: float
    """Norm over all gradients before clipping."""


def take_step(
    step: Step,
    *,
    number: int,
    lm: LanguageModel,
    module: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    accelerator: Accelerator,
    clipping: GradientClipping,
) -> Outcome:
    """Forward, backward, clip, change the weights.

    Raises TrainingError before a loss that is not a number does harm.
    """
    loss_tokens = sum(batch.loss_tokens for batch in step.batches)
    losses = []
    with lm.training():
        for batch in step.batches:
            if batch.loss_tokens:
                losses.append(backward(batch, lm=lm, module=module, accelerator=accelerator, loss_tokens=loss_tokens))
        sums = torch.stack(losses).tolist()
        check_losses(sums, [batch for batch in step.batches if batch.loss_tokens], number=number)
        norm = clip(lm, accelerator=accelerator, clipping=clipping)
        if not math.isfinite(norm) and accelerator.scaler is None:
            raise TrainingError(
                f"step {number}: the norm of the gradients is {norm}. The weights of the last checkpoint are unharmed; "
                "lower trainer.learning_rate, or use model_parameters.dtype: float32"
            )
        for optimizer in optimizers:
            optimizer.step()
        lm.after_step(number)
        for optimizer in optimizers:
            optimizer.zero_grad()
    return Outcome(loss=sum(sums) / loss_tokens, gradient_norm=norm)


def backward(
    batch: Batch, *, lm: LanguageModel, module: torch.nn.Module, accelerator: Accelerator, loss_tokens: int
) -> torch.Tensor:
    total = lm.loss(module, batch)
    objective = total / loss_tokens
    extra = lm.auxiliary_loss()
    if extra is not None:
        objective = objective + extra * (batch.loss_tokens / loss_tokens)
    accelerator.backward(objective)
    return total.detach()


def check_losses(sums: list[float], batches: list[Batch], *, number: int) -> None:
    for total, batch in zip(sums, batches, strict=True):
        if total != total or total in (float("inf"), float("-inf")):
            rows = ", ".join(batch.keys[:8]) + (", ..." if batch.rows > 8 else "")
            raise TrainingError(
                f"step {number}: the loss is {total} on rows {rows}. The weights of the last checkpoint are unharmed; "
                "lower trainer.learning_rate, or use model_parameters.dtype: float32"
            )


def clip(lm: LanguageModel, *, accelerator: Accelerator, clipping: GradientClipping) -> float:
    """Limit the gradients; their norm before that comes back."""
    parameters = [parameter for parameter in lm.module.parameters() if parameter.requires_grad]
    limit = math.inf if clipping.clipglobalnorm is None else clipping.clipglobalnorm
    norm = float(accelerator.clip_grad_norm_(parameters, limit))
    if clipping.clipvalue is not None:
        accelerator.clip_grad_value_(parameters, clipping.clipvalue)
    return norm


def batch_hash(step: Step) -> str:
    """Hash of row keys, ids, masks and labels of a step: equal exactly when the step's work is."""
    digest = hashlib.blake2b(digest_size=8)
    for batch in step.batches:
        digest.update("\0".join(batch.keys).encode())
        for tensor in (batch.input_ids_BT, batch.lengths_B, batch.labels_BT):
            digest.update(str(tuple(tensor.shape)).encode())
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def step_record(step: Step, outcome: Outcome, *, number: int, learning_rate: float, seconds: float) -> dict[str, Any]:
    """A line of log.jsonl."""
    tokens = sum(batch.tokens for batch in step.batches)
    places = sum(batch.input_ids_BT.numel() for batch in step.batches)
    return {
        "step": number,
        "epoch": round(step.epoch, 6),
        "loss": outcome.loss,
        "learning_rate": learning_rate,
        "gradient_norm": outcome.gradient_norm,
        "rows": sum(batch.rows for batch in step.batches),
        "loss_tokens": sum(batch.loss_tokens for batch in step.batches),
        "tokens": tokens,
        "padding": round(1 - tokens / places, 6) if places else 0.0,
        "seconds": round(seconds, 4),
        "batch_hash": batch_hash(step),
    }
