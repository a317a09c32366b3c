"""The report of training on preferences: curves, what happens to chosen answers, and the rows that are wrong."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partita.report.comparison import compare_runs
from partita.report.evaluation import read_evaluations
from partita.report.measures import measure_rows
from partita.report.run_record import PREFERENCE_VALUES, STEP_VALUES, read_steps
from partita.runs.listing import read_summary
from partita.runs.row_results import EvaluationHeader, OutputResult, RecordedRow, evaluation_path

from ..recorded_results import write_row_results
from .made_runs import (
    PAIR_METRICS,
    labelled,
    pair,
    preference_log,
    rows_of,
    scores,
    write_preference_run,
    write_run,
)
from .pages import page_of


def one_pair(key: str, *, chosen: float, rejected: float) -> RecordedRow:
    """Return a pair with these rewards."""
    of_row = {"rewards/chosen": chosen, "rewards/rejected": rejected, "logps/chosen": -3.5, "logps/rejected": -2.25}
    output = OutputResult("the parcel is late", None, of_row=of_row | {"rejected": "it was lost"})
    return RecordedRow(key, f"Where is {key}?", None, 0.5, 1, {"reply": output})


def test_curves_show_margins_accuracies_and_both_log_probabilities(tmp_path: Path) -> None:
    page = page_of(write_preference_run(tmp_path / "run", results=rows_of(20, pair(0.8))))

    for title in ("Reward margins", "Accuracy of preferences"):
        assert {"training", "validation"} <= set(page.after(title, count=30))
    for title in ("Log-probabilities, training", "Log-probabilities, validation"):
        assert {"chosen", "rejected", "nats per answer"} <= set(page.after(title, count=30))
    assert "KL term" not in page.texts
    assert "mean of the pairs" in page.after("Loss", count=20)


def test_curves_of_labelled_answers_show_the_kl_term(tmp_path: Path) -> None:
    page = page_of(write_preference_run(tmp_path / "run", results=rows_of(20, labelled(0.8)), loss="kto"))

    assert {"good", "bad"} <= set(page.after("Log-probabilities, training", count=30))
    assert {"training", "validation"} <= set(page.after("KL term", count=30))
    assert "Accuracy of preferences" not in page.texts
    assert "mean of the answers" in page.after("Loss", count=20)


@pytest.mark.parametrize("metric", ["rewards/margins", "chosen_falls"])
def test_the_metric_that_selects_checkpoints_is_drawn_once(metric: str, tmp_path: Path) -> None:
    config = {
        "base_model": "org/model",
        "output_features": [{"name": "reply", "type": "preference"}],
        "trainer": {"type": "preference", "validation_metric": metric},
    }
    evaluations = [{"step": 10, "split": "validation", metric: 0.5}]
    run = write_run(
        tmp_path / "run",
        outputs={"reply": "preference"},
        results=rows_of(9, pair(0.8)),
        config=config,
        evaluations=evaluations,
    )

    titles = [value for _, name, value in page_of(run).attributes if name == "aria-label"]

    assert [title for title in titles if title in (metric, "Reward margins")] == [
        "Reward margins" if metric == "rewards/margins" else metric
    ]


def test_wrong_pairs_are_listed_with_both_answers_the_lowest_margin_first(tmp_path: Path) -> None:
    rows = [
        one_pair("a", chosen=0.5, rejected=0.25),
        one_pair("b", chosen=-0.25, rejected=0.25),
        one_pair("c", chosen=-1.0, rejected=0.5),
        one_pair("d", chosen=0.5, rejected=0.5),
    ]

    page = page_of(write_preference_run(tmp_path / "run", results=rows))

    title = "Wrong pairs, whose rejected answer is preferred: 3 of the 4 pairs of the test split"
    assert [line for line in page.texts if line.startswith("row ")] == [
        "row c, margin -1.5",
        "row b, margin -0.5",
        "row d, margin 0",
    ]
    shown = page.after(title, count=8)
    assert shown[:3] == ["row c, margin -1.5", "Where is c?", "Chosen:"]
    assert shown[3:] == [
        "the parcel is late",
        "Rejected:",
        "it was lost",
        "Log-probabilities:",
        "chosen -3.5, rejected -2.25",
    ]
    assert "Rows with the highest loss" not in page.text


def test_wrong_pairs_of_a_reward_model_are_listed_with_their_scores(tmp_path: Path) -> None:
    rows = []
    for key, chosen, rejected in (("a", 0.5, 0.25), ("b", -0.25, 1.0)):
        of_row = {"rewards/chosen": chosen, "rewards/rejected": rejected} | {"rejected": "it was lost"}
        outputs = {"reply": OutputResult("the parcel is late", None, of_row=of_row)}
        rows.append(RecordedRow(key, f"Where is {key}?", None, 0.5, 1, outputs))
    config = {
        "base_model": "org/model",
        "output_features": [{"name": "reply", "type": "preference", "head": "linear"}],
        "trainer": {"type": "reward"},
    }
    metrics = {"rewards/accuracies": 0.5, "rewards/margins": -0.5}
    evaluations = [{"step": 10, "split": "validation", "loss": 0.6} | metrics]
    run = write_run(
        tmp_path / "run", outputs={"reply": "preference"}, results=rows, config=config, evaluations=evaluations
    )
    (run / "log.jsonl").write_text(preference_log(40, names=tuple(metrics)), encoding="utf8")
    page = page_of(run)

    title = "Wrong pairs, whose rejected answer is preferred: 1 of the 2 pairs of the test split"
    assert page.after(title, count=8)[-2:] == ["Scores:", "chosen -0.25, rejected 1"]
    assert {"training", "validation"} <= set(page.after("Reward margins", count=30))
    assert not [text for text in page.texts if "og-probabilit" in text]
    assert "mean of the pairs" in page.after("Loss", count=20)


def test_no_more_than_twenty_wrong_pairs_are_shown(tmp_path: Path) -> None:
    rows = [one_pair(f"row-{index}", chosen=0.0, rejected=0.1 * (index + 1)) for index in range(30)]

    page = page_of(write_preference_run(tmp_path / "run", results=rows))

    title = "Wrong pairs, whose rejected answer is preferred: 30 of the 30 pairs of the test split; the 20 worst"
    assert page.after(title, count=1) == ["row row-29, margin -3"]
    assert len([line for line in page.texts if line.startswith("row row-")]) == 20


def test_a_run_without_wrong_pairs_says_so(tmp_path: Path) -> None:
    rows = [one_pair(name, chosen=1.0, rejected=0.5) for name in "abc"]

    page = page_of(write_preference_run(tmp_path / "run", results=rows))

    assert "The chosen answer is preferred in each of the 3 pairs of the test split." in page.texts


def test_labelled_answers_that_moved_in_the_wrong_direction_are_listed(tmp_path: Path) -> None:
    def answer(key: str, *, reward: float, is_good: int) -> RecordedRow:
        output = OutputResult(f"answer {key}", None, of_row={"reward": reward, "logp": -2.5, "is_good": is_good})
        return RecordedRow(key, f"Where is {key}?", None, 0.5, 1, {"reply": output})

    rows = [
        answer("a", reward=0.5, is_good=1),
        answer("b", reward=-0.5, is_good=0),
        answer("c", reward=-0.25, is_good=1),
        answer("d", reward=0.75, is_good=0),
    ]

    page = page_of(write_preference_run(tmp_path / "run", results=rows, loss="kto"))

    assert [line for line in page.texts if line.startswith("row ")] == [
        "row d, bad, reward 0.75",
        "row c, good, reward -0.25",
    ]
    assert page.after("row d, bad, reward 0.75", count=5) == [
        "Where is d?",
        "Answer:",
        "answer d",
        "Log-probability:",
        "-2.5",
    ]
    better = page_of(write_preference_run(tmp_path / "better", results=rows[:2], loss="kto"))
    sentence = "No good answer is less likely, and no bad one more likely, of the 2 answers of the test split."
    assert sentence in better.texts


@pytest.mark.parametrize(
    ("loss", "metrics", "base", "sentence"),
    [
        (
            "dpo",
            {"rewards/chosen": -0.25, "chosen_falls": 0.75},
            {},
            (
                "The log-probability of the chosen answers has fallen by 2.5 nats an answer on average; it has fallen "
                "in 0.750 of the validation pairs. With dpo that is common, because its loss only widens the distance "
                "to the rejected answers; rpo_alpha: 1.0 keeps the chosen ones likely."
            ),
        ),
        (
            "dpo",
            {"rewards/chosen": 0.125, "chosen_falls": 0.25},
            {},
            (
                "The log-probability of the chosen answers has risen by 1.25 nats an answer on average; it has fallen "
                "in 0.250 of the validation pairs."
            ),
        ),
        (
            "simpo",
            {"logps/chosen": -0.75},
            {"logps/chosen": -0.5},
            "The log-probability of the chosen answers has fallen by 0.25 nats a token on average.",
        ),
        (
            "orpo",
            {"logps/chosen": 0.25},
            {},  # compared with the first evaluation, whose value is 0.7
            "The log-probability of the chosen answers has fallen by 0.45 nats a token on average.",
        ),
        (
            "kto",
            {"rewards/chosen": -0.25},
            {},
            "The log-probability of the good answers has fallen by 2.5 nats an answer on average.",
        ),
    ],
)
def test_a_sentence_says_whether_chosen_answers_became_less_likely(
    loss: str, metrics: dict[str, float], base: dict[str, float], sentence: str, tmp_path: Path
) -> None:
    rows = rows_of(5, labelled(0.8) if loss == "kto" else pair(0.8))
    more = {"metrics_base": {"validation": base}} if base else {}

    page = page_of(
        write_preference_run(tmp_path / "run", results=rows, loss=loss, metrics={"validation": metrics}, **more)
    )

    assert page.after("Preferences", count=1) == [sentence]


def test_the_change_of_chosen_answers_is_per_token_if_the_loss_compares_means(tmp_path: Path) -> None:
    trainer = {"type": "preference", "loss": {"type": "dpo", "variant": "ipo", "beta": 0.5}}
    metrics, rows = {"validation": {"rewards/chosen": 0.125}}, rows_of(5, pair(0.8))

    page = page_of(write_preference_run(tmp_path / "run", results=rows, metrics=metrics, config={"trainer": trainer}))

    assert page.after("Preferences", count=1) == [
        "The log-probability of the chosen answers has risen by 0.25 nats a token on average."
    ]


def test_generated_answers_of_pairs_are_compared_with_the_chosen_ones(tmp_path: Path) -> None:
    rows, base = rows_of(60, pair(0.9)), rows_of(60, pair(0.2))

    page = page_of(write_preference_run(tmp_path / "run", results=rows, base=base))

    assert "Better than the base model: reply.exact_match" in page.text
    assert "Answers: reply (preference, test)" in page.texts
    assert {"only in the reference", "rewards/accuracies", "reply.rouge_l"} <= set(page.texts)


def test_the_first_sentence_counts_the_rows_with_an_expected_answer(tmp_path: Path) -> None:
    rows = rows_of(40, labelled(0.9))
    good = sum(output.right is not None for row in rows for output in row.outputs.values())

    page = page_of(write_preference_run(tmp_path / "run", results=rows, loss="kto"))

    assert 5 < good < 35
    assert f"on {good} rows of the test split" in page.text


def test_a_metric_relative_to_the_base_model_is_not_missing_there(tmp_path: Path) -> None:
    still = [one_pair(f"row-{index}", chosen=0.0, rejected=0.0) for index in range(9)]
    rows = [one_pair(f"row-{index}", chosen=index / 9, rejected=0.5) for index in range(9)]

    trainer = {"type": "preference", "validation_metric": "rewards/accuracies"}
    page = page_of(write_preference_run(tmp_path / "run", results=rows, base=still, config={"trainer": trainer}))

    assert "The rewards/accuracies is" in page.text
    assert "the base model was not evaluated" not in page.text


def test_the_first_sentence_without_generated_answers_has_the_loss_that_the_list_of_runs_shows(tmp_path: Path) -> None:
    rows = rows_of(30, pair(0.8, answered=False))
    mean = sum(row.loss for row in rows if row.loss is not None) / len(rows)
    metrics = {"test": {"loss": mean, "rewards/margins": 0.036}}

    run = write_preference_run(tmp_path / "run", results=rows, metrics=metrics)

    listed = read_summary(run).metric()
    assert listed is not None
    assert listed.name == "loss"
    assert f"The loss is {listed.value:.3f} (95 % interval " in page_of(run).text


def test_runs_on_preferences_are_compared_pair_by_pair(tmp_path: Path) -> None:
    first = [one_pair(f"row-{index}", chosen=0.1 * (index % 3), rejected=0.15) for index in range(60)]
    second = [one_pair(f"row-{index}", chosen=0.1 * (index % 3) + 0.2, rejected=0.15) for index in range(60)]
    runs = [
        write_preference_run(tmp_path / name, results=rows) for name, rows in (("first", first), ("second", second))
    ]

    metrics = {one.metric: one for one in compare_runs(runs).pairs[0].metrics}

    accuracy, margin = metrics["rewards/accuracies"].difference, metrics["rewards/margins"].difference
    assert accuracy is not None
    assert margin is not None
    assert (accuracy.value, accuracy.test) == (pytest.approx(2 / 3), "McNemar")
    assert (margin.value, margin.test) == (pytest.approx(0.2), "bootstrap")
    assert (margin.low, margin.high) == (pytest.approx(0.2), pytest.approx(0.2))  # the same in each pair
    assert metrics["rewards/accuracies"].verdict == metrics["rewards/margins"].verdict == "better"


REWARDS = "rewards/chosen, rewards/rejected, rewards/margins"
OTHER_REFERENCE = "each is relative to the model before its training, and these models differ"


@pytest.mark.parametrize(
    ("loss", "config", "left_out"),
    [
        ("dpo", {}, ""),
        (
            "dpo",
            {"trainer": {"type": "preference", "loss": {"type": "dpo", "beta": 0.5}}},
            (
                f"{REWARDS} of second are not compared with those of first: the losses differ, and their factor is "
                "part of a reward"
            ),
        ),
        (
            "dpo",
            {"base_model": "org/other"},
            (
                f"{REWARDS}, rewards/accuracies, chosen_falls of second are not compared with those of first: "
                f"{OTHER_REFERENCE}"
            ),
        ),
        (
            "simpo",
            {},
            (
                f"{REWARDS}, rewards/accuracies, chosen_falls, logps/chosen, logps/rejected of second are not compared "
                "with those of first: only one loss compares with the model before training"
            ),
        ),
    ],
)
def test_rewards_of_different_losses_are_not_compared(
    loss: str, config: dict[str, Any], left_out: str, tmp_path: Path
) -> None:
    rows = rows_of(40, pair(0.8, answered=False))
    runs = [write_preference_run(tmp_path / "first", results=rows)]
    runs.append(write_preference_run(tmp_path / "second", results=rows, loss=loss))
    if config:
        settings = {"output_features": [{"name": "reply", "type": "preference"}], "base_model": "org/model"}
        settings["trainer"] = {"type": "preference"}  # type: ignore[assignment]
        runs[1] = write_run(
            tmp_path / "other" / "second", outputs={"reply": "preference"}, results=rows, config=settings | config
        )

    comparison = compare_runs(runs)

    compared = {one.metric for one in comparison.pairs[0].metrics}
    assert not compared & set(left_out.partition(" of ")[0].split(", "))
    assert (
        left_out in comparison.notes if left_out else not any("are not compared" in note for note in comparison.notes)
    )
    assert ("loss" in compared) == (not left_out)
    if left_out:
        reason = OTHER_REFERENCE if OTHER_REFERENCE in left_out else "the trainers have different losses"
        assert f"the loss of second is not compared with that of first: {reason}" in comparison.notes


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (("auto", 1.5), ("auto", 1.5), True),
        (("auto", 1.5), ("auto", 3.0), False),
        (("auto", 1.5), (1.5, None), True),
        (("auto", 1.5), (1.0, None), False),
    ],
)
def test_losses_of_kto_are_compared_if_the_weights_of_bad_answers_are_equal(
    first: tuple[Any, Any], second: tuple[Any, Any], same: bool, tmp_path: Path
) -> None:
    runs = [
        write_preference_run(
            tmp_path / name,
            results=rows_of(40, labelled(0.8)),
            loss="kto",
            config={"trainer": {"type": "kto", "undesirable_weight": configured}},
            **({} if used is None else {"undesirable_weight": used}),
        )
        for name, (configured, used) in (("first", first), ("second", second))
    ]

    comparison = compare_runs(runs)

    assert set(REWARDS.split(", ")) <= {one.metric for one in comparison.pairs[0].metrics}
    assert [note for note in comparison.notes if "compared" in note] == (
        [] if same else ["the loss of second is not compared with that of first: the trainers have different losses"]
    )


def with_reference(
    folder: Path, reference: str | None, *, adapter: str | None = None, kept: int = 0, kind: str = "dpo"
) -> Path:
    """Write a run on preferences, or of self-training its directory and that of its last round.

    Args:
        folder: The run directory.
        reference: The recorded hash of the model before training, of self-training that of the last round.
        adapter: The adapter that was trained further.
        kept: Number of rounds of self-training that were kept, before one that was not.
        kind: dpo or kto.
    """
    manifest = {} if reference is None else {"model_before_training": reference}
    config = {} if adapter is None else {"adapter": {"type": "lora", "pretrained_adapter_weights": adapter}}
    rows = rows_of(40, labelled(0.8) if kind == "kto" else pair(0.8))
    if kept:
        write_run(folder / "rounds" / str(kept), **manifest)
        rounds = [{"kept": True}] * kept + [{"kept": False}]
        manifest = {"model_before_training": "before all rounds", "rounds": rounds}
    return write_preference_run(folder, results=rows, loss=kind, config=config, **manifest)


@pytest.mark.parametrize("kind", ["dpo", "kto"])
@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ({"reference": "one"}, {"reference": "one"}, True),
        ({"reference": "one"}, {"reference": "two"}, False),
        ({"reference": "one"}, {"reference": "one", "adapter": "runs/old/model"}, True),
        ({"reference": None}, {"reference": None}, True),
        ({"reference": "one"}, {"reference": None, "adapter": "runs/old/model"}, False),
        ({"reference": "one", "kept": 2}, {"reference": "one"}, True),
        ({"reference": "one", "kept": 2}, {"reference": "before all rounds"}, False),
    ],
    ids=["same", "other", "same adapter", "unknown", "unknown with an adapter", "same round", "other round"],
)
def test_rewards_and_losses_are_compared_if_training_began_with_the_same_model(
    first: dict[str, Any], second: dict[str, Any], same: bool, kind: str, tmp_path: Path
) -> None:
    runs = [with_reference(tmp_path / "a", **first, kind=kind), with_reference(tmp_path / "b", **second, kind=kind)]

    comparison = compare_runs(runs)

    compared = {one.metric for one in comparison.pairs[0].metrics}
    relative = {"loss", *REWARDS.split(", "), *(() if kind == "kto" else ("rewards/accuracies",))}
    assert relative & compared == (relative if same else set())
    assert {"logps/chosen", "logps/rejected", "reply.exact_match"} <= compared
    reasons = [note for note in comparison.notes if note.endswith(OTHER_REFERENCE)]
    assert len(reasons) == (0 if same else 2)


def test_models_before_training_that_differ_are_settings(tmp_path: Path) -> None:
    runs = [with_reference(tmp_path / "a", "one"), with_reference(tmp_path / "b", "two", kept=1)]
    assert (compare_runs(runs).settings or {})["model before training (fingerprint)"] == ["one", "two"]


@pytest.mark.parametrize(
    ("center", "left_out"),
    [(0.0, []), (0.01, ["the loss of second is not compared with that of first: the trainers have different losses"])],
)
def test_the_levels_of_scores_of_reward_models_are_not_compared(
    center: float, left_out: list[str], tmp_path: Path
) -> None:
    runs = []
    for name, value in (("first", 0.0), ("second", center)):
        config = {
            "base_model": f"org/{name}",
            "output_features": [{"name": "reply", "type": "preference", "head": "linear"}],
            "trainer": {"type": "reward", "center": value},
        }
        outputs = {"reply": "preference"}
        runs.append(write_run(tmp_path / name, outputs=outputs, results=rows_of(40, scores(0.8)), config=config))

    comparison = compare_runs(runs)

    compared = {one.metric for one in comparison.pairs[0].metrics}
    assert compared == {"rewards/accuracies", "rewards/margins", *(() if left_out else ("loss",))}
    assert [note for note in comparison.notes if "compared" in note] == [
        *left_out,
        (
            "rewards/chosen, rewards/rejected of second are not compared with those of first: only differences of the "
            "scores of a reward model have a meaning"
        ),
    ]


def test_runs_on_labelled_answers_are_compared_on_the_good_ones(tmp_path: Path) -> None:
    rows = rows_of(60, labelled(0.5)), rows_of(60, labelled(0.9))
    for row, other in zip(*rows, strict=True):  # the same labels
        other.outputs["reply"].of_row["is_good"] = row.outputs["reply"].of_row["is_good"]  # type: ignore[index]
    first = [row for row in rows[0] if row.outputs["reply"].of_row["is_good"]]  # type: ignore[index]
    bad = [row for row in rows[0] if not row.outputs["reply"].of_row["is_good"]]  # type: ignore[index]
    runs = [write_preference_run(tmp_path / name, results=[*first, *bad], loss="kto") for name in ("first", "second")]

    [pair_] = compare_runs(runs).pairs

    [agreement] = pair_.agreement
    assert agreement.both + agreement.neither == len(first)
    assert {"reply.exact_match", "rewards/margins"} <= {one.metric for one in pair_.metrics}


def test_metrics_of_pairs_are_those_of_the_evaluation_with_intervals(tmp_path: Path) -> None:
    header = EvaluationHeader("test", "result", "f", outputs={"reply": "preference"}, metrics={"chosen_falls": 0.5})
    rows = [one_pair(f"row-{index}", chosen=(-1) ** index * 0.5, rejected=index % 4 / 8) for index in range(40)]
    write_row_results(evaluation_path(tmp_path, "test"), header, rows)
    [split] = read_evaluations(tmp_path)

    measured = {one.metric: one.result for one in measure_rows(split.result)}

    rewards = np.array([[(-1) ** index * 0.5, index % 4 / 8] for index in range(40)])
    assert measured["rewards/accuracies"].value == (rewards[:, 0] > rewards[:, 1]).mean()
    assert measured["chosen_falls"].value == 0.5
    assert measured["rewards/margins"].value == pytest.approx((rewards[:, 0] - rewards[:, 1]).mean())
    assert measured["rewards/margins"].low < measured["rewards/margins"].value < measured["rewards/margins"].high


def test_steps_without_a_metric_have_none(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(preference_log(3, names=PAIR_METRICS), encoding="utf8")

    steps = read_steps(path, (*STEP_VALUES, *PREFERENCE_VALUES))

    assert steps["rewards/margins"].tolist() == pytest.approx([-1, 0, 1 / 3])
    assert np.isnan(steps["kl"]).all()
