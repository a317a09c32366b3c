"""Tests of streamed training rows in a short run."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from partita import Model
from partita.data.preview import make_report, preview
from partita.runs.directory import RunDirectory
from partita.training.notes import note_waits
from partita.training.plan import plan_of_file
from partita_schema.errors import DataError, ResumeError
from partita_schema.load import load_config

from ..json_lines import log_of, write_json_lines

TRAINER = {
    "learning_rate": 0.002,
    "batch_size": 8,
    "effective_batch_size": 8,
    "epochs": None,
    "max_steps": 10,
    "evaluate_generated": False,
    "evaluate_test": False,
    "steps_per_checkpoint": 3,
    "evaluations_per_epoch": 1,
}


def write_shards(folder: Path, rows: list[dict[str, Any]], *, shards: int, name: str = "part") -> str:
    """Distribute rows over files; return their glob."""
    for shard in range(shards):
        lines = [json.dumps(row) + "\n" for row in rows[shard::shards]]
        (folder / f"{name}-{shard}.jsonl").write_text("".join(lines), encoding="utf8")
    return str(folder / f"{name}-*.jsonl")


def config(colours: Any, source: Any, *, data: dict[str, Any] | None = None, **trainer: Any) -> Any:
    """Return a configuration that streams the files of a glob, or the sources in `data`."""
    labels = {"name": "colour", "type": "category", "decoder": {"labels": ["red", "blue", "green"]}}
    result = colours.config(
        trainer={**TRAINER, **trainer}, output_features=[labels, {"name": "number", "type": "number"}]
    )
    named = {"source": {"type": "jsonl", "path": source, "streaming": True}} if source is not None else {}
    result["data"] = {**named, "batching": {"type": "bucket"}, **(data or {})}
    return result


def json_of(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def test_a_stream_is_trained_validated_and_recorded(
    colours: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_shards(tmp_path, colours.rows(80), shards=3)
    write_json_lines(tmp_path / "validation.jsonl", colours.rows(20, seed=9))
    with (tmp_path / "part-1.jsonl").open("a") as file:
        file.write("{ broken\n")
    data = {"validation": str(tmp_path / "validation.jsonl"), "max_bad_rows": 1}

    with caplog.at_level("INFO", logger="partita"):
        result = Model(config(colours, source, data=data), quiet=True).train(run=tmp_path / "run")

    manifest = json_of(tmp_path / "run" / "manifest.json")
    assert sum(line["rows"] for line in log_of(tmp_path / "run")) == 80
    assert manifest["data"]["training"]["rows"] is None
    assert manifest["data"]["validation"]["rows"] == 20
    assert manifest["ledger"] == {"training": 1, "validation": 0}
    assert json_of(tmp_path / "run" / "ledger.json")["splits"]["training"]["used"] == 80
    [kept] = (tmp_path / "run" / "quarantine.jsonl").read_text().splitlines()
    assert json.loads(kept)["key"] == "part-1.jsonl:28"
    assert result.metrics["validation"]["loss"] > 0
    assert (manifest["batches"]["rows"], manifest["steps"]) == (80, 10)
    assert 0 < manifest["waits"]["waited_seconds"] < manifest["waits"]["seconds"]
    assert "a stream of 3 shards in 1 shard group; its first 80 rows: " in caplog.text
    assert "training: 1 of 81 rows left out" in caplog.text


@pytest.mark.parametrize("kind", ["bucket", "token_budget", "pack", "auto"])
@pytest.mark.long
def test_a_resumed_stream_equals_an_uninterrupted_one(
    colours: Any, tmp_path: Path, train_killed: Any, kind: str
) -> None:
    source = write_shards(tmp_path, colours.rows(90), shards=4)
    data = {"batching": {"type": kind, **({} if kind == "auto" else {"window": 32})}}
    size = {"batch_size": "auto", "effective_batch_size": 16}
    written = config(colours, source, data=data, max_steps=14, **size)
    written["preprocessing"] = {"global_max_sequence_length": 60}
    Model(written, quiet=True).train(run=tmp_path / "straight")
    train_killed(Model(written, quiet=True), tmp_path / "parts", after=8)

    result = Model(written, quiet=True).train(run=tmp_path / "parts")

    assert result.resumed_from == 6
    straight, parts = log_of(tmp_path / "straight"), log_of(tmp_path / "parts")
    assert parts == straight
    assert {line["epoch"] for line in straight} >= {0.0, 1.0}, "the stream has restarted"
    assert json_of(tmp_path / "parts" / "ledger.json") == json_of(tmp_path / "straight" / "ledger.json")


def test_streams_are_mixed_by_their_weights(colours: Any, tmp_path: Path) -> None:
    rows = colours.rows(120)
    mix = [
        {
            "name": name,
            "weight": weight,
            "source": {"type": "jsonl", "path": write_shards(tmp_path, part, shards=2, name=name), "streaming": True},
        }
        for name, weight, part in (("many", 3, rows[:90]), ("few", 1, rows[90:]))
    ]

    Model(config(colours, None, data={"mix": mix, "batching": {"type": "fixed", "shuffle": False}}), quiet=True).train(
        run=tmp_path / "run"
    )

    sources = json_of(tmp_path / "run" / "manifest.json")["sources"]
    assert {name: counts["rows"] for name, counts in sources.items()} == {"many": 60, "few": 20}


def test_a_dataset_argument_replaces_a_stream(colours: Any, tmp_path: Path) -> None:
    source = write_shards(tmp_path, colours.rows(80), shards=2)
    other = write_shards(tmp_path, colours.rows(40, seed=5), shards=1, name="other")
    written = config(colours, source, max_steps=5)

    Model(written, quiet=True).train(other, run=tmp_path / "streamed")
    Model(written, quiet=True).train(colours.rows(100, seed=5), run=tmp_path / "indexed")

    data = {name: json_of(tmp_path / name / "manifest.json")["data"] for name in ("streamed", "indexed")}
    assert data["streamed"]["training"]["rows"] is None
    assert list(data["streamed"]) == ["training"]
    assert (data["indexed"]["training"]["rows"], data["indexed"]["validation"]["rows"]) == (90, 5)
    with pytest.raises(ResumeError, match=r"is finished, and it had other rows \(training\)"):
        Model(written, quiet=True).train(source, run=tmp_path / "streamed")


def test_a_finished_run_is_used_if_its_streamed_files_are_gone(
    colours: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written = config(colours, write_shards(tmp_path, colours.rows(80), shards=2), max_steps=5)
    steps = Model(written, quiet=True).train(run=tmp_path / "run").steps
    for shard in tmp_path.glob("*.jsonl"):
        shard.unlink()
    assert Model(written, quiet=True).train(run=tmp_path / "run").steps == steps
    assert "the rows are not compared with those of the finished run: data.source: " in caplog.text


def test_a_run_resumes_with_other_batching_if_configured(
    colours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_killed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    source = write_shards(tmp_path, colours.rows(80), shards=2)
    written = config(colours, source)
    run = tmp_path / "runs" / "run"
    train_killed(Model(written, quiet=True), run, after=5)
    written["data"] |= {"batching": {"type": "fixed"}}
    with pytest.raises(ResumeError, match=r"data\.batching\.type: bucket -> fixed"):
        Model(written, quiet=True).train(run=run)

    written["data"] |= {"resume": "fresh"}
    result = Model(written, quiet=True).train()

    assert result.run == Path("runs/run")
    assert result.resumed_from == 3
    assert "batching: bucket -> fixed" in caplog.text
    assert "As data.resume: fresh says, the run continues at the beginning of epoch 0" in caplog.text
    assert Counter(line["epoch"] for line in log_of(run)) == {0.0: 10}


def test_plan_and_preview_of_a_stream(colours: Any, tmp_path: Path) -> None:
    source = write_shards(tmp_path, colours.rows(80), shards=5)
    loaded = load_config(config(colours, source, effective_batch_size=16))

    plan = plan_of_file(loaded.config, folder=tmp_path).plan
    seen = preview(loaded.config, folder=tmp_path, count=2)

    assert (plan.rows, plan.steps_per_epoch, plan.steps) == (None, None, 10)
    assert (plan.shards, plan.shard_groups, plan.measured_rows, plan.batches_per_step) == (6, 2, 80, 2), (
        "one file of 5 is split in two"
    )
    assert (len(seen.rows), seen.streamed) == (2, True)


def test_sizes_are_found_for_a_stream(colours: Any, tmp_path: Path) -> None:
    source = write_shards(tmp_path, colours.rows(80), shards=2)
    changes = {"preprocessing": {"global_max_sequence_length": 60}}
    sizes = Model(config(colours, source, batch_size="auto") | changes, quiet=True).tune(fresh=True)

    assert sizes.training is not None
    assert sizes.training.prompt_tokens == 60, "later rows may be longer than the first ones"


def test_a_stream_without_shuffling_is_read_in_order(colours: Any, tmp_path: Path) -> None:
    source = write_shards(tmp_path, colours.rows(12), shards=3)
    data = {"batching": {"type": "fixed", "shuffle": False}}
    seen = preview(load_config(config(colours, source, data=data)).config, folder=tmp_path, count=12)

    assert [row.key for row in seen.rows] == [f"part-{shard}.jsonl:{row}" for shard in range(3) for row in range(1, 5)]


def test_the_first_rows_may_be_longer_than_a_token_budget(colours: Any, tmp_path: Path) -> None:
    rows = colours.rows(40)
    rows[3]["text"] = rows[30]["text"] = "I see 4 balls and they are green " * 3
    data = {"batching": {"type": "token_budget", "max_tokens": 30, "window": 20}, "max_bad_rows": 2}
    source = write_shards(tmp_path, rows, shards=1)

    Model(config(colours, source, data=data, batch_size="auto", max_steps=5), quiet=True).train(run=tmp_path / "run")

    reasons = json_of(tmp_path / "run" / "ledger.json")["splits"]["training"]["reasons"]
    assert set(reasons) == {"more than the 30 tokens of data.batching.max_tokens"}

    data["batching"] |= {"max_tokens": 5}  # type: ignore[operator]
    with pytest.raises(
        DataError, match=r"none of the stream's first 40 rows has at most the 5 tokens of .*at least 1\d "
    ):
        Model(config(colours, source, data=data, batch_size="auto"), quiet=True).train(run=tmp_path / "small")


@pytest.mark.long
def test_the_rows_of_a_range_test_of_the_learning_rate_are_not_counted(colours: Any, tmp_path: Path) -> None:
    source = write_shards(tmp_path, colours.rows(40), shards=1)
    with (tmp_path / "part-0.jsonl").open("a") as file:
        file.write("{ broken\n")
    ledgers = []
    for rate in (0.002, "auto"):
        run = tmp_path / f"run-{rate}"
        changes = {"learning_rate": rate, "max_steps": 10}
        Model(config(colours, source, data={"max_bad_rows": 1}, **changes), quiet=True).train(run=run)
        ledgers.append((json_of(run / "ledger.json"), (run / "quarantine.jsonl").read_text("utf8").count("\n")))
    assert ledgers[0] == ledgers[1]
    assert (ledgers[0][0]["splits"]["training"]["rows"], ledgers[0][1]) == (41, 1)


def test_a_new_model_keeps_its_tokenizer_if_the_data_change(
    colours: Any, tmp_path: Path, train_killed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_shards(tmp_path, colours.rows(80), shards=2)
    written = config(colours, source, data={"resume": "fresh"})
    run = tmp_path / "run"
    train_killed(Model(written, quiet=True), run, after=5)
    write_shards(tmp_path, [row | {"text": f"new words {row['text']}"} for row in colours.rows(80)], shards=2)

    result = Model(written, quiet=True).train(run=run)

    assert result.resumed_from == 3
    assert "stream: changed" in caplog.text
    assert "tokenizer: " not in caplog.text


def test_the_ledger_of_a_dataset_argument_that_replaces_a_stream(colours: Any, tmp_path: Path) -> None:
    source = write_shards(tmp_path, colours.rows(20), shards=1)
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "x"}\n{ broken\n' + json.dumps(colours.rows(1)[0]) + "\n")
    loaded = load_config(config(colours, source))

    report = make_report(loaded.config, folder=tmp_path, dataset=str(other))

    assert (report.splits["training"].used, report.splits["training"].left_out) == (1, 2)


def test_a_stream_without_a_column_is_refused(colours: Any, tmp_path: Path) -> None:
    rows = [{"words": row["text"], **row} for row in colours.rows(20)]
    for row in rows:
        del row["text"]

    with pytest.raises(DataError, match="has no column 'text', which input"):
        Model(config(colours, write_shards(tmp_path, rows, shards=1)), quiet=True).train(run=tmp_path / "run")


def test_an_empty_stream_is_refused(colours: Any, tmp_path: Path) -> None:
    source = write_shards(tmp_path, [], shards=2)

    with pytest.raises(DataError, match=r"part-0\.jsonl, part-1\.jsonl has no rows"):
        Model(config(colours, source), quiet=True).train(run=tmp_path / "run")


@pytest.mark.parametrize("accepted", [0.01, 0.0, 5])
def test_too_many_bad_rows_fail_a_short_run(colours: Any, tmp_path: Path, accepted: float) -> None:
    source = write_shards(tmp_path, colours.rows(80), shards=1)
    with (tmp_path / "part-0.jsonl").open("a") as file:
        file.write("{ broken\n" * 40)

    with pytest.raises(DataError, match=r"40 of 120 rows cannot be used, and data.max_bad_rows accepts"):
        Model(config(colours, source, data={"max_bad_rows": accepted}, max_steps=3), quiet=True).train(
            run=tmp_path / "run"
        )
    assert json_of(tmp_path / "run" / "manifest.json")["status"] == "failed"


@pytest.mark.long
def test_sizes_are_searched_again_for_another_batching_type(colours: Any, tmp_path: Path, train_killed: Any) -> None:
    source = write_shards(tmp_path, colours.rows(80), shards=1)
    written = config(colours, source, data={"batching": {"type": "pack", "max_tokens": 70}}, batch_size="auto")
    train_killed(Model(written, quiet=True), tmp_path / "run", after=5)
    assert json_of(tmp_path / "run" / "manifest.json")["batch_sizes"]["training"]["max_tokens"] == 70

    written["data"] |= {"batching": {"type": "token_budget", "max_tokens": 200}, "resume": "restart_epoch"}
    Model(written, quiet=True).train(run=tmp_path / "run")

    assert json_of(tmp_path / "run" / "manifest.json")["batch_sizes"]["training"]["max_tokens"] == 200
    used = [line["tokens"] / (1 - line["padding"]) for line in log_of(tmp_path / "run")[3:]]
    assert 100 < max(used) <= 200.5


def test_waiting_for_rows_is_reported(tmp_path: Path, colours: Any, caplog: pytest.LogCaptureFixture) -> None:
    directory = RunDirectory(tmp_path, config=load_config(colours.config()).config)
    slow = {"seconds": 40.0, "waited_seconds": 20.0, "wait_share": 0.5}

    note_waits(directory, slow, workers=0, streamed=True)
    note_waits(directory, slow, workers=4, streamed=True)
    note_waits(directory, slow, workers=0, streamed=False)
    note_waits(directory, slow | {"waited_seconds": 9.0}, workers=0, streamed=True)

    message = "50 % of the time was spent waiting for rows: write data.loader.workers: {}, or more"
    assert caplog.messages == [message.format(2), message.format(8)]
