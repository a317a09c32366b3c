"""Tests of tags of words: loss, answers and files are those of transformers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from partita import Model
from partita.cli.main import app
from partita.data.preview import preview
from partita_schema.errors import ConfigError
from partita_schema.load import load_config

from ..head_models import LoadedHead, tiny_model, write_plain
from ..json_lines import write_json_lines

PEOPLE, PLACES = ("Anna Berg", "Bo", "Carla de Wit"), ("Oslo", "New York", "Rio")
SENTENCES = ("{p} lives in {l}.", "Is {l} far? asked {p}.", "Nothing to see here.", "From {l} to {p}: hello!")
TAGS = ("B-LOC", "B-PER", "I-LOC", "I-PER", "O")
LIMIT = 24


def make_rows(count: int, *, seed: int = 0, sentences: int = 1) -> list[dict[str, Any]]:
    """Return texts with spans of characters."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        text, spans = "", []
        for _ in range(sentences):
            for part in str(rng.choice(SENTENCES)).replace("{", "|{").replace("}", "}|").split("|"):
                values = {"{p}": (PEOPLE, "PER"), "{l}": (PLACES, "LOC")}
                if part not in values:
                    text += part
                    continue
                names, label = values[part]
                name = str(rng.choice(names))
                spans.append({"start": len(text), "end": len(text) + len(name), "label": label})
                text += name
            text += " "
        rows.append({"text": text.strip(), "names": spans})
    return rows


def settings(architecture: str = "bert", tokenizer: str = "word", **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "base_model": tiny_model(architecture, tokenizer=tokenizer, vocab_size=300, context_length=LIMIT),
        "input_features": [{"name": "text", "type": "text"}],
        "output_features": [{"name": "names", "type": "tags"}],
        "data": {"source": "rows.jsonl"},
        "trainer": {"type": "finetune", "batch_size": 8, "max_steps": 3, "learning_rate": 0.01},
    }
    return base | changes


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with rows.jsonl."""
    monkeypatch.chdir(tmp_path)
    write_json_lines(tmp_path / "rows.jsonl", make_rows(60))
    return tmp_path


def test_preview_shows_the_tag_of_each_word(place: Path) -> None:
    row = {"text": "Bo lives in New York.", "names": [{"start": 12, "end": 20, "label": "LOC"}]}
    write_json_lines(place / "rows.jsonl", [row] * 20)

    result = preview(load_config(settings()).config, folder=place, count=1)

    text, tags = result.rows[0].pieces
    assert "New York" in text.text
    assert (tags.text, tags.in_loss) == ("O O O B-LOC I-LOC O", True)


def with_tags(described: Any) -> None:
    """Write the head of tags into a transformers config."""
    described.id2label = dict(enumerate(TAGS))
    described.label2id = {tag: index for index, tag in enumerate(TAGS)}


def write_tagger(folder: Path, architecture: str, tokenizer_type: str) -> Path:
    """Write a random token classifier of transformers whose logits vary, with its tokenizer."""
    from transformers import AutoModelForTokenClassification

    base = settings(architecture, tokenizer_type)["base_model"]
    texts = (row["text"] for row in make_rows(50))
    return write_plain(folder, base, AutoModelForTokenClassification, texts=texts, describe=with_tags)


WORDS = [
    ["Anna", "Berg", "lives", "in", "Oslo", "."],
    ["Rio"],
    ["unbelievable-words", "Is", "New", "York", "far", "?", "asked", "Carla", "de", "Wit"] * 3,
]
WORD_TAGS = [
    ["B-PER", "I-PER", "O", "O", "B-LOC", "O"],
    ["B-LOC"],
    ["O", "O", "B-LOC", "I-LOC", "O", "O", "O", "B-PER", "I-PER", "I-PER"] * 3,
]


def plain_inputs(tokenizer: Any, rows: Sequence[Sequence[str]], tags: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return inputs and labels as the token-classification example of transformers makes them."""
    words = [[f" {word}" if index else word for index, word in enumerate(row)] for row in rows]
    encoded = tokenizer(words, is_split_into_words=True, truncation=True, padding=True, max_length=LIMIT)
    labels = []
    for index, of_row in enumerate(tags):
        word_ids = encoded.word_ids(index)
        starts = [word is not None and word not in word_ids[:place] for place, word in enumerate(word_ids)]
        labels.append(
            [TAGS.index(of_row[word]) if start else -100 for word, start in zip(word_ids, starts, strict=True)]
        )
    inputs = {name: torch.tensor(encoded[name]) for name in ("input_ids", "attention_mask")}
    return {**inputs, "labels": torch.tensor(labels)}


@pytest.mark.parametrize(
    ("architecture", "tokenizer_type"),
    [
        ("bert", "word"),
        ("roberta", "bpe"),
        ("distilbert", "bpe"),
        ("deberta-v2", "word"),
        ("modernbert", "bpe"),
        ("llama", "bpe"),
        ("gpt2", "byte"),
    ],
)
def test_loss_and_gradients_equal_those_of_transformers(tmp_path: Path, architecture: str, tokenizer_type: str) -> None:
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    folder = write_tagger(tmp_path, architecture, tokenizer_type)
    plain = AutoModelForTokenClassification.from_pretrained(folder).eval()
    inputs = plain_inputs(AutoTokenizer.from_pretrained(folder), WORDS, WORD_TAGS)
    rows = [{"text": words, "names": tags} for words, tags in zip(WORDS, WORD_TAGS, strict=True)]
    ours = LoadedHead(settings(architecture, base_model=str(folder)), rows, folder=tmp_path, labels={"names": TAGS})

    assert torch.equal(ours.batch().input_ids_BT, inputs["input_ids"])
    assert torch.equal(ours.batch().labels_BT != -100, inputs["labels"] != -100)
    ours.check_loss_and_gradients(plain, plain(**inputs).loss)


@pytest.mark.parametrize(("architecture", "tokenizer_type"), [("bert", "word"), ("llama", "bpe")])
def test_predictions_equal_those_of_transformers_row_by_row(
    tmp_path: Path, architecture: str, tokenizer_type: str
) -> None:
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    folder = write_tagger(tmp_path / "model", architecture, tokenizer_type)
    rows = [{"text": words} for words in WORDS]
    output = {"name": "names", "type": "tags", "decoder": {"labels": list(TAGS)}}
    config = settings(architecture, base_model=str(folder), trainer={"type": "none"}, output_features=[output])
    model = Model(config, quiet=True)
    predictions = model.predict(rows, output=tmp_path / "out.jsonl", batch_size=2)
    plain, tokenizer = AutoModelForTokenClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for words, tags, row in zip(WORDS, WORD_TAGS, predictions, strict=True):
        inputs = plain_inputs(tokenizer, [words], [tags])
        is_first = inputs.pop("labels")[0] != -100
        with torch.no_grad():
            logits = plain(**inputs).logits[0][is_first]
        expected = [TAGS[index] for index in logits.argmax(-1).tolist()]
        assert row["names"] == expected + ["O"] * (len(words) - len(expected))
    assert predictions[0]["error"] is None
    cut = len(WORDS[2]) - len(expected)
    assert cut > 0
    assert predictions[2]["error"] == f"{cut} words of {len(WORDS[2])} beyond the model's context have no prediction"


def test_a_killed_run_resumes_with_the_same_metrics(place: Path, train_killed: Any) -> None:
    trainer = {"type": "finetune", "batch_size": 8, "max_steps": 4, "learning_rate": 0.01, "steps_per_checkpoint": 2}
    config = settings(trainer={**trainer, "validation_metric": "micro_f1"})
    whole = Model(config, quiet=True).train(run=place / "whole")
    train_killed(Model(config, quiet=True), place / "killed", after=3)
    resumed = Model(config, quiet=True).train(run=place / "killed")
    assert resumed.resumed_from == 2
    assert resumed.metrics == whole.metrics


def test_tags_are_learned_evaluated_and_predicted(place: Path) -> None:
    trainer = {"type": "finetune", "batch_size": 8, "epochs": 4, "learning_rate": 0.01}
    Model(settings(trainer=trainer), quiet=True).train(run=place / "run")
    model, rows = Model.load(place / "run", quiet=True), make_rows(30, seed=1)
    metrics = model.evaluate(rows)["names"]
    assert metrics["micro_f1"] > 0.9
    assert set(metrics["per_label"]) == {"LOC", "PER"}
    predictions = model.predict(rows, output=place / "out.jsonl")
    written = [json.loads(line) for line in (place / "out.jsonl").read_text("utf8").splitlines()]
    exact = 0
    for row, line, asked in zip(predictions, written, rows, strict=True):
        assert row["names"] == line["names"]
        found = [{key: span[key] for key in ("start", "end", "label")} for span in row["names_spans"]]
        assert all(asked["text"][span["start"] : span["end"]] == span["text"] for span in row["names_spans"])
        exact += found == asked["names"]
    assert metrics["exact_match"] == exact / 30
    again = model.evaluate([{"text": row["text"], "names": row["names"]} for row in predictions])["names"]
    assert again["exact_match"] == 1


def test_a_saved_tagger_is_loaded_by_transformers_with_its_tags(place: Path) -> None:
    from transformers import AutoModelForTokenClassification, pipeline

    Model(settings(), quiet=True).train(run=place / "run")
    model = AutoModelForTokenClassification.from_pretrained(place / "run" / "model")
    assert tuple(model.config.id2label.values()) == TAGS
    rows = [{"text": words} for words in WORDS[:2]]
    predictions = Model.load(place / "run", quiet=True).predict(rows)
    classify = pipeline("token-classification", model=str(place / "run" / "model"), device="cpu", ignore_labels=[])
    for row, words in zip(predictions, WORDS, strict=False):
        assert row["names"] == [word["entity"] for word in classify(" ".join(words))]


def test_spans_that_end_inside_a_word_are_counted_and_named(place: Path, caplog: Any) -> None:
    rows = [{"text": "Anna Berg lives in Oslo.", "names": [{"start": 0, "end": 9, "label": "PER"}]} for _ in range(20)]
    rows[7] = {"text": "Oslo", "names": [[1, 3, "LOC"]]}
    rows[9] = {"text": "Bo lives", "names": [[0, 1, "PER"]]}
    write_json_lines(place / "rows.jsonl", rows)
    sections = settings(data={"source": "rows.jsonl", "split": {"type": "random", "probabilities": [1, 0, 0]}})
    (place / "run.yaml").write_text(json.dumps(sections))
    phrase = "training: 2 spans begin or end inside a word, which is tagged as a whole (such as rows.jsonl:8: 'sl' in "

    Model("run.yaml", quiet=True).train(run=place / "run")
    assert [message for message in caplog.messages if "inside a word" in message] == [
        f"{phrase}'Oslo'); correct them if that is wrong"
    ]
    for ledger_of in ("run", "run.yaml"):
        shown = CliRunner().invoke(app, ["preview", "--ledger", ledger_of])
        assert phrase in shown.output


def test_wrong_tags_are_in_the_quarantine_and_unknown_ones_are_not_scored(place: Path, caplog: Any) -> None:
    rows = make_rows(40)
    rows[3] = {"text": "Nothing to see here.", "names": ["O"]}
    rows[4]["text"] = []
    Model(settings(data={"source": "none.jsonl", "max_bad_rows": 5}), quiet=True).train(rows, run=place / "run")
    reasons = [json.loads(line)["reasons"] for line in (place / "run" / "quarantine.jsonl").read_text().splitlines()]
    assert ["column names: 1 tag for 5 words"] in reasons
    assert ["column text: there are no words"] in reasons
    wrong = [{"text": ["in", "Rio"], "names": ["O", "B-CITY"]}]
    metrics = Model.load(place / "run", quiet=True).evaluate([*rows[:2], *wrong])["names"]
    assert (metrics["n"], metrics["skipped"]) == (2, 1)
    assert "column names: 'B-CITY' is none of the labels B-LOC, B-PER, I-LOC, I-PER, O" in caplog.text


def test_words_that_the_tokenizer_does_not_know_are_tagged_too(place: Path) -> None:
    """Unknown tokens are refused where a model would learn to write them; a head only reads them."""
    config = settings()
    config["base_model"] |= {"vocab_size": 12}
    Model(config, quiet=True).train(run=place / "run")
    predictions = Model.load(place / "run", quiet=True).predict([{"text": "unheard of words"}])
    assert len(predictions[0]["names"]) == 3


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"input_features": [{"name": "text", "type": "text"}, {"name": "more", "type": "text"}]},
            "input_features: tags are for the words of one text; write one input",
        ),
        (
            {"prompt": {"template": "Tag: {text}"}},
            "prompt.template: tags are for the words of one text as they are in the data; remove template",
        ),
        (
            {"input_features": [{"name": "text", "type": "text", "preprocessing": {"max_sequence_length": 4}}]},
            (
                "input_features[0].preprocessing.max_sequence_length: the head reads texts up to the context; write "
                "preprocessing.global_max_sequence_length"
            ),
        ),
        (
            {"output_features": [{"name": "names", "type": "tags", "decoder": {"labels": ["O", "B", "O"]}}]},
            "output_features[0].decoder.labels: labels holds 'O' twice; write each tag once",
        ),
    ],
    ids=["inputs", "template", "length", "labels"],
)
def test_what_does_not_go_with_tags_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(settings(**changes))
    assert [str(one) for one in caught.value.problems] == [problem]
