"""Architectures of new models, and checks of untrusted ones: sizes, file formats, missing weights.

Parameters of a llama with a vocabulary of 2,048 and tied embeddings: nano 0.2 M, tiny 1.1 M, mini 5.3 M, small 26 M,
medium 87 M. Dropout is off, so that small data can be fitted exactly.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita_schema.errors import ModelError
from partita_schema.sections.model import ScratchModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

SHAPES = {"nano": (64, 2, 2), "tiny": (128, 4, 4), "mini": (256, 6, 8), "small": (512, 8, 8), "medium": (768, 12, 12)}
"""Hidden size, layers, attention heads."""
UNGATED = ("gpt2", "gpt_neox", "opt", "phi")
"""Architectures with two feed-forward matrices; the others have a gate and so three."""
UNGROUPED = ("gpt2", "gpt_neox", "opt")
"""Architectures without grouped-query attention."""
ROTATED = {"stablelm": 0.25, "gpt_neox": 0.25, "phi": 0.5}
"""Fraction of each head with rotary positions, where it is not 1."""
DROPOUT = {
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "gpt_neox": ("hidden_dropout", "attention_dropout"),
    "opt": ("dropout", "attention_dropout"),
    "phi": ("resid_pdrop", "embd_pdrop", "attention_dropout"),
}


def scratch_config(base: ScratchModel, *, tokenizer: "PreTrainedTokenizerFast") -> "PretrainedConfig":
    """Return the transformers config of a new model, with one embedding per token. Raise ModelError."""
    from transformers import AutoConfig

    width, heads, key_value_heads = attention_shape(base)
    layers = base.num_hidden_layers or SHAPES[base.size][1]
    inner = base.intermediate_size or default_intermediate_size(base.architecture, width=width)
    shape = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": base.context_length,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **architecture_shape(base, inner=inner, key_value_heads=key_value_heads, head_dim=width // heads),
    }
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    dropout = dict.fromkeys(DROPOUT.get(base.architecture, ()), 0.0)
    tied = {"tie_word_embeddings": base.tie_word_embeddings}
    return AutoConfig.for_model(base.architecture, **shape, **special, **dropout, **tied)


def attention_shape(base: ScratchModel) -> tuple[int, int, int]:
    """Return hidden size, heads and key/value heads. Raise ModelError if they do not divide."""
    width, _, heads = SHAPES[base.size]
    width = base.hidden_size or width
    heads = base.num_attention_heads or heads
    groups = base.num_key_value_heads or heads
    if width % heads or (width // heads) % 2:
        raise ModelError(
            f"base_model: hidden_size {width} and num_attention_heads {heads} give no even head width; "
            f"write a hidden_size that is a multiple of {2 * heads}, or other num_attention_heads"
        )
    share = ROTATED.get(base.architecture, 1.0)
    if int(width // heads * share) % 2:
        raise ModelError(
            f"base_model: {base.architecture} rotates {share:.0%} of each head, and {width // heads} dimensions a head "
            f"leave an odd number; write a hidden_size that is a multiple of {heads * round(2 / share)}"
        )
    if heads % groups:
        raise ModelError(
            f"base_model.num_key_value_heads: {groups} does not divide num_attention_heads {heads}; write a divisor"
        )
    if groups != heads and base.architecture in UNGROUPED:
        raise ModelError(
            f"base_model.num_key_value_heads: {base.architecture} has no grouped-query attention; remove it"
        )
    return width, heads, groups


def default_intermediate_size(architecture: str, *, width: int) -> int:
    """Return 4 times the hidden size, or with a gate 8/3 of it, a multiple of 32: as many weights."""
    return 4 * width if architecture in UNGATED else -(-8 * width // 96) * 32


def architecture_shape(base: ScratchModel, *, inner: int, key_value_heads: int, head_dim: int) -> dict[str, Any]:
    """Return the config keys that have another name or exist only in this architecture.

    Args:
        base: The new model's section.
        inner: Intermediate size of the feed-forward layers.
        key_value_heads: Number of key/value heads.
        head_dim: Head size.
    """
    name = base.architecture
    if name == "gpt2":
        return {"n_inner": inner}
    if name == "opt":
        return {"ffn_dim": inner}
    if name == "gpt_neox":
        return {"intermediate_size": inner}
    shape: dict[str, Any] = {"intermediate_size": inner, "num_key_value_heads": key_value_heads}
    if name in ("gemma", "gemma2", "qwen3"):
        shape["head_dim"] = head_dim
    if name == "gemma2":
        shape |= {"query_pre_attn_scalar": head_dim, "sliding_window": base.context_length}
    if name == "mistral":
        shape["sliding_window"] = None
    if name == "mixtral":
        shape |= {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    return shape


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
