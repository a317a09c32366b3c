"""The journals of a job that several processes work on: one each, and in the end one again.

Rank 0 has the journal of the job, every other rank one beside it, `NAME.rank-3.jsonl`, in which nobody else writes.
Whenever the job is started, by whatever number of processes, those that were left behind are taken over first: what a
killed rank had answered is not answered again.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from partita.inference.journal import Journal
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup, main_process_first


@dataclass(frozen=True)
class JobJournal:
    """Where this process keeps answers, and what of the job is done already."""

    own: Journal
    """The job's journal on rank 0, one beside it on others."""
    before: npt.NDArray[np.bool_]
    """Rows that need nothing more, [rows]."""
    tries: npt.NDArray[np.int16]
    """How often each row was tried, [rows]."""
    path: Path
    fingerprint: Mapping[str, str]
    keys: npt.NDArray[np.uint8]
    process_group: ProcessGroup

    def attempts(self, row: int) -> int:
        """How often a row was tried before."""
        return int(self.tries[row])

    def join(self) -> None:
        """Put what all ranks have answered into the journal of the job. All ranks wait for that."""
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
    """The journals of a job at `path`, open and locked; each rank has its own. Raises as `Journal.open` does."""
    with main_process_first(process_group, "opening the journals"):
        place = path if process_group.rank == 0 else rank_path(path, process_group.rank)
        own = Journal.open(place, fingerprint=fingerprint, keys=keys, fresh=fresh or process_group.rank > 0)
        if process_group.rank == 0:
            absorb_all(own, fingerprint=fingerprint, keys=keys, fresh=fresh)
    with own:
        state = process_group.run_on_rank_zero(
            lambda: (own.done(retry_errors=retry_errors), own.all_attempts()), "what is done"
        )
        yield JobJournal(own, *state, path, fingerprint, keys, process_group)


def rank_path(path: Path, rank: int) -> Path:
    """Where a rank other than 0 keeps its answers."""
    return path.with_name(f"{path.stem}.rank-{rank}{path.suffix}")


def absorb_all(
    journal: Journal, *, fingerprint: Mapping[str, str], keys: npt.NDArray[np.uint8], fresh: bool = False
) -> None:
    """Take over all journals of ranks that lie beside one; with `fresh` they are removed."""
    for left in sorted(journal.path.parent.glob(f"{journal.path.stem}.rank-*{journal.path.suffix}")):
        if fresh:
            left.unlink()
        else:
            journal.absorb(left, fingerprint=fingerprint, keys=keys)
