"""Tests of agents (models, programs, lines and datasets): dialogues do not depend on the rest of the batch."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from partita import ConfigError, DataError, Model, ResumeError
from partita.data.episode import Episode, from_line
from partita.simulation import run as simulation_run
from partita.simulation.turns import TurnEncoder
from partita_schema.common.checksums import KEY as CHECKSUM
from partita_trainers.checkpoints.file_sums import FILE

from ...json_lines import read_json_lines, write_json_lines
from ...properties import ends
from .talks import USER, fill, settings, simulated, transcripts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two models, dialogues, and scripted agents."""
    folder = tmp_path_factory.mktemp("agents")
    fill(folder)
    return folder


@pytest.fixture(scope="module")
def talks(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the transcripts of sampled dialogues of two models, with batch size 8."""
    output = tmp_path_factory.mktemp("talks")
    simulated(folder, output)
    return output


@pytest.mark.parametrize("batch_size", ends([1, 7, 64]))
@pytest.mark.long
def test_dialogues_of_two_models_do_not_depend_on_the_batch_size(
    folder: Path, talks: Path, tmp_path: Path, batch_size: int
) -> None:
    simulated(folder, tmp_path, batch_size=batch_size)

    assert (tmp_path / "predicted.jsonl").read_bytes() == (talks / "predicted.jsonl").read_bytes()


def test_dialogues_of_two_models_do_not_depend_on_their_order(
    folder: Path, talks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have = simulation_run.rollout

    def shuffled(dialogues: list[Episode], *arguments: Any, **options: Any) -> None:
        have(random.Random(3).sample(dialogues, len(dialogues)), *arguments, **options)

    monkeypatch.setattr(simulation_run, "rollout", shuffled)
    simulated(folder, tmp_path)

    kept = (tmp_path / ".predicted.jsonl").read_text("utf8").splitlines()[1:]
    growing = [json.loads(line)["dialogue"] for line in kept]
    assert growing != sorted(growing, key=lambda key: int(key.removeprefix("task-")))
    assert (tmp_path / "predicted.jsonl").read_bytes() == (talks / "predicted.jsonl").read_bytes()


def test_the_user_starts_and_ends_a_dialogue(talks: Path) -> None:
    ends = set()
    for line in transcripts(talks):
        agents = [message["agent"] for message in line["messages"]]
        assert agents == [("user", "agent")[place % 2] for place in range(len(agents))]
        assert agents[-1] == "user", "the user speaks last and decides whether the dialogue is done"
        assert all(message["tokens"] for message in line["messages"] if message["content"])
        assert all("box" not in message["content"] for message in line["messages"][:-1:2])
        is_done = "box" in line["messages"][-1]["content"]
        assert (line["status"], line["reason"]) == (("done", None) if is_done else ("truncated", "turns"))
        assert is_done or agents.count("agent") == 4
        ends.add(line["status"])
    assert ends == {"done", "truncated"}


def test_a_dialogue_is_restored_from_its_transcript(talks: Path) -> None:
    line = max(transcripts(talks), key=lambda line: len(line["messages"]))
    dialogue = from_line(line)

    assert dialogue.line() == {key: value for key, value in line.items() if key != CHECKSUM}
    assert len(dialogue.replies) == dialogue.turns_of("agent") == 4
    assert dialogue.turns_of("user") == len(dialogue.tokens) == 5


def test_every_agent_has_the_assistant_role_in_its_own_view() -> None:
    dialogue = Episode("a", "a", {}, 1)
    dialogue.observe([{"role": "system", "content": "be kind"}], agent="system")
    dialogue.act_as("user", "two teas", (1, 2))
    dialogue.act("here they are", (3,))

    assert dialogue.seen_by("user") == [
        {"role": "assistant", "content": "two teas", "train": True},
        {"role": "user", "content": "here they are"},
    ]
    assert [message["role"] for message in dialogue.seen_by("agent")] == ["system", "user", "assistant"]


def test_only_the_user_sees_the_prompt_of_the_user(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: dict[tuple[str, str], list[str]] = {}
    encode = TurnEncoder.encode

    def watched(self: TurnEncoder, dialogue: Any, before: Any, **options: Any) -> Any:
        result = encode(self, dialogue, before, **options)
        prompts.setdefault((dialogue.key, self.agent), []).append(result.text)
        return result

    monkeypatch.setattr(TurnEncoder, "encode", watched)
    simulated(folder, tmp_path)

    for number, line in enumerate(transcripts(tmp_path)):
        said = [message["content"] for message in line["messages"]]
        user, agent = prompts[f"task-{number}", "user"], prompts.get((f"task-{number}", "agent"), [])
        assert user == ["\n".join([f"say {number}", *said[:place], ""]) for place in range(0, len(said), 2)]
        assert agent == ["\n".join([*said[:place], ""]) for place in range(1, len(said), 2)]


def test_a_model_with_a_chat_template_plays_with_itself_from_a_fixed_message(folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "base"
    shutil.copytree(folder / "base", model)
    template = "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"
    settings_of_tokenizer = json.loads((model / "tokenizer_config.json").read_text(encoding="utf8"))
    settings_of_tokenizer["chat_template"] = template + "{% if add_generation_prompt %}assistant {% endif %}"
    (model / "tokenizer_config.json").write_text(json.dumps(settings_of_tokenizer), encoding="utf8")
    (model / FILE).unlink(missing_ok=True)  # its checksums
    world = {"world": {"type": "self_play", "first": "say {number}"}, "agents": {}, "tasks": {"count": 3}}

    Model(settings(folder, **world) | {"base_model": str(model)}, quiet=True).simulate(tmp_path / "out")

    for line in transcripts(tmp_path / "out"):
        assert line["status"] == "truncated", line["reason"]
        assert [message["agent"] for message in line["messages"][:3]] == ["partner", "agent", "partner"]


@pytest.mark.long
def test_a_model_plays_with_itself(folder: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "world": {"type": "self_play", "first": "say {number}", "done": "box"},
        "agents": {"agent": {"type": "model", "prompt": "what {number}"}},
    }
    simulated(folder, tmp_path / "8", **changes)
    simulated(folder, tmp_path / "1", batch_size=1, **changes)

    lines = transcripts(tmp_path / "8")
    assert lines == transcripts(tmp_path / "1")
    for number, line in enumerate(lines):
        first = [(message["agent"], message["role"], message["content"]) for message in line["messages"][:2]]
        assert first == [("system", "system", f"what {number}"), ("partner", "user", f"say {number}")]
        mentions_box = "box" in line["messages"][-1]["content"]
        assert line["status"] == ("done" if mentions_box else "truncated")
    ended_by = {line["messages"][-1]["agent"] for line in lines if line["status"] == "done"}
    assert ended_by == {"agent", "partner"}


def test_all_lines_of_a_script_follow_the_fixed_first_message(folder: Path, tmp_path: Path) -> None:
    lines = ["line 0 of {number}", "line 1"]
    simulated(
        folder,
        tmp_path,
        world={"type": "self_play", "first": "hello {number}"},
        agents={"partner": {"type": "scripted", "lines": lines}},
        tasks={"count": 2},
    )
    for number, line in enumerate(transcripts(tmp_path)):
        said = [message["content"] for message in line["messages"] if message["agent"] == "partner"]
        assert said == [f"hello {number}", f"line 0 of {number}", "line 1"]


def test_agents_have_independent_random_numbers(folder: Path, tmp_path: Path) -> None:
    """Both agents are the same model and see the same first message."""
    changes: dict[str, Any] = {"world": {"type": "user_sim", "first": "say more", "done": "#"}, "max_turns": 1}
    simulated(folder, tmp_path, agents={"user": {"type": "model"}}, **changes)
    simulated(folder, tmp_path / "b", agents={"user": {"type": "scripted", "lines": ["say more"]}}, **changes)

    users = [line["messages"][1]["content"] for line in transcripts(tmp_path)]
    agents = [line["messages"][2]["content"] for line in transcripts(tmp_path / "b")]
    assert users != agents


@pytest.mark.parametrize("program", ends(["Crowd", "Single"]))
@pytest.mark.parametrize("batch_size", ends([1, 64]))
@pytest.mark.long
def test_programs_answer_in_many_dialogues_at_once_or_in_one(
    folder: Path, tmp_path: Path, program: str, batch_size: int
) -> None:
    agents = {"user": {"type": "scripted", "program": f"agents_of_tests:{program}"}}
    simulated(folder, tmp_path, agents=agents, batch_size=batch_size)
    for number, line in enumerate(transcripts(tmp_path)):
        turns = [message for message in line["messages"] if message["agent"] == "user"]
        over = any("box" in message["content"] for message in turns)
        assert line["status"] == "done"
        assert over or len(turns) == 2 + number % 3
        assert all("tokens" not in message for message in turns)
    again = tmp_path / "again"
    simulated(folder, again, agents={"user": {"type": "scripted", "program": "agents_of_tests:Crowd"}})
    assert (again / "predicted.jsonl").read_bytes() == (tmp_path / "predicted.jsonl").read_bytes()


def test_a_program_that_fails_in_one_dialogue_does_not_affect_the_others(folder: Path, tmp_path: Path) -> None:
    good = {"type": "scripted", "program": "agents_of_tests:Crowd"}
    bad = good | {"options": {"misbehaves": True}}
    world, limits = {"type": "user_sim", "done": "#"}, {"step_seconds": 2.0, "fail_fraction": 0.5}
    simulated(folder, tmp_path / "good", agents={"user": good}, world=world)
    report = simulated(folder, tmp_path / "bad", agents={"user": bad}, world=world, limits=limits, batch_size=64)

    reasons = {
        3: "agent user: OSError: nobody is in (agents_of_tests.py, line 32)",
        13: "agent user: act gave ",
        23: "timeout: agent user gave no reply within 2 s (limits.step_seconds)",
    }
    lines = zip(transcripts(tmp_path / "good"), transcripts(tmp_path / "bad"), strict=True)
    for number, (one, other) in enumerate(lines):
        if number not in reasons:
            assert one == other
            continue
        assert other["status"] == "failed"
        assert other["reason"].startswith(reasons[number])
        assert other["messages"] == one["messages"][:2], "earlier messages are kept"
    assert report.histories["predicted"].statuses == {"done": 37, "failed: agent user": 2, "failed: timeout": 1}


def test_lines_and_turns_of_a_dataset_are_used_in_order(folder: Path, tmp_path: Path) -> None:
    tasks = {"source": "rows.jsonl"}
    world = {"type": "user_sim", "done": "#"}
    lines = ["what {goal}", "once more"]
    simulated(
        folder, tmp_path / "lines", agents={"user": {"type": "scripted", "lines": lines}}, tasks=tasks, world=world
    )
    simulated(folder, tmp_path / "gold", agents={"user": "gold"}, tasks=tasks, world=world)

    rows = read_json_lines(folder / "rows.jsonl")
    for row, line, gold in zip(rows, transcripts(tmp_path / "lines"), transcripts(tmp_path / "gold"), strict=True):
        said = [message["content"] for message in line["messages"] if message["agent"] == "user"]
        assert said == [f"what {row['goal']}", "once more"]
        said = [message["content"] for message in gold["messages"] if message["agent"] == "user"]
        assert said == [message["content"] for message in row["messages"][::2]]
        assert (line["status"], gold["status"]) == ("done", "done")


def test_the_system_message_of_a_dialogue_is_shown_with_its_user_turns(folder: Path, tmp_path: Path) -> None:
    system = {"role": "system", "content": "be short"}
    rows = [{**row, "messages": [system, *row["messages"]]} for row in read_json_lines(folder / "rows.jsonl")[:3]]
    write_json_lines(folder / "briefed.jsonl", rows)
    keys: dict[str, Any] = {"tasks": {"source": "briefed.jsonl"}, "world": {"type": "user_sim", "done": "#"}}

    simulated(folder, tmp_path / "shown", agents={"user": "gold"}, **keys)
    simulated(
        folder, tmp_path / "own", agents={"user": "gold", "agent": {"type": "model", "prompt": "be long"}}, **keys
    )
    scripted = {"type": "scripted", "lines": ["hello"]}
    simulated(folder, tmp_path / "scripted", agents={"user": scripted}, **keys)

    firsts = {name: [line["messages"][0] for line in transcripts(tmp_path / name)] for name in ("shown", "own")}
    assert firsts["shown"] == [{"role": "system", "content": "be short", "agent": "system"}] * 3
    assert firsts["own"] == [{"role": "system", "content": "be long", "agent": "system"}] * 3
    for row, line in zip(rows, transcripts(tmp_path / "shown"), strict=True):
        said = [message["content"] for message in line["messages"] if message["agent"] == "user"]
        assert said == [message["content"] for message in row["messages"] if message["role"] == "user"]
    assert all(line["messages"][0]["role"] == "user" for line in transcripts(tmp_path / "scripted"))


@pytest.mark.long
def test_other_models_may_be_files_or_base_models(folder: Path, tmp_path: Path) -> None:
    changed = settings(folder) | {"base_model": str(folder / "guest")}
    del changed["simulation"]
    (folder / "guest.yaml").write_text(json.dumps(changed), encoding="utf8")
    said = []
    for name in ({"file": "guest.yaml"}, {"base_model": str(folder / "guest")}, {"run": "guest"}):
        key = next(iter(name))
        simulated(folder, tmp_path / key, agents={"user": {"type": "model", "prompt": "say {number}", **name}})
        said.append((tmp_path / key / "predicted.jsonl").read_bytes())
    assert said[0] == said[1] == said[2]


def test_a_simulation_is_not_resumed_with_another_model_in_an_agent(folder: Path, talks: Path) -> None:
    with pytest.raises(ResumeError) as caught:
        simulated(folder, talks, agents={"user": USER | {"run": "base"}})
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{talks} holds dialogues with other settings:"
    assert lines[1] == "  agent user: changed"
    [run] = [line for line in lines if line.startswith("  simulation.agents.user.run: ")]
    assert run.endswith(" -> base")


def test_a_template_of_an_empty_column_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "goals.jsonl").write_text('{"goal": "tea"}\n{"goal": null}\n', encoding="utf8")
    agents = {"user": {"type": "scripted", "lines": ["I want {goal}"]}}
    with pytest.raises(DataError) as caught:
        simulated(folder, tmp_path, agents=agents, tasks={"source": str(tmp_path / "goals.jsonl")})
    assert str(caught.value) == (
        "tasks: goals.jsonl:2: simulation.agents.user.lines[0] names {goal}, which is empty in this task"
    )


CHANGES: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"agents": {"user": USER | {"prompt": "say {goal}"}}},
        DataError,
        "tasks: task-0: simulation.agents.user.prompt names {goal}; the task has number",
    ),
    (
        {"agents": {"user": {"type": "scripted", "program": "agents_of_tests:Silent"}}},
        ConfigError,
        "simulation.agents.user.program: Silent has neither act(contexts) nor reply(context); write one of them",
    ),
    (
        {"agents": {"user": {"type": "scripted", "program": "agents_of_tests:Crowd", "options": {"size": 1}}}},
        ConfigError,
        "simulation.agents.user.options: Crowd cannot be created with {'size': 1}: TypeError: ",
    ),
    ({"agents": {"user": USER | {"run": "nobody"}}}, ConfigError, "simulation.agents.user.run: "),
    ({"max_dialogue_tokens": 5}, ConfigError, "simulation.max_dialogue_tokens: 5 tokens leave no room for a prompt"),
]


@pytest.mark.parametrize(("changes", "kind", "text"), CHANGES)
def test_unusable_agents_are_reported(
    folder: Path, tmp_path: Path, changes: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as error:
        simulated(folder, tmp_path, **changes)
    assert str(error.value).startswith(text), str(error.value)


def test_a_model_without_dialogues_cannot_be_an_agent(folder: Path, tmp_path: Path) -> None:
    other = settings(folder) | {"input_features": [{"name": "text", "type": "text"}]}
    del other["simulation"]
    (folder / "text.yaml").write_text(json.dumps(other), encoding="utf8")
    with pytest.raises(
        ConfigError, match=r"agents.user.file: its file has no input of type dialogue; name a model of d"
    ):
        simulated(folder, tmp_path, agents={"user": {"type": "model", "file": "text.yaml", "prompt": "say"}})


def test_models_share_the_memory_budget() -> None:
    from dataclasses import replace
    from types import SimpleNamespace

    from partita.simulation.participants import find_sizes
    from partita_schema.sections.simulation import Simulation
    from partita_trainers.batch_size.probe import BatchSize

    size = BatchSize(rows=48, origin="tuned", device="cpu", max_fitting=64)

    def model(result: BatchSize) -> Any:
        lm = SimpleNamespace(answer_context=None)
        pipeline = SimpleNamespace(row_tokenizer=SimpleNamespace(max_length=96), max_new_tokens=5, lm=lm)
        return SimpleNamespace(pipeline=pipeline, tuner=SimpleNamespace(generation=lambda lengths, batch_size: result))

    section = Simulation.model_validate(settings(Path())["simulation"])
    sizes: Callable[..., Any] = lambda **models: {  # noqa: E731 -- read once
        name: result.rows for name, result in find_sizes(models, section, num_episodes=9, batch_size=None).items()
    }
    assert sizes(agent=model(size)) == {"agent": 48}
    assert sizes(agent=model(size), user=model(replace(size, rows=8))) == {"agent": 32, "user": 8}
    written = BatchSize(rows=48, origin="file", device="cpu")
    assert sizes(agent=model(written), user=model(written)) == {"agent": 48, "user": 48}


@pytest.mark.long
def test_self_training_with_another_model_needs_no_other_data(folder: Path, tmp_path: Path) -> None:
    rounds = {"rounds": 1, "tasks": {"count": 10}, "max_steps": 2}
    checker = {"type": "agents_of_tests:Strict"}
    changed = settings(folder, self_training=rounds, checker=checker)
    changed["trainer"] = {"type": "finetune", "batch_size": 4}
    (folder / "rounds.yaml").write_text(json.dumps(changed), encoding="utf8")
    result = Model(folder / "rounds.yaml", quiet=True).train(run=tmp_path / "run")

    assert result.steps == 2
    lines = transcripts(tmp_path / "run" / "rounds" / "1" / "transcripts")
    said = [message for line in lines for message in line["messages"]]
    assert {message["agent"] for message in said if "tokens" in message} == {"agent", "user"}
