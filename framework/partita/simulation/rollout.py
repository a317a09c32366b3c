"""Many dialogues at the same time: all that wait for a seat are answered together, by a model in its slots.

Whenever somebody has spoken in a dialogue, its world goes on in a thread, while others are answered. Seats get their
turns one after the other, a step at a time, so that none waits for another one's answers to end. A dialogue that has
ended leaves, and the next one takes its place. What it comes to follows from its seed and its own words: neither from
those beside it, nor from their number or order.

A world that raises, or takes too long, fails its own dialogue and no other. A thread that does not come back is left
behind.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from partita.simulation.contract import TooSlowError
from partita.simulation.dialogue import AGENT, Dialogue
from partita.simulation.seats import Seat
from partita.simulation.speaking import ModelSpeaker, ProgramSpeaker, Speaker, Spoken, Voice
from partita.simulation.worlds import Play, World, failure
from partita_schema.simulation import Limits
from partita_trainers.interrupt import never

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
    """Its place among those that go on."""
    started: float
    seat: str = AGENT
    """Whose turn it is, or was last."""
    since: float | None = None
    """When its world began to act; None while it is a seat's turn, or waits for a thread."""
    is_over: bool = False


class Rollout:
    """Has dialogues, so many at a time."""

    def __init__(
        self,
        world: World,
        seats: Mapping[str, Voice | Callable[[], Seat]],
        *,
        lanes: int,
        seed: int,
        limits: Limits,
        stopping: Callable[[], bool] = never,
    ) -> None:
        """`seats` are models, or what makes a program. Once it is `stopping`, what goes on is let go."""
        self.world, self.limits, self.stopping = world, limits, stopping
        self.free = list(reversed(range(lanes)))
        self.live: dict[int, Live] = {}
        self.ended: list[Dialogue] = []
        self.coming: Iterator[Dialogue] = iter(())
        self.all_begun = False
        self.acting, self.news = queue.SimpleQueue[Live | None](), queue.SimpleQueue[Live | None]()
        self.errors: dict[int, BaseException] = {}
        self.speakers: dict[str, Speaker] = {
            name: ModelSpeaker(name, seat, lanes=lanes, more=lambda: self.left, stopping=stopping)
            if isinstance(seat, Voice)
            else ProgramSpeaker(name, seat, seed=seed, seconds=limits.step_seconds, wake=lambda: self.news.put(None))
            for name, seat in seats.items()
        }
        self.encoders = [seat.turns for seat in seats.values() if isinstance(seat, Voice)]
        """What makes prompts."""

    def have(self, dialogues: Iterator[Dialogue]) -> Iterator[Dialogue]:
        """Those that have ended, as they end. Those that go on when it stops are not among them."""
        self.coming = dialogues
        threads = [threading.Thread(target=self.act, daemon=True) for _ in range(min(THREADS, len(self.free)))]
        for thread in threads:
            thread.start()
        try:
            with ExitStack() as stack:
                for speaker in self.speakers.values():
                    stack.enter_context(speaker.open())
                while self.goes_on:
                    self.advance()
                    yield from self.let_go()
            yield from self.let_go()
        finally:
            for _ in threads:
                self.acting.put(None)

    @property
    def left(self) -> bool:
        """Whether a dialogue goes on, or is to begin."""
        return bool(self.live) or not self.all_begun

    @property
    def goes_on(self) -> bool:
        """Whether anything is to be done; once it stops, answers that were begun."""
        if self.stopping():
            return any(speaker.answers for speaker in self.speakers.values())
        return self.left

    def advance(self) -> None:
        """A step of every seat, and what worlds have come to; waits where there is nothing to do."""
        if not self.stopping():
            self.begin()
            self.look(wait=not any(speaker.works for speaker in self.speakers.values()))
        for speaker in self.speakers.values():
            for spoken in speaker.step():
                self.take_in(spoken)

    def let_go(self) -> list[Dialogue]:
        ended, self.ended = self.ended, []
        return ended

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

    def take_in(self, spoken: Spoken) -> None:
        """A seat has spoken, or cannot: the dialogue's world goes on, or it is over."""
        live = self.live[spoken.lane]
        if spoken.end is not None:
            self.finish(live, *spoken.end)
            return
        if spoken.text is not None:
            try:
                self.note(live, spoken.text, spoken.tokens)
            except ValueError as error:
                self.finish(live, "failed", f"environment: {error}")
                return
            self.speakers[live.seat].said(live.lane)
        self.acting.put(live)

    def note(self, live: Live, text: str, tokens: tuple[int, ...] | None) -> None:
        """Write what a seat has said into its dialogue. Raises ValueError."""
        if live.seat != AGENT:
            live.dialogue.say_as(live.seat, text, tokens)
            return
        assert tokens is not None, "the agent is a model"
        live.dialogue.say(text, tokens)

    # How worlds go on, in threads

    def act(self) -> None:
        """Let worlds go on, one after the other, up to the next turn of a seat."""
        while (live := self.acting.get()) is not None:
            live.since = time.monotonic()
            try:
                ask = next(live.play, None)
                live.seat = live.seat if ask is None else ask.seat
            except (Exception, SystemExit) as error:
                self.errors[id(live)] = error
            if live.is_over:
                return  # it took too long, and another thread has this one's place
            self.news.put(live)

    def look(self, *, wait: bool = False) -> None:
        """Take in which worlds have gone on, and fail those that take too long."""
        try:
            while True:
                live = self.news.get(timeout=GLANCE_SECONDS) if wait else self.news.get_nowait()
                wait = False
                if live is not None:
                    self.went_on(live)
        except queue.Empty:
            pass
        now = time.monotonic()
        for live in list(self.live.values()):
            if live.since is not None and now - live.since > self.limits.step_seconds:
                self.give_up(live, failure(TooSlowError(self.limits.step_seconds)))

    def went_on(self, live: Live) -> None:
        """A world has acted: the dialogue has ended, or it is a seat's turn."""
        if live.is_over:
            return
        live.since = None
        error = self.errors.pop(id(live), None)
        if error is not None:
            self.finish(live, "failed", failure(error))
        elif live.dialogue.status is not None:
            self.finish(live)
        elif time.monotonic() - live.started > self.limits.dialogue_seconds:
            self.finish(live, "truncated", "time")
        else:
            self.speakers[live.seat].ask(live)

    def give_up(self, live: Live, reason: str) -> None:
        """Leave a world behind with its thread, which may go on writing into its dialogue."""
        live.is_over = True
        logger.warning("dialogue %s: %s", live.dialogue.key, reason)
        threading.Thread(target=self.act, daemon=True).start()
        self.finish(live, "failed", reason)

    def finish(self, live: Live, *end: Any) -> None:
        """A dialogue leaves its lane. One that is ended from here is a copy: its world may still write into its own."""
        if end:
            live.dialogue = copied(live.dialogue)
            live.dialogue.end(*end)
        live.is_over = live.is_over or bool(end)
        del self.live[live.lane]
        self.free.append(live.lane)
        for speaker in self.speakers.values():
            speaker.forget(live.lane)
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
        tokens=dict(dialogue.tokens),
        metrics=dict(dialogue.metrics),
    )
