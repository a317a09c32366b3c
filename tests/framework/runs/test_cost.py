"""The cost of a run is summed over its starts and its ranks."""

import pytest

from partita.runs.cost import Cost, merged


def work() -> int:
    return sum(number * number for number in range(200_000))


def test_what_earlier_starts_took_is_added() -> None:
    first = Cost({})
    work()
    before = first.record()
    assert before["seconds"] > 0
    assert before["cpu_seconds"] > 0
    assert before["peak_memory_bytes"] > 10**6
    second = Cost({"seconds": 1000.0, "cpu_seconds": 2000.0, "peak_memory_bytes": 10**15, "gpu_seconds": 7.0})
    after = second.record()
    assert 1000 <= after["seconds"] < 1100
    assert 2000 <= after["cpu_seconds"] < 2100
    assert (after["peak_memory_bytes"], after["gpu_seconds"]) == (10**15, 7.0)


def test_a_record_does_not_count_twice() -> None:
    cost = Cost({"seconds": 1000.0})
    assert [round(cost.record()["seconds"], -1) for _ in range(3)] == [1000, 1000, 1000]


def test_ranks_run_at_the_same_time() -> None:
    ranks = [
        {"seconds": 3.0, "cpu_seconds": 2.0, "peak_memory_bytes": 5, "gpu_seconds": 3.0},
        {"seconds": 4.0, "cpu_seconds": 1.0, "peak_memory_bytes": 7},
    ]
    assert merged(ranks) == {"seconds": 4.0, "cpu_seconds": 3.0, "peak_memory_bytes": 7, "gpu_seconds": 3.0}
    assert merged([{}]) == {}


def test_a_gpu_is_counted_where_torch_uses_one() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        assert "gpu_seconds" not in Cost({}).record()
        return
    torch.zeros(1000, device="cuda")
    assert Cost({}).record()["peak_gpu_memory_bytes"] >= 4000
