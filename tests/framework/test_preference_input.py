"""Tests of bad rows in training on preferences, from the command and its files to a resumed run."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from partita import Model, PartitaError
from partita.data.ledger import read_counts

from ..json_lines import read_json_lines, write_json_lines
from .conftest import Command

SIZE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "context_length": 64}
TINY = {"type": "scratch", "tokenizer": "byte", "vocab_size": 300, **SIZE}
PAIRS = [{"question": f"q{n}", "answer": f"a{n}", "worse": f"b{n}", "liked": n % 3 == 0} for n in range(16)]
BAD_PAIRS = [
    ({"answer": "same", "worse": "same"}, "the answers in the columns answer and worse are equal"),
    ({"answer": "a", "worse": " "}, "column worse is missing or empty"),
    ({"answer": "a", "worse": None}, "column worse is missing or empty"),
    (
        {"answer": "abcdefgh1", "worse": "abcdefgh2"},
        "the answers in the columns answer and worse are equal after 2 tokens beyond the length limits are cut off",
    ),
    ({"question": "q" * 64}, "the prompt leaves no room for an answer within 64 tokens"),
]
BAD_LABELS = [({"liked": "so so"}, "column liked: 'so so' does not say whether the answer is good; write")]


def write(folder: Path, kind: str, *, rows: list[dict[str, Any]], **changes: Any) -> Path:
    """Write rows and a file of two steps; return its path."""
    write_json_lines(folder / "rows.jsonl", rows)
    pair = {"name": "said", "type": "preference", "chosen": "answer", "rejected": "worse"}
    limits = {"preprocessing": {"max_sequence_length": 8}}
    output = pair if kind == "preference" else {"name": "answer", "type": "text", "label": "liked"}
    config = {
        "base_model": TINY,
        "input_features": [{"name": "question"}],
        "output_features": [output | limits],
        "data": {"source": "rows.jsonl", "split": {"type": "random", "probabilities": [1.0, 0, 0]}},
        "trainer": {"type": kind, "batch_size": 4, "max_steps": 2, "learning_rate": 0.01},
    }
    for section, values in changes.items():
        config[section] = {**config.get(section, {}), **values}  # type: ignore[dict-item]
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf8")
    return path


def with_bad(bad: list[tuple[dict[str, Any], str]]) -> list[dict[str, Any]]:
    return [*PAIRS[:8], *(PAIRS[0] | change for change, _ in bad), *PAIRS[8:]]


@pytest.mark.parametrize(("kind", "bad"), [("preference", BAD_PAIRS), ("kto", BAD_LABELS)])
def test_bad_rows_are_counted_and_kept_and_the_others_are_trained_on(
    tmp_path: Path, command: Command, kind: str, bad: list[tuple[dict[str, Any], str]]
) -> None:
    path = write(tmp_path, kind, rows=with_bad(bad), data={"max_bad_rows": len(bad)})
    assert command("train", path, "--run", tmp_path / "run", "--quiet") == 0

    counts = read_counts(tmp_path / "run")["training"]
    assert (counts.rows, counts.used, counts.left_out) == (16 + len(bad), 16, len(bad))
    records = read_json_lines(tmp_path / "run" / "quarantine.jsonl")
    assert [record["key"] for record in records] == [f"rows.jsonl:{number}" for number in range(9, 9 + len(bad))]
    assert [record["row"] for record in records] == [PAIRS[0] | change for change, _ in bad]
    assert all(record["reasons"][0].startswith(reason) for record, (_, reason) in zip(records, bad, strict=True))
    assert json.loads((tmp_path / "run" / "manifest.json").read_text("utf8"))["status"] == "done"


def test_too_many_bad_pairs_end_the_command_with_a_row_of_each_kind(
    tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, "preference", rows=with_bad(BAD_PAIRS))
    assert command("train", path, "--run", tmp_path / "run", "--quiet") == 2

    shown = " ".join(capsys.readouterr().err.split())
    assert "5 of 21 rows cannot be used, and data.max_bad_rows accepts 0.01 of all rows" in shown
    assert "2 x column worse is missing or empty (such as rows.jsonl:10)" in shown
    assert "1 x the answers in the columns answer and worse are equal (such as rows.jsonl:9)" in shown
    assert len(read_json_lines(tmp_path / "run" / "quarantine.jsonl")) == 5


def test_answers_of_one_kind_end_the_command(
    tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, "kto", rows=[row | {"liked": True} for row in PAIRS])
    assert command("train", path, "--run", tmp_path / "run", "--quiet") == 2

    assert (
        "all 16 training answers are good by the column liked, and good ones are compared with bad ones; add rows of "
        "the other kind"
    ) in " ".join(capsys.readouterr().err.split())


def test_a_stream_whose_first_answers_are_of_one_kind_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    streamed = {"source": {"type": "jsonl", "path": "rows.jsonl", "streaming": True}, "split": None}
    path = write(tmp_path, "kto", rows=[row | {"liked": 0} for row in PAIRS], data=streamed)
    with caplog.at_level(logging.WARNING):
        Model(path, quiet=True).train(run=tmp_path / "run")

    assert (
        "the first 16 answers of the stream are bad by the column liked, and good ones are compared with bad ones; "
        "training stops if the next ones are bad too"
    ) in caplog.messages


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


@pytest.mark.long
def test_a_resumed_run_computes_missing_references_again(tmp_path: Path) -> None:
    steps = {"max_steps": 4, "steps_per_checkpoint": 1, "learning_rate_scheduler": {"decay": "none"}}
    straight = write(tmp_path, "preference", rows=PAIRS, trainer=steps)
    Model(straight, quiet=True).train(run=tmp_path / "straight")
    path = write(tmp_path, "preference", rows=PAIRS, trainer=steps | {"max_steps": 2})
    Model(path, quiet=True).train(run=tmp_path / "run")
    (tmp_path / "run" / "references.jsonl").unlink()
    path = write(tmp_path, "preference", rows=PAIRS, trainer=steps)
    assert Model(path, quiet=True).train(run=tmp_path / "run").resumed_from == 2

    files = [tmp_path / name / "references.jsonl" for name in ("run", "straight")]
    assert files[0].read_bytes() == files[1].read_bytes()
    one, other = weights(tmp_path / "run"), weights(tmp_path / "straight")
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", ["preference", "kto"])
def test_a_resumed_run_computes_the_references_of_a_split_that_is_now_evaluated(tmp_path: Path, kind: str) -> None:
    steps = {"steps_per_checkpoint": 1, "learning_rate_scheduler": {"decay": "none"}}
    data = {"split": {"type": "random", "probabilities": [0.5, 0.25, 0.25]}}

    def train(run: str, **trainer: Any) -> dict[str, dict[str, float]]:
        path = write(tmp_path, kind, rows=PAIRS, data=data, trainer=steps | trainer)
        return Model(path, quiet=True).train(run=tmp_path / run).metrics

    train("run", max_steps=2, evaluate_test=False)
    resumed = train("run", max_steps=4, evaluate_test=True)
    straight = train("straight", max_steps=4, evaluate_test=True)
    assert resumed["test"] == straight["test"]
    known = [(tmp_path / name / "references.jsonl").read_bytes() for name in ("run", "straight")]
    assert known[0] == known[1]
    assert json.loads(known[0].splitlines()[0]) == {"steps": "all", "splits": ["test", "validation"]}


@pytest.mark.long
def test_a_resumed_run_balances_the_same_labels(tmp_path: Path) -> None:
    steps = {"max_steps": 4, "steps_per_checkpoint": 1, "learning_rate_scheduler": {"decay": "none"}}
    steps |= {"undesirable_weight": "auto"}
    straight = write(tmp_path, "kto", rows=PAIRS, trainer=steps)
    Model(straight, quiet=True).train(run=tmp_path / "straight")
    path = write(tmp_path, "kto", rows=PAIRS, trainer=steps | {"max_steps": 2})
    Model(path, quiet=True).train(run=tmp_path / "run")
    path = write(tmp_path, "kto", rows=PAIRS, trainer=steps)
    assert Model(path, quiet=True).train(run=tmp_path / "run").resumed_from == 2

    one, other = weights(tmp_path / "run"), weights(tmp_path / "straight")
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.long
def test_an_adapter_that_was_the_reference_and_is_gone_is_named(tmp_path: Path) -> None:
    Model(write(tmp_path, "preference", rows=PAIRS), quiet=True).train(run=tmp_path / "base")
    base = {"base_model": str(tmp_path / "base" / "model")}
    steps = {"steps_per_checkpoint": 1, "learning_rate_scheduler": {"decay": "none"}}

    def train(run: str, **changes: Any) -> None:
        path = write(tmp_path, "preference", rows=PAIRS, **changes)
        config = yaml.safe_load(path.read_text("utf8"))
        path.write_text(yaml.safe_dump({**config, **base}), encoding="utf8")
        Model(path, quiet=True).train(run=tmp_path / run)

    train("first", adapter={"type": "lora"})
    saved = tmp_path / "first" / "model"
    adapter = {"type": "lora", "pretrained_adapter_weights": str(saved)}
    train("run", adapter=adapter, trainer=steps)
    shutil.rmtree(saved)
    with pytest.raises(PartitaError) as caught:
        train("run", adapter=adapter, trainer=steps | {"max_steps": 4})
    assert f"adapter.pretrained_adapter_weights: there is no folder {saved}" in str(caught.value)
