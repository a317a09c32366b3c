"""Many dialogues at the same time: all that wait for the model are answered in one batch, in its slots.

Whenever a dialogue has been answered, its world goes on in a thread, while the model answers others. A dialogue that
has ended leaves, and the next one takes its place. What it comes to follows from its seed and its own words: neither
from those beside it, nor from their number or order.

A world that raises, or takes too long, fails its own dialogue and no other. A thread that does not come back is left
behind.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from partita.data.shaping.encoder import PromptExample
from partita.inference.halving import Capacity
from partita.inference.results import RowResult
from partita.inference.slots import Work
from partita.inference.static import requests_in_batches
from partita.lm.base import GenerationOptions, GenerationRequest
from partita.simulation.contract import TooSlowError
from partita.simulation.dialogue import Dialogue
from partita.simulation.slots import DialogueSlots
from partita.simulation.turns import Shown, TurnEncoder
from partita.simulation.worlds import Play, World, failure
from partita_schema.simulation import Limits
from partita_trainers.interrupt import never

if TYPE_CHECKING:
    from partita.lm.base import GenerativeModel

logger = logging.getLogger(__name__)

THREADS = 8
"""Worlds that go on at the same time."""
GLANCE_SECONDS = 0.05
"""Time after which deadlines are looked at again, where nothing happens."""


@dataclass(eq=False)
class Live:
    """A dialogue that goes on."""

    dialogue: Dialogue
    play: Play
    lane: int
    """Its row among those that the model answers."""
    started: float
    shown: Shown = field(default_factory=Shown)
    prompt: PromptExample | None = None
    since: float | None = None
    """When its world began to act; None while it is the model's turn, or waits for a thread."""
    is_over: bool = False


class Rollout:
    """Has dialogues, so many at a time."""

    def __init__(
        self,
        lm: "GenerativeModel",
        world: World,
        turns: TurnEncoder,
        *,
        options: GenerationOptions,
        capacity: Capacity,
        room: int,
        max_new_tokens: int,
        seed: int,
        limits: Limits,
        stopping: Callable[[], bool] = never,
    ) -> None:
        """`room` are the tokens of a prompt and its answer. Once it is `stopping`, what goes on is let go."""
        self.lm, self.world, self.turns, self.options = lm, world, turns, options
        self.capacity, self.room, self.max_new_tokens, self.seed = capacity, room, max_new_tokens, seed
        self.limits, self.stopping = limits, stopping
        lanes = capacity.rows
        self.lengths, self.new_tokens = np.zeros(lanes, dtype=np.int64), np.zeros(lanes, dtype=np.int64)
        self.free = list(reversed(range(lanes)))
        self.live: dict[int, Live] = {}
        self.ready: list[Live] = []
        """Those that wait to be answered."""
        self.ended: list[Dialogue] = []
        self.coming: Iterator[Dialogue] = iter(())
        self.all_begun = False
        self.acting, self.acted = queue.SimpleQueue[Live | None](), queue.SimpleQueue[Live]()
        self.errors: dict[int, BaseException] = {}
        self.run: DialogueSlots | None = None
        self.answered = 0
        """Answers of the model."""

    def have(self, dialogues: Iterator[Dialogue]) -> Iterator[Dialogue]:
        """Those that have ended, as they end. Those that go on when it stops are not among them."""
        self.coming = dialogues
        threads = [threading.Thread(target=self.act, daemon=True) for _ in range(min(THREADS, len(self.free)))]
        for thread in threads:
            thread.start()
        try:
            reason = self.lm.why_no_slots(self.options, tokens=self.room)
            if reason is not None:
                logger.info("dialogues are answered in batches, not in slots: %s", reason)
            for results in self.in_batches() if reason is not None else self.in_slots():
                for result in results:
                    self.take_in(result)
                yield from self.let_go()
            yield from self.let_go()
        finally:
            for _ in threads:
                self.acting.put(None)

    def let_go(self) -> list[Dialogue]:
        ended, self.ended = self.ended, []
        return ended

    # How the model answers

    def in_slots(self) -> Iterator[list[RowResult]]:
        """Answers as they come, from slots."""
        work = Work(self.lengths, self.new_tokens, self.prompts, self.key)
        self.run = DialogueSlots(
            self.lm,
            work,
            self.options,
            slots=self.capacity.rows,
            seed=self.seed,
            left=np.zeros(len(self.lengths), dtype=np.bool_),
            limit=self.capacity.limit,
            stopping=self.stopping,
            source=self,
        )
        self.run.room = self.room
        yield from self.run.steps()

    def in_batches(self) -> Iterator[list[RowResult]]:
        """Answers by batches of all that wait, where the model cannot answer in slots."""
        while self.left and not self.stopping():
            rows = self.take(len(self.lengths))
            asked = [
                GenerationRequest(ids, int(self.new_tokens[row]))
                for row, ids in zip(rows, self.prompts(rows), strict=True)
            ]
            found = requests_in_batches(self.lm, asked, options=self.options, capacity=self.capacity, seed=self.seed)
            yield [RowResult(row, generated, None) for row, generated in zip(rows, found, strict=True)]

    def prompts(self, rows: Sequence[int]) -> list[list[int]]:
        """Tokens of the prompts of lanes."""
        return [list(self.prompt_of(row).input_ids) for row in rows]

    def prompt_of(self, row: int) -> PromptExample:
        prompt = self.live[row].prompt
        assert prompt is not None, "its turn has come"
        return prompt

    def key(self, row: int) -> bytes:
        """What random numbers of an answer follow from: the dialogue and its turn."""
        dialogue = self.live[row].dialogue
        return f"{dialogue.key}\0{len(dialogue.replies)}".encode()

    # Where the model's rows come from: a RowSource

    @property
    def left(self) -> bool:
        """Whether a dialogue goes on, or is to begin."""
        return bool(self.live) or not self.all_begun

    def take(self, wanted: int) -> Sequence[int]:
        """Lanes whose dialogues wait for an answer, the longest first; waits for one where the model has no other."""
        while True:
            self.begin()
            self.look()
            self.prepare()
            busy = self.run is not None and self.run.slots is not None and bool(self.run.slots.live)
            if self.ready or busy or not self.left or self.stopping():
                break
            self.look(wait=True)
        rows = sorted((live.lane for live in self.ready), key=lambda lane: -int(self.lengths[lane]))
        self.ready = []
        return rows

    def begin(self) -> None:
        """Begin dialogues wherever there is a free lane."""
        while self.free and not self.all_begun:
            dialogue = next(self.coming, None)
            if dialogue is None:
                self.all_begun = True
                return
            live = Live(dialogue, self.world.play(dialogue), self.free.pop(), time.monotonic())
            self.live[live.lane] = live
            self.acting.put(live)

    def prepare(self) -> None:
        """Make the prompts of those that wait; end those that have no room for one."""
        new = [live for live in self.ready if live.prompt is None]
        prompts = self.turns.encode([live.dialogue for live in new], [live.shown for live in new])
        for live, prompt in zip(new, prompts, strict=True):
            length = len(prompt.input_ids)
            if prompt.error is not None and not length:
                self.ready.remove(live)
                self.finish(live, "failed", f"environment: {prompt.error}")
            elif prompt.error is not None or length >= self.room:
                self.ready.remove(live)
                self.finish(live, "truncated", "tokens")
            else:
                live.prompt = prompt
                self.lengths[live.lane] = length
                self.new_tokens[live.lane] = min(self.max_new_tokens, self.room - length)

    def take_in(self, result: RowResult) -> None:
        """The model has answered: its dialogue's world goes on."""
        live = self.live[result.row]
        prompt, live.prompt = live.prompt, None
        if result.generated is None or prompt is None:
            self.finish(live, "failed", f"model: {result.error}")
            return
        self.answered += 1
        try:
            live.dialogue.say(result.generated.text, result.generated.ids)
        except ValueError as error:
            self.finish(live, "failed", f"environment: {error}")
            return
        live.shown = self.turns.after(prompt, live.dialogue)
        self.acting.put(live)

    # How worlds go on, in threads

    def act(self) -> None:
        """Let worlds go on, one after the other, up to the model's next turn."""
        while (live := self.acting.get()) is not None:
            live.since = time.monotonic()
            try:
                next(live.play, None)
            except (Exception, SystemExit) as error:
                self.errors[id(live)] = error
            if live.is_over:
                return  # it took too long, and another thread has this one's place
            self.acted.put(live)

    def look(self, *, wait: bool = False) -> None:
        """Take in which worlds have gone on, and fail those that take too long."""
        try:
            while True:
                self.went_on(self.acted.get(timeout=GLANCE_SECONDS) if wait else self.acted.get_nowait())
                wait = False
        except queue.Empty:
            pass
        now = time.monotonic()
        for live in list(self.live.values()):
            if live.since is not None and now - live.since > self.limits.step_seconds:
                self.give_up(live, failure(TooSlowError(self.limits.step_seconds)))
            elif now - live.started > self.limits.dialogue_seconds and live in self.ready:
                self.ready.remove(live)
                self.finish(live, "truncated", "time")

    def went_on(self, live: Live) -> None:
        """A world has acted: the dialogue has ended, or it is the model's turn."""
        if live.is_over:
            return
        live.since = None
        error = self.errors.pop(id(live), None)
        if error is not None:
            self.finish(live, "failed", failure(error))
        elif live.dialogue.status is not None:
            self.finish(live)
        else:
            self.ready.append(live)

    def give_up(self, live: Live, reason: str) -> None:
        """Leave a world behind with its thread, which may go on writing into its dialogue."""
        live.dialogue, left = copied(live.dialogue), live.dialogue
        live.is_over = True
        logger.warning("dialogue %s: %s", left.key, reason)
        threading.Thread(target=self.act, daemon=True).start()
        self.finish(live, "failed", reason)

    def finish(self, live: Live, *end: Any) -> None:
        """A dialogue leaves its lane."""
        if end:
            live.dialogue.end(*end)
        live.is_over = live.is_over or bool(end)
        del self.live[live.lane]
        if self.run is not None:
            self.run.forget(live.lane)
        self.free.append(live.lane)
        self.ended.append(live.dialogue)
        if end and live.since is None:
            self.close(live)

    def close(self, live: Live) -> None:
        """Let the world of a dialogue that was ended from here close what it holds."""

        def close() -> None:
            try:
                live.play.close()
            except Exception as error:
                logger.debug("dialogue %s: %s at its end", live.dialogue.key, error)

        threading.Thread(target=close, daemon=True).start()


def copied(dialogue: Dialogue) -> Dialogue:
    """A dialogue as it stands."""
    return replace(
        dialogue,
        messages=list(dialogue.messages),
        replies=list(dialogue.replies),
        metrics=dict(dialogue.metrics),
    )
