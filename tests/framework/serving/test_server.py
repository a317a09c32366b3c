"""Tests of the server with the clients that people use: the openai package, and plain HTTP."""

import base64
import json
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI

from partita import Model
from partita.serving.limits import ServerLimits

from ...json_lines import write_json_lines
from .conftest import CONFIG, QUESTIONS, RunningServer, make_model, running, wait_for

USER = [{"role": "user", "content": "one red ball"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a town",
        "parameters": {
            "type": "object",
            "properties": {"town": {"enum": ["Oslo", "Rome"]}},
            "required": ["town"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def client(server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as opened:
        yield opened


def post(server: RunningServer, path: str, body: Any, **options: Any) -> httpx2.Response:
    return httpx2.post(server.url + path, json=body, timeout=30, **options)


def error_of(response: httpx2.Response) -> str:
    """Return the message of an error in the form of the OpenAI API."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return str(body["error"]["message"])


def test_models(client: OpenAI) -> None:
    [model] = client.models.list().data
    assert model.id == "small"
    assert client.models.retrieve("small").id == "small"
    fields = model.model_dump()
    assert (fields["max_model_len"], fields["default_max_tokens"], fields["chat"]) == (1024, 256, True)
    with pytest.raises(openai.NotFoundError, match="no model is named 'other'; this server has 'small'"):
        client.models.retrieve("other")


def test_completions_equal_those_of_the_model(client: OpenAI, model: Model) -> None:
    wanted = model.generate(QUESTIONS, max_new_tokens=9)
    found = client.completions.create(model="small", prompt=QUESTIONS, max_tokens=9, temperature=0)
    assert [choice.text for choice in found.choices] == wanted
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert found.usage is not None
    assert found.usage.completion_tokens == 36
    assert found.usage.prompt_tokens == sum(len(question) for question in QUESTIONS)
    assert {choice.finish_reason for choice in found.choices} == {"length"}


def test_a_streamed_completion_adds_up(client: OpenAI, model: Model) -> None:
    [wanted] = model.generate([QUESTIONS[0]], max_new_tokens=9)
    parts = list(
        client.completions.create(
            model="small",
            prompt=QUESTIONS[0],
            max_tokens=9,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *answer, usage = parts
    assert "".join(part.choices[0].text for part in answer) == wanted
    assert [part.choices[0].finish_reason for part in answer] == [None] * (len(answer) - 1) + ["length"]
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 9
    assert all(part.usage is None for part in answer)
    assert len({part.id for part in parts}) == 1


def test_the_lines_of_a_stream(server: RunningServer) -> None:
    body = {"messages": USER, "max_tokens": 3, "temperature": 0, "stream": True}
    response = post(server, "/v1/chat/completions", body)
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line[6:]) for line in lines[:-1]]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all("usage" not in chunk for chunk in chunks)


def test_a_chat_is_the_template_and_a_completion(client: OpenAI, model: Model) -> None:
    [wanted] = model.generate(["<|user|>one red ball\n<|assistant|>"], max_new_tokens=8)
    found = client.chat.completions.create(model="small", messages=USER, max_completion_tokens=8, temperature=0)  # type: ignore[arg-type]
    assert found.choices[0].message.content == wanted
    assert found.choices[0].message.role == "assistant"
    streamed = client.chat.completions.create(model="small", messages=USER, max_tokens=8, temperature=0, stream=True)  # type: ignore[arg-type]
    assert "".join(part.choices[0].delta.content or "" for part in streamed) == wanted


def test_log_probabilities_of_a_chat(client: OpenAI) -> None:
    found = client.chat.completions.create(
        model="small",
        messages=USER,  # type: ignore[arg-type]
        max_tokens=5,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = found.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 5
    for one in logprobs.content:
        assert len(one.top_logprobs) == 3
        assert one.top_logprobs[0].logprob == one.logprob, "greedy decoding takes the most probable token"
        assert one.bytes is not None
        assert bytes(one.bytes).decode(errors="replace") == one.token
    parts = client.chat.completions.create(
        model="small",
        messages=USER,  # type: ignore[arg-type]
        max_tokens=5,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        stream=True,
    )
    sent = [one for part in parts for one in (part.choices[0].logprobs.content if part.choices[0].logprobs else [])]  # type: ignore[union-attr]
    assert [(one.token, one.bytes) for one in sent] == [(one.token, one.bytes) for one in logprobs.content]


def test_a_request_for_no_log_probabilities_is_answered_without_them(client: OpenAI) -> None:
    found = client.chat.completions.create(model="small", messages=USER, max_tokens=2, logprobs=False, top_logprobs=0)  # type: ignore[arg-type]
    assert found.choices[0].logprobs is None


def test_log_probabilities_of_a_completion(client: OpenAI) -> None:
    found = client.completions.create(model="small", prompt="two", max_tokens=4, temperature=0, logprobs=2)
    logprobs = found.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == found.choices[0].text or "bytes:" in "".join(logprobs.tokens or [])
    assert all(len(top) == 2 for top in logprobs.top_logprobs or []), "bytes of characters have their own keys"
    assert (logprobs.text_offset or [])[0] == 0


def test_tokens_of_a_sampled_completion_are_at_their_offsets(client: OpenAI) -> None:
    compared = 0
    for seed in range(5):
        asked = {"model": "small", "prompt": "two", "max_tokens": 30, "temperature": 5.0, "seed": seed, "logprobs": 0}
        [choice] = client.completions.create(**asked).choices  # type: ignore[call-overload]
        for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
            if not token.startswith(("bytes:", "<")):
                assert choice.text[offset:].startswith(token)
                compared += 1
    assert compared > 20


@pytest.mark.parametrize("top", [0, 2])
def test_the_most_probable_tokens_of_a_completion_include_the_sampled_one(client: OpenAI, top: int) -> None:
    asked = {"model": "small", "prompt": "two", "max_tokens": 20, "temperature": 5.0, "seed": 1, "logprobs": top}
    logprobs = client.completions.create(**asked).choices[0].logprobs  # type: ignore[call-overload]
    sizes = set()
    for token, logprob, shown in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert shown[token] == logprob
        sizes.add(len(shown))
    assert max(sizes) == top + 1


@pytest.mark.parametrize("is_held_back", [True, False])
def test_log_probabilities_of_a_streamed_completion_are_those_of_the_whole_one(
    client: OpenAI, is_held_back: bool
) -> None:
    asked: dict[str, Any] = {"model": "small", "prompt": "two", "max_tokens": 8, "temperature": 0, "logprobs": 2}
    [free] = client.completions.create(**asked).choices
    # The beginning of a stop string is held back until the next tokens show that it is none, or removed if it is one.
    asked["stop"] = free.text[2:5] + ("\0" if is_held_back else "")
    [whole] = client.completions.create(**asked).choices
    parts = [part.choices[0] for part in client.completions.create(**asked, stream=True)]
    assert whole.finish_reason == ("length" if is_held_back else "stop")
    assert "".join(part.text for part in parts) == whole.text
    wanted, sent = whole.logprobs, [part.logprobs for part in parts if part.logprobs is not None]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [one for part in sent for one in getattr(part, name)] == getattr(wanted, name), name


def test_several_choices_and_seeds(client: OpenAI) -> None:
    def texts(seed: int) -> list[str]:
        found = client.completions.create(model="small", prompt="two", max_tokens=8, temperature=1.0, n=3, seed=seed)
        return [choice.text for choice in found.choices]

    first = texts(1)
    assert len(set(first)) > 1
    assert texts(1) == first
    assert texts(2) != first


def test_the_answer_to_a_prompt_does_not_depend_on_its_place(client: OpenAI) -> None:
    def texts(*prompts: str) -> list[str]:
        asked = {"model": "small", "max_tokens": 8, "temperature": 1.0, "n": 2, "seed": 3}
        choices = client.completions.create(prompt=list(prompts), **asked).choices  # type: ignore[call-overload]
        return [choice.text for choice in choices]

    one, two = texts("one"), texts("two")
    assert one[0] != one[1]
    assert texts("one", "two", "one") == [*one, *two, *one]


@pytest.mark.parametrize(
    "more",
    [
        {"top_p": 1, "top_k": 0, "min_p": 0, "seed": 3},
        {"top_k": -1},
        {"temperature": 0, "top_p": 0.5},
        {"temperature": 1e-40},
    ],
)
def test_settings_of_clients_that_change_nothing_are_accepted(server: RunningServer, more: dict[str, Any]) -> None:
    asked = {"prompt": "two", "max_tokens": 6}
    [greedy] = post(server, "/v1/completions", asked).json()["choices"]
    found = post(server, "/v1/completions", {**asked, **more, "n": 2}).json()["choices"]
    assert [choice["text"] for choice in found] == [greedy["text"]] * 2


def test_an_answer_of_a_json_schema(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"size": {"type": "integer", "minimum": 1, "maximum": 9}, "kind": {"enum": ["a", "b"]}},
        "required": ["size", "kind"],
        "additionalProperties": False,
    }
    found = client.chat.completions.create(
        model="small",
        messages=USER,  # type: ignore[arg-type]
        max_tokens=60,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}},
    )
    value = json.loads(found.choices[0].message.content or "")
    assert set(value) == {"size", "kind"}
    assert value["kind"] in ("a", "b")
    assert found.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_required_tool_is_called(client: OpenAI, streams: bool, choice: Any) -> None:
    asked = {"model": "small", "messages": USER, "tools": [WEATHER], "tool_choice": choice, "max_tokens": 80}
    made: Any = client.chat.completions
    if streams:
        deltas = [part.choices[0] for part in made.create(**asked, temperature=0, stream=True)]
        [call] = [call for part in deltas for call in part.delta.tool_calls or []]
        assert not any(part.delta.content for part in deltas)
        assert deltas[-1].finish_reason == "tool_calls"
    else:
        message = made.create(**asked, temperature=0).choices[0]
        [call] = message.message.tool_calls
        assert message.message.content is None
        assert message.finish_reason == "tool_calls"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["town"] in ("Oslo", "Rome")
    assert call.id.startswith("call_")


def test_a_required_tool_without_parameters_is_called_without_arguments(server: RunningServer) -> None:
    for parameters in ({}, {"parameters": {}}, {"parameters": {"type": "object", "properties": {}}}):
        tool = {"type": "function", "function": {"name": "now", **parameters}}
        asked = {"messages": USER, "tools": [tool], "tool_choice": "required", "temperature": 2.0, "seed": 1}
        [choice] = post(server, "/v1/chat/completions", asked).json()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert [call["function"] for call in choice["message"]["tool_calls"]] == [{"name": "now", "arguments": "{}"}]


def test_a_chat_with_tool_results_is_answered(client: OpenAI) -> None:
    messages: Any = [
        *USER,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Oslo"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    found = client.chat.completions.create(model="small", messages=messages, tools=[WEATHER], max_tokens=4)  # type: ignore[list-item]
    assert found.choices[0].message.content is not None


def test_rows_are_predicted_as_by_predict(server: RunningServer, model: Model) -> None:
    rows = [{"question": question, "id": number} for number, question in enumerate(QUESTIONS)]
    rows.append({"question": "", "id": 9})
    response = post(server, "/predict", {"rows": rows})
    wanted = [dict(row) for row in model.predict(rows)]
    found = response.json()["predictions"]
    assert [{key: value for key, value in row.items() if key != "key"} for row in found] == [
        {key: value for key, value in row.items() if key != "key"} for row in wanted
    ]
    assert [row["key"] for row in found] == [f"request:{number}" for number in range(1, 6)]
    assert found[4]["status"] == "skipped"


def test_many_clients_at_once_get_the_answers_of_predict(server: RunningServer, model: Model) -> None:
    rows = [{"question": f"{question} {number}"} for number in range(6) for question in QUESTIONS]
    with ThreadPoolExecutor(12) as pool:
        responses = list(pool.map(lambda row: post(server, "/predict", {"rows": [row]}).json(), rows))
    found = [response["predictions"][0]["answer"] for response in responses]
    assert found == model.predict(rows)["answer"]


def test_tokenize(server: RunningServer) -> None:
    text = post(server, "/tokenize", {"prompt": "two"}).json()
    assert text["count"] == len(text["tokens"]) == 3
    assert "".join(text["token_strs"]) == "two"
    chat = post(server, "/tokenize", {"messages": USER}).json()
    named = [{**USER[0], "name": "Anna"}]
    assert post(server, "/tokenize", {"messages": named}).json() == chat, "name has no effect"
    assert "".join(chat["token_strs"]) == "<|user|>one red ball\n<|assistant|>"


def test_other_requests_are_answered_while_a_large_text_is_tokenized(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, started = threading.Event(), threading.Event()
    tokenizer: Any = type(server.engine.tokenizer)
    decode = tokenizer.decode

    def slow(self: Any, *arguments: Any, **options: Any) -> str:
        started.set()
        assert go.wait(20)
        return str(decode(self, *arguments, **options))

    monkeypatch.setattr(tokenizer, "decode", slow)
    with ThreadPoolExecutor(1) as pool:
        response = pool.submit(post, server, "/tokenize", {"prompt": "two"})
        try:
            assert started.wait(20)
            assert httpx2.get(server.url + "/health", timeout=10).json() == {"status": "ok"}
        finally:
            go.set()
        assert response.result().json()["count"] == 3


def test_health_and_metrics(server: RunningServer) -> None:
    assert httpx2.get(server.url + "/health").json() == {"status": "ok"}
    post(server, "/v1/completions", {"prompt": "two", "max_tokens": 2})
    text = httpx2.get(server.url + "/metrics").text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(lines["partita_generated_tokens_total"]) >= 2
    assert float(lines["partita_requests_total"]) >= 1
    assert float(lines["partita_requests_active"]) == 0
    assert float(lines['partita_http_responses_total{path="/v1/completions",status="200"}']) >= 1
    assert float(lines["partita_first_token_seconds_count"]) >= 1


WRONG_TOOL = {"type": "function", "function": {"name": "wrong", "parameters": {"type": "banana"}}}
BAD_BODIES = [
    ("/v1/completions", {"prompt": ""}, "a prompt is empty; write at least a character"),
    ("/v1/completions", {"prompt": []}, "there is no prompt"),
    ("/v1/completions", {"prompt": [3, 99999]}, "99999 is not a token of this model, which has 258"),
    ("/v1/completions", {"prompt": "a", "stop_token_ids": [258]}, "258 is not a token of this model, which has 258"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"999": 1}}, "999 is not a token of this model, which has 258"),
    ("/v1/completions", {"prompt": ["a"] * 40, "n": 30}, "a request may ask for 1,024 answers; send several requests"),
    ("/v1/embeddings", {"input": ["a"] * 1025}, "List should have at most 1024 items after validation, not 1025"),
    ("/v1/embeddings", {"input": [5, 7]}, "input: write a text or a list of texts; tokens are not read, because they "),
    ("/v1/embeddings", {"input": {"text": "a"}}, "input: write a text or a list of texts"),
    (
        "/v1/completions",
        {"prompt": [1, "a"]},
        "prompt: write a text, a list of texts, the tokens of a prompt, or a list of these",
    ),
    (
        "/v1/completions",
        {"prompt": "a", "min_tokens": 9, "max_tokens": 5},
        "min_tokens is 9, above the limit of 5 tokens",
    ),
    (
        "/v1/chat/completions",
        {"messages": USER, "max_tokens": 2, "max_completion_tokens": 5},
        "max_tokens and max_completion_tokens are two names of the same limit; write one of them",
    ),
    (
        "/v1/chat/completions",
        {"messages": USER, "tools": [WRONG_TOOL], "tool_choice": "required"},
        "tools: the parameters of wrong: is not a JSON Schema: 'banana' is not valid",
    ),
    (
        "/v1/chat/completions",
        {"messages": USER, "response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
        'answers cannot be held to the JSON schema of this request (Unimplemented keys: ["not"])',
    ),
    (
        "/v1/chat/completions",
        {"messages": USER, "response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}},
        "answers cannot be held to the JSON schema of this request (no text fits it)",
    ),
    ("/v1/completions", {"prompt": "a", "unknown": None}, "unknown: this server does not read this key; leave it out"),
    ("/v1/completions", {"prompt": None}, "prompt: Field required"),
    ("/tokenize", {"prompt": 5}, "prompt: Input should be a valid string"),
    ("/v1/completions", {"prompt": "a", "max_tkens": 3}, "max_tkens: this server does not read this key; leave it out"),
    ("/v1/completions", {"prompt": "a", "temperature": -1}, "temperature: Input should be greater than or equal to 0"),
    (
        "/v1/completions",
        {"prompt": "a", "echo": True},
        "echo is not supported; put the prompt before the answer yourself",
    ),
    ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix is not supported; leave it out"),
    (
        "/v1/completions",
        {"prompt": "a", "n": 2, "best_of": 5},
        "best_of is not supported; write n, and choose among the answers yourself",
    ),
    (
        "/v1/completions",
        {"prompt": "a", "frequency_penalty": 1},
        "frequency_penalty is not supported; use repetition_penalty, or write 0",
    ),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias: 'x' is not the number of a token"),
    (
        "/v1/completions",
        {"prompt": "a", "stream_options": {}},
        "stream_options are for streams; write stream: true, or leave them out",
    ),
    (
        "/v1/completions",
        {"prompt": "a" * 600, "max_tokens": 600},
        (
            "the prompt has 600 tokens and max_tokens 600, and the context holds 1,024; shorten it, or write a smaller "
            "max_tokens"
        ),
    ),
    (
        "/v1/completions",
        {"prompt": "a" * 1024},
        "the prompt has 1,024 tokens, and the context holds 1,024 with the answer; shorten it",
    ),
    (
        "/v1/completions",
        {"prompt": "a" * 1024, "max_tokens": 5},
        "the prompt has 1,024 tokens, and the context holds 1,024 with the answer; shorten it",
    ),
    *(
        (path, {**body, name: value}, f"{name} has no effect on greedy generation; send a temperature above 0, or ")
        for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": USER}))
        for name, value in (("top_p", 0.5), ("top_k", 3), ("min_p", 0.1))
    ),
    ("/v1/completions", [1], "Input should be an object"),
    ("/v1/chat/completions", {"messages": []}, "messages: List should have at least 1 item after validation, not 0"),
    ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "message 1: content is missing"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "cat", "content": "a"}]},
        "message 1: the role is 'cat'; write one of system, user, assistant, tool",
    ),
    ("/v1/chat/completions", {"messages": USER, "top_logprobs": 2}, "top_logprobs needs logprobs: true"),
    ("/v1/chat/completions", {"messages": USER, "tool_choice": "required"}, "tool_choice needs tools"),
    (
        "/v1/chat/completions",
        {"messages": USER, "tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice: no tool is named x",
    ),
    (
        "/v1/chat/completions",
        {"messages": USER, "tools": [WEATHER], "response_format": {"type": "json_object"}},
        "response_format and tools exclude each other",
    ),
    (
        "/v1/chat/completions",
        {"messages": USER, "response_format": {"type": "json_schema"}},
        "response_format: json_schema is for the type json_schema, which needs one",
    ),
    ("/predict", {"rows": []}, "rows: List should have at least 1 item after validation, not 0"),
    ("/predict", {"rows": [{"question": "a"}], "keys": []}, "there are 1 rows and 0 keys; name each row, or none"),
    ("/predict", {"rows": [{"x": 1}]}, "request has no column 'question', which input question needs"),
    ("/tokenize", {}, "write prompt or messages"),
    (
        "/v1/embeddings",
        {"input": "a"},
        "one text input and an output of type embedding; its outputs are answer (text)",
    ),
]


def test_keys_that_are_null_are_not_set(server: RunningServer) -> None:
    asked = {"max_tokens": 4, "temperature": 0}
    nulls = dict.fromkeys(("stream", "n", "frequency_penalty", "stop_token_ids", "logprobs", "stop", "seed"))
    chat = dict.fromkeys(("tools", "tool_choice", "parallel_tool_calls", "response_format", "stream_options"))
    completions = [post(server, "/v1/completions", {"prompt": "a", **asked, **more}) for more in ({}, nulls)]
    chats = [post(server, "/v1/chat/completions", {"messages": USER, **asked, **more}) for more in ({}, nulls | chat)]
    assert completions[0].json()["choices"] == completions[1].json()["choices"]
    assert chats[0].json()["choices"] == chats[1].json()["choices"]


@pytest.mark.parametrize(("path", "body", "reason"), BAD_BODIES)
def test_what_is_wrong_with_a_body(server: RunningServer, path: str, body: Any, reason: str) -> None:
    response = post(server, path, body)
    assert response.status_code == 400
    assert reason in error_of(response)


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/predict", '{"rows": [{"question": "a"}], "rows": [{"question": "b"}]}'),
        ("/predict", '{"rows": [{"rows": "a", "rows": "b"}]}'),
        ("/v1/completions", '{"prompt": "a", "max_tokens": 1, "metadata": {"rows": "1", "rows": "2"}}'),
    ],
)
def test_a_key_that_occurs_twice_is_refused(server: RunningServer, path: str, content: str) -> None:
    response = httpx2.post(server.url + path, content=content)
    assert response.status_code == 400
    assert error_of(response) == "the key 'rows' occurs twice in an object; remove or rename one"


def test_a_request_may_ask_for_more_answers_than_may_wait(model: Model) -> None:
    with running(model, engine={"batch_size": 2, "max_waiting": 3}) as server:
        rows = [{"question": f"{question} {number}"} for number in range(5) for question in QUESTIONS]
        found = post(server, "/predict", {"rows": rows}).json()["predictions"]
    assert [row["answer"] for row in found] == model.predict(rows)["answer"]


def test_paths_and_methods_that_do_not_exist(server: RunningServer) -> None:
    missing = httpx2.get(server.url + "/v2/x")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    assert "there is nothing at /v2/x" in error_of(missing)
    broken = httpx2.post(server.url + "/predict", content=b'{"rows": [')
    assert broken.status_code == 400
    assert "Invalid JSON" in error_of(broken)


@pytest.mark.parametrize("ui", [False, True])
def test_a_wrong_method_is_answered_with_those_of_the_path(model: Model, ui: bool) -> None:
    wrong = {("GET", "/tokenize"): "POST", ("PUT", "/health"): "GET, HEAD", ("DELETE", "/predict"): "GET, HEAD, POST"}
    if ui:
        wrong |= {("POST", "/"): "GET, HEAD", ("POST", "/chat.js"): "GET, HEAD"}
    with running(model, ui=ui) as server:
        for (method, path), allowed in wrong.items():
            response = httpx2.request(method, server.url + path)
            assert (response.status_code, response.headers["allow"]) == (405, allowed)
            assert error_of(response) == f"{method} is not for {path}; send {allowed.replace(', ', ' or ')}"
        assert httpx2.get(server.url + "/nothing").status_code == 404
        pages = [httpx2.get(server.url + path) for path in ("/", "/chat.js", "/icon.svg")]
        assert [page.status_code for page in pages] == [200 if ui else 404] * 3
        assert ["content-security-policy" in page.headers for page in pages] == [ui] * 3


@pytest.mark.parametrize(
    ("path", "content", "place"),
    [
        ("/v1/chat/completions", r'{"messages": [{"role": "user", "content": "a \ud83d"}]}', "messages.0.content"),
        ("/v1/completions", r'{"prompt": ["\ud83d\ude00", "\ude00"]}', "prompt.1"),
        ("/predict", r'{"rows": [{"question": "a"}, {"question\udc00": "a"}]}', "rows.1"),
        ("/predict", r'"\ud800"', "the body"),
    ],
)
def test_half_of_a_character_in_a_body_is_named(server: RunningServer, path: str, content: str, place: str) -> None:
    response = httpx2.post(server.url + path, content=content)
    assert response.status_code == 400
    wanted = f"{place} is not Unicode: half of a surrogate pair; write the whole character, or leave it out"
    assert error_of(response) == wanted


def test_half_of_a_character_deep_in_a_body_is_no_failure(server: RunningServer) -> None:
    content = r'{"rows": ' + "[" * 3000 + r'"\ud800"' + "]" * 3000 + "}"
    response = httpx2.post(server.url + "/predict", content=content)
    assert response.status_code == 400
    assert "Invalid JSON" in error_of(response)


def test_pages_of_other_sites_are_refused_without_a_token(server: RunningServer) -> None:
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Host": "[", "Origin": "x"}):
        refused = httpx2.post(server.url + "/v1/completions", json={"prompt": "a"}, headers=headers)
        assert refused.status_code == 403
        assert refused.json()["error"]["type"] == "permission_error"


def test_the_token_is_demanded_everywhere_but_for_the_health(model: Model) -> None:
    token = "a-token-of-this-test"
    with running(model, token=token) as server:
        assert httpx2.get(server.url + "/health").status_code == 200
        for path in ("/v1/models", "/metrics", "/nothing"):
            refused = httpx2.get(server.url + path)
            assert refused.status_code == 401
            assert error_of(refused) == "send the header Authorization: Bearer TOKEN with the token of this server"
            assert refused.headers["www-authenticate"] == "Bearer"
        for wrong in ("Bearer", f"Bearer {token}x", token, f"bearer{token}"):
            assert httpx2.get(server.url + "/v1/models", headers={"Authorization": wrong}).status_code == 401
        with OpenAI(base_url=f"{server.url}/v1", api_key=token, max_retries=0) as client:
            assert client.models.list().data[0].id == "small"


def test_limits_of_bodies_and_time(model: Model) -> None:
    with running(model, limits=ServerLimits(body_bytes=2000, answer_seconds=0.3)) as server:
        large = post(server, "/v1/completions", {"prompt": "a" * 3000})
        assert large.status_code == 413
        assert error_of(large) == "the body is larger than 2,000 bytes; send less at a time"
        parts = httpx2.post(server.url + "/predict", content=iter([b"x" * 1500] * 3))
        assert parts.status_code == 413
        with pytest.raises(urllib.error.HTTPError) as refused:  # it sends the whole body before it reads
            urllib.request.urlopen(server.url + "/predict", b"x" * 5 * 2**20, timeout=30)
        with refused.value as answer:
            assert answer.code == 413
            assert json.load(answer)["error"]["message"] == error_of(large)
        late = post(server, "/v1/completions", {"prompt": "a", "max_tokens": 1000, "temperature": 0})
        assert late.status_code == 504
        assert error_of(late) == "no answer within 0.3 s; ask for fewer tokens, or try again later"
        wait_for(lambda: server.engine.is_idle)


@pytest.mark.parametrize(
    "header", ["Content-Length: 99999999", "Transfer-Encoding: chunked", "Content-Length: 3000\r\nExpect: 100-continue"]
)
def test_a_body_without_an_end_is_not_received(model: Model, header: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partita.serving.guard.DISCARDED_BYTES", 10_000)
    with running(model, limits=ServerLimits(body_bytes=2000)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as client:
            client.sendall(f"POST /predict HTTP/1.1\r\nHost: localhost\r\n{header}\r\n\r\n".encode())
            if "chunked" in header:
                client.sendall(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
                client.sendall(b"2af9\r\n" + b"x" * 11_001 + b"\r\n")
            answer = b"".join(iter(lambda: client.recv(4096), b"")).decode()
    assert answer.startswith("HTTP/1.1 413 ")
    assert "the body is larger than 2,000 bytes; send less at a time" in answer


def slow_down(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each step take at least 20 ms, so that an answer of 1,000 tokens does not end during a test."""
    scheduler: Any = server.engine._scheduler
    step = scheduler.step

    def slow() -> None:
        step()
        time.sleep(0.02)

    monkeypatch.setattr(scheduler, "step", slow)


def test_more_waiting_requests_than_allowed_are_refused(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    long = {"prompt": "a", "max_tokens": 1000, "temperature": 0, "stream": True}
    short = {"prompt": "a", "max_tokens": 1, "temperature": 0}
    with running(model, engine={"batch_size": 1, "max_waiting": 1}) as server, ThreadPoolExecutor(1) as pool:
        slow_down(server, monkeypatch)
        with httpx2.stream("POST", server.url + "/v1/completions", json=long, timeout=30) as first:
            parts = first.iter_bytes()
            next(parts)
            second = pool.submit(post, server, "/v1/completions", short)
            wait_for(lambda: server.engine.waiting == 1)
            refused = post(server, "/v1/completions", short)
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert error_of(refused) == "1 requests wait already; try again later"
        assert second.result().status_code == 200


def test_a_stream_that_takes_too_long_ends_with_the_error(model: Model) -> None:
    body = {"prompt": "a", "max_tokens": 1000, "temperature": 0, "stream": True}
    with running(model, limits=ServerLimits(answer_seconds=0.4)) as server:
        response = post(server, "/v1/completions", body)
        assert response.status_code == 200
        last = json.loads(response.text.strip().rpartition("data: ")[2])
        assert last["error"]["message"] == "no answer within 0.4 s; ask for fewer tokens, or try again later"
        wait_for(lambda: server.engine.is_idle)


def test_a_body_that_arrives_too_slowly(model: Model) -> None:
    with running(model, limits=ServerLimits(body_seconds=0.2)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as slow:
            slow.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
            answer = b"".join(iter(lambda: slow.recv(4096), b"")).decode()
        assert answer.startswith("HTTP/1.1 408")
        assert "the body did not arrive within 0.2 s" in answer


def test_a_client_that_is_gone_frees_its_slot(server: RunningServer) -> None:
    body = {"prompt": "a", "max_tokens": 1000, "temperature": 0, "stream": True}
    with httpx2.stream("POST", server.url + "/v1/completions", json=body, timeout=30) as response:
        parts = response.iter_bytes()
        next(parts)
        assert server.engine.active == 1
    wait_for(lambda: server.engine.is_idle)
    with pytest.raises(httpx2.TimeoutException):
        httpx2.post(server.url + "/v1/completions", json={**body, "stream": False}, timeout=0.2)
    wait_for(lambda: server.engine.is_idle)


def test_a_stopping_server_answers_what_it_accepted_and_refuses_the_rest(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(model, engine={"batch_size": 1}) as server, ThreadPoolExecutor(1) as pool:
        slow_down(server, monkeypatch)
        long = pool.submit(post, server, "/v1/completions", {"prompt": "a", "max_tokens": 100, "temperature": 0})
        wait_for(lambda: server.engine.active == 1)
        server.engine.refuse_new()
        refused = post(server, "/v1/completions", {"prompt": "a"})
        assert refused.status_code == 503
        assert error_of(refused) == "the server is stopping"
        assert httpx2.get(server.url + "/health").json() == {"status": "stopping", "reason": "the server is stopping"}
        assert long.result().status_code == 200
        server.thread.join(20)
        assert not server.thread.is_alive()


def test_a_classifier_with_scored_labels(tmp_path: Path) -> None:
    colour = {"name": "colour", "type": "category", "decoder": {"labels": ["red", "blue"], "scoring": True}}
    model = make_model(tmp_path, output_features=[colour])
    rows = [{"question": question} for question in QUESTIONS]
    with running(model) as server:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda row: post(server, "/predict", {"rows": [row]}).json(), rows))
        wanted = model.predict(rows)
        for response, row in zip(found, wanted, strict=True):
            [answer] = response["predictions"]
            assert answer["colour"] == row["colour"]
            assert answer["colour_probability"] == pytest.approx(row["colour_probability"], abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {"adapter": {"type": "lora", "r": 4}},
        {"adapter": {"type": "lora", "r": 4}, "quantization": {"bits": 4}},
        {"quantization": {"bits": 8}},
        {"base_model": {**CONFIG["base_model"], "architecture": "gpt2"}},
        {"generation": {"num_beams": 2}},
    ],
    ids=["lora", "qlora", "8 bit", "gpt2", "beams"],
)
def test_answers_of_other_models_are_those_of_predict(tmp_path: Path, changes: dict[str, Any]) -> None:
    base = make_model(tmp_path).save(tmp_path / "base")
    (base / "partita.json").unlink()
    if "adapter" in changes:
        write_json_lines(tmp_path / "many.jsonl", [{"question": f"q {one}", "answer": f"{one}"} for one in range(20)])
        trainer = {"type": "finetune", "max_steps": 3, "batch_size": 4, "learning_rate": 0.05}
        data = {"source": str(tmp_path / "many.jsonl")}
        trained = Model({**CONFIG, "base_model": str(base), "data": data, "trainer": trainer, **changes}, quiet=True)
        model = Model.load(trained.train(run=tmp_path / "run").run, quiet=True)
    else:
        model = make_model(tmp_path, **{"base_model": str(base), **changes})
    rows = [{"question": f"{question} {number}"} for number in range(2) for question in QUESTIONS]
    # LLM.int8 computes the columns with outliers of any row in full precision, so answers depend on the batch.
    together = 1 if changes.get("quantization") == {"bits": 8} else 8
    with running(model) as server, ThreadPoolExecutor(together) as pool:
        found = list(pool.map(lambda row: post(server, "/predict", {"rows": [row]}).json(), rows))
    wanted = model.predict(rows, batch_size=together)["answer"]
    assert [one["predictions"][0]["answer"] for one in found] == wanted


def test_embeddings_of_texts(tmp_path: Path) -> None:
    model = make_model(tmp_path, output_features=[{"name": "vector", "type": "embedding"}])
    wanted = model.predict([{"question": question} for question in QUESTIONS[:2]])["vector"]
    with running(model) as server, OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        for encoding in ("float", "base64"):
            found = client.embeddings.create(model="small", input=QUESTIONS[:2], encoding_format=encoding)  # type: ignore[arg-type]
            for entry, vector in zip(found.data, wanted, strict=True):
                values = entry.embedding
                if isinstance(values, str):
                    values = list(struct.unpack(f"<{len(vector)}f", base64.b64decode(values)))
                assert values == pytest.approx(vector, abs=1e-5)
        assert found.usage.prompt_tokens == sum(len(f"{question} ->") for question in QUESTIONS[:2])
        response = post(server, "/v1/completions", {"prompt": "a"})
        assert "the model writes no text; send rows to /predict" in error_of(response)
        context = client.models.list().data[0].max_model_len  # type: ignore[attr-defined]
        response = post(server, "/v1/embeddings", {"input": ["a", "b" * (context + 9)]})
        assert error_of(response) == (
            f"text 2 has 12 tokens more than the {context:,} that are read; shorten it, or send it to /predict, which "
            "reads its beginning"
        )
        long = post(server, "/predict", {"rows": [{"question": "b" * (context + 9)}]}).json()["predictions"][0]
        assert len(long["vector"]) == len(wanted[0])
