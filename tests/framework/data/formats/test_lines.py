"""Tests of the line reader against a plain split of the bytes."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.data.formats.base import BLOCK
from partita.data.formats.lines import split_lines

LIMIT = 20


@given(st.lists(st.one_of(st.just(0), st.integers(LIMIT - 2, LIMIT + 2), st.integers(0, 60))), st.booleans())
def test_a_line_may_be_as_long_as_the_limit_and_no_longer(lengths: list[int], ends: bool) -> None:
    texts = [b"x" * length for length in lengths]
    data = b"\n".join(texts) + (b"\n" if ends and texts else b"")
    plain = data.split(b"\n")[: -1 if data.endswith(b"\n") or not data else None]
    expected = [text if len(text) <= LIMIT else None for text in plain if text]

    results = list(split_lines(io.BytesIO(data), max_row_bytes=LIMIT))

    assert [line.text for line in results if line.text != b""] == expected
    assert sum(line.num_lines for line in results) == len(plain)
    assert [line.end for line in results][-1:] == ([len(data)] if data else [])


@pytest.mark.parametrize("before", [1, BLOCK - LIMIT - 1, BLOCK - LIMIT, BLOCK - 1])
@pytest.mark.parametrize("length", [LIMIT, LIMIT + 1])
def test_a_line_across_blocks_has_the_same_limit(before: int, length: int) -> None:
    first = b"\n" * before
    data = first + b"x" * length + b"\ny\n"
    results = [line.text for line in split_lines(io.BytesIO(data), max_row_bytes=LIMIT) if line.text != b""]
    assert results == [b"x" * length if length <= LIMIT else None, b"y"]
