"""Sweeps: several runs of one file, each with other values, to find the best ones."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from partita_schema.base import ConfigModel, InnerFraction, Name, NonNegativeInt, Number, PositiveInt, rule_error

AnyInt = Annotated[int, Field(strict=True)]
Bounds = tuple[Number, Number]
IntBounds = tuple[AnyInt, AnyInt]
FIXED_KEYS = ("sweep", "backend", "version", "model_type", "extends")
"""Keys that are the same in all trials."""


class SearchSpace(ConfigModel):
    """The values of a parameter, by one of these keys."""

    choice: Annotated[tuple[object, ...], Field(min_length=1)] | None = None
    """A list of values, the same as the list alone."""
    uniform: Bounds | None = None
    """Lower and upper limit of a number; all values between them are equally likely."""
    log_uniform: Bounds | None = None
    """Lower and upper limit of a positive number; all orders of magnitude between them are equally likely."""
    int: IntBounds | None = None
    """Lower and upper limit of an integer; both are possible."""
    log_int: IntBounds | None = None
    """Lower and upper limit of a positive integer; all orders of magnitude between them are equally likely."""
    step: PositiveInt | None = None
    """Distance between neighbouring values of `int`. Default: 1."""

    @model_validator(mode="after")
    def one_distribution(self) -> "SearchSpace":
        written = [key for key in DISTRIBUTIONS if getattr(self, key) is not None]
        if len(written) != 1:
            found = " and ".join(written) or "none of them"
            raise rule_error(f"write one of {', '.join(DISTRIBUTIONS)}; got {found}", at=written[1] if written else "")
        if self.step is not None and self.int is None:
            raise rule_error("step has no effect without int; remove it", at="step")
        return self

    @model_validator(mode="after")
    def bounds_are_in_order(self) -> "SearchSpace":
        for key in DISTRIBUTIONS[1:]:
            bounds = getattr(self, key)
            if bounds is not None and bounds[0] >= bounds[1]:
                raise rule_error(f"the lower limit {bounds[0]:g} is not below the upper {bounds[1]:g}", at=key)
            if bounds is not None and key.startswith("log_") and bounds[0] <= 0:
                raise rule_error(f"a logarithm needs limits above 0; got {bounds[0]:g}", at=key)
        return self


DISTRIBUTIONS = ("choice", "uniform", "log_uniform", "int", "log_int")


def check_parameters(parameters: dict[str, object]) -> dict[str, object]:
    """Refuse sweeps without parameters, of keys that all trials share, and of a key inside another one."""
    if not parameters:
        raise rule_error("there is no parameter; write a key of the file and its values, such as adapter.r: [8, 16]")
    for key in parameters:
        if key.partition(".")[0] in FIXED_KEYS:
            raise rule_error(f"{key} is the same in all trials; remove it")
        outer = next((other for other in parameters if key.startswith(f"{other}.")), None)
        if outer is not None:
            raise rule_error(f"{key} is inside {outer}, which is a parameter as well; remove one of them")
    return parameters


class HyperbandPruner(ConfigModel):
    """Stop trials at growing shares of the run, unless they are among the best third there (Li et al. 2018)."""

    type: Literal["hyperband"]
    """Hyperband."""
    min_share: InnerFraction = 0.1
    """Share of its steps that every trial takes."""
    reduction_factor: Annotated[int, Field(strict=True, ge=2)] = 3
    """One of this many trials continues at each decision."""


class SuccessiveHalvingPruner(HyperbandPruner):
    """Stop trials at growing shares of the run, unless they are among the best ones there (Jamieson et al. 2016)."""

    type: Literal["successive_halving"]  # type: ignore[assignment]
    """Successive halving; hyperband with one first decision instead of several."""


class MedianPruner(ConfigModel):
    """Stop trials whose best value so far is worse than the median of the others at the same share of the run."""

    type: Literal["median"]
    """The median rule."""
    min_share: InnerFraction = 0.1
    """Share of its steps that every trial takes."""
    startup_trials: PositiveInt = 5
    """Number of finished trials with a value at this share that a decision needs."""


Pruner = Annotated[HyperbandPruner | SuccessiveHalvingPruner | MedianPruner, Field(discriminator="type")]


class SweepConfig(ConfigModel):
    """Several runs of this file with other values, and the metric that compares them (`partita sweep`)."""

    parameters: Annotated[
        dict[str, Annotated[tuple[object, ...], Field(min_length=1)] | SearchSpace], AfterValidator(check_parameters)
    ]
    """The keys to vary, with dots between sections, each with a list of values or a range: `adapter.r: [8, 16]`,
    `trainer.learning_rate: {log_uniform: [1e-5, 1e-3]}`."""
    metric: Name | None = None
    """Metric on the validation rows that compares trials: loss, a metric of the first output, or `OUTPUT.METRIC`; of
    documents also bits_per_byte and perplexity. Default: trainer.validation_metric, if no parameter changes what it
    measures."""
    mode: Literal["minimize", "maximize"] | None = None
    """Whether low or high values of the metric are better. Default: known for each metric."""
    trials: PositiveInt | None = None
    """Number of trials. Default: all combinations with sampler: grid, otherwise 16."""
    sampler: Literal["grid", "random", "tpe"] = "tpe"
    """How values are chosen. grid: all combinations, in order. random: independently. tpe: from the results of earlier
    trials (tree-structured Parzen estimator, Bergstra et al. 2011)."""
    pruner: Pruner | None = None
    """Stops trials early that are worse than others at the same share of the run. Default: none."""
    seed: NonNegativeInt | None = None
    """Seed of the choice of values. Default: the seed of the file."""
    max_concurrent_trials: PositiveInt = 4
    """Trials that may run at the same time. A trial is chosen, and stopped early, from the results of the trials that
    are at least this many before it, so results do not depend on the number of workers."""
    workers: PositiveInt = 1
    """Number of processes that run trials, as `--workers`; results do not depend on it. On Ray, it is
    backend.workers."""


def values_of(space: object) -> Sequence[object] | None:
    """Return the values of a parameter, or None if it is a range of real numbers."""
    if not isinstance(space, SearchSpace):
        return space if isinstance(space, tuple) else None
    if space.choice is not None:
        return space.choice
    if space.int is not None:
        return range(space.int[0], space.int[1] + 1, space.step or 1)
    return None


def combinations(sweep: SweepConfig) -> int | None:
    """Return the number of combinations of values, or None if it is infinite."""
    total = 1
    for space in sweep.parameters.values():
        values = values_of(space)
        if values is None:
            return None
        total *= count_values(values)
    return total


def count_values(values: Sequence[object]) -> int:
    """Return the number of values, also of a range that is too long for `len`."""
    return -(-(values.stop - values.start) // values.step) if isinstance(values, range) else len(values)


DEFAULT_TRIALS = 16


def num_trials(sweep: SweepConfig) -> int:
    """Return the number of trials; of a grid, at most its combinations."""
    total = combinations(sweep) if sweep.sampler == "grid" else None
    if total is not None:
        return min(total, sweep.trials or total)
    return sweep.trials or DEFAULT_TRIALS
