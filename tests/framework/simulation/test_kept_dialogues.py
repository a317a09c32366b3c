"""Tests of KV caches kept between the turns of a dialogue: the dialogues stay the same."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from partita import Model
from partita.lm.base import SlotRequest
from partita.lm.slots.slots import Slots
from partita.simulation.dialogue_scheduler import WaitingEpisodes

from . import test_run

desk = test_run.folder
"""Fixture: a folder with a model and environments."""


def dialogues(
    desk: Path,
    output: Path,
    *,
    sampled: bool = True,
    batch_size: int = 8,
    stop: str | None = None,
    kv_cache: str = "auto",
    **simulation: Any,
) -> bytes:
    """Run a simulation; return its transcripts."""
    changed = test_run.settings(desk, **simulation)
    if not sampled:
        changed["generation"] = {"max_new_tokens": 5}
    changed["generation"]["kv_cache"] = kv_cache
    if stop is not None:
        changed["generation"]["stop"] = [stop]
    (desk / "kept.yaml").write_text(json.dumps(changed), encoding="utf8")
    Model(desk / "kept.yaml", quiet=True).simulate(output, batch_size=batch_size)
    return (output / f"{simulation.get('history', 'predicted')}.jsonl").read_bytes()


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record the tokens of each prompt, and how many of them had to be prefilled."""
    results: list[tuple[int, int]] = []
    admit = Slots.admit

    def noting(self: Slots, requests: Sequence[SlotRequest]) -> Any:
        results.extend((len(request.input_ids), self.uncached_tokens(request)) for request in requests)
        return admit(self, requests)

    monkeypatch.setattr(Slots, "admit", noting)
    return results


@pytest.mark.parametrize(("history", "sampled"), [("predicted", True), ("predicted", False), ("gold", True)])
@pytest.mark.long
def test_dialogues_do_not_depend_on_kept_slots(
    desk: Path, tmp_path: Path, history: str, sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = [
        dialogues(desk, tmp_path / str(size), sampled=sampled, batch_size=size, history=history) for size in (1, 7, 64)
    ]
    monkeypatch.setattr(WaitingEpisodes, "keeps", False)
    results.append(dialogues(desk, tmp_path / "whole", sampled=sampled, batch_size=7, history=history))

    assert results == [results[0]] * 4


@pytest.mark.long
@pytest.mark.parametrize(("sampled", "batch_size"), [(True, 1), (True, 7), (False, 64)])
def test_dialogues_are_the_same_with_a_paged_cache(desk: Path, tmp_path: Path, sampled: bool, batch_size: int) -> None:
    found = [
        dialogues(desk, tmp_path / kv_cache, sampled=sampled, batch_size=batch_size, kv_cache=kv_cache)
        for kv_cache in ("slots", "paged")
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "batch_size", [pytest.param(1, marks=pytest.mark.long), 8, pytest.param(64, marks=pytest.mark.long)]
)
def test_a_turn_prefills_only_new_tokens_and_a_new_dialogue_all_its_tokens(
    desk: Path, tmp_path: Path, read: list[tuple[int, int]], batch_size: int
) -> None:
    dialogues(desk, tmp_path, batch_size=batch_size)

    firsts = [(length, uncached) for length, uncached in read if length == uncached]
    assert len(firsts) == 60, "prompts share a prefix, but no dialogue uses the cache of another"
    later = [(length, uncached) for length, uncached in read if length != uncached]
    assert len(later) == len(read) - 60 > 60
    assert max(uncached for _, uncached in later) < min(length for length, _ in later)


def test_a_dialogue_with_correct_answers_keeps_the_tokens_before_them(
    desk: Path, tmp_path: Path, read: list[tuple[int, int]]
) -> None:
    dialogues(desk, tmp_path, history="gold")

    assert sum(length == uncached for length, uncached in read) == 60


@pytest.mark.long
def test_a_stop_text_is_not_prefilled(desk: Path, tmp_path: Path, read: list[tuple[int, int]]) -> None:
    whole = dialogues(desk, tmp_path / "1", batch_size=1, stop="a")
    assert any(b"tokens" in line for line in whole.splitlines())
    assert dialogues(desk, tmp_path / "64", batch_size=64, stop="a") == whole
    assert sum(length == uncached for length, uncached in read) == 2 * 60


@pytest.mark.long
def test_dialogues_do_not_change_with_fewer_slots_than_dialogues(
    desk: Path, tmp_path: Path, read: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = dialogues(desk, tmp_path / "whole", batch_size=8)
    before = len(read)
    step, steps = Slots.step, [0]

    def short(self: Slots) -> Any:
        steps[0] += 1
        if steps[0] == 20 and self.pool.layout.slots == 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return step(self)

    monkeypatch.setattr(Slots, "step", short)
    assert dialogues(desk, tmp_path / "short", batch_size=8) == whole
    assert steps[0] > 20
    assert sum(length == uncached for length, uncached in read[before:]) > 60, (
        "some dialogues had to be prefilled completely"
    )
