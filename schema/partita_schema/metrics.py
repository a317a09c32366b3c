"""Names of metrics that a file mentions: which one is meant, and what is wrong with it."""

from collections.abc import Sequence

from partita_schema.common.text import nearest
from partita_schema.sections.config_sections import ConfigSections
from partita_schema.sections.objectives import DOCUMENT_METRICS, OBJECTIVE_METRICS
from partita_schema.sections.outputs import METRICS_BY_NAME, checkpoint_metrics
from partita_schema.sections.outputs.base import OutputBase


def full_name(metric: str, outputs: Sequence[OutputBase]) -> str:
    """Return the full name of a metric; a bare name belongs to the first output.

    A bare name is a metric of the first output even if all outputs together have a metric of that name.
    """
    return (
        metric
        if metric in ("loss", *OBJECTIVE_METRICS, *DOCUMENT_METRICS) or "." in metric
        else f"{outputs[0].name}.{metric}"
    )


def metrics_without_output(config: ConfigSections) -> tuple[str, ...]:
    """Return the metrics that belong to no output: the loss, those of the objective, and those of documents."""
    of_objective = getattr(config.trainer, "METRICS", ())
    of_documents = DOCUMENT_METRICS if config.plain_text and not config.compares_answers else ()
    return "loss", *of_objective, *of_documents


def metric_problem(wanted: str, config: ConfigSections) -> str | None:
    """Return what is wrong with the name of a metric, or None."""
    outputs, without_output = config.output_features, metrics_without_output(config)
    if wanted in without_output:
        return None
    instead = ", ".join(without_output)
    if config.plain_text:
        return f"without input_features no answers are scored; write one of {instead}"
    if wanted in DOCUMENT_METRICS:
        where = "a metric of documents, in files without input_features"
        return f"{wanted} is {where}; write {instead}, or a metric of the output"
    if wanted in OBJECTIVE_METRICS:
        kind = f"trainer: {{type: {config.trainer.type}}}"
        return f"no metric is named {wanted} with {kind}; write {instead}, or a metric of the output"
    names = [output.name for output in outputs]
    if "." in wanted and not any(wanted.startswith(f"{name}.") for name in names):
        return f"{wanted!r} names no output; write loss, or a metric after one of {', '.join(f'{n}.' for n in names)}"
    first, full = f"{names[0]}.", full_name(wanted, outputs)
    of_outputs = [f"{output.name}.{metric}" for output in outputs for metric in checkpoint_metrics(output)]
    known = [*without_output, *of_outputs]
    without_scores = [output for output in outputs if not output.has_scores]
    if any(full == f"{output.name}.{metric}" for output in without_scores for metric in output.SCORE_METRICS):
        instead = "write head: linear or decoder: {scoring: true} in the output"
        return f"{wanted} needs a score for every label; {instead}"
    if full in known or any(part in full for part in METRICS_BY_NAME):
        return None
    short = [name.removeprefix(first) for name in known]
    near = nearest(wanted, [*short, *known]) or [name for name in known if name.endswith(f".{wanted}")]
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
    return f"no metric is named {wanted}; {hint}"
