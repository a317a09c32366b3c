"""Requests of the OpenAI API as requests of the engine, and what chats and completions share."""

import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import cached_property
from typing import Any

from starlette.responses import Response, StreamingResponse

from partita.lm.base import GenerationOptions
from partita.lm.batch_generation.generation import answer_ends, unknown_token
from partita.serving.bodies import SamplingBody
from partita.serving.chat_prompts import NO_EFFECT, ineffective_setting, sampling_options
from partita.serving.engine import ServingEngine
from partita.serving.errors import ApiError
from partita.serving.openai_format import TokenTexts, event_of
from partita.serving.request_queue import AnswerRequest
from partita_schema.errors import RowError
from partita_schema.sections.model import EmbeddingBagModel
from partita_schema.sections.outputs.grammar_rules import mistake_in


class EngineRequests:
    """Makes requests of an engine, and refuses what it cannot do."""

    def __init__(self, core: ServingEngine) -> None:
        """Make requests of `core`."""
        self.core = core

    @cached_property
    def token_texts(self) -> TokenTexts:
        """Texts and bytes of tokens."""
        return TokenTexts(self.core.tokenizer, size=self.core.lm.vocabulary_size)

    def of(
        self,
        body: SamplingBody,
        prompts: Sequence[Sequence[int]],
        *,
        top: int | None,
        grammar: str | None,
    ) -> list[AnswerRequest]:
        """Return the requests of the engine: `body.n` for each prompt.

        Args:
            body: The request of the client.
            prompts: The tokens of each prompt.
            top: How many of the most probable tokens are reported; None to report no log probabilities.
            grammar: Grammar that constrains the answers.
        """
        core, limit = self.core, body.limit
        options = sampling_options(
            core.options,
            temperature=body.temperature,
            stop=body.stop,
            stop_token_ids=body.stop_token_ids,
            logprobs=top is not None,
            top_logprobs=top,
            grammar=grammar,
            more=body.settings,
        )
        self.check_tokens([*body.stop_token_ids, *map(int, body.logit_bias or ())])
        self._check_options(options)
        if body.temperature is None:
            check_effect(options, body.settings)
        requests = []
        for prompt in prompts:
            room = self._room(prompt, limit)
            new_tokens = limit or min(core.default_new_tokens, room)
            for choice in range(body.n):
                key = sampling_key(body.seed, choice)
                requests.append(AnswerRequest(list(prompt), new_tokens, options, key=key, streams=body.stream))
        return requests

    def _room(self, prompt: Sequence[int], limit: int | None) -> int:
        """Return how many tokens fit after a prompt. Raise ApiError if it is fewer than `limit`, or none."""
        context = self.core.context_tokens
        room = context - len(prompt)
        if room >= (limit or 1):
            return room
        found = f"the prompt has {len(prompt):,} tokens"
        if limit is None or room < 1:
            reason = f"{found}, and the context holds {context:,} with the answer; shorten it"
        else:
            reason = (
                f"{found} and max_tokens {limit:,}, and the context holds {context:,}; shorten it, or write a smaller "
                "max_tokens"
            )
        raise ApiError(400, reason, code="context_length_exceeded")

    def check_tokens(self, ids: Sequence[int]) -> None:
        """Raise ApiError if one of these is not a token of the model."""
        mistake = unknown_token(ids, size=self.core.lm.vocabulary_size)
        if mistake is not None:
            raise ApiError(400, mistake)

    def check_writes(self) -> None:
        """Raise ApiError if the model writes no text."""
        config = self.core.row_pipeline.config
        is_bag = isinstance(config.base_model, EmbeddingBagModel)
        if is_bag or config.head_output is not None or config.scores_answers:
            raise ApiError(400, "the model writes no text; send rows to /predict")

    def _check_options(self, options: GenerationOptions) -> None:
        """Raise ApiError or ModelError if a grammar cannot be used."""
        if options.grammar is None:
            return
        if self.core.why_batches is not None:
            reason = f"continuous batching, which is not available here: {self.core.why_batches}"
            raise ApiError(400, f"response_format and required tools need {reason}")
        mistake = mistake_in(options.grammar)
        if mistake is not None:
            raise ApiError(400, f"answers cannot be held to the JSON schema of this request ({mistake})")
        lm: Any = self.core.lm
        lm.grammar(options.grammar, ends=answer_ends(lm, options))


def check_effect(options: GenerationOptions, settings: Mapping[str, Any]) -> None:
    """Raise ApiError if one of these settings of a request has no effect, because decoding is greedy."""
    name = ineffective_setting(options, settings)
    if name is not None:
        raise ApiError(400, f"{NO_EFFECT.format(name)}; send a temperature above 0, or leave {name} out", param=name)


def sampling_key(seed: int | None, choice: int) -> bytes:
    """Return the key of a choice's random numbers: from the seed, or a random one."""
    if seed is None:
        return os.urandom(16)
    return seed.to_bytes(16, "little", signed=True) + choice.to_bytes(4, "little")


async def streamed(parts: AsyncGenerator[bytes]) -> Response:
    """Return a stream of events. An error before the first one is raised; a later one is the last event."""
    first = await anext(parts)

    async def content() -> AsyncGenerator[bytes]:
        async with aclosing(parts) as rest:
            yield first
            try:
                async for part in rest:
                    yield part
            except (ApiError, RowError) as error:
                yield event_of(error.content if isinstance(error, ApiError) else {"error": {"message": str(error)}})

    return StreamingResponse(
        content(), media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    )
