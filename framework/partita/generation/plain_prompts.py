"""Requests for plain prompts: no prompt template, no chat template."""

from collections.abc import Sequence

from partita.lm.base import GenerationRequest, GenerativeModel
from partita_schema.errors import DataError


def plain_requests(
    lm: GenerativeModel, prompts: str | Sequence[str], *, max_new_tokens: int
) -> list[GenerationRequest]:
    """Return a request per prompt; `max_new_tokens` is reduced to what the context leaves.

    Raises DataError if a prompt is empty or fills the context.
    """
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    context = lm.context_length
    requests: list[GenerationRequest] = []
    for ids in (lm.tokenizer(text)["input_ids"] for text in texts):
        if not ids:
            raise DataError("a prompt is empty; write at least a character")
        if context is not None and len(ids) >= context:
            raise DataError(f"a prompt has {len(ids):,} tokens and the model's context is {context:,}; shorten it")
        room = max_new_tokens if context is None else min(max_new_tokens, context - len(ids))
        requests.append(GenerationRequest(ids, room, key=len(requests).to_bytes(8, "little")))
    return requests
