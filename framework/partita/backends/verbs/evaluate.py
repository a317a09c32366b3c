"""`Model.evaluate`: metrics on labeled rows."""

import logging
from typing import Any

from partita.backends.context import ModelRuntime
from partita.backends.endpoint.verbs import served_capacity
from partita.backends.ray.verbs import evaluate_on_ray
from partita.data.ledger import Ledger
from partita.pipeline.batch_sizes import BatchSizes
from partita.pipeline.build import EndpointPipeline, Pipeline, RayPipeline
from partita.pipeline.evaluate import EvalDataset, build_eval_dataset, mean_loss, score, tokens_made_once
from partita.pipeline.tune import asked_prompts, most_learned
from partita_trainers.process_group import synchronized_errors

logger = logging.getLogger(__name__)


def evaluate(
    runtime: ModelRuntime, dataset: Any = None, *, batch_size: int | None = None
) -> dict[str, dict[str, float]]:
    """Compute metrics on labeled rows; see `Model.evaluate`."""
    pipeline = runtime.answering()
    ledger = Ledger(None, max_bad_rows=1.0)
    with tokens_made_once(runtime.process_group, pipeline, folder=runtime.kept) as parts:
        with synchronized_errors(runtime.process_group, "reading the rows"):
            rows = runtime.evaluation_rows() if dataset is None else runtime.open_dataset(dataset)
            examination = build_eval_dataset(parts, rows, split="test", ledger=ledger)
        ledger.warn_of_unknown_tokens()
        counts = ledger.split("test")
        if counts.left_out:
            logger.warning(
                "%s of %s rows cannot be scored and are left out of the metrics:\n%s",
                f"{counts.left_out:,}",
                f"{counts.rows:,}",
                ledger.main_reasons(),
            )
        metrics = evaluate_dataset(runtime, pipeline, examination, batch_size=batch_size)
    skipped = {"skipped": float(counts.left_out)} if counts.left_out else {}
    outputs = {output.name for output in runtime.config.output_features}
    return {name: values | skipped if name in outputs else values for name, values in metrics.items()}


def evaluate_dataset(
    runtime: ModelRuntime,
    pipeline: Pipeline | EndpointPipeline | RayPipeline,
    examination: EvalDataset,
    *,
    batch_size: int | None,
) -> dict[str, dict[str, float]]:
    """Compute metrics on a prepared dataset with the backend of the pipeline.

    Args:
        runtime: State of the model.
        pipeline: The parts of the run.
        examination: The dataset.
        batch_size: Batch size set by the caller, or None.
    """
    if isinstance(pipeline, EndpointPipeline):
        requests = served_capacity(pipeline, batch_size).rows
        scores = score(pipeline, examination.rows, batch_size=requests, progress=runtime.progress)
        return {name: dict(values) for name, values in scores.outputs.items()}
    if isinstance(pipeline, RayPipeline):
        return evaluate_on_ray(pipeline, examination, rows=batch_size, progress=runtime.progress)
    sizing = runtime.sizing
    encoded = examination.encoded
    evaluation = sizing.evaluation(encoded.lengths, most_learned([encoded]), rows=batch_size)
    with sizing.work("evaluation", evaluation) as capacity:
        loss = mean_loss(
            pipeline, encoded, batch_size=capacity.rows, limit=capacity.limit, process_group=runtime.process_group
        )
    lengths, shared = asked_prompts(pipeline, [examination.rows], process_group=runtime.process_group)
    generation = sizing.generation(lengths, shared_tokens=shared, rows=batch_size)
    with sizing.work("generation", generation) as capacity:
        scores = score(
            pipeline,
            examination.rows,
            batch_size=capacity.rows,
            limit=capacity.limit,
            progress=runtime.progress,
            process_group=runtime.process_group,
        )
    runtime.note_memory(BatchSizes(generation=generation, evaluation=evaluation))
    return {**{name: dict(values) for name, values in scores.outputs.items()}, "model": loss}
