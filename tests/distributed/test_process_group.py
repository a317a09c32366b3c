"""Tests of collective operations, with a thread for each rank."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import torch.distributed as dist

from partita.distributed.process_group import BUCKET_BYTES, StoredText, buckets
from partita.distributed.thread_group import ThreadGroup
from partita.generation.work_queue import WorkQueue, drain
from partita_trainers.process_group import SINGLE_PROCESS, main_process_first, synchronized_errors

T = TypeVar("T")


def on_ranks(ranks: int, work: Callable[[ThreadGroup], T]) -> list[T]:
    """Run `work` on each rank; return the results."""
    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(work, ThreadGroup.of(ranks, timeout_seconds=20)))


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("total", [0, 1, 3, 1000])
def test_every_item_of_a_plan_is_claimed_once(ranks: int, total: int) -> None:
    def claim(process_group: ThreadGroup) -> list[int]:
        claims = WorkQueue(total, process_group=process_group)
        results: list[int] = []
        while claims.left:
            places = claims.take(16)
            assert len(places) <= 16 or ranks == 1
            results += places
        return results

    parts = on_ranks(ranks, claim) if ranks > 1 else [claim(SINGLE_PROCESS)]  # type: ignore[arg-type]

    assert sorted(place for part in parts for place in part) == list(range(total))


def test_consecutive_plans_are_claimed_separately() -> None:
    def claim(process_group: ThreadGroup) -> list[list[int]]:
        return [list(drain(WorkQueue(7, process_group=process_group))) for _ in range(3)]

    parts = on_ranks(2, claim)

    for one, other in zip(*parts, strict=True):
        assert sorted([*one, *other]) == list(range(7))


def test_claims_become_smaller_towards_the_end() -> None:
    sizes: list[int] = []
    process_group = ThreadGroup.of(2)[0]
    claims = WorkQueue(100, process_group=process_group)
    while claims.left:
        sizes.append(len(claims.take(64)))

    assert sizes[0] == 25
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1


def test_a_slow_rank_claims_less_and_no_rank_waits_for_it() -> None:
    def claim(process_group: ThreadGroup) -> int:
        result = 0
        claims = WorkQueue(400, process_group=process_group)
        while claims.left:
            result += len(claims.take(4))
            time.sleep(0.3 if process_group.rank == 1 else 0.001)
        return result

    fast, slow, other = on_ranks(3, claim)

    assert fast + slow + other == 400
    assert slow < min(fast, other) / 2


def test_rank_0_searches_and_the_others_get_its_result() -> None:
    asked: list[int] = []

    def work(process_group: ThreadGroup) -> str:
        return process_group.run_on_rank_zero(lambda: asked.append(process_group.rank) or "found", "a search")

    assert on_ranks(3, work) == ["found"] * 3
    assert asked == [0]


def test_the_first_rank_finishes_before_the_others_start() -> None:
    order: list[int] = []

    def work(process_group: ThreadGroup) -> None:
        with main_process_first(process_group, "a file"):
            order.append(process_group.rank)

    on_ranks(3, work)

    assert order[0] == 0
    assert sorted(order) == [0, 1, 2]


def test_no_rank_continues_after_one_has_failed() -> None:
    passed: list[int] = []

    def work(process_group: ThreadGroup) -> str:
        try:
            with synchronized_errors(process_group, "reading"):
                if process_group.rank == 1:
                    raise ValueError("rank 1 cannot read")
            passed.append(process_group.rank)
        except ValueError as error:
            return str(error)
        return ""

    assert on_ranks(3, work) == ["rank 1 cannot read"] * 3
    assert passed == []


def test_a_shared_text_is_read_by_all_ranks_and_can_be_replaced() -> None:
    def work(process_group: ThreadGroup) -> list[str]:
        text, other = (process_group.shared_text(about) for about in ("a reason", "another"))
        read = [text.read()]
        process_group.all_gather_object(None, "the start")
        if process_group.rank == 1:
            text.write("too late")
            text.write("no such ball")
        process_group.all_gather_object(None, "the text")
        return [*read, text.read(), other.read()]

    assert on_ranks(3, work) == [["", "no such ball", ""]] * 3


def test_a_text_in_a_store_is_read_by_its_key_and_empty_without_a_store() -> None:
    store = dist.HashStore()
    text = StoredText(store, key="reason")
    assert text.read() == ""
    text.write("no such ball: ä")
    assert StoredText(store, key="reason").read() == "no such ball: ä"
    assert StoredText(store, key="other").read() == ""
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("localhost", server.port, is_master=False, timeout=timedelta(seconds=5))
    text = StoredText(client, key="reason")
    text.write("no such ball")
    assert text.read() == "no such ball"
    del server
    text.write("the store is gone")
    assert text.read() == ""


def test_ranks_in_different_collective_calls_are_reported() -> None:
    def work(process_group: ThreadGroup) -> str:
        with pytest.raises(AssertionError) as error:
            process_group.all_gather_object(1, "the loss" if process_group.rank else "the rows")
        return str(error.value)

    assert on_ranks(2, work) == ["ranks are not at the same collective: ['the loss', 'the rows']"] * 2


def test_tensors_are_summed_together_up_to_a_size() -> None:
    large = torch.zeros(BUCKET_BYTES // 4)
    small = [torch.zeros(3), torch.zeros(5, dtype=torch.bfloat16), torch.zeros(2, 2).T, torch.zeros(1)]

    results = list(buckets([small[0], large, *small[1:]]))

    assert [[tuple(tensor.shape) for tensor in bucket] for bucket in results] == [
        [tuple(large.shape)],
        [(3,), (2, 2), (1,)],
        [(5,)],
    ]


def test_many_tensors_are_summed_in_buckets_of_limited_size() -> None:
    tensors = [torch.zeros(BUCKET_BYTES // 12) for _ in range(10)]  # a third of a bucket each

    results = list(buckets(tensors))

    assert [len(bucket) for bucket in results] == [3, 3, 3, 1]
    assert sum(tensor.numel() for bucket in results for tensor in bucket) == sum(t.numel() for t in tensors)


def test_every_rank_gets_the_sums() -> None:
    def work(process_group: ThreadGroup) -> Any:
        tensors = [torch.full((2,), float(process_group.rank + 1)), torch.ones(1)]
        process_group.all_reduce_sum_(tensors)
        return np.concatenate([tensor.numpy() for tensor in tensors]).tolist()

    assert on_ranks(3, work) == [[6.0, 6.0, 3.0]] * 3
