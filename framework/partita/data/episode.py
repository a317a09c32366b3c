"""One episode: its messages, its outcome and its line in the transcripts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from partita_schema.common.hashing import hash_to_int
from partita_schema.common.json_text import parse_json
from partita_schema.dialogues.common_form import ANSWER

Status = Literal["done", "truncated", "failed"]
"""Status of a finished episode.

done: the episode is complete. truncated: it reached a limit. failed: an error occurred, and there is no reward.
"""

AGENT = "agent"
"""Name of the main agent, the model that a simulation evaluates."""
TO_AGENT = ("system", "checker")
"""Speakers whose messages only the main agent sees."""
FULL_REWARD = 1 - 1e-9
"""Reward from which an episode has succeeded: below 1, since ten rewards of 0.1 add up to 0.9999999999999999."""


@dataclass
class EpisodeTurn:
    """An answer of the model."""

    index: int
    """Index of the answer in the messages."""
    text: str
    """The answer, as the other agents and the environment receive it."""
    tokens: tuple[int, ...]
    """Its token ids."""
    gold: str | None
    """Expected answer, if known."""
    answer: str | None = None
    """What the model generated, if a turn has several outputs; in sequence a JSON object with the text of each."""
    values: str | None = None
    """The values of several outputs as JSON, in the form of `gold`."""
    correction: str | None = None
    """A better answer, if someone has written one into the transcript."""
    is_cut: bool = False
    """Whether the answer ended at the limit of new tokens."""
    other_golds: tuple[str, ...] = ()
    """Other expected answers, of which any is as good as `gold`."""

    @property
    def golds(self) -> tuple[str, ...]:
        """All expected answers, the first one first; empty if none is known."""
        return () if self.gold is None else (self.gold, *self.other_golds)

    @property
    def exact(self) -> bool | None:
        """Whether the answer equals an expected one, up to surrounding whitespace; None if none is known."""
        if self.gold is None:
            return None
        values = self.values
        if values is None:
            return any(self.text.strip() == gold.strip() for gold in self.golds)
        return any(values == gold or same_json(values, gold) for gold in self.golds)

    @property
    def whole(self) -> str:
        """The whole answer, in the form of `gold`."""
        return self.text if self.values is None else self.values


def same_json(one: str, other: str) -> bool:
    """Return whether two texts are JSON with the same value."""
    try:
        return same_values(parse_json(one), parse_json(other))
    except ValueError:
        return False


def same_values(one: Any, other: Any) -> bool:
    """Return whether two JSON values are equal: 1 equals 1.0 but not true."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_values(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_values, one, other))
    return bool(one == other)


@dataclass
class Episode:
    """One episode of one task."""

    key: str
    """Identifier, the same in every run: the task and the number of the repeat."""
    task_key: str
    """Identifier of the task."""
    task: Mapping[str, Any]
    """The task: a row of the tasks file, or its number under `number`."""
    seed: int
    """Seed of the environment."""
    shows_gold: bool = False
    """Whether earlier turns hold the reference answers (gold) and not the answers of the model."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """All messages in order, with `role`, `content`, the speaking `agent`, and `train` for answers of the model.

    Roles are from the point of view of the main agent: other agents are the user.
    """
    replies: list[EpisodeTurn] = field(default_factory=list)
    """Answers of the main agent."""
    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Tokens of the turns of other agents that are models, by index of the message."""
    gold: str | None = None
    """Expected answer to the last message, if known."""
    other_golds: tuple[str, ...] = ()
    """Other expected answers to the last message, of which any is as good as `gold`."""
    reward: float | None = None
    """Sum of the rewards; None without rewards."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers by name."""
    ok: bool | None = None
    """Last verdict of the checker; None without a checker."""
    target: str | None = None
    """Expected last answer, if the checker gives one."""
    rounds: int = 0
    """Number of times that the checker requested another answer."""
    status: Status | None = None
    """None until the episode ends."""
    reason: str | None = None
    """The limit that was reached, or the error."""

    def observe(
        self, messages: str | Iterable[Mapping[str, Any]], *, agent: str = "user", gold: str | None = None
    ) -> None:
        """Append messages of another speaker.

        Args:
            messages: A text, or messages with `role` and `content`.
            agent: Name of the speaker.
            gold: Expected answer to these messages.
        """
        if isinstance(messages, str):
            messages = [{"role": "system" if agent == "system" else "user", "content": messages}]
        self.messages += [
            {"role": message["role"], "content": message["content"], "agent": agent} | answer_part(message)
            for message in messages
        ]
        self.gold, self.other_golds = gold, ()

    def act_as(self, agent: str, text: str, tokens: tuple[int, ...] | None, *, answer: str | None = None) -> None:
        """Append a turn of another agent.

        Args:
            agent: Name of the agent.
            text: What the others receive.
            tokens: Its token ids, if the agent is a model.
            answer: What the model generated, if a turn has several outputs.
        """
        if tokens is not None:
            self.tokens[len(self.messages)] = tokens
        self.observe([{"role": "user", "content": text, ANSWER: answer}], agent=agent)

    def act(
        self,
        text: str,
        tokens: tuple[int, ...],
        *,
        answer: str | None = None,
        values: str | None = None,
        is_cut: bool = False,
    ) -> None:
        """Append an answer of the main agent.

        Args:
            text: The answer, as the others receive it.
            tokens: Its token ids.
            answer: What the model generated, if a turn has several outputs.
            values: The values of several outputs, as JSON.
            is_cut: Whether the answer ended at the limit of new tokens.

        Raises:
            ValueError: `shows_gold` is set, and no gold answer is known.
        """
        if self.shows_gold and self.gold is None:
            raise ValueError(
                "history: gold needs the right answer of each turn: info['gold'], or episode.gold in a custom world"
            )
        turn = EpisodeTurn(len(self.messages), text, tokens, self.gold, answer, values, is_cut=is_cut)
        turn.other_golds = self.other_golds
        self.replies.append(turn)
        self.gold, self.other_golds = None, ()  # they belong to this answer; the next one needs its own
        message = {"role": "assistant", "content": text, "agent": AGENT, "train": True}
        self.messages.append(message | answer_part({ANSWER: answer}))

    def turns_of(self, agent: str) -> int:
        """Return the number of turns that an agent has had."""
        if agent == AGENT:
            return len(self.replies)
        return sum(message["agent"] == agent for message in self.messages)

    def seen_by(self, agent: str) -> list[dict[str, Any]]:
        """Return the messages as an agent sees them: its own as the assistant's, all others as the user's."""
        if agent == AGENT:
            return self.shown
        return [
            {"role": "assistant", "content": message["content"], "train": True} | answer_part(message)
            if message["agent"] == agent
            else {"role": "user", "content": message["content"]}
            for message in self.messages
            if message["agent"] not in TO_AGENT
        ]

    @property
    def shown(self) -> list[dict[str, Any]]:
        """Messages as the model sees them; with `shows_gold`, gold answers replace its own."""
        if not self.shows_gold:
            return self.messages
        gold = {reply.index: reply.gold for reply in self.replies}
        return [
            {key: value for key, value in message.items() if key != ANSWER} | {"content": gold[index]}
            if index in gold
            else message
            for index, message in enumerate(self.messages)
        ]

    def add_reward(self, reward: float | None) -> None:
        """Add the reward of the last answer."""
        if reward is not None:
            self.reward = (self.reward or 0.0) + reward

    def end(self, status: Status, reason: str | None = None) -> None:
        """End the episode. A failed episode loses its reward, verdict and metrics."""
        self.status, self.reason = status, reason
        if status == "failed":
            # The reward and metrics of an incomplete episode would distort averages.
            self.reward, self.ok, self.metrics = None, None, {}

    @property
    def succeeded(self) -> bool | None:
        """Whether the episode succeeded: by the checker, else by a reward of at least 1, else by all gold answers.

        False for a failed episode; None if there is nothing to judge by.
        """
        if self.status == "failed":
            return False
        if self.ok is not None:
            return self.ok
        if self.reward is not None:
            return self.reward >= FULL_REWARD
        exact = [reply.exact for reply in self.replies]
        return all(exact) if exact and None not in exact else None

    def line(self) -> dict[str, Any]:
        """Return the transcript line as a dictionary, which is also a valid row of `messages` data."""
        answers = {reply.index: reply for reply in self.replies}
        cut = [reply.index for reply in self.replies if reply.is_cut]
        more = ({"cut": cut} if cut else {}) | ({"history": "gold"} if self.shows_gold else {})
        return {
            "dialogue": self.key,
            "task": self.task_key,
            "seed": self.seed,
            "status": self.status,
            "reason": self.reason,
            "reward": self.reward,
            "ok": self.ok,
            "rounds": self.rounds,
            "metrics": self.metrics,
            "target": self.target,
            "messages": [
                self.message_line(index, message, answers.get(index)) for index, message in enumerate(self.messages)
            ],
        } | more

    def message_line(self, index: int, message: Mapping[str, Any], answer: EpisodeTurn | None) -> dict[str, Any]:
        """Return a message as a dictionary for the transcript line.

        Args:
            index: Its index in the messages.
            message: The message.
            answer: The answer of the main agent that it is, if it is one.
        """
        tokens = self.tokens.get(index) if answer is None else answer.tokens
        more = {
            "values": None if answer is None else answer.values,
            "tokens": None if tokens is None else list(tokens),
            "gold": None if answer is None else answer.gold,
            "other_golds": list(answer.other_golds) if answer is not None and answer.other_golds else None,
        }
        known = {key: value for key, value in more.items() if value is not None}
        said = {key: message[key] for key in ("role", "content", "agent")}
        return said | answer_part(message) | known


def successes(episodes: Sequence[Episode]) -> list[bool | None]:
    """Return whether each episode succeeded; None if nothing judges it.

    A truncated episode that nothing judges, as when the reward comes at the end, did not succeed if anything judges
    the others.
    """
    known = [episode.succeeded for episode in episodes]
    judged = any(
        success is not None and episode.status != "failed" for episode, success in zip(episodes, known, strict=True)
    )
    return [
        False if success is None and judged and episode.status == "truncated" else success
        for episode, success in zip(episodes, known, strict=True)
    ]


def answer_part(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of a message for the whole answer of a turn with several outputs, if it has one."""
    return {ANSWER: message[ANSWER]} if message.get(ANSWER) is not None else {}


def derived_seed(seed: int, *names: str) -> int:
    """Derive a seed between 0 and 2**32 - 1 from a seed and names."""
    # From names and not from an index: the seed of an episode does not depend on its position among the others.
    return hash_to_int("\0".join((str(seed), *names)), num_bytes=4)


def correction_in(message: Mapping[str, Any]) -> str | None:
    """Return the correction of a message, if someone has written one. Raise ValueError if it is no text."""
    correction = message.get("correction")
    if correction is not None and not (isinstance(correction, str) and correction.strip()):
        raise ValueError(f"the correction {correction!r} is not a text")
    return correction


def from_line(line: Mapping[str, Any]) -> Episode:
    """Restore an episode from its transcript line, with everything that metrics need."""
    episode = Episode(line["dialogue"], line["task"], {}, line["seed"], line.get("history") == "gold")
    for index, message in enumerate(line["messages"]):
        # Without `agent`, only messages of the main agent have tokens.
        agent = message.get("agent", AGENT if "tokens" in message else "user")
        said = {"role": message["role"], "content": message["content"], "agent": agent} | answer_part(message)
        episode.messages.append(said)
        tokens, correction = message.get("tokens"), correction_in(message)
        if tokens is not None and agent == AGENT:
            gold, answer, values = message.get("gold"), message.get(ANSWER), message.get("values")
            turn = EpisodeTurn(index, message["content"], tuple(tokens), gold, answer, values, correction)
            turn.is_cut = index in line.get("cut", ())
            turn.other_golds = tuple(message.get("other_golds", ()))
            episode.replies.append(turn)
        elif correction is not None:
            raise ValueError(f"message {index} has a correction, but is no answer of the main agent")
        elif tokens is not None:
            episode.tokens[index] = tuple(tokens)
    episode.reward, episode.ok, episode.rounds = line["reward"], line["ok"], line["rounds"]
    episode.metrics, episode.target = dict(line["metrics"]), line["target"]
    episode.status, episode.reason = line["status"], line["reason"]
    return episode
