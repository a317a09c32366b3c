import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.data.cursor import Cursor, plan_hash
from partita_schema.errors import ResumeError

PARTS = {"files": "f1", "tokenizer": "t1", "seed": "42"}


@given(parts=st.dictionaries(st.text(), st.text()), epoch=st.integers(0, 10**9), step=st.integers(0, 10**9))
def test_a_position_survives_json(parts: dict[str, str], epoch: int, step: int) -> None:
    cursor = Cursor(parts, epoch, step)

    loaded = Cursor.from_json(json.loads(json.dumps(cursor.to_json())))

    assert loaded == cursor
    loaded.check(parts)


@given(st.dictionaries(st.text(), st.text()), st.dictionaries(st.text(), st.text()))
def test_equal_parts_alone_have_equal_hashes(one: dict[str, str], other: dict[str, str]) -> None:
    assert (plan_hash(one) == plan_hash(other)) == (one == other)


def test_another_plan_is_refused_with_what_changed() -> None:
    with pytest.raises(ResumeError) as error:
        Cursor(PARTS).check({"files": "f1", "tokenizer": "t2", "seed": "43", "window": "8"})

    assert str(error.value) == (
        "the run cannot continue, since its batches would be others than before. Changed (old -> new):\n"
        "  tokenizer: t1 -> t2\n"
        "  seed: 42 -> 43\n"
        "  window: none -> 8\n"
        "Undo the change, or start a new run (another --run)"
    )


def test_a_position_of_another_version_is_refused() -> None:
    with pytest.raises(
        ResumeError, match=r"has version 2, this partita reads 1; continue with the version that wrote it"
    ):
        Cursor.from_json(Cursor(PARTS).to_json() | {"version": 2})


@pytest.mark.parametrize(
    "damage", [{"epoch": -1}, {"step": "3"}, {"step": True}, {"parts": 7}, {"plan_hash": "x"}, {"parts": {"seed": "1"}}]
)
def test_a_damaged_position_is_refused(damage: dict[str, Any]) -> None:
    with pytest.raises(ResumeError, match=r"the data position is damaged; continue from an older checkpoint"):
        Cursor.from_json(Cursor(PARTS, 1, 2).to_json() | damage)
