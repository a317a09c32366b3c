from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partita.generation.oom_backoff import BatchBudget
from partita.generation.requests import GenerationSettings, unanswerable
from partita.generation.static_batches import plan_batches, requests_in_batches, requests_or_errors
from partita.lm.base import BatchSupport, Generated, GenerationOptions, GenerationRequest
from partita.lm.scripted import ScriptedModel
from partita_schema.errors import JobError

from .generating import generate_rows

GREEDY = GenerationOptions({})


class Prompts:
    """Prompts given as they are."""

    def __init__(self, ids: Sequence[list[int]]) -> None:
        self.ids = ids
        self.lengths = np.array([len(tokens) for tokens in ids], dtype=np.int32)
        self.keys = np.zeros((len(ids), 16), dtype=np.uint8)
        self.prefix: list[int] = []
        self.digests = np.zeros(len(ids), dtype="V16")
        self.prefix_groups = None
        self.errors: dict[int, str] = {}
        self.skipped: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def sampling_key(self, row: int) -> bytes:
        return bytes([row])

    def prompts(self, indices: Sequence[int]) -> list[list[int]]:
        return [self.ids[index] for index in indices]


def texts(lm: ScriptedModel, *prompts: str) -> Prompts:
    return Prompts([lm.tokenizer.encode(text, add_special_tokens=False) for text in prompts])


def run(lm: Any, prompts: Prompts, *, done: Sequence[int] = (), **options: Any) -> list[Any]:
    mask = np.zeros(len(prompts), dtype=np.bool_)
    mask[list(done)] = True
    defaults: dict[str, Any] = {"options": GREEDY, "max_new_tokens": 8, "batch_size": 3, "seed": 1}
    return list(generate_rows(lm, prompts, engine="static", done=mask, **(defaults | options)))


def answers(batches: list[Any]) -> dict[int, Any]:
    return {
        result.row: result.generated.text if result.generated else result.error
        for batch in batches
        for result in batch.results
    }


@given(st.lists(st.integers(min_value=0, max_value=50)), st.integers(min_value=1, max_value=9))
def test_every_row_with_a_prompt_is_planned_once_longest_first(lengths: list[int], batch_size: int) -> None:
    batches = plan_batches(np.array(lengths, dtype=np.int32), batch_size=batch_size)
    order = [int(row) for batch in batches for row in batch]
    assert order == sorted((row for row, length in enumerate(lengths) if length), key=lambda row: (-lengths[row], row))
    assert all(len(batch) == batch_size for batch in batches[:-1])


@given(st.lists(st.integers(min_value=0, max_value=9)), st.integers(min_value=1, max_value=5))
def test_rows_are_planned_with_rows_of_equal_length_or_alone(lengths: list[int], batch_size: int) -> None:
    given = np.array(lengths, dtype=np.int32)
    order = [int(row) for batch in plan_batches(given, batch_size=batch_size) for row in batch]
    equal = plan_batches(given, batch_size=batch_size, support=BatchSupport("equal lengths"))
    assert [int(row) for batch in equal for row in batch] == order
    assert all(len({lengths[row] for row in batch}) == 1 and len(batch) <= batch_size for batch in equal)
    full = [lengths[batch[0]] for batch in equal if len(batch) < batch_size]
    assert len(full) == len(set(full)), "at most one batch per length is not full"
    alone = plan_batches(given, batch_size=batch_size, support=BatchSupport("one row"))
    assert [batch.tolist() for batch in alone] == [[row] for row in order]


class Choosy(ScriptedModel):
    """A model that accepts only rows of equal length, and records how many it got."""

    def __init__(self) -> None:
        super().__init__(str.upper)
        self.given: list[list[int]] = []

    def batch_support(self, options: GenerationOptions, *, tokens: int) -> BatchSupport:
        return BatchSupport("equal lengths", "it is choosy")

    def generate(
        self, requests: Sequence[GenerationRequest], options: GenerationOptions, *, seed: int
    ) -> list[Generated]:
        self.given.append([len(request.input_ids) for request in requests])
        return super().generate(requests, options, seed=seed)


def test_a_model_gets_only_rows_that_it_can_batch() -> None:
    lm = Choosy()
    words = ["aa", "b", "cc", "dd", "e", "ff", "ggg"]
    assert answers(run(lm, texts(lm, *words))) == {row: word.upper() for row, word in enumerate(words)}
    assert lm.given == [[3], [2, 2, 2], [2], [1, 1]]
    lm = Choosy()
    requests = [GenerationRequest(ids, 8) for ids in texts(lm, *words).ids]
    result = requests_in_batches(lm, requests, GenerationSettings(GREEDY, BatchBudget(3), 0))
    assert [answer.text for answer in result] == [word.upper() for word in words]
    assert lm.given == [[3], [2, 2, 2], [2], [1, 1]]


def test_every_row_is_answered() -> None:
    lm = ScriptedModel(str.upper)
    batches = run(lm, texts(lm, "a", "bbb", "cc", "dddd"))
    assert answers(batches) == {0: "A", 1: "BBB", 2: "CC", 3: "DDDD"}
    assert [(batch.spent.prompt_tokens, batch.spent.padded_tokens) for batch in batches] == [(9, 12), (1, 1)]


def test_finished_batches_are_not_generated_again() -> None:
    lm = ScriptedModel(str.upper)
    batches = run(lm, texts(lm, "aaaa", "bbb", "cc", "d"), done=[0, 1, 2])
    assert (answers(batches), lm.rows) == ({3: "D"}, 1)


def test_a_partly_finished_batch_is_generated_completely_and_only_missing_rows_are_reported() -> None:
    lm = ScriptedModel(str.upper)
    batches = run(lm, texts(lm, "aaaa", "bbb", "cc", "d"), done=[0, 3])
    assert (answers(batches), lm.rows, lm.calls) == ({1: "BBB", 2: "CC"}, 3, 1)


def test_a_row_that_raises_does_not_affect_others() -> None:
    def answer(prompt: str) -> str:
        if prompt == "bad":
            raise ValueError("no such luck")
        return prompt.upper()

    lm = ScriptedModel(answer)
    result = answers(run(lm, texts(lm, "good", "bad", "fine", "x", "y")))
    assert result == {0: "GOOD", 1: "ValueError: no such luck", 2: "FINE", 3: "X", 4: "Y"}


def test_requests_that_fail_together_are_answered_alone() -> None:
    def answer(prompt: str) -> str:
        if prompt == "bad":
            raise ValueError("no such luck")
        return prompt.upper()

    lm = ScriptedModel(answer)
    requests = [GenerationRequest(ids, 8) for ids in texts(lm, "good", "bad", "fine").ids]
    results = requests_or_errors(lm, requests, GenerationSettings(GREEDY, BatchBudget(2), 1))

    assert [result.row for result in results] == [0, 1, 2]
    assert [one.generated.text if one.generated else one.error for one in results] == [
        "GOOD",
        "ValueError: no such luck",
        "FINE",
    ]


def test_a_broken_device_ends_the_job_and_is_no_error_of_its_rows() -> None:
    def answer(prompt: str) -> str:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    lm = ScriptedModel(answer)
    with pytest.raises(JobError) as caught:
        run(lm, texts(lm, "aa", "b"))
    assert str(caught.value) == (
        "the device failed and cannot continue: CUDA error: device-side assert triggered. The answers so far are "
        "saved; start again, with CUDA_LAUNCH_BLOCKING=1 to see where it fails"
    )
    assert lm.calls == 1


def test_an_interrupt_is_raised_at_once_and_earlier_reports_are_complete() -> None:
    def answer(prompt: str) -> str:
        if prompt == "d":
            raise KeyboardInterrupt
        return prompt

    lm = ScriptedModel(answer)
    prompts = texts(lm, "aaaa", "bbb", "cc", "d")
    batches = generate_rows(
        lm,
        prompts,
        engine="static",
        options=GREEDY,
        max_new_tokens=8,
        batch_size=3,
        seed=1,
        done=np.zeros(4, dtype=np.bool_),
    )
    assert answers([next(batches)]) == {0: "aaaa", 1: "bbb", 2: "cc"}
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert lm.calls == 2


def test_an_answer_is_limited_by_the_remaining_context() -> None:
    lm = ScriptedModel(lambda prompt: "0123456789", context_length=10)
    batches = run(lm, texts(lm, "a" * 9, "b" * 4, "c"), batch_size=1)
    assert answers(batches) == {0: "0", 1: "012345", 2: "01234567"}
    reasons = {result.generated.finish_reason for batch in batches for result in batch.results}
    assert reasons == {"length"}


def test_prompts_that_fill_the_context_are_reported_before_any_forward_pass() -> None:
    lm = ScriptedModel(str.upper, context_length=4)
    prompts = texts(lm, "aaaaa", "bbbb", "ccc")
    assert unanswerable(prompts, max_new_tokens=1, context_length=4) == {
        0: "the prompt has 5 tokens and the context holds 4; nothing can be answered",
        1: "the prompt has 4 tokens and the context holds 4; nothing can be answered",
    }
    assert (set(answers(run(lm, prompts))), lm.rows) == ({2}, 1)


def test_a_model_that_loses_rows_is_detected() -> None:
    class Forgetful(ScriptedModel):
        def generate(self, requests: Sequence[GenerationRequest], options: Any, *, seed: int) -> list[Generated]:
            return super().generate(requests, options, seed=seed)[: 1 if len(requests) == 1 else -1]

    lm = Forgetful(str.upper)
    assert answers(run(lm, texts(lm, "aa", "b"))) == {0: "AA", 1: "B"}

    class Silent(ScriptedModel):
        def generate(self, requests: Sequence[GenerationRequest], options: Any, *, seed: int) -> list[Generated]:
            return []

    silent = Silent(str.upper)
    assert answers(run(silent, texts(silent, "a"))) == {0: "RuntimeError: the model gave 0 answers to 1 prompt"}


def test_every_request_has_the_key_of_its_row_in_any_batch() -> None:
    class Noting(ScriptedModel):
        def generate(self, requests: Sequence[GenerationRequest], options: Any, *, seed: int) -> list[Generated]:
            asked.append((seed, [request.key for request in requests]))
            if len(requests) > 1:
                raise ValueError("never together")
            return super().generate(requests, options, seed=seed)

    asked: list[tuple[int, list[bytes]]] = []
    lm = Noting(str.upper)
    prompts = texts(lm, "aaaa", "bbb", "cc", "d")
    keys = [prompts.sampling_key(row) for row in range(4)]
    assert len(set(keys)) == 4
    options: dict[str, Any] = {"options": GenerationOptions({"do_sample": True})}
    run(lm, prompts, **options)
    assert asked == [(1, keys[:3]), *((1, [key]) for key in keys)]
    asked.clear()
    run(lm, prompts, done=[0, 1, 2], seed=2, **options)
    assert asked == [(2, keys[3:])]
