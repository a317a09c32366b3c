"""Speakers, which get the turns of agents: of a model (`model_speaker.py`) or a program (`program_speaker.py`).

A speaker serves all episodes that wait for its agent. `Rollout` calls `step` of each speaker in turn; a step of a model
is one token of all its answers, so that models and programs progress together.
"""

from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from partita.data.episode import Episode, Status


class WaitingTurn(Protocol):
    """An active episode that waits for the turn of an agent."""

    episode: Episode
    active_index: int
    """Index of the episode among the active ones."""


class TurnResult(NamedTuple):
    """The result of a request for a turn."""

    active_index: int
    """Index of the episode among the active ones."""
    text: str | None = None
    """Text of the turn; None if the agent says nothing."""
    tokens: tuple[int, ...] | None = None
    """Tokens of the text; None if the agent is a program."""
    end: tuple[Status, str] | None = None
    """Status and reason if the episode ends instead."""
    answer: str | None = None
    """What the model generated, if a turn has several outputs."""
    values: str | None = None
    """The values of several outputs, as JSON."""
    is_cut: bool = False
    """Whether the text ended at the limit of new tokens."""


class Speaker(Protocol):
    """Interface of speakers, which produce the turns of one agent."""

    def ask(self, waiting: WaitingTurn) -> None:
        """Request a turn in an episode."""

    def step(self) -> list[TurnResult]:
        """Do one part of the work and return finished turns; never wait."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything now."""

    @property
    def is_answering(self) -> bool:
        """Whether answers are in progress that a stop request must wait for."""

    def turn_recorded(self, active_index: int) -> None:
        """Note that the last turn of an active episode is now recorded in it."""

    def forget(self, active_index: int) -> None:
        """Drop the state of an episode that has ended; its index is given to another one."""

    def open(self) -> AbstractContextManager[None]:
        """Return a context that must surround all steps."""
