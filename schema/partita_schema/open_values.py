"""Values of a training run that a file leaves open: what they will be, or when they are found."""

from collections.abc import Iterator
from typing import Any

from partita_schema.common.text import counted
from partita_schema.config import Config
from partita_schema.sections.trainer import FinetuneTrainer
from partita_schema.training_defaults import DEFAULT_EPOCHS, default_learning_rate, warmup_steps
from partita_schema.yaml.tree import Path, dotted

AT_THE_START = "found when the run begins"


def open_values(config: Config, *, steps: int | None = None) -> dict[str, str]:
    """Return the values that a run chooses, by key: what they will be, or when they are found.

    Args:
        config: The configuration.
        steps: Optimizer steps of the run, if they are known.
    """
    trainer = config.trainer
    if not isinstance(trainer, FinetuneTrainer):
        return {}
    values: dict[str, str] = {}
    if trainer.learning_rate is None:
        rate, of = default_learning_rate(config)
        values["trainer.learning_rate"] = f"{rate:g}, the default for {of}"
    elif trainer.learning_rate == "auto":
        values["trainer.learning_rate"] = "found by a range test before the first step"
    if trainer.epochs is None and trainer.max_steps is None:
        values["trainer.epochs"] = f"{DEFAULT_EPOCHS:g}, the default"
        values |= {} if steps is None else {"trainer.max_steps": f"{counted(steps, 'step')} in these epochs"}
    values["trainer.learning_rate_scheduler.warmup_steps"] = warmup_in_words(trainer, steps=steps)
    if trainer.batch_size != "auto" and trainer.eval_batch_size is None:
        values["trainer.eval_batch_size"] = f"{trainer.batch_size}, as batch_size; auto measures it"
    return values | {dotted(path): AT_THE_START for path in automatic(config)}


def warmup_in_words(trainer: FinetuneTrainer, *, steps: int | None) -> str:
    """Return the number of warm-up steps, or how it follows from the number of all steps."""
    scheduler = trainer.learning_rate_scheduler
    total = steps if steps is not None else trainer.max_steps if trainer.epochs is None else None
    if total is not None:
        return f"{warmup_steps(scheduler, total):,} of {counted(total, 'step')}"
    if scheduler.warmup_steps is not None:
        return f"{scheduler.warmup_steps:,}"
    if scheduler.warmup_fraction is not None:
        return f"{scheduler.warmup_fraction:.0%} of all steps; explain --data counts them"
    return "3 % of all steps, at least 5 of 50 or more; explain --data counts them"


def automatic(config: Config) -> Iterator[Path]:
    """Yield the keys whose value is `auto`, apart from those of dialogues in a file without one."""

    def visit(value: Any, path: Path) -> Iterator[Path]:
        if value == "auto":
            yield path
        elif isinstance(value, dict):
            for key, item in value.items():
                yield from visit(item, (*path, str(key)))
        elif isinstance(value, list):
            for index, item in enumerate(value):
                yield from visit(item, (*path, index))

    for path in visit(config.model_dump(mode="json"), ()):
        of_dialogues = path[:2] == ("data", "dialogue")
        if path != ("trainer", "learning_rate") and (config.dialogue_input is not None or not of_dialogues):
            yield path
