"""Tests of scores of two texts: loss, answers and files are those of transformers and sentence-transformers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from partita import Model
from partita.data.formatting.build import build_row_tokenizer
from partita.data.formatting.texts_tokenizer import longest_first
from partita.data.sources.sources import open_rows
from partita.data.tokenizer_texts import tokenizer_texts
from partita.outputs.types.score import ScoreMetrics
from partita.tokenizers.load import load_tokenizer
from partita_schema.errors import ConfigError
from partita_schema.load import load_config

from ..head_models import CONTEXT, LoadedHead, tiny_model, write_plain
from ..json_lines import write_json_lines

WORDS = tuple(f"w{number}" for number in range(12))


def make_rows(queries: int, *, seed: int = 0, longest: int = 4) -> list[dict[str, Any]]:
    """Return queries with four documents each, one of which has the query's words."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(queries):
        words = rng.choice(WORDS, 2, replace=False).tolist()
        for place in range(4):
            others = rng.choice([word for word in WORDS if word not in words], int(rng.integers(2, longest)))
            document = [*(words if place == 0 else []), *others]
            rows.append(
                {
                    "query": f"find {' '.join(words)} {number}",
                    "document": " ".join(rng.permutation(document)),
                    "relevance": float(place == 0),
                }
            )
    return rows


def settings(architecture: str = "bert", loss: str = "binary_cross_entropy", **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "base_model": tiny_model(architecture),
        "input_features": [{"name": "query", "type": "text"}, {"name": "document", "type": "text"}],
        "output_features": [{"name": "relevance", "type": "score", "decoder": {"loss": loss}}],
        "data": {"source": "rows.jsonl"},
        "trainer": {"type": "finetune", "batch_size": 8, "max_steps": 3, "learning_rate": 0.01},
    }
    return base | changes


@pytest.mark.parametrize(("architecture", "texts"), [("bert", ["find", "w1"]), ("llama", ["find", "\nw1"])])
def test_a_tokenizer_is_trained_on_both_texts_as_they_are_encoded(architecture: str, texts: list[str]) -> None:
    config = load_config(settings(architecture)).config
    rows = open_rows([{"query": "find", "document": "w1", "relevance": 1.0}], folder=Path())
    assert list(tokenizer_texts(rows, config, supervised=True)) == texts
    tokenizer = load_tokenizer(config, folder=Path(), texts=lambda: tokenizer_texts(rows, config, supervised=True))
    row_tokenizer = build_row_tokenizer(config, tokenizer=tokenizer, context_length=CONTEXT)
    example = row_tokenizer.encode({"query": "find", "document": "w1", "relevance": 1.0}, key="a")
    assert tokenizer.unk_token_id not in example.input_ids


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with rows.jsonl."""
    monkeypatch.chdir(tmp_path)
    write_json_lines(tmp_path / "rows.jsonl", make_rows(20))
    return tmp_path


def one_output(described: Any) -> None:
    """Write the head of scores into a transformers config."""
    described.num_labels = 1


def write_scorer(folder: Path, architecture: str) -> Path:
    """Write a random model of transformers with one output whose scores vary, with its tokenizer."""
    from transformers import AutoModelForSequenceClassification

    texts = (f"{row['query']} {row['document']}" for row in make_rows(20))
    write_plain(folder, tiny_model(architecture), AutoModelForSequenceClassification, texts=texts, describe=one_output)
    if architecture == "bert":  # as the tokenizers of BERT on the Hub
        file = folder / "tokenizer_config.json"
        names = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
        file.write_text(json.dumps(json.loads(file.read_text("utf8")) | names), encoding="utf8")
    return folder


def plain_logits(model: Any, tokenizer: Any, rows: Sequence[dict[str, Any]]) -> tuple[torch.Tensor, Any]:
    """Return logits and inputs as users of transformers make them for pairs of texts."""
    queries, documents = [row["query"] for row in rows], [row["document"] for row in rows]
    if model.config.model_type in ("llama", "gpt2"):  # their tokenizers write nothing between texts
        documents = [f"\n{document}" for document in documents]
    inputs = tokenizer(queries, documents, padding=True, truncation=True, max_length=CONTEXT, return_tensors="pt")
    assert ("token_type_ids" in inputs) == (model.config.model_type == "bert")
    return model(**inputs).logits[:, 0], inputs


@pytest.mark.parametrize("loss", ["binary_cross_entropy", "squared_error"])
@pytest.mark.parametrize("architecture", ["bert", "roberta", "distilbert", "deberta-v2", "modernbert", "llama", "gpt2"])
def test_loss_and_gradients_equal_those_of_torch_and_transformers(tmp_path: Path, architecture: str, loss: str) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = write_scorer(tmp_path, architecture)
    rows = make_rows(2, seed=1, longest=14)
    plain = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    logits, inputs = plain_logits(plain, AutoTokenizer.from_pretrained(folder), rows)
    targets = torch.tensor([row["relevance"] for row in rows])
    function = functional.mse_loss if loss == "squared_error" else functional.binary_cross_entropy_with_logits
    ours = LoadedHead(settings(architecture, loss, base_model=str(folder)), rows, folder=tmp_path)

    assert torch.equal(ours.batch().input_ids_BT, inputs["input_ids"])
    ours.check_loss_and_gradients(plain, function(logits, targets))


@pytest.mark.parametrize("loss", ["binary_cross_entropy", "squared_error"])
@pytest.mark.parametrize("architecture", ["bert", "distilbert"])
def test_a_trained_scorer_is_a_cross_encoder_of_sentence_transformers(
    place: Path, architecture: str, loss: str
) -> None:
    from sentence_transformers import CrossEncoder

    Model(settings(architecture, loss), quiet=True).train(run=place / "run")
    rows = make_rows(3, seed=1)
    predictions = Model.load(place / "run", quiet=True).predict(rows, output=place / "out.jsonl")
    model = CrossEncoder(str(place / "run" / "model"), device="cpu")
    scores = model.predict([(row["query"], row["document"]) for row in rows])
    assert predictions["relevance"] == pytest.approx(scores.tolist(), rel=1e-5, abs=1e-6)
    assert predictions["status"] == ["ok"] * len(rows)


def test_a_killed_run_resumes_with_the_same_metrics(place: Path, train_killed: Any) -> None:
    trainer = {"type": "finetune", "batch_size": 16, "max_steps": 4, "learning_rate": 0.005, "steps_per_checkpoint": 2}
    config = settings(trainer={**trainer, "validation_metric": "mrr"})
    whole = Model(config, quiet=True).train(run=place / "whole")
    train_killed(Model(config, quiet=True), place / "killed", after=3)
    resumed = Model(config, quiet=True).train(run=place / "killed")
    assert resumed.resumed_from == 2
    assert resumed.metrics == whole.metrics


def test_the_best_checkpoint_is_that_of_whole_queries(place: Path) -> None:
    """With 8 of 80 rows, no query has a second document, and all rankings are perfect."""
    write_json_lines(place / "validation.jsonl", make_rows(20, seed=1))
    trainer = {"type": "finetune", "batch_size": 16, "max_steps": 4, "learning_rate": 0.01, "steps_per_evaluation": 1}
    trainer |= {"validation_metric": "ndcg_at_10", "max_generated_rows": 8}
    data = {"source": "rows.jsonl", "validation": "validation.jsonl"}
    result = Model(settings(trainer=trainer, data=data), quiet=True).train(run=place / "run")
    manifest = json.loads((place / "run" / "manifest.json").read_text("utf8"))
    assert manifest["best"] == pytest.approx(result.metrics["validation"]["relevance.ndcg_at_10"], abs=1e-12)
    assert manifest["best"] < 1


def test_scores_are_learned_and_rank_the_documents_of_each_query(place: Path) -> None:
    write_json_lines(place / "rows.jsonl", make_rows(60))
    trainer = {"type": "finetune", "batch_size": 16, "max_steps": 60, "learning_rate": 0.01}
    Model(settings(trainer=trainer), quiet=True).train(run=place / "run")
    model, rows = Model.load(place / "run", quiet=True), make_rows(10, seed=1)
    metrics = model.evaluate(rows)["relevance"]
    scores = np.array(model.predict(rows)["relevance"]).reshape(10, 4)
    ranks = (scores >= scores[:, :1]).sum(1)
    assert metrics["mrr"] == pytest.approx((1 / ranks).mean())
    assert metrics["mrr"] > 0.7
    assert metrics["ndcg_at_10"] == pytest.approx((1 / np.log2(ranks + 1)).mean())
    assert metrics["mse"] == pytest.approx(((scores - [1, 0, 0, 0]) ** 2).mean())
    assert (metrics["queries"], metrics["n"]) == (10, 40)


def test_a_row_without_a_prediction_is_the_last_of_its_query() -> None:
    metrics = ScoreMetrics()
    metrics.add(("a", 1.0), None, valid=False)
    metrics.add(("a", 0.0), 0.2, valid=True)
    metrics.add(("b", 1.0), 0.5, valid=True)
    assert metrics.results(3) == {
        "mrr": (1 / 2 + 1) / 2,
        "ndcg_at_10": pytest.approx((1 / np.log2(3) + 1) / 2),
        "mse": pytest.approx((0.04 + 0.25) / 2),
    }
    assert metrics.details() == {"queries": 2}


def test_the_error_of_a_huge_score_is_infinite() -> None:
    metrics = ScoreMetrics()
    metrics.add(("a", 1e200), 0.5, valid=True)
    assert metrics.results(1)["mse"] == np.inf


@pytest.mark.parametrize(
    ("score", "reason"), [(3, "the score 3 is not between 0 and 1"), ("high", "'high' is not a number")]
)
def test_scores_that_are_no_probabilities_are_left_out_with_the_reason(place: Path, score: Any, reason: str) -> None:
    rows = [*make_rows(20), {"query": "a", "document": "b", "relevance": score}]
    Model(settings(data={"source": "none.jsonl", "max_bad_rows": 1}), quiet=True).train(rows, run=place / "run")
    assert reason in (place / "run" / "quarantine.jsonl").read_text("utf8")
    if score == 3:
        Model(settings(loss="squared_error"), quiet=True).train(rows, run=place / "squared")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"input_features": [{"name": "query"}]}, "input_features: a score is for two texts; write two inputs"),
        (
            {"prompt": {"template": "{query} {document}"}},
            "prompt.template: a score is for two texts as they are in the data; remove template",
        ),
    ],
    ids=["inputs", "template"],
)
def test_what_does_not_go_with_scores_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(settings(**changes))
    assert [str(one) for one in caught.value.problems] == [problem]


@pytest.mark.parametrize(
    ("first", "second", "room", "kept"), [(3, 4, 10, (3, 4)), (9, 2, 6, (4, 2)), (2, 9, 6, (2, 4)), (9, 8, 6, (3, 3))]
)
def test_the_longer_text_is_shortened_first(first: int, second: int, room: int, kept: tuple[int, int]) -> None:
    assert longest_first(first, second, room=room) == kept
