"""Architectures of new models, and checks of untrusted ones: sizes, file formats, missing weights.

Parameters of a llama with a vocabulary of 2,048 and tied embeddings: nano 0.2 M, tiny 1.1 M, mini 5.3 M, small 26 M,
medium 87 M. Dropout is off, so that small data can be fitted exactly.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita_schema.errors import ModelError
from partita_schema.sections.model import ENCODER_DECODERS, ENCODERS, SHAPES, ScratchModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

UNGATED = ("gpt2", "gpt_neox", "opt", "phi", "bert", "roberta", "distilbert", "deberta-v2", *ENCODER_DECODERS)
"""Architectures with two feed-forward matrices; the others have a gate and so three."""
OFFSET_POSITIONS = (
    "roberta",
    "xlm-roberta",
    "xlm-roberta-xl",
    "roberta-prelayernorm",
    "camembert",
    "data2vec-text",
    "xmod",
    "ibert",
    "longformer",
    "mpnet",
    "esm",
)
"""Architectures whose positions begin after the id of the pad token."""
DROPOUT = {
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "gpt_neox": ("hidden_dropout", "attention_dropout"),
    "opt": ("dropout", "attention_dropout"),
    "phi": ("resid_pdrop", "embd_pdrop", "attention_dropout"),
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "roberta": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "distilbert": ("dropout", "attention_dropout", "seq_classif_dropout"),
    "deberta-v2": ("hidden_dropout_prob", "attention_probs_dropout_prob", "pooler_dropout"),
    "t5": ("dropout_rate",),
    "bart": ("dropout", "attention_dropout", "activation_dropout"),
}


def scratch_config(base: ScratchModel, *, tokenizer: "PreTrainedTokenizerFast") -> "PretrainedConfig":
    """Return the transformers config of a new model, with one embedding per token."""
    from transformers import AutoConfig

    width, heads, key_value_heads = base.attention_shape
    layers = base.num_hidden_layers or SHAPES[base.size][1]
    inner = base.intermediate_size or default_intermediate_size(base.architecture, width=width)
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": base.context_length + unused_positions(base.architecture, tokenizer.pad_token_id),
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
    if base.architecture in ENCODER_DECODERS:
        shape = {"vocab_size": len(tokenizer), **two_sided_shape(base, width=width, layers=layers, heads=heads)}
        start = tokenizer.pad_token_id if base.architecture == "t5" else tokenizer.eos_token_id
        special["decoder_start_token_id"] = start
    if base.architecture in ENCODERS:
        special |= {"cls_token_id": tokenizer.cls_token_id, "sep_token_id": tokenizer.sep_token_id}
    dropout = dict.fromkeys(DROPOUT.get(base.architecture, ()), 0.0)
    tied = {"tie_word_embeddings": base.tie_word_embeddings}
    return AutoConfig.for_model(base.architecture, **shape, **special, **dropout, **tied)


def unused_positions(model_type: str, pad_token_id: int | None) -> int:
    """Return how many position embeddings are never used: those of RoBERTa begin after the id of the pad token."""
    return (pad_token_id or 0) + 1 if model_type in OFFSET_POSITIONS else 0


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
    if name == "distilbert":
        return {"hidden_dim": inner}
    if name == "deberta-v2":
        attention = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
        return {"intermediate_size": inner, "pooler_hidden_size": base.hidden_size or SHAPES[base.size][0], **attention}
    if name in ENCODERS:
        return {"intermediate_size": inner}
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


def two_sided_shape(base: ScratchModel, *, width: int, layers: int, heads: int) -> dict[str, Any]:
    """Return the config keys of an encoder-decoder whose two sides have the same shape.

    Args:
        base: The new model's section.
        width: Hidden size.
        layers: Number of layers of each side.
        heads: Number of attention heads.
    """
    inner = base.intermediate_size or default_intermediate_size(base.architecture, width=width)
    if base.architecture == "t5":
        return {"d_model": width, "d_kv": width // heads, "d_ff": inner, "num_layers": layers, "num_heads": heads}
    sizes = {"layers": layers, "attention_heads": heads, "ffn_dim": inner}
    both = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()}
    # transformers' default would force an end token, and so change what is generated.
    return {"d_model": width, "max_position_embeddings": base.context_length, "forced_eos_token_id": None, **both}


def nothing(name: str) -> bool:
    """Return False for every weight."""
    return False


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


def check_loaded(found: dict[str, Any], *, source: str, may_lack: Callable[[str], bool] = nothing) -> None:
    """Raise ModelError if weights are missing in the files, except those that `may_lack` names: they are random."""
    missing = sorted(name for name in found.get("missing_keys", ()) if not may_lack(name))
    if missing:
        more = f" and {len(missing) - 2:,} more" if len(missing) > 2 else ""
        raise ModelError(
            f"base_model: {source}: its files lack {', '.join(missing[:2])}{more}, which would be random numbers; they "
            "are not complete, or not those of a causal language model"
        )
