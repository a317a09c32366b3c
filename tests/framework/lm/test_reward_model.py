"""Tests of reward models: scores of answers, their loss and its gradients are those of plain transformers."""

import json
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from partita.data.batching.collate import collate
from partita.data.batching.plan import PlannedBatch
from partita.lm.base import GenerationOptions, GenerationRequest
from partita.lm.branches.masks import BranchSupport, separate_rows
from partita.lm.marks import with_marks
from partita.lm.reward_model import RewardModel
from partita_schema.sections.model import ENCODER_DECODERS, ENCODERS, Architecture
from partita_trainers.base import Batch
from partita_trainers.objective import ObjectiveContext
from partita_trainers.objectives.reward import RewardObjective

from ...head_models import LoadedHead, tiny_model, write_plain

DECODERS = [name for name in typing.get_args(Architecture) if name not in (*ENCODERS, *ENCODER_DECODERS)]
WORDS = ("the", "cat", "sat", "on", "a", "mat", "while", "dogs", "ran")
OUTPUT = {"name": "answer", "type": "preference"}


def make_rows(count: int, *, seed: int = 0) -> list[dict[str, str]]:
    rng = np.random.default_rng(seed)

    def text(longest: int) -> str:
        return " ".join(rng.choice(WORDS, int(rng.integers(1, longest))))

    return [{"prompt": text(6), "chosen": f"{text(4)} good", "rejected": f"{text(5)} bad"} for _ in range(count)]


def write_reward_model(folder: Path, architecture: str, **changes: Any) -> Path:
    """Write a random reward model of transformers whose scores vary, with its tokenizer."""
    from transformers import AutoModelForSequenceClassification

    def describe(described: Any) -> None:
        described.num_labels = 1
        for name, value in changes.items():
            setattr(described, name, value)

    texts = [text for row in make_rows(30) for text in row.values()]
    return write_plain(
        folder, tiny_model(architecture), AutoModelForSequenceClassification, texts=texts, describe=describe
    )


class Setup(LoadedHead):
    """A reward model of partita, and the same model of transformers."""

    def __init__(self, folder: Path, architecture: str, *, rows: int = 6, **sections: Any) -> None:
        from transformers import AutoModelForSequenceClassification

        source = write_reward_model(folder / "plain", architecture)
        self.plain: Any = AutoModelForSequenceClassification.from_pretrained(source).eval()
        settings = {
            "base_model": str(source),
            "input_features": [{"name": "prompt"}],
            "output_features": [OUTPUT],
            "trainer": {"type": "reward"},
        }
        super().__init__({**settings, **sections}, make_rows(rows, seed=2), folder=folder)

    def plain_scores(self, batch: Batch) -> torch.Tensor:
        """Return the score of each answer in a row by itself, without padding, [R, 2]."""
        alone = separate_rows(batch)
        rows = [ids[:length] for ids, length in zip(alone.input_ids_BT, alone.lengths_B.tolist(), strict=True)]
        return torch.cat([self.plain(input_ids=ids[None]).logits for ids in rows])[:, 0].view(-1, 2)


def gradients(loss: torch.Tensor, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    trained = {name: one for name, one in module.named_parameters() if one.requires_grad}
    found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return {name: one for name, one in zip(trained, found, strict=True) if one is not None}


@pytest.mark.parametrize("architecture", [*DECODERS, "bert"])
def test_scores_and_gradients_are_those_of_transformers_row_by_row(tmp_path: Path, architecture: str) -> None:
    setup = Setup(tmp_path, architecture)
    batch, lm = setup.batch(), setup.lm
    assert isinstance(lm, RewardModel)
    scores, plain = lm.answer_scores(lm.module, batch), setup.plain_scores(batch)

    torch.testing.assert_close(scores, plain, rtol=0, atol=1e-5)
    assert plain.std() > 0.01
    assert (lm.branch_support.reason is None) == (architecture != "bert")
    loss, _ = RewardObjective(center=0.1).loss(ObjectiveContext(lm, lm.module), batch)
    chosen, rejected = plain.unbind(1)
    plain_loss = (-logsigmoid(chosen - rejected) + 0.1 * (chosen + rejected).square()).sum()
    assert loss.item() == pytest.approx(plain_loss.item(), rel=1e-5)
    own, theirs = gradients(loss, lm.module), gradients(plain_loss, setup.plain)
    assert own.keys() == theirs.keys()
    error = sum((own[name] - theirs[name]).square().sum() for name in own)
    assert error.sqrt() <= 1e-4 * sum(one.square().sum() for one in theirs.values()).sqrt()


def test_separate_rows_have_the_scores_of_branches(tmp_path: Path) -> None:
    setup = Setup(tmp_path, "llama")
    batch, lm = setup.batch(), setup.lm
    scores = lm.answer_scores(lm.module, batch)
    lm.branch_support = BranchSupport("tested")

    torch.testing.assert_close(lm.answer_scores(lm.module, batch), scores, rtol=0, atol=1e-5)


@pytest.mark.parametrize("separate", [False, True], ids=["branches", "rows"])
def test_packed_pairs_have_the_scores_of_single_ones(tmp_path: Path, separate: bool) -> None:
    setup = Setup(tmp_path, "llama")
    if separate:
        setup.lm.branch_support = BranchSupport("tested")
    packed = packed_batch(setup)
    assert packed.sequences == 2

    torch.testing.assert_close(
        setup.lm.answer_scores(setup.lm.module, packed), setup.plain_scores(setup.batch()), rtol=0, atol=1e-5
    )


def packed_batch(setup: Setup) -> Batch:
    """Return the rows in two lines, the second of which ends with padding."""
    planned = PlannedBatch(np.arange(6), np.array([0, 0, 0, 0, 1, 1]))
    return collate(setup.encoded, planned, pad_token_id=setup.tokenizer.pad_token_id)


def test_a_score_is_not_read_at_a_pad_token_that_ends_an_answer(tmp_path: Path) -> None:
    setup = Setup(tmp_path, "llama")
    setup.tokenizer.pad_token = setup.tokenizer.eos_token
    setup.plain.config.pad_token_id = setup.lm.base.config.pad_token_id = setup.tokenizer.eos_token_id
    batch = setup.batch()
    ends = batch.input_ids_BT.flatten()[: batch.lengths_B[0]]
    assert ends[-1] == setup.tokenizer.pad_token_id

    torch.testing.assert_close(
        setup.lm.answer_scores(setup.lm.module, batch), setup.plain_scores(batch), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("adapter", [{"type": "lora", "r": 2}, {"type": "ia3"}], ids=["lora", "ia3"])
def test_an_adapter_trains_the_whole_head(tmp_path: Path, adapter: dict[str, Any]) -> None:
    setup = Setup(tmp_path, "llama", adapter=adapter)
    batch, lm = setup.batch(), setup.lm

    scores = lm.answer_scores(lm.module, batch)
    torch.testing.assert_close(scores, setup.plain_scores(batch), rtol=0, atol=1e-5)
    assert lm.branch_support.reason is None
    found = gradients(scores.sum(), lm.module)
    head = [name for name in found if ".score." in name]
    assert head
    assert all(found[name].abs().sum() > 0 for name in head)


@pytest.mark.parametrize(("architecture", "requests"), [("llama", 1), ("gpt2", 1), ("bert", 4)])
def test_several_answers_to_a_prompt_are_one_request_where_that_is_less_work(
    tmp_path: Path, architecture: str, requests: int
) -> None:
    setup = Setup(tmp_path, architecture)
    lm, ids = setup.lm, setup.lm.token_ids
    assert isinstance(lm, RewardModel)
    prompt = ids[:8]
    texts = [[*prompt, *answer] for answer in (ids[2:4], ids[2:6], [ids[5]], [*ids[2:4], ids[9]])]
    options = GenerationOptions({"do_sample": False})
    made = lm.requests_of(texts)
    scores = [score for one in lm.generate(made, options, seed=0) for score in json.loads(one.text)]
    alone = [json.loads(lm.generate([GenerationRequest(text, 0)], options, seed=0)[0].text)[0] for text in texts]

    assert len(made) == requests
    assert scores == pytest.approx(alone, abs=1e-5)
    assert len({round(score, 4) for score in scores}) == 4
    assert len(lm.requests_of([[ids[0], *[answer] * 300] for answer in ids[2:4]])) == 2, "masked attention is more work"
    assert lm.requests_of(texts[:1]) == [GenerationRequest(texts[0], 0)]
    assert len(lm.requests_of([texts[0], texts[0][1:]])) == 2, "no common beginning"


def test_an_answer_that_another_one_begins_with_keeps_its_score_if_the_end_token_is_the_pad_token(
    tmp_path: Path,
) -> None:
    setup = Setup(tmp_path, "llama")
    lm, ids = setup.lm, setup.lm.token_ids
    assert isinstance(lm, RewardModel)
    setup.tokenizer.pad_token = setup.tokenizer.eos_token
    lm.base.config.pad_token_id = end = setup.tokenizer.eos_token_id
    texts = [[*ids[:6], end], [*ids[:8], end]]
    options = GenerationOptions({"do_sample": False})
    [request] = lm.requests_of(texts)
    alone = [lm.generate([GenerationRequest(text, 0)], options, seed=0)[0].text for text in texts]
    expected = [json.loads(text)[0] for text in alone]

    assert json.loads(lm.generate([request], options, seed=0)[0].text) == pytest.approx(expected, abs=1e-5)


def test_requests_with_one_and_with_two_answers_share_a_batch(tmp_path: Path) -> None:
    setup = Setup(tmp_path, "llama")
    lm, requests, expected = setup.lm, [], []
    for row, scores in enumerate(setup.plain_scores(setup.batch()).tolist()):
        batch = setup.batch([row])
        ids = batch.input_ids_BT[0].tolist()
        first, second = (span.tolist() for span in setup.encoded.loss_spans(row))
        if row % 2:
            marks = {first[0] - 1, first[1] - 1, second[1] - 1}
            requests.append(GenerationRequest(with_marks(ids, marks), 0))
            expected.append(scores)
        else:
            requests.append(GenerationRequest(ids[: first[1]], 0))
            expected.append(scores[:1])

    options = GenerationOptions({"do_sample": False})
    for size in (1, 6):
        answers = [
            one for start in range(0, 6, size) for one in lm.generate(requests[start : start + size], options, seed=0)
        ]
        for answer, scores in zip(answers, expected, strict=True):
            assert json.loads(answer.text) == pytest.approx(scores, abs=1e-5)
    assert lm.generate([], options, seed=0) == []
