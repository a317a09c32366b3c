"""Training in the worst case: whole steps on the longest rows of the data, undone afterwards."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Self

import torch

from partita_trainers.base import Batch, ProbeContext
from partita_trainers.batch_size.clock import now
from partita_trainers.batch_size.probe import Purpose, Timing, Volume
from partita_trainers.checkpoints.preserved_state import clear_gradients, preserved_state

SEED = 0


def worst_batch(
    rows: int,
    *,
    tokens: int,
    loss_tokens: int,
    token_ids: Sequence[int],
    packed: bool = False,
    branched: bool = False,
) -> Batch:
    """Build a batch of random rows.

    The last of several rows is one token shorter, because real batches contain rows of different lengths. There are at
    least two tokens, one of them a loss token: the first token of a row has no loss.

    Args:
        rows: Number of rows; of sequences with `packed`.
        tokens: Tokens of each row.
        loss_tokens: Loss tokens at the end of each row.
        token_ids: Ids to draw from.
        packed: Put two rows into each sequence, the first of one token, so that the model has to keep rows apart.
        Sequences
            have at least three tokens.
        branched: Make the loss tokens two branches of about the same length.
    """
    free = 2 if packed else 1
    tokens = max(free + 1, tokens)
    loss_tokens = min(max(1, loss_tokens), tokens - free)
    allowed = torch.tensor(token_ids)
    chosen = torch.randint(len(allowed), (rows, tokens), generator=torch.Generator().manual_seed(SEED))
    ids_BT = allowed[chosen]
    labels_BT = ids_BT.clone()
    labels_BT[:, : tokens - loss_tokens] = -100
    lengths_B = torch.full((rows,), tokens)
    if rows > 1:
        lengths_B[-1] = tokens - 1
        labels_BT[-1, -1] = -100
        if loss_tokens < tokens - free:
            labels_BT[-1, tokens - loss_tokens - 1] = ids_BT[-1, tokens - loss_tokens - 1]
    keys = tuple(f"probe:{row}" for row in range(rows * free))
    if not (packed or branched):
        return Batch(ids_BT, labels_BT, lengths_B, keys)
    positions_BT = positions_of(rows, tokens, packed=packed, loss_tokens=loss_tokens if branched else 0)
    return Batch(ids_BT, labels_BT, lengths_B, keys, positions_BT)


def positions_of(sequences: int, tokens: int, *, packed: bool, loss_tokens: int) -> torch.Tensor:
    """Return position ids [sequences, tokens].

    Args:
        sequences: Number of sequences; the last of several ends with padding.
        tokens: Tokens of each sequence.
        packed: Whether the first row of each sequence has one token.
        loss_tokens: Tokens at the end of each sequence that are two branches; 0 for none.
    """
    positions_T = (torch.arange(tokens) - int(packed)).clamp(min=0)
    second = loss_tokens // 2
    if second:
        positions_T[-second:] -= loss_tokens - second
    positions_BT = positions_T.repeat(sequences, 1)
    if sequences > 1:
        positions_BT[-1, -1] = 0
    return positions_BT


TakeStep = Callable[[Sequence[Batch]], object]
"""Takes one step on some micro-batches."""
Begin = Callable[[], AbstractContextManager[TakeStep]]
"""Builds the optimizers and yields a function that takes steps with them; they are released on exit."""

WARM_UP_TOKENS = 16
"""Tokens of the row with which optimizers allocate their state."""


class TrainingProbe:
    """A `Probe` of training, and the context in which it can run.

    Optimizer state stays allocated from the first run to the end of the context, as in training, so that other probes
    on the same device account for it. On exit, weights, everything else in a checkpoint, buffers, training mode and
    random generators are restored, and gradients are None.
    """

    purpose: Purpose = "training"
    new_tokens = 0

    def __init__(self, context: ProbeContext, begin: Begin, *, branched: bool = False) -> None:
        """Create the probe.

        Args:
            context: What is trained, and on which rows.
            begin: Builds the optimizers.
            branched: Whether rows have branches.
        """
        self.work, self.begin, self.branched = context, begin, branched
        self.take_step: TakeStep | None = None
        self.has_state = False
        self.stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(preserved_state(self.work.lm))
            self.take_step = stack.enter_context(self.begin())
            self.stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.take_step, self.has_state = None, False
        self.stack.__exit__(kind, error, traceback)

    @property
    def max_rows(self) -> int:
        """Upper bound on the rows of a batch."""
        return self.work.max_rows

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the longest row."""
        return self.work.max_row_tokens

    def warm_up(self) -> None:
        """Take a step on one short row to create optimizer state, unless it exists."""
        if not self.has_state:
            self.timed_step(1, tokens=min(WARM_UP_TOKENS, self.prompt_tokens))
            self.has_state = True

    def run(self, rows: int) -> Timing:
        """Take one step with `rows` rows, after a warm-up if this is the first."""
        self.warm_up()
        return Timing(prefill_seconds=self.timed_step(rows, tokens=self.prompt_tokens))

    def timed_step(self, rows: int, *, tokens: int) -> float:
        """Return the seconds of a step until the device has finished; gradients are cleared."""
        if self.take_step is None:
            raise AssertionError("a probe runs only inside its own context")
        work = self.work
        batch = worst_batch(
            rows,
            tokens=tokens,
            loss_tokens=work.max_loss_tokens,
            token_ids=work.token_ids,
            packed=work.packed,
            branched=self.branched,
        )
        try:
            started = now(work.device)
            self.take_step([batch])
            return now(work.device) - started
        finally:
            clear_gradients(work.lm.module)

    def estimated_bytes(self, rows: int) -> int:
        """Return the memory of a batch by a formula."""
        return self.work.estimated_bytes(rows)

    def decode_step(self, rows: int) -> float:
        """Return 0: nothing is generated."""
        return 0.0

    def volume(self, rows: int) -> Volume:
        """Return batches and tokens of an epoch as planned for the data."""
        return self.work.volume(rows)
