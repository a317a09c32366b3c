"""Decides whether a trial is stopped early, by comparing it with earlier trials at the same share of their steps.

Optuna's pruners compare only values of the same step number. But trials with different numbers of steps or epochs are
evaluated at different shares of their run. Therefore each decision creates a new Optuna study: it holds one value per
earlier trial, which is its last value at or before the share of the current evaluation.
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
"""Shares are rounded to thousandths, so that a third of the steps is the same share for any number of steps."""
STEP = 1
"""Step number of all values in the study of a decision."""
STUDY = "sweep"
"""Part of the hash from which hyperband chooses the bracket of a trial, as the study name is in Optuna."""


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
        return may_stop and pruner_stops(median_of(pruner), best, list(values_at(last, others)), direction=direction)
    rungs = list(rungs_of(pruner, number))
    passed = [sum(rung <= units_of(one) for rung in rungs) for one in curve]
    if not passed[-1] or passed[-1] in passed[:-1]:
        return False
    rung = rungs[passed[-1] - 1]
    others = [trial for trial in known if has_reached(trial, rung) and rungs[0] == next(rungs_of(pruner, trial.number))]
    return pruner_stops(halving_of(pruner), last.value, list(values_at(last, others)), direction=direction)


def pruner_stops(pruner: "BasePruner", value: float, others: Sequence[float], *, direction: Direction) -> bool:
    """Return whether a pruner of Optuna stops a trial with this value, given those of other trials.

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
    """Yield the last value at or before the share of an evaluation, for each trial that has one."""
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
