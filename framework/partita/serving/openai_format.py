"""Responses in the form of the OpenAI API."""

import codecs
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from partita.lm.base import Generated, TokenLogprob
from partita.lm.decoding.continuation import decode_continuation
from partita.lm.decoding.grammar import special_ids, token_bytes
from partita.serving.tool_use import ToolCall

Kind = Literal["chat", "completion"]
OBJECTS: dict[tuple[Kind, bool], str] = {
    ("chat", False): "chat.completion",
    ("chat", True): "chat.completion.chunk",
    ("completion", False): "text_completion",
    ("completion", True): "text_completion",
}
PREFIXES: dict[Kind, str] = {"chat": "chatcmpl", "completion": "cmpl"}
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class ResponseHead:
    """What all parts of a response have in common."""

    kind: Kind
    model: str
    streams: bool
    identifier: str = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        object.__setattr__(self, "identifier", f"{PREFIXES[self.kind]}-{uuid.uuid4().hex}")

    def response(self, choices: Sequence[Mapping[str, Any]], usage: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return a response, or a part of a stream; usage is left out if it is None."""
        counted = {} if usage is None else {"usage": usage}
        return {
            "id": self.identifier,
            "object": OBJECTS[self.kind, self.streams],
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
            **counted,
        }


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Return the numbers of tokens."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def chat_choice(
    index: int, generated: Generated, *, content: str, calls: Sequence[ToolCall], logprobs: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return a choice of a chat.

    Args:
        index: Its number.
        generated: The answer.
        content: Its text without calls.
        calls: Its tool calls.
        logprobs: Its log probabilities.
    """
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    if calls:
        message["tool_calls"] = [call.as_openai() for call in calls]
    return {
        "index": index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": "tool_calls" if calls else generated.finish_reason,
    }


class TokenTexts:
    """Texts and bytes of the tokens of a model."""

    def __init__(self, tokenizer: Any, *, size: int) -> None:
        """Find the bytes of the first `size` tokens."""
        self.tokenizer, self.spelled = tokenizer, token_bytes(tokenizer, size=size)
        self.special = frozenset(special_ids(tokenizer))
        """Tokens that are left out of texts."""

    def text(self, token: int) -> str:
        """Return the text of a token, with U+FFFD for a part of a character."""
        return decode_continuation(self.tokenizer, [token]) or str(self.tokenizer.decode([token]))

    def name(self, token: int) -> str:
        r"""Return the text of a token; if that is a part of a character, its bytes as the OpenAI API has them.

        Such as `bytes:\xe4`: as keys, the texts of such tokens would be equal.
        """
        text = self.text(token)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes(token)) if "\ufffd" in text else text

    def bytes(self, token: int) -> list[int]:
        """Return the bytes of a token, which may be a part of a character."""
        return list(self.spelled[token] or self.text(token).encode())


def chat_logprobs(entries: Sequence[TokenLogprob], *, tokens: TokenTexts) -> dict[str, Any]:
    """Return log probabilities as a chat has them."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": tokens.text(token), "logprob": finite(logprob), "bytes": tokens.bytes(token)}

    return {
        "content": [
            {**entry(one.token, one.logprob), "top_logprobs": [entry(token, value) for token, value in one.top]}
            for one in entries
        ]
    }


class TextOffsets:
    """Where the tokens of an answer are in its text, in characters.

    The lengths of their texts do not say that: several tokens may be the parts of one character, and special tokens are
    left out.
    """

    def __init__(self, tokens: TokenTexts) -> None:
        self.tokens, self.position = tokens, 0
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, token: int) -> int:
        """Return the offset of the next token of the answer."""
        if token in self.tokens.special:
            return self.position
        content, is_open = bytes(self.tokens.bytes(token)), bool(self.decoder.getstate()[0])
        first, others = self.decoder.decode(content[:1]), self.decoder.decode(content[1:])
        # A character that the token does not continue is shown as U+FFFD before it.
        offset = self.position + (is_open and first.startswith("\ufffd"))
        self.position += len(first) + len(others)
        return offset


def completion_logprobs(entries: Sequence[TokenLogprob], *, offsets: TextOffsets) -> dict[str, Any]:
    """Return log probabilities as a completion has them, among the most probable tokens also the chosen one.

    Args:
        entries: The next tokens of the answer.
        offsets: Finds their offsets in the text.
    """
    chosen = [(*one.top, (one.token, one.logprob)) for one in entries]
    tokens = offsets.tokens
    return {
        "tokens": [tokens.name(one.token) for one in entries],
        "token_logprobs": [finite(one.logprob) for one in entries],
        "top_logprobs": [{tokens.name(token): finite(value) for token, value in shown} for shown in chosen],
        "text_offset": [offsets.next(one.token) for one in entries],
    }


LOWEST = -9999.0
"""What the OpenAI API returns for a probability of 0."""


def finite(logprob: float) -> float:
    """Return a log probability that JSON can hold."""
    return logprob if logprob > LOWEST else LOWEST


def event_of(content: Mapping[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
