"""Evaluations of a training run."""

from collections.abc import Mapping
from dataclasses import dataclass

from partita.data.splits import TEST, TRAINING, VALIDATION
from partita.pipeline.eval_dataset import EvalDataset
from partita.pipeline.evaluate import LocalEvaluator, evaluate_dataset
from partita.pipeline.row_recorder import RecordedEvaluation
from partita.runs.directory import RunDirectory
from partita_schema.common.text import nearest
from partita_schema.errors import TrainingError
from partita_trainers.base import Metrics

EVALUATED = (VALIDATION, TEST)


@dataclass(frozen=True)
class Evaluations:
    """Evaluates a split during training: a `partita_trainers.base.Evaluate`."""

    evaluator: LocalEvaluator
    datasets: Mapping[str, EvalDataset]
    """Evaluation datasets, by split."""
    directory: RunDirectory

    def __call__(
        self, split: str, *, generated: bool = True, max_rows: int | None = None, step: int | None = None
    ) -> Metrics:
        """Compute the objective, and with `generated` metrics of generated answers.

        The results of the rows are recorded in the run, except those of the frequent evaluations that only compute the
        loss during training. Batch sizes that ran out of memory are recorded too.

        Args:
            split: Name of the split.
            generated: Whether answers are generated and scored.
            max_rows: Number of rows for which answers are generated, evenly spaced; None for all.
            step: Training step of the weights.

        Raises:
            TrainingError: There is no split of this name, or it is the training split.
        """
        if split == TRAINING:
            hint = "evaluate validation or test, or write the file of the training rows to data.test too"
            raise TrainingError("the training split is not evaluated", hint)
        if split not in EVALUATED:
            near = nearest(split, EVALUATED)
            hint = f"did you mean {near[0]}?" if near else f"the splits are {', '.join(EVALUATED)}"
            raise TrainingError(f"there is no split {split} to evaluate", hint)
        if split not in self.datasets:
            return {}
        recorded = generated or max_rows is None
        record = RecordedEvaluation(self.directory.folder, split, step=step) if recorded else None
        return self._evaluate(split, generated=generated, max_rows=max_rows, record=record)

    def base(self, split: str, *, generated: bool) -> Metrics:
        """Return the metrics of a split for the model before training, and record the results of its rows."""
        record = RecordedEvaluation(self.directory.folder, split, model="base", step=0)
        return self._evaluate(split, generated=generated, max_rows=None, record=record)

    def _evaluate(
        self, split: str, *, generated: bool, max_rows: int | None, record: RecordedEvaluation | None
    ) -> Metrics:
        evaluation = evaluate_dataset(
            self.evaluator,
            self.datasets[split],
            generated=generated,
            max_rows=max_rows,
            progress=self.directory.progress,
            record=record,
        )
        sizes = self.evaluator.sizes
        after = self.evaluator.tuner.after(sizes)
        if after != sizes:
            self.directory.note(batch_sizes=after.records())
        return evaluation.flat
