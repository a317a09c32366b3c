"""Bodies of requests: those of the OpenAI API with the extensions of vLLM, and those of partita.

Unknown and unsupported keys are refused, so nothing that a client wrote is ignored silently. Keys that only name the
caller are accepted.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from partita.data.formats.json import has_lone_surrogate
from partita_schema.common.json_text import parse_json
from partita_schema.json_values import NOT_UNICODE, is_too_deep

MAX_CHOICES = 64
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
MAX_ROWS = 1024
SEEDS = 2**63
TOKEN_ID = re.compile(r"[0-9]{1,9}")

Seed = Annotated[int, Field(ge=-SEEDS, lt=SEEDS)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Stops = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS)]


class Body(BaseModel):
    """A JSON object."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: object) -> object:
        """Leave out keys that are null: as in the OpenAI API, they are not set."""
        if not isinstance(value, dict):
            return value
        return {key: part for key, part in value.items() if part is not None or key not in cls.model_fields}


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False
    """Has no effect."""


class SamplingBody(Body):
    """The keys of a request for answers."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0.0, le=100.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    repetition_penalty: float | None = Field(None, gt=0.0, le=100.0)
    min_tokens: int | None = Field(None, ge=0)
    stop: Stops | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field([], max_length=MAX_STOPS)
    seed: Seed | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    logit_bias: dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]] | None = None
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _refuse_penalties(self) -> "SamplingBody":
        for name in ("frequency_penalty", "presence_penalty"):
            if getattr(self, name):
                raise ValueError(f"{name} is not supported; use repetition_penalty, or write 0")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are for streams; write stream: true, or leave them out")
        if self.limit is not None and (self.min_tokens or 0) > self.limit:
            raise ValueError(f"min_tokens is {self.min_tokens:,}, above the limit of {self.limit:,} tokens")
        return self

    @property
    def limit(self) -> int | None:
        """The limit of generated tokens."""
        return self.max_tokens

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that were sent, by transformers' names."""
        named = {
            "top_p": self.top_p,
            "top_k": None if self.top_k == -1 else self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "min_new_tokens": self.min_tokens,
        }
        settings: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
        if self.top_k == -1:
            settings["top_k"] = 0
        if self.logit_bias:
            settings["sequence_bias"] = [[[int(token)], bias] for token, bias in self.logit_bias.items()]
        return settings

    @field_validator("logit_bias")
    @classmethod
    def _token_ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        wrong = next((token for token in value or {} if not TOKEN_ID.fullmatch(token)), None)
        if wrong is not None:
            raise ValueError(f"{wrong[:20]!r} is not the number of a token")
        return value


class JsonSchema(Body):
    """A JSON Schema with a name."""

    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_matches_type(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is for the type json_schema, which needs one")
        return self


class NamedFunction(Body):
    """The name of a function."""

    name: str


class ToolChoice(Body):
    """A tool to call."""

    type: Literal["function"]
    function: NamedFunction


class ChatBody(SamplingBody):
    """A request of /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    response_format: ResponseFormat | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool = True
    """Whether several calls of an answer are returned; otherwise only the first."""

    @model_validator(mode="after")
    def _check_limits_and_tools(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise ValueError("tool_choice needs tools")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens are two names of the same limit; write one of them")
        return self

    @property
    def limit(self) -> int | None:
        """The limit of generated tokens."""
        return self.max_completion_tokens or self.max_tokens


class CompletionBody(SamplingBody):
    """A request of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> "CompletionBody":
        if self.echo:
            raise ValueError("echo is not supported; put the prompt before the answer yourself")
        if self.suffix:
            raise ValueError("suffix is not supported; leave it out")
        if not isinstance(self.prompt, str) and len(self.prompt) * self.n > MAX_ROWS and not self.is_tokens:
            raise ValueError(f"a request may ask for {MAX_ROWS:,} answers; send several requests")
        if self.best_of not in (None, 1, self.n):
            raise ValueError("best_of is not supported; write n, and choose among the answers yourself")
        return self

    @property
    def is_tokens(self) -> bool:
        """Whether `prompt` is the tokens of one prompt."""
        return isinstance(self.prompt, list) and bool(self.prompt) and isinstance(self.prompt[0], int)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, as texts or tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        texts = [prompt for prompt in self.prompt if isinstance(prompt, str)]
        tokens = [prompt for prompt in self.prompt if isinstance(prompt, int)]
        return texts or ([tokens] if tokens else [prompt for prompt in self.prompt if isinstance(prompt, list)])


class PredictBody(Body):
    """A request of /predict."""

    rows: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_ROWS)
    keys: list[str] | None = None
    """Names of the rows, from which random numbers are derived."""
    records: bool = False
    """Whether to return the answers as texts, tokens and scores instead of columns."""
    fingerprint: str | None = None
    """Fingerprint of the model, as of GET /predict; if the server has another one, it refuses the rows."""

    @model_validator(mode="after")
    def _same_length(self) -> "PredictBody":
        if self.keys is not None and len(self.keys) != len(self.rows):
            raise ValueError(f"there are {len(self.rows)} rows and {len(self.keys)} keys; name each row, or none")
        return self


class TokenizeBody(Body):
    """A request of /tokenize: a text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_of_prompt_and_messages(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("write prompt or messages")
        return self


class EmbeddingsBody(Body):
    """A request of /v1/embeddings."""

    model: str | None = None
    input: Annotated[list[str], Field(min_length=1, max_length=MAX_ROWS)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _texts(cls, value: object) -> object:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError("write a text or a list of texts; tokens are not read, because they depend on the model")
        return texts


def why_refused(error: ValidationError, content: bytes) -> tuple[str, str | None]:
    """Return the text of the first error of a body, and the key of the body that it is about."""
    first = error.errors(include_url=False, include_input=False)[0]
    keys, reason = first["loc"], reason_of(first)
    if first["type"] == "json_invalid" and (found := place_of_lone_surrogate(content)) is not None:
        keys = found
        reason = (
            f"{'.'.join(map(str, keys)) or 'the body'} is {NOT_UNICODE}; write the whole character, or leave it out"
        )
    return reason, str(keys[0]) if keys else None


def place_of_lone_surrogate(content: bytes) -> tuple[str | int, ...] | None:
    """Return the keys of the first text of a JSON value that has half of a surrogate pair; None if none has it.

    JavaScript writes the half of a character as an escape, such as `"\\ud83d"`.
    """
    try:
        value = parse_json(content)
    except ValueError:
        return None
    return None if is_too_deep(value) else keys_of_lone_surrogate(value)


def keys_of_lone_surrogate(value: Any) -> tuple[str | int, ...] | None:
    """Return the path to the first text with half of a surrogate pair, or to the object of which the text is a key."""
    if isinstance(value, str):
        return () if has_lone_surrogate(value) else None
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if has_lone_surrogate(key):
            return ()
        if (keys := keys_of_lone_surrogate(item)) is not None:
            return key, *keys
    return None


def reason_of(error: Mapping[str, Any]) -> str:
    """Return the text of a pydantic error."""
    where = ".".join(str(part) for part in error["loc"] if not str(part).startswith(("function-", "constrained-")))
    if error["loc"][:1] == ("prompt",) and len(error["loc"]) > 1:  # none of the kinds that it may be
        return "prompt: write a text, a list of texts, the tokens of a prompt, or a list of these"
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        return f"{where}: this server does not read this key; leave it out"
    return f"{where}: {message}" if where else message
