"""Tests of predictions, metrics and answers from a server."""

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from partita import Model
from partita_schema.errors import PartitaError

from .conftest import LocalServer, answer, prompt_of

MakeFile = Callable[..., dict[str, Any]]
QUESTIONS = [{"question": f"question {n}"} for n in range(40)]


def model(file: dict[str, Any]) -> Model:
    return Model(file, quiet=True)


def test_rows_are_returned_in_input_order_with_the_token_counts_of_the_server(
    server: LocalServer, make_file: MakeFile
) -> None:
    predictions = model(make_file()).predict(QUESTIONS, "out.jsonl")
    assert [row["answer"] for row in predictions] == [f"QUESTION {n}" for n in range(40)]
    assert predictions[3] == {
        "key": "dataset:4",
        "question": "question 3",
        "answer": "QUESTION 3",
        "answer_raw": "QUESTION 3",
        "status": "ok",
        "error": None,
        "finish_reason": "stop",
        "tokens": 2,
    }
    stats = predictions.stats
    assert (stats.ok, stats.prompt_tokens, stats.generated_tokens, stats.padding) == (40, 80, 80, 0)
    assert stats.batch_size == 16
    assert stats.tokens_per_second == pytest.approx(80 / stats.seconds)
    assert set(server.paths) == {"/v1/chat/completions"}
    assert server.keys == [None] * 40


def test_a_chat_is_sent_as_messages_with_system_prompt_and_examples(server: LocalServer, make_file: MakeFile) -> None:
    prompt = {
        "system": "Be brief.",
        "template": "Say it: {question}",
        "examples": [{"question": "one", "answer": "ONE"}],
    }
    model(make_file(prompt=prompt)).predict([{"question": "two"}])
    assert server.bodies[0]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Say it: one"},
        {"role": "assistant", "content": "ONE"},
        {"role": "user", "content": "Say it: two"},
    ]


def test_a_completion_is_sent_as_one_text(server: LocalServer, make_file: MakeFile) -> None:
    prompt = {"system": "Be brief.", "template": "Say it: {question}", "chat": False}
    result = model(make_file(prompt=prompt)).predict([{"question": "two"}])
    assert server.bodies[0]["prompt"] == "Be brief.\n\nSay it: two"
    assert server.paths == ["/v1/completions"]
    assert result[0]["answer"] == "BE BRIEF.\n\nSAY IT: TWO"


@pytest.mark.parametrize("mode", ["auto", "packed_dialogue", "squash"])
def test_a_dialogue_is_sent_as_its_messages(server: LocalServer, make_file: MakeFile, mode: str) -> None:
    file = make_file(
        input_features=[{"name": "messages", "type": "dialogue"}],
        prompt={"system": "Be brief."},
        data={"dialogue": {"mode": mode}},
    )
    said = [
        {"role": "user", "content": 'one "1"'},
        {"role": "assistant", "content": "ONE\n</s>"},
        {"role": "user", "content": "two"},
    ]
    result = model(file).predict([{"messages": said}])
    assert server.bodies[0]["messages"] == [{"role": "system", "content": "Be brief."}, *said]
    assert result[0]["answer"] == "TWO"


def test_a_dialogue_with_tools_is_not_sent(server: LocalServer, make_file: MakeFile) -> None:
    file = make_file(input_features=[{"name": "messages", "type": "dialogue"}])
    tool = {"type": "function", "function": {"name": "f"}}
    rows = [{"messages": [{"role": "user", "content": "one"}], "tools": tools} for tools in ([tool], None)]

    refused, answered = model(file).predict(rows)

    assert refused["error"] == (
        "tools, tool calls and reasoning are not sent to a server; load the model in this process, or write "
        "data.dialogue: {ignore_keys: [tools, tool_calls, reasoning_content]}"
    )
    assert answered["answer"] == "ONE"


def test_a_dialogue_in_completion_mode_is_sent_as_one_text(server: LocalServer, make_file: MakeFile) -> None:
    file = make_file(
        {"mode": "completion"},
        input_features=[{"name": "messages", "type": "dialogue"}],
        data={"dialogue": {"speakers": {"user": "Q: ", "assistant": "A: "}}},
    )
    said = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "ONE"},
        {"role": "user", "content": "two"},
    ]
    model(file).predict([{"messages": said}])
    assert server.bodies[0]["prompt"] == "Q: one\nA: ONE\nQ: two\nA: "


def test_equal_prompts_are_sent_once_if_greedy_and_each_if_sampled(server: LocalServer, make_file: MakeFile) -> None:
    rows = [{"question": f"question {n % 3}"} for n in range(9)]
    assert [row["answer"] for row in model(make_file()).predict(rows)] == [f"QUESTION {n % 3}" for n in range(9)]
    assert sorted(server.asked) == ["question 0", "question 1", "question 2"]
    server.bodies.clear()
    model(make_file(generation={"do_sample": True, "seed": 5})).predict(rows)
    assert len({body["seed"] for body in server.bodies}) == len(server.bodies) == 9
    seeds = {body["seed"] for body in server.bodies}
    server.bodies.clear()
    model(make_file(generation={"do_sample": True, "seed": 5})).predict(rows, "again.jsonl")
    assert {body["seed"] for body in server.bodies} == seeds


def test_labels_are_read_and_need_as_many_tokens_as_they_have_bytes(server: LocalServer, make_file: MakeFile) -> None:
    server.reply = lambda body: answer(body, "It is good.")
    label = {"name": "label", "type": "category", "decoder": {"labels": ["bad", "good"]}}
    result = model(make_file(output_features=[label])).predict(QUESTIONS[:1])
    assert result[0]["label"] == "good"
    assert server.bodies[0]["max_tokens"] == len("good") + 8


def test_a_cut_answer_is_reported_and_log_probabilities_have_a_column(server: LocalServer, make_file: MakeFile) -> None:
    logprobs_json = {"content": [{"logprob": -0.5}, {"logprob": -1.0}]}
    server.reply = lambda body: answer(body, "so long", finish_reason="length", logprobs=logprobs_json)
    row = model(make_file(generation={"logprobs": True, "max_new_tokens": 2})).predict(QUESTIONS[:1])[0]
    assert (row["finish_reason"], row["tokens"], row["logprob"]) == ("length", 2, -1.5)
    assert server.bodies[0]["max_tokens"] == 2


def test_the_key_comes_from_the_environment(
    server: LocalServer, make_file: MakeFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", " sk-secret\n")
    model(make_file({"api_key_env": "MY_KEY", "model": "served"})).predict(QUESTIONS[:1])
    assert server.keys == ["Bearer sk-secret"]
    assert server.bodies[0]["model"] == "served"


def test_metrics_are_computed_from_answers_without_a_loss(server: LocalServer, make_file: MakeFile) -> None:
    rows = [{"question": "a", "answer": "A"}, {"question": "b", "answer": "other"}]
    scores = model(make_file()).evaluate(rows)
    assert set(scores) == {"answer"}
    assert (scores["answer"]["exact_match"], scores["answer"]["n"]) == (0.5, 2)
    assert sorted(server.asked) == ["a", "b"]


def test_metrics_of_dialogues_are_computed_from_their_answers(server: LocalServer, make_file: MakeFile) -> None:
    said = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "ONE"}]
    more = [*said, {"role": "user", "content": "two"}, {"role": "assistant", "content": "2"}]
    file = make_file(input_features=[{"name": "messages", "type": "dialogue"}])
    scores = model(file).evaluate([{"messages": more}])
    assert (scores["answer"]["exact_match"], scores["answer"]["n"]) == (0.5, 2)
    assert sorted(json.dumps(body["messages"]) for body in server.bodies) == sorted(
        json.dumps(messages) for messages in (said[:1], more[:3])
    )


def test_plain_prompts_are_sent_as_text_or_as_a_user_message(server: LocalServer, make_file: MakeFile) -> None:
    assert model(make_file({"mode": "completion"})).generate(["hello", "you"], max_new_tokens=3) == ["HELLO", "YOU"]
    assert sorted(body["prompt"] for body in server.bodies) == ["hello", "you"]
    assert server.bodies[0]["max_tokens"] == 3
    assert model(make_file()).generate("hello") == ["HELLO"]
    assert server.bodies[-1]["messages"] == [{"role": "user", "content": "hello"}]
    assert model(make_file()).generate([]) == []


def test_the_batch_size_argument_limits_concurrent_requests(server: LocalServer, make_file: MakeFile) -> None:
    assert model(make_file()).predict(QUESTIONS, batch_size=3).stats.batch_size == 3
    assert server.most_active <= 3


@pytest.mark.parametrize(
    ("verb", "text"),
    [
        (
            lambda model: model.train(),
            (
                "there is nothing to train with backend: {type: endpoint}: the model is the server's; use evaluate or "
                "predict, or remove backend"
            ),
        ),
        (
            lambda model: model.tune(),
            (
                "there is nothing to tune with backend: {type: endpoint}: the server chooses how many rows go through "
                "its model at once; backend.concurrency says how many it is asked at the same time"
            ),
        ),
        (
            lambda model: model.save("folder"),
            "there is nothing to save with backend: {type: endpoint}: the model is the server's",
        ),
        (
            lambda model: model.push_to_hub("me/model"),
            "there is nothing to save with backend: {type: endpoint}: the model is the server's",
        ),
        (
            lambda model: model.generate("hello", stream=True),
            "a server's answers come whole; leave stream out, or remove backend: {type: endpoint}",
        ),
        (lambda model: model.generate(["hello", ""]), "a prompt is empty; write at least a character"),
    ],
)
def test_unsupported_server_features_are_reported(
    server: LocalServer, make_file: MakeFile, verb: Callable[[Model], Any], text: str
) -> None:
    with pytest.raises(PartitaError) as caught:
        verb(model(make_file()))
    assert str(caught.value) == text
    assert server.bodies == []


def test_an_unusable_row_is_not_generated(server: LocalServer, make_file: MakeFile) -> None:
    rows = [{"question": "good"}, {"question": ""}, {"question": "half \ud800"}]
    results = [(row["status"], row["error"]) for row in model(make_file()).predict(rows)]
    assert results == [
        ("ok", None),
        ("skipped", "column question is missing or empty"),
        ("error", "not Unicode: half of a surrogate pair"),
    ]
    assert server.asked == ["good"]


def test_prompts_are_sent_in_the_order_of_the_data(server: LocalServer, make_file: MakeFile) -> None:
    rows = [{"question": "x" * (n * 7 % 10 + 1) + str(n)} for n in range(20)]
    model(make_file({"concurrency": 1})).predict(rows)
    assert [prompt_of(body) for body in server.bodies] == [row["question"] for row in rows]


@pytest.mark.long
def test_the_best_of_several_answers_is_kept_and_each_is_a_request_with_its_own_seed(
    server: LocalServer, make_file: MakeFile, caplog: pytest.LogCaptureFixture
) -> None:
    colours = ["red", "green", "blue", "grey", "pink"]
    pairs = [{"question": f"question {n}", "chosen": colours[n % 5], "rejected": "black"} for n in range(16)]
    scratch = {"type": "scratch", "size": "nano", "tokenizer": "word", "vocab_size": 40, "context_length": 32}
    reward = {
        "base_model": scratch,
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "preference"}],
        "trainer": {"type": "reward", "max_steps": 2, "batch_size": 8, "eval_batch_size": 8},
    }
    model(reward).train(pairs, run="rm")
    server.reply = lambda body: answer(body, colours[body["seed"] % 5])
    generation = {"do_sample": True, "best_of": 4, "reward": "rm", "keep_samples": True}
    with caplog.at_level(logging.INFO):
        rows = list(model(make_file(generation=generation)).predict(QUESTIONS[:5], "out.jsonl"))
    assert "a prompt is computed 4 times, once for each answer of best_of: on the server" in caplog.text
    assert sorted(server.asked) == sorted(row["question"] for row in QUESTIONS[:5] for _ in range(4))
    assert len({body["seed"] for body in server.bodies}) == 20
    for row in rows:
        best = max(row["samples"], key=lambda sample: float(sample["reward"]))
        assert (row["answer"], row["reward"]) == (best["text"], best["reward"])
    assert len({sample["text"] for row in rows for sample in row["samples"]}) > 2
