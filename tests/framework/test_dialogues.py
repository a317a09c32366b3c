"""Tests of training, prediction and evaluation on dialogues."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from partita import Model
from partita.data.preview import preview
from partita.runs.row_results import evaluation_path
from partita.tokenizers.load import read_tokenizer
from partita_schema.errors import DataError
from partita_trainers.checkpoints.file_sums import FILE as SUMS

from ..json_lines import write_json_lines
from .recorded_results import read_rows

SGD = Path(__file__).parents[3] / "shared" / "data" / "sgd" / "dialogues.jsonl"
COLOURS = ("red", "blue", "green", "white")
ROLES = ("user", "assistant")
NANO = {
    "type": "scratch",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "context_length": 96,
    "tokenizer": "word",
    "vocab_size": 64,
}
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}A: {{ m['content'] }}</s>\n"
    "{% else %}U: {{ m['content'] }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}A: {% endif %}"
)


def make_dialogues(count: int) -> list[dict[str, Any]]:
    """Return dialogues in which the assistant repeats each colour, and the last one again when asked for it."""
    rng = random.Random(1)
    rows = []
    for _ in range(count):
        first, second = rng.sample(COLOURS, 2)
        said = [first, first, second, second, "again", second]
        rows.append({"messages": [{"role": ROLES[place % 2], "content": text} for place, text in enumerate(said)]})
    return rows


def make_config(**sections: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "base_model": NANO,
        "input_features": [{"name": "messages", "type": "dialogue"}],
        "output_features": [{"name": "reply", "type": "text"}],
        "generation": {"max_new_tokens": 4},
        "data": {"dialogue": {"speakers": {"user": "U: ", "assistant": "A: "}}},
        "trainer": {"type": "finetune", "epochs": 5, "batch_size": 16, "learning_rate": 0.003},
    }
    return config | sections


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an untrained model whose tokenizer has a chat template."""
    folder = tmp_path_factory.mktemp("base")
    rows = folder / "rows.jsonl"
    write_json_lines(rows, make_dialogues(40))
    config = make_config(trainer={"type": "none"})
    config["data"]["source"] = str(rows)
    Model(config, quiet=True).save(folder / "model")
    tokenizer = read_tokenizer(str(folder / "model"))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    (folder / "model" / SUMS).unlink()
    return folder / "model"


def test_a_tokenizer_that_cannot_encode_the_answers_is_refused_before_the_first_step(tmp_path: Path) -> None:
    config = make_config(base_model=NANO | {"vocab_size": 6})

    with pytest.raises(
        DataError, match=r"^training: [0-9.]+% of the loss tokens \(.*write a larger base_model.vocab_size"
    ):
        Model(config, quiet=True).train(make_dialogues(40), run=tmp_path / "run")


@pytest.mark.long
def test_a_chat_model_is_trained_on_all_answers_and_prompted_as_in_training(base: Path, tmp_path: Path) -> None:
    rows = make_dialogues(400)
    config = make_config(base_model=str(base), data={})
    model = Model(config, quiet=True)

    result = model.train(rows, run=tmp_path / "run")

    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["data"]["training"]["rows"] == 360
    scores = result.metrics["test"]
    assert scores["reply.exact_match"] > 0.9
    assert scores["reply.n"] == 60  # three answers in each of twenty dialogues
    asked = [{"messages": row["messages"][:-1]} for row in rows[:20]]
    answers = model.predict(asked)
    right = [row["messages"][-1]["content"] for row in rows[:20]]
    assert sum(answer["reply"] == wanted for answer, wanted in zip(answers, right, strict=True)) >= 18
    again = Model.load(tmp_path / "run", quiet=True).evaluate(rows[:10])
    assert again["reply"]["n"] == 30
    assert again["model"]["loss"] < 0.5


def test_an_answer_that_equals_any_of_the_correct_ones_is_right(base: Path, tmp_path: Path) -> None:
    rows = [row | {"split": "train"} for row in make_dialogues(200)]
    right = ["none", *COLOURS]
    for row in make_dialogues(20):
        asked, answer = row["messages"][:2]
        rows.append({"messages": [asked, answer | {"content": "none", "labels": right}], "split": "test"})
    config = make_config(base_model=str(base), data={"split": {"type": "fixed"}})
    config["trainer"] |= {"epochs": 1, "max_steps": 20, "learning_rate": 0.01}

    result = Model(config, quiet=True).train(rows, run=tmp_path / "run")

    assert result.metrics["test"]["reply.exact_match"] == result.metrics["test"]["reply.rouge_l"] == 1
    recorded = [row.outputs["reply"] for row in read_rows(evaluation_path(tmp_path / "run", "test", base=False))]
    assert len(recorded) == 20
    assert all(output.reference == output.value in COLOURS for output in recorded)


@pytest.mark.long
def test_rows_of_a_squashed_dialogue_are_trained_without_a_template(tmp_path: Path) -> None:
    config = make_config()
    config["trainer"]["epochs"] = 3

    result = Model(config, quiet=True).train(make_dialogues(300), run=tmp_path / "run")

    assert result.metrics["test"]["reply.exact_match"] > 0.8
    assert json.loads((tmp_path / "run" / "ledger.json").read_text())["splits"]["training"]["used"] == 3 * 270


def test_a_preview_shows_every_turn_in_the_loss(base: Path) -> None:
    from partita_schema.config import Config

    config = Config.model_validate(make_config(base_model=str(base), data={}))

    result = preview(config, folder=Path(), dataset=make_dialogues(3), count=1)

    [row] = result.rows
    assert [piece.in_loss for piece in row.pieces] == [*[False, True] * 3, False]
    said = [message["content"] for message in make_dialogues(1)[0]["messages"]]
    assert [piece.text for piece in row.pieces if piece.in_loss] == [f"{text}</s>" for text in said[1::2]]
    assert result.mode == "packed_dialogue"


@pytest.mark.skipif(not SGD.exists(), reason="the shared dialogues are not here")
def test_dialogues_of_speakers_and_texts_are_read_unchanged(tmp_path: Path) -> None:
    from partita_schema.config import Config

    feature = {"name": "dialogue", "type": "dialogue", "column": "turns"}
    written = make_config(input_features=[feature], base_model=NANO | {"context_length": 1024})
    with pytest.raises(DataError, match=r"such as dialogues.jsonl:1#1: column turns: message 1 has state, "):
        preview(Config.model_validate(written), folder=Path(), dataset=str(SGD), count=1)
    written["data"]["dialogue"]["ignore_keys"] = ["state"]

    result = preview(Config.model_validate(written), folder=Path(), dataset=str(SGD), count=2)

    assert not result.left_out
    assert result.rows[1].key.endswith("#2")
    assert "U: I want to make a restaurant" in result.rows[0].pieces[0].text or "U: " in result.rows[0].pieces[0].text
    assert result.rows[0].pieces[-1].in_loss
