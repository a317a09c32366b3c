"""The curves of training: loss, learning rate, gradient norm and speed, with what happened on the way."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from partita.report.charts import Chart, Curve, Mark, curve_chart
from partita.report.comparable_losses import predicts_values
from partita.report.preference_rows import has_preferences
from partita.report.run_record import PREFERENCE_VALUES, RunRecord
from partita.report.section import Charts, Paragraph, Section

SPEED_SECTIONS = 60
"""Groups of neighboring steps whose speed is drawn."""
WIDE = 10
"""Ratio of the highest and the median loss above which their axis is logarithmic."""
MAX_MARKS = 20
"""Events in the charts and in the text, of each kind."""


def training_section(run: RunRecord) -> Section | None:
    """Return the curves of training; None without logged steps."""
    if not len(run.steps["step"]):
        return None
    marks = events(run)
    charts = [loss_chart(run, marks), *metric_charts(run, marks)]
    charts += step_charts(run, marks)
    charts += search_charts(run)
    texts = [f"{mark.text}." for mark in marks]
    return Section("Training", [*([Paragraph(" ".join(texts))] if texts else []), Charts(charts)])


def loss_chart(run: RunRecord, marks: Sequence[Mark]) -> Chart:
    """Return the chart of the training and validation loss."""
    curves = [Curve("training", run.steps["step"], run.steps["loss"])]
    validation = Curve("validation", *run.evaluations("validation", "loss"), dots=True)
    curves += [validation] if len(validation.xs) else []
    losses_N = run.steps["loss"][np.isfinite(run.steps["loss"])]
    is_wide = len(losses_N) > 0 and losses_N.min() > 0 and losses_N.max() > WIDE * np.median(losses_N)
    notes = ["The vertical axis is logarithmic."] if is_wide else []
    notes += ["The line is the mean of neighboring steps, the area their range."] if len(losses_N) > 300 else []
    return curve_chart(
        "Loss",
        curves,
        x_label="step",
        y_label=loss_unit(run.config),
        y_scale="log" if is_wide else "linear",
        marks=marks,
        note=" ".join(notes),
    )


def loss_unit(config: Mapping[str, Any]) -> str:
    """Return the unit of the loss: of tokens, of a head for each row or word, or unknown of a custom trainer."""
    if (config.get("trainer") or {}).get("type") == "custom":
        return "loss"
    if has_preferences(config):
        return "mean of the answers" if config["trainer"]["type"] == "kto" else "mean of the pairs"
    if not predicts_values(config):
        return "nats per loss token"
    [output] = config["output_features"]
    if output["type"] == "number" or (output.get("decoder") or {}).get("loss") == "squared_error":
        return "mean squared error"
    return "nats per word" if output["type"] == "tags" else "nats per row"


def metric_charts(run: RunRecord, marks: Sequence[Mark]) -> list[Chart]:
    """Return the chart of the metric that selects checkpoints, unless that is the loss."""
    metric = run.validation_metric
    if metric is None or metric == "loss" or metric in PREFERENCE_VALUES:  # the section on preferences has these
        return []
    steps, values = run.evaluations("validation", metric)
    curve = Curve(metric, steps, values, dots=True)
    return [curve_chart(metric, [curve], x_label="step", y_label="validation", marks=marks)] if steps else []


def step_charts(run: RunRecord, marks: Sequence[Mark]) -> list[Chart]:
    """Return the charts of values that each step logs, without those that the trainer does not log."""
    steps = run.steps["step"]
    unit = "tokens" if np.isfinite(run.steps["tokens"]).any() else "rows"
    drawn = [
        (Curve("Learning rate", steps, run.steps["learning_rate"]), "", (0,)),
        (Curve("Gradient norm", steps, run.steps["gradient_norm"]), "before clipping", ()),
        (speed_curve(steps, run.steps[unit], run.steps["seconds"]), f"{unit} per second", (0,)),
    ]
    return [
        curve_chart(curve.name, [curve], x_label="step", y_label=label, marks=marks, include=include)
        for curve, label, include in drawn
        if np.isfinite(curve.ys).any()
    ]


def speed_curve(steps_N: np.ndarray, work_N: np.ndarray, seconds_N: np.ndarray) -> Curve:
    """Return the work per second over neighboring steps, because that of a single step is mostly noise.

    Args:
        steps_N: Numbers of the steps.
        work_N: Tokens or rows of each step.
        seconds_N: Duration of each step.
    """
    starts = np.unique(np.linspace(0, len(steps_N), SPEED_SECTIONS, endpoint=False).astype(np.int64))
    work, seconds = (np.add.reduceat(values_N, starts) for values_N in (work_N, seconds_N))
    ends = np.append(starts[1:], len(steps_N)) - 1
    return Curve("Speed", steps_N[ends], work / np.maximum(seconds, 1e-9))


def search_charts(run: RunRecord) -> list[Chart]:
    """Return the chart of the search for a learning rate, if there was one."""
    search = run.manifest.get("learning_rate_search")
    if not isinstance(search, Mapping) or not search.get("rates"):
        return []
    chosen = search.get("learning_rate")
    marks = [Mark(float(chosen), f"chosen: {chosen:.3g}")] if isinstance(chosen, int | float) else []
    return [
        curve_chart(
            "Search for the learning rate",
            [Curve("loss", search["rates"], search["losses"])],
            x_label="learning rate",
            y_label=loss_unit(run.config),
            marks=marks,
            x_scale="log",
            note=f"{marks[0].text[0].upper()}{marks[0].text[1:]}." if marks else "",
        )
    ]


def events(run: RunRecord) -> list[Mark]:
    """Return what happened during training, by step."""
    manifest = run.manifest
    kinds = [
        [(step_of(cut), "Memory ran out at step {:,}") for cut in manifest.get("out_of_memory") or ()],
        [(step_of(start), "Resumed after step {:,}") for start in manifest.get("resumed") or ()],
    ]
    marks = [Mark(step, text.format(int(step))) for kind in kinds for step, text in kind[:MAX_MARKS] if step]
    best, last = manifest.get("best_step"), manifest.get("steps") or 0
    if best and best < last:
        marks.append(Mark(float(best), f"The best model is that of step {best:,}"))
    return marks


def step_of(record: Any) -> float | None:
    """Return the step of a record, or the record itself if it is a number."""
    value = record.get("step") if isinstance(record, Mapping) else record
    return float(value) if isinstance(value, int | float) else None
