"""Chats of the OpenAI API, whole and as a stream, with tools and formats of the answer."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from starlette.responses import JSONResponse, Response

from partita.generation.text_stream import overlap
from partita.lm.base import Generated, TokenLogprob
from partita.serving.answers import AsyncEngine, answer_of
from partita.serving.bodies import ChatBody, ResponseFormat, ToolChoice
from partita.serving.errors import ApiError
from partita.serving.openai_format import DONE, ResponseHead, chat_choice, chat_logprobs, event_of, usage_of
from partita.serving.openai_requests import EngineRequests, streamed
from partita.serving.request_queue import AnswerPiece, AnswerRequest
from partita.serving.tool_use import CallForm, ToolCall, call_form, call_grammar, calls_in
from partita_schema.dialogues.common_form import FormatError
from partita_schema.dialogues.tools import tools_of
from partita_schema.sections.outputs.grammar_rules import json_rule, whole_grammar
from partita_schema.sections.outputs.json import check_json_schema


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


class ChatAnswers:
    """Answers the messages of chats."""

    def __init__(self, engine: AsyncEngine, requests: EngineRequests, *, model: str) -> None:
        """Answer under the name `model`."""
        self.engine, self.core, self.requests, self.model = engine, engine.engine, requests, model

    @cached_property
    def _form(self) -> CallForm:
        """Format of the calls of the model."""
        template = self.core.prompts.template
        if template is None:
            raise ApiError(400, "tools need a model with a chat template", param="tools")
        return call_form(template, self.core.tokenizer)

    async def chat(self, body: ChatBody) -> Response:
        """Answer the messages of a chat."""
        tools = await asyncio.to_thread(self._tools, body)
        grammar = tools.grammar if tools is not None else None
        if body.response_format is not None and body.response_format.type != "text":
            if tools is not None:
                raise ApiError(400, "response_format and tools exclude each other", param="response_format")
            grammar = grammar_of(body.response_format)
        shown = tools.tools if tools is not None else ()
        ids = await asyncio.to_thread(self.core.prompts.encode, body.messages, tools=shown)
        top = None if not body.logprobs else body.top_logprobs or 0
        requests = await asyncio.to_thread(self.requests.of, body, [ids], top=top, grammar=grammar)
        head = ResponseHead("chat", self.model, body.stream)
        if body.stream:
            return await streamed(self._chat_stream(body, requests, head, tools=tools))
        choices, generated = [], await self.engine.answers(requests)
        for index, answer in enumerate(generated):
            content, calls = (answer.text, []) if tools is None else tools.calls_in(answer.text)
            logprobs = chat_logprobs(answer.token_logprobs, tokens=self.requests.token_texts) if body.logprobs else None
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
                answer = answer_of(event)
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
        return chat_logprobs(shown.take_logprobs(), tokens=self.requests.token_texts) if body.logprobs else None

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
        form, choice = self._form, body.tool_choice
        try:
            defined = tools_of(body.tools, "tools")
        except FormatError as error:
            raise ApiError(400, str(error), param="tools") from None
        for tool in defined:
            check_parameters(tool["function"])
        called = defined
        if isinstance(choice, ToolChoice):
            called = [tool for tool in defined if tool["function"]["name"] == choice.function.name]
            if not called:
                raise ApiError(400, f"tool_choice: no tool is named {choice.function.name}", param="tool_choice")
        must_call = choice == "required" or isinstance(choice, ToolChoice)
        return AskedTools(
            defined, form, call_grammar(called, form=form) if must_call else None, body.parallel_tool_calls
        )


def check_parameters(function: Mapping[str, Any]) -> None:
    """Raise ApiError if the parameters of a tool are not a JSON Schema."""
    try:
        check_json_schema(function.get("parameters") or {})
    except ValueError as error:
        raise ApiError(400, f"tools: the parameters of {function['name']}: {error}", param="tools") from None


def grammar_of(form: ResponseFormat) -> str:
    """Return the grammar of answers in this form. Raise ApiError if its schema is not valid."""
    if form.json_schema is None:
        return whole_grammar("value", [json_rule("value", {"type": "object"})])
    schema = form.json_schema.schema_
    try:
        check_json_schema(schema)
    except ValueError as error:
        raise ApiError(400, f"response_format.json_schema: {error}", param="response_format") from None
    return whole_grammar("value", [json_rule("value", schema)])
