"""A simulated device: real models run, and their memory and time are computed by simple rules."""

import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from partita import Model
from partita.lm.batch_generation.batch_check import check_causal, find_batch_support
from partita.lm.checks.loss_token_check import find_loss_token_layer
from partita.lm.slots.check import find_slot_support
from partita.lm.slots.kv_cache import SlotKVCache
from partita_trainers.batch_size import device_memory
from partita_trainers.batch_size.memory import Peak, within

from ...json_lines import read_json_lines

WEIGHTS, STATE = 10_000_000, 4_000_000
"""Bytes of the model, and of the state of an optimizer after a step."""
READ, CACHED, LEARNED = 3_000, 1_000, 20_000
"""Bytes of a token in a forward pass, of a token in the cache, and of a token in a forward pass with gradients.

A slot reserves its whole cache from the first token on; the cache of a batch grows with its tokens.
"""
PASS_SECONDS, TOKEN_SECONDS = 1.0, 1e-7
NEW = 40
"""New tokens of an answer. The longest prompt has 8 tokens, the longest row with its answer 24."""


@dataclass(frozen=True)
class Pass:
    """One forward pass."""

    rows: int
    tokens: int
    """Input tokens of a row."""
    held: int
    """Tokens of a row in the cache after the pass; 0 without a cache."""
    slots: int
    """All slots of the pool, including those not used in the pass; 0 without a pool."""
    learning: bool
    measured: bool
    """Whether the pass was a probe."""
    used: int
    """Bytes used in addition to the model and optimizers."""


class Device:
    """The memory of the process, and its limit `ceiling`."""

    new_tokens = NEW
    answer, loss, step = (8 + NEW) * CACHED + 8 * READ, 24 * READ, 24 * LEARNED
    """Worst-case bytes of a row: an answer in a slot while all prompts are prefilled, a loss, and a training step.
    """
    batch_answer = (8 + NEW - 1) * CACHED + READ
    """Worst-case bytes of an answer in a batch, whose cache grows and whose last token is never an input."""
    weights, state = WEIGHTS, STATE

    def __init__(self) -> None:
        self.ceiling = 10**12
        self.passes: list[Pass] = []
        self.seconds = 0.0
        """A clock that only forward passes advance."""
        self.before_pass: Callable[[Pass], None] = lambda coming: None
        self.checking = False
        """Whether the one-time checks of how a model can be batched are running."""
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.peaks: list[int] = []

    @property
    def held(self) -> int:
        """Bytes of the model and of optimizers."""
        return WEIGHTS + STATE * len(self.optimizers)

    def find_slot_support(self, lm: Any) -> Any:
        """Run `find_slot_support` of `partita.lm.slots.check` without counting its passes."""
        with self.unwatched():
            return find_slot_support(lm)

    def find_batch_support(self, lm: Any) -> Any:
        """Run `find_batch_support` of `partita.lm.batch_generation.batch_check` without counting its passes."""
        with self.unwatched():
            return find_batch_support(lm)

    def check_causal(self, lm: Any) -> None:
        """Run `check_causal` of `partita.lm.batch_generation.batch_check` without counting its passes."""
        with self.unwatched():
            check_causal(lm)

    def find_loss_token_layer(self, lm: Any) -> Any:
        """Run `find_loss_token_layer` of `partita.lm.checks.loss_token_check` without counting its passes."""
        with self.unwatched():
            return find_loss_token_layer(lm)

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Do not count passes inside the context."""
        self.checking = True
        try:
            yield
        finally:
            self.checking = False

    def leave(self, used: int, *, training: bool = False) -> None:
        """Set the ceiling so that `used` bytes are left next to the model, or next to the model and its optimizer."""
        self.ceiling = WEIGHTS + (STATE if training else 0) + used

    def forward(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Count a pass before it runs; raise out of memory if it is too large."""
        if self.checking:
            return
        rows, tokens = kwargs["input_ids"].shape
        cache = kwargs.get("past_key_values")
        held, slots, cached = 0, 0, 0
        if isinstance(cache, SlotKVCache):
            layout = cache.layout
            held, slots = layout.width or layout.start + tokens, layout.slots
            cached = layout.slots * layout.tokens
        elif cache is not None:
            held = tokens + cache.get_seq_length()
            cached = rows * held
        learning = torch.is_grad_enabled()
        used = rows * tokens * (LEARNED if learning else READ) + cached * CACHED
        coming = Pass(rows, tokens, held, slots, learning, bool(self.peaks), used)
        self.before_pass(coming)
        self.passes.append(coming)
        self.seconds += PASS_SECONDS + rows * tokens * TOKEN_SECONDS
        self.peaks = [max(peak, used) for peak in self.peaks]
        if self.held + used > self.ceiling:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def work(self) -> list[Pass]:
        """Return the passes since the last call, without probes."""
        results = [one for one in self.passes if not one.measured]
        self.passes.clear()
        return results

    def fall(self, used: int, *, training: bool = False, when: Callable[[Pass], bool]) -> None:
        """Lower the ceiling as `leave` does, at the first pass that is not a probe and for which `when` is true."""

        def look(coming: Pass) -> None:
            if not coming.measured and when(coming):
                self.leave(used, training=training)
                self.before_pass = lambda coming: None

        self.before_pass = look


class FakeMemory:
    """The memory of `Device` with the interface for the tuner."""

    slows_work = False

    def __init__(self, device: Device, allowed: int | float | None) -> None:
        self.device, self.allowed = device, within(device.ceiling, allowed)

    @property
    def identity(self) -> str:
        return "a fake device"

    def budget(self) -> int:
        limit = self.device.ceiling if self.allowed is None else min(self.device.ceiling, self.allowed)
        return max(0, limit - self.device.held)

    def describe(self) -> str:
        return f"{self.device.ceiling} less {self.device.held}"

    @contextmanager
    def measure(self) -> Iterator[Peak]:
        peak = Peak()
        self.device.peaks.append(0)
        try:
            yield peak
        finally:
            peak.used_bytes = peak.taken_bytes = self.device.peaks.pop()

    @contextmanager
    def guard(self, *, exact: bool = False) -> Iterator[None]:
        yield

    def clear(self) -> None:
        pass


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Device]:
    """Replace the CPU's memory and clock; sizes and runs are saved in a folder of the test."""
    from partita.pipeline import build as pipeline

    result, load = Device(), pipeline.load_model

    def loaded(*args: Any, **kwargs: Any) -> Any:
        lm = load(*args, **kwargs)
        lm.base.register_forward_pre_hook(result.forward, with_kwargs=True)
        return lm

    def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        result.optimizers.add(optimizer)
        if result.held > result.ceiling:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    monkeypatch.setattr(pipeline, "load_model", loaded)
    for name in ("find_slot_support", "find_batch_support", "check_causal", "find_loss_token_layer"):
        monkeypatch.setattr(f"partita.lm.huggingface.{name}", getattr(result, name))
    monkeypatch.setitem(device_memory.MEMORIES, "cpu", lambda device, allowed: FakeMemory(result, allowed))
    for module in (
        "partita.lm.batch_generation.worst_case",
        "partita.lm.slots.worst",
        "partita.pipeline.probes",
        "partita_trainers.training_probe",
    ):
        monkeypatch.setattr(f"{module}.now", lambda device: result.seconds)
    # The time that a machine takes for a probe must not decide anything here.
    monkeypatch.setattr("partita_trainers.batch_size.tune.ALWAYS_ALLOWED_SECONDS", 1e9)
    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    hook = register_optimizer_step_post_hook(stepped)
    yield result
    hook.remove()


class Run:
    """The contents of a run directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def manifest(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((self.folder / "manifest.json").read_text(encoding="utf8"))
        return result

    @property
    def sizes(self) -> dict[str, Any]:
        result: dict[str, Any] = self.manifest["batch_sizes"]
        return result

    @property
    def log(self) -> list[dict[str, Any]]:
        """Return the logged steps without their seconds; empty before the first step."""
        path = self.folder / "log.jsonl"
        lines = read_json_lines(path) if path.exists() else []
        return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


@pytest.fixture
def make(colours: Any) -> Callable[..., dict[str, Any]]:
    """Return a function that returns a configuration of a very small model, with sections changed."""

    def settings(**changes: Any) -> dict[str, Any]:
        base = {"hidden_size": 32, "num_hidden_layers": 1}
        generation = {"max_new_tokens": NEW, **changes.pop("generation", {})}
        result: dict[str, Any] = colours.config(base_model=base, generation=generation, **changes)
        return result

    return settings


@pytest.fixture
def zero_shot(make: Any) -> Callable[..., Model]:
    """Return a function that returns a model without training, with the batch size auto."""

    def model(*, generation: dict[str, Any] | None = None, **trainer: Any) -> Model:
        return Model(
            make(trainer={"type": "none", "batch_size": "auto", **trainer}, generation=generation or {}), quiet=True
        )

    return model


@pytest.fixture
def train(make: Any, rows: Any, tmp_path: Path) -> Callable[..., Run]:
    """Return a function that trains in a named folder with the batch size auto and 24 rows per step."""

    def trained(name: str, **trainer: Any) -> Run:
        steps = {"effective_batch_size": 24, "epochs": 2, "steps_per_checkpoint": 2}
        model = Model(make(trainer={"batch_size": "auto", **steps, **trainer}), quiet=True)
        model.train(rows, run=tmp_path / name)
        return Run(tmp_path / name)

    return trained


@pytest.fixture
def run_in(tmp_path: Path) -> Callable[[str], Run]:
    """Return a function that returns the run in a named folder."""
    return lambda name: Run(tmp_path / name)


@pytest.fixture
def rows(colours: Any) -> Any:
    """Return 96 training rows, and 12 rows each for validation and test."""
    return colours.rows(120)


@pytest.fixture
def asked(colours: Any) -> Any:
    """Return 28 different rows, including one of the longest."""
    longest = {"text": "I see 3 balls and they are red", "colour": "red", "number": 3}
    return list({row["text"]: row for row in [longest, *colours.rows(200)]}.values())[:28]
