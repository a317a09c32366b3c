"""Tests of sets of labels: decoding, metrics as in scikit-learn, and constrained answers."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita import Model
from partita.data.formatting.formatter import Formatter
from partita.generation.answer_lengths import default_new_tokens
from partita.lm.base import SlotRequest
from partita.lm.decoding.grammar import Grammar
from partita.lm.decoding.row import Row
from partita.outputs.decode import Decoder
from partita.outputs.scorer import Scorer
from partita.pipeline.fingerprint import output_input
from partita.tokenizers.load import byte_tokenizer
from partita_schema.errors import DataError
from partita_schema.sections.outputs.grammar import answer_grammar
from partita_schema.sections.outputs.set import SetOutput

from ..conftest import config_of

LABELS = ["politics", "Sport", "sport", 'the "arts"']
FORMATS = ("json", "comma")


def topics(form: str = "json", **decoder: Any) -> dict[str, Any]:
    decoder = {"labels": LABELS} | decoder
    return {"name": "topics", "type": "set", "decoder": decoder, "preprocessing": {"format": form}}


def decoded(text: str, form: str = "json") -> Any:
    """Return the labels, or the reason why there are none."""
    result = Decoder(config_of(topics(form)), labels={}).decode(text)
    assert (result.values["topics"] is None) == ("topics" in result.errors)
    return result.errors.get("topics", result.values["topics"])


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ('["sport", "politics"]', ["politics", "sport"]),
        ("[]", []),
        ('["POLITICS", " Politics "]', ["politics"]),
        ('["Sport", "sport"]', ["Sport", "sport"]),
        ('Topics:\n```json\n["The \\"Arts\\""]\n``` Anything else?', ['the "arts"']),
        ('["weather"] no, ["sport"]', ["sport"]),
    ],
)
def test_labels_are_read_from_the_first_array_that_contains_only_labels(text: str, labels: list[str]) -> None:
    assert decoded(text) == labels


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("no idea", "no JSON value in 'no idea'"),
        ('["sport", "poli', 'the JSON value is cut off: \'["sport", "poli\''),
        ('["weather"]', "'weather' is none of the labels politics, Sport, sport, the \"arts\""),
        ('["SPORT"]', "'SPORT' is none of the labels politics, Sport, sport, the \"arts\""),
        ("[1]", "'1' is none of the labels politics, Sport, sport, the \"arts\""),
        ('{"topics": ["sport"]}', 'the answer is not a JSON array of labels: \'{"topics":["sport"]}\''),
        ('"sport"', "the answer is not a JSON array of labels: '\"sport\"'"),
    ],
)
def test_errors_in_an_array_of_labels_are_reported(text: str, reason: str) -> None:
    assert decoded(text) == reason


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("sport, politics", ["politics", "sport"]),
        (" Sport,sport,\n", ["Sport", "sport"]),
        ("", []),
        ('"politics", the "arts".', ["politics", 'the "arts"']),
        ("the Arts", "'the Arts' is none of the labels politics, Sport, sport, the \"arts\""),
        ("Topics: sport", "'Topics: sport' is none of the labels politics, Sport, sport, the \"arts\""),
    ],
)
def test_comma_separated_labels_are_read(text: str, labels: list[str] | str) -> None:
    assert decoded(text, "comma") == labels


@pytest.mark.parametrize(("form", "answer"), [("json", '["{}"]'), ("comma", "{}")])
def test_the_encoding_of_an_accented_letter_makes_no_difference(form: str, answer: str) -> None:
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    for label in (composed, decomposed):
        decoder = Decoder(config_of(topics(form, labels=[label, "bar"])), labels={})
        for text in (composed, decomposed, decomposed.upper()):
            assert decoder.decode(answer.format(text)).values == {"topics": [label]}
    decoder = Decoder(config_of(topics(form, labels=[composed, decomposed])), labels={})
    assert decoder.decode(answer.format(decomposed)).values == {"topics": [decomposed]}


@pytest.mark.parametrize(("form", "member"), [("json", ["sport", "politics"]), ("comma", "sport, politics")])
def test_a_set_among_several_outputs_is_an_array_or_a_string(form: str, member: Any) -> None:
    config = config_of(topics(form), {"name": "stars", "type": "number"})
    decoder = Decoder(config, labels={})
    result = decoder.decode(json.dumps({"stars": 3, "topics": member}))
    assert (result.values, result.errors) == ({"topics": ["politics", "sport"], "stars": 3}, {})
    assert config.output_features[0].answer_member(["politics", "sport"]) == (
        ["politics", "sport"] if form == "json" else "politics, sport"
    )
    assert decoder.decode('{"stars": 3}').errors == {"topics": "the answer has no 'topics'"}
    assert decoder.decode('{"topics": ["rain"], "stars": 3}').errors.keys() == {"topics"}


@given(labels=st.lists(st.text(min_size=1).filter(lambda text: text == text.strip() and "," not in text), unique=True))
@pytest.mark.parametrize("form", FORMATS)
def test_every_target_is_read_as_its_labels(form: str, labels: list[str]) -> None:
    if not labels:
        return
    config = config_of(topics(form, labels=labels))
    target = config.output_features[0].answer_text(labels[::2])
    assert Decoder(config, labels={}).decode(target).values == {"topics": labels[::2]}


def scores(truths: list[list[str]], answers: list[list[str] | None], **decoder: Any) -> dict[str, float]:
    """Return the scores of answers; None is an unreadable answer."""
    config = config_of(topics(**decoder))
    reader, scorer = Decoder(config, labels={}), Scorer(config)
    for truth, answer in zip(truths, answers, strict=True):
        scorer.add({"topics": truth}, reader.decode("?" if answer is None else json.dumps(answer)), answered=True)
    return dict(scorer.scores().outputs["topics"])


def test_scores_equal_scikit_learns() -> None:
    from sklearn.metrics import accuracy_score, f1_score, jaccard_score
    from sklearn.preprocessing import MultiLabelBinarizer

    dice, labels = random.Random(1), ["a", "b", "c", "d", "never"]
    truths = [[label for label in labels[:3] if dice.random() < 0.5] for _ in range(200)]
    answers = [[label for label in labels[:4] if (label in truth) != (dice.random() < 0.2)] for truth in truths]
    result = scores(truths, [*answers], labels=labels)
    binary = MultiLabelBinarizer(classes=labels[:4])  # labels that occur
    true, said = binary.fit_transform(truths), binary.fit_transform(answers)
    assert result == {
        "exact_match": pytest.approx(accuracy_score(true, said)),
        "micro_f1": pytest.approx(f1_score(true, said, average="micro")),
        "macro_f1": pytest.approx(f1_score(true, said, average="macro", zero_division=0)),
        "jaccard": pytest.approx(jaccard_score(true, said, average="samples", zero_division=1)),
        "invalid": 0,
        "errors": 0,
        "n": 200,
    }
    order = list(range(200))
    dice.shuffle(order)
    assert scores([truths[n] for n in order], [answers[n] for n in order], labels=labels) == result


def test_an_unreadable_answer_is_an_empty_set_that_is_wrong_and_counted() -> None:
    result = scores([["sport"], ["sport", "politics"], [], []], [["sport"], None, None, []])
    assert {name: value for name, value in result.items() if name != "macro_f1"} == {
        "exact_match": 0.5,
        "micro_f1": 2 * 1 / (3 + 1),
        "jaccard": 0.5,
        "invalid": 0.5,
        "errors": 0,
        "n": 4,
    }
    assert result["macro_f1"] == pytest.approx((2 / 3 + 0) / 2)


def test_f1_of_rows_without_any_label_is_the_fraction_of_correct_rows() -> None:
    result = scores([[], []], [[], None])
    assert (result["micro_f1"], result["macro_f1"], result["exact_match"], result["jaccard"]) == (0.5, 0.5, 0.5, 0.5)


def matcher(grammar: str) -> tuple[Any, Grammar]:
    tokenizer = byte_tokenizer()
    size = len(tokenizer)
    return tokenizer, Grammar(grammar, tokenizer=tokenizer, ends=[tokenizer.eos_token_id], size=size)


def accepts(grammar: str, text: str) -> bool:
    tokenizer, compiled = matcher(grammar)
    ids, row = tokenizer.encode(text), compiled.matcher()
    return bool(row.try_consume_tokens(ids) == len(ids) and row.is_accepting())


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_the_grammar_accepts_each_set_in_one_order_and_nothing_else(form: str, several: bool) -> None:
    others = ({"name": "stars", "type": "number"},) if several else ()
    output, *_ = (config := config_of(topics(form, labels=["a", 'b"', "c d"], constrain=True), *others)).output_features
    grammar = answer_grammar(config.output_features, labels={})
    assert grammar is not None

    def answer(labels: tuple[str, ...]) -> str:
        if not several:
            return output.answer_text(labels)
        return json.dumps({"topics": output.answer_member(labels), "stars": 1})

    for count in range(4):
        for labels in itertools.product(output.labels or (), repeat=count):
            in_order = labels == tuple(label for label in output.labels or () if label in labels)
            assert accepts(grammar, answer(labels)) == in_order, labels
    assert not accepts(grammar, answer(("e",)))


@pytest.mark.parametrize("form", FORMATS)
def test_constrained_answers_are_sets_for_any_logits(form: str) -> None:
    config = config_of(topics(form, constrain=True))
    grammar = answer_grammar(config.output_features, labels={})
    assert grammar is not None
    tokenizer, compiled = matcher(grammar)
    decoder, dice = Decoder(config, labels={}), np.random.default_rng(1)
    seen = set()
    for _ in range(30):
        row = Row(SlotRequest((), 999, row=0), matcher=compiled.matcher())
        while not row.new or row.new[-1] != tokenizer.eos_token_id:
            (allowed,) = np.nonzero(compiled.allowed([row])[0].numpy())
            row.new.append(int(dice.choice(allowed)))
        result = decoder.decode(tokenizer.decode(row.new[:-1]))
        assert not result.errors
        seen.add(tuple(result.values["topics"]))
    assert len(seen) > 5


def test_labels_come_from_the_answers_if_the_configuration_lists_none() -> None:
    output = {"name": "topics", "type": "set", "decoder": {"constrain": True}}
    config = config_of(output)
    result = Decoder(config, labels={"topics": ("a", "b")}).decode('["b", "a"]')
    assert result.values == {"topics": ["a", "b"]}
    grammar = answer_grammar(config.output_features, labels={"topics": ("a", "b")})
    assert grammar is not None
    assert (accepts(grammar, '["a","b"]'), accepts(grammar, '["c"]')) == (True, False)


def prompt_of(example: Any, form: str = "json") -> str:
    config = config_of(topics(form), prompt={"examples": [{"question": "who?", "topics": example}]})
    return Formatter(config, tokenizer=None, labels={"topics": tuple(LABELS)}).format_prompt({"question": "why?"}).text


@pytest.mark.parametrize("example", [["sport", "politics"], "sport, politics", '["sport", "politics"]'], ids=repr)
def test_few_shot_examples_are_written_like_targets(example: Any) -> None:
    assert prompt_of(example) == 'who?\n["politics","sport"]\n\nwhy?\n'
    assert prompt_of(example, "comma") == "who?\npolitics, sport\n\nwhy?\n"


def test_a_few_shot_example_with_an_unknown_label_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"^prompt\.examples\[0\]: column topics: 'rain' is none of the labels politics"
    ):
        prompt_of(["rain"])
    config = config_of(
        {"name": "topics", "type": "set"}, prompt={"examples": [{"question": "q", "topics": ["a", "b"]}]}
    )
    with pytest.raises(DataError, match=r"^prompt\.examples\[0\]: topics is 'b', none of the labels a, c$"):
        Formatter(config, tokenizer=None, labels={"topics": ("a", "c")})


def test_the_format_of_a_set_is_part_of_the_description_of_the_output() -> None:
    parts = {form: output_input(config_of(topics(form)).output_features[0]) for form in FORMATS}
    assert parts == {"json": "topics:set:json", "comma": "topics:set:comma"}
    assert output_input(config_of().output_features[0]) == "answer:text"


def test_what_a_head_decides_is_part_of_the_description_of_the_output() -> None:
    labels = {"labels": ["a", "b"]}
    with_head = {"name": "topics", "type": "set", "head": "linear", "decoder": labels | {"threshold": 0.3}}
    assert output_input(config_of(with_head).output_features[0]) == "topics:set:json:threshold 0.3"
    vector = {"name": "vector", "type": "embedding", "decoder": {"pooling": "last"}}
    assert output_input(config_of(vector).output_features[0]) == "vector:embedding:pooling last"


@pytest.mark.parametrize("form", FORMATS)
def test_answers_may_be_long_enough_for_all_labels(form: str) -> None:
    config, tokenizer = config_of(topics(form)), byte_tokenizer()
    output = config.output_features[0]
    assert isinstance(output, SetOutput)
    longest = len(tokenizer.encode(output.answer_text(LABELS)))
    assert default_new_tokens(config, tokenizer=tokenizer, labels={}) == longest + 16


def test_sets_are_trained_evaluated_and_predicted(colours: Any, tmp_path: Path) -> None:
    rows = [row | {"found": [row["colour"], str(row["number"])]} for row in colours.rows(30)]
    rows += [row | {"found": f"{row['number']};{row['colour']}"} for row in colours.rows(20, seed=3)]
    rows += [{"text": "3 grey balls", "found": ["grey"]}] * 10
    labels = ["red", "blue", "green", "1", "2", "3", "4"]
    output = {"name": "found", "type": "set", "decoder": {"labels": labels, "constrain": True}}
    config = colours.config(
        output_features=[output | {"preprocessing": {"format": "comma", "separator": ";"}}],
        generation={"max_new_tokens": None},
        trainer={"validation_metric": "found.micro_f1", "epochs": 1},
        data={"max_bad_rows": 20},
    )
    Model(config, quiet=True).train(rows, run=tmp_path / "run")
    reason = "column found: 'grey' is none of the labels red, blue, green, 1, 2, 3, 4"
    assert reason in (tmp_path / "run" / "quarantine.jsonl").read_text("utf8")

    model = Model.load(tmp_path / "run")
    predictions = model.predict(rows[:16], output=tmp_path / "out.jsonl")
    for row in predictions:
        assert row["found"] == [label for label in labels if label in row["found_raw"].replace(" ", "").split(",")]
    lines = (tmp_path / "out.jsonl").read_text("utf8").splitlines()
    assert [json.loads(line)["found"] for line in lines] == predictions["found"]

    metrics = model.evaluate(rows[:16])["found"]
    right = sum(set(row["found"]) == set(row["found_input"]) for row in predictions)
    shared = sum(len(set(row["found"]) & set(row["found_input"])) for row in predictions)
    assert metrics["exact_match"] == right / 16
    assert metrics["micro_f1"] == pytest.approx(2 * shared / (32 + sum(map(len, predictions["found"]))))


def test_labels_from_the_data_are_saved_with_the_run(colours: Any, tmp_path: Path) -> None:
    rows = [row | {"found": f"{row['colour']},{row['number']}"} for row in colours.rows(40)]
    output = {"name": "found", "type": "set", "decoder": {"constrain": True}}
    config = colours.config(output_features=[output], trainer={"epochs": 1})
    Model(config, quiet=True).train(rows, run=tmp_path / "run")
    predictions = Model.load(tmp_path / "run").predict([{"text": "3 red balls"}])
    assert set(predictions["found"][0]) <= {"red", "blue", "green", "1", "2", "3", "4"}
    assert predictions["status"] == ["ok"]
