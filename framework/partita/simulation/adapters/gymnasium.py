"""Environments of Gymnasium (Towers et al. 2024) whose observations and actions are texts.

The observation is what the user says, the model's answer is the action. `reset` gets the task as `options`.
"""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from partita.simulation.contract import ContractError, Message, UnfitError, shown
from partita_schema.errors import ConfigError, Problem
from partita_trainers.registry import importable


class GymnasiumEnvironment:
    """One of Gymnasium's environments as one of ours."""

    def __init__(self, program: Any) -> None:
        """Raises UnfitError where it is no environment of texts."""
        if hasattr(program, "num_envs"):
            raise UnfitError(
                f"{type(program).__name__} is a vector environment, which begins its next session by itself as soon as "
                "one ends; name the environment that it is made of: dialogues are had many at a time anyway"
            )
        for method in ("reset", "step"):
            if not callable(getattr(program, method, None)):
                raise UnfitError(f"{type(program).__name__} has no method {method}, as Gymnasium's environments have")
        for name in ("observation_space", "action_space"):
            space = getattr(program, name, None)
            if space is not None and "Text" not in {kind.__name__ for kind in type(space).__mro__}:
                raise UnfitError(
                    f"{name} of {type(program).__name__} is {shown(space)}; a dialogue needs gymnasium.spaces.Text: "
                    "wrap the environment in one that puts it in words"
                )
        self.program = program

    def reset(self, *, seed: int, task: Mapping[str, Any]) -> tuple[list[Message], Mapping[str, Any]]:
        """Begin a session. Raises ContractError where it is not begun with a text and info."""
        found = self.program.reset(seed=seed, options=dict(task))
        if not isinstance(found, tuple) or len(found) != 2:
            raise ContractError(f"reset gave {shown(found)}; give (observation, info), as since Gymnasium 0.26")
        return heard(found[0], "reset"), told(found[1])

    def step(self, action: str) -> tuple[list[Message], float | None, bool, bool, Mapping[str, Any]]:
        """One step of it. Raises ContractError where it does not give five things and a text first."""
        found = self.program.step(action)
        if not isinstance(found, tuple) or len(found) != 5:
            raise ContractError(f"step gave {shown(found)}; give (observation, reward, terminated, truncated, info)")
        observation, reward, terminated, truncated, info = found
        return heard(observation, "step"), number(reward), bool(terminated), bool(truncated), told(info)

    def close(self) -> None:
        """Close it, where it can be."""
        close = getattr(self.program, "close", None)
        if callable(close):
            close()


def heard(observation: Any, method: str) -> list[Message]:
    """An observation as a message; none of an empty one. Raises ContractError where it is not text."""
    if not isinstance(observation, str):
        raise ContractError(f"{method} gave the observation {shown(observation)}; give a text")
    return [{"role": "user", "content": observation}] if observation else []


def told(info: Any) -> Mapping[str, Any]:
    """What dialogues take of info: `gold` and `metrics`. The rest is its own affair. Raises ContractError."""
    if not isinstance(info, Mapping):
        raise ContractError(f"info is {shown(info)}; give a dictionary")
    return {name: info[name] for name in ("gold", "metrics") if name in info}


def number(reward: Any) -> float:
    """A reward of any type of number. Raises ContractError where it is none."""
    try:
        return float(reward)
    except (TypeError, ValueError):
        raise ContractError(f"step gave a reward of {shown(reward)}; give a number") from None


def registered(name: str, *, key: str, folder: Path | None) -> Callable[..., Any]:
    """What makes the environment of an id, such as `Guess-v0`, or `module:Guess-v0`, whose module registers it.

    Raises ConfigError where Gymnasium is not installed or knows no such id.
    """
    try:
        import gymnasium
    except ModuleNotFoundError:
        message = f"{name} is an id of Gymnasium's, which is not installed; pip install 'partita[gymnasium]'"
        raise ConfigError([Problem(key, message)]) from None
    module, _, bare = name.rpartition(":")
    try:
        with importable(folder):
            if module:
                importlib.import_module(module)
        gymnasium.spec(bare)
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise ConfigError([Problem(key, f"Gymnasium has no {name}: {error}")]) from error

    def make(**options: Any) -> Any:
        # Its checker warns anew of each environment, and here each dialogue has one.
        return gymnasium.make(bare, disable_env_checker=True, **options)

    make.__name__ = name
    return make


def creator(name: str) -> Any:
    """The class or function that stands behind an id that is `registered`."""
    import gymnasium
    from gymnasium.envs.registration import load_env_creator

    point = gymnasium.spec(name.rpartition(":")[2]).entry_point
    return load_env_creator(point) if isinstance(point, str) else point
