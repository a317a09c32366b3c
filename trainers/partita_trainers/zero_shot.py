"""Nothing is trained: the model is evaluated as it is."""

from partita_schema.trainer import NoTrainer
from partita_trainers.base import Metrics, ProbeContext, TrainerContext, TrainResult


class ZeroShot:
    """Evaluates the splits that the file names, with generated answers."""

    def __init__(self, config: NoTrainer) -> None:
        self.config = config

    def train(self, context: TrainerContext) -> TrainResult:
        """Metrics of the splits that there are; no weight changes and no step is taken."""
        metrics: dict[str, Metrics] = {}
        for split in self.config.evaluate:
            if split in context.splits:
                metrics[split] = context.evaluate(split, True, None)
                context.run.report(metrics[split], step=0, split=split)
        return TrainResult(run=context.run.folder, metrics=metrics, steps=0)

    def probe(self, context: ProbeContext) -> None:
        """None: nothing is trained, so there is no batch of training to try."""
