"""Experiment trackers of accelerate: tensorboard, wandb, mlflow and others."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from partita_schema.errors import ConfigError, Problem


class Trackers:
    """The trackers of a run, started on first use."""

    def __init__(self, names: Sequence[str], *, folder: Path, settings: Mapping[str, Any]) -> None:
        self.names, self.folder, self.settings = names, folder, settings
        self.started: list[Any] | None = None

    def log(self, values: Mapping[str, Any], *, step: int) -> None:
        """Log numbers to all trackers. Raise ConfigError if a tracker's package is missing."""
        if not self.names:
            return
        if self.started is None:
            self.started = [self.start(name) for name in self.names]
        numbers = {key: value for key, value in values.items() if isinstance(value, int | float)}
        for tracker in self.started:
            tracker.log(numbers, step=step)

    def start(self, name: str) -> Any:
        """Start one tracker. Raise ConfigError if its package is missing."""
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
        from accelerate.utils import LoggerType

        kind = LoggerType(name)
        if kind not in get_available_trackers():
            message = f"{name} is not installed; pip install {name}, or remove it from tracking"
            raise ConfigError([Problem(f"tracking[{list(self.names).index(name)}]", message)])
        tracker_class = LOGGER_TYPE_TO_CLASS[name]
        options = {"logging_dir": self.folder} if tracker_class.requires_logging_directory else {}
        tracker = tracker_class(self.folder.name, **options)
        if hasattr(tracker, "start"):
            tracker.start()
        tracker.store_init_configuration(flat(self.settings))
        return tracker

    def finish(self) -> None:
        """Close the started trackers."""
        for tracker in self.started or ():
            tracker.finish()
        self.started = None


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to dotted keys, with numbers or text as values."""
    flattened: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flattened |= flat(value, f"{prefix}{key}.")
        elif isinstance(value, int | float | str):
            flattened[prefix + key] = value
        elif value is not None:
            flattened[prefix + key] = str(value)
    return flattened
