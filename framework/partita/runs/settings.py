"""Settings of a run that is started again: which keys may differ from those recorded in its manifest."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from partita_schema.common.text import value_text
from partita_schema.errors import ConfigError, Problem, ResumeError

LOCATION_KEYS = ("backend",)
"""Keys that may differ between starts of the same file: where the run takes place. `result_keys` adds others."""

BESIDE_ROUNDS = ("simulation.tasks", "simulation.history", "simulation.repeats", "simulation.limits")
"""Keys of the simulation that do not affect self-training."""

KEYS_OF_TRAINING = (
    "trainer.keep_checkpoints",
    "trainer.checkpoints_per_epoch",
    "trainer.steps_per_checkpoint",
    "trainer.minutes_per_checkpoint",
    "trainer.memory_budget",
    "data.loader",
    "data.encode",
    "data.resume",
    "tracking",
    "callbacks",
    "backend",
)
"""Keys that may change when a run is resumed, and that change nothing in a finished run."""

FREE_KEYS = (
    "trainer.epochs",
    "trainer.max_steps",
    "trainer.early_stop",
    "trainer.evaluate_test",
    "trainer.evaluate_base",
    "trainer.restore_best",
    "simulation.self_training.rounds",
    *KEYS_OF_TRAINING,
)
"""Keys that may change when a run is resumed, together with those of `result_keys`."""

DATA_KEYS = ("data", "preprocessing", "seed")
"""Keys that may also change if data.resume says how to continue."""

USE_KEYS = (
    "generation",
    "tracking",
    "callbacks",
    "trainer.eval_batch_size",
    "trainer.max_batch_size",
    "trainer.memory_budget",
    "trainer.max_generated_rows",
    "trainer.evaluate_base",
    "data.loader",
    "data.encode",
    "data.resume",
    "data.test",
    "data.max_bad_rows",
    "backend",
)
"""Keys that did not affect training and may differ when a finished run is used, with those of `result_keys`."""


def check_has_effect(old: Mapping[str, Any], new: Mapping[str, Any], *, folder: Path, base_is_loaded: bool) -> None:
    """Raise ConfigError if values that only training uses are changed for a trained model.

    Args:
        old: The settings that it was trained with.
        new: Those settings with the values that the caller changed.
        folder: The run directory, or the saved model.
        base_is_loaded: Whether the base model is loaded too, because the weights are those of an adapter.
    """
    sections = ("trainer", "adapter") if base_is_loaded else ("trainer", "adapter", "base_model")
    message = (
        f"has no effect on the model in {folder}, which is trained; to train with other values, change the YAML file"
    )
    changed = dict[str, None]()
    for key in changed_keys(leaves(old), leaves(new), without=USE_KEYS):
        section = key.partition(".")[0]
        if section in sections:
            changed[key if section == "trainer" else section] = None
    if changed:
        raise ConfigError([Problem(key, message) for key in changed])


def check_same(old: Mapping[str, Any], new: Mapping[str, Any], *, folder: Path) -> None:
    """Raise ResumeError, naming each value that differs, if a run cannot be resumed with this file."""
    changed = differences(old, new, without=changeable(old, new))
    if changed:
        listing = "\n".join(f"  {line}" for line in changed[:20])
        raise ResumeError(f"{folder} holds a run of another file:\n{listing}\ngive this run another folder with --run")


def asks_for_more(old: Mapping[str, Any], new: Mapping[str, Any], *, stopped_early: bool) -> bool:
    """Return whether a finished run is trained or evaluated further with other settings that it may be resumed with.

    Args:
        old: The settings that it was trained with.
        new: The settings now.
        stopped_early: Whether it ended before its last step.
    """
    before, after = leaves(old), leaves(new)
    changed = changed_keys(before, after, without=(*KEYS_OF_TRAINING, *result_keys(old, new)))
    return any(needs_more(key, before.get(key), after.get(key), stopped_early=stopped_early) for key in changed)


def needs_more(key: str, before: Any, after: Any, *, stopped_early: bool) -> bool:
    """Return whether a finished run is trained or evaluated further because a value has changed.

    Args:
        key: The key of the value.
        before: The value that the run was trained with.
        after: The value now.
        stopped_early: Whether the run ended before its last step.
    """
    if key in ("trainer.evaluate_test", "trainer.evaluate_base"):
        return after is not False
    if key == "trainer.early_stop":
        return stopped_early and bool(before) and (not after or after > before)
    return True


def changeable(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys that may change when a run with the old settings is resumed with the new ones."""
    strict = new.get("data", {}).get("resume", "strict") == "strict"
    return (*FREE_KEYS, *result_keys(old, new), *(() if strict else DATA_KEYS))


def result_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys that concern only a run's result: those of the simulation, unless self-training uses it."""
    trains = any((settings.get("simulation") or {}).get("self_training") for settings in (old, new))
    return BESIDE_ROUNDS if trains else ("simulation",)


def differences(old: Mapping[str, Any], new: Mapping[str, Any], *, without: Sequence[str]) -> list[str]:
    """Return `key: old -> new` for each value that differs, except below the keys in `without`."""
    before, after = leaves(old), leaves(new)
    return [
        f"{key}: {as_written(before.get(key))} -> {as_written(after.get(key))}"
        for key in changed_keys(before, after, without=without)
    ]


def changed_keys(before: Mapping[str, Any], after: Mapping[str, Any], *, without: Sequence[str]) -> list[str]:
    """Return the keys whose values differ, except below the keys in `without`; both are results of `leaves`."""
    apart = tuple(f"{key}." for key in without)
    return [
        key
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not f"{key}.".startswith(apart)
    ]


def as_written(value: Any) -> str:
    """Return a value as in a YAML file; whole numbers without a fraction, which the schema adds to some of them."""
    return value_text(int(value) if isinstance(value, float) and value.is_integer() else value)


def leaves(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Return every value by its dotted path; list items by their index."""
    items: Any = ()
    if isinstance(settings, Mapping):
        items = settings.items()
    elif isinstance(settings, list):
        items = enumerate(settings)
    if items and settings:
        return {key: value for name, item in items for key, value in leaves(item, f"{prefix}{name}.").items()}
    return {prefix.removesuffix("."): settings}
