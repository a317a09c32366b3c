"""`Model.generate`: text after plain prompts."""

from collections.abc import Iterator, Sequence

import numpy as np

from partita.backends import bag_verbs
from partita.backends.bag_verbs import refuse_bag
from partita.backends.context import ModelRuntime
from partita.backends.endpoint.verbs import written_texts
from partita.backends.ray.verbs import refuse_on_ray
from partita.generation.engine import generate_requests
from partita.generation.streaming import stream_requests
from partita.lm.base import GenerationRequest
from partita.pipeline.batch_sizes import BatchSizes
from partita.pipeline.build import EndpointPipeline, Pipeline, RayPipeline
from partita.pipeline.plain_prompts import plain_requests
from partita_trainers.batch_size.probe import BatchSize


def generate(
    runtime: ModelRuntime,
    prompts: str | Sequence[str],
    *,
    max_new_tokens: int | None = None,
    batch_size: int | None = None,
    stream: bool = False,
) -> list[str] | Iterator[str] | Iterator[tuple[int, str]]:
    """Generate text after each prompt; see `Model.generate`."""
    refuse_bag(runtime.config, what=bag_verbs.GENERATE)
    refuse_on_ray(runtime.config, verb="generate")
    pipeline = runtime.answering()
    assert not isinstance(pipeline, RayPipeline), "refused before"
    if isinstance(pipeline, EndpointPipeline):
        return written_texts(
            pipeline,
            prompts,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            seed=runtime.sampling_seed,
            stream=stream,
        )
    requests = plain_requests(pipeline, prompts, max_new_tokens=max_new_tokens)
    lengths = np.array([len(request.input_ids) for request in requests])
    limit = max_new_tokens or pipeline.max_new_tokens
    size = runtime.sizing.generation(lengths, rows=batch_size, max_new_tokens=limit)
    if stream:
        pieces = streamed(runtime, pipeline, requests, size)
        return (piece for _, piece in pieces) if isinstance(prompts, str) else pieces
    with runtime.sizing.work("generation", size) as capacity:
        completions = generate_requests(
            pipeline.lm, requests, options=pipeline.generation.free, capacity=capacity, seed=runtime.sampling_seed
        )
    runtime.note_memory(BatchSizes(generation=size))
    return [generated.text for generated in completions]


def streamed(
    runtime: ModelRuntime, pipeline: Pipeline, requests: Sequence[GenerationRequest], size: BatchSize
) -> Iterator[tuple[int, str]]:
    """Yield pairs of a request's index and the next piece of its answer.

    Args:
        runtime: State of the model.
        pipeline: The parts of the run.
        requests: The prompts.
        size: The batch size.
    """
    with runtime.sizing.work("generation", size) as capacity:
        yield from stream_requests(
            pipeline.lm, requests, options=pipeline.generation.free, capacity=capacity, seed=runtime.sampling_seed
        )
    runtime.note_memory(BatchSizes(generation=size))
