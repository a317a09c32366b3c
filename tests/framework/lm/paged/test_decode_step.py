"""Tests of the decode step: what a CUDA graph needs of it, seen on a CPU."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from partita.lm.base import GenerationOptions
from partita.lm.paged.step import padded_rows

from .syncs import Operations, Seen

TOKENS = 120
EVERYTHING = {"do_sample": True, "repetition_penalty": 1.3, "top_k": 20, "top_p": 0.9, "temperature": 1.5}
"""Settings with several operations of each kind in the choice of a token."""


@pytest.fixture(scope="module")
def llama(small: Any) -> Any:
    lm = small.load(small.config())
    small.sharpen(lm.module)
    return lm


def opened(small: Any, lm: Any, arguments: dict[str, Any], *sizes: tuple[int, int], slots: int = 4) -> Any:
    """Return slots with rows of these prompt tokens and limits."""
    options = GenerationOptions(arguments, kv_cache="paged")
    assert lm.why_no_slots(options, tokens=TOKENS) is None
    found = lm.open_slots(options, slots=slots, tokens=TOKENS, prefix=(), seed=0)
    found.admit(small.slot_requests(*sizes))
    return found


def test_a_step_waits_once_for_the_device_and_copies_nothing_to_it(small: Any, llama: Any) -> None:
    slots = opened(small, llama, EVERYTHING, (5, 30), (9, 30), (2, 30))
    with llama.evaluating():
        for _ in range(5):
            seen = Seen(slots.step)
            assert dict(seen.reads) == {"tolist": 1}, "the tokens of the step before"
            assert not seen.waits
            assert not seen.writes
    assert [len(row.new) for row in slots.live] == [5, 5, 5], "one token of six is not read yet"


def test_the_count_of_waits_sees_what_slots_do(small: Any, llama: Any) -> None:
    slots = llama.open_slots(
        GenerationOptions({"do_sample": False, "repetition_penalty": 1.3}, kv_cache="slots"),
        slots=3,
        tokens=TOKENS,
        prefix=(),
        seed=0,
    )
    with llama.evaluating():
        slots.admit(small.slot_requests((5, 30), (9, 30), (2, 30)))
        seen = Seen(slots.step)
    assert seen.writes["tensor"] > 3, "the tokens of each row, for its penalty"
    mask = torch.tensor([True, False])
    for work in (lambda: mask[mask], mask.nonzero, mask.any().item, lambda: bool(mask.any())):
        assert Seen(work).host_waits


SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"min_new_tokens": 9, "min_length": 20, "suppress_tokens": [7, 8], "begin_suppress_tokens": [9]},
    {"do_sample": True, "min_p": 0.1},
    {"do_sample": True, "typical_p": 0.9},
    {"do_sample": True, "epsilon_cutoff": 0.001},
    {"do_sample": True, "renormalize_logits": True},
)


@pytest.mark.parametrize("arguments", SETTINGS, ids=lambda arguments: ", ".join(arguments) or "greedy")
def test_no_setting_waits_for_the_device(small: Any, llama: Any, arguments: dict[str, Any]) -> None:
    slots = opened(small, llama, arguments, (5, 30), (9, 30))
    with llama.evaluating():
        seen = Seen(lambda: slots.runner(4))
    assert not seen.host_waits
    assert not seen.writes


def test_all_operations_have_the_same_shapes_in_100_steps(small: Any, llama: Any) -> None:
    slots = opened(small, llama, EVERYTHING, (5, 110), (9, 109), (2, 108))
    state = slots.state
    addresses = [held.data_ptr() for held in [*state, *slots.cache.held]]
    with llama.evaluating():
        shapes = []
        for _ in range(100):
            with Operations() as operations:
                slots.runner(4)
            shapes.append(operations.shapes)
    assert len(shapes[0]) > 100
    assert all(of_step == shapes[0] for of_step in shapes)
    assert [held.data_ptr() for held in [*state, *slots.cache.held]] == addresses
    assert state.positions.tolist() == [105, 109, 102, 0]


def test_a_step_needs_no_value_of_a_tensor(small: Any, llama: Any) -> None:
    slots = opened(small, llama, EVERYTHING, (5, 30), (9, 30), (2, 30))
    with llama.evaluating(), FakeTensorMode(allow_non_fake_inputs=True):
        assert slots.runner(4).shape == (4,)
        with pytest.raises(DataDependentOutputException):
            slots.runner(4).tolist()


@pytest.mark.long
def test_a_step_is_traced_as_one_graph(small: Any, llama: Any) -> None:
    slots = opened(small, llama, EVERYTHING, (5, 30), (9, 30), (2, 30))
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with llama.evaluating(), torch.no_grad():
        before = slots.state.copied()
        wanted = slots.runner.step(4).tolist()
        after = slots.state.copied()
        slots.state.restore(before)
        torch.compiler.reset()
        assert torch.compile(slots.runner.step.__call__, backend=keep, fullgraph=True)(4).tolist() == wanted
    assert len(graphs) == 1
    assert all(torch.equal(one, other) for one, other in zip(slots.state, after, strict=True))


def test_a_step_that_is_repeated_from_its_state_writes_the_same(small: Any, llama: Any) -> None:
    slots = opened(small, llama, EVERYTHING, (5, 30), (9, 30))
    with llama.evaluating(), torch.no_grad():
        before = slots.state.copied()
        first = slots.runner.step(4).tolist()
        cache = [held.clone() for held in slots.cache.held]
        slots.state.restore(before)
        assert slots.runner.step(4).tolist() == first
    assert all(torch.equal(one, other) for one, other in zip(slots.cache.held, cache, strict=True))


def test_rows_are_rounded_up_to_few_sizes() -> None:
    assert sorted({padded_rows(rows, most=100) for rows in range(1, 101)}) == [4, 8, 16, 32, 64, 100]
    assert padded_rows(1, most=1) == 1
    assert padded_rows(3, most=3) == 3


def test_steps_take_fewer_rows_as_rows_end(small: Any, llama: Any) -> None:
    slots = opened(small, llama, {}, *[(5, 4)] * 9, (5, 20), slots=10)
    counts, run = [], slots.runner.step

    class Counted:
        state = run.state

        def __call__(self, rows: int) -> Any:
            counts.append(rows)
            return run(rows)

    slots.runner.step = Counted()
    requests = small.slot_requests(*[(5, 4)] * 9, (5, 20))
    found = {}
    with llama.evaluating():
        while slots.live:
            found |= {answer.request.row: answer.generated.ids for answer in slots.step()}
    assert found == {request.row: small.greedy_alone(llama, request) for request in requests}
    assert counts[0] == 10
    assert counts[-1] == 4
    assert sorted(counts, reverse=True) == counts


class FakeStream:
    """A CUDA stream that waits for nothing."""

    device = torch.device("cuda", 1)

    def wait_stream(self, other: "FakeStream") -> None:
        """Do nothing."""


class FailingCapture:
    """`torch.cuda.graph` for a step that cannot be captured: it raises before it restores the current stream."""

    def __init__(self, graph: object, **arguments: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *raised: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")


def test_a_failed_capture_restores_the_stream_and_the_allocator(
    small: Any, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside, restored = FakeStream(), list[object]()
    for name, value in {
        "current_stream": lambda: outside,
        "graph_pool_handle": lambda: (0, 7),
        "Stream": FakeStream,
        "stream": lambda stream: nullcontext(),
        "CUDAGraph": object,
        "graph": FailingCapture,
        "set_stream": restored.append,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(
        torch._C, "_cuda_endAllocateToPool", lambda *arguments: restored.append(arguments), raising=False
    )
    slots = opened(small, llama, {}, (5, 30))
    with llama.evaluating(), pytest.raises(RuntimeError, match="not permitted"):
        slots.runner.capture(4)
    assert restored == [outside, (1, (0, 7))]
