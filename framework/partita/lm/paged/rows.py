"""Rows of a paged cache, and their tokens, which the host reads one step late.

A step leaves its tokens on the device, where the next step continues them. The host asks for those of a step after it
has started the next one, so that the device does not wait for the host.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from partita.lm.decoding.row import Row


@dataclass(slots=True)
class PagedRow(Row):
    """The state of a row that the host keeps."""

    index: int = -1
    """Its index in the buffers of the device; -1 before it has one."""
    blocks: list[int] = field(default_factory=list)
    """Its blocks of the KV cache."""
    started: int = 0
    """Number of tokens that were chosen or are being chosen, read or not."""
    read: int = 0
    """Number of those that were read."""
    ended: bool = False
    """Whether it has ended; tokens that are read later are thrown away."""
    unclean: bool = False
    """Whether its blocks may hold NaN."""


class Pending(NamedTuple):
    """Tokens on their way to the host."""

    rows: Sequence[tuple[int, PagedRow]]
    """The index of each row in `tokens`, and the row."""
    tokens: torch.Tensor
    copied: "torch.cuda.Event | None"
    """Set once the tokens are there; None on a CPU."""

    def read(self) -> list[tuple[PagedRow, int]]:
        """Return the token of each row; they are on the host."""
        tokens: list[int] = self.tokens.tolist()
        return [(row, tokens[index]) for index, row in self.rows]


class LateTokens:
    """Copies tokens to the host, and hands them out in order."""

    def __init__(self) -> None:
        self.pending: deque[Pending] = deque()

    def add(self, rows: Sequence[tuple[int, PagedRow]], tokens_N: torch.Tensor) -> None:
        """Start to copy the tokens of a step."""
        copied = None
        if tokens_N.device.type == "cuda":
            held_N = torch.empty(tokens_N.shape, dtype=tokens_N.dtype, pin_memory=True)
            held_N.copy_(tokens_N, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(torch.cuda.current_stream(tokens_N.device))
        else:
            held_N = tokens_N.clone()
        self.pending.append(Pending(rows, held_N, copied))

    def read(self, *, leave: int) -> list[tuple[PagedRow, int]]:
        """Return the tokens of all steps but the last `leave` ones, once they are on the host."""
        ready = [self.pending.popleft() for _ in range(max(0, len(self.pending) - leave))]
        if ready and ready[-1].copied is not None:
            # The only time that the host waits for the device. Earlier copies are done before the last one.
            ready[-1].copied.synchronize()
        return [found for pending in ready for found in pending.read()]
