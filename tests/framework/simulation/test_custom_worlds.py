"""Tests of custom worlds: any agents in any order, and dialogues that do not depend on the batch."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from partita import ConfigError, ResumeError
from partita.simulation.model_speaker import ModelSpeaker
from partita.simulation.rollout import Rollout

from ...json_lines import read_json_lines
from ...properties import ends
from .packages import install
from .talks import fill, simulated, transcripts

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "simulation.md"
PANEL: dict[str, Any] = {
    "world": {"type": "custom", "target": "plays_of_tests:Panel"},
    "agents": {
        "others": {
            "guest": {"type": "scripted", "program": "agents_of_tests:Crowd"},
            "judge": {"type": "model", "run": "guest", "prompt": "red {number}"},
        }
    },
}


def world(name: str, **options: Any) -> dict[str, Any]:
    return {"type": "custom", "target": f"plays_of_tests:{name}", "options": options}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two models, worlds and scripted agents."""
    folder = tmp_path_factory.mktemp("worlds")
    fill(folder)
    return folder


@pytest.fixture(scope="module")
def panels(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the transcripts of sampled dialogues of two models and a program, with batch size 8."""
    output = tmp_path_factory.mktemp("panels")
    simulated(folder, output, **PANEL)
    return output


def test_agents_speak_in_the_order_of_the_world(panels: Path) -> None:
    lines = transcripts(panels)
    assert len(lines) == 40
    ends = set()
    for number, line in enumerate(lines):
        agents = [message["agent"] for message in line["messages"]]
        guests = min(2 + number % 3, 3)
        assert agents == ["system", "host", *["guest", "agent", "judge"] * guests]
        assert line["reward"] == 0.25 * guests
        assert line["metrics"] == ({"asked": 3.0} if guests == 3 else {})
        assert (line["status"], line["reason"]) == ("done", None), "a world that returns without a status is done"
        assert ["tokens" in message for message in line["messages"][2:5]] == [False, True, True]
        ends.add(guests)
    assert ends == {2, 3}


@pytest.mark.parametrize("batch_size", ends([1, 7, 64]))
@pytest.mark.long
def test_dialogues_of_three_agents_do_not_depend_on_the_batch_size(
    folder: Path, panels: Path, tmp_path: Path, batch_size: int
) -> None:
    simulated(folder, tmp_path, batch_size=batch_size, **PANEL)

    assert (tmp_path / "predicted.jsonl").read_bytes() == (panels / "predicted.jsonl").read_bytes()


def test_a_message_to_all_reaches_every_agent(
    folder: Path, panels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: dict[str, str] = {}
    said = ModelSpeaker.turn_recorded

    def watched(self: ModelSpeaker, active_index: int) -> None:
        pending = self.requested[active_index]
        if pending.episode.key == "task-1":
            prompts[self.agent] = pending.prompt.text
        said(self, active_index)

    monkeypatch.setattr(ModelSpeaker, "turn_recorded", watched)
    simulated(folder, tmp_path, **PANEL)

    line = transcripts(panels)[1]
    words = [message["content"] for message in line["messages"]]
    assert prompts["agent"] == "\n".join([*words[:9], ""])
    assert line["messages"][0]["role"] == "system"
    assert prompts["judge"] == "\n".join(["red 1", *words[1:10], ""]), "all but the agent's private message"


def test_a_world_sets_the_end_of_a_dialogue_and_the_correct_answers(folder: Path, tmp_path: Path) -> None:
    report = simulated(folder, tmp_path, world=world("Quiz"), agents={}, history=["gold", "predicted"])

    for line in transcripts(tmp_path):
        assert (line["status"], line["reason"]) == ("truncated", "bell")
        assert [message.get("gold") for message in line["messages"]] == [None, "one two"] * 3
    result = report.flat()
    assert set(result) == {"gold", "predicted"}
    assert all("exact_turns" in column for column in result.values())


def test_max_turns_limits_the_answers_of_the_agent(folder: Path, tmp_path: Path) -> None:
    simulated(folder, tmp_path, world=world("Endless"), agents={}, max_turns=5)

    for line in transcripts(tmp_path):
        assert (line["status"], line["reason"]) == ("truncated", "turns")
        assert sum(message["agent"] == "agent" for message in line["messages"]) == 5


def test_a_world_that_misbehaves_fails_only_its_dialogue(folder: Path, tmp_path: Path) -> None:
    limits = {"step_seconds": 1.0, "fail_fraction": 0.5}
    report = simulated(folder, tmp_path, world=world("Broken"), agents={}, limits=limits)

    reasons = {
        1: "world: OSError: nobody is in (plays_of_tests.py, line 134)",
        2: "world: run gave 'agent'; yield partita.simulation.RequestTurn(), with an agent's name in it",
        3: "world: run asks 'gest'; the agents of the file are agent",
        4: "timeout: no answer within 1 s (limits.step_seconds)",
        5: "world: run gave None; write it with yield",
        6: "world: SystemExit: 3 (plays_of_tests.py, line 142)",
    }
    for number, line in enumerate(transcripts(tmp_path)):
        assert (line["status"], line["reason"]) == ("failed" if number in reasons else "done", reasons.get(number))
        assert len(line["messages"]) == (0 if number == 5 else 2 if number in reasons else 3)
    assert report.histories["predicted"].statuses == {"done": 34, "failed: world": 5, "failed: timeout": 1}


def test_an_error_that_is_no_exception_fails_its_dialogue_at_once(folder: Path, tmp_path: Path) -> None:
    simulated(folder, tmp_path / "world", world=world("Cancelling"), agents={}, tasks={"count": 2})
    agents = {"user": {"type": "scripted", "program": "agents_of_tests:Cancelled"}}
    simulated(folder, tmp_path / "agent", agents=agents, tasks={"count": 1})
    checker = {"type": "agents_of_tests:CancelledChecker"}
    simulated(folder, tmp_path / "checker", world=world("Quiz"), agents={}, tasks={"count": 1}, checker=checker)

    reasons = [line["reason"] for name in ("world", "agent", "checker") for line in transcripts(tmp_path / name)]
    assert reasons == [
        "world: CancelledError (plays_of_tests.py, line 152)",
        "world: KeyboardInterrupt (plays_of_tests.py, line 152)",
        "agent user: CancelledError (agents_of_tests.py, line 43)",
        "checker: CancelledError: no more checks (agents_of_tests.py, line 61)",
    ]


def test_a_world_that_fails_when_closed_fails_its_dialogue(folder: Path, tmp_path: Path) -> None:
    simulated(folder, tmp_path, world=world("Grudging"), agents={}, tasks={"count": 4}, max_turns=2)

    reason = "world: OSError: the door is stuck (plays_of_tests.py, line 70)"
    for line in transcripts(tmp_path):
        assert (line["status"], line["reason"]) == ("failed", reason)


def test_the_end_of_a_world_does_not_turn_a_failure_into_a_success(folder: Path, tmp_path: Path) -> None:
    guest = {"type": "scripted", "program": "agents_of_tests:Crowd", "options": {"misbehaves": True}}
    crowd = {"others": {"guest": guest}}
    simulated(folder, tmp_path / "failed", world=world("Vain"), agents=crowd, tasks={"count": 4}, max_turns=5)
    simulated(folder, tmp_path / "cut", world=world("Vain"), agents=crowd, tasks={"count": 2}, max_turns=1)

    ends = [(line["status"], line["reason"], line["reward"]) for line in transcripts(tmp_path / "cut")]
    assert ends == [("truncated", "turns", 1.0)] * 2
    ends = [(line["status"], line["reason"], line["reward"]) for line in transcripts(tmp_path / "failed")]
    assert ends == [("done", None, 1.0)] * 3 + [
        ("failed", "agent guest: OSError: nobody is in (agents_of_tests.py, line 32)", None)
    ]


def test_everything_a_world_yields_is_checked(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    simulated(folder, tmp_path, world=world("Garbage"), agents={}, tasks={"count": 13}, limits={"fail_fraction": 1.0})

    reasons = [
        "world: run gave None; yield partita.simulation.RequestTurn(), with an agent's name in it",
        (
            "world: run gave the message {'role': 'user', 'content': 5, 'agent': 'user'}; "
            "give a role (system, user, assistant, tool) and a text as content"
        ),
        "world: run added messages without an agent; add them with episode.observe(text, agent=...)",
        "world: run gave metrics of ",
        "world: run gave a reward of nan; give a number or None",
        "world: run ended with 'finished'; write done or truncated, or raise what failed",
        "world: run gave gold of 7; give a text",
        "world: run gave metrics of {'length': inf}; give numbers by name",
        None,
        "world: run gave ok of 'no'; give True or False",
        "world: run gave rounds of <object",
        "world: run gave a target of <object",
        "world: run gave a reason of 5; give a text or None",
    ]
    lines = transcripts(tmp_path)
    assert [line["status"] for line in lines] == ["done" if reason is None else "failed" for reason in reasons]
    for line, reason in zip(lines, reasons, strict=True):
        if reason is None:
            continue
        assert line["reason"].startswith(reason)
        assert (line["reward"], line["metrics"], len(line["messages"])) == (None, {}, 2)
    assert "predicted history: 12 of 13 dialogues failed: world" in caplog.text
    assert "predicted history: task-12 failed: world: run gave a reason of 5; give a text or None" in caplog.text


def test_a_simulation_is_not_resumed_with_another_world(folder: Path, tmp_path: Path) -> None:
    simulated(folder, tmp_path / "out", world=world("Endless"), agents={}, tasks={"count": 2})
    place = folder / "plays_of_tests.py"
    text = place.read_text("utf8")
    place.write_text(text + "\n# changed\n", encoding="utf8")
    del sys.modules["plays_of_tests"]  # as in another process
    try:
        with pytest.raises(ResumeError, match="holds dialogues with other settings:\n  world: changed\nwrite --fresh"):
            simulated(folder, tmp_path / "out", world=world("Endless"), agents={}, tasks={"count": 2})
    finally:
        place.write_text(text, encoding="utf8")
        del sys.modules["plays_of_tests"]


CHANGES: list[tuple[dict[str, Any], str]] = [
    (
        {"world": world("Mute")},
        "simulation.world.target: Mute has no run(episode); write one that yields partita.simulation.RequestTurn()",
    ),
    (
        {"world": world("Panel", round=1)},
        "simulation.world.options: Panel cannot be created with {'round': 1}: TypeError: ",
    ),
    (
        {"world": {"type": "custom", "target": "panel"}},
        "simulation.world.target: no world is named panel; write module:Class",
    ),
    (
        {"world": world("Quiz"), "agents": {"others": {"guest": {"type": "scripted", "program": "crowd"}}}},
        "simulation.agents.others.guest.program: no agent is named crowd; write module:Class",
    ),
    (
        {"world": world("Quiz"), "agents": {"others": {"guest": {"type": "model", "run": "nobody"}}}},
        "simulation.agents.others.guest.run: ",
    ),
    (
        {"world": world("Quiz"), "agents": {}, "rollout": "plays_of_tests:Quiz"},
        "simulation.rollout: Quiz is not a subclass of partita.simulation.Rollout",
    ),
    (
        {"world": world("Quiz"), "agents": {}, "transcripts": "plays_of_tests:Backwards"},
        "simulation.transcripts: Backwards is not a subclass of partita.simulation.Transcripts",
    ),
    (
        {"world": world("Quiz"), "agents": {}, "rollout": "slot"},
        "simulation.rollout: no rollout is named slot; did you mean slots?",
    ),
]


@pytest.mark.parametrize(("changes", "text"), CHANGES)
def test_unusable_classes_are_reported(folder: Path, tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        simulated(folder, tmp_path, **changes)
    assert str(error.value).startswith(text), str(error.value)


def test_custom_rollouts_and_transcripts_replace_the_built_in_ones(
    folder: Path, panels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTED", str(tmp_path / "noted.jsonl"))
    started: list[str] = []
    begin = Rollout.begin

    def watched(self: Rollout) -> None:
        before = set(self.active.values())
        begin(self)
        started.extend(live.episode.key for live in self.active.values() if live not in before)

    monkeypatch.setattr(Rollout, "begin", watched)
    keepers = {"rollout": "plays_of_tests:Backwards", "transcripts": "plays_of_tests:NotedTranscripts"}
    simulated(folder, tmp_path / "out", **PANEL, **keepers)

    assert started == [f"task-{number}" for number in reversed(range(40))]
    noted = read_json_lines(tmp_path / "noted.jsonl")
    assert sorted(noted) == sorted([f"task-{number}", "done"] for number in range(40))
    assert (tmp_path / "out" / "predicted.jsonl").read_bytes() == (panels / "predicted.jsonl").read_bytes()


def test_the_world_and_transcripts_in_the_guide_run_unchanged(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = GUIDE.read_text("utf8").partition("## Custom worlds")[2].partition("\n## ")[0]
    programs = re.findall(r"```python\n(.*?)```", part, flags=re.DOTALL)
    (folder / "tables.py").write_text("\n\n".join(programs), encoding="utf8")
    friend = {"type": "scripted", "lines": ["the same for me", "and for me"]}
    simulated(
        folder,
        tmp_path,
        world={"type": "custom", "target": "tables:Table", "options": {"courses": 3}},
        agents={"others": {"guest": {"type": "model", "run": "guest", "prompt": "say {number}"}, "friend": friend}},
        transcripts="tables:Printed",
    )

    for line in transcripts(tmp_path):
        agents = [message["agent"] for message in line["messages"]]
        assert agents == ["system", "host", *["guest", "friend", "agent"] * 2, "guest", "agent"]
        assert (line["status"], line["metrics"]) == ("done", {"courses": 3})
    assert capsys.readouterr().out.count(" done 0.0\n") == 40


def test_a_package_provides_names_for_all_custom_classes(
    folder: Path, panels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(
        tmp_path,
        "[partita.worlds]\npanel = plays_of_tests:Panel\n[partita.agents]\ncrowd = agents_of_tests:Crowd\n"
        "[partita.rollouts]\nbackwards = plays_of_tests:Backwards\n"
        "[partita.transcripts]\nnoted = plays_of_tests:NotedTranscripts\n",
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setenv("NOTED", str(tmp_path / "noted.jsonl"))
    others = PANEL["agents"]["others"] | {"guest": {"type": "scripted", "program": "crowd"}}
    simulated(
        folder,
        tmp_path / "out",
        world={"type": "custom", "target": "panel"},
        agents={"others": others},
        rollout="backwards",
        transcripts="noted",
    )

    assert len((tmp_path / "noted.jsonl").read_text("utf8").splitlines()) == 40
    assert (tmp_path / "out" / "predicted.jsonl").read_bytes() == (panels / "predicted.jsonl").read_bytes()
