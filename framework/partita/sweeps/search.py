"""Which values a trial has, and whether it is stopped early: functions of the trials before it, computed by Optuna.

Trial k is chosen from the results of trials 0 to k - n, where n is `max_concurrent_trials`; trials k - n + 1 to k - 1
count as running. Nothing else enters, so the trials are the same for any number of workers up to n and after kills, and
the only stored state is the result of each trial. Parameters are taken in alphabetical order, so their order in the
file has no effect.
"""

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from partita.runs.sweep_record import Trial, TrialEvaluation, TrialResult
from partita.sweeps.early_stops import Direction, is_stopped, units_of
from partita_schema.common.hashing import hash_to_int
from partita_schema.sections.sweep import SearchSpace, SweepConfig, count_values, values_of

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

MAX_STARTUP_TRIALS = 10
"""Maximum number of random trials before tpe uses results, as in Optuna."""


@dataclass(frozen=True)
class Search:
    """The choice of the values of trials."""

    sweep: SweepConfig
    direction: Direction
    seed: int

    def values(self, earlier: Sequence[Trial]) -> dict[str, Any]:
        """Return the values of the next trial.

        Args:
            earlier: All trials before it. Results of the last `max_concurrent_trials - 1` of them are not used.
        """
        number = len(earlier)
        if self.sweep.sampler == "grid":
            return self.grid_values(number)
        study = self.study(earlier, self.known(number))
        chosen = study.ask(self.distributions()).params
        return {key: self.decoded(key, chosen[key]) for key in self.sweep.parameters}

    def known(self, number: int) -> int:
        """Return how many trials must have ended before trial `number` is chosen or stopped early."""
        return max(0, number + 1 - self.sweep.max_concurrent_trials)

    def awaited(self, number: int) -> int:
        """Return how many trials must have ended before trial `number` can start."""
        uses_results = self.sweep.sampler == "tpe" or self.sweep.pruner is not None
        return self.known(number) if uses_results else 0

    def grid_values(self, number: int) -> dict[str, Any]:
        """Return a combination of the grid; the last parameter in alphabetical order varies fastest."""
        chosen: dict[str, Any] = {}
        for key, space in sorted(self.sweep.parameters.items(), reverse=True):
            values = values_of(space) or ()
            number, index = divmod(number, count_values(values))
            chosen[key] = values[index]
        return {key: chosen[key] for key in self.sweep.parameters}

    def should_stop(self, earlier: Sequence[Trial], curve: Sequence[TrialEvaluation]) -> bool:
        """Return whether to stop a trial at its last evaluation.

        Args:
            earlier: All trials before it. Results of the last `max_concurrent_trials - 1` of them are not used.
            curve: Values of the metric in the trial so far.
        """
        if self.sweep.pruner is None or not curve:
            return False
        number = len(earlier)
        # A trial that repeats an earlier one was not run: its result would count twice.
        known = [trial for trial in earlier[: self.known(number)] if trial.repeats is None]
        return is_stopped(self.sweep.pruner, curve, number=number, known=known, direction=self.direction)

    def study(self, earlier: Sequence[Trial], known: int) -> "Study":
        """Return a study in memory with the results of the first `known` trials; the others are running.

        Args:
            earlier: All trials before the next one.
            known: Number of trials whose results are used.
        """
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        distributions = self.distributions()
        with warnings.catch_warnings(action="ignore"):
            study = optuna.create_study(direction=self.direction, sampler=self.sampler(len(earlier)))
            for trial in earlier:
                study.add_trial(
                    self.frozen(trial, distributions, result=trial.result if trial.number < known else None)
                )
        return study

    def frozen(
        self, trial: Trial, distributions: "dict[str, BaseDistribution]", *, result: TrialResult | None
    ) -> "FrozenTrial":
        """Return a trial for Optuna.

        Args:
            trial: The trial.
            distributions: Distributions by parameter.
            result: Its result, or None while it counts as running.
        """
        import optuna
        from optuna.trial import TrialState

        params = {key: self.encoded(key, value) for key, value in trial.values.items()}
        if result is None:
            return optuna.trial.create_trial(state=TrialState.RUNNING, params=params, distributions=distributions)
        states = {"done": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}
        return optuna.trial.create_trial(
            state=states[result.state],
            value=result.value,
            params=params,
            distributions=distributions,
            intermediate_values={units_of(one): one.value for one in result.curve},
        )

    def sampler(self, number: int) -> "BaseSampler":
        """Return the sampler of a trial, with its own seed."""
        from optuna.samplers import RandomSampler, TPESampler

        seed = hash_to_int(f"{self.seed}:{number}", num_bytes=4)
        if self.sweep.sampler != "tpe":
            return RandomSampler(seed=seed)
        startup = max(self.sweep.max_concurrent_trials, 2 * len(self.sweep.parameters))
        return TPESampler(seed=seed, n_startup_trials=min(MAX_STARTUP_TRIALS, startup), constant_liar=True)

    def distributions(self) -> "dict[str, BaseDistribution]":
        """Return Optuna's distributions by parameter, in alphabetical order, in which Optuna draws values."""
        return {key: self.distribution(space) for key, space in sorted(self.sweep.parameters.items())}

    def distribution(self, space: object) -> "BaseDistribution":
        """Return Optuna's distribution of a parameter; values of a list are categories, as JSON."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        match space:
            case SearchSpace(uniform=(low, high)):
                return FloatDistribution(low, high)
            case SearchSpace(log_uniform=(low, high)):
                return FloatDistribution(low, high, log=True)
            case SearchSpace(int=(int() as low, int() as high), step=step):
                step = step or 1
                return IntDistribution(low, low + (high - low) // step * step, step=step)
            case SearchSpace(log_int=(low, high)):
                return IntDistribution(low, high, log=True)
        return CategoricalDistribution([json.dumps(value) for value in values_of(space) or ()])

    def encoded(self, key: str, value: Any) -> Any:
        """Return a value for Optuna: a category as JSON."""
        return json.dumps(value) if self.is_categorical(key) else value

    def decoded(self, key: str, value: Any) -> Any:
        """Return a value of Optuna as a value of the file."""
        return json.loads(value) if self.is_categorical(key) else value

    def is_categorical(self, key: str) -> bool:
        """Return whether a parameter has a list of values."""
        space = self.sweep.parameters[key]
        return not isinstance(space, SearchSpace) or space.choice is not None
