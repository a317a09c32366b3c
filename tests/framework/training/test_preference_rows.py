"""Trainers on preferences record the results of each pair and of each labelled answer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partita import ConfigError, Model
from partita.report.evaluation import Evaluation, read_evaluation
from partita.report.measures import measure_rows
from partita.report.preference_rows import labelled_of, pairs_of

from ...json_lines import write_json_lines

MODEL = {
    "type": "scratch",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 64,
    "context_length": 64,
    "tokenizer": "word",
}
TRAINER = {"batch_size": 4, "max_steps": 4, "learning_rate": 0.05, "evaluate_test": False}
ROWS = 8
PAIRS = [
    {"text": f"one {number % 4}", "chosen": f"blue {number % 4}", "rejected": "red ball", "part": number // 4 % 2}
    for number in range(2 * ROWS)
]


def train(folder: Path, rows: list[dict[str, Any]], **config: Any) -> tuple[Evaluation, dict[str, float]]:
    """Train on the rows of part 0; return the results of the rows of part 1, and their metrics."""
    settings = {
        "base_model": MODEL,
        "input_features": [{"name": "text", "type": "text"}],
        "generation": {"max_new_tokens": 3},
        "data": {"split": {"type": "fixed", "column": "part"}},
    } | config
    result = Model(settings, quiet=True).train(rows, run=folder / "run")
    return read_evaluation(folder / "run/evaluations/validation.jsonl"), result.metrics["validation"]


def measured(evaluation: Evaluation) -> dict[str, float]:
    """Return the metrics that the results of rows determine."""
    return {one.metric: one.result.value for one in measure_rows(evaluation)}


LOSSES = {
    "dpo": {"type": "dpo", "beta": 0.5},
    "ipo": {"type": "dpo", "variant": "ipo"},
    "orpo": {"type": "orpo"},
    "simpo": {"type": "simpo"},
}


@pytest.mark.parametrize("loss", LOSSES)
def test_each_pair_is_recorded_with_its_rejected_answer(loss: str, tmp_path: Path) -> None:
    evaluation, metrics = train(
        tmp_path,
        PAIRS,
        output_features=[{"name": "reply", "type": "preference"}],
        trainer={"type": "preference", "loss": LOSSES[loss]} | TRAINER,
    )

    pairs, [column] = pairs_of(evaluation), evaluation.outputs.values()
    assert pairs is not None
    assert len(pairs.margins_N) == len(evaluation) == ROWS
    assert len(set(pairs.margins_N.tolist())) == 4  # of four different pairs
    assert [of_row["rejected"] for of_row in column.of_rows if of_row] == ["red ball"] * ROWS
    assert column.references[:2] == ["blue 0", "blue 1"]
    own = measured(evaluation)
    names = [name for name in metrics if name.partition("/")[0] in ("rewards", "logps", "chosen_falls", "loss")]
    assert len(names) == 8 if "dpo" in str(LOSSES[loss]) else 7
    assert {name: own[name] for name in names} == pytest.approx({name: metrics[name] for name in names}, rel=1e-6)
    assert own["reply.exact_match"] == metrics["reply.exact_match"]
    assert "Preferences" in (tmp_path / "run/report.html").read_text(encoding="utf8")


def test_rewards_of_the_model_before_training_say_nothing(tmp_path: Path) -> None:
    first = {"type": "finetune"} | TRAINER
    texts = [{"name": "reply", "type": "text", "column": "chosen"}]
    both = [*PAIRS, *({**row, "chosen": row["rejected"]} for row in PAIRS)]
    train(tmp_path / "first", both, output_features=texts, trainer=first)
    train(
        tmp_path,
        PAIRS,
        base_model=str(tmp_path / "first/run/model"),
        output_features=[{"name": "reply", "type": "preference"}],
        trainer={"type": "preference", "evaluate_base": True} | TRAINER,
    )

    base = measured(read_evaluation(tmp_path / "run/evaluations/validation-base.jsonl"))

    assert {"logps/chosen", "logps/rejected", "reply.exact_match", "loss"} <= set(base)
    assert not [name for name in base if name.startswith("rewards/") or name == "chosen_falls"]


def test_answers_that_are_labelled_bad_are_not_expected_of_the_model(tmp_path: Path) -> None:
    rows = [
        {"text": f"one {number % 4}", "reply": "blue ball" if number % 3 else "red ball", "good": number % 3 > 0}
        for number in range(24)
    ]
    rows = [row | {"part": number % 2} for number, row in enumerate(rows)]
    config: dict[str, Any] = {
        "output_features": [{"name": "reply", "type": "text", "label": "good"}],
        "trainer": {"type": "kto", "max_generated_rows": 3, "evaluate_generated": True} | TRAINER,
    }
    evaluation, metrics = train(tmp_path, rows, **config)

    assert metrics["reply.n"] == metrics["n"] == 8
    labelled, [column] = labelled_of(evaluation), evaluation.outputs.values()
    assert labelled is not None
    assert len(evaluation) == evaluation.header.split_rows == 12
    assert labelled.is_good_N.tolist() == [row["good"] for row in rows if row["part"]]
    assert [value is None for value in column.values] == [not row["good"] for row in rows if row["part"]]
    assert [column.references[index] for index in np.flatnonzero(~labelled.is_good_N)] == ["red ball"] * 4
    own = measured(evaluation)
    assert {name: metrics[name] for name in own} == pytest.approx(own, rel=1e-6)
    assert {"rewards/margins", "logps/chosen", "loss", "reply.exact_match", "reply.bleu", "reply.errors"} <= set(own)

    assert Model.load(tmp_path / "run", quiet=True).evaluate(rows)["reply"]["n"] == 16


LABELLED = [{"text": "one", "reply": "blue", "good": number < 4, "part": number // 6} for number in range(8)]


def labelled(**trainer: Any) -> dict[str, Any]:
    """Return sections of kto."""
    return {
        "output_features": [{"name": "reply", "type": "text", "label": "good"}],
        "trainer": {"type": "kto"} | TRAINER | trainer,
    }


def test_a_split_of_bad_answers_alone_has_no_generated_ones(tmp_path: Path, caplog: Any) -> None:
    evaluation, metrics = train(tmp_path, LABELLED, **labelled())

    assert not [name for name in metrics if name.startswith("reply.")]
    assert (len(evaluation), evaluation.header.answered) == (2, False)
    assert metrics.keys() == {"loss", "kl", "rewards/rejected", "logps/rejected"}
    assert (
        "all 2 validation answers are bad by the column good: they have no rewards/margins, rewards/chosen and "
        "logps/chosen"
    ) in caplog.messages


@pytest.mark.parametrize(
    ("good", "metric", "only"),
    [(True, "rewards/margins", "good"), (False, "rewards/chosen", "bad"), (False, "reply.exact_match", "bad")],
)
def test_a_metric_that_answers_of_one_label_do_not_have_is_refused_before_training(
    tmp_path: Path, good: bool, metric: str, only: str
) -> None:
    rows = [row if row["part"] == 0 else row | {"good": good} for row in LABELLED]
    with pytest.raises(ConfigError) as error:
        train(tmp_path, rows, **labelled(validation_metric=metric))

    assert str(error.value) == (
        f"trainer.validation_metric: all 2 validation answers are {only} by the column good, so they have no {metric}; "
        "add rows of the other kind, or write loss"
    )
    assert not (tmp_path / "run/log.jsonl").exists()


def test_good_answers_alone_can_choose_checkpoints_by_their_reward(tmp_path: Path) -> None:
    rows = [row if row["part"] == 0 else row | {"good": True} for row in LABELLED]

    _, metrics = train(tmp_path, rows, **labelled(validation_metric="rewards/chosen"))

    assert "rewards/chosen" in metrics
    assert "rewards/margins" not in metrics


def test_pairs_without_inputs_are_recorded_with_their_common_beginning(tmp_path: Path) -> None:
    rows = [{"chosen": f"{row['text']} {row['chosen']}", "rejected": f"{row['text']} red"} | row for row in PAIRS]
    rows = [{key: row[key] for key in ("chosen", "rejected", "part")} for row in rows]
    for row in rows:
        row["chosen"], row["rejected"] = f"one ball {row['chosen']}", f"one ball {row['rejected']}"
    evaluation, _ = train(
        tmp_path,
        rows,
        input_features=[],
        output_features=[{"name": "reply", "type": "preference"}],
        trainer={"type": "preference"} | TRAINER,
    )

    assert pairs_of(evaluation) is not None
    assert set(evaluation.prompts) == {"one ball "}
    assert not evaluation.header.answered


def test_the_rejected_answer_of_a_dialogue_is_recorded(tmp_path: Path) -> None:
    answers = {"chosen": [{"role": "assistant", "content": "blue"}], "rejected": "red ball"}
    rows = [
        {"messages": [{"role": "user", "content": f"one {number % 4}"}], "part": number % 2, **answers}
        for number in range(8)
    ]
    write_json_lines(tmp_path / "rows.jsonl", rows)
    config: dict[str, Any] = {
        "input_features": [{"name": "messages", "type": "dialogue"}],
        "output_features": [{"name": "reply", "type": "preference"}],
        "data": {"split": {"type": "fixed", "column": "part"}, "source": str(tmp_path / "rows.jsonl")},
        "trainer": {"type": "preference"} | TRAINER,
    }

    evaluation, _ = train(tmp_path, json.loads(json.dumps(rows)), **config)

    [column] = evaluation.outputs.values()
    assert column.references == ["blue"] * 4
    assert [of_row["rejected"] for of_row in column.of_rows if of_row] == ["red ball"] * 4


def test_a_finished_run_without_a_reference_is_evaluated_with_its_loss(tmp_path: Path, caplog: Any) -> None:
    _, metrics = train(
        tmp_path,
        PAIRS,
        output_features=[{"name": "reply", "type": "preference"}],
        trainer={"type": "preference", "loss": {"type": "orpo"}} | TRAINER,
    )
    model = Model.load(tmp_path / "run", quiet=True)

    again = model.evaluate([row for row in PAIRS if row["part"]])
    names = [name for name in metrics if name.partition("/")[0] in ("rewards", "logps", "chosen_falls", "loss")]
    assert {name: again["model"][name] for name in names} == pytest.approx({name: metrics[name] for name in names})
    assert not caplog.messages
