"""The state of one worker, as known to the pool."""

import time
from dataclasses import dataclass, field

from partita.backends.ray.messages import WorkerLocation


@dataclass
class WorkerState:
    """The state of one worker, as known to the pool."""

    number: int
    state: str = "starting"
    """starting, placed, loading, ready, asked (a call is pending), or working (on a job)."""
    place: WorkerLocation | None = None
    heard: float = field(default_factory=time.monotonic)
    """Time of its last message."""
    at_a_time: int = 0
    """Rows that it generates at a time."""

    @property
    def node(self) -> str | None:
        """Its machine, once known."""
        return self.place.node if self.place is not None else None


def described(member: WorkerState) -> str:
    """Describe a worker for messages."""
    place = member.place
    return f"worker {member.number}" + (f" (process {place.process} on {place.node})" if place is not None else "")
