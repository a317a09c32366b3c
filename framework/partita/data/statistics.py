"""Counts of what a loader has yielded, and the time spent waiting for it."""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from partita_trainers.base import Batch, GlobalBatch


@dataclass
class Statistics:
    """Totals since the loader was created."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    """Tokens without padding."""
    loss_tokens: int = 0
    padding: int = 0
    """Padding tokens."""
    seconds: float = 0.0
    """From the first request for a step to the arrival of the last one."""
    waited_seconds: float = 0.0
    """Part of these seconds spent waiting for steps."""

    def add(self, batch: Batch) -> None:
        """Count a batch."""
        self.rows += batch.rows
        self.tokens += batch.tokens
        self.loss_tokens += batch.loss_tokens
        self.padding += batch.input_ids_BT.numel() - batch.tokens

    def count(self, steps: Iterator[GlobalBatch]) -> Iterator[GlobalBatch]:
        """Yield the steps unchanged, counted and timed."""
        requested = previous = time.perf_counter()
        for step in steps:
            arrived = time.perf_counter()
            self.waited_seconds += arrived - requested
            self.seconds += arrived - previous
            previous = arrived
            for batch in step.micro_batches:
                self.add(batch)
            self.steps += 1
            yield step
            requested = time.perf_counter()

    def record(self) -> dict[str, float]:
        """Return all counts, with padding_share of all tokens, wait_share of all seconds, and tokens_per_second."""
        return asdict(self) | {
            "padding_share": self.padding / max(1, self.tokens + self.padding),
            "wait_share": self.waited_seconds / self.seconds if self.seconds else 0.0,
            "tokens_per_second": self.tokens / self.seconds if self.seconds else 0.0,
        }
