"""Tests of long dialogues: they continue without their oldest exchanges."""

from pathlib import Path
from typing import Any

import pytest

from partita.simulation.turns import TurnEncoder, droppable, without_oldest

from .talks import fill, simulated, transcripts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two models."""
    folder = tmp_path_factory.mktemp("context")
    fill(folder)
    return folder


SAID = [
    {"role": "system", "content": "s"},
    *(
        {"role": ("user", "assistant")[place % 2], "content": f"{'ua'[place % 2]}{place // 2 + 1}"}
        for place in range(7)
    ),
]


def left(count: int, *keep: str) -> str:
    return " ".join(message["content"] for message in without_oldest(SAID, count, keep))


@pytest.mark.parametrize(
    ("keep", "shown"),
    [
        (
            ("system", "first_user"),
            ["s u1 a1 u2 a2 u3 a3 u4", "s u1 u2 a2 u3 a3 u4", "s u1 u3 a3 u4", "s u1 u4", "s u1 u4"],
        ),
        (("system",), ["s u1 a1 u2 a2 u3 a3 u4", "s u2 a2 u3 a3 u4", "s u3 a3 u4", "s u4", "s u4"]),
        (("first_user",), ["s u1 a1 u2 a2 u3 a3 u4", "u1 u2 a2 u3 a3 u4", "u1 u3 a3 u4", "u1 u4", "u1 u4"]),
        ((), ["s u1 a1 u2 a2 u3 a3 u4", "u2 a2 u3 a3 u4", "u3 a3 u4", "u4", "u4"]),
    ],
)
def test_the_oldest_exchanges_are_dropped_and_protected_messages_are_kept(
    keep: tuple[str, ...], shown: list[str]
) -> None:
    assert [left(count, *keep) for count in range(5)] == shown
    assert droppable(SAID, keep) == 3


LONG: dict[str, Any] = {
    "world": {"type": "user_sim", "done": "#"},
    "max_turns": 6,
    "max_dialogue_tokens": 24,
    "tasks": {"count": 20},
}
DROPS = {"policy": "drop_oldest_turns"}


def test_dialogues_continue_without_their_oldest_turns(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompts: list[tuple[str, str, str, int]] = []
    encode = TurnEncoder.encode

    def watched(self: TurnEncoder, dialogue: Any, before: Any, **options: Any) -> Any:
        result = encode(self, dialogue, before, **options)
        prompts.append((self.agent, dialogue.key, result.text, len(result.input_ids)))
        return result

    simulated(folder, tmp_path / "ends", **LONG)
    monkeypatch.setattr(TurnEncoder, "encode", watched)
    with caplog.at_level("INFO", "partita"):
        simulated(folder, tmp_path / "goes", context=DROPS, **LONG)

    ends, goes = transcripts(tmp_path / "ends"), transcripts(tmp_path / "goes")
    assert {(line["status"], line["reason"]) for line in ends} == {("truncated", "tokens")}
    assert {(line["status"], line["reason"]) for line in goes} == {("truncated", "turns")}
    assert max(length for _, _, _, length in prompts) <= 24 - 5, "there is always room for an answer"
    for _, key, text, _ in [prompt for prompt in prompts if prompt[0] == "agent"][-20:]:
        first = goes[int(key.removeprefix("task-"))]["messages"][0]["content"]
        assert text.startswith(f"{first}\n")
    whole = sum(len(line["messages"]) for line in goes)
    assert len(prompts) == whole
    lines = [record.getMessage() for record in caplog.records if "left out the oldest turns" in record.getMessage()]
    assert len(lines) == 1
    assert 20 < int(lines[0].split()[6]) < whole
    assert "earlier turns in one piece" not in caplog.text


@pytest.mark.parametrize("batch_size", [1, 64])
@pytest.mark.long
def test_dropped_turns_do_not_depend_on_the_batch(folder: Path, tmp_path: Path, batch_size: int) -> None:
    simulated(folder, tmp_path / "8", context=DROPS, **LONG)
    simulated(folder, tmp_path / "other", context=DROPS, batch_size=batch_size, **LONG)

    assert transcripts(tmp_path / "8") == transcripts(tmp_path / "other")


def test_a_question_longer_than_the_context_ends_the_dialogue(folder: Path, tmp_path: Path) -> None:
    agents = {"user": {"type": "scripted", "lines": ["say once", " ".join(["more"] * 30)]}}
    changes = {**LONG, "tasks": {"count": 3}}
    simulated(folder, tmp_path, context=DROPS, agents=agents, **changes)

    for line in transcripts(tmp_path):
        assert (line["status"], line["reason"], len(line["messages"])) == ("truncated", "tokens", 3)
