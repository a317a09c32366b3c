"""A run records the lengths of its rows, and training rows as the model reads them."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partita import Model
from partita.training.recorded_data import MAX_BINS, MAX_SAMPLE_TOKENS, histogram

from ...classifiers import make_rows as make_classifier_rows
from ...classifiers import settings as classifier_settings
from ...encoder_decoders import save_encoder_decoder
from ...json_lines import write_json_lines
from .. import test_dialogues, test_embeddings, test_tags

MODEL = {"type": "scratch", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 64}
SHORT = {"type": "finetune", "max_steps": 1, "batch_size": 4, "skip_all_evaluation": True}


def simple(**changes: Any) -> dict[str, Any]:
    return {
        "base_model": MODEL | {"context_length": 64, "tokenizer": "word"},
        "input_features": [{"name": "text", "type": "text"}],
        "output_features": [{"name": "reply", "type": "text"}],
        "trainer": SHORT,
    } | changes


def make_rows(count: int) -> list[dict[str, Any]]:
    return [{"text": f"one {number % 5} ball", "reply": f"blue {number % 5}"} for number in range(count)]


def recorded(config: dict[str, Any], rows: Any, folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train, and return the samples and the manifest."""
    Model(config | {"trainer": SHORT}, quiet=True).train(rows, run=folder / "run")
    samples: list[dict[str, Any]] = json.loads((folder / "run/samples.json").read_text(encoding="utf8"))["rows"]
    assert 1 <= len(samples) <= 3
    assert all(len(sample["texts"]) == len(sample["loss"]) for sample in samples)
    return samples, json.loads((folder / "run/manifest.json").read_text(encoding="utf8"))


def test_samples_are_evenly_spaced_rows_with_their_answers_in_the_loss(tmp_path: Path) -> None:
    split = {"type": "fixed", "column": "part"}
    rows = [{**row, "part": 0} for row in make_rows(9)]
    samples, _ = recorded(simple(data={"split": split}), rows, tmp_path)
    assert [sample["key"] for sample in samples] == ["dataset:1", "dataset:4", "dataset:7"]
    for sample, row in zip(samples, (rows[0], rows[3], rows[6]), strict=True):
        assert sample["loss"] == [False, True]
        assert row["text"] in sample["texts"][0]
        assert row["reply"] in sample["texts"][1]
        assert sample["tokens"] > 5


def test_samples_of_pairs_name_both_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "from partita_trainers.base import TrainResult\n\n\nclass Idle:\n"
    program += "    def __init__(self, section):\n        pass\n\n    def train(self, context):\n"
    program += "        return TrainResult(run=context.run.folder, metrics={}, steps=0)\n"
    (tmp_path / "idle_trainer.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    rows = [{"text": f"one {number}", "chosen": "blue", "rejected": "red"} for number in range(9)]
    trainer = {"type": "custom", "target": "idle_trainer:Idle", "batch_size": 4}
    config = simple(output_features=[{"name": "reply", "type": "preference"}], trainer=trainer)
    Model(config, quiet=True).train(rows, run=tmp_path / "run")
    [sample, *_] = json.loads((tmp_path / "run/samples.json").read_text(encoding="utf8"))["rows"]

    assert sample["names"] == ["", "chosen", "rejected"]
    assert sample["loss"] == [False, True, True]
    assert "blue" in sample["texts"][1]
    assert "red" in sample["texts"][2]


def test_samples_of_chunks_are_chunks(tmp_path: Path) -> None:
    texts = [{"text": f"{number} red balls and blue balls"} for number in range(60)]
    config = simple(output_features=[{"name": "text", "type": "text"}], data={"batching": {"type": "chunk"}})
    del config["input_features"]
    samples, manifest = recorded(config, texts, tmp_path)
    assert all(sample["loss"] == [True] for sample in samples)
    assert samples[0]["texts"][0].count("balls and blue balls") > 3
    assert [sample["tokens"] for sample in samples] == [64, 64, 64]
    assert manifest["lengths"]["training"]["edges"][-1] >= 64


def test_samples_of_a_head_show_the_value_that_is_learned(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "rows.jsonl", make_classifier_rows(30))
    rows = {f"rows.jsonl:{number}": row for number, row in enumerate(make_classifier_rows(30), start=1)}
    config = classifier_settings(data={"source": str(tmp_path / "rows.jsonl")})
    samples, _ = recorded(config, None, tmp_path)
    assert len(samples) == 3
    for sample in samples:
        assert sample["loss"] == [False, True]
        assert sample["texts"][1] == rows[sample["key"]]["label"]


@pytest.mark.parametrize("kind", ["tags", "embedding", "dialogues", "encoder-decoder", "stream"])
def test_every_kind_of_row_has_samples(tmp_path: Path, kind: str) -> None:
    rows: Any
    if kind == "tags":
        config, rows = test_tags.settings(data={}), test_tags.make_rows(20)
    elif kind == "embedding":
        config, rows = test_embeddings.settings(data={}), test_embeddings.make_rows(20)
    elif kind == "dialogues":
        config, rows = test_dialogues.make_config(), test_dialogues.make_dialogues(20)
    else:
        config, rows = simple(), make_rows(20)
        write_json_lines(tmp_path / "rows.jsonl", rows)
    if kind == "encoder-decoder":
        config["base_model"] = str(save_encoder_decoder(tmp_path / "model", "t5"))
    if kind == "stream":
        config["data"], rows = (
            {"source": {"type": "jsonl", "path": str(tmp_path / "rows.jsonl"), "streaming": True}},
            None,
        )
    samples, manifest = recorded(config, rows, tmp_path)
    assert all("".join(sample["texts"]).strip() for sample in samples)
    if kind != "embedding":
        assert all(any(sample["loss"]) and not all(sample["loss"]) for sample in samples)
    lengths = manifest["lengths"]["training"]
    assert len(lengths["edges"]) == len(lengths["counts"]) + 1
    assert sum(lengths["counts"]) >= 14


def test_a_long_sample_is_cut(tmp_path: Path) -> None:
    rows = [{"text": "ball " * 3 * MAX_SAMPLE_TOKENS, "reply": "blue"}] * 3
    config = simple(base_model=MODEL | {"context_length": 4 * MAX_SAMPLE_TOKENS, "tokenizer": "word"})
    config["data"] = {"split": {"type": "fixed", "column": "part"}}
    samples, _ = recorded(config, [row | {"part": 0} for row in rows], tmp_path)
    assert samples[0]["tokens"] > 3 * MAX_SAMPLE_TOKENS
    assert samples[0]["texts"][0].count("ball") <= MAX_SAMPLE_TOKENS
    assert samples[0]["loss"] == [False]


@pytest.mark.parametrize(
    ("lengths", "counts", "edges"),
    [
        ([5], [1], [5, 6]),
        ([1, 2, 2, 4], [1, 2, 0, 1], [1, 2, 3, 4, 5]),
        ([0, 100], [1, *[0] * 32, 1], list(range(0, 103, 3))),
    ],
)
def test_a_histogram_has_whole_bins_of_equal_width(lengths: list[int], counts: list[int], edges: list[int]) -> None:
    assert histogram(np.array(lengths, dtype=np.int32)) == {"counts": counts, "edges": edges}


def test_a_histogram_is_small_and_counts_every_row() -> None:
    lengths = np.random.default_rng(1).integers(1, 100_000, 5000).astype(np.int32)
    bins = histogram(lengths)
    assert len(bins["counts"]) <= MAX_BINS
    expected, _ = np.histogram(lengths, bins["edges"])
    assert bins["counts"] == expected.tolist()
    assert sum(bins["counts"]) == 5000


def test_resumes_and_costs_are_recorded(
    tmp_path: Path, colours: Any, train_killed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/partita", "train", "a.yaml"])
    config = colours.config(trainer={"max_steps": 8, "steps_per_checkpoint": 2, "skip_all_evaluation": True})
    run, model = tmp_path / "run", Model(config, quiet=True)
    costs = []
    for after in (3, 5, None):
        if after is None:
            model.train(run=run)
        else:
            train_killed(model, run, after=after)
        manifest = json.loads((run / "manifest.json").read_text(encoding="utf8"))
        costs.append(manifest["cost"])
    assert manifest["resumed"] == [2, 4]
    assert costs[0]["cpu_seconds"] < costs[1]["cpu_seconds"] < costs[2]["cpu_seconds"]
    assert costs[2]["seconds"] >= costs[2]["cpu_seconds"] * 0.1
    assert manifest["command"] == "partita train a.yaml"
    assert set(manifest["code"]) <= {"commit"}
