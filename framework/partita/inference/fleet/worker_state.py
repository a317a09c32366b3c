"""One worker, as far as it is known to the process that deals."""

import time
from dataclasses import dataclass, field

from partita.inference.fleet.messages import WorkerLocation


@dataclass
class WorkerState:
    """One worker, as far as it is known here."""

    number: int
    state: str = "starting"
    """starting, placed, loading, ready, asked something, or working on an errand."""
    place: WorkerLocation | None = None
    heard: float = field(default_factory=time.monotonic)
    """When something came from it."""
    at_a_time: int = 0
    """Rows that it answers at a time."""

    @property
    def node(self) -> str | None:
        """Its machine, once that is known."""
        return self.place.node if self.place is not None else None


def described(member: WorkerState) -> str:
    """A worker, for people."""
    place = member.place
    return f"worker {member.number}" + (f" (process {place.process} on {place.node})" if place is not None else "")
