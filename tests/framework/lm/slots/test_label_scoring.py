"""Tests of label scoring: the probability of all tokens of a label and of the end token after it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from partita.lm.base import GenerationOptions, Label, SlotAnswer, SlotRequest
from partita.lm.slots.label_scoring import LabelTree, ScoringSlots
from partita_schema.errors import ModelError

from ....properties import ends

LABELS = tuple(
    Label(str(ids), ids) for ids in ((40,), (40, 41), (40, 41, 42, 43), (40, 50), (60, 61, 62), (7,), (41, 40))
)
"""Labels with shared prefixes; some are prefixes of others."""
OPTIONS = GenerationOptions({"do_sample": False}, labels=LABELS, logprobs=True)
PREFIX = (11, 12, 13, 14, 15, 16, 17, 18, 19)
SIZES = tuple((length, 4) for length in (1, 9, 3, 30, 17, 9, 2))


@torch.no_grad()
def score_alone(lm: Any, request: SlotRequest, label: Label) -> float:
    """Return the log probability of a label and its end token, from one forward pass over the whole row."""
    row = [*request.input_ids, *label.ids]
    chances = lm.base(input_ids=torch.tensor([row]), use_cache=False).logits[0].double().log_softmax(-1)
    places = range(len(request.input_ids) - 1, len(row) - 1)
    tokens = sum(float(chances[place, token]) for place, token in zip(places, label.ids, strict=True))
    return tokens + float(chances[-1, lm.tokenizer.eos_token_id])


def scored(
    lm: Any, requests: list[SlotRequest], *, groups: int, prefix: tuple[int, ...] = (), trees: int | None = None
) -> dict[int, SlotAnswer]:
    """Return the outcome of each row, with `groups` rows at a time and `trees` label trees per pass."""
    tokens = max(len(request.input_ids) + request.max_new_tokens for request in requests)
    slots = lm.open_slots(OPTIONS, slots=groups, tokens=tokens, prefix=prefix, seed=0)
    if trees is not None:
        slots.scorers[0].max_rows = trees
    found: dict[int, SlotAnswer] = {}
    with lm.evaluating():
        for start in range(0, len(requests), groups):
            found |= {answer.request.row: answer for answer in slots.admit(requests[start : start + groups])}
            assert not slots.live
    slots.close()
    return found


def assert_scored_as_alone(lm: Any, answers: dict[int, SlotAnswer], requests: list[SlotRequest]) -> None:
    for request in requests:
        wanted = {label.text: score_alone(lm, request, label) for label in LABELS}
        generated = answers[request.row].generated
        assert generated is not None
        assert generated.scores is not None
        assert dict(generated.scores) == pytest.approx(wanted, abs=2e-4)
        assert generated.text == max(wanted, key=lambda text: wanted[text])
        assert generated.logprob == generated.scores[generated.text]
        assert generated.ids == ()


@pytest.mark.parametrize("architecture", ends(["llama", "gpt2", "gpt_neox", "opt", "gemma"]))
def test_scores_equal_those_of_each_row_and_label_alone(small: Any, architecture: str) -> None:
    lm = small.load(small.config(architecture=architecture), trainable=False)
    small.sharpen(lm.module)
    for prefix in ((), PREFIX):
        requests = small.slot_requests(*SIZES, prefix=prefix)
        for groups, trees in ((1, None), (3, 2), (7, None), (7, 3)):
            assert_scored_as_alone(lm, scored(lm, requests, groups=groups, prefix=prefix, trees=trees), requests)


def test_scores_use_the_adapter(small: Any) -> None:
    lm = small.load(small.config(adapter={"type": "lora", "r": 4, "init": "gaussian"}))
    small.take_steps(lm, steps=2)
    requests = small.slot_requests(*SIZES)
    with lm.evaluating():
        assert_scored_as_alone(lm, scored(lm, requests, groups=4), requests)


def test_probabilities_of_all_one_token_labels_add_up_to_that_of_one_token_answers(small: Any) -> None:
    lm = small.load(small.config(), trainable=False)
    request = small.slot_requests((5, 4))[0]
    vocabulary, end = lm.vocabulary_size, lm.tokenizer.eos_token_id
    labels = tuple(Label(str(token), (token,)) for token in range(vocabulary) if token != end)
    slots = lm.open_slots(replace(OPTIONS, labels=labels), slots=1, tokens=9, prefix=(), seed=0)
    with lm.evaluating(), torch.no_grad():
        scores = slots.admit([request])[0].generated.scores
        rows = torch.tensor([[*request.input_ids, token] for token in range(vocabulary) if token != end])
        chances = lm.base(input_ids=rows).logits.double().softmax(-1)
    slots.close()
    first = chances[0, -2][[token for token in range(vocabulary) if token != end]]
    assert sum(torch.tensor(list(scores.values())).exp().tolist()) == pytest.approx(
        float((first * chances[:, -1, end]).sum()), rel=1e-4
    )


def test_an_end_of_the_chat_template_is_scored_like_an_end_token(small: Any) -> None:
    lm = small.load(small.config(), trainable=False)
    end = lm.tokenizer.eos_token_id
    labels = tuple(replace(label, ids=(*label.ids, end, 99)) for label in LABELS)
    requests = small.slot_requests(*SIZES)
    tokens = max(len(request.input_ids) for request in requests) + 4
    slots = lm.open_slots(replace(OPTIONS, labels=labels), slots=7, tokens=tokens, prefix=(), seed=0)
    with lm.evaluating():
        answers = {answer.request.row: answer for answer in slots.admit(requests)}
    slots.close()
    assert_scored_as_alone(lm, answers, requests)


def test_a_row_with_nan_scores_is_an_error_and_does_not_affect_other_rows(small: Any) -> None:
    lm = small.load(small.config(), trainable=False)
    requests = small.slot_requests(*SIZES)
    wanted = scored(lm, requests, groups=3)

    def poison(embedding: torch.nn.Module, args: tuple[torch.Tensor, ...], found: torch.Tensor) -> torch.Tensor:
        return found.masked_fill((args[0] == 255)[..., None], torch.nan)

    lm.base.get_input_embeddings().register_forward_hook(poison)
    ill = SlotRequest([255, 5, 6], 4, 99)
    answers = scored(lm, [ill, *requests], groups=3)
    assert answers.pop(99).error == "the model's scores are NaN"
    for row, answer in answers.items():
        assert answer.error is None
        assert dict(answer.generated.scores) == pytest.approx(dict(wanted[row].generated.scores), abs=1e-4)


def test_a_row_without_room_for_the_longest_label_is_an_error(small: Any) -> None:
    lm = small.load(small.config(), trainable=False)
    crowded, fine = small.slot_requests((61, 3), (60, 4))
    answers = scored(lm, [crowded, fine], groups=2)
    assert answers[0].error == (
        "the prompt has 61 tokens and the context leaves room for 3 more, but the longest label has 4"
    )
    assert answers[1].error is None
    assert scored(lm, [crowded], groups=1)[0].generated is None


def test_a_model_without_an_end_token_cannot_score_labels(small: Any) -> None:
    lm = small.load(small.config(), trainable=False)
    lm.tokenizer.eos_token = None
    lm.base.generation_config.eos_token_id = lm.base.config.eos_token_id = None
    with pytest.raises(ModelError, match=r"decoder\.scoring: the model has no token that ends an answer; remove"):
        lm.open_slots(OPTIONS, slots=1, tokens=9, prefix=(), seed=0)


def test_a_tree_contains_shared_prefixes_of_labels_once() -> None:
    tree = LabelTree([label.ids for label in LABELS])
    assert tree.tokens == [40, 41, 42, 43, 50, 60, 61, 62, 7, 41, 40]
    assert tree.parents == [-1, 0, 1, 2, 0, -1, 5, 6, -1, -1, 9]
    assert tree.depths == [0, 1, 2, 3, 1, 0, 1, 2, 0, 0, 1]
    assert tree.paths[:3] == [[0], [0, 1], [0, 1, 2, 3]]
    assert tree.attention_mask()[3].nonzero().flatten().tolist() == [0, 1, 2, 3]


def test_slots_opened_with_labels_score_them(small: Any) -> None:
    lm = small.load(small.config(), trainable=False)
    slots = lm.open_slots(OPTIONS, slots=2, tokens=20, prefix=(), seed=0)
    assert isinstance(slots, ScoringSlots)
    assert slots.step() == []
    slots.close()
    timing = lm.generate_worst_case(2, prompt_tokens=8, new_tokens=3, options=OPTIONS)
    assert timing.prefill_seconds > 0
