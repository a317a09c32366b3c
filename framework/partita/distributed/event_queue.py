"""What ranks of a training tell the process of the command when somebody else has started them, and where they do.

A process holds the board and nothing else, so nothing heavy is imported here.
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
    """Number of all."""
    node: str
    process: int


@dataclass(frozen=True)
class RankLogged:
    """A rank has logged something."""

    logger: str
    level: int
    text: str


@dataclass(frozen=True)
class ProgressOpened:
    """A rank shows a progress display; `number` tells its displays apart."""

    number: int
    total: int
    description: str
    completed: int


@dataclass(frozen=True)
class ProgressMoved:
    """A progress display moves on."""

    number: int
    amount: int
    shown: Mapping[str, Any]


@dataclass(frozen=True)
class ProgressClosed:
    """A progress display is gone."""

    number: int


@dataclass(frozen=True)
class RankFinished:
    """A rank has ended, with an error or with what came of its work."""

    error: BaseException | None
    result: Any = None


@dataclass(frozen=True)
class RankDied:
    """Ranks are gone, and all are started again, unless that has happened too often."""

    ranks: Sequence[int]
    """Those that are gone, or have ended because of it."""
    senders: Sequence[str]
    """All up to now, those that live among them; nothing counts that comes from them."""


@dataclass(frozen=True)
class JobFinished:
    """Nobody is started any more."""

    reason: str | None = None
    """Why, where it was not because all ranks were done."""
    is_death: bool = False
    """Whether the reason is that ranks have died."""


Message = RankStarted | RankLogged | ProgressOpened | ProgressMoved | ProgressClosed | RankFinished
"""What a rank tells."""
Posted = tuple[str, Message | RankDied | JobFinished]
"""Who tells, and what."""


class EventQueue:
    """Where ranks tell something, until it is fetched, and hear whether they are to stop: in a process of its own."""

    def __init__(self) -> None:
        self.told: list[Posted] = []
        self.ranks: dict[str, Any] = {}
        self.at_work: set[str] = set()
        self.stopping = self.over = False

    def tell(self, sender: str, message: Message | RankDied | JobFinished, rank: Any = None) -> None:
        """Keep a message; a rank gives its actor with it, so that it can be ended."""
        self.ranks.setdefault(sender, rank)
        self.told.append((sender, message))
        if isinstance(message, RankStarted):
            self.at_work.add(sender)
        if isinstance(message, RankFinished):
            self.at_work.discard(sender)
            self.over = self.over or not isinstance(message.error, OtherRankError | None)

    def fetch(self) -> tuple[list[Posted], dict[str, Any]]:
        """What was told since the last time, and all ranks that there were."""
        told, self.told = self.told, []
        return told, self.ranks

    def lose(self, ranks: Sequence[int]) -> bool:
        """Ranks have ended before their time: whether that ends all. Else it is told that all start again."""
        if not self.over:
            self.tell("", RankDied(ranks, [sender for sender in self.ranks if sender]))
            self.at_work.clear()
        return self.over

    def is_at_work(self) -> bool:
        """Whether a rank has not told of its end yet."""
        return bool(self.at_work)

    def stop(self) -> None:
        """All are to stop."""
        self.stopping = self.over = True

    def is_stopping(self) -> bool:
        """Whether all are to stop."""
        return self.stopping
