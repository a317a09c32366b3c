"""Tests of several outputs per dialogue turn on the whole path: training, evaluation, prediction and simulation."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from partita import Model
from partita.data.preview import make_report, preview
from partita.outputs.decode import Decoded
from partita.outputs.scorer import Scorer
from partita_schema.config import Config
from partita_schema.errors import DataError
from partita_schema.load import load_config
from partita_schema.rows import row_schema

from ..json_lines import read_json_lines, write_json_lines

DRINKS = ("tea", "juice", "water")
NANO = {
    "type": "scratch",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "context_length": 192,
    "tokenizer": "word",
    "vocab_size": 96,
}
OUTPUTS: list[dict[str, Any]] = [
    {"name": "state", "type": "json", "decoder": {"max_new_tokens": 24, "constrain": True}},
    {"name": "action", "type": "category"},
    {"name": "reply", "type": "text", "column": "content", "decoder": {"max_new_tokens": 6}},
]


def make_dialogues(count: int, *, seed: int = 1) -> list[dict[str, Any]]:
    """Return dialogues in which a guest orders, changes the order, and pays."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        first, second = rng.sample(DRINKS, 2)
        turns = [
            (f"one {first}", {"drink": first}, "serve", f"here is {first}"),
            (f"no {second}", {"drink": second, "changed": True}, "serve", f"here is {second}"),
            ("the bill", {"drink": second, "changed": True}, "close", "bye"),
        ]
        messages: list[dict[str, Any]] = []
        for question, state, action, reply in turns[: rng.choice((2, 3))]:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": reply, "state": state, "action": action})
        rows.append({"messages": messages})
    return rows


def make_config(answers: str, **sections: Any) -> dict[str, Any]:
    scored = [dict(output) for output in OUTPUTS]
    if answers == "in_sequence":
        scored[1]["decoder"] = {"scoring": True}
    dialogue = {"answers": answers, "mode": "packed_dialogue", "speakers": {"user": "U: ", "assistant": "A: "}}
    return {
        "base_model": NANO,
        "input_features": [{"name": "messages", "type": "dialogue"}],
        "output_features": scored,
        "data": {"dialogue": dialogue},
        "trainer": {"type": "finetune", "epochs": 4, "batch_size": 8, "learning_rate": 0.01},
        **sections,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("turns")
    write_json_lines(folder / "test.jsonl", make_dialogues(8, seed=2))
    return folder


@pytest.fixture(scope="module", params=["together", "in_sequence"])
def run(request: pytest.FixtureRequest, folder: Path) -> Path:
    """Return a run that answers turns in one way, trained a little."""
    simulation = {"world": {"type": "replay"}, "tasks": {"source": "test.jsonl"}, "history": ["gold", "predicted"]}
    file = folder / f"{request.param}.yaml"
    file.write_text(json.dumps(make_config(request.param, simulation=simulation)), encoding="utf8")
    return Path(Model(file, quiet=True).train(make_dialogues(60), run=folder / request.param).run)


def numbers_of(scores: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of evaluate by full name, without those of scored labels, which transcripts do not hold."""
    return {
        f"{name}.{metric}": value
        for name, values in scores.items()
        for metric, value in values.items()
        if isinstance(value, float) and metric not in ("auroc", "average_precision")
    }


def test_every_turn_is_scored_by_output(run: Path, folder: Path) -> None:
    rows = make_dialogues(8, seed=2)
    turns = sum(len(row["messages"]) // 2 for row in rows)

    scores = Model.load(run, quiet=True).evaluate(rows)

    assert all(scores[name]["n"] == turns for name in ("state", "action", "reply"))
    assert {"joint_accuracy", "slot_accuracy", "slot_f1", "slot.drink"} <= scores["state"].keys()
    assert scores["model"]["loss"] > 0
    assert scores["action"]["accuracy"] > 0.2
    assert ("auroc" in scores["action"]) == (run.name == "in_sequence")
    manifest = json.loads((run / "manifest.json").read_text(encoding="utf8"))
    assert {"state.joint_accuracy", "action.accuracy", "reply.exact_match"} <= manifest["metrics"]["test"].keys()


def test_a_gold_history_gives_the_scores_of_evaluate(run: Path, tmp_path: Path) -> None:
    model = Model.load(run, quiet=True)
    gold = model.simulate(tmp_path, fresh=True).flat()["gold"]
    scores = numbers_of(model.evaluate(make_dialogues(8, seed=2)))

    assert {name: value for name, value in gold.items() if name in scores} == pytest.approx(
        {name: value for name, value in scores.items() if not name.startswith("model.")}
    )


def test_a_predicted_history_equals_a_loop_over_predict(run: Path, tmp_path: Path) -> None:
    model = Model.load(run, quiet=True)
    report = model.simulate(tmp_path, fresh=True)
    config = load_config(run.parent / f"{run.name}.yaml").config
    scorer, schema = Scorer(config), row_schema(config, supervised=True)

    for row, line in zip(make_dialogues(8, seed=2), read_json_lines(tmp_path / "predicted.jsonl"), strict=True):
        said: list[dict[str, Any]] = []
        for index in range(0, len(row["messages"]), 2):
            said.append(row["messages"][index])
            [answer] = model.predict([{"messages": said}])
            turn = json.loads(line["messages"][index + 1]["values"])
            assert {name: answer[name] for name in ("state", "action", "reply")} == turn
            # The row itself holds the generated answer, as a transcript does.
            said.append({"role": "assistant", "generated": line["messages"][index + 1]["generated"]})
            truth = schema.load({"messages": row["messages"][: index + 2]})
            errors = {name: "unreadable" for name in turn if answer[name] is None}
            scorer.add(truth, Decoded(values=turn, errors=errors, raw={}), answered=True)

    predicted = report.flat()["predicted"]
    expected = {name: value for name, value in scorer.scores().flat.items() if not math.isnan(value)}
    assert {name: predicted[name] for name in expected} == pytest.approx(expected)


def test_predictions_have_the_columns_of_all_outputs(run: Path) -> None:
    [row] = Model.load(run, quiet=True).predict([{"messages": make_dialogues(1)[0]["messages"][:-1]}])

    assert {"state", "state_raw", "action", "action_raw", "reply", "reply_raw"} <= row.keys()
    if run.name == "in_sequence":
        assert set(row["action_probabilities"]) == {"serve", "close"}


def test_a_turn_whose_label_is_unknown_is_not_scored_and_the_others_are(run: Path) -> None:
    rows = make_dialogues(4, seed=3)
    rows[0]["messages"][1]["action"] = "sing"
    turns = sum(len(row["messages"]) // 2 for row in rows)

    scores = Model.load(run, quiet=True).evaluate(rows)

    assert scores["action"]["n"] == turns - 1
    assert scores["action"]["skipped"] == 1


def test_labels_of_all_turns_are_known_and_not_only_those_of_the_last_ones(tmp_path: Path) -> None:
    rows = make_dialogues(6)
    rows[0]["messages"][1]["action"] = "greet"
    write_json_lines(tmp_path / "rows.jsonl", rows)
    config = make_config("in_sequence", trainer={"type": "none"}, generation={"max_new_tokens": 4})
    config["data"]["source"] = str(tmp_path / "rows.jsonl")

    [row] = Model(config, quiet=True).predict([{"messages": rows[0]["messages"][:1]}])

    assert set(row["action_probabilities"]) == {"serve", "close", "greet"}


def test_a_preview_marks_every_output_of_every_turn(tmp_path: Path) -> None:
    result = preview(
        Config.model_validate(make_config("in_sequence")), folder=tmp_path, dataset=make_dialogues(3), count=1
    )

    learned = [piece.text for piece in result.rows[0].pieces if piece.in_loss]
    first = make_dialogues(1)[0]["messages"][1]
    assert learned[:3] == [
        f"{json.dumps(first['state'], separators=(',', ':'))}</s>",
        "serve</s>",
        f"{first['content']}</s>",
    ]


def test_a_dialogue_without_an_output_is_left_out_with_its_reason(tmp_path: Path) -> None:
    rows = make_dialogues(30)
    del rows[4]["messages"][1]["state"]
    config = Config.model_validate(make_config("in_sequence", preprocessing={"sample_ratio": 1.0}))

    report = make_report(config, folder=tmp_path, dataset=rows)

    [((_, reason), key)] = report.examples.items()
    assert key.startswith("dataset:5")
    assert reason == (
        "column messages: message 2 has no state, and neither has the message before it; write it there, or weight: 0 "
        "to leave this turn out of the loss"
    )


def test_a_dataset_without_any_output_is_refused_before_training(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 20

    with pytest.raises(DataError, match="message 2 has no state"):
        Model(make_config("together"), quiet=True).train(rows, run=tmp_path / "run")


@pytest.mark.parametrize("answers", ["together", "in_sequence"])
def test_a_split_of_dialogues_with_unknown_labels_only_is_not_evaluated(
    tmp_path: Path, answers: str, caplog: pytest.LogCaptureFixture
) -> None:
    [unknown] = make_dialogues(1, seed=2)
    for message in unknown["messages"]:
        if "action" in message:
            message["action"] = "leave"
    write_json_lines(tmp_path / "training.jsonl", make_dialogues(16))
    write_json_lines(tmp_path / "validation.jsonl", [unknown])
    config = make_config(answers, trainer={"type": "finetune", "max_steps": 1, "batch_size": 8})
    config["data"] |= {"source": str(tmp_path / "training.jsonl"), "validation": str(tmp_path / "validation.jsonl")}
    config["trainer"] |= {"evaluate_test": False}

    result = Model(config, quiet=True).train(run=tmp_path / "run")

    assert "validation is not evaluated: none of its 1 rows has a label of the training rows" in caplog.messages
    assert "validation" not in result.metrics
    counts = json.loads((tmp_path / "run" / "ledger.json").read_text())["splits"]["validation"]
    assert counts["rows"] == counts["left_out"] > 0
