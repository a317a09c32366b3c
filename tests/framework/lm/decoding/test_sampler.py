"""Tests of the sampler: rows in slots choose tokens by the rules of transformers, each independent of the others."""

import math
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig

from partita.lm.base import Generated, GenerationOptions, SlotAnswer, SlotRequest
from partita.lm.decoding.generation_defaults import PLAIN, SAMPLING
from partita.lm.decoding.row import NOT_NUMBERS, Row
from partita.lm.decoding.sampler import HISTORY, Sampler, greedy_on_cpu, random_numbers

from ....properties import ends, examples

CPU = torch.device("cpu")
SIZES = ((1, 14), (9, 14), (4, 6), (17, 3), (30, 14), (2, 1))


@pytest.fixture(scope="module")
def lm(small: Any) -> Any:
    """Return a model that repeats its prompt, so that repetition penalties have an effect."""
    lm = small.load(small.config())
    with torch.no_grad():
        for parameter in lm.module.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2)
    lm.module.requires_grad_(False)
    return lm


def generated(answers: dict[int, SlotAnswer]) -> dict[int, Generated]:
    """Return the answers; check that none is an error."""
    assert all(answer.error is None for answer in answers.values())
    return {row: answer.generated for row, answer in answers.items() if answer.generated is not None}


def requests_of(small: Any) -> list[SlotRequest]:
    """Return rows of different lengths; some repeat tokens."""
    requests = small.slot_requests(*SIZES)
    repeated = SlotRequest([*[7, 8, 9] * 4, 7], 14, len(requests))
    return [*requests, repeated]


def plain_tokens(small: Any, lm: Any) -> list[int]:
    """Return the tokens of plain greedy answers, most common first."""
    requests = requests_of(small)
    answers = [lm.generate([request], GenerationOptions({"do_sample": False}), seed=0)[0] for request in requests]
    return [token for token, _ in Counter(token for answer in answers for token in answer.ids).most_common()]


def by_library(lm: Any, request: SlotRequest, arguments: dict[str, Any], *, ends: Sequence[int]) -> list[int]:
    """Return the new tokens of transformers' `generate` for one row alone, without its end token."""
    prompt = torch.tensor([list(request.input_ids)])
    most = request.max_new_tokens
    settings = GenerationConfig(**arguments, max_new_tokens=most, eos_token_id=list(ends), pad_token_id=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # if the minimum exceeds the maximum
        found = lm.base.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings)
    found = found[0, prompt.shape[1] :].tolist()
    return found[: next((place for place, token in enumerate(found) if token in ends), None)]


def arguments_of(name: str, tokens: list[int], answer: tuple[int, ...]) -> dict[str, Any]:
    """Return greedy options that have an effect when plain answers consist of these tokens."""
    early = tuple(answer[:2])
    return {
        "repetition_penalty": {"repetition_penalty": 1.4},
        "repetition_reward": {"repetition_penalty": 0.7},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
        "no_repeated_token": {"no_repeat_ngram_size": 1},
        "bad_words_ids": {"bad_words_ids": [[tokens[0]], list(early), [tokens[1], tokens[2]], [250]]},
        "min_new_tokens": {"min_new_tokens": 5},
        "exponential_decay_length_penalty": {"exponential_decay_length_penalty": [2, 1.3]},
        "suppress_tokens": {"suppress_tokens": tokens[:3]},
        "begin_suppress_tokens": {"begin_suppress_tokens": [answer[0], *tokens[:2]]},
        "renormalize_logits": {"renormalize_logits": True, "repetition_penalty": 1.4},
        "min_length": {"min_length": 14},
        "forced_bos_token_id": {"forced_bos_token_id": 70},
        "forced_eos_token_id": {"forced_eos_token_id": [tokens[0]]},
        "sequence_bias": {"sequence_bias": [[[tokens[0]], -2.0], [list(early), 3.0]]},
        "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
        "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
        "remove_invalid_values": {"remove_invalid_values": True},
        "all": {
            "repetition_penalty": 1.2,
            "no_repeat_ngram_size": 3,
            "bad_words_ids": [[tokens[0]], list(early)],
            "min_new_tokens": 4,
            "exponential_decay_length_penalty": [5, 1.2],
            "suppress_tokens": tokens[1:3],
            "begin_suppress_tokens": tokens[:5],
            "min_length": 8,
            "forced_bos_token_id": 65,
            "sequence_bias": [[[tokens[5]], 1.5]],
            "encoder_repetition_penalty": 1.1,
            "renormalize_logits": True,
        },
    }[name]


NAMES = [*HISTORY, "min_new_tokens", "repetition_reward", "no_repeated_token", "renormalize_logits", "all"]


@pytest.mark.parametrize(
    ("name", "beams"),
    ends([*((name, 1) for name in NAMES), ("no_repeat_ngram_size", 2), ("forced_eos_token_id", 2), ("all", 2)]),
)
def test_options_that_depend_on_tokens_change_greedy_answers_as_in_transformers(
    small, lm, name: str, beams: int
) -> None:
    requests = requests_of(small)
    tokens = plain_tokens(small, lm)
    first = lm.generate(requests[:1], GenerationOptions({"do_sample": False}), seed=0)[0].ids
    # Some of the most common tokens end an answer, so that rules on its length have an effect.
    ends = (tokens[3], tokens[6])
    arguments = {"do_sample": False, "num_beams": beams} | arguments_of(name, tokens, first)
    options = GenerationOptions(arguments, stop_token_ids=ends)
    wanted = [by_library(lm, request, arguments, ends=(lm.tokenizer.eos_token_id, *ends)) for request in requests]
    if name != "remove_invalid_values":  # there are no invalid values
        plain = {"do_sample": False, "num_beams": beams}
        assert wanted != [by_library(lm, request, plain, ends=(1, *ends)) for request in requests]
    assert [list(answer.ids) for answer in lm.generate(requests, options, seed=0)] == wanted, "in a padded batch"
    if beams > 1:
        return
    for slots, plan in ((7, (7, 0)), (3, (1, 0, 2))):
        found = small.answer_in_slots(lm, requests, slots=slots, options=options, plan=plan)
        assert [list(generated(found)[request.row].ids) for request in requests] == wanted


# Scores

FILTERS: list[dict[str, Any]] = [
    {"min_new_tokens": 2},
    {"min_new_tokens": 5},
    {"min_new_tokens": 6, "temperature": 0.9},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 3},
    {"top_k": 10_000},
    {"top_p": 0.5},
    {"top_p": 1.0},
    {"min_p": 0.1},
    {"typical_p": 0.4},
    {"epsilon_cutoff": 0.01},
    {"eta_cutoff": 0.02},
    {"top_h": 0.4},
    {"renormalize_logits": True, "top_k": 5},
    {"temperature": 0.7, "top_h": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.001, "typical_p": 0.95},
    {"temperature": 1.3, "epsilon_cutoff": 0.0001, "eta_cutoff": 0.0001, "renormalize_logits": True, "top_p": 0.9},
    {"repetition_penalty": 1.5, "temperature": 0.5, "top_p": 0.8},
    {"no_repeat_ngram_size": 2, "bad_words_ids": [[5], [6, 7]], "top_k": 9, "renormalize_logits": True},
    {"min_new_tokens": 8, "exponential_decay_length_penalty": [1, 1.4], "typical_p": 0.9},
    {"suppress_tokens": [1, 2, 3], "begin_suppress_tokens": [9, 10], "min_p": 0.05},
]


@pytest.mark.parametrize("arguments", FILTERS, ids=lambda arguments: "-".join(arguments))
@pytest.mark.parametrize("said", [0, 1, 5])
def test_scores_equal_those_of_transformers(lm, arguments: dict[str, Any], said: int) -> None:
    options = GenerationOptions({"do_sample": True, "top_k": 0} | arguments)
    ends = (1, 77)
    draw, chance = random.Random(0), torch.Generator().manual_seed(1)
    rows = [
        Row(SlotRequest([draw.choice((5, 6, 7, 8)) for _ in range(length)], 12, length), new=[5, 6, 9, 5, 6][:said])
        for length in (1, 4, 19)
    ]
    chooser = Sampler(options, ends=ends, seed=0, device=CPU)
    scores_NV = torch.randn(3, lm.vocabulary_size, generator=chance) * 3
    seen: list[torch.Tensor] = []
    chooser.sample = lambda scores, rows: (seen.append(chooser.warpers(None, scores)), sampled(scores, rows))[1]  # type: ignore
    sampled = Sampler.sample.__get__(chooser)
    for row in rows:
        chooser.prepare(row)
    chooser.choose(scores_NV.clone(), rows)
    for place, row in enumerate(rows):
        ids = torch.tensor([[*row.request.input_ids, *row.new]])
        generation = GenerationConfig(**options.arguments, max_new_tokens=12, eos_token_id=list(ends))
        lm.base._prepare_special_tokens(generation, kwargs_has_attention_mask=True, device=CPU)
        library = lm.base._get_logits_processor(
            generation, input_ids_seq_length=len(row.request.input_ids), device="cpu"
        )
        wanted = library(ids, scores_NV[place : place + 1].clone())
        torch.testing.assert_close(seen[0][place : place + 1], wanted, rtol=1e-5, atol=1e-5)


def test_every_option_that_changes_scores_is_compared(lm) -> None:
    compared = {name for arguments in FILTERS for name in arguments}
    elsewhere = {"length_penalty", "early_stopping", "guidance_scale"}
    assert {*PLAIN, *SAMPLING, "bad_words_ids"} <= compared | elsewhere
    assert lm.why_no_slots(GenerationOptions({"guidance_scale": 2.0}), tokens=8) == "guidance_scale"
    assert lm.why_no_slots(GenerationOptions({"num_beams": 2, "length_penalty": 0.5}), tokens=8) == "beam search"


# Sampling

SAMPLED = GenerationOptions({"do_sample": True, "top_k": 0}, logprobs=True)


def sample(small: Any, lm: Any, requests: list[SlotRequest], *, slots: int, **given: Any) -> dict[int, tuple[int, ...]]:
    found = small.answer_in_slots(lm, requests, slots=slots, options=given.pop("options", SAMPLED), **given)
    return {row: answer.ids for row, answer in generated(found).items()}


def test_sampled_answers_depend_only_on_seed_and_row_key(small, lm) -> None:
    requests = small.slot_requests(*((1 + 5 * row % 23, 3 + row % 8) for row in range(14)))
    base = sample(small, lm, requests, slots=14)
    assert len(set(base.values())) == len(base)
    for slots, plan in ((1, (1, 0)), (3, (2, 0, 1, 0)), (64, (14, 0))):
        assert sample(small, lm, requests, slots=slots, plan=plan) == base
        requests.reverse()
    some = requests[::3]
    assert sample(small, lm, some, slots=2) == {request.row: base[request.row] for request in some}
    torch.manual_seed(5)
    assert sample(small, lm, requests, slots=4) == base
    assert sample(small, lm, requests, slots=4, seed=1) != base
    moved = [SlotRequest(r.input_ids, r.max_new_tokens, 100 + r.row, key=r.key) for r in requests]
    assert sample(small, lm, moved, slots=4) == {100 + row: ids for row, ids in base.items()}


def test_equal_prompts_with_other_keys_get_other_samples(small, lm) -> None:
    (one,) = small.slot_requests((6, 12))
    requests = [SlotRequest(one.input_ids, 12, row, key=bytes([row])) for row in range(8)]
    assert len(set(sample(small, lm, requests, slots=8).values())) == 8


def test_a_longer_limit_only_extends_the_answer(small, lm) -> None:
    short, long = small.slot_requests((6, 5)), small.slot_requests((6, 15))
    assert sample(small, lm, long, slots=1)[0][:5] == sample(small, lm, short, slots=1)[0]
    assert random_numbers(3, b"key", count=50)[:7] == random_numbers(3, b"key", count=7)


def test_random_numbers_are_uniform_and_independent_between_keys_seeds_and_positions() -> None:
    numbers = np.array([random_numbers(11, str(key).encode(), count=4) for key in range(4000)])
    assert ((numbers >= 0) & (numbers < 1)).all()
    others = np.array([random_numbers(12, str(key).encode(), count=4) for key in range(4000)])
    columns = np.concatenate([numbers, others, np.roll(numbers[:, :1], 1, axis=0)], axis=1)
    correlations = np.corrcoef(columns.T) - np.eye(9)
    assert abs(correlations).max() < 4.5 / math.sqrt(4000)
    for column in columns.T:
        counts = np.histogram(column, bins=16, range=(0, 1))[0]
        assert chi_square(counts, np.full(16, 1 / 16)) < 44  # 1 in 10,000 at 15 degrees of freedom


def chi_square(counts: Any, expected: Any) -> float:
    """Return Pearson's statistic of counts against probabilities."""
    wanted = np.asarray(expected) * np.sum(counts)
    assert wanted.min() > 5
    return float(((counts - wanted) ** 2 / wanted).sum())


@pytest.mark.parametrize("arguments", [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.7}, {"min_new_tokens": 3}])
def test_tokens_are_sampled_with_their_probability(arguments: dict[str, Any]) -> None:
    count, ends = 6000, (2, 5)
    options = GenerationOptions({"do_sample": True, "top_k": 0} | arguments)
    chooser = Sampler(options, ends=ends, seed=3, device=CPU)
    scores_V = torch.tensor([0.3, -0.5, 1.1, -torch.inf, 0.0, 0.7, -1.0, 1.4])
    rows = [Row(SlotRequest([1], 4, row, key=row.to_bytes(4, "little"))) for row in range(count)]
    for row in rows:
        chooser.prepare(row)
    drawn: list[torch.Tensor] = []
    for _ in range(2):
        drawn.append(chooser.choose(scores_V.repeat(count, 1), rows)[0])
        for row, token in zip(rows, drawn[-1].tolist(), strict=True):
            row.new.append(token)
    wanted = scores_V / arguments.get("temperature", 1.0)
    if "min_new_tokens" in arguments:
        wanted[list(ends)] = -torch.inf
    if "top_k" in arguments:
        wanted[wanted < wanted.sort().values[-5]] = -torch.inf
    if "top_p" in arguments:
        order = wanted.softmax(-1).sort(descending=True)
        wanted[order.indices[order.values.cumsum(-1) - order.values >= 0.7]] = -torch.inf
    chances = wanted.softmax(-1).numpy()
    possible = chances > 0
    for tokens in drawn:
        counts = torch.bincount(tokens, minlength=8).numpy()
        assert counts[~possible].sum() == 0
        assert chi_square(counts[possible], chances[possible]) < 30  # 1 in 10,000 at 7 degrees of freedom
    pairs = torch.bincount(drawn[0] * 8 + drawn[1], minlength=64).numpy().reshape(8, 8)[possible][:, possible]
    both = np.outer(chances[possible], chances[possible])
    assert chi_square(pairs.ravel()[both.ravel() > 0.002], both.ravel()[both.ravel() > 0.002]) < 110


@examples(80)
@given(
    scores=st.lists(st.sampled_from([-math.inf, -math.inf, -80.0, -30.0, 0.0, 1.0, 90.0]), min_size=2, max_size=40),
    chance=st.sampled_from([0.0, 1e-45, 1e-8, 0.25, 0.5, 0.99, 0.9999999, float(np.nextafter(np.float32(1), 0))]),
)
def test_a_token_without_probability_is_never_chosen(scores: list[float], chance: float) -> None:
    if all(math.isinf(score) for score in scores):
        scores[-1] = 0.0
    chooser = Sampler(GenerationOptions({"do_sample": True, "top_k": 0}), ends=(), seed=0, device=CPU)
    row = Row(SlotRequest([1], 1, 0), uniforms=[chance])
    token = int(chooser.choose(torch.tensor([scores]), [row])[0])
    assert torch.tensor(scores).softmax(-1)[token] > 0


@pytest.mark.parametrize("temperature", [5e-324, 1e-46, 1e-38, 9e-6])
def test_a_temperature_near_0_is_greedy(temperature: float, small: Any, lm: Any) -> None:
    requests = small.slot_requests(*SIZES)
    for beams in (2, 1):
        arguments = {"do_sample": True, "top_k": 0, "top_p": 0.9, "num_beams": beams}
        near = GenerationOptions(arguments | {"temperature": temperature})
        greedy = GenerationOptions({"do_sample": False, "num_beams": beams})
        assert not near.do_sample
        wanted = lm.generate(requests[:1], greedy, seed=0)
        assert [one.ids for one in lm.generate(requests[:1], near, seed=0)] == [one.ids for one in wanted]
    slots = [sample(small, lm, requests, slots=3, options=options) for options in (near, greedy)]
    assert slots[0] == slots[1]


def test_the_lowest_temperature_of_sampling_does_not_overflow() -> None:
    options = GenerationOptions({"do_sample": True, "top_k": 0, "temperature": 1e-5})
    chooser, row = Sampler(options, ends=(), seed=0, device=CPU), Row(SlotRequest([1], 1, 0), uniforms=[0.5])
    assert options.do_sample
    assert chooser.choose(torch.tensor([[-3e4, 3e4, 2.9e4, -torch.inf]]), [row])[0].tolist() == [1]


def test_many_small_probabilities_cover_a_large_vocabulary() -> None:
    chooser = Sampler(GenerationOptions({"do_sample": True, "top_k": 0}), ends=(), seed=0, device=CPU)
    scores_V = torch.zeros(150_001)
    scores_V[-1] = -torch.inf
    for chance, low, high in (
        (0.0, 0, 0),
        (0.5, 74_900, 75_100),
        (float(np.nextafter(np.float32(1), 0)), 149_900, 149_999),
    ):
        token = int(chooser.choose(scores_V[None].clone(), [Row(SlotRequest([1], 1, 0), uniforms=[chance])])[0])
        assert low <= token <= high


# NaN scores


@contextmanager
def not_numbers(lm: Any, is_poison: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Make the model return NaN for some tokens."""

    def spoil(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output.masked_fill(is_poison(inputs[0])[..., None], torch.nan)

    hook = lm.base.get_input_embeddings().register_forward_hook(spoil)
    try:
        yield
    finally:
        hook.remove()


@pytest.mark.parametrize(
    "arguments",
    ends(
        [
            {"do_sample": False},
            {"do_sample": False, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
            {"do_sample": False, "min_new_tokens": 3},
            {"do_sample": True, "top_k": 0},
            {"do_sample": True, "top_k": 7, "temperature": 0.7, "top_p": 0.9},
            {
                "do_sample": True,
                "top_k": 0,
                "typical_p": 0.9,
                "min_p": 0.01,
                "epsilon_cutoff": 0.001,
                "eta_cutoff": 0.001,
            },
            {"do_sample": True, "top_k": 0, "top_h": 0.5},
            {"do_sample": True, "top_k": 0, "bad_words_ids": [[5]], "suppress_tokens": [9], "renormalize_logits": True},
        ]
    ),
    ids=lambda arguments: "-".join(arguments),
)
@pytest.mark.parametrize("prefix", ends([0, 4]))
def test_nan_scores_are_an_error_of_their_row_only(small, lm, arguments: dict[str, Any], prefix: int) -> None:
    options = GenerationOptions(arguments, logprobs=True)
    front = range(40, 40 + prefix)
    requests = small.slot_requests(*((1 + 7 * row % 25, 1 + row % 6) for row in range(16)), prefix=front)
    healthy = small.answer_in_slots(lm, requests, slots=3, options=options, prefix=front)
    used = {token for row, answer in generated(healthy).items() for token in (*requests[row].input_ids, *answer.ids)}
    poison = next(token for token in range(2, 250) if token not in used)
    bad = {2, 3, 7, 15}
    mixed = [
        SlotRequest([*request.input_ids, poison], request.max_new_tokens, request.row, key=request.key)
        if request.row in bad
        else request
        for request in requests
    ]
    for slots, plan in ((1, (1, 0)), (3, (2, 0, 1, 0)), (16, (16, 0))):
        with not_numbers(lm, lambda ids: ids == poison):
            found = small.answer_in_slots(lm, mixed, slots=slots, options=options, prefix=front, plan=plan)
        assert {row for row, answer in found.items() if answer.error is not None} == bad
        assert {found[row].error for row in bad} == {NOT_NUMBERS}
        for row in set(found) - bad:
            got, wanted = found[row].generated, healthy[row].generated
            assert (got.ids, got.finish_reason) == (wanted.ids, wanted.finish_reason)
            assert got.logprob == pytest.approx(wanted.logprob, abs=1e-3)


def test_a_row_whose_scores_become_nan_leaves_a_clean_slot(small, lm) -> None:
    requests = small.slot_requests((9, 6), (8, 6), (7, 6), (20, 8))
    plain = {request.row: lm.generate([request], GenerationOptions({}), seed=0)[0].ids for request in requests}
    poison = plain[1][2]
    spoiled = {row for row, ids in plain.items() if poison in ids[:-1] or poison in requests[row].input_ids}
    assert 1 in spoiled
    assert 3 not in spoiled, "the next row in the slot"
    with not_numbers(lm, lambda ids: ids == poison):
        found = small.answer_in_slots(lm, requests, slots=3, plan=(3, 0, 0, 0, 0, 1))
    assert {row for row, answer in found.items() if answer.error == NOT_NUMBERS} == spoiled
    assert all(found[row].generated.ids == ids for row, ids in plain.items() if row not in spoiled)


def test_padding_of_prefilled_prompts_affects_no_row(small, lm) -> None:
    requests = small.slot_requests((9, 5), (3, 5), (1, 5), (20, 5))
    plain = {request.row: lm.generate([request], GenerationOptions({}), seed=0)[0].ids for request in requests}
    used = {token for request in requests for token in (*request.input_ids, *plain[request.row])}
    with not_numbers(lm, lambda ids: ~torch.isin(ids, torch.tensor(sorted(used)))):
        found = small.answer_in_slots(lm, requests, slots=4, plan=(4, 0))
    assert {row: answer.ids for row, answer in generated(found).items()} == plain


# Log probabilities


@pytest.mark.parametrize(
    "arguments",
    [
        {"do_sample": False},
        {"do_sample": True, "top_k": 4, "temperature": 0.6},
        {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "suppress_tokens": [7]},
        {"do_sample": False, "min_new_tokens": 4},
    ],
    ids=lambda arguments: "-".join(arguments),
)
def test_log_probabilities_equal_those_of_a_plain_forward_pass(small, lm, arguments: dict[str, Any]) -> None:
    requests = requests_of(small)
    free = generated(small.answer_in_slots(lm, requests, slots=3, options=GenerationOptions(arguments)))
    for end in sorted({token for answer in free.values() for token in answer.ids}):
        options = GenerationOptions(arguments, stop_token_ids=(end,), logprobs=True)
        found = generated(small.answer_in_slots(lm, requests, slots=3, options=options))
        if {answer.finish_reason for answer in found.values()} == {"stop", "length"}:
            break
    else:
        pytest.fail("no token ends some answers")
    in_batches = lm.generate(requests, options, seed=0)
    assert [answer.logprob for answer in in_batches] == pytest.approx(
        [found[request.row].logprob for request in requests], abs=1e-3
    )
    for request in requests:
        answer = found[request.row]
        said = [*answer.ids, *([end] if answer.finish_reason == "stop" else [])]
        with torch.no_grad():
            logits = lm.base(input_ids=torch.tensor([[*request.input_ids, *said]]), use_cache=False).logits[0].double()
        chances = logits[len(request.input_ids) - 1 :].log_softmax(-1)
        wanted = sum(float(chances[place, token]) for place, token in enumerate(said))
        assert answer.logprob == pytest.approx(wanted, abs=1e-3)


def test_log_probabilities_are_computed_only_on_request(small, lm) -> None:
    found = generated(small.answer_in_slots(lm, small.slot_requests((3, 4)), slots=1))
    assert found[0].logprob is None


SCORES = st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 1.0, 2.5, math.inf, math.nan])


@given(st.integers(1, 40).flatmap(lambda width: st.lists(st.lists(SCORES, min_size=width, max_size=width), min_size=1)))
@examples(100)
def test_greedy_choices_are_those_of_torch_for_ties_infinities_and_nan(rows: list[list[float]]) -> None:
    scores_NV = torch.tensor(rows)
    best_N, wanted_N = scores_NV.max(-1)
    tokens_N, valid_N = greedy_on_cpu(scores_NV)
    assert tokens_N.tolist() == wanted_N.tolist()
    assert valid_N.tolist() == [not math.isnan(best) for best in best_N.tolist()]


def test_greedy_choices_from_views_are_those_of_torch() -> None:
    scores_NLV = torch.randn(5, 3, 4099, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    for view_NV in (scores_NLV[:, -1], scores_NLV[..., ::2][:, 0], scores_NLV[:, 0].T.contiguous().T):
        assert greedy_on_cpu(view_NV)[0].tolist() == view_NV.max(-1).indices.tolist()
