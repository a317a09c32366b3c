import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter
from typer.testing import CliRunner

from partita.cli.main import app
from partita.data.batching.policies import build_policy
from partita.training.data_plan import DataPlan, plan_of
from partita.training.plan import plan_of_file
from partita_schema.errors import DataError
from partita_schema.load import load_config
from partita_schema.sections.batching import Batching

pytestmark = pytest.mark.usefixtures("no_log")

Make = Callable[..., Any]
LENGTHS = np.arange(1, 101, dtype=np.int32)


def describe(written: dict[str, Any], *, max_tokens: int | None = None, **changes: Any) -> DataPlan:
    batching = TypeAdapter(Batching).validate_python(written)
    policy = build_policy(batching, batch_size=4, max_tokens=max_tokens)
    given: dict[str, Any] = {"batches_per_step": 1, "steps_per_epoch": 25, "steps": 75}
    return plan_of(LENGTHS, batching=batching, policy=policy, **(given | changes))


def test_rows_and_batches_are_reported_in_two_lines() -> None:
    assert describe({"type": "bucket"}).lines() == [
        "100 training rows, 5,050 tokens, longest 100; 25 steps an epoch, 75 in all",
        "bucket: 4 rows a batch, windows of 2,048 rows, 1 batch a step, 2.9 % padding expected",
    ]


def test_rows_that_drop_last_leaves_out_are_named() -> None:
    plan = describe({"type": "bucket", "length_spread": 1, "drop_last": True})
    assert plan.left_out == 1, "no two rows have the same length"
    line = "0.0 % padding expected; about 100 % of the rows left out of each epoch by drop_last"
    assert plan.lines()[1].endswith(line)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"type": "fixed"}, "fixed: 4 rows a batch, shuffled"),
        ({"type": "fixed", "shuffle": False}, "fixed: 4 rows a batch, in their order"),
        ({"type": "bucket", "window": 6}, "bucket: 4 rows a batch, windows of 8 rows"),
        ({"type": "token_budget", "window": 50}, "token_budget: up to 300 tokens a batch, windows of 50 rows"),
        (
            {"type": "token_budget", "max_tokens": 200, "max_rows": 7},
            "token_budget: up to 200 tokens and 7 rows a batch, windows of 2,048 rows",
        ),
        ({"type": "pack"}, "pack: 4 sequences of 300 tokens a batch, windows of 2,048 rows"),
    ],
)
def test_every_batching_is_reported_with_its_sizes(written: dict[str, Any], expected: str) -> None:
    assert describe(written, max_tokens=300).batching == expected


def test_the_reported_padding_equals_that_of_the_batches() -> None:
    plan = describe({"type": "bucket"})
    cells = sum(4 * int(longest) for longest in LENGTHS[3::4])  # rows sorted by length, four in a batch
    assert plan.padding == pytest.approx(1 - 5050 / cells)


def test_the_reason_for_the_batching_is_reported_after_it() -> None:
    assert describe({"type": "bucket"}, reason="batching bucket: since").lines()[2] == "batching bucket: since"


def test_a_stream_is_described_by_its_first_rows() -> None:
    batching = TypeAdapter(Batching).validate_python({"type": "bucket"})
    plan = plan_of(
        LENGTHS,
        batching=batching,
        policy=build_policy(batching, batch_size=4),
        batches_per_step=2,
        steps=1000,
        shards=8,
        shard_groups=2,
    )
    assert plan.lines() == [
        "a stream of 8 shards in 2 shard groups; its first 100 rows: 50 tokens on average, longest 100; 1,000 steps",
        "bucket: 4 rows a batch, windows of 2,048 rows, 2 batches a step, 2.9 % padding expected",
    ]
    assert json.loads(json.dumps(plan.record()))["shards"] == 8


FILE = """
base_model: {type: scratch, size: nano, tokenizer: byte}
input_features: [{name: question, type: text}]
output_features: [{name: answer, type: text}]
data: {source: rows.jsonl, split: {type: random, probabilities: [1, 0, 0]}, batching: {type: bucket}}
trainer: {type: finetune, batch_size: 8, epochs: 2}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rows = [{"question": "q" * (1 + n % 20), "answer": "a"} for n in range(100)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "run.yaml").write_text(FILE)
    return tmp_path / "run.yaml"


def test_explain_shows_the_processing_of_the_data(file: Path) -> None:
    shown = CliRunner().invoke(app, ["explain", str(file), "--data"])
    assert shown.exit_code == 0, shown.output
    plan, data_part = shown.stdout.split("\n# data:\n")
    # question, answer and end: 1 to 20 tokens and two more
    assert data_part.splitlines() == [
        "#   100 training rows, 1,250 tokens, longest 22; 7 steps an epoch, 14 in all",
        "#   bucket: 8 rows a batch, windows of 2,048 rows, 2 batches a step, "
        + data_part.splitlines()[1].rpartition(", ")[2],
    ]
    assert load_config(shown.stdout).config == load_config(plan).config == load_config(file).config


@pytest.mark.parametrize(
    ("accepted", "end"),
    [
        ("0.01", "; data.max_bad_rows accepts 0.01 of all rows, and train would stop"),
        ("2", "; data.max_bad_rows accepts 2 rows, and train would stop"),
        ("3", ""),
        ("0.1", ""),
    ],
)
def test_explain_counts_bad_rows_and_says_that_training_would_stop(accepted: str, end: str, file: Path) -> None:
    with (file.parent / "rows.jsonl").open("a") as rows:
        rows.write('\n{"question": "", "answer": "a"}\n{"question": "", "answer": "a"}\nno JSON\n')
    shown = CliRunner().invoke(app, ["explain", str(file), "--data", "--set", f"data.max_bad_rows={accepted}"])
    reasons = "2 x column question is missing or empty; 1 x not JSON: Expecting value at character 1"
    assert shown.stdout.splitlines()[-1] == f"#   3 of 103 training rows left out ({reasons}){end}"


def test_explain_counts_the_bad_rows_among_the_first_of_a_stream(file: Path) -> None:
    with (file.parent / "rows.jsonl").open("a") as rows:
        rows.write('\n{"question": "", "answer": "a"}\n{"question": "", "answer": "a"}\n')
    source = "data={source: {type: jsonl, path: rows.jsonl, streaming: true}}"
    overrides = [source, "trainer={type: finetune, max_steps: 30, batch_size: 4}"]
    plan = plan_of_file(load_config(file, overrides=overrides).config, folder=file.parent)
    assert plan.bad_rows == (
        "2 of the first 102 training rows left out (column question is missing or empty); data.max_bad_rows accepts "
        "0.01 of all rows, and train stops at more"
    )


def test_explain_without_data_reads_none(file: Path) -> None:
    (file.parent / "rows.jsonl").unlink()
    shown = CliRunner().invoke(app, ["explain", str(file)])
    assert shown.exit_code == 0
    assert "# data:" not in shown.stdout


def test_explain_prints_the_plan_as_json(file: Path) -> None:
    shown = CliRunner().invoke(app, ["explain", str(file), "--json", "--dataset", str(file.parent / "rows.jsonl")])
    data = json.loads(shown.stdout)["data"]
    assert (data["rows"], data["steps"], data["assumed"], data["bad_rows"]) == (100, 14, "", "")


def test_a_size_that_is_measured_later_is_reported_as_assumed(file: Path) -> None:
    result = plan_of_file(load_config(file, overrides=["trainer.batch_size=auto"]).config, folder=file.parent)
    assert result.assumed == "batch_size is auto and found when the run begins (partita tune); taken as 16 rows here"
    assert result.plan.steps_per_epoch == 7
    budget = ["trainer.batch_size=auto", "data.batching={type: token_budget}"]
    result = plan_of_file(load_config(file, overrides=budget).config, folder=file.parent)
    assert result.assumed.endswith("; taken as 198 tokens here")


def test_a_configured_token_budget_needs_no_assumption(file: Path) -> None:
    budget = ["trainer.batch_size=auto", "data.batching={type: token_budget, max_tokens: 50}"]
    result = plan_of_file(load_config(file, overrides=budget).config, folder=file.parent)
    assert result.assumed == ""
    assert result.plan.batching == "token_budget: up to 50 tokens a batch, windows of 2,048 rows"


def test_the_plan_of_a_stream_is_that_of_its_first_rows(file: Path) -> None:
    config = load_config(
        file,
        overrides=[
            "data={source: {type: jsonl, path: rows.jsonl, streaming: true}}",
            "trainer={type: finetune, max_steps: 30, batch_size: 4}",
        ],
    ).config
    result = plan_of_file(config, folder=file.parent)
    assert result.plan.lines()[0] == (
        "a stream of 4 shards in 4 shard groups; its first 100 rows: 12 tokens on average, longest 22; 30 steps"
    )


def test_the_plan_of_a_mix_counts_the_rows_of_an_epoch(file: Path) -> None:
    (file.parent / "few.jsonl").write_text(json.dumps({"question": "q", "answer": "a"}))
    mix = ["data={mix: [{source: rows.jsonl}, {source: few.jsonl}], split: {type: random, probabilities: [1, 0, 0]}}"]
    result = plan_of_file(load_config(file, overrides=mix).config, folder=file.parent)
    assert result.plan.rows == 199  # the last of the longer source ends the epoch
    assert result.plan.tokens == 1250 + 99 * 3
    assert result.plan.steps_per_epoch == 13


def test_a_configuration_without_training_has_no_plan(file: Path) -> None:
    with pytest.raises(DataError) as error:
        plan_of_file(load_config(file, overrides=["trainer={type: none}"]).config, folder=file.parent)
    assert str(error.value) == "nothing is trained with trainer: {type: none}, so there is no plan for its data"
