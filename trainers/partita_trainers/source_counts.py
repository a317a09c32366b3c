"""How much of each source of a mix was used."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from partita_trainers.base import Batch, GlobalBatch
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup
from partita_trainers.step import row_starts


class SourceCounts:
    """Rows and tokens by source, over all steps of a run; keys of rows begin with `source/`."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names` are the sources of the mix; none where there is no mix."""
        self._names = tuple(names)
        self._rows = dict.fromkeys(self._names, 0)
        self._tokens = dict.fromkeys(self._names, 0)

    def add(self, global_batch: GlobalBatch, process_group: ProcessGroup = SINGLE_PROCESS) -> dict[str, int]:
        """Count a step that was taken on all ranks; returns `rows/source` and `tokens/source`, for the log."""
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
        if not any(rows.values()):  # a data set that was given takes the place of the mix
            return {}
        return {f"rows/{name}": rows[name] for name in rows} | {f"tokens/{name}": tokens[name] for name in tokens}

    def _counted(self, global_batch: GlobalBatch) -> dict[str, tuple[int, int]]:
        """Rows and tokens of each source in the batches of this rank."""
        found = dict.fromkeys(self._names, (0, 0))
        for batch in global_batch.micro_batches:
            for key, length in zip(batch.keys, row_tokens(batch), strict=True):
                source = key.partition("/")[0]
                if source in found:
                    rows, tokens = found[source]
                    found[source] = rows + 1, tokens + length
        return found

    def state_dict(self) -> dict[str, dict[str, int]]:
        """Rows and tokens of each source that was used; JSON."""
        return {
            name: {"rows": self._rows[name], "tokens": self._tokens[name]} for name in self._names if self._rows[name]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; an older one has no state."""
        for name in self._names:
            counts = state.get(name, {})
            self._rows[name], self._tokens[name] = counts.get("rows", 0), counts.get("tokens", 0)


def row_tokens(batch: Batch) -> list[int]:
    """Tokens of each row, in the order of the keys."""
    if batch.position_ids_BT is None:
        lengths: list[int] = batch.lengths_B.tolist()
        return lengths
    found: list[int] = []
    for starts_T, length in zip(row_starts(batch), batch.lengths_B.tolist(), strict=True):
        starts = [*starts_T.nonzero()[:, 0].tolist(), length]
        found += [end - start for start, end in pairwise(starts)]
    return found
