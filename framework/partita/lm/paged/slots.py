"""Continuous batching with a paged KV cache, in decode steps of constant shapes.

It answers like `partita.lm.slots.slots`, with other costs: no row moves in the cache, the token of a step is fed to the
next one on the device, and the host reads it one step late. So a row that ends at an end token or a stop string decodes
one more token, which is thrown away.

Shapes: N rows, T tokens of a pass in all rows, V vocabulary.
"""

from collections.abc import Collection, Sequence

import torch

from partita.lm.base import GenerationOptions, SlotAnswer, SlotRequest
from partita.lm.loaded_model import TextModel
from partita.lm.paged.attention import PagedAttention
from partita.lm.paged.blocks import BlockPool, blocks_for
from partita.lm.paged.cache import PagedKVCache
from partita.lm.paged.next_token import DeviceChoice
from partita.lm.paged.prefill import PromptPart, prefill
from partita.lm.paged.row_blocks import Cached, RowBlocks
from partita.lm.paged.row_state import NewRow, empty_state, move_rows, start_rows, stop_rows
from partita.lm.paged.rows import LateTokens, PagedRow
from partita.lm.paged.step import DecodeStep, StepRunner, padded_rows
from partita.lm.slots.prompt_forks import PromptForks
from partita.lm.slots.row_settings import RowSettings
from partita.lm.slots.slots import PREFILL_TOKENS, PREFILL_TOKENS_ELSEWHERE


class PagedSlots:
    """Implements `partita.lm.base.AnsweringSlots`."""

    def __init__(
        self,
        lm: TextModel,
        options: GenerationOptions,
        *,
        slots: int,
        tokens: int,
        prefix: Sequence[int],
        seed: int,
        attention: PagedAttention,
    ) -> None:
        """Allocate the buffers and prefill the prefix.

        Args:
            lm: The model.
            options: Generation settings, which `why_not_paged` accepts.
            slots: Maximum number of active rows.
            tokens: Maximum length of a row, prompt and new tokens.
            prefix: Tokens that all prompts start with.
            seed: Seed of sampling.
            attention: How the model attends to the cache; it is closed with the slots.
        """
        self.lm, self.num_slots, self.attention = lm, slots, attention
        self.settings = RowSettings(lm, options, seed=seed)
        self.width = blocks_for(tokens, block_tokens=attention.block_tokens)
        """Most blocks of a row."""
        pool = BlockPool(
            slots * self.width + blocks_for(len(prefix), block_tokens=attention.block_tokens),
            block_tokens=attention.block_tokens,
        )
        self.cache = PagedKVCache(blocks=pool.total, block_tokens=pool.block_tokens)
        self.blocks = RowBlocks(self.cache, pool, device=lm.device)
        self.forks = PromptForks()
        size = lm.vocabulary_size
        self.choice = DeviceChoice(self.settings, vocabulary=size, device=lm.device)
        self.state = empty_state(
            slots,
            blocks=self.width,
            draws=tokens + 1 if options.do_sample else 0,
            vocabulary=size if self.choice.penalty is not None else 0,
            device=lm.device,
        )
        step = DecodeStep(lm.base, self.cache, self.state, attention=attention, choice=self.choice)
        self.runner = StepRunner(step)
        self.rows: dict[int, PagedRow] = {}
        """Active rows by their index in the state."""
        self.leaving: list[PagedRow] = []
        """Rows that have ended while a token is being decoded: it is written to their blocks."""
        self.late = LateTokens()
        self.answers: list[tuple[PagedRow, SlotAnswer]] = []
        """Rows that have ended with their answers, which were not returned yet."""
        attention.open()
        if prefix:
            self.prefill_prefix(list(prefix))

    def prefill_prefix(self, prefix: list[int]) -> None:
        """Prefill the shared prefix of all rows."""
        pool = self.blocks.pool
        blocks = pool.allocate(blocks_for(len(prefix), block_tokens=pool.block_tokens))
        try:
            self.forward([PromptPart(prefix, 0, blocks)])
        except BaseException:
            self.close()
            raise
        self.blocks.prefix = Cached(prefix, blocks)

    def close(self) -> None:
        """Restore the model to its previous state, and free the memory of captured steps."""
        self.runner.graphs.clear()
        self.attention.close()

    @property
    def live(self) -> Sequence[PagedRow]:
        """Active rows, and those with an answer that was not returned: they start again if memory runs out."""
        return [*self.active, *(row for row, _ in self.answers)]

    @property
    def active(self) -> list[PagedRow]:
        """Active rows."""
        return list(self.rows.values())

    def prompts_per_pass(self, tokens: int, most: int) -> int:
        """Return how many prompts to prefill in one pass, from 1 to `most`."""
        read = PREFILL_TOKENS.get(self.lm.device.type, PREFILL_TOKENS_ELSEWHERE)
        return max(1, min(read // tokens, most))

    def padded_length(self, tokens: int) -> int:
        """Return the prefill length per prompt: prompts are not padded."""
        return tokens

    def uncached_tokens(self, request: SlotRequest) -> int:
        """Return the number of prompt tokens to prefill, without the prefix and the row's cached tokens."""
        self.settle(keeping=True)
        rows = () if request.prefix_group is None else self.cached_prompts()
        return len(request.input_ids) - self.blocks.longest_beginning(request, rows)[1]

    def cached_prompts(self) -> list[Cached]:
        """Return the prompts of active rows with their blocks."""
        return [Cached(row.request.input_ids, row.blocks, row.request.prefix_group) for row in self.active]

    def forget(self, row: int) -> None:
        """Release the blocks that a finished row keeps."""
        self.blocks.forget(row)

    def cancel(self, rows: Collection[int]) -> None:
        """Stop active rows and free their blocks; rows that are not active are ignored."""
        self.end([row for row in self.active if row.request.row in rows])

    # Prefill

    def admit(self, requests: Sequence[SlotRequest]) -> list[SlotAnswer]:
        """Prefill prompts in one pass and choose the first token of each; it is read after the next step."""
        assert all(request.options is None for request in requests), "all rows have the settings of the slots"
        needed = sum(self.blocks.most_blocks(request) for request in requests)
        self.settle(keeping=len(self.blocks.pool.free) >= needed)
        self.begin(requests)
        return self.take_answers()

    def take_answers(self) -> list[SlotAnswer]:
        """Return the answers that were not returned yet."""
        answers, self.answers = self.answers, []
        return [answer for _, answer in answers]

    def settle(self, *, keeping: bool) -> None:
        """Read the tokens that are being decoded, so that rows that have ended give back their blocks.

        Args:
            keeping: Whether to wait only for rows whose blocks are kept for their next turn.
        """
        if any(row.request.keep or not keeping for row in self.leaving):
            self.collect(self.late.read(leave=0))

    def begin(self, requests: Sequence[SlotRequest]) -> torch.Tensor:
        """Start rows; return the logits after their prompts [N, V], those that another row has last."""
        new: list[PagedRow] = []
        try:
            logits_NV = self.compute(requests, new)
            self.start(new, logits_NV)
        except BaseException:
            stop_rows(self.state, [row.index for row in new if row.index >= 0])
            for row in new:
                # A pass that failed may have written NaN.
                self.blocks.release(row.blocks, broken=True)
            raise
        self.rows.update((row.index, row) for row in new)
        return logits_NV

    @torch.no_grad()
    def compute(self, requests: Sequence[SlotRequest], new: list[PagedRow]) -> torch.Tensor:
        """Compute each prompt that no other row has; add all rows to `new`, and return their logits [N, V]."""
        computed, forked = self.forks.split(requests, self.active)
        parts, copies = list[PromptPart](), []
        cached = self.cached_prompts()
        for request in computed:
            blocks, shared, to_copy = self.blocks.take(request, cached)
            if not to_copy:  # what it has taken over is in no other list now
                cached.append(Cached(request.input_ids[:shared], blocks, request.prefix_group))
            new.append(PagedRow(request, self.settings, blocks=blocks))
            parts.append(PromptPart(request.input_ids[shared:], shared, blocks))
            copies += to_copy
        logits = []
        if parts:
            self.blocks.copy(copies)
            logits.append(self.forward(parts))
            self.forks.remember(computed, logits[0])
        if forked:
            logits.append(self.fork(forked, new))
        return torch.cat(logits)

    def fork(self, requests: Sequence[SlotRequest], new: list[PagedRow]) -> torch.Tensor:
        """Give rows the blocks of rows with the same prompt; add them to `new`, and return their logits [N, V]."""
        sources = {row.request.shared: row for row in [*self.active, *new]}
        copies, logits = [], []
        for request in requests:
            source = sources[request.shared]
            prompt = Cached(request.input_ids, source.blocks)
            blocks, to_copy = self.blocks.fork(request, prompt, shared=len(request.input_ids))
            new.append(PagedRow(request, self.settings, blocks=blocks))
            copies += to_copy
            logits.append(self.forks.logits[request.shared or 0])
        self.blocks.copy(copies)
        return torch.stack(logits)

    def forward(self, parts: Sequence[PromptPart]) -> torch.Tensor:
        """Prefill parts of prompts; return the logits after them [N, V]."""
        return prefill(self.lm, self.cache, parts, attention=self.attention, width=self.width)

    @torch.no_grad()
    def start(self, rows: Sequence[PagedRow], logits_NV: torch.Tensor) -> None:
        """Give rows an index, and choose their first tokens."""
        indices_N = self.write(rows)
        tokens_N = self.choice(logits_NV, self.state.at(indices_N))
        self.state.begin(indices_N, tokens_N)
        self.expect(list(enumerate(rows)), tokens_N)

    def write(self, rows: Sequence[PagedRow]) -> torch.Tensor:
        """Give rows an index, and write their state to the device; return the indices [N]."""
        free = (index for index in range(self.num_slots) if index not in self.rows)
        new = []
        for row, index in zip(rows, free, strict=False):
            row.index = index
            self.settings.sampler.prepare(row)
            request, least = row.request, self.choice.least_of(row.request)
            new.append(NewRow(index, len(request.input_ids), least, row.blocks, row.uniforms, request.input_ids))
        return start_rows(self.state, new)

    def start_without_prefill(self, requests: Sequence[SlotRequest]) -> None:
        """Start rows without computing their prompts, for measuring."""
        rows = [PagedRow(request, self.settings, blocks=self.blocks.take(request, ())[0]) for request in requests]
        self.write(rows)
        self.rows.update((row.index, row) for row in rows)

    # Decoding

    def step(self) -> list[SlotAnswer]:
        """Start to decode a token for every active row; return rows that ended with the token before it."""
        starts = any(row.started < row.request.max_new_tokens for row in self.active)
        if starts:
            self.close_gaps()
            count = padded_rows(max(self.rows) + 1, most=self.num_slots)
            self.expect(list(self.rows.items()), self.runner(count))
        self.collect(self.late.read(leave=int(starts)))
        if not self.rows:
            # No step follows that would read the last tokens.
            self.settle(keeping=False)
        return self.take_answers()

    def expect(self, rows: Sequence[tuple[int, PagedRow]], tokens_N: torch.Tensor) -> None:
        """Start to copy the tokens of rows to the host."""
        for _, row in rows:
            row.started += 1
        self.late.add(rows, tokens_N)

    def close_gaps(self) -> None:
        """Move rows to lower indices if fewer rows are then decoded; their blocks stay where they are."""
        count = padded_rows(len(self.rows), most=self.num_slots)
        moving = [row for index, row in self.rows.items() if index >= count]
        if not moving:
            return
        free = [index for index in range(count) if index not in self.rows]
        moves = [(row.index, index) for row, index in zip(moving, free, strict=False)]
        move_rows(self.state, moves)
        for row, (source, target) in zip(moving, moves, strict=True):
            del self.rows[source]
            self.rows[target] = row
            row.index = target

    def collect(self, tokens: Sequence[tuple[PagedRow, int]]) -> None:
        """Append tokens to their rows, and finish rows that have ended."""
        ended = []
        for row, token in tokens:
            row.read += 1
            if row.ended:
                # A token after the end, whose keys and values are in the blocks of the row.
                row.unclean = row.unclean or token < 0
                continue
            row.broken = row.unclean = token < 0
            if not row.broken:
                row.new.append(token)
            if row.broken or row.settings.has_ended(row):
                row.ended = True
                ended.append(row)
        self.end(ended)
        for row in ended:
            answer = None if row.broken else row.settings.answer(row)
            self.answers.append((row, SlotAnswer(row.request, answer, row.reason if row.broken else None)))

    def end(self, rows: Sequence[PagedRow]) -> None:
        """Free the indices of rows, and the blocks of all rows that no token is being decoded for."""
        stop_rows(self.state, [row.index for row in rows])
        for row in rows:
            row.ended = True
            del self.rows[row.index]
        waiting, self.leaving = [*self.leaving, *rows], []
        for row in waiting:
            if row.read < row.started:
                self.leaving.append(row)
            else:
                self.blocks.end(row)
