"""How agents get their words: a model in slots, a program in calls, each for all dialogues that wait for it."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from partita.data.episode import AGENT, Episode, Status
from partita.data.formatting.row_tokenizer import PromptExample
from partita.generation.oom_backoff import Capacity
from partita.generation.results import RowResult
from partita.generation.scheduler import RowRequests
from partita.generation.static_batches import requests_in_batches
from partita.lm.base import GenerationOptions, GenerationRequest
from partita.simulation.agents import Agent, context_of, replies_of
from partita.simulation.contract import described
from partita.simulation.dialogue_scheduler import DialogueScheduler
from partita.simulation.turns import TurnEncoder, TurnPrompt

if TYPE_CHECKING:
    from partita.lm.base import GenerativeModel

logger = logging.getLogger(__name__)


class WaitingTurn(Protocol):
    """A dialogue in which it is an agent's turn."""

    episode: Episode
    lane: int
    """A number of its own among the dialogues that go on."""


class TurnResult(NamedTuple):
    """What came of asking."""

    lane: int
    text: str | None = None
    """What is said; None where nothing is."""
    tokens: tuple[int, ...] | None = None
    """The same in tokens, of a model."""
    end: tuple[Status, str] | None = None
    """Why the dialogue is over."""


class Speaker(Protocol):
    """Speaks for an agent."""

    def ask(self, live: WaitingTurn) -> None:
        """It is its turn in a dialogue."""

    def step(self) -> list[TurnResult]:
        """What has come since; does a piece of the work, and does not wait."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything now."""

    @property
    def is_answering(self) -> bool:
        """Whether there are answers that were begun."""

    def turn_recorded(self, lane: int) -> None:
        """What it said stands in the dialogue now."""

    def forget(self, lane: int) -> None:
        """A dialogue is over."""

    def open(self) -> AbstractContextManager[None]:
        """Around all steps."""


# Models


@dataclass(frozen=True)
class ModelSpec:
    """A model, and how it speaks."""

    lm: "GenerativeModel"
    turns: TurnEncoder
    """Makes its prompts."""
    options: GenerationOptions
    capacity: Capacity
    room: int
    """Tokens of a prompt and its answer."""
    max_new_tokens: int
    seed: int


class ModelSpeaker:
    """A model speaks: all dialogues that wait for it are answered in its slots. The source of its rows, the lanes."""

    def __init__(
        self,
        agent: str,
        spec: ModelSpec,
        *,
        lanes: int,
        more: Callable[[], bool],
        stopping: Callable[[], bool],
    ) -> None:
        """There are so many `lanes`, and `more` tells whether any dialogue may still come."""
        self.agent, self.spec, self.more, self.stopping = agent, spec, more, stopping
        self.lengths, self.new_tokens = np.zeros(lanes, dtype=np.int64), np.zeros(lanes, dtype=np.int64)
        self.waiting: list[WaitingTurn] = []
        self.asked: dict[int, tuple[Episode, PromptExample]] = {}
        """By lane."""
        self.shown: dict[int, TurnPrompt] = {}
        """What the model has seen of dialogues, by lane."""
        self.ended: list[TurnResult] = []
        self.run: DialogueScheduler | None = None

    @contextmanager
    def open(self) -> Iterator[None]:
        """The model answers in here, in slots where it can."""
        reason = self.spec.lm.why_no_slots(self.spec.options, tokens=self.spec.room)
        if reason is not None:
            whose = "" if self.agent == AGENT else f"of {self.agent} "
            way = self.spec.lm.batch_way(self.spec.options, tokens=self.spec.room)
            logger.info("dialogues %sare answered %s", whose, way.describe(reason))
        with self.spec.lm.evaluating():
            self.run = self.new_slots() if reason is None else None
            try:
                yield
            finally:
                if self.run is not None:
                    self.run.close()

    def new_slots(self) -> DialogueScheduler:
        work = RowRequests(self.lengths, self.new_tokens, self.prompts, self.key)
        spec = self.spec
        run = DialogueScheduler(
            spec.lm,
            work,
            spec.options,
            slots=spec.capacity.rows,
            seed=spec.seed,
            left=np.zeros(len(self.lengths), dtype=np.bool_),
            limit=spec.capacity.limit,
            stopping=self.stopping,
            source=self,
        )
        run.room = spec.room
        return run

    def ask(self, live: WaitingTurn) -> None:
        """It is the model's turn in a dialogue."""
        self.waiting.append(live)

    @property
    def has_work(self) -> bool:
        """Whether a dialogue waits, or is being answered."""
        return bool(self.waiting or (self.run is not None and self.run.queue)) or self.is_answering

    @property
    def is_answering(self) -> bool:
        """Whether an answer has begun."""
        return self.run is not None and self.run.slots is not None and bool(self.run.slots.live)

    def step(self) -> list[TurnResult]:
        """A token more of every answer; or all answers, where the model cannot answer in slots."""
        if not self.has_work:
            return []
        for result in self.in_batches() if self.run is None else self.in_slots(self.run):
            self.handle_result(result)
        ended, self.ended = self.ended, []
        return ended

    def in_slots(self, run: DialogueScheduler) -> list[RowResult]:
        if run.has_waiting():
            run.step()
        results, run.results = run.results, []
        return results

    def in_batches(self) -> list[RowResult]:
        rows = self.take(len(self.lengths))
        asked = [
            GenerationRequest(ids, int(self.new_tokens[row]), key=self.key(row))
            for row, ids in zip(rows, self.prompts(rows), strict=True)
        ]
        spec = self.spec
        found = requests_in_batches(spec.lm, asked, options=spec.options, capacity=spec.capacity, seed=spec.seed)
        return [RowResult(row, generated, None) for row, generated in zip(rows, found, strict=True)]

    def handle_result(self, result: RowResult) -> None:
        """The model has answered."""
        if result.generated is None:
            who = "model" if self.agent == AGENT else f"agent {self.agent}"
            self.ended.append(TurnResult(result.row, end=("failed", f"{who}: {result.error}")))
            return
        self.ended.append(TurnResult(result.row, result.generated.text, result.generated.ids))

    def turn_recorded(self, lane: int) -> None:
        """What the model said stands in the dialogue now."""
        dialogue, prompt = self.asked.pop(lane)
        self.shown[lane] = self.spec.turns.after(prompt, self.shown[lane], dialogue)

    def forget(self, lane: int) -> None:
        """A dialogue is over."""
        self.asked.pop(lane, None)
        self.shown.pop(lane, None)
        self.waiting = [live for live in self.waiting if live.lane != lane]
        if self.run is not None:
            self.run.forget(lane)

    # Where the model's rows come from: a RowSource

    @property
    def left(self) -> bool:
        """Whether there may be more."""
        return self.more()

    def take(self, wanted: int) -> Sequence[int]:
        """Lanes of all dialogues that wait, the longest first; those without room for an answer are ended."""
        waiting, self.waiting = self.waiting, []
        shown = [self.shown.setdefault(live.lane, TurnPrompt()) for live in waiting]
        prompts = self.spec.turns.encode([live.episode for live in waiting], shown)
        lanes = [live.lane for live, prompt in zip(waiting, prompts, strict=True) if self.has_room(live, prompt)]
        return sorted(lanes, key=lambda lane: -int(self.lengths[lane]))

    def has_room(self, live: WaitingTurn, prompt: PromptExample) -> bool:
        """Note a prompt that can be answered, or why it cannot."""
        length, room = len(prompt.input_ids), self.spec.room
        if prompt.error is not None and not length:
            who = "environment" if self.agent == AGENT else f"agent {self.agent}"
            self.ended.append(TurnResult(live.lane, end=("failed", f"{who}: {prompt.error}")))
            return False
        if prompt.error is not None or length >= room:
            self.ended.append(TurnResult(live.lane, end=("truncated", "tokens")))
            return False
        self.asked[live.lane] = live.episode, prompt
        self.lengths[live.lane] = length
        self.new_tokens[live.lane] = min(self.spec.max_new_tokens, room - length)
        return True

    def prompts(self, rows: Sequence[int]) -> list[list[int]]:
        """Tokens of the prompts of lanes."""
        return [list(self.asked[row][1].input_ids) for row in rows]

    def key(self, row: int) -> bytes:
        """What random numbers of an answer follow from: the dialogue and its turn, and who is not the agent."""
        dialogue, _ = self.asked[row]
        who = "" if self.agent == AGENT else f"\0{self.agent}"
        return f"{dialogue.key}\0{dialogue.turns_of(self.agent)}{who}".encode()


# Programs


@dataclass(eq=False)
class PendingCall:
    """Dialogues that a program was asked for together."""

    asked: list[WaitingTurn]
    started: float = field(default_factory=time.monotonic)
    replies: Sequence[str | None] | None = None
    error: BaseException | None = None
    is_over: bool = False


class ProgramSpeaker:
    """A program speaks: it is called with all dialogues that wait, in a thread.

    Where a call fails or takes too long, its dialogues are asked for one by one, so that only those fail whose own
    call does. A program that does not come back is left behind, and another object takes its place.
    """

    def __init__(
        self, agent: str, make: Callable[[], Agent], *, seed: int, seconds: float, wake: Callable[[], None]
    ) -> None:
        """A call may take so many `seconds`; `wake` is called when one has ended."""
        self.agent, self.make, self.seed, self.seconds, self.wake = agent, make, seed, seconds, wake
        self.program = make()
        self.waiting: list[WaitingTurn] = []
        self.alone: deque[WaitingTurn] = deque()
        self.call: PendingCall | None = None

    @contextmanager
    def open(self) -> Iterator[None]:
        """Nothing is to be held open."""
        yield

    def ask(self, live: WaitingTurn) -> None:
        """It is the program's turn in a dialogue."""
        self.waiting.append(live)

    @property
    def has_work(self) -> bool:
        """Whether a call has ended, or another one can begin."""
        return self.call.is_over if self.call is not None else bool(self.waiting or self.alone)

    @property
    def is_answering(self) -> bool:
        """Nothing is waited for once all are to stop."""
        return False

    def step(self) -> list[TurnResult]:
        """Begin a call where there is none, and take in one that has ended."""
        spoken = self.taken_in() if self.call is not None else []
        if self.call is None and (self.alone or self.waiting):
            asked = [self.alone.popleft()] if self.alone else self.waiting
            self.waiting = self.waiting if asked is not self.waiting else []
            self.begin(asked)
        return spoken

    def begin(self, asked: list[WaitingTurn]) -> None:
        """Call the program in a thread."""
        call = self.call = PendingCall(asked)
        contexts = [context_of(live.episode, self.agent, seed=self.seed) for live in asked]
        program = self.program

        def work() -> None:
            try:
                call.replies = replies_of(program.act(contexts), count=len(contexts))
            except (Exception, SystemExit) as error:
                call.error = error
            call.is_over = True
            self.wake()

        threading.Thread(target=work, daemon=True).start()

    def taken_in(self) -> list[TurnResult]:
        """What the call has come to, where it has."""
        call = self.call
        assert call is not None
        late = not call.is_over and time.monotonic() - call.started > self.seconds
        if not (call.is_over or late):
            return []
        self.call = None
        if call.replies is not None and call.is_over:
            return [TurnResult(live.lane, reply) for live, reply in zip(call.asked, call.replies, strict=True)]
        if late:
            logger.warning("agent %s has not answered %s dialogues in time", self.agent, len(call.asked))
            self.program = self.make()
        if len(call.asked) > 1:
            self.alone += call.asked
            return []
        return [TurnResult(call.asked[0].lane, end=("failed", self.failure(call.error)))]

    def failure(self, error: BaseException | None) -> str:
        """What is noted of a dialogue."""
        if error is None:
            return f"timeout: agent {self.agent} gave no reply within {self.seconds:g} s (limits.step_seconds)"
        return f"agent {self.agent}: {described(error)}"

    def turn_recorded(self, lane: int) -> None:
        """Nothing is kept of what was said."""

    def forget(self, lane: int) -> None:
        """A dialogue is over, while nobody waits for it here."""
