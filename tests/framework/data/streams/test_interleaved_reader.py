import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.data.batching.data_position import DataPosition, shortened_inputs
from partita.data.formats.base import Position, StreamRow
from partita.data.streams.interleaved_reader import InterleavedReader, pack, unpack
from partita.data.streams.stream_loader import count_shard_groups
from partita_schema.errors import ResumeError

from ....properties import examples


class Numbers:
    """Shards with these numbers of rows."""

    fingerprint = ""

    def __init__(self, sizes: list[int], name: str = "numbers") -> None:
        self.name, self.lengths = name, sizes
        self.shards = [f"{name}/{shard}" for shard in range(len(sizes))]
        self.sizes: list[float] = [1.0] * len(sizes)

    def read(self, shard: int, start: Position | None) -> Iterator[tuple[StreamRow, Position]]:
        assert start is None or isinstance(start, int)
        for number in range(start or 0, self.lengths[shard]):
            yield StreamRow(shard, number, {"row": number}), number + 1


class Endless(Numbers):
    def read(self, shard: int, start: Position | None) -> Iterator[tuple[StreamRow, Position]]:
        assert start is None or isinstance(start, int)
        number = start or 0
        while True:
            yield StreamRow(shard, number, {"row": number}), number + 1
            number += 1


Seen = tuple[int, int, int]


def names(rows: list[tuple[int, StreamRow]]) -> list[Seen]:
    return [(source, row.shard, row.number) for source, row in rows]


def reader(
    sources: list[Numbers],
    *,
    group: int = 0,
    num_groups: int = 1,
    stop: str = "all",
    weights: list[float] | None = None,
    state: Any = None,
    seed: int = 7,
    epoch: int = 0,
    shuffle: bool = True,
) -> InterleavedReader:
    weights = weights or [1.0] * len(sources)
    return InterleavedReader(
        sources,
        weights=weights,
        stop=stop,
        group=group,
        num_groups=num_groups,
        seed=seed,
        epoch=epoch,
        state=state,
        shuffle=shuffle,
    )


def saved(state: Any) -> Any:
    """Return a reader state as restored from a checkpoint."""
    return json.loads(json.dumps(state))


sizes = st.lists(st.integers(0, 9), min_size=1, max_size=12)
sources = st.lists(sizes, min_size=1, max_size=4)
stops = st.sampled_from(["first", "all", "all_once"])
weights = st.lists(st.floats(0.1, 20), min_size=4, max_size=4)


@settings(deadline=None)
@given(sizes, st.integers(1, 6), st.integers(0, 3))
def test_every_row_is_read_once_over_all_shard_groups(sizes: list[int], num_groups: int, epoch: int) -> None:
    stream = Numbers(sizes)

    rows = [
        row
        for group in range(num_groups)
        for row in names(reader([stream], group=group, num_groups=num_groups, epoch=epoch).take(10**6))
    ]

    assert sorted(rows) == [(0, shard, number) for shard, size in enumerate(sizes) for number in range(size)]


@examples(200)
@given(sources, stops, weights, st.integers(1, 3), st.data())
def test_a_reader_resumes_exactly_from_every_position(
    sources: list[list[int]], stop: str, weights: list[float], num_groups: int, data: st.DataObject
) -> None:
    streams = [Numbers(sizes, str(number)) for number, sizes in enumerate(sources)]
    group = data.draw(st.integers(0, num_groups - 1))

    def at(state: Any = None) -> InterleavedReader:
        return reader(
            streams, group=group, num_groups=num_groups, stop=stop, weights=weights[: len(streams)], state=state
        )

    whole = names(at().take(400))
    count = data.draw(st.integers(0, len(whole)))
    first = at()
    before = names(first.take(count))
    rest = names(at(saved(first.state())).take(400 - count))

    assert before + rest == whole
    assert names(first.take(400 - count)) == rest


def test_ten_resumes_in_a_row_change_nothing() -> None:
    streams = [Numbers([5, 0, 9, 3, 8, 1, 7], "a"), Numbers([4, 4], "b")]
    whole = names(reader(streams, weights=[2, 1]).take(1000))
    results: list[Seen] = []
    state = None
    for _ in range(10):
        part = reader(streams, weights=[2, 1], state=state)
        results += names(part.take(4))
        state = saved(part.state())

    assert results + names(reader(streams, weights=[2, 1], state=state).take(1000)) == whole


def test_rows_of_several_shards_are_interleaved_in_a_different_order_each_epoch() -> None:
    stream = Numbers([50] * 12)
    first, again, second = (names(reader([stream], epoch=epoch).take(600)) for epoch in (0, 0, 1))

    assert first == again
    assert first != second
    assert len({shard for _, shard, _ in first[:8]}) == 4
    assert names(reader([stream], seed=8).take(600)) != first
    in_order = names(reader([stream], shuffle=False).take(600))
    assert [shard for _, shard, _ in in_order] == [shard for shard in range(12) for _ in range(50)]


def test_shares_are_exact_after_every_row() -> None:
    streams: list[Numbers] = [Endless([0, 0, 0], "a"), Endless([0], "b"), Endless([0, 0], "c")]
    counts: Counter[int] = Counter()
    group = reader(streams, weights=[5, 3, 2], stop="first")
    for taken in range(1, 300):
        counts[group.take(1)[0][0]] += 1
        assert all(abs(counts[source] - taken * share) < 1 for source, share in enumerate((0.5, 0.3, 0.2)))


def test_first_stops_with_the_source_that_ends_first() -> None:
    rows = names(reader([Numbers([10], "a"), Numbers([90], "b")], stop="first").take(1000))

    assert Counter(source for source, _, _ in rows)[0] == 10
    assert len(rows) in (20, 21)


def test_all_repeats_shorter_sources_until_each_has_ended() -> None:
    rows = names(reader([Numbers([3, 4], "a"), Numbers([30], "b")], stop="all").take(1000))
    counts = Counter(rows)

    assert len(rows) in (60, 61)
    assert {counts[1, 0, number] for number in range(30)} == {1}
    assert all(counts[0, shard, number] >= 4 for shard, size in ((0, 3), (1, 4)) for number in range(size))


def test_all_once_gives_every_row_once() -> None:
    streams = [Numbers([3, 4], "a"), Numbers([30], "b"), Numbers([0], "c")]
    rows = names(reader(streams, stop="all_once", weights=[9, 1, 4]).take(1000))

    assert sorted(rows) == sorted(
        (source, shard, number)
        for source, stream in enumerate(streams)
        for shard, size in enumerate(stream.lengths)
        for number in range(size)
    )


@pytest.mark.parametrize("stop", ["all", "all_once"])
def test_a_source_without_rows_in_a_shard_group_does_not_block_the_others(stop: str) -> None:
    rows = names(reader([Numbers([0, 0], "a"), Numbers([7], "b")], stop=stop).take(1000))

    assert rows == [(1, 0, number) for number in range(7)]
    assert reader([Numbers([0], "a"), Numbers([], "b")], stop=stop).take(5) == []


def test_a_source_with_fewer_rows_than_shard_groups_keeps_its_share_in_every_group() -> None:
    streams = [Numbers([250] * 4, "big"), Numbers([1, 1, 0, 0], "small")]
    groups = [names(reader(streams, group=group, num_groups=4, stop="all").take(10**6)) for group in range(4)]
    rows = Counter(row for group in groups for row in group)

    assert [Counter(source for source, _, _ in group)[0] for group in groups] == [250] * 4
    assert all(abs(Counter(source for source, _, _ in group)[1] - 250) <= 1 for group in groups)
    assert {rows[0, shard, number] for shard in range(4) for number in range(250)} == {1}
    assert all(450 <= rows[1, shard, 0] <= 550 for shard in range(2))


def test_an_empty_source_does_not_block_several_shard_groups() -> None:
    streams = [Numbers([9] * 4, "big"), Numbers([0] * 4, "none")]

    assert [len(reader(streams, group=group, num_groups=4).take(999)) for group in range(4)] == [9] * 4


@pytest.mark.parametrize("stop", ["first", "all_once"])
def test_a_source_with_fewer_rows_than_shard_groups_is_not_repeated_without_repetition(stop: str) -> None:
    streams = [Numbers([50] * 4, "big"), Numbers([1, 1, 0, 0], "small")]
    rows = Counter(
        row for group in range(4) for row in names(reader(streams, group=group, num_groups=4, stop=stop).take(999))
    )

    assert set(rows.values()) == {1}
    assert sum(source for source, _, _ in rows) == 2


def test_shard_groups_are_even_in_each_epoch_with_uneven_shards() -> None:
    stream = Numbers([90, 30, 30, 30, 20, 20, 10, 10, 10, 50])
    stream.sizes = [float(size) for size in stream.lengths]

    for epoch in range(5):
        groups = [len(reader([stream], group=group, num_groups=3, epoch=epoch).take(999)) for group in range(3)]
        assert sum(groups) == 300
        assert max(groups) <= 110


@pytest.mark.parametrize("damage", [[], 7, "", "~", "not packed", "é"])
def test_a_value_that_is_not_a_state_is_reported_as_damaged(damage: Any) -> None:
    with pytest.raises(ResumeError, match="the data position is damaged; continue from an older checkpoint"):
        reader([Numbers([3, 4])], state=damage)


@pytest.mark.parametrize(
    "content",
    [
        None,
        [],
        [[0], [0]],
        [[0], [0], [0, 0, 0]],
        [[0, 0], [0], [0, 0, 0, 0]],
        [[0], [3], [0, 0, 0, 0]],
        [[0], [0], [0, 4, 0, 0]],
        [[0], [0], [0, 0, 3, 0]],
        [[0], [0], [0, 0, 1, 0, 2, 1]],
        [[0], [0], [0, 0, 1, 0, 0]],
        [[0], [0], [-1, 0, 0, 0]],
        [[0], [0], [0, 0, 0, 0, *[0, 1] * 5]],
    ],
)
def test_an_invalid_state_is_reported_as_damaged(content: Any) -> None:
    with pytest.raises(ResumeError, match="the data position is damaged; continue from an older checkpoint"):
        reader([Numbers([3, 4])], state=pack(content))


def test_a_changed_character_of_a_state_is_detected() -> None:
    group = reader([Numbers([30, 40]), Numbers([9])])
    group.take(20)
    state = group.state()
    seen = 0
    for index, character in enumerate(state):
        changed = state[:index] + ("A" if character != "A" else "B") + state[index + 1 :]
        try:
            reader([Numbers([30, 40]), Numbers([9])], state=changed)
        except ResumeError:
            seen += 1

    assert seen == len(state)


class Far(Numbers):
    """Rows far into files of a terabyte, split over several shard groups."""

    def read(self, shard: int, start: Position | None) -> Iterator[tuple[StreamRow, Position]]:
        digits = random.Random(f"{self.name} {shard}")  # incompressible: no pattern
        while True:
            yield StreamRow(shard, 1, {}), [digits.randrange(10 ** (n - 1), 10**n) for n in (12, 9, 9)]


@pytest.mark.parametrize("num_sources", [1, 2, 3, 4, 5, 6, 8, 10, 16, 24, 48])
@pytest.mark.parametrize("batches", [16, 12])
def test_a_position_of_any_mix_is_smaller_than_4_kb(num_sources: int, batches: int) -> None:
    num_groups = count_shard_groups(batches, sources=num_sources)
    streams: list[Numbers] = [Far([1] * 5000, f"a/rather/long/path/to/source_{n}") for n in range(num_sources)]
    positions = []
    for group in range(num_groups):
        taken = reader(
            streams, group=group, num_groups=num_groups, weights=[0.1 + 0.0123456789 * n for n in range(num_sources)]
        )
        taken.take(300)
        for own in taken._readers:
            own._pass, own._next = 99, 5000 // num_groups
            for shard in own._open:
                shard.index = 5000 // num_groups - 1
        positions.append([taken.state(), 9_999_999, 2047])
    inputs = {f"stream {stream.name}": "f" * 32 for stream in streams} | {
        f"part number {n}": "f" * 96 for n in range(20)
    }
    ledger = dict.fromkeys(("rows_used", "left_out", "cut_rows", "cut_tokens"), 10**11)
    data_position = DataPosition(
        shortened_inputs({"tokenizer": "f" * 32} | inputs), 999, 10**9, {"groups": positions, "ledger": ledger}
    )

    assert len(json.dumps(data_position.to_json())) < 4096
    assert sum(len(own._open) for own in taken._readers) >= num_sources


numbers = st.none() | st.integers() | st.integers(0, 10**12)
values = st.recursive(numbers, lambda inside: st.lists(inside, max_size=5), max_leaves=20)


@given(values)
def test_a_packed_state_is_restored_from_json(value: Any) -> None:
    text = pack(value)

    assert unpack(json.loads(json.dumps(text))) == value
    assert len(json.dumps(text)) == len(text) + 2


def test_the_state_of_a_large_file_is_small() -> None:
    assert len(pack([999_999_999_999, 999_999_999, 999_999_999])) <= 25


@given(
    st.text().filter(lambda text: not text.isascii())
    | st.binary()
    | st.lists(st.integers())
    | st.integers()
    | st.none()
)
def test_an_unpacked_state_is_reported_as_damaged(found: Any) -> None:
    with pytest.raises(ResumeError, match="the data position is damaged; continue from an older checkpoint"):
        unpack(found)


@pytest.mark.parametrize("cut", [1, 2, 3, 5])
def test_a_truncated_state_is_reported_as_damaged(cut: int) -> None:
    with pytest.raises(ResumeError, match="the data position is damaged"):
        unpack(pack([10**9, [4, 5], None])[:-cut])
