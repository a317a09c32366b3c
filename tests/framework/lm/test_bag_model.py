"""Tests of the bag-of-words model: the features of a bag, and the interface of a language model."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from partita.lm.bag_model import BagLanguageModel
from partita.lm.base import GenerationOptions, GenerationRequest, Label
from partita.lm.heads.embedding_bag import bags_of
from partita.tokenizers.load import byte_tokenizer
from partita_schema.errors import ModelError, ResumeError
from partita_schema.sections.model import EmbeddingBagModel
from partita_trainers.base import Batch

VOCABULARY = 100


def buckets_of(tokens: list[int], *, ngrams: int, buckets: int) -> list[int]:
    """Return the buckets computed with Python integers, sequence by sequence."""
    mix, found = 0x9E3779B97F4A7C15, []
    for length in range(2, ngrams + 1):
        for start in range(len(tokens) - length + 1):
            value = tokens[start]
            for token in tokens[start + 1 : start + length]:
                value = ((value + 1) * mix + token) % 2**64
            found.append(VOCABULARY + (value * mix % 2**64 >> 32) % buckets)
    return found


@pytest.mark.parametrize("ngrams", [1, 2, 3])
def test_a_bag_has_tokens_and_ngrams(ngrams: int) -> None:
    texts = [[5, 7, 5, 99], [3], [0, 1, 2, 3, 4]]
    ids_K, starts_Nplus1 = bags_of(texts, ngrams=ngrams, vocabulary=VOCABULARY, buckets=1000)
    expected = [text + buckets_of(text, ngrams=ngrams, buckets=1000) for text in texts]
    assert ids_K.tolist() == [number for part in expected for number in part]
    assert starts_Nplus1.tolist() == [0, *torch.tensor([len(part) for part in expected]).cumsum(0).tolist()]


def test_ngrams_spread_over_the_buckets() -> None:
    tokens = torch.randint(0, VOCABULARY, (4000,), generator=torch.Generator().manual_seed(0)).tolist()
    ids_K, _ = bags_of([tokens], ngrams=2, vocabulary=VOCABULARY, buckets=64)
    pairs = len(set(pairwise(tokens)))
    counts = torch.bincount(ids_K[4000:] - VOCABULARY, minlength=64)
    assert pairs > 3000
    assert counts.min() > 0.5 * 3999 / 64
    assert counts.max() < 1.6 * 3999 / 64


def make_model(**changes: Any) -> BagLanguageModel:
    tokenizer = byte_tokenizer()
    labels = [Label(text, tuple(tokenizer.encode(text, add_special_tokens=False))) for text in ("good", "bad")]
    described = EmbeddingBagModel(type="embedding_bag", embedding_dim=8, buckets=50, **changes)
    model = BagLanguageModel(described, tokenizer=tokenizer, labels=labels, seed=1)
    with torch.no_grad():
        model.module.output.weight.normal_(generator=torch.Generator().manual_seed(2))
    return model


def make_batch(model: BagLanguageModel, rows: list[tuple[str, str]]) -> Batch:
    """Return rows as made by the row tokenizer, padded on the right."""
    encoded = [
        [model.tokenizer.encode(text, add_special_tokens=False) for text in (prompt, answer)] for prompt, answer in rows
    ]
    lines = [prompt + answer + [model.tokenizer.eos_token_id] for prompt, answer in encoded]
    labels = [[-100] * len(prompt) + line[len(prompt) :] for (prompt, _), line in zip(encoded, lines, strict=True)]
    width = max(map(len, lines))
    return Batch(
        torch.tensor([line + [model.tokenizer.pad_token_id] * (width - len(line)) for line in lines]),
        torch.tensor([label + [-100] * (width - len(label)) for label in labels]),
        torch.tensor([len(line) for line in lines]),
        tuple(prompt for prompt, _ in rows),
    )


def requests(model: BagLanguageModel, texts: list[str]) -> list[GenerationRequest]:
    return [GenerationRequest(model.tokenizer.encode(text, add_special_tokens=False), 9) for text in texts]


def test_the_loss_is_the_cross_entropy_of_the_answered_labels() -> None:
    model = make_model()
    rows = [("a nice day", "good"), ("rain", "bad"), ("more rain, and wind", "bad")]
    options = GenerationOptions({}, logprobs=True, labels=model.labels)
    answers = model.answers(requests(model, [prompt for prompt, _ in rows]), options)
    expected = -sum(answer.scores[label] for answer, (_, label) in zip(answers, rows, strict=True) if answer.scores)
    assert float(model.loss(model.module, make_batch(model, rows)).detach()) == pytest.approx(expected, rel=1e-5)
    for answer in answers:
        assert answer.scores is not None
        assert math.fsum(math.exp(score) for score in answer.scores.values()) == pytest.approx(1)
        assert answer.logprob == max(answer.scores.values()) == answer.scores[answer.text]


def test_the_log_probability_of_a_label_is_assigned_to_its_first_token() -> None:
    model = make_model()
    rows = [("a nice day", "good"), ("rain", "bad"), ("more rain, and wind", "bad")]
    answers = model.answers(requests(model, [prompt for prompt, _ in rows]), GenerationOptions({}, labels=model.labels))
    batch = make_batch(model, rows)
    log_probs = model.token_log_probs(model.module, batch).detach()
    of_rows = torch.zeros(3).index_add(0, batch.loss_token_rows, log_probs)
    scores = [answer.scores[label] for answer, (_, label) in zip(answers, rows, strict=True) if answer.scores]
    assert of_rows.tolist() == pytest.approx(scores, rel=1e-5)
    assert log_probs.count_nonzero() == 3 < len(log_probs) == batch.loss_tokens


def test_answers_do_not_depend_on_the_other_rows_of_the_batch() -> None:
    model = make_model()
    asked = requests(model, [f"text number {number} of many" for number in range(12)])
    options = GenerationOptions({}, logprobs=True)
    alone = [model.answers([request], options)[0] for request in asked]
    assert model.answers(asked, options) == alone


def test_nan_weights_are_an_error() -> None:
    model = make_model()
    with torch.no_grad():
        model.module.output.bias.fill_(torch.nan)
    with pytest.raises(
        ModelError,
        match=r"the scores are NaN because training diverged; train again with a lower trainer\.learning_rate",
    ):
        model.answers(requests(model, ["text"]), GenerationOptions({}))


def test_a_checkpoint_with_other_shapes_is_refused(tmp_path: Path) -> None:
    make_model().save_checkpoint(tmp_path)
    message = r"embedding\.weight is \(308, 8\) and this file has \(278, 8\): other labels, tokens or sizes"
    described = EmbeddingBagModel(type="embedding_bag", embedding_dim=8, buckets=20)
    other = make_model()
    with pytest.raises(ResumeError, match=message):
        BagLanguageModel(described, tokenizer=other.tokenizer, labels=other.labels, seed=1).load_checkpoint(tmp_path)


def test_a_loaded_model_equals_the_saved_one(tmp_path: Path) -> None:
    model = make_model()
    model.save(tmp_path)
    other = make_model()
    with torch.no_grad():
        other.module.output.weight.zero_()
    assert other.fingerprint != model.fingerprint
    other.load_checkpoint(tmp_path)
    assert other.fingerprint == model.fingerprint


def test_a_single_label_is_refused() -> None:
    model = make_model()
    described = EmbeddingBagModel(type="embedding_bag")
    with pytest.raises(ModelError, match="a bag of words chooses among labels, and here are 1; give rows of two or m"):
        BagLanguageModel(described, tokenizer=model.tokenizer, labels=model.labels[:1], seed=1)
