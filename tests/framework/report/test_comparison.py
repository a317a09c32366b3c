"""Runs are compared row by row: values, intervals, examples, and what is not common is said or refused."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.lib.pretty import pretty
from statsmodels.stats.contingency_tables import mcnemar

from partita.data.episode import Episode
from partita.outputs.types.text import TextMetrics
from partita.report.compare_page import verdict
from partita.report.comparison import Comparison, compare_runs
from partita.report.comparison_table import metric_row
from partita.report.evaluation import read_evaluations
from partita.report.measures import MetricEstimate, measures_of
from partita.report.run_record import read_run
from partita.report.sections.headline import headline
from partita.report.statistics import Difference, Interval, right_difference
from partita.runs.row_results import EvaluationHeader, OutputResult, RecordedRow, evaluation_path
from partita_schema.errors import DataError, PartitaError

from ..recorded_results import write_row_results, write_transcript
from ..run_directories import MakeRun
from .made_runs import write_run

TEAMS = ("sales", "support")
Evaluated = Callable[..., Path]


@pytest.fixture
def evaluated(make_run: MakeRun) -> Evaluated:
    """Return a function that writes a run with the results of rows of a split."""

    def make(
        name: str, rows: Sequence[RecordedRow], *, split: str = "test", kinds: dict[str, str] | None = None, **run: Any
    ) -> Path:
        folder = make_run(name, **run)
        header = EvaluationHeader(split, "result", "f", outputs=kinds or {"team": "category"})
        write_row_results(evaluation_path(folder, split), header, rows)
        return folder

    return make


def teams(answers: str, *, first: int = 2, **more: Any) -> list[RecordedRow]:
    """Return rows whose references are sales, support, sales, ...; `+` is right, `-` wrong, `?` unreadable."""
    rows = []
    for number, mark in enumerate(answers):
        truth, wrong = TEAMS[number % 2], TEAMS[1 - number % 2]
        value = {"+": truth, "-": wrong, "?": None}[mark]
        output = OutputResult(truth, value, mark == "+")
        rows.append(
            RecordedRow(f"rows.csv:{number + first}", f"ticket {number}", "?", **more, outputs={"team": output})
        )
    return rows


def metric(comparison: Comparison, name: str, pair: int = 0) -> SimpleNamespace:
    """Return a metric as `--json` has it."""
    metrics = comparison.record()["pairs"][pair]["metrics"]
    return SimpleNamespace(**next(one for one in metrics if one["metric"] == name))


def test_right_rows_are_compared_with_mcnemars_test(evaluated: Evaluated) -> None:
    a = evaluated("a", teams("+" * 40 + "-" * 20 + "+" * 4 + "-" * 36))
    b = evaluated("b", teams("+" * 40 + "+" * 20 + "-" * 4 + "-" * 36))
    comparison = compare_runs([a, b])
    accuracy = metric(comparison, "team.accuracy")
    assert (accuracy.first, accuracy.second, accuracy.difference) == pytest.approx((0.44, 0.60, 0.16))
    assert accuracy.p == pytest.approx(mcnemar([[40, 4], [20, 36]], exact=True).pvalue)
    assert accuracy.low < 0.16 < accuracy.high
    assert (accuracy.verdict, accuracy.test) == ("better", "McNemar")
    (pair,) = comparison.pairs
    (agreement,) = pair.agreement
    assert (agreement.both, agreement.only_first, agreement.only_second, agreement.neither) == (40, 4, 20, 36)
    assert (comparison.runs, comparison.split, comparison.rows) == (["a", "b"], "test", 100)
    assert metric(comparison, "team.macro_f1").test == "bootstrap"


def test_the_other_order_has_the_opposite_difference(evaluated: Evaluated) -> None:
    a, b = evaluated("a", teams("+-+-+-??")), evaluated("b", teams("++++--++"))
    forward, backward = compare_runs([a, b]), compare_runs([b, a])
    for one, other in zip(forward.pairs[0].metrics, backward.pairs[0].metrics, strict=True):
        assert one.difference is not None
        assert other.difference is not None
        assert (one.difference.value, one.reference) == (pytest.approx(-other.difference.value), other.result)
        assert one.difference.p == pytest.approx(other.difference.p, abs=0.02)


@pytest.mark.parametrize("better", range(0, 16, 3))
def test_the_report_and_the_comparison_have_the_same_verdict(better: int, evaluated: Evaluated, tmp_path: Path) -> None:
    """With few rows, McNemar's test and the interval of the difference disagree: both follow the p-value."""
    first, second = teams("-" * better + "+" * 40), teams("+" * better + "+" * 38 + "-" * 2)
    comparison = compare_runs([evaluated("a", first), evaluated("b", second)])
    run = write_run(tmp_path / "run", outputs={"team": "category"}, results=second, base=first)
    (measures,) = [measures_of(results) for results in read_evaluations(run)]

    compared = comparison.pairs[0].metrics
    reported = {one.metric: one for one in measures.measures}

    assert [reported[one.metric] for one in compared] == compared
    assert [reported[one.metric].verdict for one in compared] == [one.verdict for one in compared]
    main = comparison.pairs[0].main
    assert main is not None
    sentence = headline(read_run(run), measures)
    starts = {"better": "Better than", "worse": "Worse than", "no measurable difference": "No measurable difference"}
    assert sentence.startswith(starts[str(main.verdict)])
    page = verdict(comparison.pairs[0], "a")
    ends = {"better": "b is better than a", "worse": "b is worse", "no measurable difference": "No measurable"}
    assert page.startswith(ends[str(main.verdict)])


@pytest.mark.parametrize(
    ("trainer", "main"),
    [({}, "team.accuracy"), ({"validation_metric": "team.macro_f1"}, "team.macro_f1")],
)
def test_the_main_metric_is_that_of_the_list_of_runs(
    trainer: dict[str, Any], main: str, evaluated: Evaluated, make_run: MakeRun
) -> None:
    section = {"trainer": {"type": "finetune", **trainer}}
    runs = [evaluated(name, teams("+-+-+"), **section) for name in "ab"]
    metric = compare_runs(runs).pairs[0].main
    assert metric is not None
    assert metric.metric == main


def test_an_interval_without_zero_is_no_measurable_difference_if_the_test_does_not_find_one() -> None:
    difference = right_difference(0, 5, 40)

    assert difference.low > 0
    assert difference.p > 0.05
    share = Interval(0.5, 0.4, 0.6)
    assert MetricEstimate("team.accuracy", share, share, difference).verdict == "no measurable difference"


@pytest.mark.parametrize(
    ("metric", "value", "verdict"),
    [
        ("team.accuracy", 0.2, "better"),
        ("price.mae", 0.2, "worse"),
        ("perplexity", -0.2, "better"),
        ("loss", 0.2, "worse"),
        ("turns", 0.2, "higher"),
        ("turns", -0.2, "lower"),
    ],
)
def test_the_verdict_knows_the_direction_of_a_metric(metric: str, value: float, verdict: str) -> None:
    share, difference = Interval(0.5, 0.4, 0.6), Difference(value, value - 0.1, value + 0.1, 0.01, "bootstrap")

    assert MetricEstimate(metric, share, share, difference).verdict == verdict
    assert MetricEstimate(metric, share, share, difference._replace(p=0.05)).verdict == "no measurable difference"


def test_losses_count_by_their_tokens_and_lower_is_better(evaluated: Evaluated) -> None:
    def rows(change: float) -> list[RecordedRow]:
        return [RecordedRow(f"{i}", loss=1 + (i % 5) / 5 + change, tokens=1 + i % 3) for i in range(60)]

    a, b = (evaluated(name, rows(change), kinds={"team": "category"}) for name, change in (("a", 0), ("b", -0.2)))
    loss = metric(compare_runs([a, b]), "loss")
    expected = sum((1 + (i % 5) / 5) * (1 + i % 3) for i in range(60)) / sum(1 + i % 3 for i in range(60))
    assert (loss.first, loss.difference, loss.verdict) == pytest.approx((expected, -0.2, "better"))
    assert (loss.low, loss.high) == pytest.approx((-0.2, -0.2))


def test_numbers_are_compared_by_their_errors(evaluated: Evaluated) -> None:
    def rows(error: float) -> list[RecordedRow]:
        return [
            RecordedRow(str(i), outputs={"price": OutputResult(i, i + error * (1 + i % 4), False)}) for i in range(50)
        ]

    kinds = {"price": "number"}
    comparison = compare_runs([evaluated("a", rows(2), kinds=kinds), evaluated("b", rows(-1), kinds=kinds)])
    mae = metric(comparison, "price.mae")
    assert (mae.first, mae.second, mae.verdict) == (pytest.approx(4.92), pytest.approx(2.46), "better")
    assert {one.better for one in comparison.pairs[0].disagreements} == {"b"}
    assert metric(comparison, "price.exact_match").verdict == "no measurable difference"


def test_unreadable_answers_do_not_differ_from_missing_ones(evaluated: Evaluated) -> None:
    unreadable = teams("?" * 3)
    missing = [replace(row, outputs={"team": replace(row.outputs["team"], right=None)}) for row in unreadable]
    (pair,) = compare_runs([evaluated("a", unreadable), evaluated("b", missing)]).pairs
    assert pair.num_disagreements == 0


@pytest.mark.parametrize("unanswered", [5, 2], ids=["no row", "some rows"])
@pytest.mark.parametrize("swapped", [False, True])
def test_rows_without_a_generated_answer_in_one_run_do_not_differ(
    swapped: bool, unanswered: int, evaluated: Evaluated
) -> None:
    rows = [
        replace(row, answer=None, outputs={}) if index < unanswered else row
        for index, row in enumerate(teams("-" * 5, loss=1.0, tokens=1))
    ]
    runs = [evaluated("a", teams("+" * 5, loss=1.0, tokens=1)), evaluated("b", rows)]
    (pair,) = compare_runs(runs[::-1] if swapped else runs).pairs
    assert pair.num_disagreements == 5 - unanswered


def test_an_answer_differs_from_an_error(evaluated: Evaluated) -> None:
    errors = [replace(row, answer=None) for row in teams("?" * 3)]
    (pair,) = compare_runs([evaluated("a", teams("+" * 3)), evaluated("b", errors)]).pairs
    assert {one.better for one in pair.disagreements} == {"a"}


def test_rows_in_which_runs_differ_alternate_between_those_that_either_run_has_right(evaluated: Evaluated) -> None:
    a = evaluated("a", teams("+" * 10 + "-" * 10 + "?" * 5))
    b = evaluated("b", teams("-" * 10 + "+" * 10 + "-" * 5))
    (pair,) = compare_runs([a, b], max_examples=6).pairs
    assert pair.num_disagreements == 25
    assert [one.better for one in pair.disagreements] == ["a", "b", "a", "b", "a", "b"]
    first = pair.disagreements[0]
    assert (first.key, first.prompt, first.output) == ("rows.csv:2", "ticket 0", "team")
    assert (first.reference, first.first, first.second) == ("sales", "sales", "support")
    (pair,) = compare_runs([a, b], max_examples=100).pairs
    assert [one.better for one in pair.disagreements][20:] == [""] * 5


def test_several_outputs_are_compared_one_by_one_and_together(evaluated: Evaluated) -> None:
    def rows(teams: str, prices: str) -> list[RecordedRow]:
        return [
            RecordedRow(
                str(number),
                outputs={
                    "team": OutputResult("sales", "sales" if team == "+" else "support", team == "+"),
                    "price": OutputResult(1, 1 if price == "+" else 2, price == "+"),
                },
            )
            for number, (team, price) in enumerate(zip(teams, prices, strict=True))
        ]

    kinds = {"team": "category", "price": "number"}
    a, b = evaluated("a", rows("++--", "+-+-"), kinds=kinds), evaluated("b", rows("++++", "+-++"), kinds=kinds)
    comparison = compare_runs([a, b])
    names = [one.metric for one in comparison.pairs[0].metrics]
    assert names[:3] == ["exact_match", "team.accuracy", "team.macro_f1"]
    prices = {f"price.{name}" for name in ("mae", "mse", "rmse", "r2", "exact_match")}
    assert set(names[3:]) == {"team.weighted_f1", *prices}
    assert (metric(comparison, "exact_match").first, metric(comparison, "exact_match").second) == (0.25, 0.75)


def test_a_run_without_answers_is_compared_by_its_losses(evaluated: Evaluated) -> None:
    rows = teams("+-+-", loss=1.0, tokens=1)
    unanswered = [RecordedRow(row.key, loss=0.5, tokens=1) for row in rows]
    comparison = compare_runs([evaluated("a", rows), evaluated("b", unanswered)])
    assert (comparison.rows, [one.metric for one in comparison.pairs[0].metrics]) == (4, ["loss"])
    assert metric(comparison, "loss").second == 0.5


def test_texts_are_compared_by_exact_matches_and_rouge(evaluated: Evaluated) -> None:
    def rows(answer: str) -> list[RecordedRow]:
        metrics = TextMetrics()
        metrics.add("one two", answer, valid=True)
        output = OutputResult("one two", answer, False, of_row=metrics.of_row)
        return [RecordedRow(str(i), "", answer, outputs={"reply": output}) for i in range(20)]

    kinds = {"reply": "text"}
    comparison = compare_runs([evaluated("a", rows("three"), kinds=kinds), evaluated("b", rows("one"), kinds=kinds)])
    rouge = metric(comparison, "reply.rouge_l")
    assert (rouge.first, rouge.second, rouge.verdict) == (0.0, pytest.approx(2 / 3), "better")
    assert metric(comparison, "reply.exact_match").verdict == "no measurable difference"


def test_scores_are_not_compared_by_exact_matches(evaluated: Evaluated) -> None:
    rows = [RecordedRow(str(i), loss=1.0, outputs={"score": OutputResult(1.0, 0.9, False)}) for i in range(5)]
    kinds = {"score": "score"}
    comparison = compare_runs([evaluated("a", rows, kinds=kinds), evaluated("b", rows, kinds=kinds)])
    assert [one.metric for one in comparison.pairs[0].metrics] == ["score.mse", "loss"]


@pytest.mark.parametrize(("queries", "verdict", "p"), [(1, "no measurable difference", 1.0), (12, "better", 2**-11)])
def test_rankings_are_compared_by_their_number_of_queries(
    queries: int, verdict: str, p: float, evaluated: Evaluated
) -> None:
    def rows(scores: tuple[float, float]) -> list[RecordedRow]:
        return [
            RecordedRow(
                f"{query} {relevant}",
                loss=1.0,
                tokens=1,
                outputs={"score": OutputResult(relevant, score, of_row={"query": str(query)})},
            )
            for query in range(12)
            for relevant, score in zip((float(query < queries), 0.0), scores, strict=True)
        ]

    kinds = {"score": "score"}
    a, b = (evaluated(name, rows(scores), kinds=kinds) for name, scores in (("a", (0.1, 0.9)), ("b", (0.9, 0.1))))
    mrr = metric(compare_runs([a, b]), "score.mrr")
    assert (mrr.first, mrr.second, mrr.verdict) == (0.5, 1.0, verdict)
    assert mrr.p == pytest.approx(p, abs=1e-3)


def test_embeddings_are_compared_by_the_ranks_of_their_rows_unless_some_rows_are_missing(evaluated: Evaluated) -> None:
    def rows(ranks: Sequence[int]) -> list[RecordedRow]:
        return [
            RecordedRow(
                str(index), loss=1.0, tokens=1, outputs={"vector": OutputResult(None, None, of_row={"rank": rank})}
            )
            for index, rank in enumerate(ranks)
        ]

    features = [{"name": "vector", "type": "embedding", "column": "passage"}]
    a, b, c = (
        evaluated(name, rows(ranks), kinds={"vector": "embedding"}, output_features=features)
        for name, ranks in (("a", [2] * 20), ("b", [1] * 20), ("c", [1] * 10))
    )
    mrr = metric(compare_runs([a, b]), "vector.mrr")
    assert (mrr.first, mrr.second, mrr.verdict) == (0.5, 1.0, "better")
    comparison = compare_runs([a, c])
    assert comparison.pairs[0].metrics == []
    assert comparison.notes[1] == "vector is not compared, because its ranks are among all rows of an evaluation"


def test_only_common_rows_are_compared_and_the_others_are_counted(evaluated: Evaluated) -> None:
    a, b = evaluated("a", teams("++++")), evaluated("b", teams("+-+-+-")[1:])
    comparison = compare_runs([a, b])
    assert comparison.rows == 3
    assert comparison.notes[0] == (
        "the runs were evaluated on different test rows (a 4, b 5); only the 3 common ones are compared"
    )
    assert (metric(comparison, "team.accuracy").first, metric(comparison, "team.accuracy").second) == (1, 1 / 3)


def test_rows_whose_references_changed_are_left_out(evaluated: Evaluated) -> None:
    changed = [*teams("++++")[:3], RecordedRow("rows.csv:5", outputs={"team": OutputResult("other", "other", True)})]
    comparison = compare_runs([evaluated("a", teams("++++")), evaluated("b", changed)])
    assert comparison.rows == 3
    assert comparison.notes[0] == "1 common row with different references left out"


def test_rows_that_only_have_the_same_key_are_left_out(evaluated: Evaluated) -> None:
    a = evaluated("a", [replace(row, content=f"hash {row.key}") for row in teams("++++")])
    edited = [replace(row, content="other" if row.key == "rows.csv:5" else f"hash {row.key}") for row in teams("++++")]
    comparison = compare_runs([a, evaluated("b", edited)])
    assert (comparison.rows, comparison.notes[0]) == (3, "1 common row with different content left out")


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (
            [replace(row, content="other") for row in teams("+++")],
            r"different test rows \(a 4, b 3\), none of them with the same content",
        ),
        (teams("+++", first=100), r"different test rows \(a 4, b 3\), none of them in common"),
        (
            [RecordedRow("rows.csv:2", outputs={"team": OutputResult("other", "x", False)})],
            r"different test rows \(a 4, b 1\), none of them with the same references",
        ),
    ],
    ids=["content", "keys", "references"],
)
def test_runs_without_common_rows_are_refused(rows: list[RecordedRow], reason: str, evaluated: Evaluated) -> None:
    a, b = evaluated("a", teams("++++")), evaluated("b", rows)
    advice = "; evaluate all of them on the same file with partita evaluate RUN --dataset FILE"
    with pytest.raises(DataError, match=f"^the runs were evaluated on {reason}{advice}$"):
        compare_runs([a, b])


def test_runs_without_a_common_output_are_refused(evaluated: Evaluated) -> None:
    a, b = evaluated("a", teams("+")), evaluated("b", teams("+"), kinds={"team": "text"})
    with pytest.raises(DataError) as error:
        compare_runs([a, b])
    assert str(error.value) == (
        "the runs have no output in common (a has team (category); b has team (text)); compare runs with outputs of "
        "the same name and type"
    )


def test_equal_keys_are_counted_one_by_one(evaluated: Evaluated) -> None:
    rows = [*teams("+-"), *teams("-+")]
    comparison = compare_runs([evaluated("a", rows), evaluated("b", rows)])
    assert comparison.rows == 4


def test_each_run_is_compared_with_the_first_on_the_rows_that_all_have(evaluated: Evaluated) -> None:
    runs = [evaluated(name, teams("+-" * 10)[:rows]) for name, rows in (("a", 20), ("b", 16), ("c", 18))]
    comparison = compare_runs(runs)
    assert [pair.run for pair in comparison.pairs] == ["b", "c"]
    assert comparison.rows == 16
    assert comparison.notes[-1] == (
        "6 p-values: without any difference, one in 20 is below 0.05 by chance; all of them together hold at "
        "0.05 / 6 = 0.0083 (Bonferroni)"
    )


def tokenizer(run: Path, text: str) -> None:
    (run / "model" / "tokenizer.json").write_text(text)


HEAD = [{"name": "team", "type": "category", "head": "linear"}]


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ({}, {"base_model": "other/model"}, "the tokenizers differ, and it is a mean over tokens"),
        (
            {},
            {"output_features": HEAD},
            "one is that of predicted values, and the other that of generated text",
        ),
        (
            {"output_features": HEAD, "note": {"labels": {"team": ["a"]}}},
            {"output_features": HEAD, "note": {"labels": {"team": ["a", "b"]}}},
            "the labels differ",
        ),
        (
            {"output_features": HEAD},
            {"output_features": [HEAD[0] | {"column": "group"}]},
            "the settings of the outputs differ",
        ),
    ],
    ids=["tokenizer", "head", "labels", "output"],
)
def test_losses_that_cannot_be_compared_are_left_out_with_the_reason(
    first: dict[str, Any], second: dict[str, Any], reason: str, evaluated: Evaluated
) -> None:
    rows = teams("+-", loss=1.0, tokens=3)
    comparison = compare_runs([evaluated("a", rows, **first), evaluated("b", rows, **second)])
    assert "loss" not in {one.metric for one in comparison.pairs[0].metrics}
    assert comparison.notes[0] == f"the loss of b is not compared with that of a: {reason}"


def test_losses_of_other_tokens_of_the_rows_are_not_compared(evaluated: Evaluated) -> None:
    runs = [evaluated(name, teams("+-", loss=1.0, tokens=tokens)) for name, tokens in (("a", 3), ("b", 4))]
    (note, _) = compare_runs(runs).notes
    assert note.endswith("a mean over other tokens of the rows, because the prompts or the formats of answers differ")


@pytest.mark.parametrize(
    ("texts", "compared"),
    [
        (('{"model": 1, "padding": null}', '{"model": 1, "padding": 8}'), True),
        (('{"model": 1}', '{"model": 2}'), False),
        (("{", "["), False),
    ],
    ids=["padding", "model", "damaged"],
)
def test_models_with_the_same_tokenizer_have_comparable_losses(
    texts: tuple[str, str], compared: bool, evaluated: Evaluated
) -> None:
    runs = [evaluated(name, teams("+-", loss=1.0, tokens=3), base_model=f"owner/{name}") for name in ("small", "large")]
    for run, text in zip(runs, texts, strict=True):
        tokenizer(run, text)
    assert ("loss" in {one.metric for one in compare_runs(runs).pairs[0].metrics}) == compared


def test_unreadable_answers_of_one_run_are_compared_with_none_of_the_other(evaluated: Evaluated) -> None:
    comparison = compare_runs([evaluated("a", teams("+" * 20)), evaluated("b", teams("?" * 20))])
    invalid = metric(comparison, "team.invalid")
    assert (invalid.first, invalid.second, invalid.verdict) == (0.0, 1.0, "worse")


def test_the_first_common_split_is_compared_and_another_one_on_demand(evaluated: Evaluated) -> None:
    a, b = (evaluated(name, teams("+" * 5), split="validation") for name in "ab")
    for run in (a, b):
        write_row_results(evaluation_path(run, "other"), EvaluationHeader("other", "result", "f"), teams("+"))
    write_row_results(evaluation_path(a, "test"), EvaluationHeader("test", "result", "f"), teams("++"))
    write_row_results(evaluation_path(b, "test", base=True), EvaluationHeader("test", "base", "f"), teams("++"))
    assert compare_runs([a, b]).split == "validation"
    assert compare_runs([a, b], split="other").rows == 1
    with pytest.raises(DataError, match=r"b has no results of rows of test, it has other, validation; evaluate it"):
        compare_runs([a, b], split="test")


def test_runs_without_results_of_rows_are_compared_by_what_they_recorded(make_run: MakeRun) -> None:
    a = make_run("a", note={"metrics": {"test": {"loss": 0.5, "n": 4}}})
    b = make_run("b", note={"metrics": {"test": {"loss": 0.25}}}, base_model="other/model", seed=7)
    comparison = compare_runs([a, b])
    assert (comparison.pairs, comparison.split) == ([], None)
    assert comparison.recorded == {"test.loss": [0.5, 0.25], "test.n": [4, None]}
    assert comparison.settings == {"base_model": ["owner/small-model", "other/model"], "seed": [42, 7]}
    (note,) = comparison.notes
    assert note == (
        "the runs have no results of the same rows (a has none; b has none), so nothing is compared row by row; write "
        f"them with partita evaluate {a}, partita evaluate {b}"
    )


def test_an_unfinished_run_without_results_is_to_be_finished_first(evaluated: Evaluated, make_run: MakeRun) -> None:
    a, b = evaluated("a", teams("+")), make_run("b", status="interrupted")
    advice = f"finish {b} first, with the command that partita runs show {b} prints"
    (note,) = compare_runs([a, b]).notes
    assert note.endswith(f"(a has test; b has none), so nothing is compared row by row; {advice}")
    with pytest.raises(DataError) as refused:
        compare_runs([a, b], split="test")
    assert str(refused.value) == f"{b} has no results of rows of test, it has none; {advice}"


@pytest.mark.parametrize(
    ("split", "advice"),
    [
        ("tset", "it has test; did you mean test?"),
        ("new", "it has test; evaluate it on that file with partita evaluate {a} --dataset FILE"),
        ("gold", "it has test; simulate with partita simulate {a}"),
    ],
)
def test_results_that_a_run_does_not_have_are_an_error_with_advice(
    split: str, advice: str, evaluated: Evaluated
) -> None:
    a, b = evaluated("a", teams("+")), evaluated("b", teams("+"))
    with pytest.raises(DataError) as refused:
        compare_runs([a, b], split=split)
    assert str(refused.value) == f"{a} has no results of rows of {split}, {advice.format(a=a)}"


def test_a_comparison_is_printed_with_a_line_for_each_metric(evaluated: Evaluated) -> None:
    comparison = compare_runs([evaluated("a", teams("+" * 20)), evaluated("b", teams("-" * 20))])
    first, *_, note = str(comparison).splitlines()[:2] + str(comparison).splitlines()[-1:]
    assert first == "b against a, 20 rows of test"
    assert re.search(
        r"^  team\.accuracy 0 against 1 \(difference -1, 95 % interval -1 to -0\.\d+, p below 0\.001\): worse$",
        str(comparison),
        re.MULTILINE,
    )
    # Each resample of these rows has the same difference.
    assert "\n  team.macro_f1 0 against 1 (difference -1, p below 0.001): worse\n" in str(comparison)
    assert note.startswith("note: ")
    assert pretty(comparison) == str(comparison)


def test_a_difference_that_all_resamples_have_is_compared_without_an_interval(evaluated: Evaluated) -> None:
    section = {"trainer": {"type": "finetune", "validation_metric": "team.macro_f1"}}
    a, b = (evaluated(name, teams(rows * 20), **section) for name, rows in (("a", "+"), ("b", "-")))
    (pair,) = compare_runs([a, b]).pairs

    assert verdict(pair, "a") == "b is worse than a: team.macro_f1 0.000 against 1.000 (difference -1.000)."
    assert pair.main is not None
    assert metric_row(pair.main) == ["team.macro_f1", "1.000", "0.000", "-1.000", "", "<0.001", "worse"]


def test_rows_of_the_data_and_versions_that_differ_are_settings(make_run: MakeRun) -> None:
    data = {"training": {"rows": 4, "fingerprint": "one"}}
    a, b = make_run("a", note={"data": data, "versions": {"torch": "1"}}), make_run("b", note={"versions": {}})
    assert compare_runs([a, b]).settings == {
        "rows of training (fingerprint)": ["one", None],
        "version of torch": ["1", None],
    }


def test_runs_of_the_same_name_are_named_by_more_of_their_paths(evaluated: Evaluated) -> None:
    runs = [evaluated(name, teams("+")) for name in ("x/run", "y/run")]
    assert compare_runs(runs).runs == ["x/run", "y/run"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a"], "there is nothing to compare; name two runs or more, the reference first"),
        (["a", "a"], "is named twice; name different runs"),
        (["a", "c"], "is not a run directory; there are .*a .done."),
    ],
    ids=["one", "twice", "none"],
)
def test_wrong_names_are_errors(names: list[str], message: str, evaluated: Evaluated) -> None:
    folder = evaluated("a", teams("+")).parent
    with pytest.raises(DataError, match=message):
        compare_runs([folder / name for name in names])


def test_damage_is_an_error_with_its_place(evaluated: Evaluated) -> None:
    a, b = evaluated("a", teams("+")), evaluated("b", teams("+"))
    with evaluation_path(b, "test").open("a") as file:
        file.write("{\n")
    with pytest.raises(DataError, match=r"b/evaluations/test\.jsonl, line 3, is damaged; evaluate the run again"):
        compare_runs([a, b])
    (b / "manifest.json").write_text("{")
    with pytest.raises(PartitaError, match=r"b/manifest\.json is not JSON"):
        compare_runs([a, b])


def episode(key: str, *, reward: float | None, status: Any = "done") -> Episode:
    one = Episode(key, key, {}, 1)
    one.observe(f"a table for {key}")
    one.act(f"reward {reward}", (1,))
    one.add_reward(reward)
    one.end(status, "broken" if status == "failed" else None)
    return one


def simulated(make_run: MakeRun, name: str, rewards: Sequence[float | None]) -> Path:
    folder = make_run(name)
    write_dialogues(folder, rewards)
    return folder


def write_dialogues(folder: Path, rewards: Sequence[float | None], *, task: str = "task") -> None:
    episodes = [
        episode(f"{task} {i}", reward=reward, status="done" if reward is not None else "failed")
        for i, reward in enumerate(rewards)
    ]
    write_transcript(folder / "transcripts" / "predicted.jsonl", (one.line() for one in episodes))


def test_dialogues_are_compared_by_success_and_by_their_numbers(make_run: MakeRun) -> None:
    a = simulated(make_run, "a", [1, 0, 0, 0, None, 1, 0.5, 0])
    b = simulated(make_run, "b", [1, 1, 1, 1, 1, 1, 0.5, 1])
    comparison = compare_runs([a, b])
    success, reward = metric(comparison, "success"), metric(comparison, "reward")
    assert (comparison.split, comparison.subject) == ("predicted", "8 dialogues with predicted history")
    assert (success.first, success.second, success.p) == (0.25, 0.875, mcnemar([[2, 0], [5, 1]], exact=True).pvalue)
    assert (reward.first, reward.second) == pytest.approx((2.5 / 7, 6.5 / 7))
    assert comparison.pairs[0].agreement[0].only_second == 5
    first = comparison.pairs[0].disagreements[0]
    assert (first.key, first.prompt, first.first, first.second, first.better) == (
        *("task 1", "a table for task 1", "reward 0", "reward 1", "b"),
    )


def test_dialogues_of_a_model_that_was_not_trained_are_compared_without_settings(
    make_run: MakeRun, tmp_path: Path
) -> None:
    a, trained = simulated(make_run, "a", [1, 0]), simulated(make_run, "b", [1, 1])
    (a / "manifest.json").unlink()
    (a / "transcripts").rename(tmp_path / "elsewhere")
    comparison = compare_runs([tmp_path / "elsewhere", trained])
    assert (comparison.runs, comparison.rows, comparison.settings) == (["elsewhere", "b"], 2, None)
    assert comparison.notes[0] == "the settings are not compared, because elsewhere did not record them"


def test_the_dialogues_of_the_last_round_that_all_runs_have_are_compared(make_run: MakeRun) -> None:
    a, b = make_run("a"), make_run("b")
    for run, rounds in ((a, ([0, 0], [0, 1], [1, 1])), (b, ([0, 0], [1, 1]))):
        for number, rewards in enumerate(rounds, start=1):
            write_dialogues(run / "rounds" / str(number), rewards)
    comparison = compare_runs([a, b])
    assert (comparison.split, comparison.subject) == (
        "round-2",
        "2 dialogues of round 2, with the weights before its training",
    )
    assert (metric(comparison, "success").first, metric(comparison, "success").second) == (0.5, 1.0)
    assert compare_runs([a, b], split="round-1").rows == 2
    with pytest.raises(DataError) as refused:
        compare_runs([a, b], split="round-3")
    assert str(refused.value) == (
        f"{b} has no results of rows of round-3, it has round-1, round-2; compare a round that all runs have"
    )


def test_rounds_of_other_tasks_are_not_compared(make_run: MakeRun) -> None:
    a, b = make_run("a"), make_run("b")
    write_dialogues(a / "rounds" / "1", [0, 1])
    write_dialogues(b / "rounds" / "1", [0, 1], task="other")
    message = (
        "the runs have different round-1 dialogues (a 2, b 2), none of them in common; simulate the same tasks with "
        "all of them (partita simulate RUN)"
    )
    assert compare_runs([a, b]).notes == [message]
    with pytest.raises(DataError, match=re.escape(message)):
        compare_runs([a, b], split="round-1")


def test_the_advice_for_runs_without_results_can_be_followed(make_run: MakeRun) -> None:
    world = {"type": "environment", "environment": "bookings:Desk"}
    own = {
        "input_features": [{"name": "messages", "type": "dialogue"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "simulation": {"world": world, "tasks": {"count": 10}},
    }
    a, b = make_run("a", data={"source": None}, **own), make_run("b", data={"source": None}, **own)
    c = make_run("c", data={"source": None})
    write_dialogues(a / "rounds" / "1", [0, 1])
    assert (
        compare_runs([a, b])
        .notes[0]
        .endswith(
            f"(a has round-1; b has none), so nothing is compared row by row; write them with partita simulate {a}, "
            f"partita simulate {b}"
        )
    )
    assert compare_runs([a, c]).notes[0].endswith(f"; write them with partita evaluate {c} --dataset FILE")


def test_numbers_of_dialogues_are_compared_where_both_runs_have_them(make_run: MakeRun) -> None:
    a, b = simulated(make_run, "a", [None, 1, 0]), simulated(make_run, "b", [0.5, 1, 0])
    comparison = compare_runs([a, b])
    reward = metric(comparison, "reward")
    assert (reward.first, reward.second) == (0.5, 0.5)
    assert comparison.notes[0] == (
        "numbers that one of the runs lacks, as for a failed dialogue, are left out (1 dialogue); for success, a "
        "failed dialogue counts as 0"
    )


def test_a_dialogue_that_was_corrected_by_hand_is_compared(make_run: MakeRun) -> None:
    a, b = simulated(make_run, "a", [1, 0]), simulated(make_run, "b", [1, 0])
    path = b / "transcripts" / "predicted.jsonl"
    path.write_bytes(re.sub(rb', "checksum": "[0-9a-f]+"', b"", path.read_bytes(), count=1))
    assert path.read_bytes().count(b"checksum") == 1
    assert compare_runs([a, b]).rows == len(read_run(b).simulations["predicted"]) == 2


def test_a_damaged_dialogue_is_an_error_with_its_line(make_run: MakeRun) -> None:
    a, b = simulated(make_run, "a", [1, 0]), simulated(make_run, "b", [1, 0])
    path = b / "transcripts" / "predicted.jsonl"
    path.write_bytes(path.read_bytes().replace(b"task 1", b"task 2"))
    with pytest.raises(
        DataError, match=r"predicted\.jsonl, line 2, is damaged; to restore it, run the same partita simulate"
    ):
        compare_runs([a, b])
