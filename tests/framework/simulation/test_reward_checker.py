"""Tests of the checker `reward`, with a reward model that was trained on pairs of answers to dialogues."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from partita import ConfigError, Model, ResumeError
from partita.backends.reward_models import load_answer_scorer
from partita.data.episode import Episode
from partita.simulation.reward_checker import RewardChecker

from ...json_lines import read_json_lines, write_json_lines
from .talks import WORDS, file_of, random_messages, save_model

SCRATCH = {
    "type": "scratch",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "context_length": 96,
    "tokenizer": "word",
    "vocab_size": 64,
}
USER = {"type": "scripted", "lines": ["say red", "once more", "box"]}
SIMULATION: dict[str, Any] = {
    "world": {"type": "user_sim", "done": "box"},
    "agents": {"user": USER},
    "tasks": {"count": 6},
    "max_turns": 4,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model and the runs of two reward models, of dialogues and of single texts."""
    folder = tmp_path_factory.mktemp("checked")
    rng = random.Random(0)
    talks = [random_messages(rng, 3) for _ in range(24)]
    answers = [" ".join(rng.choices(WORDS, k=3)) for _ in talks]
    rows = [
        {"messages": talk, "text": talk[0]["content"], "chosen": f"red {answer}", "rejected": answer}
        for talk, answer in zip(talks, answers, strict=True)
    ]
    write_json_lines(folder / "pairs.jsonl", rows)
    write_json_lines(folder / "rows.jsonl", [{"messages": random_messages(rng, 4)} for _ in range(20)])
    save_model(file_of(folder, **SIMULATION), folder)
    for name, feature, seed in (
        ("rm", {"name": "messages", "type": "dialogue"}, 1),
        ("other", {"name": "messages", "type": "dialogue"}, 2),
        ("texts", {"name": "text", "type": "text"}, 1),
    ):
        file = {
            "base_model": SCRATCH,
            "input_features": [feature],
            "output_features": [{"name": "answer", "type": "preference"}],
            "data": {"source": str(folder / "pairs.jsonl")},
            "seed": seed,
            "trainer": {"type": "reward", "max_steps": 6, "batch_size": 8, "eval_batch_size": 8},
        }
        Model(file, quiet=True).train(run=folder / name)
    return folder


def simulated(folder: Path, output: Path, *, simulation: dict[str, Any] = SIMULATION, **checker: Any) -> Any:
    """Run a simulation with a reward model as its checker; return its report."""
    settings = file_of(folder, **simulation, checker={"type": "reward", "model": "rm"} | checker)
    (folder / "run.yaml").write_text(json.dumps(settings), encoding="utf8")
    return Model(folder / "run.yaml", quiet=True).simulate(output)


def scores_of_turns(folder: Path, episode: dict[str, Any]) -> list[float]:
    """Return the score of each answer, computed from the transcript."""
    messages = [{"role": one["role"], "content": one["content"]} for one in episode["messages"]]
    places = [place for place, one in enumerate(episode["messages"]) if one["agent"] == "agent"]
    scorer = load_answer_scorer(folder / "rm", key="simulation.checker.model", quiet=True)
    scores = scorer.scores_of_dialogues(
        [messages[:place] for place in places], [messages[place]["content"] for place in places]
    )
    return [score.value for score in scores if score.value is not None]


@pytest.mark.parametrize("turns", ["last", "mean"])
def test_the_score_of_an_episode_is_the_reward_of_its_answers(folder: Path, tmp_path: Path, turns: str) -> None:
    scores = []
    report = simulated(folder, tmp_path / "first", turns=turns, threshold=-100.0)
    for episode in read_json_lines(tmp_path / "first" / "predicted.jsonl"):
        of_turns = scores_of_turns(folder, episode)
        assert len(of_turns) == 2
        score = of_turns[-1] if turns == "last" else sum(of_turns) / 2
        assert episode["metrics"]["answer_reward"] == pytest.approx(score, abs=1e-5)
        assert episode["reward"] == episode["metrics"]["answer_reward"]
        assert episode["ok"] is True
        scores.append(score)
    means = report.histories["predicted"].means
    assert means["answer_reward"].mean == pytest.approx(sum(scores) / 6, abs=1e-5)
    assert means["success"].mean == 1
    middle = sorted(scores)[3]
    again = simulated(folder, tmp_path / "again", turns=turns, threshold=middle - 1e-6)
    assert again.histories["predicted"].means["success"].mean == 0.5


def test_a_reward_of_the_world_is_kept(folder: Path, tmp_path: Path) -> None:
    (folder / "paying.py").write_text(
        "class Paying:\n"
        "    def reset(self, *, seed, task):\n        return 'say red', {}\n"
        "    def step(self, action):\n        return '', 7.0, True, False, {}\n"
        "    def close(self):\n        pass\n",
        encoding="utf8",
    )
    world = {"world": {"type": "environment", "environment": "paying:Paying"}, "tasks": {"count": 3}}
    simulated(folder, tmp_path, simulation=world)
    episodes = read_json_lines(tmp_path / "predicted.jsonl")
    assert {episode["reward"] for episode in episodes} == {7.0}
    assert len({episode["metrics"]["answer_reward"] for episode in episodes}) > 1


def test_finished_episodes_are_kept_only_for_the_same_reward_model(folder: Path, tmp_path: Path) -> None:
    simulated(folder, tmp_path)
    before = (tmp_path / "predicted.jsonl").read_bytes()
    simulated(folder, tmp_path)
    assert (tmp_path / "predicted.jsonl").read_bytes() == before
    with pytest.raises(ResumeError, match="checker"):
        simulated(folder, tmp_path, model="other")


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("missing", "simulation.checker.model: {folder}/missing is neither a run directory nor a saved model"),
        (
            "base",
            "simulation.checker.model: {folder}/base is a run of trainer: {{type: none}}, which scores no answers",
        ),
        (
            "texts",
            "simulation.checker.model: the reward model reads text, and the prompts are dialogues of up to 3 messages",
        ),
    ],
)
def test_a_model_that_cannot_score_dialogues_is_refused(folder: Path, tmp_path: Path, model: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        simulated(folder, tmp_path, model=model)
    assert text.format(folder=folder) in str(caught.value)


@dataclass(frozen=True)
class Score:
    value: float | None
    error: str | None = None


@dataclass(frozen=True)
class Given:
    """Rewards in place of those of a model."""

    values: Sequence[Score]
    fingerprint: str = "given"

    def scores_of_dialogues(self, prompts: Sequence[Any], answers: Sequence[str]) -> Sequence[Score]:
        return self.values[: len(answers)]


def episode_with(*answers: str) -> Episode:
    episode = Episode("one", "one", {}, 0)
    for answer in answers:
        episode.observe("say")
        episode.act(answer, ())
    episode.end("done")
    return episode


@pytest.mark.parametrize(
    ("score", "reason"),
    [
        (Score(None, "the answer is too long"), "checker: the answer is too long"),
        (Score(float("nan")), "checker: the reward is not a number"),
    ],
)
def test_an_episode_with_an_answer_without_a_score_fails(score: Score, reason: str) -> None:
    episode = episode_with("red", "green")
    RewardChecker(Given([Score(1.0), score]), turns="mean", threshold=0.0).check(episode)
    assert (episode.status, episode.reason, episode.reward, episode.ok) == ("failed", reason, None, None)


def test_episodes_without_answers_and_failed_ones_are_not_scored() -> None:
    checker = RewardChecker(Given([Score(1.0)]), turns="last", threshold=0.0)
    empty, failed = episode_with(), episode_with("red")
    failed.end("failed", "world: broken")
    for episode in (empty, failed):
        checker.check(episode)
        assert (episode.ok, episode.metrics) == (None, {})
