"""`Model.predict`: answers for every row of a dataset."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.backends.context import ModelRuntime
from partita.backends.endpoint.verbs import served_capacity
from partita.backends.ray.verbs import fleet_capacity
from partita.data.splits import check_columns
from partita.generation.oom_backoff import Capacity
from partita.generation.predict import predict_rows
from partita.generation.prompts import PromptSource
from partita.generation.tables import check_output
from partita.pipeline.batch_sizes import BatchSizes
from partita.pipeline.build import EndpointPipeline, RayPipeline
from partita.pipeline.fingerprint import answer_fingerprint, journal_path
from partita_schema.errors import DataError
from partita_schema.rows import row_schema
from partita_trainers.batch_size.probe import BatchSize
from partita_trainers.process_group import synchronized_errors

if TYPE_CHECKING:
    from partita.generation.predictions import Predictions


def predict(
    runtime: ModelRuntime,
    dataset: Any,
    output: str | Path | None = None,
    *,
    batch_size: int | None = None,
    retry_errors: bool = False,
    fresh: bool = False,
    safe_csv: bool = False,
) -> "Predictions":
    """Predict every row and write a journal and the output; see `Model.predict`."""
    target = Path(output) if output is not None else None
    if safe_csv and target is None:
        raise DataError("safe_csv is for a .csv output, and none is written; leave it out, or name an output")
    if target is not None:
        runtime.process_group.run_on_rank_zero(
            lambda: check_output(target, safe_csv=safe_csv), "the file of predictions"
        )
    pipeline = runtime.answering()
    with synchronized_errors(runtime.process_group, "opening the data"):
        rows = runtime.open_dataset(dataset)
        check_columns(rows, runtime.config, supervised=False)
    fingerprint = answer_fingerprint(pipeline, rows, config=runtime.config, result=runtime.result)
    used: list[BatchSize] = []

    def capacity(prompts: PromptSource) -> Capacity:
        if isinstance(pipeline, EndpointPipeline):
            return served_capacity(pipeline, batch_size)
        shared = len(prompts.prefix)
        if isinstance(pipeline, RayPipeline):
            return fleet_capacity(pipeline, prompts.lengths, shared_tokens=shared, rows=batch_size)
        used.append(runtime.sizing.generation(prompts.lengths, shared_tokens=shared, rows=batch_size))
        return runtime.sizing.capacity("generation", used[-1])

    try:
        return predict_rows(
            lm=pipeline.lm,
            rows=rows,
            encoder=pipeline.encoder,
            schema=row_schema(runtime.config, supervised=False),
            decoder=pipeline.decoder,
            config=runtime.config,
            generation=pipeline.generation,
            max_new_tokens=pipeline.max_new_tokens,
            capacity=capacity,
            seed=runtime.sampling_seed,
            journal_path=journal_path(runtime.kept, output=target, fingerprint=fingerprint),
            output=target,
            safe_csv=safe_csv,
            fingerprint=fingerprint,
            bad=rows.bad,
            retry_errors=retry_errors,
            fresh=fresh,
            progress=runtime.progress,
            process_group=runtime.process_group,
        )
    finally:
        if used:
            runtime.note_memory(BatchSizes(generation=used[-1]))
