"""Roll out many episodes concurrently, and batch the turns that wait for the same agent.

After each turn, the world of an episode runs in a thread while the agents answer other episodes. Agents are advanced
in round-robin order, one step at a time, so that no agent waits for another agent's answers to finish. A finished
episode makes room for the next one. The result of an episode depends only on its seed and its own messages, not on
the number, order or content of the episodes that run concurrently.

A world that raises or times out fails its own episode only. A thread that does not return is abandoned.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from partita.data.episode import AGENT, Episode
from partita.simulation.agents import Agent
from partita.simulation.contract import StepTimeoutError
from partita.simulation.model_speaker import ModelSpeaker, ModelSpec
from partita.simulation.program_speaker import ProgramSpeaker
from partita.simulation.speakers import Speaker, TurnResult
from partita.simulation.worlds import Play, World, failure
from partita_schema.sections.simulation import Limits
from partita_trainers.interrupt import never

logger = logging.getLogger(__name__)

THREADS = 8
"""Maximum number of worlds that run at the same time."""
CLOSE_SECONDS = 5.0
"""How long the end of a rollout waits for worlds of dialogues that were active."""
POLL_SECONDS = 0.05
"""Interval at which deadlines are checked while no event arrives, in seconds."""


@dataclass(eq=False)
class ActiveEpisode:
    """An episode in progress."""

    episode: Episode
    play: Play
    active_index: int
    """Index of the episode among the active ones, 0 to `concurrency` - 1."""
    started: float
    agent: str = AGENT
    """Agent whose turn it is, or who had the last turn."""
    step_started: float | None = None
    """Start time of the current world step; None during an agent's turn and while waiting for a thread."""
    is_over: bool = False
    """Whether the episode was ended from outside, so that its world's thread must not continue it."""
    error: BaseException | None = None
    """Exception of its world."""


class Rollout:
    """Runs episodes, at most `concurrency` at a time."""

    def __init__(
        self,
        world: World,
        agents: Mapping[str, ModelSpec | Callable[[], Agent]],
        *,
        concurrency: int,
        seed: int,
        limits: Limits,
        stopping: Callable[[], bool] = never,
    ) -> None:
        """Create the speakers of all agents.

        Args:
            world: Plays each episode.
            agents: By agent, its model, or a factory that creates its program.
            concurrency: Maximum number of concurrent episodes.
            seed: Seed of the agents' random numbers.
            limits: Time limits of steps and episodes.
            stopping: Returns whether to stop; active episodes are then dropped.
        """
        self.world, self.limits, self.stopping = world, limits, stopping
        self.free_indices = list(reversed(range(concurrency)))
        """Indices without an active episode, taken from the end."""
        self.active: dict[int, ActiveEpisode] = {}
        """Active episodes by active index."""
        self.ended: list[Episode] = []
        """Episodes that ended since the last `take_finished`."""
        self.upcoming: Iterator[Episode] = iter(())
        self.exhausted = False
        """Whether `upcoming` has no more episodes."""
        self.pending_worlds = queue.SimpleQueue[ActiveEpisode | None]()
        """Episodes whose world is to take a step; None ends a thread."""
        self.finished_worlds = queue.SimpleQueue[ActiveEpisode | None]()
        """Episodes whose world has taken a step; None only ends a wait, after a program has answered."""
        self.speakers: dict[str, Speaker] = {
            name: ModelSpeaker(name, agent, concurrency=concurrency, more=lambda: self.has_episodes, stopping=stopping)
            if isinstance(agent, ModelSpec)
            else ProgramSpeaker(
                name, agent, seed=seed, seconds=limits.step_seconds, wake=lambda: self.finished_worlds.put(None)
            )
            for name, agent in agents.items()
        }
        self.encoders = [agent.turns for agent in agents.values() if isinstance(agent, ModelSpec)]
        """Prompt encoders of all agents that are models."""
        main = agents.get(AGENT)
        self.answers = main.turns.answers if isinstance(main, ModelSpec) else None
        """Converts turns of the main agent with several outputs; None if they are only a text."""

    def run(self, episodes: Iterator[Episode]) -> Iterator[Episode]:
        """Run `episodes` and yield each episode when it ends; episodes still active at a stop are not yielded."""
        self.upcoming = episodes
        threads = [
            threading.Thread(target=self.run_worlds, daemon=True) for _ in range(min(THREADS, len(self.free_indices)))
        ]
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
                self.pending_worlds.put(None)
            self.close_active(threads)

    def close_active(self, threads: Sequence[threading.Thread]) -> None:
        """Close the worlds of episodes that a stop or an error has left active, at most for `CLOSE_SECONDS`.

        At the exit of the process, where garbage collection would close them, no thread can start.

        Args:
            threads: The threads of world steps.
        """
        end = time.monotonic() + CLOSE_SECONDS
        active = list(self.active.values())
        for one in active:
            one.is_over = True
        for thread in threads if active else ():
            thread.join(max(0.0, end - time.monotonic()))
        for thread in [self.close(one) for one in active]:
            thread.join(max(0.0, end - time.monotonic()))

    @property
    def has_episodes(self) -> bool:
        """Whether an episode is active or still to be started."""
        return bool(self.active) or not self.exhausted

    @property
    def has_work(self) -> bool:
        """Whether any work is left; after a stop request, only answers in progress count."""
        if self.stopping():
            return any(speaker.is_answering for speaker in self.speakers.values())
        return self.has_episodes

    def step(self) -> None:
        """Advance every agent by one step and handle finished world steps; wait if there is no work."""
        # After a stop request, only answers in progress are finished: no episode starts, and no agent is asked again.
        if not self.stopping():
            self.begin()
            self.poll_worlds(wait=not any(speaker.has_work for speaker in self.speakers.values()))
        for speaker in self.speakers.values():
            for turn in speaker.step():
                self.handle_turn(turn)

    def take_finished(self) -> list[Episode]:
        """Return the episodes that ended since the last call."""
        ended, self.ended = self.ended, []
        return ended

    def begin(self) -> None:
        """Start episodes until `concurrency` are active."""
        while self.free_indices and not self.exhausted:
            # Taken only when it can start: with several ranks, taking an episode claims it for this rank.
            episode = next(self.upcoming, None)
            if episode is None:
                self.exhausted = True
                return
            active = ActiveEpisode(episode, self.world.run(episode), self.free_indices.pop(), time.monotonic())
            self.active[active.active_index] = active
            self.pending_worlds.put(active)

    def handle_turn(self, turn: TurnResult) -> None:
        """Handle an agent's turn: continue with the world, or end the episode."""
        active = self.active[turn.active_index]
        if turn.end is not None:
            self.finish(active, *turn.end)
            return
        if turn.text is not None:
            try:
                self.record_turn(active, turn)
            except ValueError as error:
                self.finish(active, "failed", f"environment: {error}")
                return
            # Only now: the speaker compares its tokens with the text of the turn in the episode.
            self.speakers[active.agent].turn_recorded(active.active_index)
        self.pending_worlds.put(active)

    def record_turn(self, active: ActiveEpisode, turn: TurnResult) -> None:
        """Append an agent's turn to its episode.

        Raises:
            ValueError: The history is gold, and the turn has no gold answer, or the gold answer is invalid.
        """
        assert turn.text is not None, "the agent has said something"
        if active.agent != AGENT:
            active.episode.act_as(active.agent, turn.text, turn.tokens, answer=turn.answer)
            return
        assert turn.tokens is not None, "the agent is a model"
        if self.answers is not None and active.episode.gold is not None:
            self.answers.check_gold(active.episode.gold)
        active.episode.act(turn.text, turn.tokens, answer=turn.answer, values=turn.values, is_cut=turn.is_cut)

    # World steps, in threads

    def run_worlds(self) -> None:
        """Advance queued worlds, one at a time, each to the next turn of an agent; the body of a thread."""
        while (active := self.pending_worlds.get()) is not None:
            if active.is_over:
                continue  # the rollout has stopped
            active.step_started = time.monotonic()  # here and not in `begin`: time in the queue does not count
            try:
                request = next(active.play, None)
                active.agent = active.agent if request is None else request.agent
            except BaseException as error:  # a Ctrl-C of the user is raised in the main thread, and not here
                active.error = error
            if active.is_over:
                return  # the step timed out, and another thread has replaced this one
            self.finished_worlds.put(active)

    def poll_worlds(self, *, wait: bool = False) -> None:
        """Handle finished world steps and fail episodes whose world exceeds `limits.step_seconds`."""
        try:
            while True:
                active = self.finished_worlds.get(timeout=POLL_SECONDS) if wait else self.finished_worlds.get_nowait()
                wait = False
                if active is not None:
                    self.handle_world_step(active)
        except queue.Empty:
            pass
        now = time.monotonic()
        for active in list(self.active.values()):
            if active.step_started is not None and now - active.step_started > self.limits.step_seconds:
                self.abandon(active, failure(StepTimeoutError(self.limits.step_seconds)))

    def handle_world_step(self, active: ActiveEpisode) -> None:
        """Handle a finished world step: end the episode, or request the next agent's turn."""
        if active.is_over:
            return  # timed out after its thread had checked `is_over`
        active.step_started = None
        if active.error is not None:
            self.finish(active, "failed", failure(active.error))
        elif active.episode.status is not None:
            self.finish(active)
        elif time.monotonic() - active.started > self.limits.dialogue_seconds:
            self.finish(active, "truncated", "time")
        else:
            self.speakers[active.agent].ask(active)

    def abandon(self, active: ActiveEpisode, reason: str) -> None:
        """Fail an episode and abandon its world's thread, which may still write to the original episode."""
        active.is_over = True
        logger.warning("dialogue %s: %s", active.episode.key, reason)
        threading.Thread(target=self.run_worlds, daemon=True).start()
        self.finish(active, "failed", reason)

    def finish(self, active: ActiveEpisode, *end: Any) -> None:
        """Remove an episode from the active ones, and end it if `end` (status and reason) is given.

        In that case a copy is ended, since the world may still write to the original.
        """
        if end:
            active.episode = snapshot(active.episode)
            active.episode.end(*end)
        active.is_over = active.is_over or bool(end)
        # The index is given to another episode, so every speaker drops its state now: cached keys and values too.
        del self.active[active.active_index]
        self.free_indices.append(active.active_index)
        for speaker in self.speakers.values():
            speaker.forget(active.active_index)
        self.ended.append(active.episode)
        # A generator that is running, in a thread that timed out, cannot be closed from another thread.
        if end and active.step_started is None:
            self.close(active)

    def close(self, active: ActiveEpisode) -> threading.Thread:
        """Close the world's generator in a thread, which is returned, so that it releases its resources."""

        def close() -> None:
            try:
                active.play.close()
            except BaseException as error:
                logger.debug("dialogue %s: %s at its end", active.episode.key, error)

        thread = threading.Thread(target=close, daemon=True)
        thread.start()
        return thread


def snapshot(episode: Episode) -> Episode:
    """Return a snapshot of an episode."""
    return replace(
        episode,
        messages=list(episode.messages),
        replies=list(episode.replies),
        tokens=dict(episode.tokens),
        metrics=dict(episode.metrics),
    )
