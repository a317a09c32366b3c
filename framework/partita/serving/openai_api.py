"""Answers to requests of the OpenAI API: chats, completions and embeddings."""

import asyncio
import base64
import os
import struct
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from starlette.responses import JSONResponse, Response, StreamingResponse

from partita.generation.text_stream import overlap
from partita.lm.base import Generated, GenerationOptions, TokenLogprob
from partita.lm.generation import answer_ends
from partita.serving.answers import AsyncEngine, checked
from partita.serving.bodies import ChatBody, CompletionBody, EmbeddingsBody, ResponseFormat, SamplingBody, ToolChoice
from partita.serving.chat_prompts import sampling_options
from partita.serving.errors import RequestError
from partita.serving.openai_format import (
    DONE,
    ResponseHead,
    TokenTexts,
    chat_choice,
    chat_logprobs,
    completion_logprobs,
    event_of,
    usage_of,
)
from partita.serving.request_queue import AnswerEnd, AnswerPiece, AnswerRequest
from partita.serving.rows import RowService
from partita.serving.tool_use import CallForm, ToolCall, call_form, call_grammar, calls_in
from partita_schema.dialogues.common_form import FormatError
from partita_schema.dialogues.tools import tools_of
from partita_schema.errors import RowError
from partita_schema.sections.features import TextInput
from partita_schema.sections.outputs.embedding import EmbeddingOutput
from partita_schema.sections.outputs.grammar_rules import json_rule
from partita_schema.sections.outputs.json import check_json_schema

Event = AnswerPiece | AnswerEnd


@dataclass(frozen=True)
class AskedTools:
    """The tools that an answer may call."""

    tools: Sequence[Mapping[str, Any]]
    """Their definitions."""
    form: CallForm
    grammar: str | None
    """Grammar of an answer that must be a call."""
    several: bool
    """Whether several calls of an answer are returned."""

    def calls_in(self, text: str) -> tuple[str, list[ToolCall]]:
        """Return the text of an answer before its first call, and its calls."""
        content, calls = calls_in(text, tools=self.tools, form=self.form)
        return content, calls if self.several else calls[:1]


@dataclass
class StreamedChoice:
    """A choice of a stream of a chat with tools: text that may be the beginning of a call is held back."""

    tools: AskedTools | None
    text: str = ""
    """Text of the answer so far."""
    sent: int = 0
    """Characters of it that were sent as content."""
    tokens: list[TokenLogprob] = field(default_factory=list)
    """Log probabilities of tokens whose text was not sent yet."""
    seen: int = 0
    """Tokens whose log probabilities were received."""

    def take_logprobs(self) -> list[TokenLogprob]:
        """Return the log probabilities that were not sent yet."""
        tokens, self.tokens = self.tokens, []
        return tokens

    def content(self, piece: str) -> str:
        """Return the content to send after a piece."""
        self.text += piece
        end = len(self.text)
        if self.tools is not None:
            starts = self.tools.form.starts
            found = [at for start in starts if (at := self.text.find(start)) >= 0]
            end = min(found, default=end - max(overlap(self.text, start) for start in starts))
        content, self.sent = self.text[self.sent : end], max(self.sent, end)
        return content


class OpenAIAnswers:
    """Answers requests of the OpenAI API with an engine."""

    def __init__(self, engine: AsyncEngine, *, model: str) -> None:
        """Answer under the name `model`."""
        self.engine, self.core, self.model = engine, engine.engine, model
        self._forms: list[CallForm] = []

    @cached_property
    def token_texts(self) -> TokenTexts:
        """Texts and bytes of tokens."""
        return TokenTexts(self.core.tokenizer, size=self.core.lm.vocabulary_size)

    # Chats

    async def chat(self, body: ChatBody) -> Response:
        """Answer the messages of a chat."""
        tools = await asyncio.to_thread(self._tools, body)
        grammar = tools.grammar if tools is not None else None
        if body.response_format is not None and body.response_format.type != "text":
            if tools is not None:
                raise RequestError(400, "response_format and tools exclude each other", param="response_format")
            grammar = grammar_of(body.response_format)
        shown = tools.tools if tools is not None else ()
        ids = await asyncio.to_thread(self.core.prompts.encode, body.messages, tools=shown)
        top = None if not body.logprobs else body.top_logprobs or 0
        limit = body.max_completion_tokens or body.max_tokens
        requests = await asyncio.to_thread(self._requests, body, [ids], limit=limit, top=top, grammar=grammar)
        head = ResponseHead("chat", self.model, body.stream)
        if body.stream:
            return await streamed(self._chat_stream(body, requests, head, tools=tools))
        choices, generated = [], await self.engine.answers(requests)
        for index, answer in enumerate(generated):
            content, calls = (answer.text, []) if tools is None else tools.calls_in(answer.text)
            logprobs = chat_logprobs(answer.token_logprobs, tokens=self.token_texts) if body.logprobs else None
            choices.append(chat_choice(index, answer, content=content, calls=calls, logprobs=logprobs))
        return JSONResponse(head.response(choices, usage_of(len(ids), sum(one.num_tokens for one in generated))))

    async def _chat_stream(
        self, body: ChatBody, requests: Sequence[AnswerRequest], head: ResponseHead, *, tools: AskedTools | None
    ) -> AsyncGenerator[bytes]:
        """Yield the parts of a chat: the role, pieces of content, calls, the reason of the end, and usage."""

        def part(index: int, delta: Mapping[str, Any], **more: Any) -> bytes:
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
            return event_of(head.response([choice], None))

        shown = [StreamedChoice(tools) for _ in requests]
        started, tokens = set[int](), 0
        async with aclosing(self.engine.events(requests)) as events:
            async for index, event in events:
                if index not in started:
                    started.add(index)
                    yield part(index, {"role": "assistant", "content": ""})
                if isinstance(event, AnswerPiece):
                    content = shown[index].content(event.text)
                    shown[index].tokens += event.token_logprobs
                    shown[index].seen += len(event.token_logprobs)
                    if content:
                        yield part(index, {"content": content}, logprobs=self._chat_logprobs(body, shown[index]))
                    continue
                answer = checked(event)
                tokens += answer.num_tokens
                shown[index].tokens += answer.token_logprobs[shown[index].seen :]
                deltas = self._last_deltas(shown[index], answer, tools=tools)
                for delta in deltas:
                    yield part(index, delta)
                reason = "tool_calls" if any("tool_calls" in delta for delta in deltas) else answer.finish_reason
                rest = self._chat_logprobs(body, shown[index]) if shown[index].tokens else None
                yield part(index, {}, finish_reason=reason, logprobs=rest)
        if body.stream_options is not None and body.stream_options.include_usage:
            yield event_of(head.response([], usage_of(len(requests[0].input_ids), tokens)))
        yield DONE

    def _chat_logprobs(self, body: ChatBody, shown: StreamedChoice) -> dict[str, Any] | None:
        """Return the log probabilities that were not sent yet, if they were asked for."""
        return chat_logprobs(shown.take_logprobs(), tokens=self.token_texts) if body.logprobs else None

    def _last_deltas(
        self, shown: StreamedChoice, answer: Generated, *, tools: AskedTools | None
    ) -> list[dict[str, Any]]:
        """Return what remains of an answer with tools: its calls, or content that was held back."""
        if tools is None:
            return []
        content, calls = tools.calls_in(answer.text)
        rest = content[shown.sent :]
        deltas: list[dict[str, Any]] = [{"content": rest}] if rest else []
        if calls:
            called = [{"index": number, **call.as_openai()} for number, call in enumerate(calls)]
            deltas.append({"tool_calls": called})
        return deltas

    def _tools(self, body: ChatBody) -> AskedTools | None:
        """Return the tools that an answer may call; None if there are none."""
        if not body.tools or body.tool_choice == "none":
            return None
        core, choice = self.core, body.tool_choice
        template = core.prompts.template
        if template is None:
            raise RequestError(400, "tools need a model with a chat template", param="tools")
        try:
            defined = tools_of(body.tools, "tools")
        except FormatError as error:
            raise RequestError(400, str(error), param="tools") from None
        if not self._forms:
            self._forms.append(call_form(template, core.tokenizer))
        form, called = self._forms[0], defined
        if isinstance(choice, ToolChoice):
            called = [tool for tool in defined if tool["function"]["name"] == choice.function.name]
            if not called:
                raise RequestError(400, f"tool_choice: no tool is named {choice.function.name}", param="tool_choice")
        must_call = choice == "required" or isinstance(choice, ToolChoice)
        return AskedTools(
            defined, form, call_grammar(called, form=form) if must_call else None, body.parallel_tool_calls
        )

    # Completions

    async def completions(self, body: CompletionBody) -> Response:
        """Continue texts."""
        self._check_writes()
        prompts = await asyncio.to_thread(self._encoded, body)
        requests = await asyncio.to_thread(
            self._requests, body, prompts, limit=body.max_tokens, top=body.logprobs, grammar=None
        )
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
                else completion_logprobs(answer.token_logprobs, tokens=self.token_texts),
                "finish_reason": answer.finish_reason,
            }
            for index, answer in enumerate(generated)
        ]
        usage = usage_of(sum(map(len, prompts)), sum(answer.num_tokens for answer in generated))
        return JSONResponse(head.response(choices, usage))

    async def _completion_stream(
        self, body: CompletionBody, requests: Sequence[AnswerRequest], head: ResponseHead
    ) -> AsyncGenerator[bytes]:
        """Yield the parts of completions: pieces of text, the reason of the end, and usage."""
        tokens, offsets = 0, dict.fromkeys(range(len(requests)), 0)
        async with aclosing(self.engine.events(requests)) as events:
            async for index, event in events:
                choice: dict[str, Any] = {"index": index, "text": "", "logprobs": None, "finish_reason": None}
                if isinstance(event, AnswerPiece):
                    choice["text"] = event.text
                    if body.logprobs is not None:
                        choice["logprobs"] = completion_logprobs(
                            event.token_logprobs, tokens=self.token_texts, start=offsets[index]
                        )
                    offsets[index] += len(event.text)
                else:
                    answer = checked(event)
                    tokens += answer.num_tokens
                    choice["finish_reason"] = answer.finish_reason
                yield event_of(head.response([choice], None))
        if body.stream_options is not None and body.stream_options.include_usage:
            yield event_of(head.response([], usage_of(sum(len(one.input_ids) for one in requests[:: body.n]), tokens)))
        yield DONE

    def _encoded(self, body: CompletionBody) -> list[list[int]]:
        """Return the tokens of the prompts of a completion."""
        tokenizer, prompts = self.core.tokenizer, []
        for prompt in body.prompts:
            ids = tokenizer(prompt, verbose=False)["input_ids"] if isinstance(prompt, str) else prompt
            if not ids:
                raise RequestError(400, "a prompt is empty; write at least a character", param="prompt")
            self._check_tokens(ids)
            prompts.append(list(ids))
        if not prompts:
            raise RequestError(400, "there is no prompt", param="prompt")
        return prompts

    # All requests

    def _requests(
        self,
        body: SamplingBody,
        prompts: Sequence[Sequence[int]],
        *,
        limit: int | None,
        top: int | None,
        grammar: str | None,
    ) -> list[AnswerRequest]:
        """Return the requests of the engine: `body.n` for each prompt.

        Args:
            body: The request of the client.
            prompts: The tokens of each prompt.
            limit: Limit of generated tokens; None for the default.
            top: How many of the most probable tokens are reported; None to report no log probabilities.
            grammar: Grammar that constrains the answers.
        """
        core = self.core
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
        self._check_tokens([*body.stop_token_ids, *map(int, body.logit_bias or ())])
        self._check_options(options)
        requests = []
        for number, prompt in enumerate(prompts):
            room = core.context_tokens - len(prompt)
            if room < 1 or (limit is not None and limit > room):
                wanted = f" and max_tokens {limit:,}" if limit is not None and room >= 1 else ""
                raise RequestError(
                    400,
                    f"the prompt has {len(prompt):,} tokens{wanted}, and the context holds {core.context_tokens:,}; "
                    "shorten it, or write a smaller max_tokens",
                    code="context_length_exceeded",
                )
            new_tokens = limit or min(self.core.default_new_tokens, room)
            for choice in range(body.n):
                key = sampling_key(body.seed, number * body.n + choice)
                requests.append(AnswerRequest(list(prompt), new_tokens, options, key=key, streams=body.stream))
        return requests

    def _check_tokens(self, ids: Sequence[int]) -> None:
        """Raise RequestError if one of these is not a token of the model."""
        size = self.core.lm.vocabulary_size
        wrong = next((token for token in ids if not 0 <= token < size), None)
        if wrong is not None:
            raise RequestError(400, f"{wrong} is not a token of this model, which has {size:,}")

    def _check_writes(self) -> None:
        """Raise RequestError if the model writes no text."""
        config = self.core.parts.config
        if config.head_output is not None or config.scores_answers:
            raise RequestError(400, "the model writes no text; send rows to /predict")

    def _check_options(self, options: GenerationOptions) -> None:
        """Raise RequestError or ModelError if a grammar cannot be used."""
        if options.grammar is None:
            return
        if self.core.why_batches is not None:
            raise RequestError(
                400,
                "response_format and required tools need continuous batching, which is not available here: "
                f"{self.core.why_batches}",
            )
        lm: Any = self.core.lm
        lm.grammar(options.grammar, ends=answer_ends(lm, options))

    # Embeddings

    async def embeddings(self, body: EmbeddingsBody, rows: RowService) -> Response:
        """Return embeddings of texts."""
        config = self.core.parts.config
        outputs = config.output_features
        inputs = [feature for feature in config.input_features if isinstance(feature, TextInput)]
        if len(inputs) != 1 or not isinstance(outputs[0], EmbeddingOutput):
            raise RequestError(400, "the model computes no embeddings of one text; send rows to /predict")
        if body.dimensions is not None:
            raise RequestError(400, "dimensions is not supported; leave it out", param="dimensions")
        opened = rows.open([{inputs[0].name: text} for text in body.input], None)
        answers = await rows.answers(opened)
        wrong = next((index for index, answer in enumerate(answers) if answer.error is not None), None)
        if wrong is not None:
            raise RequestError(400, f"text {wrong + 1}: {answers[wrong].error}", param="input")
        vectors = [answer.decoded.values[outputs[0].name] for answer in answers]
        tokens = sum(len(ids) for ids in self.core.tokenizer(body.input, verbose=False)["input_ids"])
        data = [
            {"object": "embedding", "index": index, "embedding": written(vector, body.encoding_format)}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return JSONResponse({"object": "list", "data": data, "model": self.model, "usage": usage})


def written(vector: Sequence[float], encoding: str) -> list[float] | str:
    """Return an embedding as numbers, or as base64 of 32-bit floats."""
    if encoding == "float":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def grammar_of(form: ResponseFormat) -> str:
    """Return the grammar of answers in this form. Raise RequestError if its schema is not valid."""
    if form.json_schema is None:
        return json_rule("start", {"type": "object"})
    schema = form.json_schema.schema_
    try:
        check_json_schema(schema)
    except ValueError as error:
        raise RequestError(400, f"response_format.json_schema: {error}", param="response_format") from None
    return json_rule("start", schema)


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
            except (RequestError, RowError) as error:
                yield event_of(error.content if isinstance(error, RequestError) else {"error": {"message": str(error)}})

    return StreamingResponse(
        content(), media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    )
