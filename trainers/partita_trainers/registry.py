"""The registry of trainers: from the trainer section of a configuration to a trainer, imported on first use."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from partita_schema.common.text import describe_error
from partita_schema.config import Config
from partita_schema.errors import ConfigError, Problem
from partita_schema.sections.callbacks import CallbackConfig
from partita_schema.sections.objectives import DpoLoss
from partita_schema.sections.outputs.embedding import EmbeddingOutput
from partita_schema.sections.trainer import (
    CustomTrainer,
    FinetuneTrainer,
    HogwildTrainer,
    KtoTrainer,
    NoTrainer,
    PreferenceTrainer,
)
from partita_trainers.base import Trainer
from partita_trainers.callbacks import check_callback
from partita_trainers.objective import CROSS_ENTROPY, Objective, objective_of
from partita_trainers.user_modules import importable, load_class

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
    trainer = build_class(section, folder=folder)
    if objective is not None and objective_of(trainer) is CROSS_ENTROPY:
        vars(trainer)["objective"] = objective
    return trainer


def default_objective(config: Config) -> Objective:
    """Return the objective of a configuration's outputs.

    Contrastive for embeddings, that of pairs for a reward model, otherwise the model's loss.
    """
    output = config.head_output
    if config.scores_answers:
        from partita_trainers.objectives.reward import RewardObjective

        return RewardObjective(center=getattr(config.trainer, "center", 0.0))
    if not isinstance(output, EmbeddingOutput):
        return CROSS_ENTROPY
    from partita_trainers.objectives.contrastive import Contrastive

    return Contrastive(temperature=output.decoder.temperature, name=output.name)


def evaluation_objective(config: Config, *, undesirable_weight: float | None) -> Objective:
    """Return what an evaluation outside of training computes: the loss of training, or cross-entropy if a custom
    trainer has trained.

    Args:
        config: The configuration.
        undesirable_weight: The weight that `undesirable_weight: auto` chose in training; None if it is not recorded.

    Raises:
        ConfigError: The weight is needed, and not recorded.
    """
    default = default_objective(config)
    if isinstance(config.trainer, CustomTrainer):
        return default
    objective = objective_of(build_trainer(config.trainer, objective=default))
    if isinstance(config.trainer, KtoTrainer) and config.trainer.undesirable_weight == "auto":
        if undesirable_weight is None:
            message = "auto balances the training rows, and the result is not recorded here; write a number"
            raise ConfigError([Problem("trainer.undesirable_weight", message)])
        vars(objective)["undesirable_weight"] = undesirable_weight
    return objective


def compares_with_start(config: Config) -> bool:
    """Return whether the loss of a configuration compares with the model before training."""
    trainer = config.trainer
    is_dpo = isinstance(trainer, PreferenceTrainer) and isinstance(trainer.loss, DpoLoss)
    return is_dpo or isinstance(trainer, KtoTrainer)


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


def build_callbacks(sections: Sequence[CallbackConfig], *, folder: Path | None = None) -> list[object]:
    """Build the callbacks of a configuration as `Class(**options)`.

    Raises:
        ConfigError: A module or class does not exist, does not take the options, or has no method that is called.
    """
    callbacks: list[object] = []
    for number, kind in enumerate(callback_classes(sections, folder=folder)):
        options = sections[number].options
        try:
            with importable(folder):
                callback = kind(**options)
        except Exception as error:
            message = f"{kind.__name__} cannot be created with {options}: {describe_error(error)}"
            raise ConfigError([Problem(f"callbacks[{number}]", message)]) from error
        check_callback(callback, key=f"callbacks[{number}].target")
        callbacks.append(callback)
    return callbacks


def callback_classes(sections: Sequence[CallbackConfig], *, folder: Path | None = None) -> list[type]:
    """Return the classes of the callbacks of a configuration, without creating objects.

    Raises:
        ConfigError: A module or class does not exist, or does not take the options.
    """
    kinds = [
        load_class(section.target, key=f"callbacks[{number}].target", folder=folder)
        for number, section in enumerate(sections)
    ]
    for number, (kind, section) in enumerate(zip(kinds, sections, strict=True)):
        try:
            check_arguments(kind, **section.options)
        except TypeError as error:
            message = f"{kind.__name__} cannot be created with these keyword arguments: {error}"
            raise ConfigError([Problem(f"callbacks[{number}].options", message)]) from None
    return kinds


def check_arguments(kind: Callable[..., object], /, *args: object, **options: object) -> None:
    """Raise TypeError if a class or function cannot be called so; those that do not say what they take are accepted."""
    with suppress(ValueError):  # classes and functions of C
        inspect.signature(kind).bind(*args, **options)


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
