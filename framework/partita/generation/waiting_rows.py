"""The rows of a job that wait for a slot, and which of their prompts are prefilled together."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from partita.generation.prefill_plan import PLANNED_PROMPTS, split_into_passes
from partita.generation.requests import RowRequests
from partita.generation.work_queue import RowQueue
from partita.lm.base import AnsweringSlots, SlotRequest


class WaitingRows:
    """Rows that start in the order of their source, in groups of similar lengths. Subclasses choose otherwise.

    Of prompts that begin alike (`RowRequests.prefix_groups`), the first is computed before the others, which copy its
    beginning.
    """

    def __init__(self, work: RowRequests, source: RowQueue, *, plans_passes: bool) -> None:
        """Start without rows.

        Args:
            work: The rows with their prompts.
            source: Rows are taken from it.
            plans_passes: Whether few prompts are split into passes by their costs, which are those of a CPU.
        """
        self.work = work
        self.source = source
        self.plans_passes = plans_passes
        self.rows: list[int] = []
        """The waiting rows, of which the last one starts first."""
        self.planned: list[int] = []
        """Number of prompts in each of the next passes."""
        self.begun: set[int] = set()
        """Shared prompts of which a row has started."""
        self.considered: dict[int, SlotRequest] = {}
        """Requests of rows that may start next, by row, if some belong to prefix groups."""
        self.uncached: dict[int, int] = {}
        """Tokens to prefill of each of them."""

    def take(self, wanted: int) -> None:
        """Take rows from the source, which start after those that wait."""
        self.rows = [*reversed(self.source.take(wanted)), *self.rows]

    def put_back(self, rows: Sequence[int]) -> None:
        """Let rows wait that have to start again."""
        self.rows = sorted([*self.rows, *rows], key=lambda row: (self.work.lengths[row], -row))

    def remove(self, rows: Collection[int]) -> None:
        """Remove rows; those that do not wait are ignored."""
        self.rows = [row for row in self.rows if row not in rows]
        self.forget_plan()

    def remove_new(self) -> None:
        """Remove all rows but those that have begun."""
        self.remove({row for row in self.rows if not self.has_begun(row)})

    def has_begun(self, row: int) -> bool:
        """Return whether a waiting row shares its prompt with a row that has started."""
        return self.shared_prompt(row) in self.begun

    def forget_plan(self) -> None:
        """Plan the next passes again, because slots or waiting rows have changed."""
        self.planned = []
        self.uncached = {}

    def next_group(self, slots: AnsweringSlots, *, free: int, prefix: int) -> list[SlotRequest]:
        """Remove the rows whose prompts are prefilled next, together, and return their requests.

        Args:
            slots: The slots.
            free: Number of free slots.
            prefix: Number of tokens that all prompts begin with, and that are prefilled already.
        """
        free = min(free, len(self.rows))
        if self.work.prefix_groups is not None:
            return self.next_of_groups(slots, free=free, prefix=prefix)
        count = slots.prompts_per_pass(int(self.work.lengths[self.rows[-1]]) - prefix, free)
        if self.work.num_samples > 1:
            count = self.samples_of_prompts(count, slots, free=free)
        elif count <= PLANNED_PROMPTS and self.plans_passes:
            count = min(count, self.planned_count(slots, free=free, prefix=prefix))
        rows = [self.rows.pop() for _ in range(count)]
        self.begun |= {prompt for row in rows if (prompt := self.shared_prompt(row)) is not None}
        return [replace(request, shared=self.shared_prompt(request.row)) for request in self.requests(rows)]

    def next_of_groups(self, slots: AnsweringSlots, *, free: int, prefix: int) -> list[SlotRequest]:
        """Remove the rows whose prompts are prefilled next, of which some belong to prefix groups.

        If nothing of a prefix group's beginning is cached, its first row is prefilled, and the others wait for it. A
        row of which less than half is cached is prefilled as if it had no prefix group: copying would gain little.
        """
        self.consider(self.rows[: -min(free, PLANNED_PROMPTS) - 1 : -1])
        ready: list[SlotRequest] = []
        first: set[int] = set()
        for row, request in self.considered.items():
            own = len(request.input_ids) - prefix
            uncached = self.uncached.get(row, own)
            if request.prefix_group is not None:
                uncached = slots.uncached_tokens(request) if uncached == own else uncached
                if uncached == own and request.prefix_group in first:
                    continue
                if uncached == own:
                    first.add(request.prefix_group)
                elif 2 * uncached > own:
                    uncached, request = own, replace(request, prefix_group=None)
            self.uncached[row] = uncached
            ready.append(request)
        ready.sort(key=lambda request: -self.uncached[request.row])
        lengths = [self.uncached[request.row] for request in ready]
        end = (
            split_into_passes(lengths, slots)[0][1]
            if self.plans_passes
            else slots.prompts_per_pass(lengths[0], len(ready))
        )
        group = ready[:end]
        self.uncached |= {
            request.row: slots.uncached_tokens(request) for request in group if request.prefix_group is not None
        }
        considered = len(self.considered)
        for request in group:
            del self.considered[request.row]  # a later request of the row may be for its next output
        started = {request.row for request in group}
        self.rows[-considered:] = [row for row in self.rows[-considered:] if row not in started]
        waiting = {self.work.prefix_group(row) for row in self.rows[-considered:]} - {None}
        # What is cached of a prefix group must outlast a row that ends before the others start.
        return [replace(request, keep=request.prefix_group in waiting) for request in group]

    def consider(self, rows: Sequence[int]) -> None:
        """Fetch the requests of rows that may start next; what is known of those considered before is kept."""
        new = {request.row: request for request in self.requests([row for row in rows if row not in self.considered])}
        self.considered = {row: new[row] if row in new else self.considered[row] for row in rows}
        self.uncached = {row: self.uncached[row] for row in rows if row in self.uncached}

    def planned_count(self, slots: AnsweringSlots, *, free: int, prefix: int) -> int:
        """Return the number of prompts in the next pass of the plan, which is made again if it does not fit."""
        if not self.planned or sum(self.planned) > free:
            rows = self.rows[: -min(free, PLANNED_PROMPTS) - 1 : -1]
            lengths = [int(self.work.lengths[row]) - prefix for row in rows]
            self.planned = [end - start for start, end in split_into_passes(lengths, slots)]
        return self.planned.pop(0)

    def samples_of_prompts(self, most: int, slots: AnsweringSlots, *, free: int) -> int:
        """Return the number of next rows whose prompts are at most `most` other ones than those of active rows.

        Args:
            most: Most prompts that are prefilled together.
            slots: The slots.
            free: Most rows that can start.
        """
        prompts = {row.request.shared for row in slots.live}
        for count in range(free):
            prompt = self.shared_prompt(self.rows[-1 - count])
            if prompt is None or prompt not in prompts:
                if not most:
                    return count
                most -= 1
                prompts.add(prompt)
        return free

    def shared_prompt(self, row: int) -> int | None:
        """Return the name of a row's prompt if other rows have the same one."""
        return row // self.work.num_samples if self.work.num_samples > 1 else None

    def requests(self, rows: Sequence[int]) -> list[SlotRequest]:
        """Return the requests of rows."""
        work = self.work
        return [
            SlotRequest(
                ids,
                int(work.new_tokens[row]),
                row,
                key=work.key(row),
                constraint_index=work.constraint_index(row),
                options=work.options(row),
                prefix_group=work.prefix_group(row),
            )
            for row, ids in zip(rows, work.fetch(rows), strict=True)
        ]
