"""Callbacks: objects of users whose methods are called during training, and that may ask it to stop.

They are called on rank 0 only. Every rank learns at the same point whether a callback failed or asked to stop.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from partita_schema.common.files import write_atomically
from partita_schema.common.text import describe_error
from partita_schema.errors import TrainingError, exit_call, raised_at
from partita_trainers.base import LanguageModel, Metrics, TrainerContext

ADVICE = "fix it, and rerun the same command to resume"
"""How a run whose callback failed is continued."""
INSTEAD_OF_EXIT = "call state.stop() to stop the training, and rerun the same command to resume"
"""What a callback does instead of calling `sys.exit`."""
STOP = "stop.json"
"""File of a checkpoint: a stop that `on_checkpoint` has asked for, when the checkpoint was complete."""
HOOKS = ("on_start", "on_step", "on_evaluate", "on_checkpoint", "on_end")
"""Methods that are called, in the order of a training."""


@dataclass(frozen=True)
class TrainingState:
    """What a callback is given: facts about the training so far. Only `stop` changes anything."""

    run: Path
    """The run directory."""
    lm: LanguageModel
    """The model that is trained. Its weights must not be changed. With `backend.sharding: full` it cannot be run,
    because every forward pass involves all ranks."""
    step: int = 0
    """Optimizer steps taken, including those before a resume."""
    total_steps: int | None = None
    """Optimizer steps of the whole training; None if the trainer does not know it."""
    epoch: float = 0.0
    """Passes over the training data, as a fraction."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """The line of log.jsonl of the last step; empty before the first step of this process."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the last evaluation on the validation rows; empty before the first one."""
    validation_metric: str | None = None
    """Name of the metric in `metrics` that selects the best checkpoint; None if the trainer selects none."""
    best: float | None = None
    """Best value of that metric."""
    best_step: int | None = None
    """Step of the best value."""
    checkpoint: Path | None = None
    """The newest checkpoint; None before the first one."""
    results: Mapping[str, Metrics] = field(default_factory=dict)
    """In `on_end`, the metrics of the trained model by split."""
    requests: list[str] = field(default_factory=list, repr=False)
    """Reasons of the calls of `stop`."""

    @property
    def loss(self) -> float | None:
        """Training loss of the last step; None before it."""
        return self.record.get("loss")

    @property
    def learning_rate(self) -> float | None:
        """Learning rate of the last step; None before it."""
        return self.record.get("learning_rate")

    @property
    def is_best(self) -> bool:
        """Whether the last evaluation was at this step and is the best so far."""
        return self.best_step == self.step and bool(self.metrics)

    def stop(self, reason: str = "") -> None:
        """End the training after this step.

        It ends as with early stopping: an evaluation that is due is made, a checkpoint is saved, and the best weights
        are restored, saved and evaluated. The manifest has `reason` as `stopped_by`.
        """
        self.requests.append(reason)


class Callback:
    """The methods of a callback. A class needs one of them, and need not derive from this one.

    An error in a method ends the run with the status `failed`, and names the class and the method. The command
    continues from the newest checkpoint when it is repeated.
    """

    def on_start(self, state: TrainingState) -> None:
        """Called once before the first step of this process.

        `state.step` is 0, or the step of the checkpoint from which the run resumes. Steps after it that a killed
        process has already reported are taken and reported again, so drop what you stored of them.
        """

    def on_step(self, state: TrainingState) -> None:
        """Called after each optimizer step, when its line is in log.jsonl."""

    def on_evaluate(self, state: TrainingState) -> None:
        """Called after each evaluation during the training, before a checkpoint of the step is saved."""

    def on_checkpoint(self, state: TrainingState) -> None:
        """Called after a checkpoint is saved."""

    def on_end(self, state: TrainingState) -> None:
        """Called when the trained model is saved and evaluated; not after an error or an interruption."""


class Callbacks:
    """Calls the callbacks of a run. Every rank makes the same calls in the same order.

    A trainer that creates it states `calls_callbacks = True` in its class. After each call it checks `stopped_by`.
    """

    def __init__(self, context: TrainerContext, **facts: Any) -> None:
        """Start before the first step; `facts` are fields of `TrainingState` that are already known."""
        self.process_group = context.process_group
        self.state = TrainingState(run=context.run.folder, lm=context.lm, **facts)
        self.stopped_by: str | None = None
        """Which callback asked to stop, and why; None if none has."""
        self.methods = [(callback, hooks_of(callback)) for callback in context.callbacks]
        own = sorted({hook for _, methods in self.methods for hook in methods})
        self.hooks = frozenset(self.process_group.run_on_rank_zero(lambda: own, "the callbacks"))

    def call(self, hook: str, **facts: Any) -> None:
        """Call a method of all callbacks that have it.

        Args:
            hook: One of HOOKS.
            facts: Fields of `TrainingState` that have changed since the last call.

        Raises:
            TrainingError: A callback failed.
            OtherRankError: A callback failed on rank 0, and this is another rank.
        """
        read_only: dict[str, Any] = {
            name: MappingProxyType(value) if type(value) is dict else value for name, value in facts.items()
        }
        self.state = replace(self.state, **read_only)
        if hook in self.hooks:
            about = f"the callbacks at step {self.state.step}"
            request = self.process_group.run_on_rank_zero(lambda: self._call(hook), about)
            self.stopped_by = self.stopped_by or request

    def call_on_checkpoint(self, checkpoint: Path) -> None:
        """Call `on_checkpoint`, and store a stop that it asks for in the checkpoint, which has been written before."""
        known = self.stopped_by
        self.call("on_checkpoint", checkpoint=checkpoint)
        if self.stopped_by != known:
            text = json.dumps(self.stop_record())
            self.process_group.run_on_rank_zero(lambda: write_atomically(checkpoint / STOP, text), "the stop")

    def stop_record(self) -> dict[str, Any]:
        """Return what a checkpoint stores about the stop that a callback has asked for; {} without one."""
        if self.stopped_by is None:
            return {}
        return {"by": self.stopped_by, "total_steps": self.state.total_steps}

    def restore_stop(self, checkpoint: Path, record: Mapping[str, Any]) -> None:
        """Stop where an earlier process was asked to, unless the length of the training has changed since.

        Args:
            checkpoint: The checkpoint from which the run resumes.
            record: The `stop_record` in it.
        """
        found = self.process_group.run_on_rank_zero(lambda: record or read_stop(checkpoint), "the stop")
        if found and found["total_steps"] == self.state.total_steps:
            self.stopped_by = found["by"]

    def _call(self, hook: str) -> str | None:
        """Call a method on this rank. Return the first request to stop."""
        first: str | None = None
        for callback, methods in self.methods:
            if hook not in methods:
                continue
            try:
                with unchanged_random_state():
                    methods[hook](self.state)
            except SystemExit as error:
                called = f"the callback {name_of(callback)} called {exit_call(error)} in {hook}"
                where = f" at step {self.state.step}{raised_at(error)}"
                raise TrainingError(f"{called}{where}", INSTEAD_OF_EXIT) from error
            except Exception as error:
                failed = f"the callback {name_of(callback)} failed in {hook} at step {self.state.step}"
                raise TrainingError(f"{failed}{raised_at(error)}: {describe_error(error)}", ADVICE) from error
            if self.state.requests:
                first = first or ": ".join(filter(None, (name_of(callback), self.state.requests[0])))
                self.state.requests.clear()
        return first


def read_stop(checkpoint: Path) -> dict[str, Any]:
    """Return the stop that `on_checkpoint` asked for; {} without one."""
    from partita_trainers.checkpoints.checkpoint import read_json

    path = checkpoint / STOP
    return dict(read_json(path)) if path.exists() else {}


@contextmanager
def unchanged_random_state() -> Iterator[None]:
    """Restore the random generators on exit, so that a callback that draws numbers does not change the training."""
    from partita_trainers.checkpoints.checkpoint import random_state, restore_random_state

    state = random_state()
    try:
        yield
    finally:
        restore_random_state(state)


def name_of(callback: object) -> str:
    """Return the name of a callback's class."""
    return type(callback).__name__


def hooks_of(callback: object) -> dict[str, Callable[[TrainingState], object]]:
    """Return the methods of a callback that are called; not those that it only inherits from `Callback`."""
    methods = {hook: getattr(callback, hook, None) for hook in HOOKS}
    return {
        hook: method
        for hook, method in methods.items()
        if callable(method) and getattr(method, "__func__", None) is not getattr(Callback, hook)
    }
