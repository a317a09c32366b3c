"""The state of each row in a decode step, in buffers on the device whose addresses do not change.

Row i of every buffer belongs to the row with index i, from its prompt to its last token. An index without a row decodes
a token that nobody reads: it writes to a block that no row reads and does not advance.

Shapes: R indices, N of them, M blocks of a row, U new tokens of the longest answer and one more, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from partita.lm.paged.blocks import EMPTY, SCRAP
from partita.lm.paged.cache import table_of, tensor_on_device


class RowState(NamedTuple):
    """The state of rows; all tensors have the rows in the first dimension."""

    ids: torch.Tensor
    """The last token, which is not in the cache yet, int64 [R]."""
    positions: torch.Tensor
    """The position of that token, int64 [R]."""
    advances: torch.Tensor
    """By how many tokens a step advances the row: 0 for an index without a row, int64 [R]."""
    drawn: torch.Tensor
    """Number of new tokens, int64 [R]."""
    least: torch.Tensor
    """Number of new tokens before which the row cannot end, int64 [R]."""
    tables: torch.Tensor
    """The blocks of the row, int32 [R, M]."""
    uniforms: torch.Tensor
    """A random number in [0, 1) for each new token, float32 [R, U]; U is 0 for greedy decoding."""
    seen: torch.Tensor
    """Whether a token is in the row, bool [R, V]; V is 0 without a repetition penalty."""

    def first(self, rows: int) -> "RowState":
        """Return views of the first rows."""
        return RowState(*(held[:rows] for held in self))

    def at(self, indices_N: torch.Tensor) -> "RowState":
        """Return copies of rows."""
        return RowState(*(held.index_select(0, indices_N) for held in self))

    def begin(self, indices_N: torch.Tensor, tokens_N: torch.Tensor) -> None:
        """Make the chosen tokens the first ones of rows, in place; -1 stands for rows without one."""
        first_N = tokens_N.clamp(min=0)
        self.ids.index_copy_(0, indices_N, first_N)
        self.drawn.index_fill_(0, indices_N, 1)
        if self.seen.shape[1]:
            self.seen.index_put_((indices_N, first_N), torch.ones_like(first_N, dtype=torch.bool))

    def advance(self, tokens_N: torch.Tensor) -> None:
        """Make the chosen tokens the last ones of all rows, in place; -1 stands for rows without one."""
        last_N = tokens_N.clamp(min=0)
        self.ids.copy_(last_N)
        self.positions.add_(self.advances)
        self.drawn.add_(self.advances)
        if self.seen.shape[1]:
            self.seen.scatter_(1, last_N[:, None], value=True)

    def copied(self) -> "RowState":
        """Return copies of all rows."""
        return RowState(*(held.clone() for held in self))

    def restore(self, earlier: "RowState") -> None:
        """Write back an earlier state."""
        for held, before in zip(self, earlier, strict=True):
            held.copy_(before)


def empty_state(rows: int, *, blocks: int, draws: int, vocabulary: int, device: torch.device) -> RowState:
    """Return the state of indices without rows.

    Args:
        rows: R, the number of indices.
        blocks: M, the blocks of a row.
        draws: U, the random numbers of a row.
        vocabulary: V, the tokens that are counted; 0 if no setting depends on them.
        device: Device of the model.
    """
    ids, positions, advances, drawn, least = torch.zeros(5, rows, dtype=torch.long, device=device)
    tables = table_of([[SCRAP]] * rows, width=blocks, device=device)
    uniforms = torch.zeros(rows, draws, device=device)
    seen = torch.zeros(rows, vocabulary, dtype=torch.bool, device=device)
    return RowState(ids, positions, advances, drawn, least, tables, uniforms, seen)


@dataclass(frozen=True)
class NewRow:
    """What is written when a row starts."""

    index: int
    length: int
    """Tokens of the prompt."""
    least: int
    blocks: Sequence[int]
    uniforms: Sequence[float]
    ids: Sequence[int]
    """Tokens of the prompt."""


def start_rows(state: RowState, rows: Sequence[NewRow]) -> torch.Tensor:
    """Write the state of rows after their prompts, before their first tokens; return their indices [N]."""
    device, draws = state.ids.device, state.uniforms.shape[1]
    # One copy to the device for all numbers.
    numbers_N4 = tensor_on_device([[row.index, row.length, 1, row.least] for row in rows], device=device)
    indices_N, lengths_N, ones_N, least_N = numbers_N4.unbind(1)
    state.positions.index_copy_(0, indices_N, lengths_N)
    state.advances.index_copy_(0, indices_N, ones_N)
    state.least.index_copy_(0, indices_N, least_N)
    state.drawn.index_fill_(0, indices_N, 0)
    tables_NM = table_of([row.blocks for row in rows], width=state.tables.shape[1], device=device)
    state.tables.index_copy_(0, indices_N, tables_NM)
    if draws:
        padded = [[*row.uniforms, *[0.0] * (draws - len(row.uniforms))] for row in rows]
        state.uniforms.index_copy_(0, indices_N, tensor_on_device(padded, device=device, dtype=torch.float32))
    if state.seen.shape[1]:
        pairs = [(row.index, token) for row in rows for token in row.ids]
        pairs_T2 = tensor_on_device(pairs, device=device)
        state.seen.index_fill_(0, indices_N, False)
        state.seen.index_put_((pairs_T2[:, 0], pairs_T2[:, 1]), torch.ones_like(pairs_T2[:, 0], dtype=torch.bool))
    return indices_N


def stop_rows(state: RowState, indices: Sequence[int]) -> None:
    """Make indices those without a row."""
    if not indices:
        return
    indices_N = tensor_on_device(indices, device=state.ids.device)
    for held in (state.ids, state.positions, state.advances, state.drawn):
        held.index_fill_(0, indices_N, 0)
    state.tables.index_fill_(0, indices_N, EMPTY)
    state.tables[:, 0].index_fill_(0, indices_N, SCRAP)


def move_rows(state: RowState, moves: Sequence[tuple[int, int]]) -> None:
    """Move rows to other indices, given as pairs of source and target."""
    pairs_N2 = tensor_on_device(moves, device=state.ids.device)
    for held in state:
        held.index_copy_(0, pairs_N2[:, 1], held.index_select(0, pairs_N2[:, 0]))
    stop_rows(state, [source for source, _ in moves])
