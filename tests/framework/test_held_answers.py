"""Tests of constrained JSON and scored labels from configuration to table, on new models."""

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from jsonschema import Draft202012Validator

from partita import Model, ModelError, ResumeError
from partita.generation.journal import Journal

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue", "green"]}, "count": {"type": "integer", "maximum": 99}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
JSON = {"name": "value", "type": "json", "decoder": {"constrain": True, "json_schema": SCHEMA}}
LABEL = {"name": "colour", "type": "category", "decoder": {"scoring": True}}
BYTES = {"tokenizer": "byte", "context_length": 160}
UNTRAINED = {"trainer": {"type": "none", "batch_size": 5}}


def constrained(colours: Any, *outputs: dict[str, Any], **sections: Any) -> Model:
    """Return an untrained model, which generates random text."""
    outputs = outputs or (JSON,)
    sections = {"generation": {"max_new_tokens": 120}} | sections
    return Model(colours.config(base_model=BYTES, output_features=list(outputs), **UNTRAINED, **sections), quiet=True)


@pytest.fixture(scope="module")
def scoring(colours: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a model trained on colours, with its run."""
    learns = {"epochs": 6, "learning_rate": 0.006}
    config = colours.config(trainer=learns, output_features=[LABEL])
    del config["generation"]
    model = Model(config, quiet=True)
    return model, model.train(run=tmp_path_factory.mktemp("scoring") / "run")


def halve(journal: Path) -> int:
    """Remove the second half of a journal's records and leave a partial line; return the number of records."""
    lines = journal.read_bytes().splitlines(keepends=True)
    kept = len(lines) // 2
    journal.write_bytes(b"".join(lines[:kept]) + lines[kept][:20])
    return len(lines) - 1


def test_every_answer_of_an_untrained_model_follows_the_schema(
    colours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for generation in ({"max_new_tokens": 120}, {"max_new_tokens": 120, "do_sample": True, "temperature": 2.0}):
        result = constrained(colours, generation=generation).predict(colours.rows(20))
        for row in result:
            assert (row["status"], row["error"], row["finish_reason"]) == ("ok", None, "stop")
            assert row["value"] == json.loads(row["value_raw"])
            Draft202012Validator(SCHEMA).validate(row["value"])


def test_an_answer_cut_by_its_limit_is_reported_as_unreadable(
    colours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = constrained(colours, generation={"max_new_tokens": 9}).predict(colours.rows(3))
    for row in result:
        assert (row["value"], row["finish_reason"], row["tokens"]) == (None, "length", 9)
        assert "the JSON value is cut off" in row["error"]
    assert result.stats.unreadable == 3


def test_an_untrained_model_answers_all_of_several_outputs(
    colours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    colour = {"name": "colour", "type": "category", "decoder": {"labels": ["red", "blue", "green"]}}
    number = {"name": "number", "type": "category", "decoder": {"labels": ["1", "2"]}}
    for row in constrained(colours, colour, JSON, number).predict(colours.rows(12)):
        assert row["error"] is None
        assert row["colour"] in ("red", "blue", "green")
        assert row["number"] in ("1", "2")
        Draft202012Validator(SCHEMA).validate(row["value"])


def test_a_killed_job_with_constrained_answers_resumes(
    colours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = colours.rows(20)
    sampled = {"max_new_tokens": 120, "do_sample": True}
    straight = constrained(colours, generation=sampled).predict(rows, tmp_path / "straight.jsonl")
    begun = constrained(colours, generation=sampled)
    begun.predict(rows, tmp_path / "killed.jsonl")
    journal = next(path for path in tmp_path.rglob("killed-*.jsonl"))
    assert halve(journal) == 20
    again = constrained(colours, generation=sampled).predict(rows, tmp_path / "killed.jsonl", batch_size=3)
    assert 0 < again.stats.resumed < 20
    assert [row["value_raw"] for row in again] == [row["value_raw"] for row in straight]


def test_free_text_is_not_constrained(colours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    held = constrained(colours).generate(["3 red balls"], max_new_tokens=12)
    free = constrained(colours, {"name": "value", "type": "text"}).generate(["3 red balls"], max_new_tokens=12)
    assert held == free
    assert not held[0].startswith("{")


def test_constraints_without_slots_are_refused_before_the_first_row(
    colours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = colours.config(output_features=[LABEL], adapter={"type": "prefix_tuning"}, trainer={"max_steps": 1})
    del config["generation"]
    with pytest.raises(ModelError) as caught:
        Model(config, quiet=True).train(run=tmp_path / "run")
    assert str(caught.value) == (
        "decoder.scoring needs continuous batching, which is not available here: the virtual tokens of "
        "prefix_tuning; remove decoder.scoring"
    )


def test_scored_labels_are_correct_with_probabilities_that_add_up_to_one(scoring: Any, colours: Any) -> None:
    model, result = scoring
    assert result.metrics["test"]["colour.accuracy"] >= 0.9
    rows = colours.rows(30)
    actual = model.predict([{"text": row["text"]} for row in rows])
    assert sum(row["colour"] == wanted["colour"] for row, wanted in zip(actual, rows, strict=True)) >= 27
    for row in actual:
        shares = row["colour_probabilities"]
        assert set(shares) == {"red", "blue", "green"}
        assert math.isclose(sum(shares.values()), 1)
        assert row["colour_probability"] == shares[row["colour"]] == max(shares.values())
        assert (row["colour_raw"], row["tokens"], row["finish_reason"]) == (row["colour"], 0, "stop")
    columns = ("key", "text", "colour", "colour_raw", "colour_probability", "colour_probabilities", "status")
    assert actual.columns[: len(columns)] == columns
    assert model.evaluate(rows)["colour"]["accuracy"] >= 0.9


def test_scored_tables_are_written_with_types(scoring: Any, colours: Any, tmp_path: Path) -> None:
    model, _ = scoring
    rows = [{"text": "2 blue balls"}, {"text": None}]
    model.predict(rows, tmp_path / "scored.parquet")
    table = pd.read_parquet(tmp_path / "scored.parquet")
    assert table["colour_probability"].dtype == float
    assert json.loads(table["colour_probabilities"][0])["blue"] == table["colour_probability"][0]
    assert table["colour_probabilities"].isna().tolist() == table["colour_probability"].isna().tolist() == [False, True]


def test_a_killed_job_with_scored_labels_resumes(scoring: Any, colours: Any, tmp_path: Path) -> None:
    model, _ = scoring
    rows = colours.rows(20, seed=8)
    straight = model.predict(rows, tmp_path / "straight.jsonl")
    model.predict(rows, tmp_path / "killed.jsonl")
    journal = next(path for path in (model.run / "journal").glob("killed-*.jsonl"))
    halve(journal)
    again = model.predict(rows, tmp_path / "killed.jsonl", batch_size=3)
    assert 0 < again.stats.resumed < 20
    for one, other in zip(again, straight, strict=True):
        assert one["colour"] == other["colour"]
        assert one["colour_probabilities"] == pytest.approx(other["colour_probabilities"], abs=1e-5)


def test_a_job_is_not_resumed_with_other_decoders(scoring: Any, colours: Any, tmp_path: Path) -> None:
    model, result = scoring
    rows = colours.rows(4)
    model.predict(rows, tmp_path / "answers.jsonl")
    config = colours.config(trainer={"epochs": 6, "learning_rate": 0.006}, output_features=[{**LABEL, "decoder": {}}])
    del config["generation"]
    generating = Model(config, quiet=True)
    generating._backend.context.run = result.run
    with pytest.raises(ResumeError, match=r"output_features changed"):
        generating.predict(rows, tmp_path / "answers.jsonl")
    assert "colour_probability" not in generating.predict(rows, tmp_path / "others.jsonl").columns


def test_scored_rows_are_written_when_they_are_ready(scoring: Any, colours: Any, tmp_path: Path) -> None:
    model, _ = scoring
    seen: list[int] = []
    original = Journal.append

    def counted(self: Any, records: Any) -> None:
        seen.append(len(records))
        original(self, records)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "append", counted)
        model.predict(colours.rows(60, seed=9), tmp_path / "flowing.jsonl", batch_size=6)
    assert sum(seen) == 60
    assert max(seen) <= 36
