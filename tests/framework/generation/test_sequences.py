"""Tests of outputs that are answered one after the other: equal to a loop by hand, in any batch, and after failures."""

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from partita.data.formatting.build import build_row_tokenizer
from partita.data.formatting.row_tokenizer import PromptExample, RowTokenizer
from partita.data.rows import ListStore, RowKeys, Rows
from partita.generation.best_of import BestOf
from partita.generation.encoded_prompts import EncodedPrompts
from partita.generation.generator import LocalGenerator, generate_requests
from partita.generation.job import Tally
from partita.generation.oom_backoff import BatchBudget
from partita.generation.predict import PredictionFiles, generate_for_rows, predict_rows
from partita.generation.requests import GenerationSettings
from partita.generation.sequences import OutputPrompts
from partita.lm.base import GenerationOptions, GenerationRequest, SlotRequest
from partita.lm.slots.slots import Slots
from partita.pipeline.build import Pipeline, assemble_pipeline
from partita.pipeline.fingerprint import answer_fingerprint
from partita_schema.config import Config
from partita_schema.rows import row_schema

from ..lm.conftest import SCRATCH, load, sharpen
from .test_best_of import Rule

LABELS = ("ask", "tell", "offer")
STATE = {
    "name": "state",
    "type": "json",
    "decoder": {
        "constrain": True,
        "json_schema": {
            "type": "object",
            "properties": {"area": {"enum": ["north", "south"]}, "stars": {"enum": [1, 2, 3]}},
            "required": ["area"],
            "additionalProperties": False,
        },
        "max_new_tokens": 40,
    },
}
ACTION = {"name": "action", "type": "category", "decoder": {"labels": LABELS, "scoring": True}}
REPLY = {"name": "reply", "type": "text", "column": "content", "decoder": {"max_new_tokens": 6}}
FREE = {"name": "state", "type": "text", "decoder": {"max_new_tokens": 4}}
SHORT = REPLY | {"decoder": {"max_new_tokens": 3}}
SPEAKERS = {"speakers": {"user": "U: ", "assistant": "A: "}}


def config_of(*outputs: dict[str, Any], context_length: int = 256, **sections: Any) -> Config:
    return Config.model_validate(
        {
            "base_model": SCRATCH | {"architecture": "llama", "context_length": context_length},
            "input_features": [{"name": "messages", "type": "dialogue"}],
            "output_features": list(outputs or (STATE, ACTION, REPLY)),
            "data": {"dialogue": {"answers": "in_sequence", **SPEAKERS}},
            "trainer": {"type": "none"},
            **sections,
        }
    )


@pytest.fixture(scope="module")
def lm() -> Any:
    model = load(config_of(), trainable=False)
    sharpen(model.module)
    return model


def pipeline_of(lm: Any, config: Config) -> Pipeline:
    context = getattr(config.base_model, "context_length", None)
    row_tokenizer = build_row_tokenizer(config, tokenizer=lm.tokenizer, context_length=context)
    return assemble_pipeline(config, lm, LocalGenerator(lm), row_tokenizer, folder=Path(), labels={"action": LABELS})


def dialogues(count: int, *, longest: int = 40) -> list[dict[str, Any]]:
    draw = random.Random(3)
    texts = ["".join(draw.choices("abcdefgh ", k=draw.randint(3, longest))) for _ in range(count)]
    return [{"messages": [{"role": "user", "content": text}]} for text in texts]


def rows_of(values: Sequence[dict[str, Any]]) -> Rows:
    return Rows(ListStore(values), columns=["messages"], keys=RowKeys.counted("rows", len(values)), fingerprint="f")


def answers_of(
    pipeline: Pipeline, rows: Rows, *, batch_size: int = 4, budget: BatchBudget | None = None
) -> dict[int, dict[str, Any]]:
    """Return the texts of all outputs, or the error, of each row."""
    results = {}
    for answer in generate_for_rows(pipeline, rows, budget=budget or BatchBudget(batch_size)):
        assert answer.row not in results
        text = answer.record.text
        results[answer.row] = {"error": answer.record.error} if text is None else json.loads(text)
    return results


def by_hand(lm: Any, pipeline: Pipeline, row: dict[str, Any]) -> dict[str, str]:
    """Return the texts of a row's outputs, each generated alone after the ones before it, from its text."""
    assert pipeline.sequence is not None
    texts: dict[str, str] = {}
    clean = row_schema(pipeline.config, supervised=False).load(row)
    for index, name in enumerate(pipeline.sequence.names):
        prompt = pipeline.row_tokenizer.encode_next_output(clean, texts, key="k", earlier_ids=(), earlier_text="")
        texts[name] = alone(lm, pipeline, prompt, index)
    return texts


def alone(lm: Any, pipeline: Pipeline, prompt: PromptExample, index: int) -> str:
    assert pipeline.sequence is not None
    constraint = pipeline.generation.constraints[index]
    if constraint.labels:
        scores = scores_by_hand(lm, prompt.input_ids)
        return max(scores, key=lambda label: scores[label])
    options = replace(pipeline.generation, constraints=(), grammar=constraint.grammar)
    request = GenerationRequest(prompt.input_ids, pipeline.sequence.new_tokens[index])
    [answer] = generate_requests(lm, [request], GenerationSettings(options, BatchBudget(1), seed=1))
    return answer.text


def scores_by_hand(lm: Any, prompt: Sequence[int]) -> dict[str, float]:
    """Return the log probability of each label and the end token after a prompt, in a separate pass."""
    scores = {}
    for label in LABELS:
        ids = [*lm.tokenizer.encode(label, add_special_tokens=False), lm.tokenizer.eos_token_id]
        with lm.evaluating(), torch.no_grad():
            logits_TV = lm.base(input_ids=torch.tensor([[*prompt, *ids]])).logits[0].double().log_softmax(-1)
        places = range(len(prompt) - 1, len(prompt) + len(ids) - 1)
        scores[label] = sum(float(logits_TV[place, token]) for place, token in zip(places, ids, strict=True))
    return scores


@contextmanager
def passes_of(lm: Any) -> Iterator[list[tuple[int, int]]]:
    """Yield the shapes of all forward passes in this context."""
    shapes: list[tuple[int, int]] = []
    hook = lm.base.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    try:
        yield shapes
    finally:
        hook.remove()


def test_outputs_equal_those_that_are_generated_alone_one_after_the_other(lm: Any) -> None:
    pipeline, values = pipeline_of(lm, config_of()), dialogues(6)

    answers = answers_of(pipeline, rows_of(values), batch_size=3)

    assert len({json.dumps(answer) for answer in answers.values()}) > 1, "the answers should differ"
    assert answers == {number: by_hand(lm, pipeline, row) for number, row in enumerate(values)}


def test_the_probabilities_of_a_label_in_a_sequence_equal_those_by_hand(lm: Any) -> None:
    pipeline, values = pipeline_of(lm, config_of()), dialogues(5)

    for answer in generate_for_rows(pipeline, rows_of(values), budget=BatchBudget(3)):
        texts, scores = json.loads(answer.record.text or ""), answer.record.scores
        clean = row_schema(pipeline.config, supervised=False).load(values[answer.row])
        state = {"state": texts["state"]}
        prompt = pipeline.row_tokenizer.encode_next_output(clean, state, key="k", earlier_ids=(), earlier_text="")
        assert scores is not None
        assert list(scores) == ["action"]
        assert scores["action"] == pytest.approx(scores_by_hand(lm, prompt.input_ids), abs=1e-3)


@pytest.mark.parametrize("batch_size", [1, 5, 16])
@pytest.mark.parametrize("sampled", [False, True])
def test_answers_do_not_depend_on_the_batch_size(lm: Any, batch_size: int, sampled: bool) -> None:
    outputs = (STATE, ACTION, REPLY, REPLY | {"name": "more"})
    generation = {"generation": {"do_sample": True}} if sampled else {}
    pipeline, rows = pipeline_of(lm, config_of(*outputs, **generation)), rows_of(dialogues(8, longest=20))

    answers = answers_of(pipeline, rows, batch_size=batch_size)

    assert answers == answers_of(pipeline, rows, batch_size=3)
    if sampled:
        assert any(answer["reply"] != answer["more"] for answer in answers.values()), "each output has its own numbers"


def test_a_row_keeps_its_cache_from_output_to_output(lm: Any) -> None:
    pipeline = pipeline_of(lm, config_of())
    assert pipeline.sequence is not None
    [row] = [{"messages": [{"role": "user", "content": "a long question " * 8}]}]

    with passes_of(lm) as shapes:
        answers_of(pipeline, rows_of([row]), batch_size=1)

    wide = [tokens for _, tokens in shapes if tokens >= 100]
    assert len(wide) == 1, "only the first prompt is computed as a whole"
    assert all(tokens <= 64 for _, tokens in shapes if tokens < 100)


def questions_on_documents(documents: int, *, questions: int) -> list[dict[str, Any]]:
    """Return rows with a long document and a question of a few characters each, in mixed order."""
    draw, texts = random.Random(5), []
    for _ in range(documents):
        document = "".join(draw.choices("abcdefgh ", k=90))
        texts += [document + "".join(draw.choices("abcdefgh ", k=draw.randint(3, 9))) for _ in range(questions)]
    return [{"messages": [{"role": "user", "content": text}]} for text in draw.sample(texts, len(texts))]


@pytest.fixture(scope="module")
def questions(lm: Any) -> tuple[list[dict[str, Any]], dict[int, Any]]:
    """Return rows that begin alike, and their answers in batches without a KV cache that outlasts them."""
    values = questions_on_documents(3, questions=4)
    return values, answers_of(pipeline_of(lm, config_of(FREE, SHORT, generation={"slots": False})), rows_of(values))


@pytest.mark.parametrize(("kv_cache", "batch_size"), [("slots", 1), ("slots", 20), ("paged", 3)])
def test_what_prompts_have_in_common_is_computed_once(
    lm: Any, questions: tuple[Any, Any], kv_cache: str, batch_size: int
) -> None:
    values, expected = questions
    pipeline = pipeline_of(lm, config_of(FREE, SHORT, generation={"kv_cache": kv_cache}))
    answers_of(pipeline, rows_of(values[:1]))  # the model is checked in its first job

    with passes_of(lm) as shapes:
        answers = answers_of(pipeline, rows_of(values), batch_size=batch_size)

    assert answers == expected
    ends = len(values) * (9 + 14) + len(values) * 14  # questions, what asks for the second output, and answers
    assert sum(rows * tokens for rows, tokens in shapes) < 3 * 106 + ends + 70, "each document is computed once"


def test_rows_that_begin_alike_start_again_if_memory_runs_out(
    lm: Any, questions: tuple[Any, Any], memory_ceiling: Any
) -> None:
    values, expected = questions
    pipeline, budget = pipeline_of(lm, config_of(FREE, SHORT)), BatchBudget(12)

    with memory_ceiling(lm.base, 1100):
        answers = answers_of(pipeline, rows_of(values), budget=budget)

    assert budget.out_of_memory > 0
    assert answers == expected


def test_rows_with_equal_prompts_are_answered_once(lm: Any) -> None:
    pipeline, values = pipeline_of(lm, config_of()), dialogues(2) * 3

    with passes_of(lm) as shapes:
        answers = answers_of(pipeline, rows_of(values), batch_size=6)

    assert all(answers[number] == answers[number % 2] for number in range(6))
    assert max(rows for rows, _ in shapes) <= 2


def test_without_slots_the_outputs_of_a_batch_are_answered_one_after_the_other(lm: Any) -> None:
    free = {"name": "state", "type": "json", "decoder": {"max_new_tokens": 12}}
    action = {"name": "action", "type": "category", "decoder": {"labels": LABELS}}
    rows = rows_of(dialogues(5))
    slots, static = (
        pipeline_of(lm, config_of(free, action, REPLY, generation={"slots": value})) for value in (True, False)
    )

    assert answers_of(static, rows) == answers_of(slots, rows)


def test_less_memory_than_planned_changes_no_answer(lm: Any, memory_ceiling: Any) -> None:
    pipeline, rows = pipeline_of(lm, config_of()), rows_of(dialogues(8))
    wanted, budget = answers_of(pipeline, rows, batch_size=2), BatchBudget(8)

    with memory_ceiling(lm.base, 1100):
        answers = answers_of(pipeline, rows, budget=budget)

    assert budget.out_of_memory > 0
    assert answers == wanted


@pytest.mark.parametrize("slots", [True, False])
def test_the_best_of_several_turns_is_kept_for_any_batch_size_and_memory(
    lm: Any, memory_ceiling: Any, slots: bool
) -> None:
    outputs, rows = (REPLY, REPLY | {"name": "more"}), rows_of(dialogues(5, longest=20))
    pipeline = pipeline_of(lm, config_of(*outputs, generation={"do_sample": True, "slots": slots}))
    rule = Rule(lambda row, answer: float(sum(map(ord, answer)) % 97))
    best = replace(pipeline, best_of=BestOf(3, rule, keep_samples=True))
    budget = BatchBudget(8)

    answers = answers_of(best, rows, batch_size=2)

    assert answers_of(best, rows, batch_size=16) == answers
    with memory_ceiling(lm.base, 500 if slots else 150):
        assert answers_of(best, rows, budget=budget) == answers
    assert budget.out_of_memory > 0
    first = answers_of(pipeline, rows)
    assert set(answers[0]) == {"reply", "more"}
    assert sum(answers[row] != first[row] for row in first) >= 2
    for answer in generate_for_rows(best, rows, budget=BatchBudget(4)):
        samples = answer.record.samples
        assert samples is not None
        assert json.loads(samples[0]["text"]) == first[answer.row]
        assert answer.record.reward == max(sample["reward"] for sample in samples)


def test_a_row_whose_context_is_full_names_the_output_without_room(lm: Any) -> None:
    free = {"name": "state", "type": "json", "decoder": {"max_new_tokens": 12}}
    pipeline = pipeline_of(lm, config_of(free, REPLY))
    values = [*dialogues(2), {"messages": [{"role": "user", "content": "x" * 235}]}]

    answers = answers_of(pipeline, rows_of(values))

    assert list(answers[0]) == ["state", "reply"]
    assert "reply: the prompt has" in answers[2]["error"]
    assert answers[2]["error"].endswith("tokens, and the context holds 256; nothing can be answered")


def test_tokens_before_a_chosen_label_stay_as_they_were_generated(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Bytes that are no character become the three bytes of U+FFFD in the text.
    free = {"name": "state", "type": "text", "decoder": {"max_new_tokens": 30}}
    pipeline = pipeline_of(lm, config_of(free, ACTION, REPLY))
    asked, encode = [], RowTokenizer.encode_next_output

    def spied(self: Any, row: Any, answered: Any, **given: Any) -> PromptExample:
        prompt = encode(self, row, answered, **given)
        asked.append((str(row), dict(answered), tuple(given["earlier_ids"]), tuple(prompt.input_ids)))
        return prompt

    monkeypatch.setattr(RowTokenizer, "encode_next_output", spied)
    answers = answers_of(pipeline, rows_of(dialogues(3)))

    assert all("reply" in answer for answer in answers.values()), answers
    assert any("\ufffd" in answer["state"] for answer in answers.values()), "no answer has other tokens than its text"
    second = {row: ids for row, answered, _, ids in asked if list(answered) == ["state"]}
    third = [one for one in asked if list(one[1]) == ["state", "action"]]
    assert len(second) == len(third) == 3
    for row, answered, before, _ in third:
        assert before == (*second[row], *lm.tokenizer.encode(answered["action"], add_special_tokens=False))


def test_a_row_without_room_within_its_own_limits_names_them(lm: Any) -> None:
    pipeline, rows = pipeline_of(lm, config_of(FREE, REPLY)), rows_of(dialogues(1))
    encoded = EncodedPrompts(rows, pipeline.row_tokenizer, pipeline.row_schema)
    job = pipeline.prediction_job(encoded, lambda prompts: BatchBudget(4), rows=rows).generation
    prompts = OutputPrompts(lm, job)

    assert prompts.no_room(0, 9_000) == (
        f"the prompt has 9,000 tokens, and this prompt and all answers to it may have {prompts.room[0]}; "
        "nothing can be answered"
    )


def test_a_row_without_room_changes_no_other_answer_of_its_batch(lm: Any) -> None:
    free = {"name": "state", "type": "text", "decoder": {"max_new_tokens": 12}}
    rows = rows_of([*dialogues(2), {"messages": [{"role": "user", "content": "x" * 235}]}])
    slots, static = (pipeline_of(lm, config_of(free, REPLY, generation={"slots": value})) for value in (True, False))

    answers = answers_of(static, rows)

    assert "reply: the prompt has" in answers[2]["error"]
    assert answers == answers_of(slots, rows)
    assert max(len(answers[row]["state"]) for row in (0, 1)) > REPLY["decoder"]["max_new_tokens"]


@pytest.mark.parametrize(
    ("changes", "changed"),
    [
        ({"preprocessing": {"global_max_sequence_length": 50}}, "preprocessing.global_max_sequence_length"),
        ({"output_features": [STATE | {"decoder": {"max_new_tokens": 6}}, ACTION, REPLY]}, "turns"),
    ],
)
def test_lengths_are_part_of_the_fingerprint_of_answers(lm: Any, changes: dict[str, Any], changed: str) -> None:
    rows, outputs = rows_of(dialogues(2)), [STATE | {"decoder": {"max_new_tokens": 40}}, ACTION, REPLY]
    before, after = (
        answer_fingerprint(pipeline_of(lm, config_of(**sections)), rows, result=None, folder=Path())
        for sections in ({"output_features": outputs}, {"output_features": outputs} | changes)
    )
    assert {name for name in {*before, *after} if before.get(name) != after.get(name)} == {changed}


def test_a_job_continues_with_the_rows_that_are_missing_in_its_journal(lm: Any, tmp_path: Path) -> None:
    pipeline, rows = pipeline_of(lm, config_of()), rows_of(dialogues(6))
    files = PredictionFiles(journal=tmp_path / "journal.jsonl", fingerprint={"model": "m"})
    whole = list(predict_rows(pipeline, rows, files, budget=lambda prompts: BatchBudget(3)))
    lines = files.journal.read_bytes().splitlines(keepends=True)
    files.journal.write_bytes(b"".join(lines[:-3]) + lines[-3][:20])  # as after a kill while a line was written

    resumed = predict_rows(pipeline, rows, files, budget=lambda prompts: BatchBudget(2))

    assert resumed.stats.resumed == 3
    texts = ("key", "state_raw", "action_raw", "reply_raw", "tokens", "finish_reason", "status")
    assert [[row[name] for name in texts] for row in resumed] == [[row[name] for name in texts] for row in whole]
    for row, before in zip(resumed, whole, strict=True):
        assert row["action_probabilities"] == pytest.approx(before["action_probabilities"], abs=1e-4)
    assert set(resumed.columns) >= {
        "state",
        "state_raw",
        "action",
        "action_probability",
        "action_probabilities",
        "reply",
    }
    for row in resumed:
        assert row["action_probability"] == max(row["action_probabilities"].values())
        assert row["state"] == json.loads(row["state_raw"])


@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize("place", [1, 4, 7])
def test_a_stopping_job_answers_all_outputs_of_started_rows(
    lm: Any, monkeypatch: pytest.MonkeyPatch, place: int, num_samples: int
) -> None:
    outputs, rows, admit = (REPLY, REPLY | {"name": "more"}), rows_of(dialogues(8)), Slots.admit
    pipeline = pipeline_of(lm, config_of(*outputs, generation={"do_sample": num_samples > 1}))
    if num_samples > 1:
        pipeline = replace(pipeline, best_of=BestOf(num_samples, Rule(lambda row, answer: 1.0)))
    wanted, started, steps = answers_of(pipeline, rows), set[int](), Counter[str]()

    def noted(self: Slots, requests: Sequence[SlotRequest]) -> Any:
        started.update(request.row // num_samples for request in requests)
        return admit(self, requests)

    def stopping() -> bool:
        steps["asked"] += 1
        return steps["asked"] > place

    monkeypatch.setattr(Slots, "admit", noted)
    prompts = EncodedPrompts(rows, pipeline.row_tokenizer, pipeline.row_schema)
    job = pipeline.prediction_job(prompts, lambda prompts: BatchBudget(4), rows=rows).stopped_by(stopping)
    batches = job.completions(done=np.zeros(8, dtype=np.bool_), attempts=lambda row: 0, tally=Tally())
    answers = {answer.row: json.loads(str(answer.record.text)) for batch in batches for answer in batch}

    assert 0 < len(started) < 8
    assert answers == {row: wanted[row] for row in started}


def test_an_unreadable_output_leaves_the_others_readable(lm: Any) -> None:
    free = {"name": "state", "type": "json", "decoder": {"max_new_tokens": 4}}
    pipeline = pipeline_of(lm, config_of(free, ACTION))

    for answer in generate_for_rows(pipeline, rows_of(dialogues(2)), budget=BatchBudget(2)):
        assert answer.decoded.values["action"] in LABELS
        assert set(answer.decoded.errors) == {"state"}
        assert answer.error is not None
        assert answer.error.startswith("state: ")


def test_the_limit_of_new_tokens_holds_for_each_output_and_the_questions_between(lm: Any) -> None:
    pipeline = pipeline_of(lm, config_of())
    assert pipeline.sequence is not None

    label = max(len(lm.tokenizer.encode(text, add_special_tokens=False)) for text in LABELS)
    assert pipeline.sequence.new_tokens == (40, label, 6)
    assert pipeline.max_new_tokens == 40 + label + 6 + sum(pipeline.sequence.question_tokens)
    limited = pipeline_of(lm, config_of(STATE, REPLY, generation={"max_new_tokens": 9}))
    assert limited.sequence is not None
    assert limited.sequence.new_tokens == (9, 9)


def test_without_a_constraint_the_options_have_no_form(lm: Any) -> None:
    free = pipeline_of(lm, config_of({"name": "state", "type": "json"}, REPLY)).generation
    held = pipeline_of(lm, config_of()).generation

    assert isinstance(free, GenerationOptions)
    assert (free.constraint_hash, free.unconstrained) == ("", replace(free, constraints=()))
    assert held.constraint_hash
    assert held.is_constrained
    assert held.scores_labels
