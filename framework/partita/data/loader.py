"""Training data as optimizer steps from any position, and evaluation data as batches."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from partita.data.cursor import Cursor
from partita.data.encoded import EncodedRows
from partita.data.materialiser import PlannedStep, StepDataset, collate, materialise
from partita.data.planner import PLANNER_VERSION, IndexedPlanner
from partita_schema.data import Batching, LoaderOptions
from partita_schema.errors import ResumeError
from partita_trainers.base import Batch, Step


@dataclass
class Statistics:
    """What was handed out since the loader was made."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    """Real tokens."""
    loss_tokens: int = 0
    padding: int = 0
    """Tokens that only fill up rows."""

    @property
    def padding_share(self) -> float:
        """Padding among all tokens."""
        return self.padding / max(1, self.tokens + self.padding)

    def add(self, batch: Batch) -> None:
        """Count a batch."""
        self.rows += batch.rows
        self.tokens += batch.tokens
        self.loss_tokens += batch.loss_tokens
        self.padding += batch.input_ids_BT.numel() - batch.tokens


class Loader:
    """Steps over encoded rows, epoch after epoch: `partita_trainers.base.Batches`.

    The position lies in each step, not here: what workers made ahead and nobody used is simply made again.
    """

    def __init__(
        self,
        encoded: EncodedRows,
        *,
        batching: Batching,
        options: LoaderOptions,
        batch_size: int,
        batches_per_step: int,
        seed: int,
        pad_token_id: int,
        start_method: str | None = None,
    ) -> None:
        """`batches_per_step` is the number of batches that one optimizer step takes."""
        self._planner = IndexedPlanner(
            encoded.lengths, batching=batching, batch_size=batch_size, batches_per_step=batches_per_step, seed=seed
        )
        self._dataset = StepDataset(encoded, pad_token_id=pad_token_id)
        self._num_rows = len(encoded)
        self._options = options
        self._start_method = start_method
        self._started = False
        settings = {
            "batching": batching.model_dump_json(),
            "batch size": str(batch_size),
            "batches a step": str(batches_per_step),
            "seed": str(seed),
        }
        versions = {"planner version": str(PLANNER_VERSION), "encoded rows": encoded.fingerprint}
        self._cursor = Cursor(encoded.parts | settings | versions)
        self._statistics = Statistics()

    @property
    def statistics(self) -> dict[str, float]:
        """Steps, rows, tokens, loss_tokens, padding and padding_share of what was handed out."""
        return asdict(self._statistics) | {"padding_share": self._statistics.padding_share}

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in a pass over the data."""
        return self._planner.steps_per_epoch

    @property
    def num_rows(self) -> int:
        """Rows in a pass over the data."""
        return self._num_rows

    def load_cursor(self, cursor: Mapping[str, Any]) -> None:
        """Continue after the step that carried `cursor`.

        Raises ResumeError when data or plan are not the same, or steps have been asked for already.
        """
        if self._started:
            raise ResumeError("a data position must be loaded before the first step is asked for")
        loaded = Cursor.from_json(cursor)
        loaded.check(self._cursor.parts)
        if loaded.step > self.steps_per_epoch:
            raise ResumeError(
                f"the data position is step {loaded.step} of an epoch of {self.steps_per_epoch}; "
                "continue from an older checkpoint"
            )
        self._cursor = loaded

    def steps(self) -> Iterator[Step]:
        """Steps from the position on, without end."""
        self._started = True
        plans = materialise(self._dataset, self._plans(), options=self._options, start_method=self._start_method)
        for step in plans:
            for batch in step.batches:
                self._statistics.add(batch)
            self._statistics.steps += 1
            yield step

    def _plans(self) -> Iterator[PlannedStep]:
        epoch, first = self._cursor.epoch, self._cursor.step
        while True:
            for number, batches in enumerate(self._planner.steps(epoch, first), start=first + 1):
                ended = number == self.steps_per_epoch
                after = Cursor(self._cursor.parts, epoch + ended, 0 if ended else number)
                yield PlannedStep(batches, after.to_json(), epoch + number / self.steps_per_epoch)
            epoch, first = epoch + 1, 0


class EvaluationBatches:
    """Every row exactly once, the longest first, so that what does not fit memory fails at once."""

    def __init__(self, encoded: EncodedRows, *, batch_size: int, pad_token_id: int) -> None:
        self._encoded = encoded
        self._batch_size = batch_size
        self._pad_token_id = pad_token_id
        self._rows = np.argsort(-encoded.lengths, kind="stable")

    def __len__(self) -> int:
        return -(-len(self._rows) // self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, len(self._rows), self._batch_size):
            rows = self._rows[start : start + self._batch_size]
            yield collate(self._encoded, rows, pad_token_id=self._pad_token_id)


def evenly(length: int, wanted: int | None) -> np.ndarray:
    """Places at even distances, all of them where `wanted` is None or larger."""
    if wanted is None or wanted >= length:
        return np.arange(length)
    return np.arange(wanted) * length // wanted
