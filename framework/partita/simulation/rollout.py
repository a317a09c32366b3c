"""Many dialogues at the same time: all that wait for an agent are answered together, by a model in its slots.

Whenever somebody has spoken in a dialogue, its world goes on in a thread, while others are answered. Agents get their
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

from partita.data.episode import AGENT, Episode
from partita.simulation.agents import Agent
from partita.simulation.contract import StepTimeoutError
from partita.simulation.speakers import ModelSpeaker, ModelSpec, ProgramSpeaker, Speaker, TurnResult
from partita.simulation.worlds import Play, World, failure
from partita_schema.simulation import Limits
from partita_trainers.interrupt import never

logger = logging.getLogger(__name__)

THREADS = 8
"""Worlds that go on at the same time."""
GLANCE_SECONDS = 0.05
"""Time after which deadlines are looked at again, where nothing happens."""


@dataclass(eq=False)
class ActiveEpisode:
    """A dialogue that goes on."""

    episode: Episode
    play: Play
    lane: int
    """Its place among those that go on."""
    started: float
    agent: str = AGENT
    """Whose turn it is, or was last."""
    since: float | None = None
    """When its world began to act; None while it is an agent's turn, or waits for a thread."""
    is_over: bool = False


class Rollout:
    """Has dialogues, so many at a time."""

    def __init__(
        self,
        world: World,
        agents: Mapping[str, ModelSpec | Callable[[], Agent]],
        *,
        lanes: int,
        seed: int,
        limits: Limits,
        stopping: Callable[[], bool] = never,
    ) -> None:
        """`agents` are models, or what makes a program. Once it is `stopping`, what goes on is let go."""
        self.world, self.limits, self.stopping = world, limits, stopping
        self.free = list(reversed(range(lanes)))
        self.active: dict[int, ActiveEpisode] = {}
        self.ended: list[Episode] = []
        self.coming: Iterator[Episode] = iter(())
        self.all_begun = False
        self.acting, self.news = queue.SimpleQueue[ActiveEpisode | None](), queue.SimpleQueue[ActiveEpisode | None]()
        self.errors: dict[int, BaseException] = {}
        self.speakers: dict[str, Speaker] = {
            name: ModelSpeaker(name, agent, lanes=lanes, more=lambda: self.has_episodes, stopping=stopping)
            if isinstance(agent, ModelSpec)
            else ProgramSpeaker(name, agent, seed=seed, seconds=limits.step_seconds, wake=lambda: self.news.put(None))
            for name, agent in agents.items()
        }
        self.encoders = [agent.turns for agent in agents.values() if isinstance(agent, ModelSpec)]
        """What makes prompts."""

    def run(self, dialogues: Iterator[Episode]) -> Iterator[Episode]:
        """Those that have ended, as they end. Those that go on when it stops are not among them."""
        self.coming = dialogues
        threads = [threading.Thread(target=self.run_worlds, daemon=True) for _ in range(min(THREADS, len(self.free)))]
        for thread in threads:
            thread.start()
        try:
            with ExitStack() as stack:
                for speaker in self.speakers.values():
                    stack.enter_context(speaker.open())
                while self.has_work:
                    self.step()
                    yield from self.take_finished()
            yield from self.take_finished()
        finally:
            for _ in threads:
                self.acting.put(None)

    @property
    def has_episodes(self) -> bool:
        """Whether a dialogue goes on, or is to begin."""
        return bool(self.active) or not self.all_begun

    @property
    def has_work(self) -> bool:
        """Whether anything is to be done; once it stops, answers that were begun."""
        if self.stopping():
            return any(speaker.is_answering for speaker in self.speakers.values())
        return self.has_episodes

    def step(self) -> None:
        """A step of every agent, and what worlds have come to; waits where there is nothing to do."""
        if not self.stopping():
            self.begin()
            self.poll_worlds(wait=not any(speaker.has_work for speaker in self.speakers.values()))
        for speaker in self.speakers.values():
            for spoken in speaker.step():
                self.handle_turn(spoken)

    def take_finished(self) -> list[Episode]:
        ended, self.ended = self.ended, []
        return ended

    def begin(self) -> None:
        """Begin dialogues wherever there is a free lane."""
        while self.free and not self.all_begun:
            dialogue = next(self.coming, None)
            if dialogue is None:
                self.all_begun = True
                return
            live = ActiveEpisode(dialogue, self.world.run(dialogue), self.free.pop(), time.monotonic())
            self.active[live.lane] = live
            self.acting.put(live)

    def handle_turn(self, spoken: TurnResult) -> None:
        """An agent has spoken, or cannot: the dialogue's world goes on, or it is over."""
        live = self.active[spoken.lane]
        if spoken.end is not None:
            self.finish(live, *spoken.end)
            return
        if spoken.text is not None:
            try:
                self.record_turn(live, spoken.text, spoken.tokens)
            except ValueError as error:
                self.finish(live, "failed", f"environment: {error}")
                return
            self.speakers[live.agent].turn_recorded(live.lane)
        self.acting.put(live)

    def record_turn(self, live: ActiveEpisode, text: str, tokens: tuple[int, ...] | None) -> None:
        """Write what an agent has said into its dialogue. Raises ValueError."""
        if live.agent != AGENT:
            live.episode.act_as(live.agent, text, tokens)
            return
        assert tokens is not None, "the agent is a model"
        live.episode.act(text, tokens)

    # How worlds go on, in threads

    def run_worlds(self) -> None:
        """Let worlds go on, one after the other, up to the next turn of an agent."""
        while (live := self.acting.get()) is not None:
            live.since = time.monotonic()
            try:
                ask = next(live.play, None)
                live.agent = live.agent if ask is None else ask.agent
            except (Exception, SystemExit) as error:
                self.errors[id(live)] = error
            if live.is_over:
                return  # it took too long, and another thread has this one's place
            self.news.put(live)

    def poll_worlds(self, *, wait: bool = False) -> None:
        """Take in which worlds have gone on, and fail those that take too long."""
        try:
            while True:
                live = self.news.get(timeout=GLANCE_SECONDS) if wait else self.news.get_nowait()
                wait = False
                if live is not None:
                    self.world_acted(live)
        except queue.Empty:
            pass
        now = time.monotonic()
        for live in list(self.active.values()):
            if live.since is not None and now - live.since > self.limits.step_seconds:
                self.abandon(live, failure(StepTimeoutError(self.limits.step_seconds)))

    def world_acted(self, live: ActiveEpisode) -> None:
        """A world has acted: the dialogue has ended, or it is an agent's turn."""
        if live.is_over:
            return
        live.since = None
        error = self.errors.pop(id(live), None)
        if error is not None:
            self.finish(live, "failed", failure(error))
        elif live.episode.status is not None:
            self.finish(live)
        elif time.monotonic() - live.started > self.limits.dialogue_seconds:
            self.finish(live, "truncated", "time")
        else:
            self.speakers[live.agent].ask(live)

    def abandon(self, live: ActiveEpisode, reason: str) -> None:
        """Leave a world behind with its thread, which may go on writing into its dialogue."""
        live.is_over = True
        logger.warning("dialogue %s: %s", live.episode.key, reason)
        threading.Thread(target=self.run_worlds, daemon=True).start()
        self.finish(live, "failed", reason)

    def finish(self, live: ActiveEpisode, *end: Any) -> None:
        """A dialogue leaves its lane. One that is ended from here is a copy: its world may still write into its own."""
        if end:
            live.episode = copied(live.episode)
            live.episode.end(*end)
        live.is_over = live.is_over or bool(end)
        del self.active[live.lane]
        self.free.append(live.lane)
        for speaker in self.speakers.values():
            speaker.forget(live.lane)
        self.ended.append(live.episode)
        if end and live.since is None:
            self.close(live)

    def close(self, live: ActiveEpisode) -> None:
        """Let the world of a dialogue that was ended from here close what it holds."""

        def close() -> None:
            try:
                live.play.close()
            except Exception as error:
                logger.debug("dialogue %s: %s at its end", live.episode.key, error)

        threading.Thread(target=close, daemon=True).start()


def copied(episode: Episode) -> Episode:
    """A dialogue as it stands."""
    return replace(
        episode,
        messages=list(episode.messages),
        replies=list(episode.replies),
        tokens=dict(episode.tokens),
        metrics=dict(episode.metrics),
    )
