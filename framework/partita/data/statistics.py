"""Counts of what a loader has handed out, and how long it was waited for."""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from partita_trainers.base import Batch, GlobalBatch


@dataclass
class Statistics:
    """What was handed out since the loader was made."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    """Real tokens."""
    loss_tokens: int = 0
    padding: int = 0
    """Tokens that only fill up lines."""
    seconds: float = 0.0
    """From the first step that was asked for to the last one that came."""
    waited_seconds: float = 0.0
    """Part of them in which a step was waited for."""

    def add(self, batch: Batch) -> None:
        """Count a batch."""
        self.rows += batch.rows
        self.tokens += batch.tokens
        self.loss_tokens += batch.loss_tokens
        self.padding += batch.input_ids_BT.numel() - batch.tokens

    def count(self, steps: Iterator[GlobalBatch]) -> Iterator[GlobalBatch]:
        """The steps as they are, counted and timed."""
        asked = left = time.perf_counter()
        for step in steps:
            came = time.perf_counter()
            self.waited_seconds += came - asked
            self.seconds += came - left
            left = came
            for batch in step.micro_batches:
                self.add(batch)
            self.steps += 1
            yield step
            asked = time.perf_counter()

    def record(self) -> dict[str, float]:
        """All counts, with padding_share of all tokens, wait_share of all seconds, and tokens_per_second."""
        return asdict(self) | {
            "padding_share": self.padding / max(1, self.tokens + self.padding),
            "wait_share": self.waited_seconds / self.seconds if self.seconds else 0.0,
            "tokens_per_second": self.tokens / self.seconds if self.seconds else 0.0,
        }
