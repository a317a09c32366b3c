import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.data.streams.packing import pack, unpack
from partita_schema.errors import ResumeError

numbers = st.none() | st.integers() | st.integers(0, 10**12)
values = st.recursive(numbers, lambda inside: st.lists(inside, max_size=5), max_leaves=20)


@given(values)
def test_what_is_packed_comes_back_through_json(value: Any) -> None:
    text = pack(value)

    assert unpack(json.loads(json.dumps(text))) == value
    assert len(json.dumps(text)) == len(text) + 2


def test_a_place_in_a_large_file_is_short() -> None:
    assert len(pack([999_999_999_999, 999_999_999, 999_999_999])) <= 25


@given(
    st.text().filter(lambda text: not text.isascii())
    | st.binary()
    | st.lists(st.integers())
    | st.integers()
    | st.none()
)
def test_what_is_not_packed_is_damaged(found: Any) -> None:
    with pytest.raises(ResumeError, match="the data position is damaged; continue from an older checkpoint"):
        unpack(found)


@pytest.mark.parametrize("cut", [1, 2, 3, 5])
def test_a_text_that_was_cut_is_damaged(cut: int) -> None:
    with pytest.raises(ResumeError, match="the data position is damaged"):
        unpack(pack([10**9, [4, 5], None])[:-cut])
