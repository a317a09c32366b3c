"""A small task that a nano model learns in seconds: name the colour and the number in a sentence."""

import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ..json_lines import write_json_lines
from .run_directories import MakeRun, write_run

COLOURS = ("red", "blue", "green")


def make_rows(count: int, *, seed: int = 1) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        colour, number = rng.choice(COLOURS), rng.randint(1, 4)
        text = rng.choice(("{n} {c} balls", "balls: {c}, {n}", "I see {n} balls and they are {c}"))
        rows.append({"text": text.format(n=number, c=colour), "colour": colour, "number": number})
    return rows


def make_config(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return a configuration over rows.jsonl in `folder`; sections in `changes` are merged into it."""
    config: dict[str, Any] = {
        "base_model": {
            "type": "scratch",
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "context_length": 96,
            "tokenizer": "word",
            "vocab_size": 128,
        },
        "input_features": [{"name": "text", "type": "text"}],
        "output_features": [{"name": "colour", "type": "category"}, {"name": "number", "type": "number"}],
        "generation": {"max_new_tokens": 24},
        "data": {
            "source": str(folder / "rows.jsonl"),
            "split": {"type": "random", "probabilities": [0.8, 0.1, 0.1]},
            "batching": {
                "type": "bucket"
            },  # whether a model this small learns the numbers depends on the order of the rows
        },
        "trainer": {
            "type": "finetune",
            "epochs": 2,
            "batch_size": 16,
            "learning_rate": 0.01,
            "steps_per_checkpoint": 4,
            "evaluations_per_epoch": 1,
        },
    }
    for section, values in changes.items():
        if isinstance(values, dict) and isinstance(config.get(section), dict) and "type" not in values:
            config[section] = {**config[section], **values}
        else:
            config[section] = values
    return config


@pytest.fixture(scope="session")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a folder with rows.jsonl, and functions that create rows and configurations."""

    folder = tmp_path_factory.mktemp("colours")
    write_json_lines(folder / "rows.jsonl", make_rows(640))

    class Colours:
        path = folder

        @staticmethod
        def rows(count: int, seed: int = 2) -> list[dict[str, Any]]:
            return make_rows(count, seed=seed)

        @staticmethod
        def config(**changes: Any) -> dict[str, Any]:
            return make_config(folder, **changes)

    return Colours


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Return a function that writes a run `tmp_path/runs/NAME` without a model."""
    return partial(write_run, tmp_path)


MemoryCeiling = Callable[[torch.nn.Module, int], AbstractContextManager[list[tuple[int, int]]]]


@pytest.fixture(scope="session")
def memory_ceiling() -> MemoryCeiling:
    """Return a context in which a transformers model runs out of memory above a number of tokens.

    The number of tokens is rows times length, including tokens in the cache; slots count with their full capacity. The
    context yields (rows, tokens) of each forward pass.
    """
    from partita.lm.slots.kv_cache import SlotKVCache

    @contextmanager
    def ceiling(module: torch.nn.Module, tokens: int) -> Iterator[list[tuple[int, int]]]:
        passes: list[tuple[int, int]] = []

        def refuse(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            rows, length = kwargs["input_ids"].shape
            cache = kwargs.get("past_key_values")
            if isinstance(cache, SlotKVCache):
                held = rows * length + cache.layout.slots * cache.layout.tokens
            else:
                held = rows * (length + (cache.get_seq_length() if cache is not None else 0))
            passes.append((rows, held))
            if held > tokens:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        hook = module.register_forward_pre_hook(refuse, with_kwargs=True)
        try:
            yield passes
        finally:
            hook.remove()

    return ceiling


Command = Callable[..., int]


@pytest.fixture(autouse=True)
def own_progress() -> Iterator[None]:
    """Undo what `--log-json` and the commands set for their process."""
    yield
    progress, waiting = sys.modules.get("partita.runs.progress"), sys.modules.get("partita.runs.waiting")
    if progress is not None:
        progress.ELSEWHERE.clear()
    if waiting is not None:
        waiting.WAITS.shown = False


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """Restore the handlers of signals, which a command sets for its process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevent commands from setting up their log, whose handlers are process-wide."""
    monkeypatch.setattr("partita.runs.log.show_log", lambda *, quiet, rank=0: None)
    monkeypatch.setattr("partita.runs.waiting.show_waits", lambda *, quiet=False: None)


@pytest.fixture
def command(no_log: None, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return a function that runs a command in this process and returns its exit code; logging is kept."""
    from partita.cli.main import run

    def call(*words: object) -> int:
        monkeypatch.setattr(sys, "argv", ["partita", *map(str, words)])
        with pytest.raises(SystemExit) as caught:
            run()
        return int(caught.value.code or 0)

    return call


class Killed(BaseException):
    """Raised in place of a kill signal; no code under test may catch it."""


TrainKilled = Callable[..., None]


@pytest.fixture
def train_killed(monkeypatch: pytest.MonkeyPatch) -> TrainKilled:
    """Return a function that trains in the directory `run` and is killed after step `after`."""

    def train(model: Any, run: Path, *, after: int) -> None:
        from partita.runs.directory import RunDirectory

        log_step = RunDirectory.log_step

        def log_then_die(directory: RunDirectory, record: Any) -> None:
            log_step(directory, record)
            if record["step"] == after:
                raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(RunDirectory, "log_step", log_then_die)
            with pytest.raises(Killed):
                model.train(run=run)

    return train
