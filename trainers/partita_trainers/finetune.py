"""Fine-tuning of all weights that require gradients, by the training loop of `partita_trainers.finetune_run`."""

from functools import partial

from partita_schema.errors import DataError
from partita_schema.sections.trainer import FinetuneTrainer
from partita_trainers.base import ProbeContext, TrainerContext, TrainResult
from partita_trainers.engine import dry_run
from partita_trainers.finetune_run import FinetuneRun, is_sharded
from partita_trainers.objective import CROSS_ENTROPY, Objective, has_branches
from partita_trainers.training_probe import TrainingProbe


class Finetune:
    """Trains all weights that require gradients on the answers of the training rows.

    A subclass, or a caller, may pass another objective; everything else stays the same.
    """

    sums_gradients = True
    """Gradients are summed over the ranks, as several processes require; derived trainers inherit that."""
    calls_callbacks = True
    """Callbacks are called."""

    def __init__(self, config: FinetuneTrainer, *, objective: Objective = CROSS_ENTROPY) -> None:
        self.config, self.objective = config, objective

    def train(self, context: TrainerContext) -> TrainResult:
        """Take all steps, then restore, save and evaluate the best weights.

        Raises:
            DataError: There are no training rows.
            ResumeError: The run cannot be continued, because its data or its checkpoint differ.
            DivergenceError: The loss or the gradients are not finite.
            TrainingError: A callback has failed, or training cannot continue.
        """
        if context.batches is None or context.batches.num_rows == 0:
            raise DataError("there are no training rows; write data.source, or pass a dataset to train")
        training = FinetuneRun(self.config, context, context.batches, objective=self.objective)
        try:
            self._before_training(training)
            resumed_from = training.resume()
            training.start_callbacks(resumed_from)
            training.train_loop()
            weights = training.end_training()
            self._after_training()
            result = training.finalize(weights, resumed_from=resumed_from)
        except BaseException:
            training.engine.release(failed=True)
            raise
        return result

    def _before_training(self, run: FinetuneRun) -> None:
        """Do nothing. Objectives are prepared here: the weights are those before the first step, also in a resume."""

    def _after_training(self) -> None:
        """Do nothing. Called before the final evaluation, which has no autocast."""

    def probe(self, context: ProbeContext) -> TrainingProbe:
        """Return a probe that takes the steps of `train` on the longest rows."""
        sharded = is_sharded(context.config)
        begin = partial(
            dry_run,
            self.config,
            context.lm,
            device=context.device,
            process_group=context.process_group,
            sharded=sharded,
            objective=self.objective,
            accumulates=context.accumulates,
        )
        return TrainingProbe(context, begin, branched=has_branches(self.objective))
