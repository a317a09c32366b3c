"""A tiny language model and seeded batches, for tests of the training loop alone."""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from partita_schema.config import Config
from partita_schema.errors import ResumeError
from partita_trainers.base import Batch, GlobalBatch, TrainerContext
from partita_trainers.finetune import Finetune

VOCABULARY = 23


class Bigram(torch.nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = torch.nn.Embedding(VOCABULARY, 16)
        self.hidden = torch.nn.Linear(16, 16)
        self.dropout = torch.nn.Dropout(0.1)
        self.head = torch.nn.Linear(16, VOCABULARY)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(torch.relu(self.hidden(self.embed(ids_BT)))))


class BigramModel:
    """An implementation of the LanguageModel protocol with `Bigram`."""

    def __init__(self, *, dropout: float = 0.1) -> None:
        self.module = Bigram()
        self.module.dropout.p = dropout
        self.module.eval()

    def loss(self, module: torch.nn.Module, batch: Batch) -> torch.Tensor:
        logits = module(batch.input_ids_BT)[:, :-1].float()
        labels = batch.labels_BT[:, 1:]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def token_log_probs(self, module: torch.nn.Module, batch: Batch) -> torch.Tensor:
        log_probs = module(batch.input_ids_BT)[:, :-1].float().log_softmax(-1)
        rows, columns = (batch.labels_BT[:, 1:] != -100).nonzero(as_tuple=True)
        return log_probs[rows, columns, batch.labels_BT[:, 1:][rows, columns]]

    def prepare_training(self, total_steps: int) -> None:
        self.total_steps = total_steps

    def auxiliary_loss(self) -> None:
        return None

    def after_step(self, step: int) -> None:
        self.last_step = step

    @contextmanager
    def training(self) -> Iterator[None]:
        self.module.train()
        yield
        self.module.eval()

    def save_checkpoint(self, folder: Path) -> None:
        save_file(self.module.state_dict(), folder / "model.safetensors")

    def load_checkpoint(self, folder: Path) -> None:
        self.module.load_state_dict(load_file(folder / "model.safetensors"))

    def save(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.save_checkpoint(folder)


class SeededBatches:
    """Rows of a Markov chain, shuffled by (seed, epoch), split into `micro` batches per step."""

    def __init__(self, *, rows: int = 48, step_rows: int = 8, micro: int = 2) -> None:
        generator = torch.Generator().manual_seed(7)
        start = torch.randint(0, VOCABULARY, (rows, 1), generator=generator)
        noise = torch.randint(0, 2, (rows, 9), generator=generator)
        self.rows = torch.cat([start, (start + 3 * torch.arange(1, 10) + noise) % VOCABULARY], dim=1)
        self.step_rows, self.micro, self.position = step_rows, micro, 0
        self.num_rows, self.steps_per_epoch = rows, rows // step_rows
        self.started = False

    def from_start(self) -> "SeededBatches":
        batches = copy.copy(self)
        batches.position, batches.started = 0, False
        return batches

    def total_steps(self, epochs: float) -> int:
        return max(1, math.ceil(epochs * self.steps_per_epoch - 1e-9))

    def load_data_position(self, data_position: Mapping[str, Any]) -> None:
        if data_position["rows"] != self.num_rows:
            raise ResumeError("other rows")
        if self.started:
            raise ResumeError("too late")
        self.position = data_position["step"]

    def merge_data_positions(self, data_positions: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        return data_positions[0]

    def steps(self) -> Iterator[GlobalBatch]:
        position, self.started = self.position, True
        while True:
            epoch, index = divmod(position, self.steps_per_epoch)
            order = torch.randperm(self.num_rows, generator=torch.Generator().manual_seed(epoch))
            chosen = order[index * self.step_rows : (index + 1) * self.step_rows]
            parts = [self.batch(part) for part in chosen.chunk(self.micro)]
            position += 1
            data_position = {"step": position, "rows": self.num_rows}
            yield GlobalBatch(
                micro_batches=tuple(parts), data_position=data_position, epoch=position / self.steps_per_epoch
            )

    def batch(self, chosen: torch.Tensor) -> Batch:
        ids = self.rows[chosen]
        labels = ids.clone()
        labels[:, :3] = -100
        # Rows have different lengths, so that averaging by batch would be detected.
        lengths = 6 + chosen % 5
        labels[torch.arange(ids.shape[1])[None] >= lengths[:, None]] = -100
        keys = tuple(f"row:{int(i)}" for i in chosen)
        return Batch(input_ids_BT=ids, labels_BT=labels, lengths_B=lengths, keys=keys)


class Shown:
    def advance(self, amount: int = 1, **shown: Any) -> None:
        self.last = shown


class Recorder:
    """A run that records its calls."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.checkpoints = folder, folder / "checkpoints"
        self.log: list[dict[str, Any]] = []
        self.metrics: dict[str, Any] = {}
        self.noted: dict[str, Any] = {}

    def log_step(self, record: Mapping[str, Any]) -> None:
        self.log.append(dict(record))

    def truncate_log(self, step: int) -> None:
        self.log = [record for record in self.log if record["step"] <= step]

    def report(self, metrics: Mapping[str, float], *, step: int, split: str) -> None:
        self.metrics[f"{split}@{step}"] = dict(metrics)

    def note(self, **values: Any) -> None:
        self.noted |= values

    def progress(self, total: int, description: str, *, completed: int = 0) -> Any:
        return nullcontext(Shown())


class Killed(BaseException):
    """Raised in place of a kill signal; no code under test may catch it."""


def run(work: Any) -> Any:
    """Train to the end; return the result."""
    return Finetune(work.config.trainer).train(work)


def kill_after(work: Any, step: int) -> None:
    """Let a run be killed after it has logged a step, before a checkpoint of that step."""
    log_step = work.run.log_step

    def log_then_die(record: dict[str, Any]) -> None:
        log_step(record)
        if record["step"] == step:
            raise Killed

    work.run.log_step = log_then_die


def assert_resumes(make_work: Any, folder: Path, straight: Any, *, killed: int, at: int, **trainer: Any) -> None:
    """Kill a run after a step, and check that it resumes at another one and ends as a run that was never killed."""
    work = make_work(run=make_work.recorder(folder), **trainer)
    kill_after(work, killed)
    with pytest.raises(Killed):
        run(work)
    recorder = make_work.recorder(folder)
    recorder.log = work.run.log
    again = make_work(run=recorder, **trainer)
    assert run(again).resumed_from == at
    assert comparable(again.run.log) == comparable(straight.run.log)
    for one, other in zip(straight.lm.module.parameters(), again.lm.module.parameters(), strict=True):
        assert torch.equal(one, other)


def comparable(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the logged steps of a run without their times."""
    return [{key: value for key, value in record.items() if key != "seconds"} for record in log]


def make_config(**trainer: Any) -> Config:
    return Config.model_validate(
        {
            "base_model": {"type": "scratch"},
            "input_features": [{"name": "q", "type": "text"}],
            "output_features": [{"name": "a", "type": "text"}],
            "trainer": {"type": "finetune", "learning_rate": 0.02, **trainer},
        }
    )


@pytest.fixture
def make_work(tmp_path: Path) -> Any:
    """Return a function that creates the trainer context of a run; without `run`, in a new folder."""

    def make(
        *, run: Recorder | None = None, lm: Any = None, batches: Any = None, evaluate: Any = None, **trainer: Any
    ) -> TrainerContext:
        lm = lm or BigramModel()
        held_out = SeededBatches(rows=16).batch(torch.arange(16))

        def loss(
            split: str, *, generated: bool = True, max_rows: int | None = None, step: int | None = None
        ) -> dict[str, float]:
            with torch.no_grad():
                return {"loss": float(lm.loss(lm.module, held_out)) / held_out.loss_tokens}

        return TrainerContext(
            config=make_config(**trainer),
            lm=lm,
            batches=batches or SeededBatches(),
            evaluate=evaluate or loss,
            splits=("training", "validation"),
            run=run or Recorder(tmp_path),
            device=torch.device("cpu"),
        )

    make.recorder = Recorder
    make.model = BigramModel
    make.batches = SeededBatches
    return make
