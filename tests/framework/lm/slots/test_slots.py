"""Tests of slots (continuous batching): answers equal those of transformers for each row alone."""

import copy
import gc
import json
import typing
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from partita.lm.base import GenerationOptions, SlotAnswer, SlotRequest
from partita.lm.decoding.sampler import Sampler
from partita.lm.losses.last_layer import last_layer
from partita.lm.model_config.attention_windows import AttentionSpan, SlotMasks, spans_of
from partita.lm.products.fast_linear import round_up
from partita.lm.slots import attention as slot_attention
from partita.lm.slots import decode_products
from partita.lm.slots.attention import CHUNK_POSITIONS, SlotAttention, chunks
from partita.lm.slots.decode_products import DecodePass, DecodeProducts
from partita.lm.slots.kv_cache import CacheLayout, SlotKVCache
from partita.lm.slots.slots import Slots, SlotSupport
from partita_schema.errors import OutOfMemory
from partita_schema.sections.model import Architecture
from partita_trainers.checkpoints.file_sums import FILE as SUMS

from ....properties import ends, examples
from ..foreign_models import CONTEXT, EXPERTS, FOREIGN, LOCAL, SHAPE, WINDOW, WINDOWED

GREEDY = GenerationOptions({"do_sample": False, "num_beams": 1})
SIZES = ((1, 5), (63, 1), (2, 1), (17, 4), (1, 63), (9, 8), (40, 3), (5, 2), (30, 2))
"""Prompt tokens and maximum new tokens: prompts from 1 token to the context less one, and answers that fill it."""
PREFIX = (11, 12, 13, 14, 15, 16, 17, 18, 19)
AFTER_PREFIX = ((1, 5), (54, 1), (2, 1), (17, 4), (9, 8), (38, 17), (5, 2), (20, 2))
"""The same for rows after PREFIX."""
ADAPTER = {"type": "lora", "r": 4, "init": "gaussian"}
EIGHT_BITS = {"bits": 8, "llm_int8_threshold": 0}
"""bitsandbytes searches outliers in all rows of a pass; with outliers, rows always depend on the rest of the batch."""


def ids(answers: dict[int, SlotAnswer]) -> dict[int, tuple[int, ...]]:
    """Return the tokens of each row's answer; check that none is an error."""
    assert all(answer.error is None for answer in answers.values())
    return {row: answer.generated.ids for row, answer in answers.items() if answer.generated is not None}


def by_the_library(small: Any, lm: Any, requests: list[SlotRequest]) -> dict[int, tuple[int, ...]]:
    return {request.row: small.greedy_alone(lm, request) for request in requests}


def assert_equal_to_rows_alone(
    small: Any,
    lm: Any,
    *,
    pools: tuple[int, ...],
    pools_after_prefix: tuple[int, ...] = (),
    rows: tuple[tuple[int, int], ...] = SIZES,
) -> None:
    """Check answers with and without a shared prefix, in pools of each size, with rows in either order."""
    for prefix, sizes, counts in (((), rows, pools), (PREFIX, AFTER_PREFIX, pools_after_prefix or pools)):
        requests = small.slot_requests(*sizes, prefix=prefix)
        wanted = by_the_library(small, lm, requests)
        for slots in counts:
            requests.reverse()
            assert ids(small.answer_in_slots(lm, requests, slots=slots, prefix=prefix)) == wanted, (slots, prefix)


def saved(small: Any, folder: Path, **changes: Any) -> str:
    """Save a model with changes in its configuration; return its folder."""
    architecture = changes.pop("architecture", "llama")
    lm = small.load(small.config(architecture=architecture))
    small.sharpen(lm.module)
    lm.save(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    (folder / SUMS).unlink(missing_ok=True)
    return str(folder)


@pytest.fixture(scope="module")
def sharp_folder(small: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a saved llama whose greedy answers vary."""
    return saved(small, tmp_path_factory.mktemp("sharp"))


@pytest.fixture(scope="module")
def llama(small: Any, sharp_folder: str) -> Any:
    lm = small.load(small.config(base_model=sharp_folder, trainer={"type": "none"}), trainable=False)
    assert lm.slot_support == SlotSupport(True, True)
    return lm


@pytest.fixture(scope="module")
def gpt2(small: Any) -> Any:
    lm = small.load(small.config(architecture="gpt2"))
    small.sharpen(lm.module)
    assert lm.slot_support == SlotSupport(False, True)
    return lm


@pytest.fixture(params=[False, True], ids=["batched", "gathered"])
def gathered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use one kind of products for attention of new tokens, no matter which is faster on this machine."""
    monkeypatch.setattr(decode_products, "gathering_is_faster", lambda group, size: request.param)


# Equality


@pytest.mark.parametrize("architecture", ends(typing.get_args(Architecture)))
def test_greedy_answers_equal_those_of_transformers_row_by_row(small, architecture: str) -> None:
    lm = small.load(small.config(architecture=architecture))
    small.sharpen(lm.module)
    assert lm.why_no_slots(GREEDY, tokens=CONTEXT) is None
    assert lm.slot_support == SlotSupport(architecture != "gpt2", slot_attention.attends(lm.base)), (
        "every last layer but that of gpt2 is narrowed"
    )
    if architecture == "llama":
        assert_equal_to_rows_alone(small, lm, pools=(1, 2, 7, 64))
    else:
        assert_equal_to_rows_alone(small, lm, pools=(1, 7), pools_after_prefix=(2, 64))


MAY_BE_REFUSED = ("bloom", "falcon", "bart")


@pytest.mark.parametrize("kind", ends(FOREIGN))
def test_other_architectures_give_the_same_answers_or_are_refused(small, foreign, kind: str) -> None:
    lm = foreign(kind, FOREIGN[kind])
    reason = lm.why_no_slots(GREEDY, tokens=CONTEXT)
    if reason is not None:
        assert kind in MAY_BE_REFUSED
        assert reason.startswith(type(lm.base).__name__)
        return
    assert_equal_to_rows_alone(small, lm, pools=(3, 64), rows=SIZES[:4])


@pytest.mark.usefixtures("gathered")
@pytest.mark.parametrize("kind", ends(WINDOWED))
def test_rows_longer_than_a_window_give_the_answers_of_transformers(small, foreign, kind: str) -> None:
    lm = foreign(kind, WINDOWED[kind])
    assert any(span.is_exceeded_by(WINDOW + 1) for span in spans_of(lm.base.config).values())
    assert lm.why_no_slots(GREEDY, tokens=CONTEXT) is None
    assert_equal_to_rows_alone(small, lm, pools=(3, 64))


@pytest.mark.usefixtures("gathered")
def test_layers_with_a_window_attend_to_no_more_than_it(small, foreign, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = foreign("mistral", WINDOWED["mistral"])
    requests = small.slot_requests(*[(20, 12)] * 4)
    lm.why_no_slots(GREEDY, tokens=CONTEXT)
    widths, multiply = [], slot_attention.decode_products

    def record(given: DecodePass) -> DecodeProducts:
        widths.extend(own.stop - own.start for _, own in given.spans)
        return multiply(given)

    monkeypatch.setattr(slot_attention, "decode_products", record)
    found = small.answer_in_slots(lm, requests, slots=4)
    assert ids(found) == by_the_library(small, lm, requests)
    assert widths[0] >= 20, "the last tokens of the prompts"
    assert set(widths[-20:]) == {WINDOW}


def test_slots_are_not_used_beyond_a_window_that_the_model_ignores(
    small, foreign, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlotMasks, "are_needed_for", lambda masks, tokens: False)
    monkeypatch.setattr(AttentionSpan, "visible", lambda span, queries, keys: None)
    lm = foreign("mistral", SHAPE | {"sliding_window": 16})
    assert lm.why_no_slots(GREEDY, tokens=16) is None
    assert lm.why_no_slots(GREEDY, tokens=17) == "a sliding window of 16 tokens, and rows of up to 17"


@pytest.mark.parametrize(
    ("kind", "shape", "reason"),
    [
        ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, "linear_attention"),
        ("rwkv", {"hidden_size": 32, "num_hidden_layers": 2, "context_length": CONTEXT}, "RwkvForCausalLM"),
        (
            "lfm2",
            SHAPE | {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
            "conv",
        ),
    ],
)
def test_recurrent_models_are_refused(foreign, kind: str, shape: dict[str, Any], reason: str) -> None:
    assert foreign(kind, shape).why_no_slots(GREEDY, tokens=8) == f"layers other than attention ({reason})"


@pytest.mark.parametrize(
    "sections",
    ends(
        [
            {"adapter": ADAPTER},
            {"adapter": ADAPTER | {"use_dora": True}},
            {"adapter": {"type": "ia3"}},
            {"quantization": EIGHT_BITS, "adapter": ADAPTER},
            {"quantization": EIGHT_BITS, "trainer": {"type": "none"}},
            {"model_parameters": {"attention": "eager"}},
        ]
    ),
    ids=["lora", "dora", "ia3", "8-bit-lora", "8-bit", "eager"],
)
def test_adapters_quantized_weights_and_other_attention_give_the_same_answers(
    small, sharp_folder: str, sections: dict[str, Any]
) -> None:
    adapted = "adapter" in sections
    lm = small.load(small.config(base_model=sharp_folder, **sections), trainable=adapted)
    requests = small.slot_requests(*AFTER_PREFIX, prefix=PREFIX)
    if adapted:
        before = by_the_library(small, lm, requests)
        small.take_steps(lm, steps=3, learning_rate=3.0)
        assert by_the_library(small, lm, requests) != before
    assert_equal_to_rows_alone(small, lm, pools=(3,), rows=SIZES[:4])
    assert lm.slot_support == SlotSupport(True, "model_parameters" not in sections)


def test_bfloat16_is_answered_in_slots_with_finite_logits(small, sharp_folder: str) -> None:
    sections = {"model_parameters": {"dtype": "bfloat16"}, "trainer": {"type": "none"}}
    lm = small.load(small.config(base_model=sharp_folder, **sections), trainable=False)
    requests = small.slot_requests(*AFTER_PREFIX, prefix=PREFIX)
    options = GenerationOptions({"do_sample": False}, logprobs=True)
    found = small.answer_in_slots(lm, requests, slots=7, prefix=PREFIX, options=options)
    assert len(ids(found)) == len(requests)
    assert all(-1e3 < answer.generated.logprob <= 0 for answer in found.values() if answer.generated)
    assert all(held.dtype == torch.bfloat16 for held in open_with(lm, requests[:2], slots=2).pool.held)


@pytest.mark.parametrize("prefix", [(), PREFIX], ids=["no prefix", "prefix"])
@pytest.mark.parametrize("window", [None, 4])
def test_attention_of_single_tokens_in_bfloat16_is_nearly_as_exact_as_that_of_the_library(
    small, sharp_folder: str, window: int | None, prefix: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    rows, heads, group, size = 12, 2, 3, 24
    lengths = [len(prefix) + 2 + 3 * row % 17 for row in range(rows)]
    halves = [(0, 5, max(lengths[:5])), (5, rows, max(lengths[5:]))]
    layout = CacheLayout(slots=rows, tokens=max(lengths))
    layout.prefix = len(prefix)
    layout.extend(0, torch.tensor(lengths)[:, None] - 1, width=max(lengths), chunks=halves, lengths=lengths)
    keys, values = torch.randn(2, rows, heads, max(lengths), size)
    keys[:, :, : len(prefix)], values[:, :, : len(prefix)] = keys[:1, :, : len(prefix)], values[:1, :, : len(prefix)]
    query = torch.randn(rows, heads * group, 1, size)
    positions, ends = torch.arange(max(lengths))[None], torch.tensor(lengths)[:, None]
    seen = (positions < ends) & (positions >= ends - window if window else positions >= 0)
    mask = torch.zeros(rows, 1, 1, max(lengths)).masked_fill_(~seen[:, None, None], -torch.inf)
    exact = scaled_dot_product_attention(query.double(), keys.double(), values.double(), mask.double(), enable_gqa=True)

    tensors = [one.bfloat16() for one in (query, keys, values, mask)]
    library = scaled_dot_product_attention(*tensors, enable_gqa=True).transpose(1, 2)
    base = small.load(small.config(base_model=sharp_folder), trainable=False).base
    with SlotAttention(base, layout):
        found, _ = slot_attention.slot_attention(torch.nn.Module(), *tensors, sliding_window=window)
    assert found.dtype == torch.bfloat16
    errors = [(one.double() - exact.transpose(1, 2)).square().mean().sqrt() for one in (found, library)]
    assert errors[0] < 1.5 * errors[1]


def open_with(lm: Any, requests: list[SlotRequest], *, slots: int, prefix: tuple[int, ...] = ()) -> Any:
    """Open slots and admit these rows."""
    opened = lm.open_slots(GREEDY, slots=slots, tokens=CONTEXT, prefix=prefix, seed=0)
    opened.admit(requests)
    return opened


@examples(25)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 24), st.integers(1, 7)), min_size=1, max_size=8),
    prefix=st.sampled_from([0, 0, 1, 8, 25]),
    slots=st.integers(1, 10),
    plan=st.lists(st.integers(0, 4), max_size=8),
    narrowed=st.booleans(),
    seed=st.integers(0, 3),
)
def test_any_lengths_limits_slots_and_order_give_the_same_answers(
    small, llama, gpt2, sizes: Any, prefix: int, slots: int, plan: Any, narrowed: bool, seed: int
) -> None:
    lm, front = llama if narrowed else gpt2, range(40, 40 + prefix)
    requests = small.slot_requests(*sizes, prefix=front, seed=seed)
    wanted = by_the_library(small, lm, requests)
    assert ids(small.answer_in_slots(lm, requests, slots=slots, prefix=front, plan=plan)) == wanted


@pytest.mark.parametrize("slots", [1, 3, 16])
def test_equal_rows_have_equal_answers(small, llama, slots: int) -> None:
    (one,) = small.slot_requests((12, 15))
    requests = [SlotRequest(one.input_ids, 15, row) for row in range(16)]
    found = ids(small.answer_in_slots(llama, requests, slots=slots, prefix=one.input_ids[:11]))
    assert set(found.values()) == {small.greedy_alone(llama, one)}
    assert len(found) == 16


@pytest.mark.usefixtures("gathered")
@pytest.mark.parametrize("prefix", [(), PREFIX])
def test_many_rows_of_different_lengths_are_split_into_chunks_with_the_same_answers(small, llama, prefix: Any) -> None:
    sizes = [(40 if row < 3 else 1 + row % 5, 2 + row % 5) for row in range(40)]
    longest = [len(prefix) + length for length in (40, 5)]
    assert chunks([len(prefix) + length for length, _ in sizes]) == [(0, 8, longest[0]), (8, 40, longest[1])]
    requests = small.slot_requests(*sizes, prefix=prefix)
    wanted = by_the_library(small, llama, requests)
    assert ids(small.answer_in_slots(llama, requests, slots=40, prefix=prefix, plan=(40, 0))) == wanted


def test_chunks_take_the_least_time() -> None:
    assert chunks([30, 31, 32]) == [(0, 3, 32)]
    assert chunks([100] * 64) == [(0, 64, 100)]  # no row is attended to further than it is long
    falling = [500 - 7 * row for row in range(64)]
    split = chunks(falling)
    assert [start for start, _, _ in split] == [0, *(end for _, end, _ in split[:-1])]
    assert all(width == max(falling[start:end]) for start, end, width in split)
    time = sum((end - start) * width + CHUNK_POSITIONS for start, end, width in split)
    others = [8, 16, 32, 64]
    assert time <= min(
        sum(size * falling[start] for start in range(0, 64, size)) + CHUNK_POSITIONS * 64 // size for size in others
    )


def test_a_model_with_one_layer_gives_the_same_answers(small) -> None:
    scratch = {"type": "scratch", "size": "nano", "tokenizer": "byte", "context_length": 64, "num_hidden_layers": 1}
    lm = small.load(small.config(base_model=scratch))
    small.sharpen(lm.module)
    assert_equal_to_rows_alone(small, lm, pools=(3,))


# Where a row ends


@pytest.fixture(scope="module")
def writer(small: Any) -> Any:
    """Return a model that writes letters."""
    lm = small.load(small.config(architecture="gpt_neox"))
    small.sharpen(lm.module)
    assert lm.slot_support == SlotSupport(True, True)
    letters = set(lm.tokenizer.encode("abcdefghijklmnop"))
    unwanted = [token for token in range(len(lm.tokenizer)) if token not in letters]
    return lm, {"do_sample": False, "suppress_tokens": unwanted}


def test_stop_texts_and_stop_tokens_end_rows_as_in_single_rows(small, writer) -> None:
    lm, arguments = writer
    requests = small.slot_requests(*((1 + row * 3, 24) for row in range(8)))
    plain = [lm.generate([request], GenerationOptions(arguments), seed=0)[0] for request in requests]
    stops = (plain[0].text[3:5], plain[1].text[5:8], "never")
    for options in (
        GenerationOptions(arguments, stop=stops),
        GenerationOptions(arguments, stop_token_ids=(plain[0].ids[2], plain[3].ids[6])),
        GenerationOptions(arguments, stop=stops[1:], stop_token_ids=(plain[0].ids[2],)),
    ):
        wanted = {request.row: lm.generate([request], options, seed=0)[0] for request in requests}
        assert len({len(answer.ids) for answer in wanted.values()}) > 2
        assert "stop" in {answer.finish_reason for answer in wanted.values()}
        found = small.answer_in_slots(lm, requests, slots=3, options=options)
        assert {row: answer.generated for row, answer in found.items()} == wanted


def test_the_text_of_a_special_token_ends_rows_as_its_token_does(
    small, writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, arguments = writer
    monkeypatch.setattr(lm, "tokenizer", copy.deepcopy(lm.tokenizer))
    requests = small.slot_requests(*((1 + row * 3, 24) for row in range(8)))
    plain = [lm.generate([request], GenerationOptions(arguments), seed=0)[0] for request in requests]
    token = plain[0].ids[3]
    special = lm.tokenizer.convert_ids_to_tokens(token)
    lm.tokenizer.add_tokens(transformers.AddedToken(special, special=True))
    assert lm.tokenizer.convert_tokens_to_ids(special) == token
    by_token, by_text = (
        small.answer_in_slots(lm, requests, slots=3, options=options)
        for options in (
            GenerationOptions(arguments, stop_token_ids=(token,)),
            GenerationOptions(arguments, stop=(special,)),
        )
    )
    assert by_text[requests[0].row].generated.finish_reason == "stop"
    assert {row: one.generated for row, one in by_text.items()} == {row: one.generated for row, one in by_token.items()}


def test_a_row_takes_no_step_beyond_its_stop_text(small, writer) -> None:
    lm, arguments = writer
    requests = small.slot_requests(*((1 + row * 3, 24) for row in range(4)))
    plain = lm.generate(requests[:1], GenerationOptions(arguments), seed=0)[0]
    options = GenerationOptions(arguments, stop=(plain.text[3:8],))
    passes: list[int] = []
    hook = lm.base.register_forward_hook(lambda *given: passes.append(1))
    found = small.answer_in_slots(lm, requests, slots=1, options=options)
    hook.remove()
    assert found[0].generated.text == plain.text[: plain.text.find(plain.text[3:8])]
    assert len(found[0].generated.ids) < 24
    assert len(passes) == sum(len(answer.generated.ids) for answer in found.values())


def test_an_immediate_end_token_frees_the_slot(small, llama) -> None:
    requests = small.slot_requests((5, 9), (7, 9), (9, 9))
    first = [small.greedy_alone(llama, request)[0] for request in requests]
    options = GenerationOptions({"do_sample": False}, stop_token_ids=tuple(first))
    opened = llama.open_slots(options, slots=3, tokens=CONTEXT, prefix=(), seed=0)
    ended = opened.admit(requests)
    opened.close()
    assert [(answer.request.row, answer.generated.ids, answer.generated.finish_reason) for answer in ended] == [
        (row, (), "stop") for row in range(3)
    ]
    assert not opened.live


# What is computed


def test_the_last_layer_computes_only_last_tokens_with_the_same_logits(small, llama) -> None:
    passed: list[int] = []
    layer, number = typing.cast(Any, last_layer(llama.base))
    hook = layer.mlp.register_forward_hook(lambda module, inputs, output: passed.append(output.shape[:-1].numel()))
    requests = small.slot_requests(*AFTER_PREFIX, prefix=PREFIX)
    prompts = [list(request.input_ids[len(PREFIX) :]) for request in requests]
    logits = []
    for narrows in (True, False):
        slots = Slots(
            llama, GREEDY, slots=12, tokens=CONTEXT, prefix=PREFIX, seed=0, support=SlotSupport(narrows, True)
        )
        logits.append(slots.forward(prompts, first=1, start=len(PREFIX)))
        keys = torch.stack([layer.keys[1 : 1 + len(AFTER_PREFIX)] for layer in slots.pool.layers])
        logits.append(
            torch.stack([keys[:, row, :, : len(PREFIX) + n].sum() for row, (n, _) in enumerate(AFTER_PREFIX)])
        )
        slots.close()
    hook.remove()
    assert number == 2
    longest = max(length for length, _ in AFTER_PREFIX)
    read = min(round_up(longest), CONTEXT - len(PREFIX)) if llama.has_fast_products and llama.few_kernels else longest
    assert passed == [1, len(AFTER_PREFIX), len(PREFIX), len(AFTER_PREFIX) * read]
    torch.testing.assert_close(logits[0], logits[2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits[1], logits[3], rtol=1e-5, atol=1e-4)


def test_the_output_layer_computes_only_last_tokens_if_the_last_layer_is_not_narrowed(small, gpt2) -> None:
    passed: list[int] = []
    hook = gpt2.base.lm_head.register_forward_hook(lambda *given: passed.append(given[2].shape[:-1].numel()))
    opened = open_with(gpt2, small.slot_requests((9, 4), (20, 4), (1, 4)), slots=3)
    opened.step()
    hook.remove()
    assert passed == [3, 3]


def test_the_shared_prefix_is_prefilled_once(small, llama) -> None:
    read: list[int] = []
    hook = llama.base.get_input_embeddings().register_forward_hook(lambda *given: read.append(given[1][0].numel()))
    requests = small.slot_requests((3, 2), (5, 2), (2, 2), prefix=PREFIX)
    small.answer_in_slots(llama, requests, slots=3, prefix=PREFIX, plan=(3, 0))
    hook.remove()
    assert read == [len(PREFIX), 3 * 5, 3]


def test_the_shared_prefix_is_stored_only_in_the_first_slot(small, llama) -> None:
    requests = small.slot_requests((3, 4), (5, 4), (2, 4), (4, 4), prefix=PREFIX)
    opened = open_with(llama, requests, slots=4, prefix=PREFIX)
    opened.step()
    for held in opened.pool.held:
        assert held[0, :, : len(PREFIX)].abs().sum() > 0
        assert not held[1:, :, : len(PREFIX)].any(), "memory pages without writes take no memory"
    opened.close()


@pytest.mark.parametrize("copied", [1, 20, 50])
def test_answers_do_not_depend_on_how_many_prompts_are_prefilled_after_the_prefix_at_once(
    small, llama, copied: int
) -> None:
    requests = small.slot_requests((3, 4), (5, 4), (2, 4), (4, 4), (1, 3), prefix=PREFIX)
    opened = llama.open_slots(GREEDY, slots=5, tokens=CONTEXT, prefix=PREFIX, seed=0)
    opened.pool.layout.copied_tokens = copied
    ended = opened.admit(requests)
    while opened.live:
        ended += opened.step()
    opened.close()
    assert ids({answer.request.row: answer for answer in ended}) == by_the_library(small, llama, requests)


def test_the_shared_prefix_is_copied_into_all_slots_if_attention_needs_it(small, llama) -> None:
    requests = small.slot_requests((3, 4), (5, 4), (2, 4), (4, 4), prefix=PREFIX)
    wanted = by_the_library(small, llama, requests)
    before, llama.slot_support = llama.slot_support, SlotSupport(True, False)
    try:
        opened = open_with(llama, requests, slots=4, prefix=PREFIX)
        assert all(torch.equal(held[3, :, : len(PREFIX)], held[0, :, : len(PREFIX)]) for held in opened.pool.held)
        opened.close()
        assert ids(small.answer_in_slots(llama, requests, slots=4, prefix=PREFIX)) == wanted
    finally:
        llama.slot_support = before


@pytest.mark.parametrize("lean", [True, False])
def test_a_pool_that_is_no_longer_used_takes_no_memory(
    small, llama, lean: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = small.slot_requests((3, 4), (5, 4), prefix=PREFIX)
    monkeypatch.setattr(llama, "slot_support", llama.slot_support._replace(shares_prefix=lean))
    gc.collect()
    gc.disable()
    try:
        opened = open_with(llama, requests, slots=2, prefix=PREFIX)
        opened.step()
        pools = [weakref.ref(held) for held in opened.pool.held]
        opened.close()
        del opened
        assert [pool() for pool in pools] == [None] * len(pools), "memory is freed without garbage collection"
    finally:
        gc.enable()


def test_the_pool_is_not_reallocated(small, llama) -> None:
    opened = open_with(llama, small.slot_requests(*AFTER_PREFIX, prefix=PREFIX), slots=len(AFTER_PREFIX), prefix=PREFIX)
    places = [held.data_ptr() for held in opened.pool.held]
    while opened.live:
        opened.step()
        assert [held.data_ptr() for held in opened.pool.held] == places
    opened.close()
    assert all(held.shape[0] == len(AFTER_PREFIX) and held.shape[2] == CONTEXT for held in opened.pool.held)


def test_nan_values_after_the_shared_prefix_are_cleared() -> None:
    pool = SlotKVCache(slots=3, tokens=8)
    pool.layout.read(0, 3, start=0)
    pool.update(torch.full((3, 2, 8, 4), torch.nan), torch.full((3, 2, 8, 4), torch.nan), 0)
    pool.clear(1, start=2)
    for held in pool.held:
        assert held.isnan().all(dim=-1).all(dim=1).tolist() == [[True] * 8, [True] * 2 + [False] * 6, [True] * 8]


# Traces on the model


def traces(lm: Any) -> dict[str, Any]:
    """Return the parts of a model that could be left changed."""
    hooks = [
        (name, len(module._forward_pre_hooks), len(module._forward_hooks), "forward" in vars(module))
        for name, module in lm.module.named_modules()
    ]
    return {
        "hooks": hooks,
        "attention": lm.base.config._attn_implementation,
        "training": [module.training for module in lm.module.modules()],
        "positions": lm.positions.indices_K,
        "random": torch.get_rng_state().tolist(),
        "gradients": torch.is_grad_enabled(),
    }


@pytest.fixture(params=["llama", "gpt2"])
def clean(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return a model in training mode; check that the test leaves it unchanged."""
    lm = request.getfixturevalue(request.param)
    lm.slot_support  # noqa: B018 - found out once
    lm.module.train()
    before = traces(lm)
    yield lm
    assert traces(lm) == before
    lm.module.eval()


def test_nothing_is_left_on_the_model(small, clean) -> None:
    small.answer_in_slots(clean, small.slot_requests(*AFTER_PREFIX, prefix=PREFIX), slots=4, prefix=PREFIX)


def test_the_check_of_slots_leaves_nothing_on_the_model(clean) -> None:
    del clean.slot_support
    assert clean.why_no_slots(GREEDY, tokens=8) is None


def test_nothing_is_left_if_the_shared_prefix_cannot_be_prefilled(clean) -> None:
    with pytest.raises(IndexError):
        clean.open_slots(GREEDY, slots=2, tokens=16, prefix=[10**6], seed=0)


def test_nothing_is_left_if_the_shared_prefix_cannot_be_copied(clean, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(pool: SlotKVCache, tokens: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(SlotKVCache, "broadcast_prefix", full)
    monkeypatch.setattr(clean, "slot_support", clean.slot_support._replace(shares_prefix=False))
    with pytest.raises(torch.OutOfMemoryError):
        clean.open_slots(GREEDY, slots=2, tokens=16, prefix=[5, 6], seed=0)


@pytest.mark.parametrize("where", ["embedding", "last layer", "output", "choice"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_pass_leaves_nothing_and_live_rows_continue(small, clean, where: str, error: type) -> None:
    module = {
        "embedding": clean.base.get_input_embeddings(),
        "last layer": typing.cast(Any, last_layer(clean.base) or [clean.base.get_output_embeddings()])[0],
        "output": clean.base.get_output_embeddings(),
    }.get(where)
    requests = small.slot_requests((3, 9), (8, 9), (5, 9), (4, 9), prefix=PREFIX)
    wanted = by_the_library(small, clean, requests)

    def fail(*given: Any, **more: Any) -> None:
        raise error("no")

    with clean.evaluating():
        opened = open_with(clean, requests[:2], slots=4, prefix=PREFIX)
        found: list[SlotAnswer] = []
        for call in (partial(opened.admit, requests[2:]), opened.step):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(*((Sampler, "choose") if module is None else (module, "forward")), fail)
                with pytest.raises(error):
                    call()
            assert clean.base.config._attn_implementation == "sdpa"
            assert clean.positions.indices_K is None
        found += opened.step()
        found += opened.admit(requests[2:])
        while opened.live:
            found += opened.step()
        opened.close()
    assert ids({answer.request.row: answer for answer in found}) == wanted


def test_a_prompt_that_cannot_be_prefilled_does_not_affect_others(small, llama) -> None:
    requests = small.slot_requests((3, 9), (8, 9), (5, 9))
    wanted = by_the_library(small, llama, requests)
    opened = open_with(llama, requests[:1], slots=4)
    with pytest.raises(IndexError):
        opened.admit([requests[1], SlotRequest([5, 10**6], 9, 9)])
    assert [row.request.row for row in opened.live] == [0]
    found = opened.admit(requests[1:])
    while opened.live:
        found += opened.step()
    opened.close()
    assert ids({answer.request.row: answer for answer in found}) == wanted


def test_the_model_can_be_used_for_other_work_while_rows_are_in_slots(small, llama) -> None:
    requests = small.slot_requests((3, 9), (8, 9), (5, 9))
    wanted = by_the_library(small, llama, requests)
    opened = open_with(llama, requests, slots=4)
    other = open_with(llama, requests[::-1], slots=4)
    found: list[SlotAnswer] = []
    while opened.live:
        found += opened.step()
        other.step()
        assert by_the_library(small, llama, requests) == wanted
    opened.close()
    other.close()
    assert ids({answer.request.row: answer for answer in found}) == wanted


# Refused models and options


@pytest.mark.parametrize(
    ("kind", "shape", "limit"),
    [
        ("gpt_neo", LOCAL | {"hidden_size": 32, "window_size": 16, "max_position_embeddings": CONTEXT}, 16),
        (
            "llama4_text",
            SHAPE | EXPERTS | {"head_dim": 8, "intermediate_size_mlp": 48, "floor_scale": 16, "no_rope_layers": [0, 1]},
            16,
        ),
    ],
)
def test_rows_beyond_other_attention_windows_are_refused(
    small, foreign, kind: str, shape: dict[str, Any], limit: int
) -> None:
    lm = foreign(kind, shape)
    reason = lm.why_no_slots(GREEDY, tokens=limit + 1)
    assert reason is not None
    assert f"of {limit} tokens, and rows of up to {limit + 1}" in reason
    requests = small.slot_requests((1, limit - 1), (limit - 1, 1), (8, 8), (3, 9))
    wanted = by_the_library(small, lm, requests)
    assert ids(small.answer_in_slots(lm, requests, slots=3)) == wanted


@pytest.mark.parametrize(
    ("config", "windowed"),
    [
        (transformers.LlamaConfig(), False),
        (transformers.MistralConfig(sliding_window=40), False),
        (transformers.MistralConfig(sliding_window=8), True),
        (transformers.Gemma3TextConfig(sliding_window=8), True),
    ],
)
def test_the_mask_of_a_row_alone_equals_that_of_any_rows(config: Any, windowed: bool) -> None:
    masks = SlotMasks(config, tokens=40)
    for length in (1, 7, 40):
        position = torch.tensor([[length - 1]])
        wanted = masks.of(position, width=length, dtype=torch.float32)
        found = masks.of_last_token(position, width=length, dtype=torch.float32)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert (masks.nothing_hidden is None) == windowed


def test_answers_of_a_model_that_is_not_trained_are_computed_without_autograd(
    small, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[bool]()
    lm = small.load(small.config())
    assert lm.slot_support.reason is None  # the check computes, too
    run = Slots.run
    monkeypatch.setattr(Slots, "run", lambda *args: seen.append(torch.is_inference_mode_enabled()) or run(*args))
    for trainable in (False, True):
        lm.trainable = trainable
        small.answer_in_slots(lm, small.slot_requests((3, 4), (5, 3)), slots=2)
        assert set(seen) == {not trainable}
        seen.clear()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (GenerationOptions({}, slots=False), "generation.slots is false"),
        (GenerationOptions({"num_beams": 2}), "beam search"),
        (GenerationOptions({"guidance_scale": 1.5}), "guidance_scale"),
        (GenerationOptions({"guidance_scale": 1.0, "num_beams": 1}), None),
    ],
)
def test_options_that_slots_do_not_support_are_reported(llama, options: GenerationOptions, reason: str | None) -> None:
    assert llama.why_no_slots(options, tokens=8) == reason


@pytest.mark.parametrize("kind", ["prompt_tuning", "prefix_tuning"])
def test_virtual_tokens_are_reported(small, kind: str) -> None:
    lm = small.load(small.config(adapter={"type": kind, "num_virtual_tokens": 3}))
    assert lm.why_no_slots(GREEDY, tokens=8) == f"the virtual tokens of {kind}"


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_positions_that_depend_on_the_longest_row_are_reported(small, llama, kind: str, monkeypatch) -> None:
    monkeypatch.setattr(llama.base.config, "rope_parameters", {"rope_type": kind, "factor": 2.0})
    assert llama.why_no_slots(GREEDY, tokens=8) == "rotary positions that depend on the longest row"


def test_other_attention_is_reported(llama, monkeypatch) -> None:
    monkeypatch.setattr(llama.base.config, "_attn_implementation", "flash_attention_2")
    assert llama.why_no_slots(GREEDY, tokens=8) == "attention: flash_attention_2"


def test_a_model_that_ignores_masks_or_positions_is_detected(small) -> None:
    lm = small.load(small.config())
    passed = lm.base.model.forward
    lm.base.model.forward = lambda *args, attention_mask=None, **kwargs: passed(*args, **kwargs)
    reason = lm.why_no_slots(GREEDY, tokens=8)
    assert reason is not None
    assert reason.startswith("LlamaForCausalLM ")
    lm = small.load(small.config())
    ignoring = lm.base.model.forward
    lm.base.model.forward = lambda *args, position_ids=None, **kwargs: ignoring(*args, **kwargs)
    assert str(lm.why_no_slots(GREEDY, tokens=8)).startswith("LlamaForCausalLM changes its logits by ")


def test_slots_are_checked_again_after_out_of_memory(small) -> None:
    lm = small.load(small.config())
    full = [True]

    def refuse(*given: Any) -> None:
        if full[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    lm.base.register_forward_pre_hook(refuse)
    with pytest.raises(OutOfMemory, match="3 rows of 11 tokens do not fit in memory next to the model; free some, or"):
        lm.why_no_slots(GREEDY, tokens=20)
    full[0] = False
    assert lm.why_no_slots(GREEDY, tokens=20) is None
