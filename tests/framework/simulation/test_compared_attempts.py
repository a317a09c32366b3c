"""Tests of preference training on the model's own dialogues: pairs of attempts at a task, and labelled answers."""

import json
import logging
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from partita import Model
from partita.data.ledger import read_counts

from ...json_lines import read_json_lines, write_json_lines

WORDS = ("red", "green", "blue")
DIALOGUE = {"input_features": [{"name": "messages", "type": "dialogue"}]}
TEXT = {"output_features": [{"name": "answer", "type": "text"}]}
LIKED = {"output_features": [{"name": "answer", "type": "text", "label": "liked"}]}
PAIR = {"output_features": [{"name": "answer", "type": "preference"}]}
GUEST = '''
import random


class Guest:
    """Asks for a word twice; each right answer is worth a half."""

    def reset(self, *, seed, task):
        self.rng, self.turns = random.Random(seed), 2
        return self.ask(), {"gold": self.word}

    def ask(self):
        self.word = self.rng.choice(("red", "green", "blue"))
        return f"say {self.word}"

    def step(self, action):
        self.turns -= 1
        right = 0.5 * (action.strip() == self.word)
        if not self.turns:
            return "", right, True, False, {}
        return self.ask(), right, False, False, {"gold": self.word}

    def close(self):
        pass
'''


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an environment and a model that repeats a word in some of its attempts."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "guest_of_pairs.py").write_text(GUEST, encoding="utf8")
    rng = random.Random(0)
    words = [rng.choice(WORDS) for _ in range(60)]
    turns = [[{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": word}] for word in words]
    write_json_lines(folder / "rows.jsonl", [{"messages": messages} for messages in turns])
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "context_length": 64}
    write(
        folder / "sft.yaml",
        base_model={"type": "scratch", "tokenizer": "word", "vocab_size": 64, **size},
        data={"source": "rows.jsonl", "split": {"type": "random", "probabilities": [1.0, 0.0, 0.0]}},
        trainer={"type": "finetune", "max_steps": 14, "batch_size": 8, "learning_rate": 0.01},
        **DIALOGUE,
        **TEXT,
    )
    Model(folder / "sft.yaml", quiet=True).train(run=folder / "sft")
    return folder


def write(path: Path, **sections: Any) -> Path:
    path.write_text(yaml.safe_dump(sections), encoding="utf8")
    return path


def simulation(**sections: Any) -> dict[str, Any]:
    world = {"type": "environment", "environment": "guest_of_pairs:Guest"}
    return {"world": world, "tasks": {"count": 24}, **sections}


def settings(folder: Path, **sections: Any) -> dict[str, Any]:
    """Return a configuration of the trained model that samples answers of one word."""
    base = {"base_model": str(folder / "sft" / "model"), "generation": {"max_new_tokens": 1, "do_sample": True}}
    return base | DIALOGUE | sections


def trainer(type: str, **keys: Any) -> dict[str, Any]:
    return {"trainer": {"type": type, "batch_size": 8, "max_steps": 4, "learning_rate": 0.01, **keys}}


def used_rows(run: Path) -> int:
    """Return the number of training rows that a run has used."""
    return read_counts(run)["training"].used


def manifest(run: Path) -> Mapping[str, Any]:
    read: Mapping[str, Any] = json.loads((run / "manifest.json").read_text("utf8"))
    return read


def test_repeats_with_one_seed_begin_alike_and_give_pairs(
    trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    repeats = simulation(repeats=4, repeats_share_seed=True)
    path = write(trained / "talk.yaml", **settings(trained, simulation=repeats, **TEXT))
    Model(path, quiet=True).simulate(tmp_path / "talks")
    attempts: dict[str, list[dict[str, Any]]] = {}
    for line in read_json_lines(tmp_path / "talks" / "predicted.jsonl"):
        attempts.setdefault(line["task"], []).append(line)
    assert all(len({line["seed"] for line in of_task}) == 1 for of_task in attempts.values())
    assert all(len({line["messages"][0]["content"] for line in of_task}) == 1 for of_task in attempts.values())
    assert len({of_task[0]["seed"] for of_task in attempts.values()}) == 24

    source = {"type": "simulation", "path": str(tmp_path / "talks" / "predicted.jsonl"), "select": "best_and_worst"}
    path = write(
        trained / "pairs.yaml",
        **settings(trained, data={"source": source}, **PAIR, **trainer("preference", max_steps=12)),
    )
    with caplog.at_level(logging.INFO):
        result = Model(path, quiet=True).train(run=tmp_path / "run")
    found = next(text for text in caplog.messages if "pairs of answers; without any: " in text)
    rows = int(found.removeprefix("predicted.jsonl: ").split()[0])
    assert used_rows(tmp_path / "run") == rows
    assert result.steps == 12
    log = read_json_lines(tmp_path / "run" / "log.jsonl")
    assert log[0]["rewards/margins"] == pytest.approx(0, abs=1e-6)
    assert log[-1]["rewards/margins"] > 0.05


@pytest.mark.long
def test_one_file_runs_attempts_and_trains_on_the_best_and_the_worst(trained: Path, tmp_path: Path) -> None:
    rounds = {"rounds": 2, "tasks": {"count": 40}, "attempts": 4, "select": "best_and_worst", "max_steps": 12}
    path = write(
        trained / "rounds.yaml",
        **settings(trained, simulation=simulation(self_training=rounds), **PAIR, **trainer("preference")),
    )
    result = Model(path, quiet=True).train(run=tmp_path / "run")

    rewards = [dialogues["reward"] for dialogues in result.dialogues]
    assert len(rewards) == 3
    assert rewards[0] < rewards[1] < rewards[2]
    first = tmp_path / "run" / "rounds" / "1"
    assert (first / "references.jsonl").exists()
    assert len(read_json_lines(first / "transcripts" / "predicted.jsonl")) == 160
    assert Model(path, quiet=True).train(run=tmp_path / "run").metrics == result.metrics

    def metrics_of(run: Path) -> dict[str, float]:
        talk = [{"role": "user", "content": "say red"}]
        row = {"messages": talk, "chosen": "red", "rejected": "green"}
        found: dict[str, float] = Model.load(run, quiet=True).evaluate([row])["model"]
        return found

    last, before = metrics_of(tmp_path / "run"), metrics_of(first)
    assert last["rewards/chosen"] == pytest.approx(0.1 * (last["logps/chosen"] - before["logps/chosen"]), rel=1e-4)
    assert abs(last["rewards/chosen"]) > 1e-3


@pytest.mark.long
def test_one_file_trains_on_labelled_answers(trained: Path, tmp_path: Path) -> None:
    rounds = {"rounds": 1, "tasks": {"count": 40}, "select": "all", "target": "every_agent_turn", "max_steps": 4}
    path = write(
        trained / "labels.yaml",
        **settings(
            trained, simulation=simulation(self_training=rounds), **LIKED, **trainer("kto", undesirable_weight="auto")
        ),
    )
    assert Model(path, quiet=True).train(run=tmp_path / "run").steps == 4

    run = tmp_path / "run" / "rounds" / "1"
    answers = [
        (message["content"].strip(), message["content"].strip() == message["gold"])
        for line in read_json_lines(run / "transcripts" / "predicted.jsonl")
        for message in line["messages"]
        if "gold" in message
    ]
    good, bad = (sum(text != "" and right is wanted for text, right in answers) for wanted in (True, False))
    assert used_rows(run) == good + bad
    assert manifest(run)["undesirable_weight"] == pytest.approx(good / bad)


def test_rounds_stop_if_all_attempts_are_equally_good(
    trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rounds = {"rounds": 1, "tasks": {"count": 2}, "attempts": 2, "select": "best_and_worst"}
    base = settings(trained, simulation=simulation(self_training=rounds), **PAIR, **trainer("preference"))
    path = write(trained / "greedy.yaml", **{**base, "generation": {"max_new_tokens": 1}})
    with caplog.at_level(logging.INFO):
        result = Model(path, quiet=True).train(run=tmp_path / "run")

    assert result.steps == 0
    assert (
        "round 1 produced no training rows; stopping: predicted.jsonl: no pair of answers can be made with select: "
        "best_and_worst; there are 2 tasks whose attempts are equally good; sample several attempts at each task, "
        "with generation: {do_sample: true}, repeats: 4 and repeats_share_seed: true in simulation"
    ) in caplog.messages
    assert "no round is kept: the result is the base model, and the run has no model folder" in caplog.messages
    assert not (tmp_path / "run" / "model").exists()


def test_rounds_stop_if_all_answers_have_one_label(
    trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rounds = {"rounds": 1, "tasks": {"count": 2}, "select": "all"}
    base = settings(trained, simulation=simulation(self_training=rounds), **LIKED, **trainer("kto"))
    path = write(trained / "one-label.yaml", **{**base, "generation": {"max_new_tokens": 2, "min_new_tokens": 2}})
    with caplog.at_level(logging.INFO):
        result = Model(path, quiet=True).train(run=tmp_path / "run")

    assert result.steps == 0
    assert (
        "round 1 produced no training rows; stopping: all answers are bad, and good ones are compared with bad ones"
    ) in caplog.messages
