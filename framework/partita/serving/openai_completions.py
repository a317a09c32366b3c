"""Completions of the OpenAI API, whole and as a stream."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse, Response

from partita.lm.base import TokenLogprob
from partita.serving.answers import AsyncEngine, answer_of
from partita.serving.bodies import CompletionBody
from partita.serving.errors import ApiError
from partita.serving.openai_format import DONE, ResponseHead, TextOffsets, completion_logprobs, event_of, usage_of
from partita.serving.openai_requests import EngineRequests, streamed
from partita.serving.request_queue import AnswerPiece, AnswerRequest


@dataclass
class SentLogprobs:
    """Log probabilities of an answer, which a stream sends in parts."""

    asked: bool
    """Whether the client has asked for them."""
    offsets: TextOffsets
    """Finds the offsets of tokens in the text."""
    num_tokens: int = 0
    """Tokens that were sent."""

    def part(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """Return the log probabilities of the next tokens; None if they were not asked for."""
        if not self.asked:
            return None
        self.num_tokens += len(entries)
        return completion_logprobs(entries, offsets=self.offsets)


class CompletionAnswers:
    """Continues texts."""

    def __init__(self, engine: AsyncEngine, requests: EngineRequests, *, model: str) -> None:
        """Answer under the name `model`."""
        self.engine, self.requests, self.model = engine, requests, model

    async def completions(self, body: CompletionBody) -> Response:
        """Continue texts."""
        self.requests.check_writes()
        prompts = await asyncio.to_thread(self._encoded, body)
        requests = await asyncio.to_thread(self.requests.of, body, prompts, top=body.logprobs, grammar=None)
        head = ResponseHead("completion", self.model, body.stream)
        if body.stream:
            return await streamed(self._completion_stream(body, requests, head))
        generated = await self.engine.answers(requests)
        choices = [
            {
                "index": index,
                "text": answer.text,
                "logprobs": None
                if body.logprobs is None
                else completion_logprobs(answer.token_logprobs, offsets=self.offsets()),
                "finish_reason": answer.finish_reason,
            }
            for index, answer in enumerate(generated)
        ]
        usage = usage_of(sum(map(len, prompts)), sum(answer.num_tokens for answer in generated))
        return JSONResponse(head.response(choices, usage))

    def offsets(self) -> TextOffsets:
        """Return what finds the offsets of the tokens of an answer."""
        return TextOffsets(self.requests.token_texts)

    async def _completion_stream(
        self, body: CompletionBody, requests: Sequence[AnswerRequest], head: ResponseHead
    ) -> AsyncGenerator[bytes]:
        """Yield the parts of completions: pieces of text, the reason of the end, and usage."""
        tokens, sent = 0, [SentLogprobs(body.logprobs is not None, self.offsets()) for _ in requests]
        async with aclosing(self.engine.events(requests)) as events:
            async for index, event in events:
                choice: dict[str, Any] = {"index": index, "text": "", "logprobs": None, "finish_reason": None}
                if isinstance(event, AnswerPiece):
                    choice["text"] = event.text
                    choice["logprobs"] = sent[index].part(event.token_logprobs)
                else:
                    answer = answer_of(event)
                    tokens += answer.num_tokens
                    choice["finish_reason"] = answer.finish_reason
                    rest = answer.token_logprobs[sent[index].num_tokens :]
                    choice["logprobs"] = sent[index].part(rest) if rest else None
                yield event_of(head.response([choice], None))
        if body.stream_options is not None and body.stream_options.include_usage:
            yield event_of(head.response([], usage_of(sum(len(one.input_ids) for one in requests[:: body.n]), tokens)))
        yield DONE

    def _encoded(self, body: CompletionBody) -> list[list[int]]:
        """Return the tokens of the prompts of a completion."""
        tokenizer, prompts = self.engine.engine.tokenizer, []
        for prompt in body.prompts:
            ids = tokenizer(prompt, verbose=False)["input_ids"] if isinstance(prompt, str) else prompt
            if not ids:
                raise ApiError(400, "a prompt is empty; write at least a character", param="prompt")
            self.requests.check_tokens(ids)
            prompts.append(list(ids))
        if not prompts:
            raise ApiError(400, "there is no prompt", param="prompt")
        return prompts
