"""Worlds decide whose turn it is and what is said to the agents.

A world runs one episode as a generator. It yields a `RequestTurn` when an agent is to speak; when it resumes, the turn
is in the episode. Environments are closed in the background, so that closing cannot affect or delay episodes.
"""

import copy
import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any, Protocol

from partita.data.episode import AGENT, Episode
from partita.simulation.contract import (
    Checker,
    ContractError,
    Environment,
    Message,
    StepTimeoutError,
    Verdict,
    check_reset_result,
    check_step_result,
    check_verdict,
    check_world_output,
    close_program,
    describe_program_error,
    format_value,
    messages_of,
)
from partita_schema.common.text import describe_error
from partita_schema.turn_outputs import TurnOutputs

logger = logging.getLogger(__name__)


class BackgroundCloser:
    """Runs each close function in a separate thread: one that raises or hangs does not affect any dialogue."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.lock = threading.RLock()  # reentrant: garbage collection may close a world at any point

    def begin(self, close: Callable[[], None]) -> None:
        """Run `close` in a new thread; not at the exit of the process, when no thread starts."""
        if sys.is_finalizing():
            return

        def close_and_log() -> None:
            try:
                close()
            except BaseException as error:
                logger.debug("close() of an environment failed: %s", describe_error(error))

        thread = threading.Thread(target=close_and_log, name="partita-closing", daemon=True)
        with self.lock:
            thread.start()
            self.threads = [*(other for other in self.threads if other.is_alive()), thread]

    def end(self, seconds: float) -> None:
        """Wait at most `seconds` for all threads, and warn about those that are still running."""
        end = time.monotonic() + seconds
        with self.lock:
            threads = self.threads
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        late = sum(thread.is_alive() for thread in threads)
        if late:
            subject = "1 environment has" if late == 1 else f"{late} environments have"
            logger.warning("%s not closed within %g s (limits.step_seconds)", subject, seconds)


@dataclass(frozen=True)
class RequestTurn:
    """A request for a turn of an agent."""

    agent: str = AGENT
    """Name of the agent that is to speak. Default: the main agent."""


Play = Generator[RequestTurn, None, None]
"""Generator of turn requests.

It resumes once the turn is in the episode, or without a new message if the agent has nothing more to say.
"""


class World(Protocol):
    """Interface of worlds, which run episodes."""

    def run(self, episode: Episode) -> Play:
        """Run an episode from its first message to `episode.end(...)`. An exception fails the episode."""


class EnvironmentWorld:
    """World in which an environment (a program) answers the model."""

    def __init__(
        self,
        make: Callable[[], Environment],
        *,
        max_turns: int,
        closer: BackgroundCloser,
        system: str | None = None,
    ) -> None:
        """Store the settings.

        Args:
            make: Creates a new environment for each episode.
            max_turns: Model turns after which an episode is truncated.
            closer: Closes the environments.
            system: Text before the description of tools, the first message of an environment with tools. The system
                message of a task replaces it.
        """
        self.make, self.max_turns, self.closer, self.system = make, max_turns, closer, system

    def run(self, episode: Episode) -> Play:
        """Reset the environment, then step until the environment or the turn limit ends the episode."""
        environment = self.make()
        try:
            # A copy: episodes of the same task share its values, and an environment may change them.
            reply = check_reset_result(environment.reset(seed=episode.seed, task=copy.deepcopy(episode.task)))
            messages = self.with_system(reply.messages, episode)
            if not messages:
                raise ContractError("reset said nothing; give the first message")
            episode.observe(messages, gold=reply.info.get("gold"))
            episode.metrics |= reply.info.get("metrics", {})
            while True:
                yield RequestTurn()
                reply = check_step_result(environment.step(episode.replies[-1].text))
                episode.add_reward(reply.reward)
                episode.metrics |= reply.info.get("metrics", {})
                if reply.terminated or reply.truncated:
                    episode.observe(reply.messages)
                    episode.end(*(("done",) if reply.terminated else ("truncated", "environment")))
                    return
                episode.observe(reply.messages, gold=reply.info.get("gold"))
                if len(episode.replies) >= self.max_turns:
                    episode.end("truncated", "turns")
                    return
        finally:
            # Also when the generator is closed early. In a thread: a slow `close` does not count against the episode.
            self.closer.begin(partial(close_program, environment))

    def with_system(self, messages: Sequence[Message], episode: Episode) -> Sequence[Message]:
        """Return the first messages of an environment, with the system prompt before the description of its tools."""
        if self.system is None:
            return messages
        prompt = messages_of(episode.task.get("prompt", ""), "the task's prompt")
        if any(message["role"] == "system" for message in prompt):
            return messages
        first, *others = messages
        return [{**first, "content": f"{self.system}\n\n{first['content']}"}, *others]


class ReplayWorld:
    """World that replays a dialogue of a dataset: the other speakers' messages stay as they are."""

    def __init__(self, *, max_turns: int) -> None:
        self.max_turns = max_turns

    def run(self, episode: Episode) -> Play:
        """Replay all messages in order, and request a turn in place of each message of the model."""
        for message in episode.task["messages"]:
            if not message.get("train"):
                episode.observe([message])
                continue
            if len(episode.replies) >= self.max_turns:
                episode.end("truncated", "turns")
                return
            # With gold history, the model's next prompts show this answer in place of its own.
            episode.gold = message["content"]
            episode.other_golds = tuple(message.get("labels", ())[1:])
            yield RequestTurn()
        episode.end("done")


EXHAUSTED = object()
"""Default of `next` for an exhausted generator."""


class WorldError(Exception):
    """A custom world raised; `__cause__` is its exception."""


class CustomWorld:
    """Wrapper of a user-defined world that checks its contract: known agents only, at most `max_turns` model turns."""

    def __init__(self, world: World, agents: Collection[str], *, max_turns: int) -> None:
        self.world, self.agents, self.max_turns = world, agents, max_turns

    def run(self, episode: Episode) -> Play:
        """Run an episode in the user-defined world; its status is done if the world sets none.

        Raises:
            WorldError: The world raised or broke its contract.
        """
        play = self.start(episode)
        try:
            while (request := self.next_request(play, episode)) is not None and episode.status is None:
                if request.agent == AGENT and len(episode.replies) >= self.max_turns:
                    self.close_play(play)  # closed first, so that its cleanup runs before the episode ends
                    episode.end("truncated", "turns")
                    return
                yield request
            if episode.status is None:
                episode.end("done")
        finally:
            self.close_play(play)

    def close_play(self, play: Play) -> None:
        """Close the user's generator, which releases its resources. Raises WorldError."""
        try:
            play.close()
        except BaseException as error:
            raise WorldError from error

    def start(self, episode: Episode) -> Play:
        """Create the user's generator. Raises WorldError."""
        episode.task = copy.deepcopy(episode.task)  # other episodes of the task share its values
        try:
            play = self.world.run(episode)
            if not isinstance(play, Generator):
                raise ContractError(f"run gave {format_value(play)}; write it with yield")
        except BaseException as error:
            raise WorldError from error
        return play

    def next_request(self, play: Play, episode: Episode) -> RequestTurn | None:
        """Return the next turn request, None at the end, and check what the world wrote. Raises WorldError."""
        before = len(episode.messages)
        try:
            request: Any = next(play, EXHAUSTED)
            check_world_output(episode, first=before)
            if request is EXHAUSTED:
                return None
            if not isinstance(request, RequestTurn):
                raise ContractError(
                    f"run gave {format_value(request)}; yield partita.simulation.RequestTurn(), with an agent's name "
                    "in it"
                )
            if request.agent not in self.agents:
                raise ContractError(
                    f"run asks {format_value(request.agent)}; the agents of the file are {', '.join(self.agents)}"
                )
        except ContractError as error:
            # They may be no messages, numbers or texts, and a failed episode is saved as well.
            del episode.messages[before:]
            episode.rounds, episode.target = 0, None
            raise WorldError from error
        except BaseException as error:
            raise WorldError from error
        return request


class CheckerError(Exception):
    """A checker raised; `__cause__` is its exception."""


class CheckedWorld:
    """Wrapper of a world that checks each finished episode, and requests another answer if the checker rejects it."""

    def __init__(self, world: World, checker: Checker, *, rounds: int, outputs: TurnOutputs | None = None) -> None:
        """Wrap a world.

        Args:
            world: The world.
            checker: Checks its episodes.
            rounds: Maximum number of further answers in an episode.
            outputs: The outputs of a turn of the model; None if a turn is only a text.
        """
        self.world, self.checker, self.rounds, self.outputs = world, checker, rounds, outputs

    def run(self, episode: Episode) -> Play:
        """Run the wrapped world and check its episode, with up to `rounds` further answers after a rejection.

        Raises:
            CheckerError: The checker raised or broke its contract.
        """
        yield from self.world.run(episode)
        verdict = self.judge(episode)
        while not verdict.ok and verdict.feedback and episode.rounds < self.rounds and episode.status == "done":
            episode.status = None
            episode.rounds += 1
            gold, known = self.gold(verdict, episode), episode.replies[-1].golds if episode.replies else ()
            episode.observe(messages_of(verdict.feedback, "check"), agent="checker", gold=gold)
            episode.other_golds = known[1:] if gold in known[:1] else ()
            yield RequestTurn()
            episode.end("done")
            verdict = self.judge(episode)

    def judge(self, episode: Episode) -> Verdict:
        """Record the checker's verdict on an episode and return it. Raises CheckerError.

        It stays the verdict if the next answer does not come, because the dialogue is too long or takes too long.
        """
        verdict = self.verdict(episode)
        episode.ok, episode.target = verdict.ok, verdict.target
        episode.metrics |= verdict.metrics
        return verdict

    def gold(self, verdict: Verdict, episode: Episode) -> str | None:
        """Return the right answer to the feedback: the target, or that of the rejected answer.

        A target may be a part of an answer, such as the reply that the others receive, or missing.
        """
        target = verdict.target
        if target is not None and (self.outputs is None or self.outputs.are_in(target)):
            return target
        return episode.replies[-1].gold if episode.replies else None

    def verdict(self, episode: Episode) -> Verdict:
        """Return the checker's verdict. Raises CheckerError."""
        try:
            return check_verdict(self.checker.check(episode))
        except BaseException as error:
            raise CheckerError from error


def failure(error: BaseException) -> str:
    """Return the failure reason of an episode for an exception of its environment, world or checker."""
    where, cause = "environment", error
    if isinstance(error, CheckerError | WorldError) and error.__cause__ is not None:
        where, cause = ("checker" if isinstance(error, CheckerError) else "world"), error.__cause__
    return f"timeout: {cause}" if isinstance(cause, StepTimeoutError) else f"{where}: {describe_program_error(cause)}"


@dataclass(frozen=True)
class AgentConversation:
    """World in which two agents alternate until one ends the dialogue or has nothing more to say."""

    other: str
    """Name of the other agent."""
    max_turns: int
    """Turns of the main agent after which an episode is truncated."""
    done: str
    """Text that ends the dialogue when a turn of the other agent contains it."""
    agent_may_end: bool = False
    """Whether `done` in a turn of the main agent ends the dialogue as well."""
    first: str | None = None
    """Fixed first message, with `{column}` for values of the task."""
    first_by_agent: bool = False
    """Whether the first message is the main agent's instead of the other agent's."""
    instruction: str | None = None
    """System prompt of the main agent, with `{column}` for values of the task."""
    shows_system: bool = False
    """Whether the main agent sees the system message of the task's dialogue, if it has no system prompt here."""

    def run(self, episode: Episode) -> Play:
        """Run an episode: system prompt, first message, then alternating turns."""
        if self.instruction is not None:
            message = {"role": "system", "content": fill_template(self.instruction, episode.task)}
            episode.observe([message], agent="system")
        elif self.shows_system:
            first = takewhile(lambda message: message["role"] == "system", episode.task["messages"])
            episode.observe(first, agent="system")
        if self.first is not None:
            self.begin(episode, fill_template(self.first, episode.task))
        if self.first is None or self.first_by_agent:
            yield from self.other_speaks(episode)
        while episode.status is None:
            yield RequestTurn()
            if self.agent_may_end and self.done in episode.replies[-1].text:
                episode.end("done")
            else:
                yield from self.other_speaks(episode)

    def begin(self, episode: Episode, text: str) -> None:
        """Append the fixed first message."""
        role, agent = ("assistant", AGENT) if self.first_by_agent else ("user", self.other)
        episode.observe([{"role": role, "content": text}], agent=agent)

    def other_speaks(self, episode: Episode) -> Play:
        """Request a turn of the other agent; end the episode if it says `done` or nothing, or at the turn limit."""
        before = len(episode.messages)
        yield RequestTurn(self.other)
        if len(episode.messages) == before or self.done in episode.messages[-1]["content"]:
            episode.end("done")
        elif len(episode.replies) >= self.max_turns:
            # Checked after the other agent's turn: it may still end the dialogue after the last answer.
            episode.end("truncated", "turns")


def fill_template(template: str, task: Mapping[str, Any]) -> str:
    """Fill a template with the values of a task."""
    return template.format_map(task)
