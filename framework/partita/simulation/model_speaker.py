"""Get the turns of an agent that is a model, with continuous batching over all waiting episodes."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from partita.data.episode import AGENT, Episode
from partita.data.formatting.row_tokenizer import PromptExample
from partita.generation.oom_backoff import BatchBudget
from partita.generation.requests import GenerationSettings, RowRequests, RowResult
from partita.generation.static_batches import requests_or_errors
from partita.lm.base import Generated, GenerationOptions, GenerationRequest
from partita.simulation.dialogue_scheduler import DialogueScheduler
from partita.simulation.speakers import TurnResult, WaitingTurn
from partita.simulation.turns import TurnEncoder, TurnPrompt
from partita_schema.dialogues.common_form import ANSWER

if TYPE_CHECKING:
    from partita.lm.base import GenerativeModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelSpec:
    """A model that speaks for an agent, with its settings."""

    lm: "GenerativeModel"
    turns: TurnEncoder
    """Encodes the prompts."""
    options: GenerationOptions
    budget: BatchBudget
    context_tokens: int
    """Maximum number of tokens of a prompt and its answer together."""
    max_new_tokens: int
    seed: int
    """Seed for sampling."""

    def new_tokens(self, output: int) -> int:
        """Return the limit of generated tokens of output number `output` of a turn, or of a turn that is one answer."""
        sequence = self.turns.sequence
        return self.max_new_tokens if sequence is None else sequence.new_tokens[output]


@dataclass
class PendingTurn:
    """An episode whose turn a model is answering."""

    episode: Episode
    active_index: int
    prompt: PromptExample
    """The prompt that is answered."""
    answers: list[Generated] = field(default_factory=list)
    """Answers so far; several if the outputs of a turn are answered in sequence."""


class ModelSpeaker:
    """Speaker of an agent that is a model.

    Implements `RowQueue`: a row of the scheduler is the index of an active episode. All turns of an episode are the
    same row, which is how the scheduler finds the KV cache of the earlier turns.
    """

    def __init__(
        self,
        agent: str,
        spec: ModelSpec,
        *,
        concurrency: int,
        more: Callable[[], bool],
        stopping: Callable[[], bool],
    ) -> None:
        """Create a speaker without waiting episodes.

        Args:
            agent: Name of the agent.
            spec: The model.
            concurrency: Maximum number of active episodes.
            more: Returns whether episodes may still request a turn.
            stopping: Returns whether to stop; answers in progress are then finished, and no others start.
        """
        self.agent, self.spec, self.more, self.stopping = agent, spec, more, stopping
        # By active index. The scheduler holds the same arrays, so they are changed in place.
        self.lengths = np.zeros(concurrency, dtype=np.int64)
        self.new_tokens = np.zeros(concurrency, dtype=np.int64)
        self.waiting: list[WaitingTurn] = []
        """Requests whose prompt is not encoded yet."""
        self.requested: dict[int, PendingTurn] = {}
        """Episodes that the model is to answer, with their prompts, by active index."""
        self.shown: dict[int, TurnPrompt] = {}
        """Previous prompt and answer of each active episode, by active index."""
        self.ended: list[TurnResult] = []
        """Turns that `step` has not returned yet."""
        self.scheduler: DialogueScheduler | None = None
        """None if the model cannot use continuous batching; waiting prompts are then answered in static batches."""

    @contextmanager
    def open(self) -> Iterator[None]:
        """Switch the model to evaluation mode, and create its scheduler if it supports slots."""
        reason = self.spec.lm.why_no_slots(self.spec.options, tokens=self.spec.context_tokens)
        if reason is not None:
            whose = "" if self.agent == AGENT else f"of {self.agent} "
            support = self.spec.lm.batch_support(self.spec.options, tokens=self.spec.context_tokens)
            logger.info("dialogues %sare answered %s", whose, support.describe(reason))
        with self.spec.lm.evaluating():
            self.scheduler = self.new_scheduler() if reason is None else None
            try:
                yield
            finally:
                if self.scheduler is not None:
                    self.scheduler.close_slots()

    def new_scheduler(self) -> DialogueScheduler:
        """Create a scheduler that takes its rows from this speaker."""
        spec = self.spec
        work = RowRequests(
            self.lengths, self.new_tokens, self.prompts, self.key, constraint_index=self.constraint_index
        )
        settings = GenerationSettings(spec.options, spec.budget, spec.seed, stopping=self.stopping)
        scheduler = DialogueScheduler(spec.lm, work, settings, rows=self)
        scheduler.context_tokens = spec.context_tokens
        return scheduler

    def ask(self, waiting: WaitingTurn) -> None:
        """Request a turn of the model in an episode."""
        self.waiting.append(waiting)

    @property
    def has_work(self) -> bool:
        """Whether an episode waits or is being answered."""
        return bool(self.waiting or (self.scheduler is not None and self.scheduler.waiting.rows)) or self.is_answering

    @property
    def is_answering(self) -> bool:
        """Whether an answer is in progress."""
        return self.scheduler is not None and self.scheduler.slots is not None and bool(self.scheduler.slots.live)

    def step(self) -> list[TurnResult]:
        """Decode one token of every answer, or whole answers if there is no scheduler; return finished turns."""
        if not self.has_work:
            return []
        results = self.generate_batch() if self.scheduler is None else self.step_scheduler(self.scheduler)
        for result in results:
            self.handle_result(result)
        ended, self.ended = self.ended, []
        return ended

    def step_scheduler(self, scheduler: DialogueScheduler) -> list[RowResult]:
        """Advance the scheduler by one step, and return the rows that are finished."""
        if scheduler.refill():  # also takes waiting episodes from this speaker, with `take`
            scheduler.step()
        results, scheduler.results = scheduler.results, []
        return results

    def generate_batch(self) -> list[RowResult]:
        """Answer all waiting episodes at once, those that are asked for the same output of a turn together.

        Raises:
            JobError: The device failed.
        """
        spec, results = self.spec, list[RowResult]()
        by_constraint: dict[int, list[int]] = {}
        for row in self.take(len(self.lengths)):
            by_constraint.setdefault(self.constraint_index(row), []).append(row)
        for constraint, rows in by_constraint.items():
            requests = [
                GenerationRequest(ids, int(self.new_tokens[row]), key=self.key(row))
                for row, ids in zip(rows, self.prompts(rows), strict=True)
            ]
            settings = GenerationSettings(spec.options.with_constraint(constraint), spec.budget, spec.seed)
            results += [replace(one, row=rows[one.row]) for one in requests_or_errors(spec.lm, requests, settings)]
        return results

    def handle_result(self, result: RowResult) -> None:
        """Convert a generated answer, or the error of its row, to a turn."""
        if result.generated is None:
            who = "model" if self.agent == AGENT else f"agent {self.agent}"
            self.ended.append(TurnResult(result.row, end=("failed", f"{who}: {result.error}")))
            return
        turns, pending = self.spec.turns, self.requested[result.row]
        pending.answers.append(result.generated)
        if turns.sequence is not None and len(pending.answers) < len(turns.sequence.names):
            before = self.shown[result.row]
            self.shown[result.row] = turns.after(pending.prompt, before, result.generated, is_shown=True)
            self.waiting.append(pending)
            return
        whole = self.whole(pending)
        turn = TurnResult(result.row, whole.text, whole.ids, is_cut=whole.finish_reason == "length")
        if turns.answers is not None:
            spoken = turns.answers.spoken(whole.text)
            turn = turn._replace(text=spoken.text, answer=spoken.answer, values=spoken.values)
        self.ended.append(turn)

    def whole(self, pending: PendingTurn) -> Generated:
        """Return all answers of a turn as one."""
        sequence = self.spec.turns.sequence
        return pending.answers[0] if sequence is None else sequence.combined(pending.answers)

    def turn_recorded(self, active_index: int) -> None:
        """Remember the prompt and the answer, from which the next prompt of the episode continues."""
        pending = self.requested.pop(active_index)
        said, shows_gold = pending.episode.messages[-1], self.agent == AGENT and pending.episode.shows_gold
        is_shown = not shows_gold and said.get(ANSWER, said["content"]) == self.whole(pending).text
        self.shown[active_index] = self.spec.turns.after(
            pending.prompt, self.shown[active_index], pending.answers[-1], is_shown=is_shown
        )

    def forget(self, active_index: int) -> None:
        """Drop the prompts and the KV cache of an episode that has ended."""
        self.requested.pop(active_index, None)
        self.shown.pop(active_index, None)
        self.waiting = [waiting for waiting in self.waiting if waiting.active_index != active_index]
        if self.scheduler is not None:
            self.scheduler.forget(active_index)

    # Implementation of RowQueue

    @property
    def left(self) -> bool:
        """Whether episodes may still request a turn."""
        return self.more()

    def take(self, wanted: int) -> Sequence[int]:
        """Encode the prompts of all waiting episodes and return their indices, the longest prompt first.

        An episode whose prompt is invalid or leaves no room for an answer ends instead. `wanted` is ignored: encoded
        early, the prompts are ready when a slot is free, and the scheduler can choose prompts of similar length.
        """
        waiting, self.waiting = self.waiting, []
        indices = [turn.active_index for turn in waiting if self.prepare(turn)]
        return sorted(indices, key=lambda index: -int(self.lengths[index]))

    def prepare(self, waiting: WaitingTurn) -> bool:
        """Encode and store a prompt that can be answered; end the episode and return False otherwise."""
        index, turns, context_tokens = waiting.active_index, self.spec.turns, self.spec.context_tokens
        answers = waiting.answers if isinstance(waiting, PendingTurn) else []
        names = turns.sequence.names if turns.sequence is not None else ()
        answered = {name: answer.text for name, answer in zip(names, answers, strict=False)}
        before = self.shown.setdefault(index, TurnPrompt())
        prompt = turns.encode(waiting.episode, before, answered=answered)
        length = len(prompt.input_ids)
        if prompt.error is not None and not length:
            who = "environment" if self.agent == AGENT else f"agent {self.agent}"
            self.ended.append(TurnResult(index, end=("failed", f"{who}: {prompt.error}")))
            return False
        if prompt.error is not None or length >= context_tokens:
            self.ended.append(TurnResult(index, end=("truncated", "tokens")))
            return False
        self.requested[index] = PendingTurn(waiting.episode, index, prompt, answers)
        self.lengths[index] = length
        self.new_tokens[index] = min(self.spec.new_tokens(len(answers)), context_tokens - length)
        return True

    def prompts(self, rows: Sequence[int]) -> list[list[int]]:
        """Return the prompt tokens of active episodes."""
        return [list(self.requested[row].prompt.input_ids) for row in rows]

    def constraint_index(self, row: int) -> int:
        """Return the index of the output that an active episode is asked for."""
        return len(self.requested[row].answers)

    def key(self, row: int) -> bytes:
        """Return the sampling key of an active episode: its key, turn and, other than for the main agent, agent."""
        # The row is not part of the key: the same episode may run at any index.
        episode, output = self.requested[row].episode, self.constraint_index(row)
        agent = "" if self.agent == AGENT else f"\0{self.agent}"
        later = f"\0\0{output}" if output else ""
        return f"{episode.key}\0{episode.turns_of(self.agent)}{agent}{later}".encode()
