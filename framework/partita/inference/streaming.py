"""Answers piece by piece, while they are made."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from partita.inference.engine import answer_of, choose_engine, run_of_requests
from partita.inference.oom_backoff import Capacity
from partita.inference.static_batches import requests_in_batches
from partita.lm.base import GenerationOptions, GenerationRequest
from partita.lm.continuation import decode_continuation

if TYPE_CHECKING:
    from partita.lm.base import GenerativeModel

INCOMPLETE = "\ufffd"
"""What a tokenizer writes for bytes that are no character yet."""


def stream_requests(
    lm: "GenerativeModel",
    requests: Sequence[GenerationRequest],
    *,
    options: GenerationOptions,
    capacity: Capacity,
    seed: int,
) -> Iterator[tuple[int, str]]:
    """Places of requests with the next piece of their answer; the pieces of one, put together, are its answer.

    Where rows are not answered in slots, an answer is a single piece. Raises what `generate_requests` raises.
    """
    lengths = np.array([len(request.input_ids) for request in requests], dtype=np.int32)
    most = max((request.max_new_tokens for request in requests), default=0)
    if not requests or choose_engine(lm, lengths, options=options, max_new_tokens=most) == "static":
        whole = requests_in_batches(lm, requests, options=options, capacity=capacity, seed=seed)
        yield from ((place, answer.text) for place, answer in enumerate(whole) if answer.text)
        return
    run = run_of_requests(lm, requests, options=options, capacity=capacity, seed=seed)
    told: dict[int, str] = {}
    for results in run.steps():
        texts = {
            row: told_so_far(decode_continuation(lm.tokenizer, ids), options.stop) for row, ids in run.unfinished()
        }
        texts |= {result.row: answer_of(result.generated, result.error).text for result in results}
        for row, text in texts.items():
            before = told.get(row, "")
            if len(text) > len(before) and text.startswith(before):
                told[row] = text
                yield row, text[len(before) :]


def told_so_far(text: str, stop: Sequence[str]) -> str:
    """The part of an unfinished answer that will not change: no half character, nothing that may begin a stop text."""
    kept = text.rstrip(INCOMPLETE)
    held = max((overlap(kept, end) for end in stop), default=0)
    return kept[: len(kept) - held]


def overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` with which `stop` begins."""
    return next((size for size in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:size])), 0)
