"""The report of a run: its sentence, its sections for each type of output, and text of users that stays text."""

import json
import random
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partita.report.evaluation import BLOCK, blocks_of_lines
from partita.report.run_page import try_to_write_report, write_report
from partita.report.run_record import read_run, values_of
from partita.report.sections.training import loss_unit
from partita.runs.row_results import EvaluationHeader, OutputResult, RecordedRow, evaluation_path
from partita_schema.common.checksums import sealed
from partita_schema.errors import DataError, PartitaError
from partita_schema.load import load_config
from partita_trainers.batch_size.probe import BatchSize

from ..recorded_results import write_row_results
from .made_runs import (
    category,
    config_of,
    dialogue,
    joined,
    json_value,
    label_set,
    number,
    rows_of,
    tags,
    text,
    write_dialogues,
    write_run,
)
from .pages import page_of

TYPES: dict[str, tuple[dict[str, str], Callable[[float], Any], tuple[str, ...]]] = {
    "category": ({"team": "category"}, category, ("Confusion matrix", "Calibration", "By label", "team.macro_f1")),
    "number": ({"price": "number"}, lambda share: number(10 * (1.1 - share)), ("Residuals", "price.mae \u2193")),
    "set": ({"topics": "set"}, label_set, ("By label", "topics.jaccard")),
    "tags": ({"people": "tags"}, tags, ("By type of entity", "people.micro_f1")),
    "text": ({"summary": "text"}, text, ("only in the reference", "summary.exact_match")),
    "json": ({"booking": "json"}, json_value, ("only in the answer", "booking.slot_f1")),
    "several": (
        {"team": "category", "price": "number"},
        lambda share: joined(category(share), number(10 * (1.1 - share))),
        ("Answers: team (category, test)", "Answers: price (number, test)", "exact_match"),
    ),
}


@pytest.mark.parametrize("kind", TYPES)
def test_each_type_of_output_has_its_section_beside_the_base_model(kind: str, tmp_path: Path) -> None:
    outputs, draw, wanted = TYPES[kind]
    folder = write_run(tmp_path / "run", outputs=outputs, results=rows_of(60, draw(0.9)), base=rows_of(60, draw(0.2)))

    page = page_of(folder)

    for title in wanted:
        assert title in page.texts
    assert page.after("test, 60 rows", count=4) == ["metric", "this model", "base model", "difference"]
    titles = ["Metrics", "Training", f"Answers: {next(iter(outputs))} ({next(iter(outputs.values()))}, test)", "Cost"]
    places = [page.texts.index(title) for title in titles]
    assert places == sorted(places)


def test_the_first_sentence_compares_with_the_base_model_on_the_same_rows(tmp_path: Path) -> None:
    outputs = {"team": "category"}
    better = write_run(tmp_path / "a", outputs=outputs, results=rows_of(90, category(1)), base=rows_of(90, category(0)))
    worse = write_run(tmp_path / "b", outputs=outputs, results=rows_of(90, category(0)), base=rows_of(90, category(1)))
    equal = write_run(tmp_path / "c", outputs=outputs, results=rows_of(90, category(1)), base=rows_of(90, category(1)))

    [first] = [line for line in page_of(better).texts if line.startswith("Better")]
    assert first.startswith("Better than the base model: team.accuracy is 1.000 against 0.")
    assert first.endswith(" on 90 rows of the test split.")
    assert " better by 0." in first
    assert " \u00b1 0." in first
    assert any(line.startswith("Worse than the base model: team.accuracy is 0.") for line in page_of(worse).texts)
    sentence = (
        "No measurable difference from the base model: team.accuracy is 1.000, that of the base model 1.000, "
        "apart by 0.000 \u00b1 0.021 on 90 rows of the test split."
    )
    assert sentence in page_of(equal).texts


def test_the_first_sentence_has_the_metric_that_the_list_of_runs_shows(tmp_path: Path) -> None:
    outputs = {"team": "category", "price": "number"}
    rows = rows_of(30, joined(category(1), number(0)))
    page = page_of(write_run(tmp_path / "run", outputs=outputs, results=rows))
    trainer = {"trainer": {"type": "finetune", "validation_metric": "price.mae"}}
    chosen = page_of(write_run(tmp_path / "chosen", outputs=outputs, results=rows, config=trainer))

    assert any(text.startswith("The exact_match is ") for text in page.texts)
    assert any(text.startswith("The price.mae is ") for text in chosen.texts)


def test_pairs_without_inputs_have_no_perplexity(tmp_path: Path) -> None:
    results = [RecordedRow(str(index), "Once upon a time", None, 0.5 + index / 100, 40) for index in range(30)]
    pairs = {"output_features": [{"name": "answer", "type": "preference"}], "trainer": {"type": "preference"}}

    page = page_of(write_run(tmp_path / "run", results=results, config={"input_features": [], **pairs}))

    assert "loss \u2193" in page.texts
    assert "perplexity \u2193" not in page.texts


def test_a_lower_loss_is_better(tmp_path: Path) -> None:
    results = [RecordedRow(str(index), "Once upon a time", None, 1.0 + index / 100, 40) for index in range(30)]
    base = [RecordedRow(str(index), "Once upon a time", None, 3.0 + index / 50, 40) for index in range(30)]

    page = page_of(write_run(tmp_path / "run", results=results, base=base))

    assert any(
        line.startswith("Better than the base model: loss is 1.145 against 3.290, better") for line in page.texts
    )
    assert "perplexity \u2193" in page.texts
    assert "Rows with the highest loss (test)" in page.texts
    assert "row 29, loss 1.290" in page.texts


def test_metrics_without_an_interval_are_named_with_the_reason(tmp_path: Path) -> None:
    rows = [RecordedRow(str(index), "Once", None, 1.0, 4) for index in range(9)]
    run = write_run(tmp_path / "run", results=rows)
    recorded = {"loss": 1.0, "perplexity": 2.718, "bits_per_byte": 0.4, "custom": 3.0}
    write_row_results(evaluation_path(run, "test"), EvaluationHeader("test", "result", "f", metrics=recorded), rows)

    assert (
        "Without an interval: perplexity, loss (all resamples of the rows have the same value); bits_per_byte (the "
        "bytes of single rows are not recorded); custom (the results of rows do not determine them)."
    ) in page_of(run).texts


def test_the_first_sentence_has_no_interval_if_all_resamples_have_the_same_value(tmp_path: Path) -> None:
    rows = [RecordedRow(str(index), "Once", None, 1.0, 4) for index in range(9)]
    base = [RecordedRow(str(index), "Once", None, 3.0, 4) for index in range(9)]
    alone, beside = write_run(tmp_path / "a", results=rows), write_run(tmp_path / "b", results=rows, base=base)

    assert "The loss is 1.000 on 9 rows of the test split." in page_of(alone).texts
    sentence = "Better than the base model: loss is 1.000 against 3.000, better by 2.000 on 9 rows of the test split."
    assert sentence in page_of(beside).texts


def test_scores_of_many_labels_have_curves_without_an_interval(tmp_path: Path) -> None:
    rows = rows_of(30, category(0.5))
    run = write_run(tmp_path / "run", outputs={"team": "category"}, results=rows)
    recorded = {"team.auroc": 0.9, "team.average_precision": 0.8}
    for num_labels, has_interval in ((12, False), (3, True)):
        header = EvaluationHeader(
            "test", "result", "f", outputs={"team": "category"}, num_labels={"team": num_labels}, metrics=recorded
        )
        write_row_results(evaluation_path(run, "test"), header, rows)
        reason = "team.auroc, team.average_precision (the scores of all labels are recorded for up to 10 labels)"
        assert (reason in page_of(run).text) != has_interval


def test_rows_of_another_evaluation_are_not_compared(tmp_path: Path) -> None:
    base = [RecordedRow("other", outputs={"team": OutputResult("billing", "billing", True)})]

    page = page_of(
        write_run(
            tmp_path / "run",
            outputs={"team": "category"},
            results=rows_of(30, category(1)),
            base=base,
            config={"base_model": "org/model"},
        )
    )

    assert (
        "The team.accuracy is 1.000 (95 % interval 0.886 to 1.000) on 30 rows of the test split; the base model was "
        "not evaluated on these rows."
    ) in page.texts
    assert "difference" not in page.texts


def test_an_output_may_be_named_like_a_loss(tmp_path: Path) -> None:
    outputs = {"loss_type": "category", "team": "category"}
    draw = joined(category(1, name="loss_type"), category(0.5))

    page = page_of(write_run(tmp_path / "run", outputs=outputs, results=rows_of(30, draw)))

    order = [page.texts.index(name) for name in ("loss_type.accuracy", "team.accuracy", "loss \u2193")]
    assert order == sorted(order)


def test_a_new_model_has_no_base_model_to_compare_with(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run", outputs={"team": "category"}, results=rows_of(30, category(1))))

    assert "The team.accuracy is 1.000 (95 % interval 0.886 to 1.000) on 30 rows of the test split." in page.texts


def test_rows_of_the_base_model_in_another_order_are_matched_by_their_keys(tmp_path: Path) -> None:
    results = rows_of(30, category(1))

    page = page_of(
        write_run(tmp_path / "run", outputs={"team": "category"}, results=results, base=list(reversed(results)))
    )

    row = page.after("team.accuracy", count=3)
    assert row == ["1.000 (0.886 to 1.000)", "1.000 (0.886 to 1.000)", "0.000 (-0.061 to 0.061)"]


def test_a_run_without_evaluations_says_so(tmp_path: Path) -> None:
    config = {"base_model": "org/model"}
    page = page_of(
        write_run(tmp_path / "run", outputs={"team": "category"}, config=config, metrics={"test": {"loss": 0.5}})
    )

    assert "Nothing was evaluated row by row, so there is no comparison with the base model." in page.texts
    assert page.after("loss", count=1) == ["0.500"]


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        ("running", "The run is not finished, and its process has ended."),  # no process has it open
        ("interrupted", "The run was interrupted."),
    ],
)
def test_a_run_that_is_not_finished_says_so(status: str, sentence: str, tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run", status=status))

    assert f"{sentence} Nothing has been evaluated row by row yet." in page.texts


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    ended = {"status": "failed", "error": "DivergenceError: the loss is not finite"}
    page = page_of(write_run(tmp_path / "early", **ended))
    evaluated = page_of(
        write_run(tmp_path / "late", outputs={"team": "category"}, results=rows_of(9, category(1)), **ended)
    )

    assert "The run failed: DivergenceError: the loss is not finite." in page.texts
    start = "The run failed: DivergenceError: the loss is not finite. The team.accuracy is 1.000"
    assert any(text.startswith(start) for text in evaluated.texts)


def test_what_happened_during_training_is_marked(tmp_path: Path) -> None:
    page = page_of(
        write_run(
            tmp_path / "run",
            resumed=[15],
            out_of_memory=[{"step": 25, "now": 8, "tokens": 100}],
            best_step=30,
            evaluations=[{"step": 10, "split": "validation", "loss": 2.0}],
        )
    )

    assert "Memory ran out at step 25. Resumed after step 15. The best model is that of step 30." in page.texts
    assert page.texts.count("Resumed after step 15") == 4  # in each chart of training
    assert "validation" in page.texts


@pytest.mark.parametrize(
    ("outputs", "config", "unit"),
    [
        ({"summary": "text"}, {}, "nats per loss token"),
        ({"people": "tags"}, {}, "nats per word"),
        ({"fit": "score"}, {}, "nats per row"),
        ({"vector": "embedding"}, {}, "nats per row"),
        ({"summary": "text"}, {"trainer": {"type": "custom", "target": "a:B"}}, "loss"),
    ],
)
def test_the_loss_has_the_unit_of_what_is_trained(
    outputs: dict[str, str], config: dict[str, Any], unit: str, tmp_path: Path
) -> None:
    page = page_of(write_run(tmp_path / "run", outputs=outputs, config=config))

    assert unit in page.after("Loss", count=20)


def test_the_loss_of_numbers_is_a_mean_squared_error() -> None:
    squared = {"name": "fit", "type": "score", "head": "linear", "decoder": {"loss": "squared_error"}}
    number = {"name": "price", "type": "number", "head": "linear"}

    assert [loss_unit({"output_features": [one]}) for one in (squared, number)] == ["mean squared error"] * 2


def test_a_loss_over_several_orders_of_magnitude_has_a_logarithmic_axis(tmp_path: Path) -> None:
    narrow, wide = write_run(tmp_path / "narrow", steps=100), write_run(tmp_path / "wide", steps=2000)

    assert "The vertical axis is logarithmic." not in page_of(narrow).text
    assert "The vertical axis is logarithmic. The line is the mean of neighboring steps" in page_of(wide).text


def test_the_search_for_the_learning_rate_has_a_chart(tmp_path: Path) -> None:
    rates = [1e-6 * 2**number for number in range(18)]
    search = {"learning_rate": 0.003, "rates": rates, "losses": [1 + rate for rate in rates]}

    page = page_of(write_run(tmp_path / "run", learning_rate_search=search))

    assert "Search for the learning rate" in page.texts
    assert "Chosen: 0.003." in page.texts


def test_the_final_evaluation_of_the_best_weights_is_not_a_point_of_the_curve(tmp_path: Path) -> None:
    curve = [(10, 2.0), (20, 1.0), (30, 1.5), (30, 1.0)]  # the last one is of the weights of step 20
    evaluations = [{"step": step, "split": "validation", "loss": loss} for step, loss in curve]

    run = read_run(write_run(tmp_path / "run", evaluations=evaluations, best_step=20, steps=30))

    assert run.evaluations("validation", "loss") == ([10.0, 20.0, 30.0], [2.0, 1.0, 1.5])


def test_measured_batch_sizes_have_charts_that_mark_the_size_in_use(
    tmp_path: Path, generation: BatchSize, written: BatchSize
) -> None:
    sizes = {"generation": generation.record(), "training": written.record()}

    page = page_of(write_run(tmp_path / "run", batch_sizes=sizes))

    assert "Speed by batch size, generation" in page.texts
    assert "Memory by batch size, generation" in page.texts
    assert page.texts.count("The dotted line is the size in use, 24 rows.") == 2
    assert page.after("Batch sizes", count=2) == ["training", "8 rows, as the file says"]


def test_rows_that_were_left_out_are_listed_with_reasons_and_samples_with_their_loss_tokens(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "run",
        sources={"chat": {"rows": 30, "tokens": 900}, "web": {"rows": 10, "tokens": 100}},
        lengths={"training": {"edges": [0, 8, 16], "counts": [30, 10]}},
    )
    counts = {"rows": 50, "used": 40, "cut": 2, "left_out": 10, "loss_tokens": 640, "reasons": {"no label": 10}}
    (folder / "ledger.json").write_text(json.dumps({"splits": {"training": counts}}), encoding="utf8")
    sample = {"key": "row-1", "texts": ["Which", " team?", " bill", "ing"], "loss": [False, False, True, True]}
    (folder / "samples.json").write_text(json.dumps({"rows": [sample]}), encoding="utf8")

    page = page_of(folder)

    assert page.after("Why rows were left out", count=6) == ["split", "rows", "reason", "training", "10", "no label"]
    assert page.after("chat", count=3) == ["30", "900", "90.0%"]
    assert "Lengths of training rows" in page.texts
    assert page.after("row-1", count=2) == ["Which team?", "billing"]
    assert '<mark class="loss"> billing</mark>' in page.source


@pytest.mark.parametrize(
    ("config", "note"),
    [
        ({"input_features": [{"name": "messages", "type": "dialogue"}]}, "A row is what the model reads at once: a"),
        (
            {"data": {"batching": {"type": "chunk"}}, "base_model": {"type": "scratch", "context_length": 64}},
            "A row is a document. For training, documents are joined and cut into chunks.",
        ),
    ],
    ids=["dialogues", "chunks"],
)
def test_what_a_row_is_is_said_where_it_is_no_row_of_the_data(
    config: dict[str, Any], note: str, tmp_path: Path
) -> None:
    outputs = {"reply": "text"} if "input_features" in config else {}
    folder = write_run(tmp_path / "run", outputs=outputs, config=config)
    (folder / "ledger.json").write_text(json.dumps({"splits": {"training": {"rows": 5}}}), encoding="utf8")

    assert note in page_of(folder).text


def test_samples_of_pairs_show_both_answers(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    names = {"names": ["", "chosen", "rejected"]}
    sample = {"key": "row-1", "texts": ["Why?", "So.", "No."], "loss": [False, True, True], **names}
    (folder / "samples.json").write_text(json.dumps({"rows": [sample]}), encoding="utf8")

    page = page_of(folder)

    assert page.after("row-1", count=4) == ["Why?\nchosen:", "So.", "rejected:", "No."]
    assert '<mark class="loss">No.</mark>' in page.source


def test_the_largest_errors_of_numbers_and_rows_without_one_come_first(tmp_path: Path) -> None:
    values = {"a": 1.0, "b": 50.0, "c": None}
    results = [RecordedRow(key, outputs={"price": OutputResult(1.5, value, False)}) for key, value in values.items()]

    page = page_of(write_run(tmp_path / "run", outputs={"price": "number"}, results=results))

    rows = [line for line in page.texts if line.startswith("row ")]
    assert rows == ["row c: (none) instead of 1.5", "row b: 50 instead of 1.5", "row a: 1 instead of 1.5"]
    assert "Rows without a number (1), then the largest errors" in page.texts


def test_the_largest_numbers_have_a_page(tmp_path: Path) -> None:
    pairs = [(3.0, 1e308), (1e308, -1e308), (-1e308, 5.0), (2.0, 2.0)]
    results = [
        RecordedRow(str(index), "How much is it?", str(value), outputs={"price": OutputResult(truth, value, False)})
        for index, (truth, value) in enumerate(pairs)
    ]

    page = page_of(write_run(tmp_path / "run", outputs={"price": "number"}, results=results, base=results))

    assert "Residuals" in page.texts


def test_the_words_that_differ_from_the_reference_are_marked(tmp_path: Path) -> None:
    results = [RecordedRow("a", outputs={"summary": OutputResult("the parcel is late", "the parcel was late", False)})]

    page = page_of(write_run(tmp_path / "run", outputs={"summary": "text"}, results=results))

    assert 'the parcel <mark class="removed">is</mark><mark class="added">was</mark> late' in page.source


def test_wrong_rows_of_dialogues_have_the_turns_before(tmp_path: Path) -> None:
    output, context = OutputResult("two teas", "two beers", False), "user: two teas\nassistant: here they are"
    row = RecordedRow("a", "the bill please", "two beers", outputs={"reply": output}, context=context)

    page = page_of(write_run(tmp_path / "run", outputs={"reply": "text"}, results=[row]))

    assert f"{context}\nuser: the bill please" in page.texts


@pytest.mark.parametrize(
    ("kind", "reference", "value"),
    [
        ("json", {"text": "x" * 100_000}, {"text": "y" * 100_000}),
        ("text", "\u5b57" * 100_000, "\u6587" * 100_000),
        ("text", "well " * 30_000, "then " * 30_000),
    ],
    ids=["one line", "no spaces", "repeated words"],
)
def test_long_answers_are_shortened(kind: str, reference: Any, value: Any, tmp_path: Path) -> None:
    output = OutputResult(reference, value, False)
    rows = [RecordedRow(str(index), "Why?", "", 1.0, 2, {"answer": output}) for index in range(25)]
    folder = write_run(tmp_path / "run", outputs={"answer": kind}, results=rows)

    page = page_of(folder)

    assert any(text.endswith("... (shortened)") for text in page.texts)
    assert (folder / "report.html").stat().st_size < 1_000_000


def test_json_values_are_compared_line_by_line(tmp_path: Path) -> None:
    reference, value = {"day": "friday", "guests": 2}, {"day": "monday", "guests": 2}
    results = [RecordedRow("a", outputs={"booking": OutputResult(reference, value, False)})]

    page = page_of(write_run(tmp_path / "run", outputs={"booking": "json"}, results=results))

    assert page.after('"day": "friday",', count=2) == ['"day": "monday",', '"guests": 2\n}']


def test_simulated_dialogues_are_compared_by_history_and_by_turn(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=0)
    gold = [dialogue(f"task {index}") for index in range(40)]
    predicted = [dialogue(f"task {index}", answer="two" if index < 30 else "three") for index in range(40)]
    write_dialogues(folder, gold=gold, predicted=predicted)

    page = page_of(folder)

    sentence = (
        "The success rate is 0.750 (95 % interval 0.598 to 0.858) in 40 dialogues with predicted history; with gold "
    )
    assert f"{sentence}history it is 1.000." in page.texts
    titles = ["metric", "gold history", "predicted history", "difference"]
    assert page.after("Dialogues", count=12) == [
        *titles,
        *("dialogues", "40", "40"),
        *("done", "40", "40"),
        *("success", "1.000 (0.912 to 1.000)"),
    ]
    assert page.after("exact, turn 1", count=3) == ["1.000", "0.750", "-0.250"]
    assert "Right answers by turn" in page.texts
    assert ("a", "href", "transcripts/index.html") in page.attributes


def test_dialogues_have_the_numbers_that_the_simulation_recorded(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=0)
    write_dialogues(folder, predicted=[dialogue("a"), dialogue("b")])
    path = folder / "transcripts" / "simulation.json"
    recorded = json.loads(path.read_text(encoding="utf8"))
    assert recorded["predicted"]["success"] == 1
    path.write_text(
        json.dumps(sealed({"predicted": {"dialogues.n": 2, "state.joint_accuracy": 0.25, "state.n": 9, "n": 9}}))
    )

    page = page_of(folder)

    assert page.after("Outputs of all turns", count=4) == [
        "metric",
        "predicted history",
        "state.joint_accuracy",
        "0.250",
    ]
    assert page.after("dialogues", count=1) == ["2"]
    assert "state" not in page.texts
    assert "2 dialogues with predicted history were simulated." in page.texts
    path.write_text("damaged")
    assert "success" in page_of(folder).texts


def test_the_results_of_a_simulation_without_a_run_have_a_page(tmp_path: Path) -> None:
    write_dialogues(tmp_path / "out", gold=[dialogue("a", gold=None)])

    page = page_of(tmp_path / "out" / "transcripts")

    assert "1 dialogue with gold history was simulated." in page.texts
    assert ("a", "href", "index.html") in page.attributes


def test_after_self_training_the_results_of_each_round_are_shown(tmp_path: Path) -> None:
    outputs, rounds = {"team": "category"}, [{"kept": True, "steps": 3}, {"kept": False, "steps": 4}]
    dialogues = [{"success": 0.1}, {"success": 0.5}, {"success": 0.4}]
    folder = write_run(
        tmp_path / "run", outputs=outputs, results=rows_of(30, category(1)), rounds=rounds, dialogues=dialogues
    )

    page = page_of(folder)

    assert "Round 1: 3 steps." in page.texts
    assert "Round 2: 4 steps; its weights were not kept, because the dialogues after it were worse." in page.texts
    titles = ["Dialogues by round", "metric", "round 1", "round 2", "round 3", "success", "0.100", "0.500", "0.400"]
    assert "\n".join(titles) in page.text


def test_many_labels_are_joined_in_the_confusion_matrix(tmp_path: Path) -> None:
    labels = [f"label {index:02}" for index in range(30)]
    config = {"output_features": [{"name": "team", "type": "category", "decoder": {"labels": labels}}]}
    folder = write_run(
        tmp_path / "run",
        outputs={"team": "category"},
        results=rows_of(300, category(0.5, labels=labels)),
        config=config,
    )

    page = page_of(folder)

    [note] = [line for line in page.texts if line.startswith("The 11 most frequent of 30 labels; (others) stands")]
    assert note.endswith(" rows.")


def test_a_label_may_be_named_like_an_answer_without_one(tmp_path: Path) -> None:
    pairs = [("(none)", "(none)"), ("(none)", None), ("billing", "(none)"), ("billing", "billing")]
    results = [
        RecordedRow(
            str(index), "Where is it?", value, outputs={"team": OutputResult(reference, value, reference == value)}
        )
        for index, (reference, value) in enumerate(pairs)
    ]

    page = page_of(write_run(tmp_path / "run", outputs={"team": "category"}, results=results))

    start = page.texts.index("correct \\ answer")
    table = ["billing", "(none)", "(none)", "(none)", "1", "0", "1", "billing", "1", "1", "0"]
    assert sorted(page.texts[start + 1 : start + 12]) == sorted(table)


@pytest.mark.parametrize("kept", [True, False], ids=["its file", "a copy"])
def test_the_command_that_repeats_a_run_has_its_configuration_and_its_folder(
    kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    origin = tmp_path / "project"
    origin.mkdir()
    changed = {"trainer": {"type": "finetune", "epochs": 7}}
    config = load_config(config_of({"team": "category"}, **changed)).config.model_dump(mode="json")
    run = write_run(Path("runs/tickets"), outputs={"team": "category"})
    recorded = {**read_run(run).manifest, "config": config, "folder": str(origin)}
    (run / "manifest.json").write_text(json.dumps(sealed(recorded)), encoding="utf8")
    if kept:
        (origin / "tickets.yaml").write_bytes((run / "config.yaml").read_bytes())

    text = next(text for text in page_of(run).texts if "partita train" in text)

    *copied, words = map(shlex.split, text.splitlines())
    for _, old, new in copied:
        shutil.copy(old, new)
    assert words[:5] == ["partita", "train", words[2], "--run", "runs/tickets-again"]
    loaded = load_config(Path(words[2]), overrides=words[6::2])
    assert loaded.folder.resolve() == origin
    assert loaded.config.model_dump(mode="json") == config


@pytest.mark.parametrize(
    ("place", "again"),
    [
        ("000-1f2e3d4c", "runs/tickets-000-1f2e3d4c-again"),
        ("000-1f2e3d4c/fold-1", "runs/tickets-000-1f2e3d4c-fold-1-again"),
    ],
)
def test_the_command_that_repeats_a_trial_writes_to_a_folder_outside_of_its_sweep(
    place: str, again: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = Path("sweeps/tickets")
    command = "partita sweep tickets.yaml --dataset rows.csv"
    run = write_run(sweep / "trials" / place, outputs={"team": "category"}, command=command)
    (sweep / "sweep.json").write_text("{}")
    texts = page_of(run).texts
    words = shlex.split(next(text for text in texts if "partita train" in text).splitlines()[-1])
    assert words[3:7] == ["--run", again, "--dataset", "rows.csv"]
    assert command in texts


def test_text_of_users_never_becomes_markup(tmp_path: Path) -> None:
    strings = hostile_strings()
    tidy = write_everything(tmp_path / "tidy", ["plain"] * len(strings))
    hostile = write_everything(tmp_path / "hostile", strings)

    quiet, page = page_of(tidy), page_of(hostile)

    assert len(strings) == 100
    assert set(page.tags) == set(quiet.tags)
    assert {(tag, name) for tag, name, _ in page.attributes} == {(tag, name) for tag, name, _ in quiet.attributes}
    assert "script" not in page.tags
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert not [value for _, name, value in page.attributes if name in ("href", "src", "xlink:href")]
    styles = {value for _, name, value in page.attributes if name == "style" and value is not None}
    assert all(value.startswith("font-size:") for value in styles)
    shown = page.source.encode("utf8").decode("utf8")
    assert shown.count("<style>") == 1


def hostile_strings() -> list[str]:
    """Return 100 texts that would change a page if they were inserted as they are."""
    starts = ("", "'", '"', "-->", "]]>", "</td>", "</pre>", "</title>", "</style>", "</svg>")
    attacks = (
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "<svg onload=alert(1)>",
        "<a href='javascript:alert(1)'>x</a>",
        "{{ 7 * 7 }}{% for x in y %}",
        "&lt;b&gt;&#60;i&#62;",
        "<!-- comment",
        "' onmouseover='alert(1)",
        '" style="position:fixed" x="',
        "\u202e\ud800\x00<b>",
    )
    return [start + attack for start in starts for attack in attacks]


def write_everything(folder: Path, strings: list[str]) -> Path:
    """Write a run with these texts in rows, labels, values, the configuration, errors and reasons."""
    rng = random.Random(4)
    labels = strings[:12] if len(set(strings)) > 1 else [f"label {index}" for index in range(12)]
    results = [
        RecordedRow(
            f"{index} {text}",
            prompt=text,
            answer=text,
            loss=1.0,
            tokens=1,
            outputs={
                "team": OutputResult(rng.choice(labels), labels[0], False, dict.fromkeys(labels, -1.0)),
                "summary": OutputResult("reference", text, False),
                "booking": OutputResult({"a": 1}, {text: text}, False),
                "topics": OutputResult(labels[:2], labels[1:3], False),
            },
        )
        for index, text in enumerate(strings)
    ]
    outputs = {"team": "category", "summary": "text", "booking": "json", "topics": "set"}
    folder = write_run(
        folder,
        outputs=outputs,
        results=results,
        base=results,
        config={"prompt": {"task": "plain"}},
        error=strings[0],
        metrics={strings[0]: {strings[1]: 0.5}},
        sources={text: {"rows": 1, "tokens": 1} for text in strings},
        versions={text: text for text in strings},
        device=strings[2],
        learning_rate_search={"rates": [1e-4, 1e-3], "losses": [1.0, 2.0], "learning_rate": 1e-4},
        lengths={strings[3]: {"edges": [0, 1], "counts": [1]}},
        evaluations=[{"step": 3, "split": "validation", "loss": 2.0}],
    )
    (folder / "config.yaml").write_text("\n".join(strings), encoding="utf8", errors="replace")
    reasons = dict.fromkeys(strings, 1)
    (folder / "ledger.json").write_text(
        json.dumps({"splits": {text: {"rows": 1, "reasons": reasons} for text in strings[:3]}}), encoding="utf8"
    )
    rows = [{"key": text, "texts": [text, text], "loss": [False, True]} for text in strings]
    (folder / "samples.json").write_text(json.dumps({"rows": rows}), encoding="utf8")
    return folder


def test_the_page_needs_no_network_and_no_script(tmp_path: Path) -> None:
    outputs = {"team": "category"}

    page = page_of(write_run(tmp_path / "run", outputs=outputs, results=rows_of(20, category(0.5))))

    assert "script" not in page.tags
    assert "link" not in page.tags
    assert not [value for _, name, value in page.attributes if name in ("href", "src")]
    assert "http" not in page.source
    assert "url(" not in page.source
    assert "@import" not in page.source


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "tickets")

    with pytest.raises(DataError, match=r"ticket does not exist; name the directory of a run, such as runs/NAME; did"):
        write_report(tmp_path / "ticket")
    (tmp_path / "empty").mkdir()
    (tmp_path / "rows.csv").touch()
    for name in ("empty", "rows.csv"):
        with pytest.raises(
            DataError, match=rf"{name} is not the directory of a run; name the directory of a run, such"
        ):
            write_report(tmp_path / name)


def test_damaged_results_are_named_with_their_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", outputs={"team": "category"}, results=rows_of(3, category(1)))
    path = evaluation_path(folder, "test")
    path.write_bytes(path.read_bytes()[:-10])

    with pytest.raises(DataError, match=r"test\.jsonl, line 4, is damaged; evaluate the run again"):
        write_report(folder)


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "manifest.json").write_text("{", encoding="utf8")

    with pytest.raises(PartitaError, match=r"manifest\.json is not JSON"):
        write_report(folder)


def test_a_page_that_cannot_be_written_is_a_warning_that_names_the_cause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "report.html").mkdir()

    try_to_write_report(folder)

    [message] = caplog.messages
    assert message.startswith("the report was not written (WriteError: ")
    assert "report.html cannot be written: Is a directory; name a file in that directory" in message
    assert message.endswith(f"partita report {folder} tries again")


def test_torn_and_damaged_lines_of_the_log_are_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=5)
    with (folder / "log.jsonl").open("a") as file:
        file.write('not JSON\n5\n{"step": 6, "loss": null, "tokens": "many"}\n{"step": 7, "loss": 1')

    steps = read_run(folder).steps

    assert steps["step"].tolist() == [1, 2, 3, 4, 5, 6]
    assert np.isfinite(steps["loss"]).tolist() == [True] * 5 + [False]
    assert np.isfinite(steps["tokens"]).tolist() == [True] * 5 + [False]
    assert "Loss" in page_of(folder).texts


def test_steps_are_read_as_they_were_logged() -> None:
    records = [
        {"step": 1, "loss": 0.5, "learning_rate": 1e-4, "batch_hash": "9f1f", "tokens": 419, "seconds": 0.25},
        {"step": 2, "loss": None, "learning_rate": 1, "metrics": {"mrr": 0.5}, "rows": 10**12, "tokens": None},
        {"loss": 3.5e-300, "step": 3},
    ]
    lines = [json.dumps(record) for record in records]

    fast, slow = values_of("\n".join([*lines, ""]).encode()), values_of("\n".join([*lines, "damaged", ""]).encode())

    for name, values_N in fast.items():
        expected = [np.nan if record.get(name) is None else record[name] for record in records]
        assert np.array_equal(values_N, np.array(expected, dtype=np.float64), equal_nan=True)
        assert np.array_equal(values_N, slow[name], equal_nan=True)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_blocks_are_whole_lines(size: int, tmp_path: Path) -> None:
    content = b"a\nbcd\n\n" + b"e" * 20 + b"\ntorn"
    (tmp_path / "log").write_bytes(content)

    with (tmp_path / "log").open("rb") as file:
        blocks = list(blocks_of_lines(file, size=size))

    assert b"".join(blocks) == content
    assert all(block.endswith(b"\n") for block in blocks[:-1])


def test_the_damaged_line_of_a_large_file_is_named(tmp_path: Path) -> None:
    rows = [RecordedRow(str(index), "x" * 300) for index in range(3000)]
    folder = write_run(tmp_path / "run", results=rows)
    path = evaluation_path(folder, "test")
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2899] = b'{"key": 1}\n'
    path.write_bytes(b"".join(lines))

    assert path.stat().st_size > 2 * BLOCK
    with pytest.raises(DataError, match=r"test\.jsonl, line 2900, is damaged; evaluate the run again"):
        write_report(folder)


def test_a_run_of_one_row_and_one_step_has_a_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", outputs={"team": "category"}, results=rows_of(1, category(1)), steps=1)

    assert "test, 1 row" in page_of(folder).texts
