"""Choice of the generation engine, and generation with it.

Continuous batching is used where the model and the options support it, else static batching; the log says which and
why. A model on a server is asked through its API, and a pool of workers runs the same engines.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from partita.backends.endpoint.server import EndpointClient
from partita.backends.ray.worker_pool import WorkerPool
from partita.generation.oom_backoff import BatchLimit, Capacity
from partita.generation.prompts import Lengths, PromptSource, common_beginning
from partita.generation.results import BatchResult
from partita.generation.scheduler import RowRequests, Scheduler
from partita.generation.static_batches import generate_in_batches, requests_in_batches, way_for
from partita.lm.base import Generated, GenerationOptions, GenerationRequest
from partita_schema.errors import ModelError
from partita_trainers.interrupt import never
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup

if TYPE_CHECKING:
    from partita.lm.base import GenerativeModel

logger = logging.getLogger(__name__)

Engine = Literal["slots", "static", "server"]


def room_for(
    lm: "GenerativeModel | EndpointClient | WorkerPool", lengths: Lengths, *, max_new_tokens: int
) -> tuple[Lengths, npt.NDArray[np.integer]]:
    """Return the tokens of each prompt, 0 for those that fill the context, and each row's limit of generated tokens."""
    room = lm.context_length
    if room is None:
        return lengths, np.full(len(lengths), max_new_tokens)
    usable = np.where(lengths >= room, 0, lengths)
    return usable, np.minimum(max_new_tokens, room - usable)


def choose_engine(
    lm: "GenerativeModel | EndpointClient | WorkerPool",
    lengths: Lengths,
    *,
    options: GenerationOptions,
    max_new_tokens: int,
) -> Engine:
    """Return the engine for prompts of these lengths; log why it is not continuous batching.

    Args:
        lm: The model.
        lengths: Prompt lengths in tokens, [rows].
        options: Generation options.
        max_new_tokens: Limit of generated tokens per row.
    """
    if isinstance(lm, EndpointClient):
        return "server"
    usable, new_tokens = room_for(lm, lengths, max_new_tokens=max_new_tokens)
    reason = lm.why_no_slots(options, tokens=int((usable + new_tokens)[usable > 0].max(initial=0)))
    if reason is None:
        return "slots"
    refuse_without_slots(options, reason)
    way = way_for(lm, usable, new_tokens, options=options)
    logger.info("answers are generated %s", way.describe(reason))
    return "static"


def refuse_without_slots(options: GenerationOptions, reason: str) -> None:
    """Raise ModelError if the options constrain answers in a way that needs continuous batching."""
    key = "decoder.scoring" if options.labels else "decoder.constrain" if options.grammar is not None else None
    if key is not None:
        raise ModelError(f"{key} needs answers that are made in slots, and here they are not: {reason}; remove {key}")


def generate_rows(
    lm: "GenerativeModel | EndpointClient | WorkerPool",
    prompts: PromptSource,
    *,
    engine: Engine,
    options: GenerationOptions,
    max_new_tokens: int,
    batch_size: int,
    seed: int,
    done: npt.NDArray[np.bool_],
    limit: BatchLimit | None = None,
    room_tokens: int | None = None,
    stopping: Callable[[], bool] = never,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Iterator[BatchResult]:
    """Generate answers for all rows with a prompt that are not `done`, and yield them as they are finished.

    An interrupt is raised at once; everything yielded is complete.

    Args:
        lm: The model.
        prompts: The prompts; rows that cannot be answered are skipped.
        engine: The engine of `choose_engine`.
        options: Generation options.
        max_new_tokens: Limit of generated tokens per row; less where the context leaves less.
        batch_size: Most rows generated at a time.
        seed: Seed for sampling.
        done: Rows that are answered already, [rows].
        limit: Upper bound on the batch size; lowered when memory runs out.
        room_tokens: Total tokens of rows that fit, if memory determined the size; allows more short rows.
        stopping: Once it returns True, only the started rows are finished. Not used with a server.
        process_group: The ranks that share the rows.

    Raises:
        ModelError: The device failed.
    """
    lengths, new_tokens = room_for(lm, prompts.lengths, max_new_tokens=max_new_tokens)
    limit = BatchLimit(batch_size) if limit is None else limit
    key = prompts.sampling_key if options.samples else unused_key
    if engine == "static" and not isinstance(lm, EndpointClient | WorkerPool):
        yield from generate_in_batches(
            lm,
            prompts,
            options=options,
            lengths=lengths,
            new_tokens=new_tokens,
            key=key,
            batch_size=batch_size,
            seed=seed,
            done=done,
            limit=limit,
            stopping=stopping,
            process_group=process_group,
        )
        return
    work = RowRequests(
        lengths,
        new_tokens,
        fetch=prompts.prompts,
        key=key,
        prefix=prompts.prefix,
        digests=None if options.samples else prompts.digests,
    )
    if isinstance(lm, EndpointClient):
        yield from lm.answers(work, options, concurrency=batch_size, seed=seed, left=~done)
        return
    if isinstance(lm, WorkerPool):
        yield from lm.completions(
            work,
            options,
            engine=engine,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            room_tokens=room_tokens,
            seed=seed,
            left=~done,
            stopping=stopping,
        )
        return
    run = Scheduler(
        lm,
        work,
        options,
        slots=batch_size,
        seed=seed,
        left=~done,
        limit=limit,
        room_tokens=room_tokens,
        stopping=stopping,
        process_group=process_group,
    )
    yield from run.completions()


def unused_key(row: int) -> bytes:
    """Return an empty sampling key, for greedy decoding."""
    return b""


def generate_requests(
    lm: "GenerativeModel",
    requests: Sequence[GenerationRequest],
    *,
    options: GenerationOptions,
    capacity: Capacity,
    seed: int,
) -> list[Generated]:
    """Generate answers to all requests, and return them in input order.

    Args:
        lm: The model.
        requests: The prompts.
        options: Generation options.
        capacity: The batch size and its limit.
        seed: Seed for sampling.

    Raises:
        OutOfMemory: A single request does not fit.
    """
    lengths = np.array([len(request.input_ids) for request in requests], dtype=np.int32)
    most = max((request.max_new_tokens for request in requests), default=0)
    if not requests or choose_engine(lm, lengths, options=options, max_new_tokens=most) == "static":
        return requests_in_batches(lm, requests, options=options, capacity=capacity, seed=seed)
    run = run_of_requests(lm, requests, options=options, capacity=capacity, seed=seed)
    results = {result.row: result for batch in run.completions() for result in batch.results}
    return [answer_of(results[row].generated, results[row].error) for row in range(len(requests))]


def run_of_requests(
    lm: "GenerativeModel",
    requests: Sequence[GenerationRequest],
    *,
    options: GenerationOptions,
    capacity: Capacity,
    seed: int,
) -> Scheduler:
    """Return the scheduler of requests; it raises errors of single requests.

    Args:
        lm: The model.
        requests: The prompts.
        options: Generation options.
        capacity: The number of slots and its limit.
        seed: Seed for sampling.
    """
    prompts = [list(request.input_ids) for request in requests]
    work = RowRequests(
        lengths=np.array([len(prompt) for prompt in prompts], dtype=np.int32),
        new_tokens=np.array([request.max_new_tokens for request in requests]),
        fetch=lambda rows: [prompts[row] for row in rows],
        key=lambda row: requests[row].key,
        prefix=common_beginning(prompts),
    )
    left = np.ones(len(prompts), dtype=np.bool_)
    return Scheduler(
        lm,
        work,
        options,
        slots=capacity.rows,
        seed=seed,
        left=left,
        limit=capacity.limit,
        room_tokens=capacity.room_tokens,
        tolerant=False,
    )


def answer_of(generated: Generated | None, error: str | None) -> Generated:
    """Return the answer. Raise ModelError if there is none."""
    if generated is None:
        raise ModelError(error or "no answer")
    return generated
