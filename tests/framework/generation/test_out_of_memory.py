import hashlib
import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from partita.generation.engine import Engine
from partita.generation.oom_backoff import BatchBudget
from partita.generation.requests import BatchResult
from partita.lm.base import Generated, GenerationOptions, GenerationRequest
from partita.lm.scripted import ScriptedModel
from partita_schema.errors import JobError

from ...json_lines import read_json_lines
from ...properties import examples
from .conftest import nano_model
from .generating import generate_rows

GREEDY = GenerationOptions({"do_sample": False})
SAMPLED = GenerationOptions({"do_sample": True, "top_k": 0})
QUESTIONS = [{"question": "x" * (1 + n * 7 % 20)} for n in range(20)]


class Limited(ScriptedModel):
    """A model that runs out of memory above `ceiling` padded prompt tokens; `tried` has (rows, tokens) of each call."""

    def __init__(self, answer: Callable[[str], str] = str.upper, *, ceiling: int) -> None:
        super().__init__(answer)
        self.ceiling = ceiling
        self.tried: list[tuple[int, int]] = []

    def generate(
        self, requests: Sequence[GenerationRequest], options: GenerationOptions, *, seed: int
    ) -> list[Generated]:
        held = len(requests) * max(len(request.input_ids) for request in requests)
        self.tried.append((len(requests), held))
        if held > self.ceiling:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().generate(requests, options, seed=seed)


class Sampled(Limited):
    """A model whose answers depend on the seed and on the key of each row, as sampled answers do."""

    def generate(
        self, requests: Sequence[GenerationRequest], options: GenerationOptions, *, seed: int
    ) -> list[Generated]:
        result = super().generate(requests, options, seed=seed)
        drawn = [hashlib.sha256(repr((seed, request.key)).encode()).hexdigest() for request in requests]
        return [replace(one, text=text[:12]) for one, text in zip(result, drawn, strict=True)]


class Prompts:
    """Prompts of given lengths: aaa, bbb, ..."""

    def __init__(self, lengths: Sequence[int], *, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.lengths = np.array(lengths, dtype=np.int32)
        self.keys = np.arange(len(lengths) * 16).reshape(-1, 16).astype(np.uint8)
        self.prefix: list[int] = []
        self.digests = np.array(
            [f"{index % 20} {length}".encode() for index, length in enumerate(lengths)], dtype="V16"
        )
        self.prefix_groups = None
        self.errors: dict[int, str] = {}
        self.skipped: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.lengths)

    def sampling_key(self, row: int) -> bytes:
        return bytes([row])

    def prompts(self, indices: Sequence[int]) -> list[list[int]]:
        texts = [chr(ord("a") + index % 20) * int(self.lengths[index]) for index in indices]
        return [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]


def run(lm: Any, lengths: Sequence[int], *, done: Sequence[int] = (), **options: Any) -> list[BatchResult]:
    mask = np.zeros(len(lengths), dtype=np.bool_)
    mask[list(done)] = True
    defaults: dict[str, Any] = {
        "engine": "static",
        "options": GREEDY,
        "max_new_tokens": 8,
        "batch_size": 8,
        "seed": 1,
    }
    return list(generate_rows(lm, Prompts(lengths, tokenizer=lm.tokenizer), done=mask, **(defaults | options)))


def outcomes(batches: list[BatchResult]) -> dict[int, str | None]:
    """Return the text or error of every row; each row appears once."""
    values = [(result.row, result.generated) for batch in batches for result in batch.results]
    assert len(dict(values)) == len(values)
    errors = {result.row: result.error for batch in batches for result in batch.results}
    return {row: errors[row] if generated is None else generated.text for row, generated in values}


def rows_at_once(batches: list[BatchResult]) -> list[int]:
    return [len(batch.results) for batch in batches]


# Results


@examples(60)
@given(st.lists(st.integers(min_value=1, max_value=30), max_size=60), st.integers(1, 16), st.integers(30, 200))
def test_greedy_answers_do_not_depend_on_out_of_memory_errors(
    lengths: list[int], batch_size: int, ceiling: int
) -> None:
    lm = Limited(ceiling=ceiling)
    cut = run(lm, lengths, batch_size=batch_size)
    assert outcomes(cut) == outcomes(run(ScriptedModel(str.upper), lengths, batch_size=batch_size))
    assert sum(batch.spent.out_of_memory for batch in cut) == sum(held > ceiling for _, held in lm.tried)
    assert sum(batch.spent.prompt_tokens for batch in cut) == sum(lengths)
    order = [lengths[result.row] for batch in cut for result in batch.results]
    assert order == sorted(lengths, reverse=True), "the next rows follow in the order of the plan"


def test_batches_of_similar_length_after_one_that_did_not_fit_are_smaller() -> None:
    lm = Limited(ceiling=100)
    batches = run(lm, [20] * 16 + [18] * 8 + [1] * 8)
    assert lm.tried == [(8, 160), *[(4, 80)] * 4, *[(4, 72)] * 2, (8, 8)]
    assert [batch.spent.out_of_memory for batch in batches] == [1, 0, 0, 0, 0, 0, 0]
    assert [batch.batch_size for batch in batches] == [4, 4, 4, 4, 4, 4, 8]


def test_a_batch_is_halved_again_until_it_fits(caplog: Any) -> None:
    with caplog.at_level(logging.INFO):
        batches = run(Limited(ceiling=45), [20] * 11)
    assert rows_at_once(batches) == [2, 2, 2, 2, 2, 1]
    assert (batches[0].spent.out_of_memory, batches[0].batch_size) == (2, 2)
    assert caplog.messages == [
        "out of memory with 8 rows of 20 prompt tokens: continuing with 4",
        "out of memory with 4 rows of 20 prompt tokens: continuing with 2",
    ]


def test_a_row_that_does_not_fit_alone_is_an_error_and_does_not_limit_others(caplog: Any) -> None:
    lm = Limited(ceiling=100)
    with caplog.at_level(logging.INFO):
        batches = run(lm, [5] * 3 + [1500] + [5] * 12)
    result = outcomes(batches)
    assert result.pop(3) == (
        "does not fit in memory even alone: 1,500 prompt tokens and up to 8 new tokens; shorten the prompt, or write a "
        "smaller generation.max_new_tokens, quantization or a smaller model"
    )
    assert len(result) == 15
    assert not any("memory" in str(text) for text in result.values())
    assert [rows for rows, _ in lm.tried] == [8, 4, 2, 1, 1, 2, 4, 8]
    assert (batches[-1].batch_size, sum(batch.spent.out_of_memory for batch in batches)) == (8, 4)
    assert caplog.messages[-1] == f"a row {outcomes(batches)[3]}; continuing with 8 rows at a time"


def test_a_job_in_which_nothing_fits_reports_every_row() -> None:
    result = outcomes(run(Limited(ceiling=0), [5] * 9))
    assert len(result) == 9
    assert all(str(error).startswith("does not fit in memory even alone: 5 prompt tokens") for error in result.values())


def test_jobs_with_a_shared_limit_start_with_its_current_value() -> None:
    lm, limit = Limited(ceiling=100), BatchBudget(8)
    run(lm, [20] * 8, budget=limit)
    assert (limit.current_limit, limit.out_of_memory) == (4, 1)
    batches = run(lm, [20] * 8, budget=limit)
    assert [(batch.batch_size, batch.spent.out_of_memory) for batch in batches] == [(4, 0), (4, 0)]


def test_a_batch_too_large_for_a_kernel_is_split_too() -> None:
    class Kernel(ScriptedModel):
        def generate(self, requests: Sequence[GenerationRequest], options: Any, *, seed: int) -> list[Generated]:
            if len(requests) > 3:
                raise RuntimeError("CUDA error: invalid configuration argument")
            return super().generate(requests, options, seed=seed)

    batches = run(Kernel(str.upper), [5] * 8)
    assert rows_at_once(batches) == [2, 2, 2, 2]
    assert None not in outcomes(batches).values()


def test_other_errors_are_tried_row_by_row_in_a_half_too(caplog: Any) -> None:
    def answer(prompt: str) -> str:
        if prompt.startswith("c"):
            raise ValueError("no such luck")
        return prompt

    lm = Limited(answer, ceiling=100)
    with caplog.at_level(logging.INFO):
        batches = run(lm, [20] * 8)
    result = outcomes(batches)
    assert result.pop(2) == "ValueError: no such luck"
    assert len(set(result.values())) == 7
    assert [rows for rows, _ in lm.tried] == [8, 4, 1, 1, 1, 1, 4]
    assert caplog.messages[1:] == ["a batch of 4 rows failed and is tried row by row: ValueError: no such luck"]


def test_a_row_that_is_tried_alone_may_run_out_of_memory() -> None:
    class Odd(ScriptedModel):
        def generate(self, requests: Sequence[GenerationRequest], options: Any, *, seed: int) -> list[Generated]:
            if len(requests) > 1:
                raise ValueError("never together")
            answers = super().generate(requests, options, seed=seed)
            if answers[0].text == "bbb":
                raise torch.OutOfMemoryError("out of memory")
            return answers

    batches = run(Odd(str.lower), [3] * 4)
    assert str(outcomes(batches)[1]).startswith("does not fit in memory even alone: 3 prompt tokens")
    assert [(batch.spent.out_of_memory, batch.batch_size) for batch in batches] == [(1, 8)]
    assert outcomes(batches)[2] == "ccc"


def test_a_broken_device_ends_a_job_with_split_batches() -> None:
    def answer(prompt: str) -> str:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    lm = Limited(answer, ceiling=100)
    with pytest.raises(JobError, match=r"^the device failed and cannot continue: CUDA error: device-side assert"):
        run(lm, [20] * 8)
    assert [rows for rows, _ in lm.tried] == [8, 4]


# Sampled answers


@examples(40)
@given(st.sets(st.integers(0, 29)), st.integers(20, 200), st.integers(1, 9))
def test_samples_do_not_depend_on_finished_rows_or_out_of_memory_errors(
    done: set[int], ceiling: int, batch_size: int
) -> None:
    lengths = [20] * 30
    straight = outcomes(run(Sampled(ceiling=10**6), lengths, options=SAMPLED))
    assert len(set(straight.values())) == len(lengths)
    again = run(Sampled(ceiling=ceiling), lengths, options=SAMPLED, done=sorted(done), batch_size=batch_size)
    assert outcomes(again) == {row: text for row, text in straight.items() if row not in done}


# The job and its journal


def test_the_journal_has_every_row_once_and_the_job_reports_out_of_memory(
    make_rows: Any, predict: Any, tmp_path: Path
) -> None:
    limit = BatchBudget(8)
    predictions = predict(Limited(ceiling=50), make_rows(QUESTIONS), batch_size=8, budget=limit)
    assert [row["answer"] for row in predictions] == [row["question"].upper() for row in QUESTIONS]
    lines = read_json_lines(tmp_path / "journal.jsonl")[1:]
    assert sorted(line["row"] for line in lines) == list(range(20))
    stats = predictions.stats
    assert (stats.out_of_memory, stats.batch_size) == (limit.out_of_memory, limit.current_limit) == (2, 2)
    assert str(stats).endswith(", out of memory 2 times, at most 2 rows at a time at the end")


def test_a_job_without_memory_errors_reports_none(make_rows: Any, predict: Any) -> None:
    stats = predict(ScriptedModel(str.upper), make_rows(QUESTIONS), batch_size=8).stats
    assert (stats.out_of_memory, stats.batch_size) == (0, 8)
    assert "memory" not in str(stats)


def test_one_memory_error_is_reported_as_one(make_rows: Any, predict: Any) -> None:
    stats = predict(Limited(ceiling=100), make_rows(QUESTIONS), batch_size=8).stats
    assert str(stats).endswith(", out of memory once, at most 4 rows at a time at the end")


def test_a_row_that_is_too_large_is_an_error_in_the_journal_that_can_be_retried(make_rows: Any, predict: Any) -> None:
    rows = make_rows([*QUESTIONS, {"question": "x" * 90}])
    small = predict(Limited(ceiling=80), rows, batch_size=8)
    assert [row["status"] for row in small] == ["ok"] * 20 + ["error"]
    assert small[20]["error"].startswith("does not fit in memory even alone: 90 prompt tokens and up to 64 new tokens;")
    again = predict(Limited(ceiling=100), rows, batch_size=8, retry_errors=True)
    assert again[20]["answer"] == "X" * 64
    assert again.stats.resumed == 20


@pytest.mark.long
@examples(10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=st.integers(min_value=0, max_value=16))
def test_a_job_killed_between_halves_resumes_without_losing_or_repeating_rows(
    make_rows: Any, predict: Any, tmp_path: Path, calls: int
) -> None:
    class Dying(Limited):
        def generate(self, requests: Sequence[GenerationRequest], options: Any, *, seed: int) -> list[Generated]:
            if len(self.tried) == calls:
                raise KeyboardInterrupt
            return super().generate(requests, options, seed=seed)

    rows = make_rows([*QUESTIONS, {"question": "x" * 90}])
    straight = list(predict(Limited(ceiling=50), rows, batch_size=8, fresh=True))
    with suppress(KeyboardInterrupt):
        predict(Dying(ceiling=50), rows, batch_size=8, fresh=True)
    assert list(predict(Limited(ceiling=50), rows, batch_size=8)) == straight
    lines = read_json_lines(tmp_path / "journal.jsonl")[1:]
    assert sorted(line["row"] for line in lines) == list(range(21))


def test_answers_without_a_journal_share_the_limit(make_rows: Any, answer: Any) -> None:
    limit = BatchBudget(8)
    answers = answer(Limited(ceiling=50), make_rows(QUESTIONS), generation=GREEDY, batch_size=8, budget=limit)
    results = {answer.row: answer.decoded.values["answer"] for answer in answers}
    assert results == {row: question["question"].upper() for row, question in enumerate(QUESTIONS)}
    assert (limit.current_limit, limit.out_of_memory) == (2, 2)


# A real model


@pytest.fixture(scope="module")
def real() -> Any:
    return nano_model()


LENGTHS = [3, 17, 9, 17, 1, 12, 30, 5, 17, 8, 2]


@pytest.mark.parametrize("engine", ["slots", "static"])
@pytest.mark.parametrize("ceiling", [40, 100, 170])
def test_a_real_model_gives_the_same_answers_with_memory_errors_in_prefill_or_decoding(
    real: Any, memory_ceiling: Any, ceiling: int, engine: Engine
) -> None:
    assert real.why_no_slots(GREEDY, tokens=64) is None
    ceiling += 30 if engine == "slots" else 0  # a slot is allocated as a whole while its prompt is prefilled
    free = outcomes(run(real, LENGTHS, batch_size=6, engine=engine))
    with memory_ceiling(real.base, ceiling) as passes:
        cut = run(real, LENGTHS, batch_size=6, engine=engine)
    assert outcomes(cut) == free
    assert not any("memory" in str(text) for text in free.values())
    assert sum(batch.spent.out_of_memory for batch in cut) == sum(held > ceiling for _, held in passes) > 0


@pytest.mark.parametrize("engine", ["slots", "static"])
def test_a_real_model_gives_the_same_samples_with_any_memory_errors(
    real: Any, memory_ceiling: Any, engine: Engine
) -> None:
    assert real.why_no_slots(SAMPLED, tokens=64) is None
    options: dict[str, Any] = {"options": SAMPLED, "engine": engine}
    straight = outcomes(run(real, LENGTHS, **options))
    assert len(set(straight.values())) == len(LENGTHS)
    for ceiling in (70, 130, 250):
        with memory_ceiling(real.base, ceiling):
            cut = run(real, LENGTHS, **options)
        assert sum(batch.spent.out_of_memory for batch in cut) > 0
        assert outcomes(cut) == straight
    rows = [result.row for batch in cut for result in batch.results]
    again = outcomes(run(real, LENGTHS, done=rows[:4], batch_size=3, **options))
    assert again == {row: straight[row] for row in rows[4:]}
    assert outcomes(run(real, LENGTHS, **options | {"seed": 2})) != straight


@pytest.mark.parametrize("engine", ["slots", "static"])
def test_tensors_of_a_batch_that_did_not_fit_are_freed_before_its_half_is_tried(real: Any, engine: Engine) -> None:
    assert real.why_no_slots(GREEDY, tokens=11) is None
    held: list[Any] = []
    alive: list[int] = []
    pools: list[Any] = []

    def hold(module: Any, inputs: Any, output: torch.Tensor) -> None:
        alive.append(sum(reference() is not None for reference in held))
        held.append(weakref.ref(output))

    def refuse(module: Any, inputs: Any) -> None:
        if len(inputs[0]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def look(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        # There is one pool of slots, and the pool of a failed attempt is freed before the next is allocated.
        pool = kwargs["past_key_values"]
        assert not [one for one in pools if one() is not None and one() is not pool]
        pools.append(weakref.ref(pool))

    hooks = [
        real.base.get_input_embeddings().register_forward_hook(hold),
        real.base.get_output_embeddings().register_forward_pre_hook(refuse),
    ]
    hooks += [real.base.register_forward_pre_hook(look, with_kwargs=True)] if engine == "slots" else []
    try:
        batches = run(real, [9] * 8, max_new_tokens=2, engine=engine)
    finally:
        for hook in hooks:
            hook.remove()
    assert rows_at_once(batches) == [2, 2, 2, 2]
    assert len(held) == 2 + 4 * 2
    assert not any(alive), "no tensor of an earlier pass is alive when the next one starts"
