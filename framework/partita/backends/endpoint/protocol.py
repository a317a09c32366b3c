"""Requests and responses of the OpenAI API, with the extensions of vLLM.

A prompt is the text of a completion, or the messages of a chat with one JSON object per line.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from partita.lm.base import Generated, GenerationOptions
from partita_schema.config import Config

Mode = Literal["chat", "completion"]

PATHS: dict[Mode, str] = {"chat": "/chat/completions", "completion": "/completions"}
CHARACTERS_OF_A_TOKEN = 256
"""More characters than a token of any tokenizer has on average."""
MAX_CONTAINERS = 500_000
"""Lists and objects in a response; log probabilities of 6,400 tokens with 20 alternatives each need half of it."""
MAX_TOKENS = 10**7
"""More than any context holds; larger counts are invalid."""
PASSED_ON = {
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "min_new_tokens": "min_tokens",
}
"""Options missing in the OpenAI API, by the names that vLLM, SGLang and others use."""


class AnswerError(ValueError):
    """A response without an answer; the text says why."""


class InterruptedAnswerError(AnswerError):
    """The server has stopped in the middle of an answer; another try may have a whole one."""


INTERRUPTED = ("abort", "aborted", "error", "insufficient_system_resource")
"""Finish reasons of answers that were not generated to their end, of vLLM, OpenRouter and DeepSeek."""


@dataclass(frozen=True)
class EndpointReply:
    """An answer with the server's token counts."""

    generated: Generated
    prompt_tokens: int
    """0 if the server does not report it."""

    @property
    def tokens(self) -> int:
        """Tokens of prompt and answer."""
        return self.prompt_tokens + self.generated.num_tokens


def server_options(config: Config) -> GenerationOptions:
    """Return the generation options for a server.

    Greedy decoding is temperature 0. When sampling, temperature and top_p are always sent, so that the server's
    defaults do not apply; other options are sent only if they are set.
    """
    generation = config.generation
    arguments: dict[str, Any] = {"do_sample": bool(generation.do_sample), "temperature": 0.0}
    if generation.do_sample:
        arguments["temperature"] = 1.0 if generation.temperature is None else generation.temperature
        arguments["top_p"] = 1.0 if generation.top_p is None else generation.top_p
    for key, name in PASSED_ON.items():
        value = getattr(generation, key)
        if value is not None:
            arguments[name] = value
    return GenerationOptions(
        arguments=arguments,
        stop=generation.stop or (),
        stop_token_ids=generation.stop_token_ids,
        logprobs=generation.logprobs,
    )


def request_body(
    prompt: str,
    options: GenerationOptions,
    *,
    model: str,
    mode: Mode,
    max_new_tokens: int,
    seed: int,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the JSON body of a request.

    Args:
        prompt: The text of a completion, or messages with one JSON object per line.
        options: Generation options of `server_options`.
        model: Name of the model on the server.
        mode: Which API to use.
        max_new_tokens: Limit of generated tokens.
        seed: Seed for sampling; sent only if answers are sampled.
        extra: Further keys; None removes a key.
    """
    prompt_fields: dict[str, Any] = {"messages": read_messages(prompt)} if mode == "chat" else {"prompt": prompt}
    body = {"model": model, **prompt_fields, "max_tokens": max_new_tokens, **options.arguments}
    if body.pop("do_sample", False):
        body["seed"] = seed
    if options.stop:
        body["stop"] = list(options.stop)
    if options.stop_token_ids:
        body["stop_token_ids"] = list(options.stop_token_ids)
    if options.logprobs:
        body["logprobs"] = True if mode == "chat" else 1
    if "min_tokens" in body:
        body["min_tokens"] = min(body["min_tokens"], max_new_tokens)
    return {key: value for key, value in {**body, **extra}.items() if value is not None}


def written_messages(messages: Sequence[Mapping[str, str]]) -> str:
    """Write messages as text, one JSON object per line, so that a prefix of a dialogue is a prefix of its text."""
    return "".join(json.dumps(message, ensure_ascii=False) + "\n" for message in messages)


def read_messages(text: str) -> list[dict[str, str]]:
    """Parse the text of `written_messages`."""
    return [json.loads(line) for line in text.split("\n") if line]


def read_reply(body: bytes, *, mode: Mode, logprobs: bool, max_tokens: int | None = None) -> EndpointReply:
    """Parse the body of a response.

    Args:
        body: The body of the response.
        mode: Which API was used.
        logprobs: Whether log probabilities were requested.
        max_tokens: Limit of generated tokens in the request.

    Raises:
        AnswerError: There is no answer, or it is too long for `max_tokens`.
    """
    response = parse_response(body)
    try:
        choice = response["choices"][0]
        text = choice["message"].get("content") if mode == "chat" else choice["text"]
    except (LookupError, TypeError, AttributeError):
        raise AnswerError(f"the server's response holds no answer: {body.decode()}") from None
    reason = choice.get("finish_reason")
    if reason == "content_filter":
        raise AnswerError("the server withheld the answer (finish_reason content_filter)")
    if reason in INTERRUPTED:
        raise InterruptedAnswerError(f"the server stopped in the middle of the answer (finish_reason {reason})")
    if not isinstance(text, str):
        raise AnswerError(why_no_text(choice, reason))
    if max_tokens is not None and len(text) > (max_tokens + 16) * CHARACTERS_OF_A_TOKEN:
        raise AnswerError(f"the answer has {len(text):,} characters, which {max_tokens:,} tokens cannot be")
    generated = Generated(
        ids=(),
        text=text,
        finish_reason="length" if reason == "length" else "stop",
        logprob=log_probability(choice, mode=mode) if logprobs else None,
        reported_num_tokens=read_count(response, "completion_tokens"),
    )
    return EndpointReply(generated, prompt_tokens=read_count(response, "prompt_tokens"))


def parse_response(body: bytes) -> Any:
    """Parse a body as JSON in UTF-8, whatever its headers say (RFC 8259). Raise AnswerError."""
    try:
        return load_json(body.decode("utf-8-sig"))
    except AnswerError:
        raise
    except ValueError:
        raise AnswerError(f"the server's response is not JSON: {body.decode('utf-8', errors='replace')}") from None


def load_json(text: str) -> Any:
    """Parse JSON text of the server. Raise AnswerError if it would take too much memory, and ValueError."""
    if text.count("[") + text.count("{") > MAX_CONTAINERS:  # each takes up to 250 bytes once parsed
        raise AnswerError(f"the server's response has more than {MAX_CONTAINERS:,} lists and objects")
    try:
        return json.loads(text)
    except RecursionError:
        raise AnswerError("the server's response is nested too deeply") from None


def read_count(response: Mapping[str, Any], name: str) -> int:
    """Return a count of the response's usage, or 0 if it is missing or implausible."""
    usage = response.get("usage")
    count = usage.get(name) if isinstance(usage, dict) else None
    return count if type(count) is int and 0 <= count <= MAX_TOKENS else 0


def why_no_text(choice: Mapping[str, Any], reason: str | None) -> str:
    """Return why a choice holds no text."""
    message = choice.get("message")
    refusal = message.get("refusal") if isinstance(message, dict) else None
    if refusal:
        return f"the model refused: {refusal}"
    if reason == "length":
        return (
            "the server gave no text: thinking took all the tokens; write a larger generation.max_new_tokens, or turn "
            "it off, such as by backend.extra_body: {chat_template_kwargs: {enable_thinking: false}}"
        )
    return f"the server gave no text (finish_reason {reason})"


def log_probability(choice: Mapping[str, Any], *, mode: Mode) -> float:
    """Return the sum of the tokens' log probabilities. Raise AnswerError if the server sent none for an answer."""
    try:
        logprobs = choice["logprobs"]
        values = [token["logprob"] for token in logprobs["content"]] if mode == "chat" else logprobs["token_logprobs"]
        total = float(sum(value for value in values if value is not None))
        if not values and (choice["message"]["content"] if mode == "chat" else choice["text"]):
            raise LookupError("no token has a log probability")
    except (LookupError, TypeError, OverflowError):
        raise AnswerError("the server gave no log probabilities; remove generation.logprobs") from None
    if not math.isfinite(total):
        raise AnswerError(f"the server gave {total} as log probability")
    return total


def error_message(text: str) -> tuple[str, str]:
    """Return a server's error message and its code: from JSON if the response is JSON, else its text."""
    try:
        response = load_json(text)
    except ValueError:
        response = None
    error = response.get("error", response) if isinstance(response, dict) else None
    if isinstance(error, dict):
        message = error.get("message") or error.get("detail") or error.get("error")
        if message:
            return str(message), str(error.get("code") or error.get("type") or "")
    return (error if isinstance(error, str) and error else text or "no message"), ""
