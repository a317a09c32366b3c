"""Rows and tokens used of each source of a mix."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from partita_trainers.base import Batch, GlobalBatch
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup


class SourceCounts:
    """Rows and tokens by source over all steps of a run; row keys begin with `source/`."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names` are the sources of the mix, empty if there is no mix."""
        self._names = tuple(names)
        self._rows = dict.fromkeys(self._names, 0)
        self._tokens = dict.fromkeys(self._names, 0)

    def add(self, global_batch: GlobalBatch, process_group: ProcessGroup = SINGLE_PROCESS) -> dict[str, int]:
        """Count a step over all ranks. Return `rows/source` and `tokens/source` of the step for the log."""
        if not self._names:
            return {}
        rows, tokens = dict.fromkeys(self._names, 0), dict.fromkeys(self._names, 0)
        for mine in process_group.all_gather_object(self._counted(global_batch), "rows of the sources"):
            for name, (some_rows, some_tokens) in mine.items():
                rows[name] += some_rows
                tokens[name] += some_tokens
        for name in self._names:
            self._rows[name] += rows[name]
            self._tokens[name] += tokens[name]
        if not any(rows.values()):  # a dataset passed to train() replaces the mix
            return {}
        return {f"rows/{name}": rows[name] for name in rows} | {f"tokens/{name}": tokens[name] for name in tokens}

    def _counted(self, global_batch: GlobalBatch) -> dict[str, tuple[int, int]]:
        """Count rows and tokens of each source in this rank's micro-batches."""
        counts = dict.fromkeys(self._names, (0, 0))
        for batch in global_batch.micro_batches:
            for key, length in zip(batch.keys, row_tokens(batch), strict=True):
                source = key.partition("/")[0]
                if source in counts:
                    rows, tokens = counts[source]
                    counts[source] = rows + 1, tokens + length
        return counts

    def state_dict(self) -> dict[str, dict[str, int]]:
        """Return rows and tokens of each used source, as JSON."""
        return {
            name: {"rows": self._rows[name], "tokens": self._tokens[name]} for name in self._names if self._rows[name]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts of a checkpoint; older checkpoints have none."""
        for name in self._names:
            counts = state.get(name, {})
            self._rows[name], self._tokens[name] = counts.get("rows", 0), counts.get("tokens", 0)


def row_tokens(batch: Batch) -> list[int]:
    """Return the number of tokens of each row, in the order of the keys."""
    if batch.position_ids_BT is None:
        lengths: list[int] = batch.lengths_B.tolist()
        return lengths
    row_lengths: list[int] = []
    for starts_T, length in zip(batch.row_starts(), batch.lengths_B.tolist(), strict=True):
        starts = [*starts_T.nonzero()[:, 0].tolist(), length]
        row_lengths += [end - start for start, end in pairwise(starts)]
    return row_lengths
