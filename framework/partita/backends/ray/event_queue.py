"""Messages from the ranks of a training to the process of the command, when another program starts the ranks.

The queue is the only content of its process, so this module imports nothing heavy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from partita_schema.errors import OtherRankError


@dataclass(frozen=True)
class RankStarted:
    """A rank has started."""

    rank: int
    ranks: int
    """World size."""
    node: str
    process: int


@dataclass(frozen=True)
class LogMessage:
    """A log record of a rank or a worker."""

    logger: str
    level: int
    text: str


@dataclass(frozen=True)
class ProgressOpened:
    """A rank opened a progress display; `number` identifies it among the displays of the rank."""

    number: int
    total: int
    description: str
    completed: int


@dataclass(frozen=True)
class ProgressMoved:
    """A progress display advanced."""

    number: int
    amount: int
    shown: Mapping[str, Any]


@dataclass(frozen=True)
class ProgressClosed:
    """A progress display was closed."""

    number: int


@dataclass(frozen=True)
class RankFinished:
    """A rank finished, with an error or with its result."""

    error: BaseException | None
    result: Any = None


@dataclass(frozen=True)
class RankDied:
    """Ranks died. All ranks are restarted, unless the limit of failures is reached."""

    ranks: Sequence[int]
    """Ranks that died, or ended because of it."""
    senders: Sequence[str]
    """All senders so far, including live ranks; later messages from them are ignored."""


@dataclass(frozen=True)
class JobFinished:
    """No rank will be started again."""

    reason: str | None = None
    """Why the job ended, if not because all ranks finished."""
    is_death: bool = False
    """Whether the reason is that ranks died."""


Message = RankStarted | LogMessage | ProgressOpened | ProgressMoved | ProgressClosed | RankFinished
"""A message from a rank."""
Posted = tuple[str, Message | RankDied | JobFinished]
"""The sender and the message."""


class EventQueue:
    """A queue of messages from the ranks, with a stop flag for them. It lives in its own process."""

    def __init__(self) -> None:
        self.messages: list[Posted] = []
        self.ranks: dict[str, Any] = {}
        self.at_work: set[str] = set()
        self.stopping = self.over = False

    def post(self, sender: str, message: Message | RankDied | JobFinished, rank: Any = None) -> None:
        """Add a message. A rank passes its actor too, so that it can be killed."""
        self.ranks.setdefault(sender, rank)
        self.messages.append((sender, message))
        if isinstance(message, RankStarted):
            self.at_work.add(sender)
        if isinstance(message, RankFinished):
            self.at_work.discard(sender)
            self.over = self.over or not isinstance(message.error, OtherRankError | None)

    def fetch(self) -> tuple[list[Posted], dict[str, Any]]:
        """Return the messages since the last call, and the actors of all ranks so far."""
        messages, self.messages = self.messages, []
        return messages, self.ranks

    def record_deaths(self, ranks: Sequence[int]) -> bool:
        """Record that ranks died early, and return whether that ends the job; otherwise all ranks are restarted."""
        if not self.over:
            self.post("", RankDied(ranks, [sender for sender in self.ranks if sender]))
            self.at_work.clear()
        return self.over

    def is_at_work(self) -> bool:
        """Return whether a rank has not finished yet."""
        return bool(self.at_work)

    def stop(self) -> None:
        """Request that all ranks stop."""
        self.stopping = self.over = True

    def is_stopping(self) -> bool:
        """Return whether all ranks are to stop."""
        return self.stopping
