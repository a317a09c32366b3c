"""Tests of requests and responses, without a socket."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.backends.endpoint.protocol import (
    AnswerError,
    EndpointReply,
    error_message,
    read_messages,
    read_reply,
    request_body,
    server_options,
    written_messages,
)
from partita.backends.endpoint.server import request_seed
from partita.tokenizers.load import byte_tokenizer
from partita_schema.load import load_config

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
MESSAGES = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["system", "user"]), "content": TEXT}))
BYTES = byte_tokenizer()


def body(prompt: str = "hello", mode: Any = "completion", extra: Any = None, **generation: Any) -> dict[str, Any]:
    config = load_config(
        {
            "base_model": "m",
            "input_features": [{"name": "a", "type": "text"}],
            "output_features": [{"name": "b", "type": "text"}],
            "generation": generation,
            "backend": {"type": "endpoint", "url": "http://host/v1"},
        }
    ).config
    options = server_options(config)
    return request_body(prompt, options, model="m", mode=mode, max_new_tokens=9, seed=7, extra=extra or {})


@given(MESSAGES)
def test_messages_are_restored_unchanged(messages: list[dict[str, str]]) -> None:
    assert read_messages(written_messages(messages)) == messages


@given(MESSAGES, MESSAGES)
def test_the_encoding_of_a_longer_dialogue_starts_with_that_of_the_shorter_one(
    first: list[Any], more: list[Any]
) -> None:
    assert written_messages([*first, *more]).startswith(written_messages(first))


@given(st.one_of(TEXT, st.lists(st.sampled_from(["</s>", "<pad>", " ", "\n", "é", "\x85"])).map("".join)))
def test_a_prompt_stored_as_bytes_is_restored_unchanged(text: str) -> None:
    ids = BYTES([text], add_special_tokens=False)["input_ids"][0] if text else []
    assert BYTES.decode(ids, skip_special_tokens=False) == text


def test_a_greedy_request_has_temperature_zero_and_no_seed() -> None:
    assert body() == {"model": "m", "prompt": "hello", "max_tokens": 9, "temperature": 0.0}


def test_a_chat_sends_messages() -> None:
    messages = [{"role": "user", "content": "hello"}]
    sent = body(written_messages(messages), mode="chat", logprobs=True)
    assert (sent["messages"], sent["logprobs"], "prompt" in sent) == (messages, True, False)


def test_every_option_is_sent_with_the_name_in_the_protocol() -> None:
    sent = body(
        do_sample=True,
        temperature=0.5,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        min_new_tokens=4,
        stop=["###"],
        stop_token_ids=[3],
        logprobs=True,
    )
    assert sent == {
        "model": "m",
        "prompt": "hello",
        "max_tokens": 9,
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "min_tokens": 4,
        "seed": 7,
        "stop": ["###"],
        "stop_token_ids": [3],
        "logprobs": 1,
    }


def test_sampling_sends_all_options_explicitly() -> None:
    sent = body(do_sample=True)
    assert (sent["temperature"], sent["top_p"]) == (1.0, 1.0)


def test_an_extra_body_adds_and_removes_keys() -> None:
    sent = body(extra={"max_tokens": None, "max_completion_tokens": 9, "priority": 1})
    assert sent == {
        "model": "m",
        "prompt": "hello",
        "temperature": 0.0,
        "max_completion_tokens": 9,
        "priority": 1,
    }


def test_rows_have_separate_seeds_that_any_server_accepts() -> None:
    seeds = {request_seed(seed, bytes([row])) for seed in range(10) for row in range(100)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**31 for seed in seeds)


def reply(choice: Any, *, mode: Any = "chat", logprobs: bool = False, **response: Any) -> EndpointReply:
    return read_reply(json.dumps({"choices": [choice], **response}).encode(), mode=mode, logprobs=logprobs)


def test_an_answer_has_text_reason_and_counts() -> None:
    choice = {"message": {"content": "hi"}, "finish_reason": "length"}
    result = reply(choice, usage={"prompt_tokens": 3, "completion_tokens": 2})
    assert (result.generated.text, result.generated.finish_reason, result.generated.num_tokens) == ("hi", "length", 2)
    assert (result.prompt_tokens, result.tokens, result.generated.logprob) == (3, 5, None)


@pytest.mark.parametrize("usage", [None, [], {}, {"completion_tokens": "many"}])
def test_token_counts_are_optional(usage: Any) -> None:
    result = reply({"text": "hi", "finish_reason": None}, mode="completion", usage=usage)
    assert (result.generated.text, result.generated.finish_reason, result.tokens) == ("hi", "stop", 0)


def test_log_probabilities_are_added_up() -> None:
    chat = {"message": {"content": "hi"}, "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.0}]}}
    assert reply(chat, logprobs=True).generated.logprob == -1.5
    completion = {"text": "hi", "logprobs": {"token_logprobs": [None, -0.25]}}
    assert reply(completion, mode="completion", logprobs=True).generated.logprob == -0.25


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ({"choices": []}, 'the server\'s response holds no answer: {"choices": []}'),
        ([1], "the server's response holds no answer: [1]"),
        (
            {"choices": [{"message": "x"}]},
            'the server\'s response holds no answer: {"choices": [{"message": "x"}]}',
        ),
        (
            {"choices": [{"message": {"content": None}, "finish_reason": "content_filter"}]},
            "the server withheld the answer (finish_reason content_filter)",
        ),
        (
            {"choices": [{"message": {"content": None, "refusal": "I must\nnot"}, "finish_reason": "stop"}]},
            "the model refused: I must\nnot",
        ),
        (
            {"choices": [{"message": {"content": None}, "finish_reason": "length"}]},
            (
                "the server gave no text: thinking took all the tokens; write a larger generation.max_new_tokens, or "
                "turn it off, such as by backend.extra_body: {chat_template_kwargs: {enable_thinking: false}}"
            ),
        ),
        (
            {"choices": [{"message": {"content": None}, "finish_reason": "tool_calls"}]},
            "the server gave no text (finish_reason tool_calls)",
        ),
        (
            {"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]},
            "the server gave no log probabilities; remove generation.logprobs",
        ),
        (
            {"choices": [{"message": {"content": "hi"}, "logprobs": {"content": []}, "finish_reason": "stop"}]},
            "the server gave no log probabilities; remove generation.logprobs",
        ),
    ],
)
def test_a_response_without_an_answer_is_reported_with_the_reason(response: Any, text: str) -> None:
    with pytest.raises(AnswerError) as caught:
        read_reply(json.dumps(response).encode(), mode="chat", logprobs=True)
    assert str(caught.value) == text


@given(
    st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner))
)
def test_any_json_is_read_or_reported(response: Any) -> None:
    for choice in (response, {"message": response}, {"text": response}, {"text": "x", "logprobs": response}):
        for mode in ("chat", "completion"):
            try:
                body = json.dumps({"choices": [choice], "usage": response}).encode()
                result = read_reply(body, mode=mode, logprobs=True)  # type: ignore[arg-type]
            except AnswerError:
                continue
            assert isinstance(result.generated.text, str)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"error": {"message": "too long", "code": "context"}}, ("too long", "context")),
        ({"error": {"message": "too long", "type": "bad"}}, ("too long", "bad")),
        ({"error": "too long"}, ("too long", "")),
        ({"message": "too\n long"}, ("too\n long", "")),
        ({"detail": [{"loc": ["body"]}]}, ("[{'loc': ['body']}]", "")),
        ({"other": 1}, ('{"other": 1}', "")),
        ([], ("[]", "")),
    ],
)
def test_errors_are_read_in_all_formats_of_servers(body: Any, expected: tuple[str, str]) -> None:
    assert error_message(json.dumps(body)) == expected


def test_an_error_without_json_is_reported_as_text() -> None:
    assert error_message("<html>busy</html>") == ("<html>busy</html>", "")
    assert error_message("") == ("no message", "")
    assert error_message("[" * 100_000)[1] == ""


@pytest.mark.parametrize("count", [10**401, -1, True, 1.5, float("nan"), 10**8])
def test_impossible_counts_are_ignored(count: Any) -> None:
    result = reply({"message": {"content": "hi"}}, usage={"prompt_tokens": count, "completion_tokens": count})
    assert (result.generated.text, result.tokens) == ("hi", 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, "x"])
def test_invalid_log_probabilities_are_refused(value: Any) -> None:
    choice = {"message": {"content": "hi"}, "logprobs": {"content": [{"logprob": value}]}}
    with pytest.raises(AnswerError, match="log probabilit"):
        reply(choice, logprobs=True)


def test_an_answer_too_long_for_its_token_count_is_refused() -> None:
    body = json.dumps({"choices": [{"text": "x" * 5000}]}).encode()
    with pytest.raises(AnswerError, match=r"^the answer has 5,000 characters, which 2 tokens cannot be$"):
        read_reply(body, mode="completion", logprobs=False, max_tokens=2)
    assert len(read_reply(body, mode="completion", logprobs=False, max_tokens=20).generated.text) == 5000


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"[" * 100_000, "the server's response is nested too deeply"),
        (b'{"a": "\xff"}', 'the server\'s response is not JSON: {"a": "\ufffd"}'),
        (b'{"a": ' + b"1" * 5000 + b"}", 'the server\'s response is not JSON: {"a": 1111'),
        (b"", "the server's response is not JSON: "),
    ],
)
def test_invalid_json_is_reported(body: bytes, expected: str) -> None:
    with pytest.raises(AnswerError) as caught:
        read_reply(body, mode="chat", logprobs=False)
    assert str(caught.value).startswith(expected)
