"""Tests of rows that continue in their slots: answers equal those of rows prefilled completely."""

import random
import typing
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partita.lm.base import GenerationOptions, SlotRequest
from partita.lm.decoding.row import Row
from partita.lm.products.product import Implementation
from partita.lm.slots.kv_cache import SlotKVCache, SlotLayer
from partita.lm.slots.prefix_cache import PrefixCache
from partita.lm.slots.slots import Slots, SlotSupport
from partita_schema.sections.model import Architecture

from ....properties import ends, examples

GREEDY = GenerationOptions({"do_sample": False})
SAMPLED = GenerationOptions({"do_sample": True, "temperature": 1.0})
CONTEXT = 64
PREFIX = tuple(range(11, 20))
ROWS, TURNS = 7, 3


class Talk:
    """Rows with several turns, each continuing after its answer; the next user text depends only on row and turn.

    Every third answer returns with another last token, as if its text had been changed after generation.
    """

    def __init__(self, opened: Slots, *, seed: int = 0, keep: bool = True, prefix: tuple[int, ...] = ()) -> None:
        self.opened, self.seed, self.keep, self.prefix = opened, seed, keep, prefix
        self.answers: dict[tuple[int, int], tuple[int, ...]] = {}
        self.prompts: dict[tuple[int, int], SlotRequest] = {}
        self.turns = [0] * ROWS
        self.ready = [self.next_request(row, list(prefix)) for row in range(ROWS)]

    def next_request(self, row: int, ids: list[int]) -> SlotRequest:
        turn = self.turns[row]
        rng = random.Random(f"{self.seed}/{row}/{turn}")
        more = [rng.randrange(2, 250) for _ in range(rng.randint(1, 7))]
        key = f"{row}/{turn}".encode()
        self.prompts[row, turn] = SlotRequest([*ids, *more], rng.randint(1, 5), row, key=key, keep=self.keep)
        return self.prompts[row, turn]

    def run(self) -> "Talk":
        """Run all turns, with prefills and decode steps in random order."""
        rng = random.Random(self.seed)
        with self.opened.lm.evaluating():
            while self.ready or self.opened.live:
                free = self.opened.pool.layout.slots - len(self.opened.live)
                count = min(rng.choice((0, 1, 2, 5)), free, len(self.ready))
                if not count and not self.opened.live:
                    count = 1
                if not count:
                    self.take(self.opened.step())
                    continue
                rng.shuffle(self.ready)
                group, self.ready = self.ready[:count], self.ready[count:]
                self.take(self.opened.admit(group))
        self.opened.close()
        return self

    def take(self, ended: list[Any]) -> None:
        for answer in ended:
            row = answer.request.row
            said = list(answer.generated.ids)
            self.answers[row, self.turns[row]] = answer.generated.ids
            if (row + self.turns[row]) % 3 == 0 and said:
                said[-1] = 7
            self.turns[row] += 1
            if self.turns[row] == TURNS:
                self.opened.forget(row)
            else:
                self.ready.append(self.next_request(row, [*answer.request.input_ids, *said]))


def open_slots(
    lm: Any,
    slots: int,
    *,
    prefix: tuple[int, ...] = (),
    options: GenerationOptions = GREEDY,
    support: SlotSupport | None = None,
) -> Slots:
    support = lm.slot_support if support is None else support
    return Slots(lm, options, slots=slots, tokens=CONTEXT, prefix=prefix, seed=3, support=support)


def assert_equal_to_rows_alone(small: Any, lm: Any, talk: Talk) -> None:
    assert len(talk.answers) == ROWS * TURNS
    for key, request in talk.prompts.items():
        assert talk.answers[key] == small.greedy_alone(lm, request), key


@contextmanager
def reads(lm: Any) -> Iterator[list[torch.Size]]:
    """Record the input shapes of all forward passes."""
    shapes: list[torch.Size] = []
    hook = lm.base.get_input_embeddings().register_forward_hook(lambda *given: shapes.append(given[1][0].shape))
    try:
        yield shapes
    finally:
        hook.remove()


@pytest.fixture(scope="module")
def llama(small: Any) -> Any:
    lm = small.load(small.config())
    small.sharpen(lm.module)
    return lm


@pytest.mark.parametrize("architecture", ends(typing.get_args(Architecture)))
def test_rows_that_continue_get_the_answers_of_transformers_for_the_whole_prompt(small: Any, architecture: str) -> None:
    lm = small.load(small.config(architecture=architecture))
    small.sharpen(lm.module)
    for slots, prefix in ((ROWS, ()), (9, PREFIX)):
        assert_equal_to_rows_alone(small, lm, Talk(open_slots(lm, slots, prefix=prefix), prefix=prefix).run())


@pytest.mark.parametrize("slots", ends([1, 2, 4, 64]))
@pytest.mark.parametrize("prefix", ends([(), PREFIX]))
@pytest.mark.parametrize("lean", ends([True, False]))
def test_answers_do_not_depend_on_the_number_of_slots(
    small: Any, llama: Any, slots: int, prefix: tuple[int, ...], lean: bool
) -> None:
    for seed in range(2):
        opened = open_slots(llama, slots, prefix=prefix, support=SlotSupport(llama.slot_support.narrows_prefill, lean))
        assert_equal_to_rows_alone(small, llama, Talk(opened, seed=seed, prefix=prefix).run())


@pytest.mark.parametrize("slots", [1, 5, 40])
def test_sampled_answers_do_not_depend_on_kept_rows(llama: Any, slots: int) -> None:
    whole = Talk(open_slots(llama, ROWS, options=SAMPLED), keep=False).run()
    kept = Talk(open_slots(llama, slots, options=SAMPLED)).run()
    assert kept.answers == whole.answers


@pytest.mark.parametrize("products", [Implementation.ONEDNN, Implementation.BY_COLUMN])
@pytest.mark.parametrize("slots", [5, 9, 17])
def test_faster_products_and_padding_slots_change_nothing(
    small: Any, tmp_path: Any, slots: int, products: Implementation
) -> None:
    lm = small.load_sharp(tmp_path, products=products)
    assert lm.has_fast_products
    for prefix in ((), PREFIX):
        assert_equal_to_rows_alone(small, lm, Talk(open_slots(lm, slots, prefix=prefix), prefix=prefix).run())


def test_a_kept_row_with_near_ties_is_recomputed_with_the_same_answer(small: Any) -> None:
    lm = small.load(small.config())
    small.sharpen(lm.module)
    said = Talk(open_slots(lm, ROWS), seed=5).run().answers
    token = Counter(token for answer in said.values() for token in answer).most_common(1)[0][0]
    weight = lm.base.get_output_embeddings().weight
    with torch.no_grad():
        noise = torch.randn(weight[token].shape, generator=torch.Generator().manual_seed(0))
        weight[token + 1] = weight[token] + 3e-7 * weight[token].abs().mean() * noise
    found, again = [], []
    for slots in (1, 5, 9, 40):
        opened = open_slots(lm, slots)
        found.append(Talk(opened, seed=5).run().answers)
        assert opened.checks_near_ties, "not so often that faster products are disabled"
        again.append(opened.recomputed_rows)
    assert found == [found[0]] * 4
    assert min(again) > 0


def test_slots_that_pad_a_step_do_not_change_kept_rows(small: Any, llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("has_fast_products", "few_kernels"):
        monkeypatch.setattr(llama, name, True)
    opened = open_slots(llama, 18)
    assert opened.uses_fast_products
    short = [SlotRequest(one.input_ids, 1, one.row, key=one.key, keep=True) for one in small.slot_requests((40, 1))]
    assert len(opened.admit(short)) == 1
    kept = opened.kept.rows[0]
    opened.admit([SlotRequest(one.input_ids, 9, 1 + one.row) for one in small.slot_requests(*[(5, 9)] * 17)])
    before = [held[kept.slot, :, : len(kept.ids)].clone() for held in opened.pool.held]
    with reads(llama) as shapes:
        opened.step()
    assert shapes == [(18, 1)]
    assert kept.slot == 17
    for held, old in zip(opened.pool.held, before, strict=True):
        assert torch.equal(held[17, :, : len(kept.ids)], old)
    opened.close()


def test_only_new_tokens_are_prefilled(llama: Any) -> None:
    opened = open_slots(llama, 3)
    first = [SlotRequest([5, 6, 7, 8, 9, *range(20, 20 + row)], 1, row, keep=True) for row in range(3)]
    answers = {answer.request.row: answer.generated for answer in opened.admit(first)}
    later = [SlotRequest([*one.input_ids, *answers[one.row].ids, 30, 31], 2, one.row, keep=True) for one in first]
    new = max(len(request.input_ids) - len(one.input_ids) for request, one in zip(later, first, strict=True))
    with reads(llama) as shapes:
        opened.admit(later)
    assert shapes == [(3, new)]
    changed = SlotRequest([5, 6, 7, 1, 1, 1], 2, 9, keep=True)
    assert opened.uncached_tokens(changed) == 6
    opened.close()


@pytest.mark.parametrize(
    ("prompt", "uncached"),
    [
        ([5, 6, 7, 8, 9, 30], 1),
        ([5, 6, 7, 8, 9], 1),
        ([5, 6, 7, 8], 1),
        ([5, 6, 1, 8, 9, 30], 4),
        ([1, 6, 7, 8, 9], 5),
    ],
)
def test_tokens_that_a_prompt_shares_with_its_slot_are_not_prefilled(
    small: Any, llama: Any, prompt: list[int], uncached: int
) -> None:
    opened = open_slots(llama, 2)
    opened.admit([SlotRequest([5, 6, 7, 8, 9], 1, 0, keep=True)])
    request = SlotRequest(prompt, 4, 0)
    assert opened.uncached_tokens(request) == uncached
    assert opened.uncached_tokens(SlotRequest(prompt, 4, 1)) == len(prompt), "another row"
    ended = opened.admit([request])
    while not ended:
        ended = opened.step()
    assert ended[0].generated.ids == small.greedy_alone(llama, request)
    assert not opened.kept.rows, "it was not kept"
    opened.close()


def test_a_forgotten_row_is_prefilled_completely(llama: Any) -> None:
    opened = open_slots(llama, 2)
    opened.admit([SlotRequest([5, 6, 7], 1, 0, keep=True)])
    opened.forget(0)
    opened.forget(1)
    assert opened.uncached_tokens(SlotRequest([5, 6, 7, 8], 1, 0)) == 4
    opened.close()


def test_a_row_with_nan_logits_is_not_kept(small: Any) -> None:
    lm = small.load(small.config())
    opened = open_slots(lm, 2)

    def poison(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output.masked_fill((args[0] == 200)[..., None], torch.nan)

    lm.base.get_input_embeddings().register_forward_hook(poison)
    ended = opened.admit([SlotRequest([5, 200], 4, 0, keep=True), SlotRequest([5, 6], 1, 1, keep=True)])
    assert {answer.request.row: answer.error is None for answer in ended} == {0: False, 1: True}
    assert list(opened.kept.rows) == [1]
    assert all(held.isfinite().all() for held in opened.pool.held)
    opened.close()


def test_rows_are_prefilled_completely_after_a_failed_pass(small: Any, llama: Any) -> None:
    opened = open_slots(llama, 3)
    first = [SlotRequest([5, 6, 7 + row], 1, row, keep=True) for row in range(2)]
    opened.admit(first)
    later = [SlotRequest([5, 6, 7 + row, 8, 9], 3, row, keep=True) for row in range(2)]

    def refuse(*given: Any) -> None:
        raise ValueError("no")

    hook = llama.base.register_forward_pre_hook(refuse)
    with pytest.raises(ValueError, match="no"):
        opened.admit(later)
    hook.remove()
    assert [opened.uncached_tokens(request) for request in later] == [5, 5]
    answers = {answer.request.row: answer.generated.ids for answer in opened.admit(later)}
    while opened.live:
        answers |= {answer.request.row: answer.generated.ids for answer in opened.step()}
    assert answers == {request.row: small.greedy_alone(llama, request) for request in later}
    opened.close()


def marked_pool(slots: int) -> SlotKVCache:
    """A pool of one layer."""
    pool = SlotKVCache(slots=slots, tokens=4)
    pool.layers.append(SlotLayer(pool.layout))
    pool.layers[0].lazy_initialization(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))
    return pool


@examples(200)
@given(st.data())
def test_rows_return_to_their_slots_and_other_rows_stay_where_possible(data: st.DataObject) -> None:
    draw: Callable[..., Any] = data.draw
    slots = draw(st.integers(1, 9))
    live = draw(st.integers(0, slots - 1))
    places = draw(st.permutations(range(live, slots)))
    staying = places[: draw(st.integers(0, len(places)))]
    pool = marked_pool(slots)
    kept = PrefixCache(pool)
    for name, slot in enumerate(staying):
        kept.keep(Row(SlotRequest([name] * 3, 1, name), new=[9]), slot=slot)
        for held in pool.held:
            held[slot] = name + 1
    names = draw(st.permutations(range(12)))[: draw(st.integers(1, slots - live))]
    requests = [SlotRequest([name] * 3 + [9], 1, name) for name in names]

    found, uncached = kept.move_to_slots(requests, first=live)

    assert sorted(one.row for one in found) == sorted(names)
    for slot, (request, new) in enumerate(zip(found, uncached, strict=True), start=live):
        stayed = request.row < len(staying)
        assert new == (1 if stayed else 4)
        for held in pool.held:
            assert not stayed or (held[slot, :, :3] == request.row + 1).all()
    others = set(range(len(staying))) - set(names)
    room = slots - live - len(names)
    assert len(kept.rows) == min(len(others), room)
    assert set(kept.rows) <= others
    for name, row in kept.rows.items():
        assert row.slot >= live + len(names)
        assert all((held[row.slot, :, :3] == name + 1).all() for held in pool.held)
    assert len({row.slot for row in kept.rows.values()}) == len(kept.rows)
