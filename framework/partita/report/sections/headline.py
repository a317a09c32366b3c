"""The first sentence of a report: whether the model is better than its base model."""

from partita.report.measures import MetricEstimate, SplitMeasures, main_measure
from partita.report.number_text import as_number
from partita.report.run_record import RunRecord
from partita.report.sections.dialogues import sentence_of
from partita.report.statistics import has_interval
from partita.runs.listing import main_metrics, model_of
from partita_schema.common.text import counted

UNFINISHED = {
    "running": "The run is not finished.",
    "interrupted": "The run was interrupted.",
    "dead": "The run is not finished, and its process has ended.",
}
"""What is known of a run without results, by its status."""


def headline(run: RunRecord, measures: SplitMeasures | None) -> str:
    """Return the first sentence: the comparison with the base model, or what is known without it.

    Args:
        run: The run.
        measures: The metrics of its main split; None if nothing was evaluated row by row.
    """
    failed = f"The run failed: {run.problem.rstrip('.')}." if run.problem else ""
    if measures is not None and (main := main_measure(measures.measures, main_metrics(run.config))) is not None:
        return f"{failed} {comparison(main, measures)}".strip()
    if failed:
        return failed
    if run.simulations:
        return sentence_of(run.outcomes, run.simulations)
    if run.status in UNFINISHED:
        return f"{UNFINISHED[run.status]} Nothing has been evaluated row by row yet."
    apart = "" if run.is_new_model else ", so there is no comparison with the base model"
    return f"Nothing was evaluated row by row{apart}."


def comparison(measure: MetricEstimate, measures: SplitMeasures) -> str:
    """Return how a metric differs between the model and its base model.

    Args:
        measure: The metric.
        measures: The metrics of the split.
    """
    name = measure.metric
    is_of_output = measure.metric.rpartition(".")[0] != ""
    count = measures.expected_rows if is_of_output else measures.rows
    rows = f"{counted(count, 'row')} of the {measures.split} split"
    value = f"{name} is {as_number(name, measure.result.value)}"
    if measure.reference is None:
        interval = ""
        if measure.has_interval:
            low, high = (as_number(name, end) for end in (measure.result.low, measure.result.high))
            interval = f" (95 % interval {low} to {high})"
        known = (
            "; the base model was not evaluated on these rows"
            if measures.may_have_base and not measures.has_base
            else ""
        )
        return f"The {value}{interval} on {rows}{known}."
    base, difference = as_number(name, measure.reference.value), measure.difference
    if difference is None:
        return f"The {value} on {rows}, that of the base model {base}."
    half = f" \u00b1 {as_number(name, (difference.high - difference.low) / 2)}" if has_interval(difference) else ""
    apart = f"by {as_number(name, abs(difference.value))}{half}"
    if measure.verdict == "no measurable difference":
        return (
            f"No measurable difference from the base model: {value}, that of the base model {base}, apart {apart} "
            f"on {rows}."
        )
    verdict = str(measure.verdict)
    return f"{verdict.capitalize()} than the base model: {value} against {base}, {verdict} {apart} on {rows}."


def facts_of(run: RunRecord) -> str:
    """Return the model, the trainer, the number of steps and the status of a run in one line."""
    manifest, config = run.manifest, run.config
    parts = [model_of(config)] if config.get("base_model") else []
    trainer = (config.get("trainer") or {}).get("type")
    if trainer == "none":
        parts.append("without training")
    elif trainer:
        adapter = (config.get("adapter") or {}).get("type")
        parts.append(f"{trainer} with {adapter}" if adapter else trainer)
    if manifest.get("steps"):
        parts.append(counted(int(manifest["steps"]), "step"))
    if manifest.get("stopped_early"):
        parts.append("stopped early")
    parts += [f"best at step {manifest['best_step']:,}"] if manifest.get("best_step") is not None else []
    parts += [str(manifest["device"])] if manifest.get("device") else []
    parts += [f"status {run.status}"] if run.status not in ("done", "outputs") else []
    parts += [str(manifest["created"])[:16].replace("T", " ") + " UTC"] if manifest.get("created") else []
    return " \u00b7 ".join(parts)
