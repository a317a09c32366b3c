import json
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.data.batching.data_position import DataPosition, continued, plan_hash, shortened_inputs
from partita_schema.errors import ResumeError

INPUTS = {"files": "f1", "tokenizer": "t1", "seed": "42"}


LOADER_STATES = st.none() | st.lists(st.integers(0, 10**9), min_size=2, max_size=2)


@given(
    inputs=st.dictionaries(st.text(), st.text()),
    epoch=st.integers(0, 10**9),
    step=st.integers(0, 10**9),
    loader_state=LOADER_STATES,
)
def test_a_position_is_restored_from_json(inputs: dict[str, str], epoch: int, step: int, loader_state: Any) -> None:
    position = DataPosition(inputs, epoch, step, loader_state)

    loaded = DataPosition.from_json(json.loads(json.dumps(position.to_json())))

    assert loaded == position
    loaded.check(inputs)


@given(st.dictionaries(st.text(max_size=20), st.text(min_size=80), min_size=15, max_size=15))
def test_a_position_is_small_for_any_plan(inputs: dict[str, str]) -> None:
    short = shortened_inputs({name: text.encode("ascii", "replace").decode() for name, text in inputs.items()})

    saved = DataPosition(short, 10**6, 10**9, [10**9, 10**6]).to_json()

    assert len(json.dumps(saved, ensure_ascii=False).encode()) < 4096


def test_long_parts_are_shortened_and_still_differ() -> None:
    one, other = shortened_inputs({"columns": "a" * 300}), shortened_inputs({"columns": "a" * 299 + "b"})

    assert one != other
    assert {len(text) for text in (one["columns"], other["columns"])} == {96}
    assert shortened_inputs({"columns": "a" * 96}) == {"columns": "a" * 96}


names = st.text(max_size=60)


@given(st.dictionaries(names, st.text(max_size=120), max_size=60))
def test_any_inputs_are_shortened_and_keep_the_tokenizer(inputs: dict[str, str]) -> None:
    short = shortened_inputs(inputs | {"tokenizer": "t" * 32})

    assert len(json.dumps(short)) <= 1500
    assert "tokenizer" in short
    assert short == shortened_inputs(inputs | {"tokenizer": "t" * 32})


def test_parts_of_many_sources_are_shorter_and_still_differ() -> None:
    inputs = {f"stream {number}": f"{number:040}" for number in range(80)} | {"tokenizer": "t"}
    short = shortened_inputs(inputs)

    assert list(short)[:2] == ["tokenizer", "stream 0"]
    assert list(short)[-1] == "and others"
    for number in (0, 50, 79):
        assert shortened_inputs(inputs | {f"stream {number}": "changed"}) != short
    few = shortened_inputs(dict(list(inputs.items())[:30]))
    assert list(few) == [f"stream {number}" for number in range(30)]
    assert {len(text) for text in few.values()} == {32}


@given(st.dictionaries(st.text(), st.text()), st.dictionaries(st.text(), st.text()))
def test_only_equal_parts_have_equal_hashes(one: dict[str, str], other: dict[str, str]) -> None:
    assert (plan_hash(one) == plan_hash(other)) == (one == other)


def test_another_plan_is_refused_with_the_changes() -> None:
    with pytest.raises(ResumeError) as error:
        DataPosition(INPUTS).check({"files": "f1", "tokenizer": "t2", "seed": "43", "window": "8"})

    assert str(error.value) == (
        "the run cannot be resumed, because its batches would differ. Changed (old -> new):\n"
        "  tokenizer: t1 -> t2\n"
        "  seed: 42 -> 43\n"
        "  window: none -> 8\n"
        "Undo the change, or start a new run (another --run)"
    )


def test_changed_hashes_are_not_shown() -> None:
    with pytest.raises(ResumeError, match=r"Changed \(old -> new\):\n  files: changed\n  seed: 42 -> 43\n"):
        DataPosition({"files": "9718e4c4e49cf29d7ce18de0e2e6cf1e", "seed": "42"}).check(
            {"files": "3f312dd592a740aadf89d5a87a619224", "seed": "43"}
        )


def test_a_position_of_another_version_is_refused() -> None:
    with pytest.raises(
        ResumeError, match=r"has version 3, this partita reads 4; continue with the version that wrote it"
    ):
        DataPosition.from_json(DataPosition(INPUTS).to_json() | {"version": 3})


@pytest.mark.parametrize(
    "damage",
    [
        {"epoch": -1},
        {"step": "3"},
        {"step": True},
        {"fingerprint_inputs": 7},
        {"plan_hash": "x"},
        {"fingerprint_inputs": {"seed": "1"}},
    ],
)
def test_a_damaged_position_is_refused(damage: dict[str, Any]) -> None:
    with pytest.raises(ResumeError, match=r"the data position is damaged; continue from an older checkpoint"):
        DataPosition.from_json(DataPosition(INPUTS, 1, 2).to_json() | damage)


SAVED = DataPosition(INPUTS, 3, 7, [1, 2]).to_json()
CHANGED = INPUTS | {"seed": "43"}


def test_a_position_of_the_same_plan_is_resumed_with_any_setting() -> None:
    for resume in ("strict", "restart_epoch", "fresh"):
        assert continued(SAVED, INPUTS, resume=resume) == DataPosition(INPUTS, 3, 7, [1, 2])


def test_strict_refuses_another_plan_and_lists_the_other_settings() -> None:
    with pytest.raises(ResumeError) as error:
        continued(SAVED, CHANGED, resume="strict")

    assert str(error.value) == (
        "the run cannot be resumed, because its batches would differ. Changed (old -> new):\n"
        "  seed: 42 -> 43\n"
        "Undo the change, or start a new run (another --run), or keep the weights and write data.resume: restart_epoch "
        "to begin epoch 3 again, or data.resume: fresh to begin the data again"
    )


@pytest.mark.parametrize(("resume", "epoch"), [("restart_epoch", 3), ("fresh", 0)])
def test_another_plan_is_resumed_as_configured_with_a_warning(
    resume: Any, epoch: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        result = continued(SAVED, CHANGED, resume=resume)

    assert result == DataPosition(CHANGED, epoch)
    [message] = caplog.messages
    assert message == (
        "the data or its plan have changed (old -> new):\n  seed: 42 -> 43\n"
        f"As data.resume: {resume} says, the run continues at the beginning of epoch {epoch}"
    )


def test_only_fresh_ignores_an_unreadable_position(caplog: pytest.LogCaptureFixture) -> None:
    damaged = SAVED | {"epoch": -1}
    for resume in ("strict", "restart_epoch"):
        with pytest.raises(
            ResumeError, match=r"is damaged; continue from an older checkpoint; or write data\.resume: f"
        ):
            continued(damaged, INPUTS, resume=resume)

    assert continued(damaged, INPUTS, resume="fresh") == DataPosition(INPUTS)
    [message] = caplog.messages
    assert message == (
        "the data position is damaged; continue from an older checkpoint. As data.resume: fresh says, the data "
        "starts from the beginning"
    )


@pytest.mark.parametrize("resume", ["strict", "restart_epoch", "fresh"])
def test_another_tokenizer_is_refused_with_any_setting(resume: Any) -> None:
    saved = DataPosition({"files": "a", "tokenizer": "x"}, epoch=1).to_json()

    with pytest.raises(
        ResumeError, match=r"(?s)tokenizer: x -> y.*Weights know the tokens of one tokenizer only, what"
    ):
        continued(saved, {"files": "b", "tokenizer": "y"}, resume=resume)
