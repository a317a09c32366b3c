"""A trainer from outside: sharpness-aware minimisation (Foret et al. 2020, algorithm 1)."""

from itertools import islice
from typing import Any

import torch

from partita_schema.errors import ConfigError, DataError, Problem
from partita_schema.trainer import CustomTrainer
from partita_trainers.base import Step, TrainResult, Work

DEFAULTS = {"steps": 240, "learning_rate": 1e-3, "radius": 0.02}


class SharpnessAware:
    """Follows the gradient at the worst place nearby instead of the one at the place itself."""

    def __init__(self, section: CustomTrainer) -> None:
        unknown = sorted(section.options.keys() - DEFAULTS)
        if unknown:
            message = f"unknown option; write one of {', '.join(DEFAULTS)}"
            raise ConfigError([Problem(f"trainer.options.{name}", message) for name in unknown])
        self.options: dict[str, Any] = {**DEFAULTS, **section.options}

    def train(self, work: Work) -> TrainResult:
        """Take the steps, save the model, evaluate it."""
        if work.batches is None:
            raise DataError("there are no training rows; write data.source")
        weights = [parameter for parameter in work.lm.module.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=self.options["learning_rate"])
        steps = self.options["steps"]
        work.run.truncate_log(0)  # a run that was stopped begins anew
        work.lm.prepare_training(steps)
        with work.lm.training(), work.run.progress(steps, "training") as progress:
            for number, step in enumerate(islice(work.batches.steps(), steps), start=1):
                loss = mean_loss(work, step)
                gradients = torch.autograd.grad(loss, weights, materialize_grads=True)
                norm = torch.nn.utils.get_total_norm(gradients)
                uphill = [gradient * (self.options["radius"] / (norm + 1e-12)) for gradient in gradients]
                move(weights, uphill, sign=1)
                mean_loss(work, step).backward()
                move(weights, uphill, sign=-1)
                optimizer.step()
                work.lm.after_step(number)
                optimizer.zero_grad()
                work.run.log_step({"step": number, "epoch": step.epoch, "loss": loss.item()})
                progress.advance(1, loss=loss.item())
        work.lm.save(work.run.folder / "model")
        metrics = {split: work.evaluate(split, True, None) for split in work.splits if split != "training"}
        for split, values in metrics.items():
            work.run.report(values, step=steps, split=split)
        return TrainResult(run=work.run.folder, metrics=metrics, steps=steps)


def mean_loss(work: Work, step: Step) -> torch.Tensor:
    """The step's loss a learned token."""
    batches = [batch for batch in step.batches if batch.loss_tokens]
    total = torch.stack([work.lm.loss(work.lm.module, batch) for batch in batches]).sum()
    return total / sum(batch.loss_tokens for batch in batches)


@torch.no_grad()
def move(weights: list[torch.nn.Parameter], way: list[torch.Tensor], *, sign: int) -> None:
    """Add a way to the weights, or take it back."""
    for weight, part in zip(weights, way, strict=True):
        weight.add_(part, alpha=sign)
