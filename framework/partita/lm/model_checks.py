"""Checks before and after an untrusted model is loaded: sizes, file formats, missing weights."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita_schema.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

RANGES = {
    "vocab_size": (1, 2**31),
    "hidden_size": (1, 2**20),
    "intermediate_size": (0, 2**24),
    "num_hidden_layers": (1, 10_000),
    "num_attention_heads": (0, 2**20),
    "num_key_value_heads": (0, 2**20),
    "max_position_embeddings": (-1, 2**40),
}
"""Valid ranges of config.json values that determine the size of a model (-1: no limit). The upper bounds are more
than 100 times those of any current model."""
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def check_pickles(source: str, *, allowed: bool, key: str, safe: str = "*.safetensors") -> None:
    """Raise ModelError if a folder has only pickled weights and the config does not allow them.

    Args:
        source: Folder of the model; Hub ids are not checked.
        allowed: Whether the config allows pickled weights.
        key: Config key to name in the message.
        safe: Glob of the files that are loaded instead of pickles.
    """
    folder = Path(source)
    if allowed or not folder.is_dir() or any(folder.glob(safe)):
        return
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if pickled:
        raise ModelError(
            f"{key}: {source} holds its weights as a pickle ({pickled[0]}), a format that can carry code; save them as "
            "safetensors, or write model_parameters: {pickled_weights: true} if you trust its source"
        )


def check_numbers(described: "PretrainedConfig", *, source: str) -> None:
    """Raise ModelError if a config.json has an invalid size or token id."""
    text = described.get_text_config()
    for name, (least, most) in RANGES.items():
        value = getattr(text, name, None)
        for number in value if isinstance(value, list | tuple) else [value]:
            if number is None:
                continue
            if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= most:
                raise ModelError(
                    f"base_model: {source}: its config.json says {name}: {number!r}; a model has {least} to {most:,}: "
                    "the file is damaged, or not meant to be loaded"
                )
    check_embedding(text, source=source)
    check_tokens(text, source=source, file="config.json")


def check_embedding(text: Any, *, source: str) -> None:
    """Raise ModelError if the embedding alone would be larger than all weight files of the folder."""
    rows, width = (getattr(text, name, None) for name in ("vocab_size", "hidden_size"))
    if not (Path(source).is_dir() and isinstance(rows, int) and isinstance(width, int)):
        return
    held = sum(path.stat().st_size for path in Path(source).iterdir() if path.suffix in (".safetensors", *PICKLES))
    if held and rows * width > 8 * held:  # no format stores more than 8 numbers per byte
        raise ModelError(
            f"base_model: {source}: its config.json says vocab_size: {rows:,} and hidden_size: {width:,}, and its "
            f"weights have {held:,} bytes; the files do not belong together, or one is damaged"
        )


def check_tokens(settings: Any, *, source: str, file: str) -> None:
    """Raise ModelError if special token ids are not numbers."""
    for name in TOKENS:
        value = getattr(settings, name, None)
        several: Iterable[Any] = value if isinstance(value, list | tuple) else [value]
        for token in several:
            if token is not None and (not isinstance(token, int) or isinstance(token, bool)):
                raise ModelError(
                    f"base_model: {source}: its {file} says {name}: {value!r}; write the number of a token there"
                )


def check_loaded(found: dict[str, Any], *, source: str) -> None:
    """Raise ModelError if weights are missing in the files: they would be random."""
    missing = sorted(found.get("missing_keys", ()))
    if missing:
        more = f" and {len(missing) - 2:,} more" if len(missing) > 2 else ""
        raise ModelError(
            f"base_model: {source}: its files lack {', '.join(missing[:2])}{more}, which would be random numbers; they "
            "are not complete, or not those of a causal language model"
        )
