"""Streaming: answers piece by piece while they are generated."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from partita.generation.generator import answer_of, engine_of_requests, run_of_requests
from partita.generation.requests import GenerationSettings
from partita.generation.static_batches import requests_in_batches
from partita.lm.base import GenerationRequest
from partita.lm.continuation import decode_continuation

if TYPE_CHECKING:
    from partita.lm.base import GenerativeModel

INCOMPLETE = "\ufffd"
"""What a tokenizer decodes incomplete characters to."""


def stream_requests(
    lm: "GenerativeModel", requests: Sequence[GenerationRequest], settings: GenerationSettings
) -> Iterator[tuple[int, str]]:
    """Yield pairs of a request's index and the next piece of its answer; the pieces of a request add up to its answer.

    Without continuous batching, an answer is a single piece. Raises what `generate_requests` raises.

    Args:
        lm: The model.
        requests: The prompts.
        settings: How they are generated.
    """
    if engine_of_requests(lm, requests, settings.options) == "static":
        whole = requests_in_batches(lm, requests, settings)
        yield from ((place, answer.text) for place, answer in enumerate(whole) if answer.text)
        return
    run = run_of_requests(lm, requests, settings)
    streamed: dict[int, str] = {}
    for results in run.steps():
        texts = {
            row: final_part(decode_continuation(lm.tokenizer, ids), settings.options.stop)
            for row, ids in run.unfinished()
        }
        texts |= {result.row: answer_of(result.generated, result.error).text for result in results}
        for row, text in texts.items():
            before = streamed.get(row, "")
            if len(text) > len(before) and text.startswith(before):
                streamed[row] = text
                yield row, text[len(before) :]


def final_part(text: str, stop: Sequence[str]) -> str:
    """Return the final part of an unfinished answer: no incomplete character, no possible stop text."""
    complete = text.rstrip(INCOMPLETE)
    held = max((overlap(complete, end) for end in stop), default=0)
    return complete[: len(complete) - held]


def overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` are a prefix of `stop`."""
    return next((size for size in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:size])), 0)
