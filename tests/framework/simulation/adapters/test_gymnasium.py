"""Tests of Gymnasium environments: dialogues in text, and error messages for unsuitable environments."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from partita import ConfigError, Model
from partita.simulation.adapters import load_environment
from partita.simulation.adapters.gymnasium import GymnasiumEnvironment
from partita.simulation.contract import ContractError, InterfaceError, check_reset_result, check_step_result
from partita_schema.sections.simulation import EnvironmentWorldConfig

from ....json_lines import read_json_lines
from ..programs_of_tests import Guess, Guesses, Picture

needs_gymnasium = pytest.mark.skipif(importlib.util.find_spec("gymnasium") is None, reason="gymnasium is not installed")

GAME = """
import gymnasium
from gymnasium.spaces import Text

class Letters(gymnasium.Env):
    observation_space = Text(100)
    action_space = Text(100)

    def __init__(self, letters="abc"):
        self.letters = letters

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.letter = str(self.np_random.choice(list(self.letters)))
        return f"say {self.letter}", {"gold": self.letter, "prob": self.np_random.random(3)}

    def step(self, action):
        right = action.strip() == self.letter
        self.letter = str(self.np_random.choice(list(self.letters)))
        return f"say {self.letter}", self.np_random.random() * 0 + right, False, False, {"gold": self.letter}

class Numbers(Letters):
    action_space = gymnasium.spaces.Discrete(2)

gymnasium.register("Letters-v0", entry_point=Letters, max_episode_steps=4)
gymnasium.register("Numbers-v0", entry_point=Numbers)
"""


def test_an_episode_of_the_environment_is_a_dialogue() -> None:
    environment = GymnasiumEnvironment(Guess())
    said = check_reset_result(environment.reset(seed=5, task={"number": 7}))
    word: Any = said.info["gold"]
    wrong, right = check_step_result(environment.step("pink")), check_step_result(environment.step(f" {word}\n"))

    assert said.messages == [{"role": "user", "content": "guess"}]
    assert (wrong.reward, wrong.terminated, wrong.truncated) == (0.0, False, False)
    assert wrong.messages == [{"role": "user", "content": "no"}]
    assert wrong.info == {"metrics": {"left": 2}}, "other keys of info are ignored"
    assert (right.reward, right.terminated) == (1.0, True)


def test_the_environment_can_truncate_and_gets_the_task_as_options() -> None:
    program = Guess(tries=1)
    environment = GymnasiumEnvironment(program)
    environment.reset(seed=5, task={"number": 7})

    assert program.options == {"number": 7}
    assert check_step_result(environment.step("pink")).truncated
    environment.close()
    assert program.is_closed


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            Guesses,
            (
                "Guesses is a vector environment, which starts its next session by itself when one ends; "
                "name the environment that it is made of: many dialogues run concurrently anyway"
            ),
        ),
        (
            Picture,
            (
                "observation_space of Picture is Box(0, 1); a dialogue needs gymnasium.spaces.Text: "
                "wrap the environment in one that puts it in words"
            ),
        ),
        (dict, "dict has no method reset, as Gymnasium's environments have"),
    ],
)
def test_an_unsuitable_environment_is_refused(kind: type, text: str) -> None:
    with pytest.raises(InterfaceError) as error:
        GymnasiumEnvironment(kind())
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (
            ("no", 1.0, True, {}),
            "step gave ('no', 1.0, True, {}); give (observation, reward, terminated, truncated, info)",
        ),
        ((3, 1.0, True, False, {}), "step gave the observation 3; give a text"),
        (("no", "much", True, False, {}), "step gave a reward of 'much'; give a number"),
        (("no", 1.0, True, False, None), "info is None; give a dictionary"),
    ],
)
def test_an_invalid_step_is_reported(result: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = GymnasiumEnvironment(Guess())
    environment.reset(seed=5, task={})
    monkeypatch.setattr(Guess, "step", lambda self, action: result)

    with pytest.raises(ContractError) as error:
        environment.step("red")
    assert str(error.value) == text


@pytest.mark.skipif(importlib.util.find_spec("gymnasium") is not None, reason="gymnasium is installed")
def test_an_environment_id_needs_gymnasium() -> None:
    section = EnvironmentWorldConfig(type="environment", interface="gymnasium", environment="Letters-v0")
    with pytest.raises(ConfigError) as error:
        load_environment(section, folder=None)
    assert str(error.value) == (
        "simulation.world.environment: Letters-v0 is an id of Gymnasium's, which is not installed; "
        "pip install 'partita[gymnasium]'"
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a module that registers games, and with a new model."""
    (tmp_path / "games_of_tests.py").write_text(GAME, encoding="utf8")
    (tmp_path / "rows.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "say a b c"}, {"role": "assistant", "content": "a b c"}]}\n',
        encoding="utf8",
    )
    return tmp_path


def settings(folder: Path, environment: str, **world: Any) -> Path:
    scratch = {"type": "scratch", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = {
        "base_model": {**scratch, "context_length": 64, "tokenizer": "word", "vocab_size": 32},
        "input_features": [{"name": "messages", "type": "dialogue"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "generation": {"max_new_tokens": 3, "do_sample": True},
        "data": {"source": "rows.jsonl"},
        "trainer": {"type": "none"},
        "simulation": {
            "world": {"type": "environment", "interface": "gymnasium", "environment": environment, **world},
            "tasks": {"count": 12},
        },
    }
    path = folder / "game.yaml"
    path.write_text(json.dumps(config), encoding="utf8")
    return path


@needs_gymnasium
def test_a_gymnasium_environment_runs_by_its_id_with_its_limit(folder: Path) -> None:
    file = settings(folder, "games_of_tests:Letters-v0", options={"letters": "ab"})
    report = Model(file, quiet=True).simulate(folder / "said")
    lines = read_json_lines(folder / "said" / "predicted.jsonl")

    assert report.histories["predicted"].statuses == {"truncated: environment": 12}
    assert {line["messages"][0]["content"] for line in lines} == {"say a", "say b"}
    for line in lines:
        said = [message for message in line["messages"] if "tokens" in message]
        assert len(said) == 4
        assert line["reward"] == sum(message["content"].strip() == message["gold"] for message in said)


@needs_gymnasium
@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ("games_of_tests:Numbers-v0", "options: games_of_tests:Numbers-v0 cannot be created with {}: action_space of "),
        ("games_of_tests:Leters-v0", "environment: Gymnasium has no games_of_tests:Leters-v0: "),
        ("no_games_of_tests:Letters-v0", "environment: Gymnasium has no no_games_of_tests:Letters-v0: "),
    ],
)
def test_an_unknown_id_or_an_environment_without_text_is_reported(folder: Path, environment: str, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        Model(settings(folder, environment), quiet=True).simulate(folder / "said")
    assert str(error.value).startswith(f"simulation.world.{text}"), str(error.value)
