"""The registry of trainers: from the trainer section of a configuration to a trainer, imported on first use."""

import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from partita_schema.common.text import nearest
from partita_schema.errors import ConfigError, Problem
from partita_schema.sections.trainer import CustomTrainer, FinetuneTrainer, HogwildTrainer, NoTrainer
from partita_trainers.base import Trainer

TRAINERS = {
    "none": "partita_trainers.zero_shot:ZeroShot",
    "finetune": "partita_trainers.finetune:Finetune",
    "hogwild": "partita_trainers.hogwild.trainer:Hogwild",
}
"""`module:Class` by the `type` of the section. `custom` names its own class."""


def build_trainer(
    section: NoTrainer | FinetuneTrainer | HogwildTrainer | CustomTrainer, *, folder: Path | None = None
) -> Trainer:
    """Build the trainer of a section as `Class(section)`.

    Custom modules are also searched in `folder`, the folder of the configuration file. Raises ConfigError if the module
    or class does not exist, or if `batch_size: auto` is set and the class has no `probe`.
    """
    if isinstance(section, CustomTrainer):
        with importable(folder):
            check_signature(load_class(section.target), section)
            trainer = make(section.target, section)
        check_probe(trainer, section)
        return trainer
    if section.type not in TRAINERS:
        near = nearest(section.type, TRAINERS)
        hint = f"did you mean {' or '.join(near)}?" if near else f"write one of {', '.join(TRAINERS)}, or custom"
        raise ConfigError([Problem("trainer.type", f"no trainer is named {section.type}; {hint}")])
    return make(TRAINERS[section.type], section)


@contextmanager
def importable(folder: Path | None) -> Iterator[None]:
    """Allow imports from `folder` inside the context, after all other paths."""
    path = str(folder.resolve()) if folder is not None else None
    if path is None or path in sys.path:
        yield
        return
    sys.path.append(path)
    try:
        yield
    finally:
        sys.path.remove(path)


def make(target: str, section: object) -> Trainer:
    """Construct the class at `module:Class` with the trainer section."""
    trainer: Trainer = load_class(target)(section)
    return trainer


def check_signature(kind: type, section: CustomTrainer) -> None:
    """Raise ConfigError if a class cannot be constructed with the trainer section as its only argument."""
    try:
        inspect.signature(kind).bind(section)
    except TypeError as error:
        message = f"{kind.__name__} is created with the trainer section as its only argument, and {error}"
        raise ConfigError([Problem("trainer.target", f"{message}; write def __init__(self, section)")]) from None


def check_probe(trainer: Trainer, section: CustomTrainer) -> None:
    """Raise ConfigError if `batch_size: auto` is set and the trainer has no `probe`."""
    if section.batch_size == "auto" and not callable(getattr(trainer, "probe", None)):
        name = type(trainer).__name__
        message = f"auto needs a trainer that says what to probe: give {name} a method probe, or write a number"
        raise ConfigError([Problem("trainer.batch_size", message)])


def load_class(target: str, *, key: str = "trainer.target") -> type:
    """Return the class at `module:Class`. Raises ConfigError at `key` with what is missing and the nearest name."""
    module_name, _, class_name = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        message = f"there is no module {error.name}; install it or put its folder on PYTHONPATH"
        raise ConfigError([Problem(key, message)]) from None
    attribute = getattr(module, class_name, None)
    if isinstance(attribute, type):
        return attribute
    classes = [name for name, value in vars(module).items() if isinstance(value, type)]
    near = nearest(class_name, classes)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise ConfigError([Problem(key, f"module {module_name} has no class {class_name}{hint}")])
