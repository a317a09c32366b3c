"""The verbs with a model on a server: `backend: {type: endpoint}`."""

from collections.abc import Sequence

from partita.generation.oom_backoff import BatchLimit, Capacity
from partita.pipeline.build import EndpointPipeline
from partita_schema.backend import EndpointBackend
from partita_schema.config import Config
from partita_schema.errors import PartitaError

TRAIN = "train: the model is the server's; use evaluate or predict, or remove backend"
TUNE = (
    "tune: the server chooses how many rows go through its model at once; backend.concurrency says how many it is "
    "asked at the same time"
)
PREVIEW = (
    "preview: tokens are the server's; with a model or its folder as base_model and without backend they are shown"
)
SAVE = "save: the model is the server's"
SIMULATE = "simulate: episodes need a model in this process; remove backend"


def is_served(config: Config) -> bool:
    """Return whether the model is on a server."""
    return isinstance(config.backend, EndpointBackend)


def refuse_served(config: Config, *, what: str) -> None:
    """Raise PartitaError if the model is on a server; `what` has the form `VERB: REASON`."""
    if is_served(config):
        verb, _, reason = what.partition(": ")
        raise PartitaError(f"there is nothing to {verb} with backend: {{type: endpoint}}: {reason}")


def served_capacity(pipeline: EndpointPipeline, rows: int | None) -> Capacity:
    """Return the number of concurrent requests: `rows` if set, else backend.concurrency."""
    at_a_time = rows or pipeline.lm.backend.concurrency
    return Capacity(at_a_time, BatchLimit(at_a_time))


def written_texts(
    pipeline: EndpointPipeline,
    prompts: str | Sequence[str],
    *,
    max_new_tokens: int | None,
    batch_size: int | None,
    seed: int,
    stream: bool,
) -> list[str]:
    """Generate text after each prompt; a chat server replies to it.

    Args:
        pipeline: The pipeline with the server.
        prompts: One prompt, or several.
        max_new_tokens: Limit of generated tokens per prompt.
        batch_size: Concurrent requests. Default: backend.concurrency.
        seed: Seed for sampling.
        stream: Not supported by servers.

    Raises:
        PartitaError: `stream` is set.
        DataError: A prompt is empty.
        ModelError: The server returned no answer.
    """
    if stream:
        raise PartitaError("a server's answers come whole; leave stream out, or remove backend: {type: endpoint}")
    completions = pipeline.lm.write(
        [prompts] if isinstance(prompts, str) else list(prompts),
        pipeline.generation,
        max_new_tokens=max_new_tokens or pipeline.max_new_tokens,
        concurrency=served_capacity(pipeline, batch_size).rows,
        seed=seed,
    )
    return [generated.text for generated in completions]
