"""Tests of the engine: answers equal those of each request by itself, whatever else is running."""

import queue
import random
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest
import torch

from partita import Model
from partita.data.sources.in_memory import open_in_memory
from partita.generation.generator import generate_requests
from partita.generation.oom_backoff import BatchBudget
from partita.generation.predict import generate_for_rows
from partita.generation.requests import GenerationSettings
from partita.generation.text_stream import CHANGED
from partita.lm.base import Generated, GenerationOptions, GenerationRequest
from partita.model import open_engine
from partita.serving.bodies import CompletionBody
from partita.serving.chat_prompts import sampling_options
from partita.serving.engine import EngineStoppedError, ServingEngine, Ticket, TooManyWaitingError, served_tokens
from partita.serving.errors import ApiError
from partita.serving.openai_requests import EngineRequests
from partita.serving.request_queue import AnswerEnd, AnswerPiece, AnswerRequest, RequestScheduler
from partita.serving.row_jobs import RowJob
from partita_schema.errors import DataError

from .conftest import make_model, wait_for

SHARED = [7, 30, 100, 44, 12, 200, 90, 17, 66, 21, 54, 88]


@pytest.fixture(scope="module")
def engine(model: Model) -> Iterator[ServingEngine]:
    with open_engine(model, context=200, batch_size=4) as opened:
        yield opened


def many_settings(options: GenerationOptions) -> list[GenerationOptions]:
    """Return settings of requests that run at the same time."""
    return [
        sampling_options(options, temperature=0),
        sampling_options(options, temperature=0.8, more={"top_k": 20}),
        sampling_options(options, temperature=0, logprobs=True, top_logprobs=2),
        sampling_options(options, temperature=0, stop=["e", "a"]),
        sampling_options(options, temperature=0, grammar='start: "yes" | "no" | "maybe"'),
        sampling_options(options, temperature=1.5, more={"repetition_penalty": 1.3}),
    ]


def make_requests(options: GenerationOptions, *, count: int) -> list[AnswerRequest]:
    draw, settings = random.Random(3), many_settings(options)
    return [
        AnswerRequest(
            [*(SHARED if index % 3 else ()), *(draw.randrange(2, 250) for _ in range(1 + draw.randrange(40)))],
            1 + draw.randrange(30),
            settings[index % len(settings)],
            key=str(index).encode(),
            streams=bool(index % 2),
        )
        for index in range(count)
    ]


def alone(engine: ServingEngine, request: AnswerRequest) -> Generated:
    """Return the answer to a request as `predict` gives it for this row alone."""
    settings = GenerationSettings(request.options, BatchBudget(1), engine.pipeline.config.sampling_seed)
    asked = GenerationRequest(request.input_ids, request.max_new_tokens, key=request.key)
    return generate_requests(engine.lm, [asked], settings)[0]


class Receiver:
    """Collects the events of requests."""

    def __init__(self) -> None:
        self.pieces: dict[int, list[AnswerPiece]] = {}
        self.ends: dict[int, AnswerEnd] = {}
        self.changed = threading.Condition()

    def submit(self, engine: ServingEngine, index: int, request: AnswerRequest) -> Ticket:
        def receive(event: AnswerPiece | AnswerEnd) -> None:
            with self.changed:
                if isinstance(event, AnswerPiece):
                    self.pieces.setdefault(index, []).append(event)
                else:
                    self.ends[index] = event
                self.changed.notify()

        return engine.submit(request, receive)

    def wait(self, indices: Sequence[int]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: set(indices) <= set(self.ends), timeout=30)


def test_requests_that_follow_the_answers_of_a_batch_start_together(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = RequestScheduler.step

    def slow(scheduler: RequestScheduler) -> None:
        time.sleep(0.3)  # a step of a larger model
        step(scheduler)

    monkeypatch.setattr(RequestScheduler, "step", slow)
    monkeypatch.setattr("partita.serving.engine.GAP_SECONDS", 5.0)  # on a busy machine
    receiver, engine = Receiver(), open_engine(model, context=200, batch_size=4)
    request = AnswerRequest([5, 6, 7], 3, sampling_options(engine.options, more={"min_new_tokens": 3}))
    for index in range(4):
        receiver.submit(engine, index, request)
    with engine:
        receiver.wait(range(4))
        steps = engine.counts.steps
        for index in range(4, 8):
            time.sleep(0.02)  # a client after the other sends its next request
            receiver.submit(engine, index, request)
        receiver.wait(range(4, 8))
        assert engine.counts.steps == 2 * steps


def test_answers_equal_those_of_each_request_alone(model: Model, engine: ServingEngine) -> None:
    requests = make_requests(engine.options, count=36)
    wanted = [alone(engine, request) for request in requests]
    receiver = Receiver()
    for index, request in enumerate(requests):
        receiver.submit(engine, index, request)
    receiver.wait(range(len(requests)))
    for index, (request, answer) in enumerate(zip(requests, wanted, strict=True)):
        found = receiver.ends[index].generated
        assert found is not None, receiver.ends[index].error
        assert (found.ids, found.text, found.finish_reason) == (answer.ids, answer.text, answer.finish_reason), index
        pieces = receiver.pieces.get(index, [])
        assert "".join(piece.text for piece in pieces) == (answer.text if request.streams else "")
        if request.options.logprobs:
            assert found.logprob == pytest.approx(answer.logprob, abs=1e-4)
            assert [one.token for one in found.token_logprobs] == list(found.ids)
            assert all(len(one.top) == 2 and one.top[0][1] >= one.logprob - 1e-5 for one in found.token_logprobs)
            sent = [one for piece in pieces for one in piece.token_logprobs]
            assert sent == list(found.token_logprobs[: len(sent)])


def test_common_beginnings_are_computed_once(engine: ServingEngine) -> None:
    draw = random.Random(5)
    beginning = [draw.randrange(2, 250) for _ in range(100)]
    requests = [
        AnswerRequest([*beginning, *(draw.randrange(2, 250) for _ in range(5))], 1, many_settings(engine.options)[0])
        for _ in range(12)
    ]
    wanted = [alone(engine, request).ids for request in requests]
    slots: Any = engine._scheduler.slots if engine._scheduler is not None else None
    before = slots.tokens_prefilled if slots is not None else 0
    receiver = Receiver()
    for index, request in enumerate(requests):
        receiver.submit(engine, index, request)
    receiver.wait(range(12))
    assert [receiver.ends[index].generated.ids for index in range(12)] == wanted  # type: ignore[union-attr]
    slots = engine._scheduler.slots  # type: ignore[union-attr]
    assert slots.tokens_prefilled - before < 2.5 * 105, "each of the 12 prompts has 105 tokens"


def test_the_next_turn_of_a_chat_computes_only_its_new_tokens(engine: ServingEngine) -> None:
    receiver, settings = Receiver(), many_settings(engine.options)[0]
    first = AnswerRequest([5, 9, *range(20, 120)], 10, settings)
    receiver.submit(engine, 0, first)
    receiver.wait([0])
    said = receiver.ends[0].generated
    assert said is not None
    slots: Any = engine._scheduler.slots  # type: ignore[union-attr]
    before = slots.tokens_prefilled
    second = AnswerRequest([*first.input_ids, *said.ids, 77, 78, 79], 1, settings)
    receiver.submit(engine, 1, second)
    receiver.wait([1])
    assert receiver.ends[1].generated == alone(engine, second)
    assert slots.tokens_prefilled - before < 16


def test_a_cancelled_request_frees_its_slot_and_sends_nothing_more(engine: ServingEngine) -> None:
    receiver, started = Receiver(), threading.Event()
    long = AnswerRequest([5], 190, many_settings(engine.options)[4 - 4], streams=True)
    pieces = queue.SimpleQueue[Any]()

    def receive(event: Any) -> None:
        pieces.put(event)
        started.set()

    ticket = engine.submit(long, receive)
    assert started.wait(20)
    ticket.cancel()
    steps = engine.counts.steps
    wait_for(lambda: engine.is_idle)
    assert engine.counts.steps <= steps + 2
    assert engine.active == 0
    events = [pieces.get() for _ in range(pieces.qsize())]
    assert not any(isinstance(event, AnswerEnd) for event in events)
    short = AnswerRequest([5, 6], 3, many_settings(engine.options)[0])
    receiver.submit(engine, 0, short)
    receiver.wait([0])
    assert receiver.ends[0].generated == alone(engine, short)


def test_a_receiver_that_fails_cancels_only_its_request(
    engine: ServingEngine, caplog: pytest.LogCaptureFixture
) -> None:
    receiver, settings = Receiver(), many_settings(engine.options)[0]

    def fail(event: Any) -> None:
        raise ValueError("no")

    engine.submit(AnswerRequest([5], 20, settings, streams=True), fail)
    receiver.submit(engine, 0, AnswerRequest([6], 20, settings))
    receiver.wait([0])
    assert receiver.ends[0].generated is not None
    assert "the receiver of an answer failed; the request is cancelled" in caplog.text
    assert engine.failure is None


def test_too_many_waiting_requests_are_refused(model: Model) -> None:
    with open_engine(model, context=200, batch_size=1, max_waiting=2) as engine:
        receiver, settings = Receiver(), many_settings(engine.options)[0]
        tickets = [receiver.submit(engine, 0, AnswerRequest([5], 190, settings))]
        wait_for(lambda: engine.active == 1)
        tickets += [receiver.submit(engine, index, AnswerRequest([5], 190, settings)) for index in (1, 2)]
        with pytest.raises(TooManyWaitingError, match="2 requests wait already; try again later"):
            receiver.submit(engine, 3, AnswerRequest([5], 1, settings))
        tickets[1].cancel()
        wait_for(lambda: engine.waiting == 1)
        receiver.submit(engine, 3, AnswerRequest([5], 1, settings))
        for ticket in tickets:
            ticket.cancel()
        receiver.wait([3])


def test_a_stopping_engine_finishes_what_it_accepted(model: Model) -> None:
    with open_engine(model, context=200, batch_size=1) as engine:
        receiver, settings = Receiver(), many_settings(engine.options)[0]
        for index in range(3):
            receiver.submit(engine, index, AnswerRequest([5], 8, settings))
        engine.refuse_new()
        with pytest.raises(EngineStoppedError, match="the server is stopping"):
            receiver.submit(engine, 3, AnswerRequest([5], 1, settings))
        engine.stop(finish_seconds=20)
        assert all(end.generated is not None for end in receiver.ends.values())
        assert len(receiver.ends) == 3


def test_what_does_not_finish_in_time_ends_with_the_reason(model: Model) -> None:
    with open_engine(model, context=200, batch_size=1) as engine:
        receiver, settings = Receiver(), many_settings(engine.options)[0]
        for index in range(3):
            receiver.submit(engine, index, AnswerRequest([5], 190, settings))
        engine.stop(finish_seconds=0)
    assert {end.error for end in receiver.ends.values()} == {"the server is stopping"}
    assert len(receiver.ends) == 3


def test_a_failure_of_the_device_ends_all_requests(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_engine(model, context=200, batch_size=2) as engine:
        receiver, settings = Receiver(), many_settings(engine.options)[0]

        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("CUDA error: device-side assert triggered")

        monkeypatch.setattr(engine._scheduler, "step", fail)
        receiver.submit(engine, 0, AnswerRequest([5], 5, settings))
        receiver.wait([0])
        assert receiver.ends[0].error == "RuntimeError: CUDA error: device-side assert triggered"
        wait_for(lambda: not engine._thread.is_alive())
        with pytest.raises(EngineStoppedError, match="the engine has failed: RuntimeError: CUDA error"):
            receiver.submit(engine, 1, AnswerRequest([5], 5, settings))


def test_a_failure_of_the_device_ends_jobs_and_batches_too(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    for name in ("serving.row_jobs.generate_for_rows", "generation.static_batches.requests_in_batches"):
        monkeypatch.setattr(f"partita.{name}", fail)
    model = make_model(tmp_path, generation={"slots": False})
    for kind in ("job", "batch"):
        with open_engine(model, context=200, batch_size=2) as engine:
            receiver, ended = Receiver(), queue.SimpleQueue[Any]()
            if kind == "job":
                rows = open_in_memory([{"question": "a"}], name="request")
                engine.submit_job(RowJob(rows, lambda answers, error, ended=ended: ended.put(error)))  # type: ignore[misc]
                assert "device-side assert" in str(ended.get(timeout=20))
            else:
                receiver.submit(engine, 0, AnswerRequest([5], 5, many_settings(engine.options)[0]))
                receiver.wait([0])
                assert "device-side assert" in str(receiver.ends[0].error)
            assert engine.failure is not None


def test_a_job_that_is_being_answered_is_not_idle(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    go, seen = threading.Event(), queue.SimpleQueue[Any]()

    def slow(*arguments: Any, **options: Any) -> Any:
        assert go.wait(20)
        return generate_for_rows(*arguments, **options)

    monkeypatch.setattr("partita.serving.row_jobs.generate_for_rows", slow)
    with open_engine(model, context=200, batch_size=2) as engine:
        rows = open_in_memory([{"question": "a"}], name="request")
        jobs = [RowJob(rows, lambda answers, error: seen.put(error)) for _ in range(2)]
        engine.submit_job(jobs[0])
        wait_for(lambda: engine.active == 1)
        assert not engine.is_idle
        engine.submit_job(jobs[1])
        jobs[1].cancelled = True
        go.set()
        assert seen.get(timeout=20) is None
        wait_for(lambda: engine.is_idle)
        assert seen.empty(), "a cancelled job is not answered"


def test_rows_of_several_jobs_share_batches_and_keep_their_errors(model: Model) -> None:
    with open_engine(model, context=200, batch_size=2) as engine:
        found: dict[int, Any] = {}
        done = threading.Semaphore(0)

        def receive(index: int) -> Any:
            def take(answers: Any, error: Exception | None) -> None:
                found[index] = error or [(one.decoded.values["answer"], one.error) for one in answers]
                done.release()

            return take

        jobs = [[{"question": "red"}], [{"question": None}, {"question": "blue"}]]
        for index, rows in enumerate(jobs):
            engine.submit_job(RowJob(open_in_memory(rows, name="request"), receive(index)))
        for _ in jobs:
            assert done.acquire(timeout=20)
    predicted = model.predict([row for rows in jobs for row in rows])
    wanted = [(row["answer"], row["error"]) for row in predicted]
    assert [answer for index in range(2) for answer in found[index]] == wanted
    assert wanted[1][1] == "column question is missing or empty"


def test_a_context_that_does_not_fit_in_memory_is_named(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out_of_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with open_engine(make_model(tmp_path), context=200, batch_size=2) as engine:
        monkeypatch.setattr(engine.lm, "open_slots", run_out_of_memory)
        receiver = Receiver()
        receiver.submit(engine, 0, AnswerRequest(SHARED, 5, engine.options))
        receiver.wait([0])
        assert receiver.ends[0].error == (
            "does not fit in memory even alone, since every request gets the memory for 200 tokens; start again with a "
            "smaller --context, quantization or a smaller model"
        )


@pytest.mark.parametrize("changes", [False, True])
def test_a_stream_whose_answer_was_started_again_continues_or_ends_with_an_error(tmp_path: Any, changes: bool) -> None:
    """Results of some devices depend on the number of rows; here the weights change when memory runs out."""
    model = make_model(tmp_path)
    with open_engine(model, context=200, batch_size=2) as engine:
        greedy = sampling_options(engine.options, temperature=0)
        requests = [AnswerRequest(SHARED, 30, greedy, streams=streams) for streams in (True, False)]
        wanted = alone(engine, requests[0])
        receiver, sent, lm = Receiver(), list[str](), cast("Any", engine.lm)

        def run_out_of_memory() -> None:
            del engine._scheduler.slots.step  # type: ignore[union-attr]
            with torch.no_grad():
                lm.module.get_output_embeddings().weight.mul_(-1 if changes else 1)
            raise torch.OutOfMemoryError("CUDA out of memory")

        def receive(event: AnswerPiece | AnswerEnd) -> None:
            if isinstance(event, AnswerEnd):
                with receiver.changed:
                    receiver.ends[0] = event
                    receiver.changed.notify()
                return
            sent.append(event.text)
            if len(sent) == 4:
                engine._scheduler.slots.step = run_out_of_memory  # type: ignore[union-attr]

        receiver.submit(engine, 1, requests[1])
        engine.submit(requests[0], receive)
        receiver.wait([0, 1])
        assert engine.budget.out_of_memory == 1
        assert receiver.ends[1].generated is not None, "it was not streamed, so nothing of it was sent"
        wait_for(lambda: engine.is_idle)
        if changes:
            assert wanted.text.startswith("".join(sent))
            assert receiver.ends[0] == AnswerEnd(None, CHANGED)
            assert receiver.ends[1].generated.text != wanted.text
            assert (engine.counts.errors, engine.counts.cancelled) == (1, 0)
        else:
            assert "".join(sent) == wanted.text
            assert receiver.ends[0].generated == receiver.ends[1].generated == wanted
            assert engine.counts.errors == 0


def test_without_slots_requests_are_answered_in_batches(tmp_path: Any) -> None:
    model = make_model(tmp_path, generation={"slots": False})
    with open_engine(model, context=200, batch_size=3) as engine:
        assert engine.why_batches == "generation.slots is false"
        settings = many_settings(engine.options)
        requests = [AnswerRequest([5, 6, index], 6, settings[index % 2], key=b"%d" % index) for index in range(1, 6)]
        wanted = [alone(engine, request) for request in requests]
        receiver = Receiver()
        for index, request in enumerate(requests):
            receiver.submit(engine, index, request)
        receiver.wait(range(5))
        assert [receiver.ends[index].generated for index in range(5)] == wanted


def test_without_slots_log_probabilities_are_those_of_slots(tmp_path: Any, engine: ServingEngine) -> None:
    body = CompletionBody(prompt="x", max_tokens=6, temperature=0)
    ends = []
    with open_engine(make_model(tmp_path, generation={"slots": False}), context=200, batch_size=4) as in_batches:
        for one in (engine, in_batches):
            receiver = Receiver()
            for index, request in enumerate(EngineRequests(one).of(body, [[5, 6], [5, 6, 7]], top=2, grammar=None)):
                receiver.submit(one, index, request)
            receiver.wait(range(2))
            ends.append([receiver.ends[index].generated for index in range(2)])
    for in_slots, found in zip(*ends, strict=True):
        assert found.ids == in_slots.ids
        assert [one.token for one in found.token_logprobs] == list(found.ids)
        for one, wanted in zip(found.token_logprobs, in_slots.token_logprobs, strict=True):
            assert one.logprob == pytest.approx(wanted.logprob, abs=1e-4)
            assert [token for token, _ in one.top] == [token for token, _ in wanted.top]


def test_without_slots_grammars_are_refused(tmp_path: Any) -> None:
    model = make_model(tmp_path, generation={"slots": False})
    with open_engine(model, context=50, batch_size=2) as engine, pytest.raises(ApiError) as caught:
        EngineRequests(engine).of(CompletionBody(prompt="x"), [[5, 6]], top=None, grammar="root ::= [0-9]")
    reason = "continuous batching, which is not available here: generation.slots is false"
    assert (caught.value.status, str(caught.value)) == (400, f"response_format and required tools need {reason}")


def test_a_server_says_that_its_cache_is_not_paged(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model(tmp_path, generation={"kv_cache": "paged"})
    with open_engine(model, context=50, batch_size=2) as engine:
        receiver = Receiver()
        receiver.submit(engine, 0, make_requests(engine.options, count=1)[0])
        receiver.wait([0])
        assert receiver.ends[0].error is None
    assert caplog.messages[0] == (
        "generation.kv_cache: paged is not used: requests have their own settings, and a paged KV cache has one set of "
        "settings for all rows"
    )


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {
                "output_features": [
                    {
                        "name": "answer",
                        "type": "json",
                        "decoder": {"constrain": True, "json_schema": {"type": "object"}},
                    }
                ],
            },
            "chats and completions do not use decoder.constrain; write response_format in a request",
        ),
        (
            {
                "output_features": [
                    {"name": "answer", "type": "category", "decoder": {"labels": ["b", "c"], "scoring": True}}
                ],
            },
            "chats and completions do not use decoder.scoring",
        ),
        ({"generation": {"num_beams": 2}}, "chats and completions do not use generation.num_beams"),
        ({}, None),
    ],
)
def test_a_server_says_which_settings_apply_to_rows_only(
    tmp_path: Any, caplog: pytest.LogCaptureFixture, sections: dict[str, Any], message: str | None
) -> None:
    caplog.set_level("INFO", logger="partita")
    with open_engine(make_model(tmp_path, **sections), context=50, batch_size=2):
        pass
    said = [one for one in caplog.messages if one.startswith("chats and completions")]
    assert said == ([message] if message else [])


@pytest.mark.parametrize(
    ("limit", "wanted", "tokens"),
    [(None, None, 8192), (100, None, 100), (9000, None, 8192), (100, 50, 50), (None, 9, 9)],
)
def test_context_of_a_server(limit: int | None, wanted: int | None, tokens: int) -> None:
    assert served_tokens(limit, wanted) == tokens


def test_a_context_beyond_the_models_is_refused() -> None:
    with pytest.raises(DataError, match="context is 200 tokens, and the model's is 100; write at most that"):
        served_tokens(100, 200)
