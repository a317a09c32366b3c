"""Evaluation of the model without training."""

from partita_schema.sections.trainer import NoTrainer
from partita_trainers.base import Metrics, ProbeContext, TrainerContext, TrainResult


class ZeroShot:
    """Evaluates the configured splits with generated answers."""

    def __init__(self, config: NoTrainer) -> None:
        self.config = config

    def train(self, context: TrainerContext) -> TrainResult:
        """Return the metrics of the existing splits. No step is taken."""
        metrics: dict[str, Metrics] = {}
        for split in self.config.evaluate:
            if split in context.splits:
                metrics[split] = context.evaluate(split, step=0)
                context.run.report(metrics[split], step=0, split=split)
        return TrainResult(run=context.run.folder, metrics=metrics, steps=0)

    def probe(self, context: ProbeContext) -> None:
        """Return None: nothing is trained, so there is no training batch to probe."""
