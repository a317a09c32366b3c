"""Training on preferences: margins, accuracies and log-probabilities over time, and the rows that are wrong."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from partita.report.charts import SHARES, Chart, Curve, curve_chart
from partita.report.evaluation import Evaluation
from partita.report.number_text import as_number
from partita.report.preference_rows import (
    PairRows,
    compares_means,
    has_preferences,
    has_reference,
    labelled_of,
    pairs_of,
)
from partita.report.run_record import RunRecord
from partita.report.section import Charts, Paragraph, Part, Passage, Passages, Section
from partita.report.sections.wrong_rows import MAX_ROWS, UNFOLDED, prompt_of, text_of
from partita_schema.common.text import counted

Description = tuple[str, list[tuple[str, str]]]
"""What the title of a row says, and its facts by name."""


class Words(NamedTuple):
    """What the answers of a trainer are called."""

    better: str
    worse: str
    margin: str


WORDS = {
    "preference": Words("chosen", "rejected", "chosen - rejected"),
    "kto": Words("good", "bad", "good - bad"),
    "reward": Words("chosen", "rejected", "chosen - rejected"),
}
"""By type of the trainer."""


def preferences_section(run: RunRecord) -> Section | None:
    """Return the curves and the wrong rows of training on preferences; None for other trainers."""
    if not has_preferences(run.config):
        return None
    charts, sentence = preference_charts(run), change_of_better(run)
    parts: list[Part] = [Paragraph(sentence)] if sentence else []
    parts += [Charts(charts)] if charts else []
    if run.results:
        main = run.results[0]
        parts += wrong_pairs(main.result, main.split) or wrong_labelled(main.result, main.split)
    return Section("Preferences", parts) if parts else None


def preference_charts(run: RunRecord) -> list[Chart]:
    """Return the charts of the metrics that the trainer logs."""
    words = WORDS[run.config["trainer"]["type"]]
    unit = "nats per answer" if has_reference(run.config) else "nats per token"
    charts = [
        chart("Reward margins", both(run, "rewards/margins"), y_label=words.margin, include=(0,)),
        chart("Accuracy of preferences", both(run, "rewards/accuracies"), y_label="share of pairs", include=SHARES),
        *(
            chart(f"Log-probabilities, {data}", of_answers(run, words, is_training=data == "training"), y_label=unit)
            for data in ("training", "validation")
        ),
        chart("KL term", both(run, "kl"), y_label="nats per answer", include=(0,)),
    ]
    return [one for one in charts if one is not None]


def chart(title: str, curves: Sequence[Curve], *, y_label: str, include: Sequence[float] = ()) -> Chart | None:
    """Return a chart of curves over the steps; None if they have no values.

    Args:
        title: What it shows.
        curves: The curves.
        y_label: Name and unit of the vertical axis.
        include: Further values that the vertical axis holds.
    """
    drawn = [curve for curve in curves if np.isfinite(curve.ys).any()]
    return curve_chart(title, drawn, x_label="step", y_label=y_label, include=include) if drawn else None


def both(run: RunRecord, metric: str) -> list[Curve]:
    """Return the curves of a metric of the training and of the validation rows."""
    return [in_training(run, metric, name="training"), in_validation(run, metric, name="validation")]


def of_answers(run: RunRecord, words: Words, *, is_training: bool) -> list[Curve]:
    """Return the curves of the log-probabilities of both kinds of answers.

    Args:
        run: The run.
        words: What the answers are called.
        is_training: Whether the curves are those of the training rows; otherwise of the validation rows.
    """
    curve = in_training if is_training else in_validation
    return [curve(run, "logps/chosen", name=words.better), curve(run, "logps/rejected", name=words.worse)]


def in_training(run: RunRecord, metric: str, *, name: str) -> Curve:
    """Return the curve of a metric of the training rows."""
    return Curve(name, run.steps["step"], run.steps.get(metric, np.full(len(run.steps["step"]), np.nan)))


def in_validation(run: RunRecord, metric: str, *, name: str) -> Curve:
    """Return the curve of a metric of the validation rows."""
    return Curve(name, *run.evaluations("validation", metric), dots=True)


def change_of_better(run: RunRecord) -> str:
    """Return how the log-probability of chosen or good answers has changed; empty if that is not known."""
    for split in ("validation", "test"):
        metrics = run.metrics.get(split, {})
        change = change_of(run, split, metrics)
        if change is None or not change:
            continue
        direction = "fallen" if change < 0 else "risen"
        unit = "an answer" if has_reference(run.config) and not compares_means(run.config) else "a token"
        text = (
            f"The log-probability of the {WORDS[run.config['trainer']['type']].better} answers has {direction} by "
            f"{abs(change):.3g} nats {unit} on average"
        )
        if "chosen_falls" in metrics:
            text += f"; it has fallen in {as_number('chosen_falls', metrics['chosen_falls'])} of the {split} pairs"
        return f"{text}.{advice(run.config) if change < 0 else ''}"
    return ""


def change_of(run: RunRecord, split: str, metrics: Mapping[str, float]) -> float | None:
    """Return by how much the mean log-probability of better answers has changed; None if that is not known.

    Args:
        run: The run.
        split: A split.
        metrics: Its metrics after training.
    """
    trainer = run.config["trainer"]
    if has_reference(run.config):
        beta = (trainer if trainer["type"] == "kto" else trainer.get("loss") or {}).get("beta")
        return metrics["rewards/chosen"] / beta if beta and "rewards/chosen" in metrics else None
    before = ((run.manifest.get("metrics_base") or {}).get(split) or {}).get("logps/chosen")
    if before is None:
        before = next(iter(run.evaluations(split, "logps/chosen")[1]), None)
    return metrics["logps/chosen"] - before if before is not None and "logps/chosen" in metrics else None


def advice(config: Mapping[str, Any]) -> str:
    """Return what is known of chosen answers that become less likely."""
    if config["trainer"]["type"] != "preference" or not has_reference(config):
        return ""
    return (
        " With dpo that is common, because its loss only widens the distance to the rejected answers; rpo_alpha: 1.0 "
        "keeps the chosen ones likely."
    )


def wrong_pairs(evaluation: Evaluation, split: str) -> list[Part]:
    """Return the pairs whose rejected answer has the higher reward, those with the lowest margin first.

    Args:
        evaluation: The results of rows.
        split: Name of the split.
    """
    pairs = pairs_of(evaluation)
    if pairs is None:
        return []
    [column] = evaluation.outputs.values()
    margins_N = pairs.margins_N
    wrong = [index for index in np.argsort(margins_N, kind="stable").tolist() if margins_N[index] <= 0]
    total = f"{counted(len(evaluation), 'pair')} of the {split} split"
    if not wrong:
        return [Paragraph(f"The chosen answer is preferred in each of the {total}.")]

    def describe(index: int) -> Description:
        rejected = (column.of_rows[index] or {}).get("rejected")
        answers = [("Chosen", text_of(column.references[index])), ("Rejected", text_of(rejected))]
        return f"margin {margins_N[index]:.3g}", [*answers, numbers_of_pair(pairs, index)]

    caption = f"Wrong pairs, whose rejected answer is preferred: {len(wrong):,} of the {total}"
    return [passages_of(evaluation, wrong, describe, caption=caption)]


def numbers_of_pair(pairs: PairRows, index: int) -> tuple[str, str]:
    """Return the log-probabilities of both answers of a pair, or their scores by a reward model."""
    text = "chosen {:.4g}, rejected {:.4g}"
    if pairs.log_probs_N2 is None:
        return "Scores", text.format(*pairs.rewards_N2[index])
    return "Log-probabilities", text.format(*pairs.log_probs_N2[index])


def wrong_labelled(evaluation: Evaluation, split: str) -> list[Part]:
    """Return good answers that became less likely and bad ones that became more likely, the largest change first.

    Args:
        evaluation: The results of rows.
        split: Name of the split.
    """
    labelled = labelled_of(evaluation)
    if labelled is None:
        return []
    [column] = evaluation.outputs.values()
    errors_N = np.where(labelled.is_good_N, -labelled.rewards_N, labelled.rewards_N)
    wrong = [index for index in np.argsort(-errors_N, kind="stable").tolist() if errors_N[index] > 0]
    total = f"{counted(len(evaluation), 'answer')} of the {split} split"
    if not wrong:
        return [Paragraph(f"No good answer is less likely, and no bad one more likely, of the {total}.")]

    def describe(index: int) -> Description:
        answer = ("Answer", text_of(column.references[index]))
        title = f"{'good' if labelled.is_good_N[index] else 'bad'}, reward {labelled.rewards_N[index]:.3g}"
        return title, [answer, ("Log-probability", f"{labelled.log_probs_N[index]:.4g}")]

    caption = "Good answers that are less likely than before training, and bad ones that are more likely"
    return [passages_of(evaluation, wrong, describe, caption=f"{caption}: {len(wrong):,} of the {total}")]


def passages_of(
    evaluation: Evaluation, wrong: Sequence[int], describe: Callable[[int], Description], *, caption: str
) -> Passages:
    """Return the worst of the wrong rows, each with its prompt.

    Args:
        evaluation: The results of rows.
        wrong: Indices of the wrong rows, the worst first.
        describe: Returns what the title of a row says after its key, and its facts.
        caption: Caption of all of them.
    """
    passages = []
    for index in wrong[:MAX_ROWS]:
        title, facts = describe(index)
        title = f"row {evaluation.keys[index]}, {title}"
        passages.append(Passage(title, (), before=prompt_of(evaluation, index), facts=facts))
    limit = f"; the {MAX_ROWS} worst" if len(wrong) > MAX_ROWS else ""
    return Passages(caption + limit, passages, unfolded=UNFOLDED)
