"""The journals of a job with several ranks: one per rank, merged at the end.

Rank 0 writes the job's journal, and every other rank writes a file next to it, `NAME.rank-3.jsonl`. When the job is
started with any number of processes, leftover files are merged first: what a killed rank had answered is not
generated again.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from partita.generation.journal import Journal
from partita.runs.files import rank_path, rank_paths
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup, main_process_first


@dataclass(frozen=True)
class JobJournal:
    """The journal of this rank, and the progress of the job."""

    own: Journal
    """The job's journal on rank 0, a file next to it on other ranks."""
    before: npt.NDArray[np.bool_]
    """Rows that are done, [rows]."""
    tries: npt.NDArray[np.int16]
    """How often each row was tried, [rows]."""
    path: Path
    fingerprint: Mapping[str, str]
    keys: npt.NDArray[np.uint8]
    process_group: ProcessGroup

    def attempts(self, row: int) -> int:
        """Return how often a row was tried before."""
        return int(self.tries[row])

    def join(self) -> None:
        """Merge the answers of all ranks into the job's journal. Collective: all ranks wait for it."""
        if self.process_group.rank > 0:
            self.own.close()
        self.process_group.all_gather_object(None, "the end of the answers")
        if self.process_group.world_size > 1:
            self.process_group.run_on_rank_zero(
                lambda: absorb_all(self.own, fingerprint=self.fingerprint, keys=self.keys), "the journals"
            )


@contextmanager
def open_journals(
    path: Path,
    *,
    fingerprint: Mapping[str, str],
    keys: npt.NDArray[np.uint8],
    fresh: bool = False,
    retry_errors: bool = False,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Iterator[JobJournal]:
    """Open and lock the journals of a job; each rank has its own. Raises what `Journal.open` raises.

    Args:
        path: The job's journal.
        fingerprint: What determines an answer, by name.
        keys: Keys of the rows, [rows, 16].
        fresh: Discard existing records.
        retry_errors: Whether rows with an error are generated again.
        process_group: The ranks of the job.
    """
    with main_process_first(process_group, "opening the journals"):
        own_path = rank_path(path, process_group.rank)
        own = Journal.open(own_path, fingerprint=fingerprint, keys=keys, fresh=fresh or process_group.rank > 0)
        if process_group.rank == 0:
            absorb_all(own, fingerprint=fingerprint, keys=keys, fresh=fresh)
    with own:
        state = process_group.run_on_rank_zero(
            lambda: (own.done(retry_errors=retry_errors), own.all_attempts()), "what is done"
        )
        yield JobJournal(own, *state, path, fingerprint, keys, process_group)


def absorb_all(
    journal: Journal, *, fingerprint: Mapping[str, str], keys: npt.NDArray[np.uint8], fresh: bool = False
) -> None:
    """Merge the journals of all ranks into the job's journal.

    Args:
        journal: The job's journal.
        fingerprint: What determines an answer, by name.
        keys: Keys of the rows, [rows, 16].
        fresh: Delete the journals of ranks instead.
    """
    for left in rank_paths(journal.path):
        if fresh:
            left.unlink()
        else:
            journal.absorb(left, fingerprint=fingerprint, keys=keys)
