"""`report.html` of a sweep: the best trial, what matters, all trials, and their learning curves."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from partita.report.charts import Chart, Curve, Dimension, Table, curve_chart, parallel_chart, shares_chart
from partita.report.page import render_page
from partita.report.section import Charts, Command, NamedTable, Paragraph, Section
from partita.runs.files import why_not_written
from partita.runs.sweep_record import Trial
from partita.runs.sweep_result import SweepResult, parameter_text, predict_command, short_names
from partita_schema.common.files import write_atomically
from partita_schema.common.text import counted
from partita_schema.errors import WriteError

REPORT = "report.html"
WIDE = 20
"""Ratio of values above which an axis is logarithmic."""
MAX_NAMED = 6
"""Different numbers of a parameter up to which each has its place and its label on the axis."""
MAX_AXES, MAX_CURVES, MAX_ROWS = 6, 4, 100
"""Parameters of the parallel coordinates, curves of a chart, and rows of the table."""


def write_sweep_page(result: SweepResult, importance: Mapping[str, float]) -> Path:
    """Write the page of a sweep into its folder, and return its path.

    Args:
        result: The trials; at least one has a value.
        importance: Importance of the parameters, the highest first; empty if there are too few trials.

    Raises:
        WriteError: The page cannot be written.
    """
    path = result.folder / REPORT
    try:
        write_atomically(path, sweep_page(result, importance))
    except OSError as error:
        raise WriteError(why_not_written(error, path)) from error
    return path


def sweep_page(result: SweepResult, importance: Mapping[str, float]) -> str:
    """Return the page of a sweep as HTML; see `write_sweep_page`."""
    sections = [
        best_section(result),
        charts_section(result, importance),
        trials_section(result),
        curves_section(result),
        failures_section(result),
    ]
    return render_page(
        f"Sweep {result.folder.name}",
        facts=facts_of(result),
        lead=lead_of(result),
        sections=[section for section in sections if section is not None],
    )


def facts_of(result: SweepResult) -> str:
    """Return the numbers of trials, and their cost."""
    ended = [trial.result for trial in result.trials if trial.result is not None and trial.repeats is None]
    states = {state: sum(one.state == state for one in ended) for state in ("pruned", "failed")}
    words = {"pruned": "stopped early", "failed": "failed"}
    parts = [counted(len(result.trials), "trial")]
    repeats = sum(trial.repeats is not None for trial in result.trials)
    parts += [f"{repeats} with the values of an earlier one"] if repeats else []
    parts += [f"{count} {words[state]}" for state, count in states.items() if count]
    parts.append(f"{sum(one.cpu_seconds for one in ended):,.0f} CPU seconds")
    return ", ".join(parts)


def lead_of(result: SweepResult) -> str:
    """Return the most important sentence."""
    best, ranked = result.best, result.ranked
    assert best is not None
    middle = median(result.value_of(trial) for trial in ranked)
    value = f"{result.metric} {result.value_of(best):.4g}"
    if len(ranked) == 1:
        return f"Only trial {best.number} has a result: {value}."
    return f"The best of {len(ranked)} results is trial {best.number} with {value}; the median is {middle:.4g}."


def best_section(result: SweepResult) -> Section:
    """Return the values of the best trial, and how to use it."""
    best = result.best
    assert best is not None
    rows = [[key, parameter_text(value)] for key, value in best.values.items()]
    command = Command("Predict with it", predict_command(result.model_of(best)))
    return Section("Best trial", [NamedTable("", Table(["parameter", "value"], rows)), command])


def charts_section(result: SweepResult, importance: Mapping[str, float]) -> Section | None:
    """Return the charts of all trials with a value."""
    done = sorted(result.ranked, key=lambda trial: trial.number)
    if len(done) < 2:
        return None
    charts = [parallel_coordinates(result, done, importance), history(result, done)]
    if importance:
        note = "How much the best quarter of the trials differs from all of them in a parameter (PED-ANOVA)."
        charts.append(shares_chart("Importance of parameters", importance, label="share", note=note))
    notes: list[Paragraph] = []
    if not importance:
        notes.append(Paragraph("The importance of parameters needs at least 8 trials with different results."))
    return Section("What matters", [Charts(charts), *notes])


def parallel_coordinates(result: SweepResult, done: Sequence[Trial], importance: Mapping[str, float]) -> Chart:
    """Return a line through the values of each trial, the most important parameters only if there are many.

    Args:
        result: The trials.
        done: Those with a value, by number.
        importance: Importance of the parameters, the highest first.
    """
    keys = list(result.trials[0].values)
    shown = [key for key in keys if key in ([*importance, *(k for k in keys if k not in importance)][:MAX_AXES])]
    names = short_names(keys)
    dimensions = [dimension_of(names[key], [trial.values[key] for trial in done]) for key in shown]
    dimensions.append(Dimension(result.metric, [result.value_of(trial) for trial in done]))
    order = [done.index(trial) for trial in result.ranked]
    left_out = f" {len(keys) - len(shown)} less important parameters are left out." if len(keys) > len(shown) else ""
    note = f"A line for each trial; the best is orange, worse ones are fainter.{left_out}"
    return parallel_chart("Values and results", dimensions, order=order, note=note)


def dimension_of(name: str, values: Sequence[object]) -> Dimension:
    """Return the axis of a parameter: names, a few numbers, or a scale, logarithmic if it spans more than WIDE."""
    numbers = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) < len(values):
        return Dimension(name, [parameter_text(value) for value in values], is_category=True)
    if len(set(numbers)) <= min(MAX_NAMED, len(numbers) - 1):
        order = [
            parameter_text(value) for value in sorted({value for value in values if isinstance(value, int | float)})
        ]
        return Dimension(name, [parameter_text(value) for value in values], is_category=True, order=order)
    wide = min(numbers) > 0 and max(numbers) / min(numbers) > WIDE
    return Dimension(name, numbers, scale="log" if wide else "linear")


def history(result: SweepResult, done: Sequence[Trial]) -> Chart:
    """Return the result of each trial and the best one so far."""
    numbers, values = [trial.number for trial in done], [result.value_of(trial) for trial in done]
    pick = min if result.direction == "minimize" else max
    best = [pick(values[: index + 1]) for index in range(len(values))]
    curves = [Curve("best so far", numbers, best), Curve("trial", numbers, values, line=False)]
    return curve_chart("Progress", curves, x_label="trial", y_label=result.metric)


def trials_section(result: SweepResult) -> Section:
    """Return a table of all trials, the best first."""
    ranked = result.ranked
    trials = [*ranked, *(trial for trial in result.trials if trial not in ranked)]
    keys = list(result.trials[0].values)
    titles = ["trial", result.metric, *keys, "seconds"]
    rows = [
        [
            f"{trial.number}" if trial.repeats is None else f"{trial.number} (as {trial.repeats})",
            result_text(result, trial),
            *(parameter_text(trial.values[key]) for key in keys),
            f"{trial.result.seconds:,.0f}" if trial.result is not None else "",
        ]
        for trial in trials[:MAX_ROWS]
    ]
    note = f"{len(trials) - MAX_ROWS:,} more are in sweep.json." if len(trials) > MAX_ROWS else ""
    return Section("Trials", [NamedTable("The best first", Table(titles, rows), note=note)])


def result_text(result: SweepResult, trial: Trial) -> str:
    """Return the value of a trial, or how it ended."""
    ended = trial.result
    if ended is None:
        return "waiting"
    if ended.state == "pruned":
        return f"stopped at {ended.curve[-1].share:.0%}" if ended.curve else "stopped early"
    return f"{result.value_of(trial):.4g}" if ended.state == "done" else "failed"


def curves_section(result: SweepResult) -> Section | None:
    """Return the learning curves of the best trials, and of those that were stopped early."""
    best = [trial for trial in result.ranked if trial.repeats is None and len(curve_of(trial).xs) > 1][:MAX_CURVES]
    stopped = [
        trial
        for trial in result.trials
        if trial.result is not None and trial.result.state == "pruned" and trial.repeats is None
    ]
    charts = [learning_curves("The best trials", best, result.metric)] if best else []
    if stopped and best:
        note = f"{len(stopped)} were stopped; the first of them beside the best trial."
        shown = [best[0], *stopped[: MAX_CURVES - 1]]
        charts.append(learning_curves("Stopped early", shown, result.metric, note=note))
    return Section("Learning curves", [Charts(charts)]) if charts else None


def learning_curves(title: str, trials: Sequence[Trial], metric: str, *, note: str = "") -> Chart:
    """Return the curves of trials.

    Args:
        title: Title of the chart.
        trials: The trials, at most MAX_CURVES.
        metric: The metric.
        note: A sentence below the chart.
    """
    curves = [curve_of(trial) for trial in trials]
    return curve_chart(title, curves, x_label="% of the steps", y_label=metric, note=note)


def curve_of(trial: Trial) -> Curve:
    """Return the metric of a trial at its evaluations."""
    curve = trial.result.curve if trial.result is not None else ()
    return Curve(f"trial {trial.number}", [100 * one.share for one in curve], [one.value for one in curve], dots=True)


def failures_section(result: SweepResult) -> Section | None:
    """Return the errors of failed trials."""
    failed = [trial for trial in result.trials if trial.result is not None and trial.result.state == "failed"]
    rows = [[str(trial.number), (trial.result.error or "") if trial.result else ""] for trial in failed[:MAX_ROWS]]
    if not rows:
        return None
    return Section("Failed trials", [NamedTable("", Table(["trial", "error"], rows), numbers=False)])
