"""Whether a trial is stopped early: its last evaluation, compared with earlier trials at the same share of their steps.

Trials are evaluated at other shares if they have other numbers of steps or epochs, and Optuna's pruners compare values
of the same step only. So each decision is a study of its own: of every other trial, the pruner gets the last value at
or before the share of this evaluation, never a later one.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import count, takewhile
from typing import TYPE_CHECKING, Literal
from zlib import crc32

from partita.runs.sweep_record import Trial, TrialEvaluation
from partita_schema.sections.sweep import HyperbandPruner, MedianPruner, Pruner, SuccessiveHalvingPruner

if TYPE_CHECKING:
    from optuna.pruners import BasePruner

Direction = Literal["minimize", "maximize"]
UNITS = 1000
"""Shares are compared in thousandths, in which 1/3 of the steps is the same for any number of steps."""
STEP = 1
"""The step of a study that all its values have."""
STUDY = "sweep"
"""Name that decides, with the number of a trial, its first decision in hyperband."""


def is_stopped(
    pruner: Pruner, curve: Sequence[TrialEvaluation], *, number: int, known: Sequence[Trial], direction: Direction
) -> bool:
    """Return whether a pruner stops a trial at its last evaluation. At the end there is nothing to stop.

    Args:
        pruner: The section `pruner`.
        curve: Values of the metric in the trial so far.
        number: Number of the trial.
        known: The earlier trials whose results are used.
        direction: Whether low or high values are better: minimize or maximize.
    """
    last = curve[-1]
    if last.share >= 1:
        return False
    if isinstance(pruner, MedianPruner):
        best = (min if direction == "minimize" else max)(one.value for one in curve)
        others = [trial for trial in known if trial.result is not None and trial.result.state == "done"]
        may_stop = units_of(last) >= round(pruner.min_share * UNITS)
        return may_stop and asked(median_of(pruner), best, list(values_at(last, others)), direction=direction)
    rungs = list(rungs_of(pruner, number))
    passed = [sum(rung <= units_of(one) for rung in rungs) for one in curve]
    if not passed[-1] or passed[-1] in passed[:-1]:
        return False
    rung = rungs[passed[-1] - 1]
    others = [trial for trial in known if has_reached(trial, rung) and rungs[0] == next(rungs_of(pruner, trial.number))]
    return asked(halving_of(pruner), last.value, list(values_at(last, others)), direction=direction)


def asked(pruner: "BasePruner", value: float, others: Sequence[float], *, direction: Direction) -> bool:
    """Return whether a pruner of Optuna stops a trial whose value is compared with others.

    Args:
        pruner: The pruner.
        value: The value of the trial.
        others: Values of the other trials at the same share.
        direction: minimize or maximize.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction=direction, pruner=pruner)
    stop = False
    for one in (*others, value):
        trial = study.ask()
        trial.report(one, STEP)
        stop = trial.should_prune()
        study.tell(trial, one)
    return bool(stop)  # a value of NumPy from some pruners


def median_of(pruner: MedianPruner) -> "BasePruner":
    """Return the median rule, which needs the values of `startup_trials` trials."""
    from optuna.pruners import MedianPruner as Median

    return Median(n_startup_trials=pruner.startup_trials)


def halving_of(pruner: HyperbandPruner) -> "BasePruner":
    """Return one decision of successive halving."""
    from optuna.pruners import SuccessiveHalvingPruner as SuccessiveHalving

    return SuccessiveHalving(min_resource=STEP, reduction_factor=pruner.reduction_factor)


def values_at(evaluation: TrialEvaluation, trials: Sequence[Trial]) -> Iterator[float]:
    """Yield the last value of each trial at or before the share of an evaluation, of those that have one."""
    for trial in trials:
        curve = trial.result.curve if trial.result is not None else ()
        before = [one.value for one in curve if units_of(one) <= units_of(evaluation)]
        yield from before[-1:]


def has_reached(trial: Trial, rung: int) -> bool:
    """Return whether a trial was evaluated at or after a share, in thousandths."""
    return trial.result is not None and any(units_of(one) >= rung for one in trial.result.curve)


def rungs_of(pruner: HyperbandPruner, number: int) -> Iterator[int]:
    """Yield the shares of a trial, in thousandths, at whose first evaluations it is compared with others."""
    first, factor = max(1, round(pruner.min_share * UNITS)), pruner.reduction_factor
    skipped = 0 if isinstance(pruner, SuccessiveHalvingPruner) else bracket_of(pruner, number)
    yield from takewhile(lambda rung: rung <= UNITS, (first * factor**power for power in count(skipped)))


def bracket_of(pruner: HyperbandPruner, number: int) -> int:
    """Return how many of its first decisions a trial of hyperband leaves out, as in Optuna's HyperbandPruner."""
    least, factor = max(1, round(pruner.min_share * UNITS)), pruner.reduction_factor
    brackets = math.floor(math.log(UNITS / least, factor)) + 1
    weights = [math.ceil(brackets * factor**left / (left + 1)) for left in reversed(range(brackets))]
    place = crc32(f"{STUDY}_{number}".encode()) % sum(weights)
    return next(index for index in range(brackets) if place < sum(weights[: index + 1]))


def units_of(evaluation: TrialEvaluation) -> int:
    """Return the share of the steps of an evaluation, in thousandths."""
    return round(evaluation.share * UNITS)
