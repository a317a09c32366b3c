"""The registry of trainers: from the trainer section of a configuration to a trainer, imported on first use."""

import inspect
from pathlib import Path
from typing import Any, cast

from partita_schema.errors import ConfigError, Problem
from partita_schema.sections.trainer import CustomTrainer, FinetuneTrainer, HogwildTrainer, NoTrainer
from partita_trainers.base import Trainer
from partita_trainers.objective import CROSS_ENTROPY, Objective, objective_of
from partita_trainers.user_modules import check_arguments, importable, load_class

TRAINERS = {
    "none": "partita_trainers.zero_shot:ZeroShot",
    "finetune": "partita_trainers.finetune:Finetune",
    "preference": "partita_trainers.objectives.preference:Preference",
    "kto": "partita_trainers.objectives.kto:Kto",
    "reward": "partita_trainers.objectives.reward:Reward",
    "hogwild": "partita_trainers.hogwild.trainer:Hogwild",
}
"""`module:Class` by the `type` of the section. `custom` names its own class."""


def build_trainer(
    section: NoTrainer | FinetuneTrainer | HogwildTrainer | CustomTrainer,
    *,
    folder: Path | None = None,
    objective: Objective | None = None,
) -> Trainer:
    """Build the trainer of a section as `Class(section)`.

    Args:
        section: The trainer section.
        folder: Folder of the configuration file, in which custom modules are also searched.
        objective: What is minimized and evaluated in place of cross-entropy, unless the trainer has an objective.

    Raises:
        ConfigError: The module or class does not exist, or `batch_size: auto` is set and the class has no `probe`.
    """
    trainer: Any = build_class(section, folder=folder)  # `objective` is an optional attribute
    if objective is not None and objective_of(trainer) is CROSS_ENTROPY:
        trainer.objective = objective
    return cast(Trainer, trainer)


def build_class(
    section: NoTrainer | FinetuneTrainer | HogwildTrainer | CustomTrainer, *, folder: Path | None
) -> Trainer:
    """Return the trainer of a section without another objective."""
    if isinstance(section, CustomTrainer):
        check_signature(load_class(section.target, folder=folder), section)
        with importable(folder):
            trainer = make(section.target, section)
        check_train(trainer)
        check_probe(trainer, section)
        return trainer
    return make(TRAINERS[section.type], section)


def make(target: str, section: object) -> Trainer:
    """Construct the class at `module:Class` with the trainer section."""
    trainer: Trainer = load_class(target)(section)
    return trainer


def check_signature(kind: type, section: CustomTrainer) -> None:
    """Raise ConfigError if a class cannot be constructed with the trainer section as its only argument."""
    try:
        check_arguments(kind, section)
    except TypeError as error:
        has_init = any("__init__" in vars(base) for base in kind.__mro__[:-1])
        reason = str(error) if has_init else "it has no __init__"
        message = f"{kind.__name__} cannot be created with the trainer section as its only argument: {reason}"
        raise ConfigError([Problem("trainer.target", f"{message}; write def __init__(self, section)")]) from None


def check_train(trainer: Trainer) -> None:
    """Raise ConfigError if a trainer has no method `train` that can be called with the context."""
    name, method = type(trainer).__name__, getattr(trainer, "train", None)
    if not callable(method):
        reason = f"{name} has no method train"
    elif inspect.iscoroutinefunction(method):
        reason = f"{name}.train is async and would never run"
    else:
        try:
            check_arguments(method, None)
        except TypeError as error:
            reason = f"{name}.train cannot be called with the context as its only argument: {error}"
        else:
            return
    raise ConfigError([Problem("trainer.target", f"{reason}; write def train(self, context)")])


def check_probe(trainer: Trainer, section: CustomTrainer) -> None:
    """Raise ConfigError if `batch_size: auto` is set and the trainer has no `probe`."""
    if section.batch_size == "auto" and not callable(getattr(trainer, "probe", None)):
        name = type(trainer).__name__
        message = f"auto needs a trainer that says what to probe: give {name} a method probe, or write a number"
        raise ConfigError([Problem("trainer.batch_size", message)])
