"""Objectives: what a trainer minimizes.

The training loop, evaluations, checkpoints, splitting after out-of-memory errors, ranks and the batch-size search are
the same for all objectives. An objective defines a sum and a denominator per micro-batch. The loop adds up the
denominators of all micro-batches and ranks before the first backward pass and divides every sum by the total, so that
results depend neither on the number of micro-batches nor on the number of ranks.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast, runtime_checkable

from partita_schema.common.scalars import scalar
from partita_schema.errors import TrainingError, shortened
from partita_trainers.base import Batch, LanguageModel, Metrics, Trainer
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class WeightedMean:
    """A mean as a sum and its weight, so that means of micro-batches and ranks can be merged."""

    total: "torch.Tensor | float"
    """Sum of the weighted values: a number, or a scalar tensor, which is not read before the step's last pass."""
    weight: float
    """Sum of the weights, e.g. the number of rows."""

    def detach(self) -> "WeightedMean":
        """Return the same mean without its computation graph."""
        import torch

        return WeightedMean(self.total.detach(), self.weight) if isinstance(self.total, torch.Tensor) else self


@dataclass(frozen=True)
class ObjectiveContext:
    """The model and the ranks, passed to an objective."""

    lm: LanguageModel
    """The model to train."""
    module: "torch.nn.Module"
    """`lm.module`, or a wrapper of it made by accelerate or torch.compile."""
    process_group: ProcessGroup = SINGLE_PROCESS
    """The ranks of the step. A group of one in probes of batch sizes, where ranks may fail one by one."""
    noise_seed: "Callable[[Batch], int] | None" = None
    """Returns the seed of dropout and noise in `loss` for a micro-batch, if `prepare` is to use the same: in training
    steps."""
    full_weights: Callable[[], AbstractContextManager[None]] = nullcontext
    """Returns a context in which this rank has all weights, and can run the model without the others. If the weights
    are sharded, all ranks enter it together, before they have gradients."""

    def token_log_probs(self, batch: Batch) -> "torch.Tensor":
        """Return the log-probability of each loss token [N], float32; `batch.loss_token_rows` has their rows."""
        return self.lm.token_log_probs(self.module, batch)


class Objective(Protocol):
    """A loss and its denominator. Micro-batches are split between rows when memory runs out, never inside a row.

    One whose rows have branches (see `partita_trainers.Batch`) says so by an attribute `branched = True`; the batches
    that measure memory then have branches too.
    """

    def denominator(self, batch: Batch) -> float:
        """Return this micro-batch's part of the denominator, e.g. its loss tokens or its rows.

        The parts of a micro-batch that is split add up to the same number.
        """

    def prepare(self, context: ObjectiveContext, batches: Iterable[Batch]) -> None:
        """Compute what the losses of a whole step depend on, before the first of them. Often there is nothing to do.

        Called in evaluation mode, once per optimizer step, and once per split in an evaluation. If memory runs out, it
        is called again with smaller micro-batches. `loss` may then get still smaller ones, so keep results by row key.
        Values are sent to other ranks afterwards, by the method of a `SharedObjective`. With sharded weights, run the
        model in `with context.full_weights():`, because every pass outside of it involves all ranks, which may have
        different numbers of micro-batches.

        Args:
            context: The model and its process group.
            batches: The micro-batches of this rank; can be iterated several times.
        """

    def loss(self, context: ObjectiveContext, batch: Batch) -> "tuple[torch.Tensor, Mapping[str, WeightedMean]]":
        """Return a sum (not a mean) over the micro-batch, a float32 scalar on the device, and metrics by name.

        Run the model exactly once: with sharded weights every pass involves all ranks. Micro-batches without loss
        tokens are skipped in training.
        """


@runtime_checkable
class SharedObjective(Protocol):
    """An objective whose losses depend on rows of other ranks."""

    def exchange(self, context: ObjectiveContext) -> None:
        """Exchange what `prepare` has computed between the ranks (`context.process_group`).

        All ranks call this after `prepare`, also one on which it failed: the others would wait for it. That rank sends
        whatever it has, and the step ends with its error.
        """


def exchange(objective: Objective, context: ObjectiveContext) -> None:
    """Exchange values between ranks, if the objective is one that does."""
    if isinstance(objective, SharedObjective):
        objective.exchange(context)


def prepare(objective: Objective, context: ObjectiveContext, batches: Iterable[Batch]) -> None:
    """Run `prepare` and `exchange` of an objective where no other rank waits for this one, as in probes of memory."""
    objective.prepare(context, batches)
    exchange(objective, context)


def denominator_of(objective: Objective, batch: Batch) -> float:
    """Return the objective's denominator of a micro-batch. Raises TrainingError if it has returned no number."""
    denominator: object = scalar(objective.denominator(batch))
    if isinstance(denominator, int | float):
        return denominator
    called = f"{type(objective).__name__}.denominator"
    raise TrainingError(f"{called} returned {shortened(repr(denominator))}; return a number")


def loss_of(
    objective: Objective, context: ObjectiveContext, batch: Batch
) -> "tuple[torch.Tensor, Mapping[str, WeightedMean]]":
    """Return the objective's sum over a micro-batch, and its metrics.

    Raises:
        TrainingError: It has returned something else.
    """
    result: object = objective.loss(context, batch)
    found = mistake_in(result)
    if found is None:
        return cast("tuple[torch.Tensor, Mapping[str, WeightedMean]]", result)
    called = f"{type(objective).__name__}.loss"
    wanted = "(sum, metrics): a tensor with one number, and a dict of WeightedMean"
    raise TrainingError(f"{called} returned {found}; return {wanted}")


def mistake_in(result: object) -> str | None:
    """Return what is wrong with the result of `Objective.loss`; None if nothing is."""
    if not isinstance(result, tuple) or len(result) != 2:
        return shortened(repr(result))
    total, metrics = result
    if getattr(total, "ndim", None) != 0 or not callable(getattr(total, "backward", None)):
        return f"{shortened(repr(total))} as the sum"
    if not isinstance(metrics, Mapping):
        return f"{shortened(repr(metrics))} as the metrics"
    for name, mean in metrics.items():
        if not isinstance(mean, WeightedMean):
            return f"{shortened(repr(mean))}, which is no WeightedMean, as the metric {name}"
    return None


class ObjectiveRow(NamedTuple):
    """What an objective computes for one row."""

    loss: float
    """Its loss, a part of the sum."""
    values: Mapping[str, float]
    """Numbers that metrics of the objective are computed from, by name."""


@runtime_checkable
class RowObjective(Protocol):
    """An objective that has results of single rows: evaluations record them, for intervals and comparisons."""

    def objective_rows(self, batch: Batch) -> Sequence[ObjectiveRow]:
        """Return the result of each row of a batch, after its loss was computed."""


class CrossEntropy:
    """The cross-entropy of the loss tokens in nats, averaged over the loss tokens: supervised fine-tuning."""

    def __reduce__(self) -> str:
        """Return the name of the only instance, which is itself again in another process."""
        return "CROSS_ENTROPY"

    def denominator(self, batch: Batch) -> float:
        """Return the number of loss tokens."""
        return batch.loss_tokens

    def prepare(self, context: ObjectiveContext, batches: Iterable[Batch]) -> None:
        """Do nothing: each token's loss depends on its row only."""

    def loss(self, context: ObjectiveContext, batch: Batch) -> "tuple[torch.Tensor, Mapping[str, WeightedMean]]":
        """Return the sum of the cross-entropy over the loss tokens."""
        return context.lm.loss(context.module, batch), {}


CROSS_ENTROPY: Objective = CrossEntropy()


def objective_of(trainer: Trainer) -> Objective:
    """Return the trainer's attribute `objective`; cross-entropy for a trainer without one."""
    objective: Objective = getattr(trainer, "objective", CROSS_ENTROPY)
    return objective


def has_branches(objective: Objective) -> bool:
    """Return whether the rows of an objective have branches."""
    return bool(getattr(objective, "branched", False))


@dataclass(frozen=True)
class LossSums:
    """An objective over some micro-batches, as numbers."""

    loss: float = 0.0
    """Sum of the objective, not yet divided."""
    metrics: Mapping[str, WeightedMean] = field(default_factory=dict)
    """Its metrics."""

    @classmethod
    def merge(cls, parts: Sequence["LossSums"]) -> "LossSums":
        """Add up sums and metrics in order, in float64."""
        metrics: dict[str, WeightedMean] = {}
        for part in parts:
            for name, mean in part.metrics.items():
                before = metrics.get(name, WeightedMean(0.0, 0.0))
                metrics[name] = WeightedMean(before.total + float(mean.total), before.weight + float(mean.weight))
        return cls(float(sum(part.loss for part in parts)), metrics)


def metric_values(metrics: Mapping[str, WeightedMean], *, reserved: Collection[str]) -> Metrics:
    """Return the means of metrics, without those whose weight is 0.

    Raises TrainingError if a name is in `reserved`, the names of other values in the same record.
    """
    taken = sorted(set(metrics) & set(reserved))
    if taken:
        raise TrainingError(f"the objective reports a metric named {taken[0]}, which partita reports itself: rename it")
    return {name: float(mean.total) / mean.weight for name, mean in metrics.items() if mean.weight}
