import json
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.outputs.decode import Decoder
from partita.outputs.scorer import OutputScores, Scorer
from partita.outputs.types.json import canonical
from partita_schema.sections.outputs import METRICS_BY_NAME, SHARED_METRICS

from .conftest import config_of

LABELS = ["cat", "dog", "fish"]
CATEGORY = {"name": "kind", "type": "category", "decoder": {"labels": LABELS}}
NUMBER = {"name": "age", "type": "number"}
JSON = {"name": "order", "type": "json"}
WORDS = ["the", "a", "dog", "cat", "sat", "on", "under", "mat,", "and", "ran", "far", "away."]


@pytest.fixture(scope="module")
def score(make_config: Any) -> Any:
    """Return a function that scores pairs of the truth by output and an answer, or None for an error."""

    def call(
        *pairs: tuple[dict[str, Any], str | None], outputs: Sequence[Any], scores: Sequence[Any] | None = None
    ) -> OutputScores:
        config = make_config(*outputs)
        decoder, scorer = Decoder(config, labels={}), Scorer(config)
        for (truth, text), of_row in zip(pairs, scores or [None] * len(pairs), strict=True):
            decoded = decoder.without_answer("error") if text is None else decoder.decode(text)
            scorer.add(truth, decoded, answered=text is not None, scores=of_row)
        return scorer.scores()

    return call


def test_an_answer_is_compared_with_the_correct_one_that_it_equals(make_config: Any) -> None:
    config = make_config(CATEGORY, NUMBER, JSON)
    decoder, scorer = Decoder(config, labels={}), Scorer(config)
    truths = [{"kind": "cat", "age": 3, "order": {"n": 1}}, {"kind": "dog", "age": 5, "order": {"n": 2}}]
    answers = [truths[1], truths[0] | {"kind": "fish"}, truths[1] | {"age": 4}]

    rows = [
        scorer.add(truths[0], decoder.decode(json.dumps(answer)), answered=True, more_truths=truths[1:])
        for answer in answers
    ]

    assert [(row["kind"].closest, row["age"].closest, row["order"].closest) for row in rows] == [
        (1, 1, 1),
        (0, 0, 0),
        (1, 0, 1),
    ]
    scores = scorer.scores()
    assert scores.outputs["kind"]["accuracy"] == pytest.approx(2 / 3)
    assert {(pair["correct"], pair["answer"]): pair["rows"] for pair in scores.details["kind"]["confusion"]} == {
        ("dog", "dog"): 2,
        ("cat", "fish"): 1,
    }
    assert scores.outputs["age"]["mae"] == pytest.approx(1 / 3)
    assert scores.outputs["order"]["exact_match"] == 1


def test_no_rows_have_no_scores(score: Any) -> None:
    scores = score(outputs=[CATEGORY, NUMBER])
    assert (scores, scores.flat) == (OutputScores(), {})


def test_category_scores_equal_scikit_learns_over_all_rows(score: Any) -> None:
    from sklearn.metrics import accuracy_score, f1_score

    dice = random.Random(1)
    truths = dice.choices(LABELS, weights=[5, 3, 1], k=200)
    answers = [truth if dice.random() < 0.7 else dice.choice([*LABELS, "bird"]) for truth in truths]
    scores = score(*(({"kind": truth}, text) for truth, text in zip(truths, answers, strict=True)), outputs=[CATEGORY])
    assert scores.outputs["kind"] == {
        "accuracy": pytest.approx(accuracy_score(truths, answers)),
        "macro_f1": pytest.approx(f1_score(truths, answers, labels=LABELS, average="macro")),
        "weighted_f1": pytest.approx(f1_score(truths, answers, labels=LABELS, average="weighted")),
        "invalid": answers.count("bird") / 200,
        "errors": 0.0,
        "n": 200.0,
    }


def test_an_unreadable_answer_is_a_false_negative_in_f1_and_not_a_separate_label(score: Any) -> None:
    from sklearn.metrics import f1_score

    truths, answers = ["cat", "cat", "dog", "dog"], ["cat", "bird", "dog", None]
    result = score(*(({"kind": t}, a) for t, a in zip(truths, answers, strict=True)), outputs=[CATEGORY]).outputs[
        "kind"
    ]
    read = ["cat", "unreadable", "dog", "unreadable"]
    for average in ("macro", "weighted"):
        expected = f1_score(truths, read, labels=["cat", "dog"], average=average, zero_division=0.0)
        assert result[f"{average}_f1"] == pytest.approx(expected)
    assert result["macro_f1"] == pytest.approx(2 / 3)


def test_unreadable_and_missing_answers_are_wrong_and_counted(score: Any) -> None:
    pairs = [({"kind": "cat"}, "cat"), ({"kind": "cat"}, "a bird"), ({"kind": "cat"}, None), ({"kind": "cat"}, "dog")]
    result = score(*pairs, outputs=[CATEGORY]).flat
    assert {name: result[f"kind.{name}"] for name in ("accuracy", "invalid", "errors", "n")} == {
        "accuracy": 0.25,
        "invalid": 0.25,
        "errors": 0.25,
        "n": 4,
    }
    assert (result["exact_match"], result["n"]) == (0.25, 4)


def test_the_metrics_of_each_label_equal_scikit_learns(score: Any) -> None:
    from sklearn.metrics import precision_recall_fscore_support

    dice = random.Random(4)
    truths = dice.choices(LABELS, weights=[5, 3, 1], k=100)
    answers = [truth if dice.random() < 0.6 else dice.choice([*LABELS, "bird"]) for truth in truths]
    pairs = [({"kind": truth}, text) for truth, text in zip(truths, answers, strict=True)]
    per_label = score(*pairs, outputs=[CATEGORY]).details["kind"]["per_label"]
    columns = precision_recall_fscore_support(truths, answers, labels=LABELS, zero_division=0.0)
    assert list(per_label) == LABELS
    for label, *values in zip(LABELS, *columns, strict=True):
        names = ("precision", "recall", "f1", "support")
        assert per_label[label] == {name: pytest.approx(value) for name, value in zip(names, values, strict=True)}


def test_the_confusion_of_labels_is_a_list_of_pairs_with_their_rows(score: Any) -> None:
    truths = ["dog", "cat", "cat", "cat", "dog", "dog"]
    answers = ["dog", "dog", "cat", "dog", "bird", None]
    pairs = [({"kind": truth}, text) for truth, text in zip(truths, answers, strict=True)]
    assert score(*pairs, outputs=[CATEGORY]).details["kind"]["confusion"] == [
        {"correct": "cat", "answer": "cat", "rows": 1},
        {"correct": "cat", "answer": "dog", "rows": 2},
        {"correct": "dog", "answer": None, "rows": 2},
        {"correct": "dog", "answer": "dog", "rows": 1},
    ]


def test_scored_labels_have_the_areas_of_scikit_learn(score: Any) -> None:
    from sklearn.metrics import average_precision_score, roc_auc_score
    from sklearn.preprocessing import label_binarize

    dice = random.Random(5)
    truths = [*LABELS, *dice.choices(LABELS, weights=[5, 3, 1], k=117)]
    logits = [{label: dice.gauss(2.0 * (label == truth), 1.5) for label in LABELS} for truth in truths]
    answers = [max(row, key=lambda label, row=row: row[label]) for row in logits]
    pairs = [({"kind": truth}, text) for truth, text in zip(truths, answers, strict=True)]
    scored = {**CATEGORY, "decoder": {"labels": LABELS, "scoring": True}}
    result = score(*pairs, outputs=[scored], scores=logits)
    weights = [[math.exp(row[label]) for label in LABELS] for row in logits]
    shares = [[weight / sum(row) for weight in row] for row in weights]
    auroc = roc_auc_score(truths, shares, multi_class="ovr", average="macro", labels=LABELS)
    binary = label_binarize(truths, classes=LABELS)
    assert result.outputs["kind"]["auroc"] == pytest.approx(auroc, abs=1e-12)
    assert result.outputs["kind"]["average_precision"] == pytest.approx(
        average_precision_score(binary, shares, average="macro"), abs=1e-12
    )
    for index, label in enumerate(LABELS):
        of_label = result.details["kind"]["per_label"][label]
        column = [row[index] for row in shares]
        assert of_label["auroc"] == pytest.approx(roc_auc_score(binary[:, index], column), abs=1e-12)
        assert of_label["average_precision"] == pytest.approx(
            average_precision_score(binary[:, index], column), abs=1e-12
        )


@given(st.data())
def test_metrics_do_not_depend_on_the_order_of_the_rows(data: st.DataObject) -> None:
    config = config_of({**CATEGORY, "decoder": {"labels": LABELS, "scoring": True}})
    label = st.sampled_from(LABELS)
    value = st.floats(-5, 0, width=32)
    row = st.tuples(label, label | st.none(), st.fixed_dictionaries(dict.fromkeys(LABELS, value)) | st.none())
    rows = data.draw(st.lists(row, min_size=1, max_size=12))

    def scores(rows: Sequence[Any]) -> OutputScores:
        decoder, scorer = Decoder(config, labels={}), Scorer(config)
        for truth, text, of_row in rows:
            decoded = decoder.without_answer("error") if text is None else decoder.decode(text)
            scorer.add({"kind": truth}, decoded, answered=text is not None, scores=of_row)
        return scorer.scores()

    assert str(scores(rows)) == str(scores(data.draw(st.permutations(rows))))


def test_number_scores_equal_scikit_learns(score: Any) -> None:
    from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score, root_mean_squared_error

    dice = random.Random(2)
    truths = [dice.randint(0, 9) for _ in range(100)]
    answers = [truth + dice.choice([0, 0, 1, -2.5]) for truth in truths]
    pairs = [({"age": truth}, f"about {answer}") for truth, answer in zip(truths, answers, strict=True)]
    scores = score(*pairs, ({"age": 3}, "no number"), outputs=[NUMBER]).outputs["age"]
    assert scores["mae"] == pytest.approx(mean_absolute_error(truths, answers))
    assert scores["mse"] == pytest.approx(mean_squared_error(truths, answers))
    assert scores["rmse"] == pytest.approx(root_mean_squared_error(truths, answers))
    assert scores["r2"] == pytest.approx(r2_score(truths, answers))
    right = sum(truth == answer for truth, answer in zip(truths, answers, strict=True))
    assert scores["exact_match"] == pytest.approx(right / 101)
    assert scores["invalid"] == pytest.approx(1 / 101)


def test_errors_are_infinite_if_no_answer_is_a_number(score: Any) -> None:
    scores = score(({"age": 3}, "old"), outputs=[NUMBER]).outputs["age"]
    assert (scores["mae"], scores["mse"], scores["rmse"], scores["exact_match"]) == (math.inf, math.inf, math.inf, 0)
    assert scores["r2"] == -math.inf


@pytest.mark.parametrize("answers", [[3, 3], [3, 4], [3]])
def test_r2_of_constant_targets_is_1_without_errors_and_otherwise_0(score: Any, answers: list[int]) -> None:
    from sklearn.metrics import r2_score

    scores = score(*(({"age": 3}, str(answer)) for answer in answers), outputs=[NUMBER]).outputs["age"]
    assert scores["r2"] == float(answers != [3, 4])
    if len(answers) > 1:
        assert scores["r2"] == r2_score([3] * len(answers), answers)


def test_the_mean_of_constant_targets_is_rounded_and_they_are_constant_nevertheless(score: Any) -> None:
    scores = score(*(({"age": 0.1}, "0.6") for _ in range(3)), outputs=[NUMBER]).outputs["age"]
    assert scores["r2"] == 0.0


def test_the_largest_floats_do_not_overflow(score: Any) -> None:
    scores = score(({"age": -1e308}, "1e308"), outputs=[NUMBER]).outputs["age"]
    assert scores["rmse"] == math.inf
    assert scores["r2"] == -math.inf
    right = score(({"age": -1e308}, "-1e308"), ({"age": 1e308}, "1e308"), outputs=[NUMBER]).outputs["age"]
    assert (right["mse"], right["r2"]) == (0, 1)


def test_json_is_compared_by_value_and_by_field(score: Any) -> None:
    truth = {"order": {"city": "Oslo", "count": 2}}
    texts: list[str | None] = [
        '{"count": 2.0, "city": "Oslo"}',
        '{"city": "Oslo", "count": true, "x": 1}',
        "none",
        None,
    ]
    assert score(*((truth, text) for text in texts), outputs=[JSON]).outputs["order"] == {
        "exact_match": 0.25,
        "valid": 0.5,
        "field_accuracy": 3 / 8,
        "field.city": 0.5,
        "field.count": 0.25,
        "joint_accuracy": 0.25,
        "slot_accuracy": 3 / 8,
        "slot_f1": pytest.approx(2 * 3 / (8 + 5)),
        "slot.city": pytest.approx(2 * 2 / (4 + 2)),
        "slot.count": pytest.approx(2 * 1 / (4 + 2)),
        "invalid": 0.25,
        "errors": 0.25,
        "n": 4.0,
    }


def test_a_null_json_field_differs_from_a_missing_one(score: Any) -> None:
    truth = {"order": {"city": None, "count": 2}}
    texts = ['{"city": null, "count": 2}', '{"count": 2}', '{"city": "", "count": 2}']
    result = score(*((truth, text) for text in texts), outputs=[JSON]).outputs["order"]
    assert (result["field.city"], result["field.count"]) == (pytest.approx(1 / 3), 1)
    assert result["field_accuracy"] == pytest.approx(4 / 6)
    assert result["exact_match"] == pytest.approx(1 / 3)


def test_an_unexpected_json_field_makes_the_answer_wrong_but_adds_no_field(score: Any) -> None:
    result = score(({"order": {"count": 2}}, '{"count": 2, "city": null}'), outputs=[JSON]).outputs["order"]
    assert (result["exact_match"], result["field_accuracy"]) == (0, 1)
    assert "field.city" not in result


def test_json_that_is_no_object_has_no_fields(score: Any) -> None:
    assert set(score(({"order": [1]}, "[1]"), outputs=[JSON]).outputs["order"]) == {
        "exact_match",
        "valid",
        "invalid",
        "errors",
        "n",
    }


def test_text_scores_equal_those_of_the_libraries_over_the_whole_corpus(score: Any) -> None:
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu import corpus_bleu

    dice = random.Random(3)
    truths = [" ".join(dice.choices(WORDS, k=dice.randint(4, 12))) for _ in range(30)]
    answers = [truth if dice.random() < 0.3 else " ".join(dice.choices(WORDS, k=8)) for truth in truths]
    pairs = [({"answer": truth}, text) for truth, text in zip(truths, answers, strict=True)]
    scores = score(*pairs, outputs=[]).outputs["answer"]
    rouge = RougeScorer(["rouge1", "rouge2", "rougeL"])
    results = [rouge.score(truth, text) for truth, text in zip(truths, answers, strict=True)]
    for name, kind in (("rouge_1", "rouge1"), ("rouge_2", "rouge2"), ("rouge_l", "rougeL")):
        assert scores[name] == pytest.approx(sum(one[kind].fmeasure for one in results) / 30)
    assert scores["bleu"] == pytest.approx(corpus_bleu(answers, [truths]).score)
    assert 0 < scores["exact_match"] < 1


@pytest.mark.parametrize(
    ("truths", "answers"),
    [
        (["yes", "no", "red"], ["yes", "no", "red"]),
        (["yes", "light red"], ["no", "dark red"]),
        (["yes", "a b c d e"], ["yes", "a b c e d"]),
        (["yes"], ["no"]),
        (["a b c d e f g"] * 3, ["a b c d e f g"] * 3),
    ],
)
def test_bleu_of_short_answers_uses_only_the_ngram_orders_they_have(
    score: Any, truths: list[str], answers: list[str]
) -> None:
    from sacrebleu.metrics import BLEU

    pairs = [({"answer": truth}, text) for truth, text in zip(truths, answers, strict=True)]
    result = score(*pairs, outputs=[]).outputs["answer"]["bleu"]
    assert result == pytest.approx(BLEU(effective_order=True).corpus_score(answers, [truths]).score)
    assert (result == pytest.approx(100)) == (truths == answers)
    assert result <= 100


def test_words_of_other_scripts_count_in_rouge(score: Any) -> None:
    scores = score(({"answer": "привет мир"}, "привет"), outputs=[]).outputs["answer"]
    assert scores["rouge_l"] == pytest.approx(2 / 3)


def test_a_missing_text_counts_as_empty(score: Any) -> None:
    result = score(({"answer": "a b c d e"}, None), ({"answer": "a b c d e"}, "a b c d e"), outputs=[]).outputs[
        "answer"
    ]
    assert (result["exact_match"], result["rouge_l"], result["errors"]) == (0.5, 0.5, 0.5)
    assert 0 < result["bleu"] < 100


def test_a_row_is_correct_if_all_its_outputs_are(score: Any) -> None:
    truth = {"kind": "cat", "age": 3}
    answers = [{"kind": "cat", "age": 3}, {"kind": "cat", "age": 4}, {"kind": "dog", "age": 3}]
    scores = score(*((truth, json.dumps(answer)) for answer in answers), outputs=[CATEGORY, NUMBER])
    assert scores.overall == {"exact_match": pytest.approx(1 / 3), "n": 3.0}
    assert scores.flat["kind.accuracy"] == scores.flat["age.exact_match"] == pytest.approx(2 / 3)


@given(st.dictionaries(st.text(max_size=3), st.integers() | st.floats(allow_nan=False) | st.booleans()))
def test_equal_json_has_the_same_text_for_any_order_of_keys(value: dict[str, Any]) -> None:
    assert canonical(dict(reversed(value.items()))) == canonical(value)


def test_json_true_does_not_equal_1() -> None:
    assert canonical([True, 1, 1.0]) == "[true, 1, 1]"


def test_the_registry_of_score_names_equals_the_computed_scores(make_config: Any) -> None:
    config = make_config(
        {"name": "c", "type": "category", "decoder": {"labels": ["a"]}},
        {"name": "n", "type": "number"},
        {"name": "j", "type": "json"},
        {"name": "t", "type": "text"},
    )
    truth = {"c": "a", "n": 1, "j": {"x": 1}, "t": "b"}
    scorer = Scorer(config)
    scorer.add(truth, Decoder(config, labels={}).decode(json.dumps(truth)), answered=True)
    names = {name for name in scorer.scores().flat if not any(part in name for part in METRICS_BY_NAME)}
    wanted = {
        f"{output.name}.{metric}" for output in config.output_features for metric in (*output.METRICS, *SHARED_METRICS)
    }
    assert names == {*wanted, "exact_match", "n"}
