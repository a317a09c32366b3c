"""The limit of generated tokens per answer."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from partita.outputs.registry import output_types
from partita_schema.config import Config

DEFAULT_NEW_TOKENS = 256
"""Limit of an answer for which neither the file nor the output type sets one."""


def default_new_tokens(
    config: Config, *, tokenizer: Any, labels: Mapping[str, Sequence[str]], otherwise: int = DEFAULT_NEW_TOKENS
) -> int:
    """Return the limit of generated tokens per answer.

    0 with a head. generation.max_new_tokens if set. Otherwise the sum over the outputs of decoder.max_new_tokens, else
    preprocessing.max_sequence_length, else for a category the tokens of its longest label plus a margin, else
    `otherwise`; with several outputs, plus the tokens of the surrounding JSON object.

    Args:
        config: The configuration.
        tokenizer: Counts tokens.
        labels: Labels by output.
        otherwise: Tokens for an output without a limit.
    """
    if config.head_output is not None:
        return 0
    if config.generation.max_new_tokens is not None:
        return config.generation.max_new_tokens
    needed = new_tokens_by_output(config, tokenizer=tokenizer, labels=labels, otherwise=otherwise)
    around = 0
    if len(needed) > 1:
        around = sum(count_tokens(tokenizer, f'"{name}": "", ') for name in needed) + count_tokens(tokenizer, "{}")
    return sum(needed.values()) + around


def new_tokens_by_output(
    config: Config, *, tokenizer: Any, labels: Mapping[str, Sequence[str]], otherwise: int
) -> dict[str, int]:
    """Return the limit of generated tokens of each output by itself, by name; see `default_new_tokens`."""
    if config.generation.max_new_tokens is not None:
        return {output.name: config.generation.max_new_tokens for output in config.output_features}
    count = partial(count_tokens, tokenizer)
    limits = {
        name: output.new_tokens(labels.get(name, ()), count=count) for name, output in output_types(config).items()
    }
    return {name: otherwise if limit is None else limit for name, limit in limits.items()}


def count_tokens(tokenizer: Any, text: str) -> int:
    """Return the number of tokens of a text."""
    return len(tokenizer.encode(text, add_special_tokens=False))
