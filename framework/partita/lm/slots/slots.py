"""Continuous batching with a KV cache of slots, one row per slot.

Prompts are prefilled in groups, then every active row decodes one token per step. A finished row leaves at once: the
last row moves to its slot, and another prompt can be prefilled. Greedy output equals that of transformers' `generate`
for each row by itself. Requests that share a prompt start from one prefill of it. Faster matrix products
differ from torch's in the last digits: where two tokens are tied within those digits, the row is recomputed with
torch's products before the token is chosen. A finished row can keep its slot. Then only the new part of its next prompt
is prefilled, and near ties are recomputed in the same way.

Shapes: N rows, L tokens of the longest prompt of a group after the prefix, V vocabulary, W tokens of the longest active
row.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import torch

from partita.lm.base import GenerationOptions, SlotAnswer, SlotRequest
from partita.lm.decoding.row import Row
from partita.lm.loaded_model import TextModel
from partita.lm.losses.last_layer import last_layer
from partita.lm.model_config.attention_windows import Mask, SlotMasks
from partita.lm.products.fast_linear import round_up, using_fast_products
from partita.lm.slots.attention import SlotAttention, attends, chunks
from partita.lm.slots.kv_cache import SlotKVCache
from partita.lm.slots.last_token_layer import LastTokenHook
from partita.lm.slots.prefix_cache import PrefixCache
from partita.lm.slots.prompt_forks import PromptForks
from partita.lm.slots.row_settings import SettingsOfRows, choose_tokens

logger = logging.getLogger(__name__)

PREFILL_TOKENS = {"cpu": 1024}
"""Number of prompt tokens per prefill pass, by device type ..."""
PREFILL_TOKENS_ELSEWHERE = 16_384
"""... and for all others. More tokens are not faster and take more memory."""
SHORTEST_PASS = 64
"""Minimum number of tokens per pass when a row is recomputed."""
MOST_RECOMPUTED = 0.25
"""Maximum share of recomputed tokens; beyond it the faster products do not pay off ..."""
FEW_ROWS = 8
"""... if more rows than this were recomputed. A single row may have near ties by chance."""


class SlotSupport(NamedTuple):
    """How a model supports slots."""

    narrows_prefill: bool = False
    """Whether only the last token of each prompt goes through the last layer during prefill."""
    shares_prefix: bool = False
    """Whether the KV cache of the shared prefix is stored in the first slot only."""
    reason: str | None = None
    """Why slots are not supported."""


AnySlots = TypeVar("AnySlots", bound="Slots")
Inputs = ParamSpec("Inputs")
Output = TypeVar("Output")


def without_gradients(
    method: Callable[Concatenate[AnySlots, Inputs], Output],
) -> Callable[Concatenate[AnySlots, Inputs], Output]:
    """Decorate a method of slots that computes, so that nothing is recorded for gradients."""

    @wraps(method)
    def compute(slots: AnySlots, /, *args: Inputs.args, **kwargs: Inputs.kwargs) -> Output:
        with slots.lm.without_gradients():
            return method(slots, *args, **kwargs)

    return compute


class Slots:
    """Implements `partita.lm.base.AnsweringSlots` by generation."""

    def __init__(
        self,
        lm: TextModel,
        options: GenerationOptions,
        *,
        slots: int,
        tokens: int,
        prefix: Sequence[int],
        seed: int,
        support: SlotSupport,
        exact: bool = False,
        shortest_pass: int = SHORTEST_PASS,
    ) -> None:
        """Allocate slots and prefill the prefix.

        Args:
            lm: The model.
            options: Generation settings.
            slots: Number of slots.
            tokens: Maximum length of a row, prompt and new tokens.
            prefix: Tokens that all prompts start with.
            seed: Seed of sampling.
            support: What the model supports.
            exact: Whether to always use torch's matrix products.
            shortest_pass: Minimum number of tokens per pass when a row is recomputed.
        """
        self.lm = lm
        self.prefix = len(prefix)
        self.settings = SettingsOfRows(lm, options, seed=seed)
        self.uses_fast_products = lm.has_fast_products and not exact
        """Whether passes of rows without exact settings may use faster products."""
        self.pass_uses_fast_products = self.uses_fast_products and not self.settings.default.exact
        """Whether the current pass uses them."""
        self.checks_near_ties = True
        """Whether rows that reuse a cache are recomputed at near ties."""
        last = last_layer(lm.base) if support.narrows_prefill else None
        self.last_tokens = LastTokenHook(last[0], number=last[1]) if last is not None else None
        self.masks = SlotMasks(lm.base.config.get_text_config(), tokens=tokens)
        self.pool = SlotKVCache(slots=slots, tokens=tokens)
        self.pool.layout.prefix_in_first_slot = support.shares_prefix
        self.attention = SlotAttention(lm.base, self.pool.layout) if attends(lm.base) else nullcontext()
        self.kept = PrefixCache(self.pool)
        self.forks = PromptForks()
        # Row i is always in slot i, so that a decode step sees the first N slots as one view of the cache. The slots
        # after them are free, or hold the cache of finished rows (`kept`).
        self.rows: list[Row] = []
        # The last token of each row. It is not in the cache: the next step writes it there.
        self.tokens_N = torch.zeros(0, dtype=torch.long, device=lm.device)
        self.shortest_pass = self.largest_pass = shortest_pass
        self.tokens_prefilled = self.recomputed_tokens = self.recomputed_rows = 0
        if prefix:
            self.prefill_prefix(list(prefix))

    @without_gradients
    def prefill_prefix(self, prefix: list[int]) -> None:
        """Prefill the shared prefix of all slots."""
        try:
            with self.torch_products():
                self.forward([prefix], first=0, start=0)
            if not self.pool.layout.prefix_in_first_slot:
                self.pool.broadcast_prefix(len(prefix))
        except BaseException:
            self.close()
            raise
        self.pool.layout.prefix = len(prefix)

    def close(self) -> None:
        """Restore the model to its previous state."""
        if self.recomputed_tokens:
            logger.debug("%s tokens were recomputed with torch's matrix products", f"{self.recomputed_tokens:,}")
        if self.last_tokens is not None:
            self.last_tokens.close()

    @property
    def prefill_tokens(self) -> int:
        """Number of prompt tokens per prefill pass."""
        return PREFILL_TOKENS.get(self.lm.device.type, PREFILL_TOKENS_ELSEWHERE)

    def prompts_per_pass(self, tokens: int, most: int) -> int:
        """Return how many prompts to prefill in one pass, from 1 to `most`."""
        count = max(1, min(self.prefill_tokens // tokens, most))
        # Powers of two keep the kernels few.
        return 1 << (count.bit_length() - 1) if self.rounds_row_counts else count

    def padded_length(self, tokens: int, *, start: int | None = None) -> int:
        """Return the padded prefill length per prompt if the longest has `tokens` after `start` or the prefix."""
        room = self.pool.layout.tokens - (self.prefix if start is None else start)
        return min(round_up(tokens), room) if self.rounds_row_counts else tokens

    @property
    def rounds_row_counts(self) -> bool:
        """Whether the current pass is filled up to one of few numbers of rows, so that oneDNN compiles few kernels."""
        return self.lm.few_kernels and self.pass_uses_fast_products == self.lm.has_fast_products

    @property
    def live(self) -> Sequence[Row]:
        """Active rows."""
        return self.rows

    def uncached_tokens(self, request: SlotRequest) -> int:
        """Return the number of prompt tokens to prefill, without the prefix and the row's cached tokens."""
        return self.kept.uncached_tokens(request, self.rows)

    def forget(self, row: int) -> None:
        """Release the slot that a finished row keeps."""
        self.kept.forget([row])

    @without_gradients
    def cancel(self, rows: Collection[int]) -> None:
        """Stop active rows and free their slots; rows that are not active are ignored."""
        stopped = {index for index, row in enumerate(self.rows) if row.request.row in rows}
        if stopped:
            self.free_slots(stopped)

    @without_gradients
    def admit(self, requests: Sequence[SlotRequest]) -> list[SlotAnswer]:
        """Prefill prompts in one pass and choose the first token of each; return rows that ended with it."""
        first = len(self.rows)
        by_row = {request.row: Row(request, self.settings.of(request)) for request in requests}
        self.pass_uses_fast_products = self.may_use_fast_products(by_row.values())
        requests, logits_NV = self.prefill(requests)
        new = [by_row[request.row] for request in requests]
        for row in new:
            row.settings.sampler.prepare(row)
        tokens_N = self.choose(logits_NV, new, first=first)
        self.rows += new
        self.tokens_N = torch.cat([self.tokens_N, tokens_N])
        return self.take(tokens_N, new)

    def prefill(self, requests: Sequence[SlotRequest]) -> tuple[Sequence[SlotRequest], torch.Tensor]:
        """Prefill prompts into the slots after the active rows; return requests by slot, and their logits [N, V]."""
        first = len(self.rows)
        # Kept caches are moved to these slots, and requests ordered by slot.
        self.kept.take_over(requests, self.rows)
        requests, uncached = self.kept.move_to_slots(requests, first=first)
        uncached = self.kept.copy_beginnings(requests, uncached, self.rows)
        if all(len(one.input_ids) - self.prefix == new for one, new in zip(requests, uncached, strict=True)):
            return self.prefill_new(requests, first=first)
        self.largest_pass = max(self.largest_pass, len(requests) * max(uncached))
        prompts = [list(request.input_ids) for request in requests]
        return requests, self.prefill_rest(prompts, max(uncached), first=first)

    def prefill_new(self, requests: Sequence[SlotRequest], *, first: int) -> tuple[Sequence[SlotRequest], torch.Tensor]:
        """Prefill prompts without cached tokens, each shared one once; return requests by slot, and logits [N, V]."""
        computed, forked = self.forks.split(requests, self.rows)
        logits = []
        if computed:
            own = [list(request.input_ids[self.prefix :]) for request in computed]
            self.largest_pass = max(self.largest_pass, len(own) * max(map(len, own)))
            logits.append(self.forward(own, first=first, start=self.prefix))
            self.forks.remember(computed, logits[0])
        if forked:
            sources = [*(row.request for row in self.rows), *computed]
            logits.append(self.forks.copy(self.pool, forked, sources, first=first + len(computed)))
        return [*computed, *forked], torch.cat(logits) if len(logits) > 1 else logits[0]

    @without_gradients
    def step(self) -> list[SlotAnswer]:
        """Decode one token for every active row; return rows that ended with it."""
        lengths = [row.length for row in self.rows]
        self.pass_uses_fast_products = self.may_use_fast_products(self.rows)
        logits_NV = self.extend(self.tokens_N[:, None], lengths=lengths)
        self.tokens_N = self.choose(logits_NV, self.rows, first=0)
        return self.take(self.tokens_N, self.rows)

    def may_use_fast_products(self, rows: Iterable[Row]) -> bool:
        """Return whether a pass of these rows may use faster products."""
        return self.uses_fast_products and not any(row.settings.exact for row in rows)

    def choose(self, logits_NV: torch.Tensor, rows: Sequence[Row], *, first: int) -> torch.Tensor:
        """Return the next token of each row [N], recomputed with torch's products at near ties."""
        find_near_ties = self.checks_near_ties and (
            self.pass_uses_fast_products or any(row.request.reuses_cache for row in rows)
        )
        tokens_N, near_ties = choose_tokens(logits_NV, rows, find_near_ties=find_near_ties)
        for index in near_ties:
            logits_1V = self.recompute(rows[index], slot=first + index)
            tokens_N[index] = rows[index].settings.sampler.choose(logits_1V, [rows[index]])[0][0]
        if (
            find_near_ties
            and self.recomputed_rows > FEW_ROWS
            and self.recomputed_tokens > MOST_RECOMPUTED * self.tokens_prefilled
        ):
            logger.debug("near ties are too frequent; from here on torch computes all products with plain weights")
            self.checks_near_ties = False
            if self.uses_fast_products:
                # Near ties are not checked any more, so nothing of the faster products may stay in the cache.
                for slot, row in enumerate([*self.rows[:first], *rows]):
                    self.recompute(row, slot=slot)
                self.kept.rows.clear()
            self.pass_uses_fast_products = self.uses_fast_products = False
        return tokens_N

    def recompute(self, row: Row, *, slot: int) -> torch.Tensor:
        """Recompute a row, including its new tokens, with torch's products; return its next logits [1, V].

        A pass is not larger than earlier passes, so that it fits in memory. For rows that reuse a cache its size is
        constant, so that the result does not depend on other rows.
        """
        ids = [*row.request.input_ids, *row.new]
        self.recomputed_rows += 1
        self.recomputed_tokens += len(ids) - self.prefix
        with self.torch_products():
            most = self.shortest_pass if row.request.reuses_cache else self.largest_pass
            for start in range(self.prefix, len(ids), most):
                logits_1V = self.forward([ids[start : start + most]], first=slot, start=start)
        return logits_1V

    @contextmanager
    def torch_products(self) -> Iterator[None]:
        """Disable faster products in this context."""
        before, self.pass_uses_fast_products = self.pass_uses_fast_products, False
        try:
            yield
        finally:
            self.pass_uses_fast_products = before

    def forward(self, prompts: Sequence[Sequence[int]], *, first: int, start: int) -> torch.Tensor:
        """Prefill prompts into slots from `first` on, after `start` cached tokens; return logits [N, V]."""
        length = self.padded_length(max(map(len, prompts)), start=start)
        positions_L = torch.arange(start, start + length, device=self.lm.device)
        self.pool.layout.read(first, len(prompts), start=start)
        end = start + length
        # Without a mask, attention is causal, and the kernel is faster.
        mask = self.mask(positions_L[None], width=end) if start or self.masks.are_needed_for(end) else None
        return self.read(prompts, positions_L.expand(len(prompts), -1), mask, width=end)

    def prefill_rest(self, prompts: Sequence[Sequence[int]], uncached: int, *, first: int) -> torch.Tensor:
        """Prefill at least the last `uncached` tokens of prompts whose earlier tokens are cached; return logits [N, V].

        All prompts end at the last position of the pass, so shorter ones recompute some cached tokens.
        """
        length = self.padded_length(uncached)
        starts = [max(self.prefix, len(prompt) - length) for prompt in prompts]
        positions_NL = torch.tensor(starts, device=self.lm.device)[:, None] + torch.arange(
            length, device=self.lm.device
        )
        width = max(starts) + length
        self.pool.layout.extend(first, positions_NL, width=width)
        last = [prompt[start:] for prompt, start in zip(prompts, starts, strict=True)]
        return self.read(last, positions_NL, self.mask(positions_NL, width=width), width=width)

    def read(
        self, parts: Sequence[Sequence[int]], positions_NL: torch.Tensor, mask: Mask | None, *, width: int
    ) -> torch.Tensor:
        """Prefill parts of prompts at these positions of their slots; return logits [N, V].

        Args:
            parts: Tokens of each row.
            positions_NL: Positions in the slot.
            mask: Attention mask, or None for a causal mask.
            width: Number of positions of each slot that are attended to.
        """
        length = positions_NL.shape[1]
        # Pad with the last token: a token for which the model computes NaN would reach the row through attention,
        # masked or not.
        padded = [[*part, *[part[-1]] * (length - len(part))] for part in parts]
        ids_NL = torch.tensor(padded, device=self.lm.device)
        ends_N = torch.tensor([len(part) - 1 for part in parts], device=self.lm.device)
        rows_N = torch.arange(len(parts), device=self.lm.device)
        if self.last_tokens is None:
            with self.lm.positions.only(rows_N * length + ends_N):
                logits = self.run(ids_NL, positions_NL, mask)
            return logits[0] if self.lm.positions.attached else logits[rows_N, ends_N]
        lasts_N1 = positions_NL[rows_N, ends_N][:, None]
        last_mask = self.masks.of_last_layer(self.mask(lasts_N1, width=width))
        with self.last_tokens.only(self.pool, ends_N, lasts_N1, last_mask):
            return self.run(ids_NL, positions_NL, mask)[:, -1]

    def extend(self, ids_N1: torch.Tensor, *, lengths: list[int]) -> torch.Tensor:
        """Decode the last token of each of the first N slots, given the new lengths; return logits [N, V]."""
        rows = len(lengths)
        idle = min(round_up(rows), self.pool.layout.slots) - rows if self.rounds_row_counts else 0
        if idle:
            # Idle slots decode a token right after the prefix, where the next prompt in the slot is written anyway.
            ids_N1 = torch.cat([ids_N1, ids_N1[:1].expand(idle, 1)])
            lengths = [*lengths, *[self.prefix + 1] * idle]
        positions_N1 = torch.tensor([[length - 1] for length in lengths], device=self.lm.device)
        if idle and self.kept.rows:
            # Not in slots of kept rows: these never use the last position, because the last token of a row is not
            # cached.
            positions_N1[rows:] = self.pool.layout.tokens - 1
        width = max(lengths)
        self.pool.layout.extend(0, positions_N1, width=width, chunks=chunks(lengths), lengths=lengths)
        if len(lengths) == 1:
            mask = self.masks.of_last_token(positions_N1, width=width, dtype=self.lm.base.dtype)
        else:
            mask = self.mask(positions_N1, width=width)
        return self.run(ids_N1, positions_N1, mask)[:rows, -1]

    @torch.no_grad()
    def run(self, ids_NL: torch.Tensor, positions_NL: torch.Tensor, mask: Mask | None) -> torch.Tensor:
        """Run a forward pass with the slots as KV cache; return logits."""
        self.tokens_prefilled += ids_NL.numel()
        try:
            with self.attention, using_fast_products(self.pass_uses_fast_products):
                logits: torch.Tensor = self.lm.base(
                    input_ids=ids_NL,
                    position_ids=positions_NL,
                    attention_mask=mask,
                    past_key_values=self.pool,
                    use_cache=True,
                ).logits
        finally:
            # Layout and layer refer to each other, which keeps the cache in memory until the garbage collector runs.
            self.pool.layout.layer = None
            self.pool.layout.gathered = {}
        return logits

    def mask(self, positions_NL: torch.Tensor, *, width: int) -> Mask:
        """Return the additive attention mask of a pass over these positions, attending to the first `width`."""
        return self.masks.of(positions_NL, width=width, dtype=self.lm.base.dtype)

    def take(self, tokens_N: torch.Tensor, rows: Sequence[Row]) -> list[SlotAnswer]:
        """Append a token to each row, and remove finished rows."""
        ended: dict[int, SlotAnswer] = {}
        for row, token in zip(rows, tokens_N.tolist(), strict=True):
            if token < 0:
                row.broken = True
                ended[id(row)] = SlotAnswer(row.request, None, error=row.reason)
                continue
            row.new.append(token)
            if row.settings.has_ended(row):
                ended[id(row)] = SlotAnswer(row.request, row.settings.answer(row))
        if ended:
            self.free_slots({index for index, row in enumerate(self.rows) if id(row) in ended})
        return list(ended.values())

    def free_slots(self, indices: set[int]) -> None:
        """Free the slots of rows and move the last rows into them; rows that keep their cache swap with those."""
        # Rows in slots from `left` on move into the slots that were freed before `left`.
        left = len(self.rows) - len(indices)
        movers = [index for index in range(left, len(self.rows)) if index not in indices]
        moves = list(zip(movers, sorted(index for index in indices if index < left), strict=True))
        staying = {index for index in indices if self.rows[index].request.keep and not self.rows[index].broken}
        for index in indices:
            if self.rows[index].broken:
                # NaN would reach the next row in this slot: a mask does not remove it.
                self.pool.clear(index, start=self.prefix)
        order, slots = list(range(left)), {index: index for index in staying}
        for source, target in moves:
            order[target] = source
            end = max(self.rows[source].length, self.rows[target].length)
            if target in staying:
                # The kept cache goes to the slot that the mover leaves.
                self.pool.swap(source, target, start=self.prefix, end=end)
                slots[target] = source
            else:
                self.pool.move([(source, target)], start=self.prefix, end=end)
        for index, slot in slots.items():
            self.kept.keep(self.rows[index], slot=slot)
        self.rows = [self.rows[index] for index in order]
        self.tokens_N = self.tokens_N[torch.tensor(order, dtype=torch.long, device=self.lm.device)]
