"""Adapter for environments of Gymnasium (Towers et al. 2024) whose observations and actions are texts.

An observation is a message of the user; the model's answer is the action. `reset` receives the task as `options`.
"""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from partita.simulation.contract import ContractError, InterfaceError, Message, close_program, format_value
from partita_schema.errors import ConfigError, Problem
from partita_trainers.user_modules import importable


class GymnasiumEnvironment:
    """A Gymnasium environment as a `partita.simulation.contract.Environment`."""

    def __init__(self, program: Any) -> None:
        """Raises InterfaceError if it is not an environment of texts."""
        if hasattr(program, "num_envs"):
            raise InterfaceError(
                f"{type(program).__name__} is a vector environment, which starts its next session by itself when "
                "one ends; name the environment that it is made of: many dialogues run concurrently anyway"
            )
        for method in ("reset", "step"):
            if not callable(getattr(program, method, None)):
                raise InterfaceError(
                    f"{type(program).__name__} has no method {method}, as Gymnasium's environments have"
                )
        for name in ("observation_space", "action_space"):
            space = getattr(program, name, None)
            if space is not None and "Text" not in {kind.__name__ for kind in type(space).__mro__}:
                raise InterfaceError(
                    f"{name} of {type(program).__name__} is {format_value(space)}; a dialogue needs "
                    "gymnasium.spaces.Text: wrap the environment in one that puts it in words"
                )
        self.program = program

    def reset(self, *, seed: int, task: Mapping[str, Any]) -> tuple[list[Message], Mapping[str, Any]]:
        """Begin an episode. Raises ContractError if `reset` does not return a text and info."""
        result = self.program.reset(seed=seed, options=dict(task))
        if not isinstance(result, tuple) or len(result) != 2:
            raise ContractError(f"reset gave {format_value(result)}; give (observation, info), as since Gymnasium 0.26")
        return messages_of(result[0], "reset"), used_info(result[1])

    def step(self, action: str) -> tuple[list[Message], float | None, bool, bool, Mapping[str, Any]]:
        """Take a step. Raises ContractError unless `step` returns five values, of which the first is a text."""
        result = self.program.step(action)
        if not isinstance(result, tuple) or len(result) != 5:
            raise ContractError(
                f"step gave {format_value(result)}; give (observation, reward, terminated, truncated, info)"
            )
        observation, reward, terminated, truncated, info = result
        return messages_of(observation, "step"), number(reward), bool(terminated), bool(truncated), used_info(info)

    def close(self) -> None:
        """Close the program if it has a method `close`."""
        close_program(self.program)


def messages_of(observation: Any, method: str) -> list[Message]:
    """Return an observation as messages, none for an empty one. Raises ContractError if it is not text."""
    if not isinstance(observation, str):
        raise ContractError(f"{method} gave the observation {format_value(observation)}; give a text")
    return [{"role": "user", "content": observation}] if observation else []


def used_info(info: Any) -> Mapping[str, Any]:
    """Return the entries of info that are used: `gold` and `metrics`. Raises ContractError if it is no mapping."""
    if not isinstance(info, Mapping):
        raise ContractError(f"info is {format_value(info)}; give a dictionary")
    return {name: info[name] for name in ("gold", "metrics") if name in info}


def number(reward: Any) -> float:
    """Convert a reward of any numeric type. Raises ContractError if it is not a number."""
    try:
        return float(reward)
    except (TypeError, ValueError):
        raise ContractError(f"step gave a reward of {format_value(reward)}; give a number") from None


def find_environment(name: str, *, key: str, folder: Path | None) -> Callable[..., Any]:
    """Return a function that creates the environment of an id: `Guess-v0`, or `module:Guess-v0` to import its module.

    Raises ConfigError if Gymnasium is not installed or does not know the id.
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
        # The checker would repeat its warnings for the environment of every dialogue.
        return gymnasium.make(bare, disable_env_checker=True, **options)

    make.__name__ = name
    return make


def creator(name: str) -> Any:
    """Return the class or function registered under an id."""
    import gymnasium
    from gymnasium.envs.registration import load_env_creator

    point = gymnasium.spec(name.rpartition(":")[2]).entry_point
    return load_env_creator(point) if isinstance(point, str) else point
