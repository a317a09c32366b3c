"""Architectures of new models.

Parameters of a llama with a vocabulary of 2,048 and tied embeddings: nano 0.2 M, tiny 1.1 M, mini 5.3 M, small 26 M,
medium 87 M. Dropout is off, so that small data can be fitted exactly.
"""

from typing import TYPE_CHECKING, Any

from partita_schema.errors import ModelError
from partita_schema.model import ScratchModel

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
