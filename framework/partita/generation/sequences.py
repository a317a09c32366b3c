"""Answer rows with several outputs, one after the other: the prompt of an output ends after the outputs before it.

With continuous batching, a row keeps its slot from output to output, so that only the tokens between two answers are
prefilled. The result of a row is one completion with the answers of all outputs, so a journal never holds a part of a
turn.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from partita.generation.prefill_plan import PLANNED_PROMPTS
from partita.generation.prompts import PromptText
from partita.generation.requests import BatchResult, GenerationJob, RowResult, common_prefix, plan
from partita.generation.scheduler import Scheduler
from partita.generation.static_batches import generate_in_batches, requests_in_batches
from partita.generation.waiting_rows import WaitingRows
from partita.generation.work_queue import PlannedRowQueue, RowQueue
from partita.lm.base import AnsweringSlots, Generated, GenerationRequest, SlotRequest
from partita.lm.decoding.continuation import decode_continuation
from partita_schema.errors import RowError

if TYPE_CHECKING:
    from partita.lm.base import GenerativeModel


@dataclass
class PartialTurn:
    """A row of which some outputs are answered."""

    answers: list[Generated] = field(default_factory=list)
    """The answers so far."""
    ids: list[int] = field(default_factory=list)
    """Tokens of the next prompt."""
    text: str = ""
    """Text of the next prompt."""


class OutputPrompts:
    """The prompts of a job by row: that of the first output, and after an answer that of the next one."""

    def __init__(self, lm: "GenerativeModel", job: GenerationJob) -> None:
        """Start with the first output of each row."""
        assert job.sequence is not None, "the rows have several outputs"
        self.lm, self.job, self.sequence = lm, job, job.sequence
        self.first = first = job.requests(context_length=lm.context_length)
        """Requests for the first outputs."""
        self.room = first.lengths + first.new_tokens
        """Most tokens that a prompt and the answers of its row may have, [rows]."""
        self.turns: dict[int, PartialTurn] = {}
        """Rows of which some outputs are answered."""
        # The scheduler holds these requests, so the arrays are changed in place.
        self.requests = replace(
            first,
            lengths=first.lengths.copy(),
            new_tokens=np.minimum(first.new_tokens, self.sequence.new_tokens[0]),
            fetch=self.fetch,
            key=self.key,
            constraint_index=self.constraint_index,
        )
        rows = np.flatnonzero(first.lengths)
        if len(rows) and not self.starts_with_prefix(self.second_prompt(int(rows[0]))):
            self.requests = replace(self.requests, prefix=())

    def second_prompt(self, row: int) -> Sequence[int]:
        """Return the prompt of a row's second output after an example of an answer."""
        return self.job.prompts.next_prompt(row, {self.sequence.names[0]: "x"}, PromptText()).input_ids

    def starts_with_prefix(self, ids: Sequence[int]) -> bool:
        """Return whether a prompt starts with the tokens that all first prompts start with.

        A chat template can render the beginning of a dialogue differently once more messages follow.
        """
        prefix = list(self.requests.prefix)
        return list(ids[: len(prefix)]) == prefix

    def constraint_index(self, row: int) -> int:
        """Return the index of the output that a row is asked for."""
        return len(self.turns[row].answers) if row in self.turns else 0

    def key(self, row: int) -> bytes:
        """Return the sampling key of a row's next answer."""
        index = self.constraint_index(row)
        return self.first.key(row) + (b"\0%d" % index if index else b"")

    def fetch(self, rows: Sequence[int]) -> list[list[int]]:
        """Return the prompt tokens of rows."""
        first = [row for row in rows if row not in self.turns]
        prompts = dict(zip(first, self.first.fetch(first), strict=True)) if first else {}
        return [prompts[row] if row in prompts else self.turns[row].ids for row in rows]

    def start_again(self, row: int) -> None:
        """Start with the first output of a row, also after an attempt that has failed."""
        self.turns.pop(row, None)
        self.requests.lengths[row] = self.first.lengths[row]
        self.requests.new_tokens[row] = min(self.first.new_tokens[row], self.sequence.new_tokens[0])

    def take(self, row: int, answer: Generated) -> RowResult | None:
        """Record an answer; return the result of the row if the turn is over, or None if another output follows."""
        turn = self.turns.setdefault(row, PartialTurn())
        before = self.before(row, turn, answer)
        turn.answers.append(answer)
        names, count = self.sequence.names, len(turn.answers)
        if count == len(names):
            del self.turns[row]
            return RowResult(row, self.sequence.combined(turn.answers))
        answered = {name: one.text for name, one in zip(names, turn.answers, strict=False)}
        prompt = self.job.prompts.next_prompt(row, answered, before)
        turn.ids, turn.text = list(prompt.input_ids), prompt.text
        room = int(self.room[row]) - len(turn.ids)
        reason = prompt.error if not turn.ids else None
        if turn.ids and room < 1:
            reason = self.no_room(row, len(turn.ids))
        elif turn.ids and not self.starts_with_prefix(turn.ids):
            reason = (
                "the chat template renders this dialogue differently once more messages follow; write answers: together"
            )
        if reason is not None:
            del self.turns[row]
            return RowResult(row, None, f"{names[count]}: {reason}")
        self.requests.lengths[row] = len(turn.ids)
        self.requests.new_tokens[row] = min(self.sequence.new_tokens[count], room)
        return None

    def before(self, row: int, turn: PartialTurn, answer: Generated) -> PromptText:
        """Return the prompt that was answered, with the answer; empty if its tokens are not those of its text."""
        if not turn.answers:
            first = self.job.prompts.next_prompt(row, {}, PromptText())
            turn.ids, turn.text = list(first.input_ids), first.text
        ids = self.ids_of(answer, index=len(turn.answers))
        if decode_continuation(self.lm.tokenizer, ids) != answer.text:
            return PromptText()
        return PromptText(turn.text + answer.text, [*turn.ids, *ids])

    def ids_of(self, answer: Generated, *, index: int) -> Sequence[int]:
        """Return the tokens of an answer to output number `index`; a chosen label's too, though none is generated."""
        if answer.scores is None:
            return answer.ids
        labels = self.job.settings.options.constraints[index].labels
        return next((label.ids for label in labels if label.text == answer.text), answer.ids)

    def no_room(self, row: int, prompt_tokens: int) -> str:
        """Return the error of a row whose prompt leaves no room for the next output."""
        room, context = int(self.room[row]), self.lm.context_length
        of = "the context holds" if room == context else "this prompt and all answers to it may have"
        return f"the prompt has {prompt_tokens:,} tokens, and {of} {room:,}; nothing can be answered"


class WaitingOutputs(WaitingRows):
    """Rows that wait for their first or another output; those that wait for another one start first."""

    turns: Mapping[int, PartialTurn]
    """Rows of which some outputs are answered."""
    last_index: int
    """Index of the last output."""

    def next_group(self, slots: AnsweringSlots, *, free: int, prefix: int) -> list[SlotRequest]:
        """Remove the rows whose prompts are prefilled next, together, and return their requests."""
        begun = next((i for i, row in enumerate(reversed(self.rows)) if row not in self.turns), len(self.rows))
        if not begun:
            first = super().next_group(slots, free=free, prefix=prefix)
            return [replace(request, keep=True) for request in first]
        rows = self.rows[-min(begun, free) :]
        others = {self.work.prefix_group(row) for row in self.rows[-begun - PLANNED_PROMPTS : -begun]} - {None}
        waiting = [
            replace(one, keep=one.constraint_index < self.last_index or one.prefix_group in others)
            for one in self.requests(rows)
        ]
        waiting.sort(key=lambda request: (-slots.uncached_tokens(request), request.row))
        group = waiting[: slots.prompts_per_pass(slots.uncached_tokens(waiting[0]), len(waiting))]
        started = {request.row for request in group}
        self.rows[-len(rows) :] = [row for row in rows if row not in started]
        return group

    def has_begun(self, row: int) -> bool:
        """Return whether a waiting row has an answer, or shares its prompt with a row that has started."""
        return row in self.turns or super().has_begun(row)

    def shared_prompt(self, row: int) -> int | None:
        """Return the name of a row's prompt if other rows have the same one, as before the first answer."""
        return None if row in self.turns else super().shared_prompt(row)


class OutputScheduler(Scheduler):
    """Scheduler of rows with several outputs."""

    def __init__(self, lm: "GenerativeModel", prompts: OutputPrompts, *, done: npt.NDArray[np.bool_]) -> None:
        """Plan the rows that are not `done`, [rows]; no slots are opened yet."""
        settings = prompts.job.settings
        order, copies = plan(prompts.requests, ~done)
        self.prompts = prompts
        super().__init__(
            lm,
            replace(prompts.requests, prefix=common_prefix(prompts.requests, order) if order else ()),
            settings,
            rows=PlannedRowQueue(order, process_group=settings.process_group, together=prompts.requests.num_samples),
        )
        self.copies = copies

    def waiting_rows(self, source: RowQueue) -> WaitingOutputs:
        """Return the waiting rows."""
        waiting = WaitingOutputs(self.work, source, plans_passes=self.lm.device.type == "cpu")
        waiting.turns, waiting.last_index = self.prompts.turns, len(self.prompts.sequence.names) - 1
        return waiting

    def longest(self, rows: Sequence[int]) -> int:
        """Return the most tokens, prompt and all answers, that one of these rows may have."""
        return int(self.prompts.room[np.asarray(rows)].max())

    def record(self, result: RowResult) -> None:
        """Record the result of a row if its turn is over, else let it wait for its next output."""
        final = result if result.generated is None else self.prompts.take(result.row, result.generated)
        if final is None:
            self.waiting.rows.append(result.row)
            return
        self.prompts.turns.pop(result.row, None)
        if self.slots is not None:
            self.slots.forget(result.row)
        super().record(final)


class OutputBatches:
    """Generates rows with several outputs in static batches, one output of all rows of a batch at a time."""

    def __init__(self, lm: "GenerativeModel", prompts: OutputPrompts) -> None:
        self.lm, self.prompts = lm, prompts

    def complete(self, rows: Sequence[int], requests: Sequence[GenerationRequest]) -> list[Generated]:
        """Return the completion of each row, given the requests of the first outputs. Raise RowError if one fails."""
        settings, answers = self.prompts.job.settings, dict[int, Generated]()
        for row in rows:
            self.prompts.start_again(row)
        asked = rows
        while rows:
            new_tokens = self.prompts.requests.new_tokens
            limited = [
                replace(
                    one,
                    max_new_tokens=int(new_tokens[row]),
                    key=self.prompts.key(row),
                    constraint_index=self.prompts.constraint_index(row),
                )
                for row, one in zip(rows, requests, strict=True)
            ]
            generated = requests_in_batches(self.lm, limited, settings)
            results = [self.prompts.take(row, answer) for row, answer in zip(rows, generated, strict=True)]
            for result in results:
                if result is not None and result.generated is None:
                    raise RowError(result.error)
            answers |= {one.row: one.generated for one in results if one is not None and one.generated is not None}
            waiting = [row for row, result in zip(rows, results, strict=True) if result is None]
            requests = [GenerationRequest(ids, 1) for ids in self.prompts.fetch(waiting)]
            rows = waiting
        return [answers[row] for row in asked]


def generate_in_sequence(
    lm: "GenerativeModel", job: GenerationJob, *, done: npt.NDArray[np.bool_]
) -> Iterator[BatchResult]:
    """Generate all outputs of the rows that are not `done`, [rows], and yield the rows as they finish.

    Args:
        lm: The model.
        job: The rows with their sequence of outputs.
        done: Rows that are answered already, [rows].
    """
    prompts = OutputPrompts(lm, job)
    if job.engine != "static":
        yield from OutputScheduler(lm, prompts, done=done).completions()
        return
    first = job.requests(context_length=lm.context_length)
    complete = OutputBatches(lm, prompts).complete
    yield from generate_in_batches(lm, first, job.settings, done=done, complete=complete)
