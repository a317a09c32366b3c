"""A custom trainer: sharpness-aware minimization (Foret et al. 2020, algorithm 1)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count, islice
from typing import Any

import torch

from partita import ConfigError, DataError, Problem
from partita_trainers import (
    Batch,
    Callbacks,
    CustomTrainer,
    LanguageModel,
    ProbeContext,
    TrainerContext,
    TrainingProbe,
    TrainResult,
)

DEFAULTS = {"steps": 240, "learning_rate": 1e-3, "radius": 0.02}


class SharpnessAware:
    """Takes each step with the gradient at the worst point nearby."""

    calls_callbacks = True

    def __init__(self, section: CustomTrainer) -> None:
        unknown = sorted(section.options.keys() - DEFAULTS)
        if unknown:
            message = f"unknown option; write one of {', '.join(DEFAULTS)}"
            raise ConfigError([Problem(f"trainer.options.{name}", message) for name in unknown])
        self.options: dict[str, Any] = {**DEFAULTS, **section.options}

    def train(self, context: TrainerContext) -> TrainResult:
        """Take the steps, save the model, evaluate it."""
        if context.batches is None:
            raise DataError("there are no training rows; write data.source")
        steps, taken = self.options["steps"], 0
        callbacks = Callbacks(context, total_steps=steps)
        callbacks.call("on_start")
        context.run.truncate_log(0)  # without checkpoints, a stopped run starts again at step 1
        with self.learning(context.lm) as take_step, context.run.progress(steps, "training") as progress:
            for taken, step in enumerate(islice(context.batches.steps(), steps), start=1):
                loss = take_step(step.micro_batches)
                record = {"step": taken, "epoch": step.epoch, "loss": loss}
                context.run.log_step(record)
                progress.advance(1, loss=loss)
                callbacks.call("on_step", step=taken, epoch=step.epoch, record=record)
                if callbacks.stopped_by is not None:
                    break
        context.lm.save(context.run.folder / "model")
        metrics = {split: context.evaluate(split) for split in context.splits if split != "training"}
        for split, values in metrics.items():
            context.run.report(values, step=taken, split=split)
        callbacks.call("on_end", results=metrics)
        return TrainResult(run=context.run.folder, metrics=metrics, steps=taken, stopped_early=taken < steps)

    def probe(self, context: ProbeContext) -> TrainingProbe:
        """Return a probe that takes the same steps on the longest rows, for `batch_size: auto`."""
        return TrainingProbe(context, partial(self.learning, context.lm))

    @contextmanager
    def learning(self, lm: LanguageModel) -> Iterator[Callable[[Sequence[Batch]], float]]:
        """Provide a function that takes a step and returns the loss per loss token."""
        weights = [parameter for parameter in lm.module.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=self.options["learning_rate"])
        numbers = count(1)
        lm.prepare_training(self.options["steps"])

        def take_step(batches: Sequence[Batch]) -> float:
            with lm.training():
                loss = mean_loss(lm, batches)
                gradients = torch.autograd.grad(loss, weights, materialize_grads=True)
                norm = torch.nn.utils.get_total_norm(gradients)
                uphill = [gradient * (self.options["radius"] / (norm + 1e-12)) for gradient in gradients]
                move(weights, uphill, sign=1)
                mean_loss(lm, batches).backward()
                move(weights, uphill, sign=-1)
                optimizer.step()
                lm.after_step(next(numbers))
                optimizer.zero_grad()
            return loss.item()

        yield take_step


def mean_loss(lm: LanguageModel, batches: Sequence[Batch]) -> torch.Tensor:
    """Return the loss per loss token."""
    total = torch.stack([lm.loss(lm.module, batch) for batch in batches if batch.loss_tokens]).sum()
    return total / sum(batch.loss_tokens for batch in batches)


@torch.no_grad()
def move(weights: list[torch.nn.Parameter], offsets: list[torch.Tensor], *, sign: int) -> None:
    """Add offsets to the weights, or subtract them if `sign` is -1."""
    for weight, part in zip(weights, offsets, strict=True):
        weight.add_(part, alpha=sign)
