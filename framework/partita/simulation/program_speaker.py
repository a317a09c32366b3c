"""Get the turns of an agent that is a program, in batched calls in a thread."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from partita.simulation.agents import Agent, context_of, replies_of
from partita.simulation.contract import describe_program_error
from partita.simulation.speakers import TurnResult, WaitingTurn
from partita_schema.common.text import counted

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class PendingCall:
    """A call of a program for a batch of episodes."""

    turns: list[WaitingTurn]
    started: float = field(default_factory=time.monotonic)
    replies: Sequence[str | None] | None = None
    error: BaseException | None = None
    is_over: bool = False


class ProgramSpeaker:
    """Speaker of an agent that is a program, which is called in a thread with all waiting episodes.

    After a call that fails or times out, each of its episodes is retried alone; only those whose own call fails end as
    failed. A program that timed out is abandoned with its thread and replaced by a new instance.
    """

    def __init__(
        self, agent: str, make: Callable[[], Agent], *, seed: int, seconds: float, wake: Callable[[], None]
    ) -> None:
        """Create the program.

        Args:
            agent: Name of the agent.
            make: Creates the program.
            seed: Seed of the contexts.
            seconds: Time limit of a call, in seconds.
            wake: Called from the thread of a call when the call ends.
        """
        self.agent, self.make, self.seed, self.seconds, self.wake = agent, make, seed, seconds, wake
        self.program = make()
        self.waiting: list[WaitingTurn] = []
        self.retries: deque[WaitingTurn] = deque()
        """Episodes of failed batches, to be tried one by one before others."""
        self.call: PendingCall | None = None
        """The call in progress. There is at most one; episodes that wait meanwhile form the next batch."""

    @contextmanager
    def open(self) -> Iterator[None]:
        """Do nothing: a program needs no preparation."""
        yield

    def ask(self, waiting: WaitingTurn) -> None:
        """Request a turn of the program in an episode."""
        self.waiting.append(waiting)

    @property
    def has_work(self) -> bool:
        """Whether a call has ended or another one can start."""
        return self.call.is_over if self.call is not None else bool(self.waiting or self.retries)

    @property
    def is_answering(self) -> bool:
        """False: a stop request does not wait for programs."""
        return False

    def step(self) -> list[TurnResult]:
        """Collect the replies of a call that has ended, and start the next call."""
        results = self.collect() if self.call is not None else []
        if self.call is None and (self.retries or self.waiting):
            turns = [self.retries.popleft()] if self.retries else self.waiting
            self.waiting = self.waiting if turns is not self.waiting else []
            self.begin(turns)
        return results

    def begin(self, turns: list[WaitingTurn]) -> None:
        """Call the program in a thread."""
        call = self.call = PendingCall(turns)
        contexts = [context_of(turn.episode, self.agent, seed=self.seed) for turn in turns]
        program = self.program  # bound here: after a timeout, `self.program` is another instance

        def work() -> None:
            try:
                call.replies = replies_of(program.act(contexts), count=len(contexts))
            except BaseException as error:
                call.error = error
            call.is_over = True
            self.wake()

        threading.Thread(target=work, daemon=True).start()

    def collect(self) -> list[TurnResult]:
        """Return the turns of the call in progress if it has ended or timed out."""
        call = self.call
        assert call is not None
        late = not call.is_over and time.monotonic() - call.started > self.seconds
        if not (call.is_over or late):
            return []
        self.call = None
        if call.replies is not None and call.is_over:
            return [TurnResult(turn.active_index, reply) for turn, reply in zip(call.turns, call.replies, strict=True)]
        if late:
            logger.warning("agent %s has not answered %s in time", self.agent, counted(len(call.turns), "dialogue"))
            self.program = self.make()
        if len(call.turns) > 1:
            self.retries += call.turns
            return []
        return [TurnResult(call.turns[0].active_index, end=("failed", self.failure(call.error)))]

    def failure(self, error: BaseException | None) -> str:
        """Return the failure reason of an episode; `error` is None for a timeout."""
        if error is None:
            return f"timeout: agent {self.agent} gave no reply within {self.seconds:g} s (limits.step_seconds)"
        return f"agent {self.agent}: {describe_program_error(error)}"

    def turn_recorded(self, active_index: int) -> None:
        """Do nothing: a program's contexts are built from the episode."""

    def forget(self, active_index: int) -> None:
        """Do nothing: no turn of an episode is pending when it ends."""
