"""Evaluations record the result of each row in the run directory: for every type of output, and for dialogues."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from partita import Model
from partita.backends.context import RunContext
from partita.backends.local import LocalBackend
from partita.data.ledger import Ledger
from partita.data.sources.sources import open_rows
from partita.distributed.thread_group import ThreadGroup
from partita.pipeline.batch_sizes import BatchSizeTuner
from partita.pipeline.eval_dataset import build_eval_dataset
from partita.pipeline.evaluate import LocalEvaluator, evaluate_dataset
from partita.pipeline.row_recorder import MAX_PROMPT, MAX_SCORES, RecordedEvaluation, best_scores
from partita.report.evaluation import SplitResults, read_evaluation
from partita.report.measures import measures_of
from partita.runs.row_results import EvaluationHeader, RecordedRow, RowSpool, evaluation_path, read_header
from partita_schema.errors import WriteError
from partita_schema.load import load_config

from ..encoder_decoders import save_encoder_decoder
from ..json_lines import write_json_lines
from . import test_dialogues, test_embeddings, test_pair_scores, test_tags, test_turn_outputs
from .conftest import Killed
from .recorded_results import read_rows

ROWS = 24
TEXT = {"type": "scratch", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "context_length": 192}
MODEL = TEXT | {"tokenizer": "word", "vocab_size": 64}
LABELS = ["blue", "green", "red"]


def make_rows(count: int) -> list[dict[str, Any]]:
    """Return rows with a column for each simple type of output."""
    rows = []
    for number in range(count):
        label = LABELS[number % 3]
        rows.append(
            {
                "text": f"{number % 4} {label} balls",
                "label": label,
                "count": number % 4,
                "reply": f"they are {label}",
                "object": {"label": label, "count": number % 4},
                "pipeline": [label, "red"] if label != "red" else ["red"],
            }
        )
    return rows


def simple(*outputs: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "base_model": MODEL,
        "input_features": [{"name": "text", "type": "text"}],
        "output_features": list(outputs),
        "generation": {"max_new_tokens": 8},
        "trainer": {"type": "finetune", "max_steps": 12, "batch_size": 8, "learning_rate": 0.01},
    } | changes


CATEGORY = {"name": "label", "type": "category", "decoder": {"labels": LABELS}}
BERT = {"architecture": "bert"}
CASES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "text": (simple({"name": "reply", "type": "text"}), make_rows(ROWS)),
    "category": (simple(CATEGORY), make_rows(ROWS)),
    "scored category": (
        simple(CATEGORY | {"decoder": {"labels": LABELS, "scoring": True}}, generation={}),
        make_rows(ROWS),
    ),
    "number": (simple({"name": "count", "type": "number"}), make_rows(ROWS)),
    "json": (simple({"name": "object", "type": "json"}, generation={"max_new_tokens": 24}), make_rows(ROWS)),
    "set": (simple({"name": "pipeline", "type": "set", "decoder": {"labels": LABELS}}), make_rows(ROWS)),
    "several outputs": (
        simple(CATEGORY, {"name": "count", "type": "number"}, generation={"max_new_tokens": 24}),
        make_rows(ROWS),
    ),
    "head of a category": (simple(CATEGORY, base_model=MODEL | BERT, generation={}), make_rows(ROWS)),
    "head of a set": (
        simple(
            {"name": "pipeline", "type": "set", "decoder": {"labels": LABELS}}, base_model=MODEL | BERT, generation={}
        ),
        make_rows(ROWS),
    ),
    "head of a number": (
        simple({"name": "count", "type": "number"}, base_model=MODEL | BERT, generation={}),
        make_rows(ROWS),
    ),
    "tags": (test_tags.settings(), test_tags.make_rows(ROWS)),
    "scores of pairs": (test_pair_scores.settings(), test_pair_scores.make_rows(ROWS // 4)),
    "dialogues": (test_dialogues.make_config(), test_dialogues.make_dialogues(ROWS)),
    "turns of several outputs": (test_turn_outputs.make_config("together"), test_turn_outputs.make_dialogues(ROWS)),
    "turns answered in sequence": (
        test_turn_outputs.make_config("in_sequence"),
        test_turn_outputs.make_dialogues(ROWS),
    ),
}


def train(name: str, run: Path, **trainer: Any) -> tuple[Model, list[dict[str, Any]]]:
    """Train the configuration of a case a little, and return the model and the rows that it is evaluated on."""
    config, rows = CASES[name]
    write_json_lines(run.parent / "rows.jsonl", rows)
    write_json_lines(run.parent / "test.jsonl", rows)
    data = {**config.get("data", {}), "source": str(run.parent / "rows.jsonl"), "test": str(run.parent / "test.jsonl")}
    config = config | {"data": data, "trainer": config["trainer"] | {"max_steps": 8} | trainer}
    config["trainer"].pop("epochs", None)
    model = Model(config, quiet=True)
    model.train(run=run)
    return model, rows


def read(run: Path, split: str = "test") -> tuple[EvaluationHeader, list[RecordedRow]]:
    path = evaluation_path(run, split)
    return read_header(path), read_rows(path)


def metrics_of(run: Path) -> dict[str, Any]:
    metrics: dict[str, Any] = json.loads((run / "manifest.json").read_text(encoding="utf8"))["metrics"]
    return metrics


def check_losses(rows: list[RecordedRow], loss: float) -> None:
    """Check that the mean over all loss tokens is the loss of the evaluation."""
    pairs = [(row.loss, row.tokens) for row in rows]
    assert all(loss is not None and tokens for loss, tokens in pairs)
    total = math.fsum(loss * tokens for loss, tokens in pairs if loss is not None and tokens is not None)
    assert total / sum(tokens or 0 for _, tokens in pairs) == pytest.approx(loss, rel=1e-6)


def check_measures(run: Path, metrics: dict[str, Any]) -> None:
    """Check that the report computes the recorded metrics from the rows, and resamples them."""
    evaluation = read_evaluation(evaluation_path(run, "test"))
    known = [name for name, value in metrics.items() if value is not None]  # no error without any number
    names = [name for name in known if name.rpartition(".")[2] not in ("n", "queries")]
    measures = {one.metric: one for one in measures_of(SplitResults("test", evaluation)).measures}
    assert measures.keys() == {name for name in names if name != "exact_match" or len(evaluation.outputs) > 1}
    for name, measure in measures.items():
        assert measure.result.value == pytest.approx(metrics[name], rel=1e-4, abs=1e-9), name
        assert measure.result.low <= measure.result.high, name


RIGHT = {"category": "accuracy", "score": None}
"""Metric that is the share of right values, where that is not exact_match."""


@pytest.mark.parametrize("name", CASES)
def test_the_results_of_all_rows_are_recorded_and_agree_with_the_metrics(tmp_path: Path, name: str) -> None:
    model, data = train(name, tmp_path / "run")
    header, rows = read(tmp_path / "run")
    metrics = metrics_of(tmp_path / "run")["test"]
    assert header.metrics == metrics
    best = json.loads((tmp_path / "run" / "manifest.json").read_text(encoding="utf8"))["best_step"]
    assert (header.split, header.model, header.answered, header.step) == ("test", "result", True, best or 8)
    assert (header.rows, header.split_rows) == (len(rows), len(rows))
    assert header.outputs == {output.name: output.type for output in model.config.output_features}
    assert len({row.key for row in rows}) == len(rows) == metrics["n"]
    check_losses(rows, metrics["loss"])
    check_measures(tmp_path / "run", metrics)
    for output, kind in header.outputs.items():
        right = [row.outputs[output].right for row in rows]
        metric = RIGHT.get(kind, "exact_match")
        if metric is not None:
            assert sum(map(bool, right)) / len(rows) == pytest.approx(metrics[f"{output}.{metric}"])
        assert all(isinstance(value, bool) for value in right)
        unreadable = [row for row in rows if row.outputs[output].value is None]
        assert len(unreadable) / len(rows) == pytest.approx(metrics[f"{output}.invalid"])
        if name in ("scored category", "head of a category"):
            for row in rows:
                scores = row.outputs[output].scores
                assert scores is not None
                assert math.fsum(map(math.exp, scores.values())) == pytest.approx(1, abs=1e-4)
                assert next(iter(scores)) == row.outputs[output].value
    if "messages" not in data[0]:
        assert [row.key for row in rows] == [f"test.jsonl:{number}" for number in range(1, len(data) + 1)]
        assert [row.prompt.split("\n")[0].removeprefix("query: ") for row in rows] == [
            row.get("text", row.get("query")) for row in data
        ]
        for output in header.outputs:
            if name != "tags":
                assert [row.outputs[output].reference for row in rows] == [row[output] for row in data]


def test_a_row_has_the_answer_and_the_values_of_its_prediction(tmp_path: Path) -> None:
    model, data = train("category", tmp_path / "run", max_steps=40)
    _, rows = read(tmp_path / "run")
    predictions = list(model.predict(data))
    assert [row.outputs["label"].value for row in rows] == [row["label"] for row in predictions]
    assert [row.answer for row in rows] == [row["label_raw"] for row in predictions]
    assert [row.outputs["label"].right for row in rows] == [
        given["label"] == row["label"] for row, given in zip(predictions, data, strict=True)
    ]
    assert any(row.outputs["label"].right for row in rows)


def test_the_prompt_of_a_dialogue_is_the_last_question(tmp_path: Path) -> None:
    _, data = train("dialogues", tmp_path / "run")
    _, rows = read(tmp_path / "run")
    questions = [message["content"] for row in data for message in row["messages"] if message["role"] == "user"]
    answers = [message["content"] for row in data for message in row["messages"] if message["role"] == "assistant"]
    assert [row.prompt for row in rows] == questions
    assert [row.context for row in rows if row.key.endswith("#1")] == [""] * len(data)
    assert rows[1].context == f"user: {questions[0]}\nassistant: {answers[0]}"
    assert rows[1].key == "test.jsonl:1#2"
    assert [row.outputs["reply"].reference for row in rows] == answers
    assert rows[0].key == "test.jsonl:1#1"


def test_the_content_of_a_row_is_that_of_the_data_whatever_the_model_reads_of_it(tmp_path: Path) -> None:
    frame = pd.DataFrame([row | {"object": None, "pipeline": None} for row in make_rows(30)])
    frame.to_parquet(tmp_path / "test.parquet")
    contents = []
    for name, column in (("text", "text"), ("reply", "reply")):
        config = simple(CATEGORY, data={"test": str(tmp_path / "test.parquet")}, trainer={"type": "none"})
        config["input_features"] = [{"name": name, "type": "text", "column": column}]
        Model(config, quiet=True).train(frame.to_dict("records"), run=tmp_path / name)
        contents.append({row.key: row.content for row in read(tmp_path / name)[1]})
    assert contents[0] == contents[1]
    assert len(set(contents[0].values())) == len(contents[0].values()) - 30 + frame.drop_duplicates("text").shape[0]


def test_encoder_decoders_have_losses_of_rows(tmp_path: Path) -> None:
    folder = save_encoder_decoder(tmp_path / "model", "t5")
    config = simple({"name": "reply", "type": "text"}, base_model=str(folder), trainer={"type": "none"})
    Model(config, quiet=True).train(make_rows(100), run=tmp_path / "run")
    header, rows = read(tmp_path / "run", "validation")
    assert header.step == 0
    check_losses(rows, metrics_of(tmp_path / "run")["validation"]["loss"])


def test_documents_are_recorded_with_their_loss_and_their_beginning(tmp_path: Path) -> None:
    texts = [{"text": f"{number} " + "red balls and blue balls " * (number % 40)} for number in range(100)]
    config = simple({"name": "text", "type": "text"}, base_model=MODEL | {"context_length": 32})
    del config["input_features"]
    Model(config, quiet=True).train(texts, run=tmp_path / "run")
    header, rows = read(tmp_path / "run")
    assert not header.answered
    check_losses(rows, metrics_of(tmp_path / "run")["test"]["loss"])
    by_key = {row.key: row for row in rows}
    assert all((row.answer, row.outputs) == (None, {}) for row in rows)
    assert max(len(row.prompt) for row in rows) == MAX_PROMPT
    for number, text in enumerate(texts, start=1):
        if f"dataset:{number}" in by_key:
            assert text["text"].startswith(by_key[f"dataset:{number}"].prompt.removesuffix("..."))


def test_rows_of_embeddings_have_their_losses_and_the_ranks_of_their_positives(tmp_path: Path) -> None:
    config = test_embeddings.settings(trainer={"type": "finetune", "batch_size": 8, "max_steps": 2})
    Model(config | {"data": {}}, quiet=True).train(test_embeddings.make_rows(60), run=tmp_path / "run")
    header, rows = read(tmp_path / "run")
    assert (header.answered, header.rows) == (False, len(rows))
    assert {(row.tokens, row.answer) for row in rows} == {(1, None)}
    metrics = metrics_of(tmp_path / "run")["test"]
    check_losses(rows, metrics["loss"])
    check_measures(tmp_path / "run", metrics)
    ranks = [(row.outputs["vector"].of_row or {})["rank"] for row in rows]
    assert min(ranks) >= 1
    assert all(row.prompt for row in rows)


def test_the_fingerprint_is_that_of_the_rows_and_not_of_the_model(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "rows.jsonl", make_rows(60))
    headers = []
    for number, size in enumerate([32, 64]):
        data = {"source": str(tmp_path / "rows.jsonl")}
        config = simple(CATEGORY, base_model=MODEL | {"hidden_size": size}, data=data, trainer={"type": "none"})
        Model(config, quiet=True).train(run=tmp_path / f"run-{number}")
        headers.append(read(tmp_path / f"run-{number}")[0])
    assert headers[0].metrics != headers[1].metrics
    assert headers[0].fingerprint == headers[1].fingerprint
    model = Model.load(tmp_path / "run-0", quiet=True)
    rows = make_rows(6)
    fingerprints = []
    for order in (rows, rows[::-1], [{**rows[0], "count": 17}, *rows[1:]]):
        model.evaluate(order)
        fingerprints.append(read(tmp_path / "run-0", "dataset")[0].fingerprint)
    assert len({headers[0].fingerprint, *fingerprints}) == 4


def test_evaluate_records_the_rows_in_the_run_of_the_model(tmp_path: Path) -> None:
    train("category", tmp_path / "run")
    path = evaluation_path(tmp_path / "run", "test")
    during = path.read_bytes()
    path.unlink()
    model = Model.load(tmp_path / "run", quiet=True)
    model.evaluate()
    assert path.read_bytes() == during
    # A file of the caller has its own name, and never replaces a split of the run.
    write_json_lines(tmp_path / "new rows.jsonl", make_rows(3))
    model.evaluate(tmp_path / "new rows.jsonl")
    assert read(tmp_path / "run", "new_rows")[0].rows == 3
    (tmp_path / "other").mkdir()
    write_json_lines(tmp_path / "other" / "test.jsonl", make_rows(3))
    model.evaluate(tmp_path / "other" / "test.jsonl")
    assert read(tmp_path / "run", "test-dataset")[0].rows == 3
    assert path.read_bytes() == during


def test_an_evaluation_without_a_run_records_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_json_lines(tmp_path / "rows.jsonl", make_rows(60))
    model = Model(simple(CATEGORY, trainer={"type": "none"}, data={"source": "rows.jsonl"}), quiet=True)
    model.evaluate()
    model.save(tmp_path / "saved")
    Model.load(tmp_path / "saved", quiet=True).evaluate(make_rows(6))
    assert not list(tmp_path.rglob("evaluations"))


@pytest.mark.parametrize("generated", [True, False])
def test_an_evaluation_of_some_rows_is_recorded_until_all_are_evaluated(
    tmp_path: Path, train_killed: Any, generated: bool
) -> None:
    config = simple(CATEGORY, data={"split": {"type": "random", "probabilities": [0.5, 0.5, 0.0]}})
    config["trainer"] |= {"steps_per_evaluation": 3, "max_generated_rows": 5, "evaluate_generated": generated}
    write_json_lines(tmp_path / "rows.jsonl", make_rows(60))
    config["data"]["source"] = str(tmp_path / "rows.jsonl")
    train_killed(Model(config, quiet=True), tmp_path / "run", after=7)
    path = evaluation_path(tmp_path / "run", "validation")
    if generated:
        header, rows = read(tmp_path / "run", "validation")
        assert (header.rows, header.split_rows, header.step) == (5, 30, 6)
        assert len(rows) == 5
    else:
        assert not path.exists()
    Model(config, quiet=True).train(run=tmp_path / "run")
    header, rows = read(tmp_path / "run", "validation")
    assert (header.rows, header.split_rows, header.answered, len(rows)) == (30, 30, generated, 30)
    best = json.loads((tmp_path / "run" / "manifest.json").read_text(encoding="utf8"))["best_step"]
    assert header.step == best
    whole = path.read_bytes()
    longer = config | {"trainer": config["trainer"] | {"max_steps": 20}}
    train_killed(Model(longer, quiet=True), tmp_path / "run", after=17)
    assert path.read_bytes() == whole


def test_a_run_killed_while_it_writes_the_rows_has_no_file_and_writes_it_when_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train("head of a category", tmp_path / "straight", max_steps=2)
    lines = RowSpool._lines

    def some_then_die(spool: RowSpool, indices: Any) -> Any:
        yield next(iter(lines(spool, indices)))
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(RowSpool, "_lines", some_then_die)
        with pytest.raises(Killed):
            train("head of a category", tmp_path / "killed", max_steps=2)
    assert list((tmp_path / "killed" / "evaluations").iterdir()) == []
    train("head of a category", tmp_path / "killed", max_steps=2)
    for split in ("validation", "test"):
        whole, resumed = (evaluation_path(tmp_path / name, split) for name in ("straight", "killed"))
        assert resumed.read_bytes() == whole.read_bytes()


def test_results_that_cannot_be_written_lose_no_step(tmp_path: Path, train_killed: Any) -> None:
    config = simple(CATEGORY, data={"source": str(tmp_path / "rows.jsonl")})
    config["trainer"] |= {"steps_per_checkpoint": 6}
    write_json_lines(tmp_path / "rows.jsonl", make_rows(60))
    run = tmp_path / "run"
    train_killed(Model(config, quiet=True), run, after=7)
    (run / "evaluations").write_text("in the way", encoding="utf8")
    with pytest.raises(WriteError) as caught:
        Model(config, quiet=True).train(run=run)
    assert str(caught.value) == (f"files in {run} cannot be written: File exists; fix that and rerun the same command")
    steps = (run / "log.jsonl").read_bytes()
    (run / "evaluations").unlink()
    result = Model(config, quiet=True).train(run=run)
    assert (result.resumed_from, result.steps) == (12, 12)
    assert (run / "log.jsonl").read_bytes() == steps
    header, rows = read(run)
    assert header.rows == len(rows) == header.metrics["n"]
    (run / "evaluations").rename(run / "aside")
    (run / "evaluations").write_text("in the way", encoding="utf8")
    with pytest.raises(WriteError, match="cannot be written: File exists; fix that"):
        Model.load(run, quiet=True).evaluate()


def test_two_ranks_record_what_one_process_records(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "rows.jsonl", make_rows(20))
    config = simple(CATEGORY, trainer={"type": "none", "batch_size": 4}, data={"source": str(tmp_path / "rows.jsonl")})

    def build() -> Any:
        return LocalBackend(RunContext(load_config(config), quiet=True)).pipeline()

    def record(group: Any, pipeline: Any, folder: Path) -> None:
        dataset = build_eval_dataset(
            pipeline, open_rows(make_rows(20), folder=Path()), split="test", ledger=Ledger(None, max_bad_rows=0)
        )
        evaluator = LocalEvaluator(pipeline, BatchSizeTuner(pipeline, process_group=group))
        evaluate_dataset(evaluator, dataset, record=RecordedEvaluation(folder, "test"))

    record(ThreadGroup.of(1)[0], build(), tmp_path / "one")
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(record, ThreadGroup.of(2), [build(), build()], [tmp_path / "two"] * 2))
    (header, rows), (expected_header, expected) = read(tmp_path / "two"), read(tmp_path / "one")
    assert header.fingerprint == expected_header.fingerprint
    assert [(row.key, row.answer, row.outputs, row.tokens) for row in rows] == [
        (row.key, row.answer, row.outputs, row.tokens) for row in expected
    ]
    assert [row.loss for row in rows] == pytest.approx([row.loss for row in expected], rel=1e-5)


def test_the_best_labels_and_those_of_the_reference_keep_their_scores() -> None:
    scores = {f"l{number}": -0.1234567 * number for number in range(30)}
    best = best_scores(scores, known=("l3", "l29"))
    assert list(best) == [*(f"l{number}" for number in range(MAX_SCORES)), "l29"]
    assert best["l29"] == -3.5802443
