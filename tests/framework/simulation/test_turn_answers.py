"""Tests of agents with several outputs per turn: what others receive, gold answers, checkers and training rows."""

import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from partita import ConfigError, Model
from partita.data.episode import Episode, from_line
from partita.simulation import RequestTurn, Verdict
from partita.simulation.contract import ContractError
from partita.simulation.worlds import BackgroundCloser, CheckedWorld, EnvironmentWorld, Play
from partita_schema.config import Config
from partita_schema.turn_outputs import build_turn_outputs

from ...json_lines import read_json_lines, write_json_lines
from ...properties import ends

LABELS = ["ask", "tell"]
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"], "additionalProperties": False}
OUTPUTS: list[dict[str, Any]] = [
    {"name": "state", "type": "json", "decoder": {"constrain": True, "json_schema": SCHEMA, "max_new_tokens": 16}},
    {"name": "action", "type": "category", "decoder": {"labels": LABELS, "scoring": True}},
    {"name": "reply", "type": "text", "column": "content", "decoder": {"max_new_tokens": 5}},
]
TURN = {"state": {"n": 1}, "action": "ask"}
PROGRAM = '''
import json


class Heard:
    """An environment that notes what it receives, and gives a right answer as a dictionary."""

    def __init__(self, gold=None):
        self.gold = gold

    def reset(self, *, seed, task):
        self.turns = 0
        return f"hello {task['number']}", {"gold": self.gold}

    def step(self, action):
        self.turns += 1
        try:
            keys = len(json.loads(action))
        except (ValueError, TypeError):
            keys = 0
        metrics = {"keys": float(keys)}
        return "go on", 0.0, self.turns == 3, False, {"gold": self.gold, "metrics": metrics}

    def close(self):
        pass
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answers")
    (folder / "heard_of_tests.py").write_text(PROGRAM, encoding="utf8")
    rng, rows = random.Random(0), []
    for _ in range(6):
        texts = ["".join(rng.choices("abcde ", k=rng.randint(3, 12))) + "." for _ in range(6)]
        messages: list[dict[str, Any]] = []
        for number, text in enumerate(texts):
            answer = {"state": {"n": rng.randint(1, 3)}, "action": rng.choice(LABELS)}
            messages.append(
                {"role": ("user", "assistant")[number % 2], "content": text} | (answer if number % 2 else {})
            )
        rows.append({"messages": messages})
    write_json_lines(folder / "rows.jsonl", rows)
    scratch = file_of(scratch=True)
    scratch["data"]["source"] = str(folder / "rows.jsonl")
    Model(scratch, quiet=True).save(folder / "base")
    return folder


def file_of(answers: str = "in_sequence", *, scratch: bool = False, **simulation: Any) -> dict[str, Any]:
    model = {"type": "scratch", "size": "nano", "tokenizer": "byte", "context_length": 512}
    outputs = OUTPUTS
    if answers == "together":
        outputs = [OUTPUTS[0], {"name": "action", "type": "category", "decoder": {"labels": LABELS}}, OUTPUTS[2]]
    return {
        "base_model": model if scratch else "base",
        "input_features": [{"name": "messages", "type": "dialogue"}],
        "output_features": outputs,
        "generation": {"do_sample": True},
        "data": {"dialogue": {"answers": answers, "speakers": {"user": "U: ", "assistant": "A: "}}},
        "trainer": {"type": "none", "batch_size": 4},
        **({"simulation": simulation} if simulation else {}),
    }


def simulated(
    folder: Path, output: Path, *, batch_size: int | None = None, answers: str = "in_sequence", **keys: Any
) -> Any:
    (folder / "run.yaml").write_text(json.dumps(file_of(answers, **keys)), encoding="utf8")
    return Model(folder / "run.yaml", quiet=True).simulate(output, batch_size=batch_size)


def said_by_model(output: Path, history: str = "predicted") -> list[dict[str, Any]]:
    lines = read_json_lines(output / f"{history}.jsonl")
    return [message for line in lines for message in line["messages"] if message["agent"] == "agent"]


def environment(**options: Any) -> dict[str, Any]:
    world = {"type": "environment", "environment": "heard_of_tests:Heard", "options": options}
    return {"world": world, "tasks": {"count": 4}}


REPLAY = {"world": {"type": "replay"}, "tasks": {"source": "rows.jsonl"}, "history": ["gold", "predicted"]}


def test_in_sequence_an_environment_receives_the_values_as_an_object(folder: Path, tmp_path: Path) -> None:
    report = simulated(folder, tmp_path, **environment())

    assert report.flat()["predicted"]["keys"] == 3
    for message in said_by_model(tmp_path):
        assert message["content"] == message["values"]
        assert set(json.loads(message["values"])) == {"state", "action", "reply"}


def test_together_an_environment_receives_the_answer_as_it_was_generated(folder: Path, tmp_path: Path) -> None:
    simulated(folder, tmp_path, answers="together", **environment())

    assert all(message["content"] == message["generated"] for message in said_by_model(tmp_path))


def test_an_environment_receives_only_the_reply_if_the_file_says_so(folder: Path, tmp_path: Path) -> None:
    report = simulated(folder, tmp_path, reply="reply", **environment())

    assert report.flat()["predicted"]["keys"] == 0
    for message in said_by_model(tmp_path):
        assert message["content"] == json.loads(message["values"])["reply"]
        assert json.loads(message["generated"])["state"].strip().startswith("{")


@pytest.fixture(scope="module")
def replayed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return the transcripts and the report of replayed dialogues, whose environment would receive the reply."""
    output = tmp_path_factory.mktemp("replayed")
    return output, simulated(folder, output, reply="reply", **REPLAY)


@pytest.mark.parametrize("batch_size", ends([1, 3, 16]))
def test_turns_in_sequence_do_not_depend_on_the_batch_size(
    folder: Path, replayed: tuple[Path, Any], tmp_path: Path, batch_size: int
) -> None:
    simulated(folder, tmp_path, batch_size=batch_size, reply="reply", **REPLAY)

    for history in ("gold", "predicted"):
        assert (tmp_path / f"{history}.jsonl").read_bytes() == (replayed[0] / f"{history}.jsonl").read_bytes()


def test_the_report_scores_each_output_against_the_right_answers(replayed: tuple[Path, Any]) -> None:
    tmp_path, report = replayed

    for history, numbers in report.flat().items():
        turns = said_by_model(tmp_path, history)
        right = [json.loads(turn["values"])["state"] == json.loads(turn["gold"])["state"] for turn in turns]
        assert numbers["state.n"] == len(turns) == 18
        assert numbers["state.joint_accuracy"] == sum(right) / len(right)
        assert 0 < numbers["action.accuracy"] < 1


def test_any_of_several_right_replies_of_a_replayed_dialogue_is_right(folder: Path, tmp_path: Path) -> None:
    rows = read_json_lines(folder / "rows.jsonl")
    world = REPLAY | {"tasks": {"source": str(tmp_path / "rows.jsonl")}, "history": ["gold"]}
    write_json_lines(tmp_path / "rows.jsonl", rows)
    before = simulated(folder, tmp_path / "one", **world).flat()["gold"]
    for row, line in zip(rows, read_json_lines(tmp_path / "one" / "gold.jsonl"), strict=True):
        for message, said in zip(row["messages"], line["messages"], strict=True):
            if message["role"] == "assistant":
                message["labels"] = [message["content"], json.loads(said["values"])["reply"] or "-"]
    write_json_lines(tmp_path / "rows.jsonl", rows)

    after = simulated(folder, tmp_path / "several", **world).flat()["gold"]

    said = [json.loads(message["values"])["reply"] for message in said_by_model(tmp_path / "several", "gold")]
    assert before["reply.exact_match"] == 0
    assert after["reply.exact_match"] == sum(map(bool, said)) / len(said) > 0
    assert after["action.accuracy"] == before["action.accuracy"]
    golds = [json.loads(message["other_golds"][0]) for message in said_by_model(tmp_path / "several", "gold")]
    assert [gold["reply"] for gold in golds] == [text or "-" for text in said]


def test_a_right_answer_of_an_environment_may_be_a_dictionary(folder: Path, tmp_path: Path) -> None:
    gold = {"state": {"n": 1}, "action": "ask", "reply": "hi"}
    report = simulated(folder, tmp_path, **environment(gold=gold), history=["gold"])

    assert report.flat()["gold"]["state.n"] == 12
    for message in said_by_model(tmp_path, "gold"):
        assert json.loads(message["gold"]) == gold


def test_a_right_answer_without_an_output_fails_its_dialogue(folder: Path, tmp_path: Path) -> None:
    limits = {"fail_fraction": 1.0}
    simulated(folder, tmp_path, **environment(gold={"state": {"n": 1}}), limits=limits)

    [first, *_] = read_json_lines(tmp_path / "predicted.jsonl")
    assert (first["status"], first["reason"]) == ("failed", "environment: gold: the answer has no action")


def test_a_checker_compares_the_whole_answer_with_the_gold_answer(folder: Path, tmp_path: Path) -> None:
    checker = {"type": "json_equal"}
    simulated(folder, tmp_path, reply="reply", checker=checker, **REPLAY)

    for line in read_json_lines(tmp_path / "predicted.jsonl"):
        last = line["messages"][-1]
        assert line["ok"] == (json.loads(last["values"]) == json.loads(last["gold"]))


def test_an_answer_is_retried_after_a_check_of_its_reply(folder: Path, tmp_path: Path) -> None:
    checker = {"type": "exact", "rounds": 1, "options": {"column": "want", "feedback": "No"}}
    world = {"type": "user_sim", "done": "#"}
    guest = {"type": "scripted", "lines": ["hello", "#"]}
    write_json_lines(folder / "wants.jsonl", [{"want": "north"}])

    keys: dict[str, Any] = {"checker": checker, "world": world, "agents": {"user": guest}, "reply": "reply"}
    simulated(folder, tmp_path, tasks={"source": "wants.jsonl"}, **keys)

    [line] = read_json_lines(tmp_path / "predicted.jsonl")
    assert (line["status"], line["rounds"], line["ok"], line["target"]) == ("done", 1, False, "north")
    assert [message["agent"] for message in line["messages"]] == ["user", "agent", "user", "checker", "agent"]


@pytest.mark.parametrize("target", ["north", None])
def test_the_gold_answer_stays_if_the_target_is_no_whole_answer(target: str | None) -> None:
    outputs = build_turn_outputs(Config.model_validate(file_of()))
    gold, episode = json.dumps(TURN | {"reply": "hi"}), Episode("a", "a", {}, 0)

    class Never:
        def check(self, dialogue: Episode) -> Verdict:
            return Verdict(False, feedback="No", target=target)

    class Once:
        def run(self, dialogue: Episode) -> Play:
            dialogue.observe("hello", gold=gold)
            yield RequestTurn()
            dialogue.end("done")

    for _ in CheckedWorld(Once(), Never(), rounds=1, outputs=outputs).run(episode):
        episode.act("x", (1,), answer="x", values="{}")

    assert [turn.gold for turn in episode.replies] == [gold, gold]
    assert (episode.rounds, episode.target) == (1, target)


def test_a_rejected_episode_stays_rejected_if_the_next_answer_does_not_come() -> None:
    class Never:
        def check(self, dialogue: Episode) -> Verdict:
            return Verdict(False, feedback="No", target="north", metrics={"score": 0.0})

    class Once:
        def run(self, dialogue: Episode) -> Play:
            dialogue.observe("hello")
            yield RequestTurn()
            dialogue.add_reward(1.0)
            dialogue.end("done")

    episode = Episode("a", "a", {}, 0)
    play = CheckedWorld(Once(), Never(), rounds=1).run(episode)
    next(play)
    episode.act("x", (1,), answer="x")
    next(play)
    play.close()  # as when the dialogue has become too long
    assert (episode.ok, episode.target, episode.metrics) == (False, "north", {"score": 0.0})


class Resets:
    """An environment that returns from `reset` what it is created with."""

    def __init__(self, *result: Any) -> None:
        self.result = result

    def reset(self, *, seed: int, task: Mapping[str, Any]) -> Any:
        return self.result

    def step(self, action: str) -> Any:
        return "", 1.0, True, False, {"metrics": {"steps": 1}}


def test_metrics_of_reset_are_kept_and_a_reset_without_a_message_is_refused() -> None:
    def play(*result: Any) -> Episode:
        episode = Episode("a", "a", {}, 0)
        for _ in EnvironmentWorld(lambda: Resets(*result), max_turns=2, closer=BackgroundCloser()).run(episode):
            episode.act("x", (1,), answer="x")
        return episode

    assert play("hello", {"metrics": {"difficulty": 3}}).metrics == {"difficulty": 3, "steps": 1}
    with pytest.raises(ContractError, match=r"^reset said nothing; give the first message$"):
        play("", {})


def test_two_agents_of_one_model_see_their_own_outputs_and_each_others_reply(folder: Path, tmp_path: Path) -> None:
    simulated(
        folder,
        tmp_path,
        world={"type": "self_play", "first": "hello"},
        tasks={"count": 3},
        reply="reply",
        max_turns=3,
    )

    for line in read_json_lines(tmp_path / "predicted.jsonl"):
        later = line["messages"][1:]
        assert all("generated" in message for message in later)
        assert {message["agent"] for message in later} == {"agent", "partner"}
        assert all(message["content"] == json.loads(message["generated"])["reply"].strip() for message in later)


def test_a_dialogue_is_the_same_after_its_transcript_was_read(replayed: tuple[Path, Any]) -> None:
    for line in read_json_lines(replayed[0] / "predicted.jsonl"):
        line.pop("checksum", None)
        assert json.loads(json.dumps(from_line(line).line())) == line


def test_transcripts_train_all_outputs_on_their_right_answers(
    folder: Path, replayed: tuple[Path, Any], tmp_path: Path
) -> None:
    shutil.copy(replayed[0] / "predicted.jsonl", folder / "done.jsonl")
    source = {"type": "simulation", "path": "done.jsonl", "select": "all", "target": "every_agent_turn"}
    config = file_of()
    config["data"] |= {"source": source, "split": {"type": "random", "probabilities": [1.0, 0.0, 0.0]}}
    config["trainer"] = {"type": "finetune", "max_steps": 1, "batch_size": 4}
    del config["generation"]
    (folder / "train.yaml").write_text(json.dumps(config), encoding="utf8")

    result = Model(folder / "train.yaml", quiet=True).train(run=tmp_path / "run")

    ledger = json.loads((Path(result.run) / "ledger.json").read_text(encoding="utf8"))["splits"]["training"]
    assert (ledger["rows"], ledger["used"]) == (54, 54)  # 18 turns with three outputs each


def test_the_json_of_a_turn_is_right_whatever_the_order_of_its_keys() -> None:
    episode = Episode("a", "a", {}, 0)
    episode.gold = '{"state": {"a": 1, "b": 2}}'
    episode.act("x", (1,), answer="x", values='{"state":{"b":2,"a":1}}')
    episode.gold = '{"state": {}}'
    episode.act("x", (1,), answer="x", values="no json")

    assert [turn.exact for turn in episode.replies] == [True, False]


def test_a_reply_that_is_no_output_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no output is named 'text'; write one of state, action, reply"):
        simulated(folder, tmp_path, reply="text", **environment())
