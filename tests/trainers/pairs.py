"""Pairs of answers as batches, and a model for them, for tests of trainers on preferences."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from partita_schema.config import Config
from partita_trainers.base import Batch, GlobalBatch

from .conftest import VOCABULARY, BigramModel, SeededBatches


class PairModel(BigramModel):
    """A model whose token depends on the token before it in its answer, or on the last token of the prompt."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.starting: dict[str, torch.Tensor] | None = None
        self.passes = list[str]()

    def token_log_probs(self, module: torch.nn.Module, batch: Batch) -> torch.Tensor:
        assert batch.position_ids_BT is not None
        self.passes.append("training" if module.training else "evaluation")
        rows, columns = (batch.labels_BT[:, 1:] != -100).nonzero(as_tuple=True)
        columns = columns + 1
        before = []
        for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
            wanted = batch.position_ids_BT[row, column] - 1
            before.append(int((batch.position_ids_BT[row, :column] == wanted).nonzero()[-1]))
        log_probs = module(batch.input_ids_BT).float().log_softmax(-1)
        return log_probs[rows, torch.tensor(before, dtype=torch.int64), batch.labels_BT[rows, columns]]

    def keep_reference(self) -> None:
        self.starting = {name: tensor.clone() for name, tensor in self.module.state_dict().items()}

    def drop_reference(self) -> None:
        self.starting = None

    @contextmanager
    def reference(self) -> Iterator[None]:
        assert self.starting is not None
        current = {name: tensor.clone() for name, tensor in self.module.state_dict().items()}
        self.module.load_state_dict(self.starting)
        with torch.no_grad():
            yield
        self.module.load_state_dict(current)


def pair_row(index: int) -> tuple[list[int], list[int], list[int]]:
    """Return the ids of a prompt, a chosen and a rejected answer, of lengths that differ from row to row."""
    generator = torch.Generator().manual_seed(index)
    lengths = (2 + index % 3, 1 + index % 4, 1 + index % 5)
    prompt, chosen, rejected = (torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in lengths)
    return prompt, chosen, rejected


def pair_batch(indices: list[int], *, packed: bool = False) -> Batch:
    """Return the rows with these indices as a batch: a line each, or all in one line."""
    lines = []
    for index in indices:
        prompt, chosen, rejected = pair_row(index)
        labels = [-100] * len(prompt) + chosen + rejected
        first = len(prompt)
        positions = [*range(first + len(chosen)), *range(first, first + len(rejected))]
        lines.append((prompt + chosen + rejected, labels, positions))
    if packed:
        lines = [tuple([value for line in lines for value in line[part]] for part in range(3))]  # type: ignore[misc]
    width = max(len(line[0]) for line in lines)
    padded = [
        [line[part] + [filling] * (width - len(line[0])) for line in lines] for part, filling in enumerate((0, -100, 0))
    ]
    return Batch(
        input_ids_BT=torch.tensor(padded[0]),
        labels_BT=torch.tensor(padded[1]),
        lengths_B=torch.tensor([len(line[0]) for line in lines]),
        keys=tuple(f"row:{index:03d}" for index in indices),
        position_ids_BT=torch.tensor(padded[2]),
    )


class PairBatches(SeededBatches):
    """Pairs, shuffled by epoch, split into `micro` batches per step, of which a rank has its part."""

    rank, ranks = 0, 1

    def __init__(self, *, rows: int = 24, step_rows: int = 8, micro: int = 2) -> None:
        super().__init__(rows=rows, step_rows=step_rows, micro=micro)

    def batch(self, chosen: torch.Tensor) -> Batch:
        return pair_batch(chosen.tolist())

    def steps(self) -> Iterator[GlobalBatch]:
        for step in super().steps():
            yield GlobalBatch(step.micro_batches[self.rank :: self.ranks], step.data_position, step.epoch)


def pair_config(**trainer: Any) -> Config:
    """Return a configuration with pairs."""
    return Config.model_validate(
        {
            "base_model": {"type": "scratch"},
            "input_features": [{"name": "q", "type": "text"}],
            "output_features": [{"name": "a", "type": "preference"}],
            "trainer": {"type": "preference", "learning_rate": 0.02, **trainer},
        }
    )
