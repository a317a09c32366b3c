"""Tests of the rules for configurations with `backend: {type: endpoint}`."""

from typing import Any

import pytest

from partita_schema.errors import ConfigError
from partita_schema.load import load_config
from partita_schema.rules.endpoint import NOT_ON_SERVERS, sends_chat
from partita_schema.sections.prompt import Generation

FILE: dict[str, Any] = {
    "base_model": "m",
    "input_features": [{"name": "a", "type": "text"}],
    "output_features": [{"name": "b", "type": "text"}],
    "backend": {"type": "endpoint", "url": "http://localhost:8000/v1/"},
}
VLLM = (
    "vllm pins its own torch and transformers, so it runs as a server next to partita: start `vllm serve MODEL`, and "
    "write backend: {type: endpoint, url: http://localhost:8000/v1}"
)
SGLANG = (
    "sglang pins its own torch and transformers, so it runs as a server next to partita: start "
    "`python -m sglang.launch_server --model-path MODEL`, and write backend: {type: endpoint, "
    "url: http://localhost:30000/v1}"
)


def problem_text(**sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(FILE | sections)
    assert len(caught.value.problems) == 1
    return str(caught.value)


def backend(**keys: Any) -> dict[str, Any]:
    return {"backend": FILE["backend"] | keys}


def test_a_server_needs_only_its_address() -> None:
    result = load_config(FILE).config.backend
    assert result.model_dump() == {
        "type": "endpoint",
        "url": "http://localhost:8000/v1",
        "model": None,
        "api_key_env": None,
        "mode": None,
        "concurrency": 16,
        "requests_per_minute": None,
        "tokens_per_minute": None,
        "timeout_seconds": 600.0,
        "max_response_mb": 16.0,
        "retries": 5,
        "extra_body": {},
    }


@pytest.mark.parametrize(("kind", "text"), [("vllm", VLLM), ("sglang", SGLANG)])
def test_names_of_inference_engines_are_refused_with_advice(kind: str, text: str) -> None:
    assert problem_text(backend={"type": kind}) == f"backend.type: {text}"
    assert problem_text(backend=kind) == f"backend: {text}"
    # A Ludwig file has no version; its backends are different.
    assert problem_text(backend={"type": kind}, model_type="llm") == f"backend.type: {text}"


def test_a_configuration_without_a_version_keeps_its_endpoint_backend() -> None:
    loaded = load_config(FILE | {"model_type": "llm"})
    assert (loaded.config.backend.type, loaded.warnings) == ("endpoint", ())


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (
            {"url": "localhost:8000"},
            "backend.url: write an address with http:// or https://, such as http://localhost:8000/v1",
        ),
        (
            {"url": "http://ex ample/v1"},
            "backend.url: write an address with http:// or https://, such as http://localhost:8000/v1",
        ),
        (
            {"url": "http://host:port/v1"},
            (
                "backend.url: write an address with http:// or https://, such as http://localhost:8000/v1; got one "
                "with a mistake: Port could not be cast to integer value as 'port'"
            ),
        ),
        (
            {"url": "https://me:secret@host/v1"},
            "backend.url: a key has no place in the address; write api_key_env, the name of an environment variable",
        ),
        (
            {"url": "http://host/v1?version=1"},
            "backend.url: write the address alone, without ? and # and what follows",
        ),
        (
            {"url": "http://host/v1/chat/completions"},
            "backend.url: write the address without /chat/completions, which is added by mode",
        ),
        (
            {"url": "http://host/v1/completions/"},
            "backend.url: write the address without /completions, which is added by mode",
        ),
        (
            {"extra_body": {"messages": []}},
            "backend.extra_body.messages: messages has its own key; remove it, and write prompt",
        ),
        (
            {"extra_body": {"n": 2}},
            "backend.extra_body.n: n would change what an answer is: one text, whole; remove it",
        ),
        ({"concurrency": 0}, "backend.concurrency: write an integer of at least 1; got 0"),
        ({"timeout_seconds": 0}, "backend.timeout_seconds: write a number above 0; got 0"),
    ],
)
def test_the_address_and_the_body_are_checked(keys: dict[str, Any], text: str) -> None:
    assert problem_text(**backend(**keys)) == text


def test_an_api_key_in_the_configuration_is_refused_without_showing_it() -> None:
    text = problem_text(**backend(api_key_env="sk-very-secret"))
    assert text == (
        "backend.api_key_env: write the name of an environment variable, such as OPENAI_API_KEY; the key itself must "
        "not be in the file"
    )


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        (
            {"trainer": {"type": "finetune"}},
            "trainer.type: a server is only queried, never trained; write type: none, or remove backend",
        ),
        (
            {"base_model": {"type": "scratch"}},
            "base_model: a server has its model already; write the name that the server knows it by",
        ),
        (
            {"adapter": {"type": "lora"}},
            (
                "adapter: the server's model is as the server loads it; remove adapter, and give it to the server "
                "at its start"
            ),
        ),
        (
            {"quantization": {"bits": 4}},
            (
                "quantization: the server's model is as the server loads it; remove quantization, and give it to the "
                "server at its start"
            ),
        ),
        (
            {"model_parameters": {"dtype": "bfloat16"}},
            "model_parameters.dtype: the model is loaded by the server; remove dtype",
        ),
        ({"trust_remote_code": True}, "trust_remote_code: the model is loaded by the server; remove it"),
        (
            {"trainer": {"type": "none", "batch_size": 4}},
            "trainer.batch_size: the server makes its own batches; remove batch_size, and write backend.concurrency",
        ),
        (
            {"prompt": {"chat": True}} | backend(mode="completion"),
            "backend.mode: completion sends no chat; write mode: chat, or remove prompt.chat",
        ),
        (
            {"prompt": {"chat": False}} | backend(mode="chat"),
            "backend.mode: chat sends messages, and prompt.chat is false; write mode: completion, or remove one",
        ),
        (
            {"data": {"formatter": "mine:Shaper"}},
            (
                "data.formatter: a custom formatter needs the tokenizer, which the server has; remove it, and write "
                "prompt"
            ),
        ),
        (
            {
                "input_features": [{"name": "a", "type": "dialogue"}],
                "data": {"dialogue": {"mode": "packed_dialogue"}},
            }
            | backend(mode="completion"),
            (
                "data.dialogue.mode: packed_dialogue ends each answer with a token, and text is sent here; write mode: "
                "squash, or backend.mode: chat"
            ),
        ),
        (
            {"input_features": [{"name": "a", "type": "text", "preprocessing": {"max_sequence_length": 9}}]},
            (
                "input_features[0].preprocessing.max_sequence_length: tokens are counted by the server, which has the "
                "tokenizer; remove it, and shorten the column"
            ),
        ),
        (
            {"preprocessing": {"global_max_sequence_length": 9}},
            (
                "preprocessing.global_max_sequence_length: tokens are counted by the server, which has the tokenizer; "
                "remove it; rows that are too long are reported as errors"
            ),
        ),
        (
            {
                "input_features": [{"name": "a", "type": "dialogue"}],
                "data": {"dialogue": {"mode": "squash", "context_tokens": 9}},
            },
            (
                "data.dialogue.context_tokens: tokens are counted by the server, which has the tokenizer; remove it, "
                "and write context_turns or context_length"
            ),
        ),
        (
            {"prompt": {"chat_template_kwargs": {"enable_thinking": True}}},
            (
                "prompt.chat_template_kwargs: the chat template is applied by the server; remove it, and write "
                "backend.extra_body: {chat_template_kwargs: ...}"
            ),
        ),
        (
            {"data": {"encode": "cache"}},
            (
                "data.encode: tokens are counted by the server, which has the tokenizer, so there are none to keep; "
                "remove it"
            ),
        ),
        ({"generation": {"slots": False}}, "generation.slots: the server makes its own batches; remove it"),
        ({"generation": {"kv_cache": "paged"}}, "generation.kv_cache: the server manages the KV cache; remove it"),
    ],
)
def test_settings_for_local_models_are_refused(sections: dict[str, Any], text: str) -> None:
    assert problem_text(**sections) == text


VALUES: dict[str, Any] = {
    "num_beams": 2,
    "no_repeat_ngram_size": 2,
    "exponential_decay_length_penalty": [1, 1.1],
    "suppress_tokens": [1],
    "begin_suppress_tokens": [1],
    "bad_words": ["x"],
    "renormalize_logits": True,
    "guidance_scale": 2.0,
}
ALL_SENT = {
    "max_new_tokens": 9,
    "min_new_tokens": 1,
    "do_sample": True,
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "stop": ["x"],
    "stop_token_ids": [1],
    "logprobs": True,
    "seed": 1,
}


@pytest.mark.parametrize("key", NOT_ON_SERVERS)
def test_options_that_cannot_be_sent_are_refused(key: str) -> None:
    generation = {key: VALUES.get(key, 0.5)} | ({} if key in VALUES else {"do_sample": True})
    assert problem_text(generation=generation) == (
        f"generation.{key}: the protocol of servers has no {key}; remove it, or write in backend.extra_body what your "
        "server calls it"
    )


def test_every_option_of_generation_is_sent_or_refused() -> None:
    assert load_config(FILE | {"generation": ALL_SENT}).config.generation.top_k == 5
    beams = {"length_penalty", "early_stopping"}  # need num_beams
    samples = {"best_of", "reward", "keep_samples"}  # are separate requests
    assert {*ALL_SENT, *NOT_ON_SERVERS, "slots", "kv_cache", "defaults"} | beams | samples == set(
        Generation.model_fields
    )


def test_a_server_applies_the_defaults_of_its_own_checkpoint() -> None:
    assert problem_text(generation={"defaults": "none"}) == (
        "generation.defaults: the server applies the defaults of its checkpoint; remove it, and start vLLM with "
        "--generation-config vllm"
    )
    off = {"num_beams": 1, "do_sample": False, "renormalize_logits": False, "stop": []}
    assert load_config(FILE | {"generation": off}).config.generation.num_beams == 1


@pytest.mark.parametrize(
    ("chat", "mode", "sent"),
    [
        ("auto", None, True),
        (True, None, True),
        (False, None, False),
        ("auto", "completion", False),
        ("auto", "chat", True),
    ],
)
def test_messages_are_sent_by_default(chat: Any, mode: str | None, sent: bool) -> None:
    config = load_config(FILE | {"prompt": {"chat": chat}} | backend(mode=mode)).config
    assert sends_chat(config) is sent
