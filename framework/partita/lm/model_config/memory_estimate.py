"""Estimate of the memory of a batch from the shape of the model, for devices that cannot measure it.

The estimate counts the tensors that are alive at the peak: in a forward pass those of one layer and the KV cache, in
training what every layer saves for backward, without attention scores, which fused kernels do not store (Korthikanti et
al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.1). As workspaces and kernels are
not modeled, half is added. It is an order of magnitude only.

H hidden size, I intermediate size, K width of keys and of values, V vocabulary.
"""

from typing import Any

import torch

MASK_BYTES = 5
"""Bytes of the attention mask per pair of tokens: a bool, and the number that kernels convert it to."""
HALF_AGAIN = 1.5
LOGITS_BYTES = 12
"""Bytes per logit with a label: the logit, its probability and its gradient, in float32."""


def generation_bytes(model: Any, rows: int, *, prompt_tokens: int, new_tokens: int) -> int:
    """Estimate prefill, or decoding with the full KV cache and a copy of one layer, whichever is larger.

    Args:
        model: The transformers model.
        rows: Batch size.
        prompt_tokens: Length of each prompt in tokens.
        new_tokens: New tokens per row.
    """
    shape = ModelShape(model)
    read = prompt_tokens * (shape.alive + shape.cache) + MASK_BYTES * prompt_tokens**2
    length = prompt_tokens + new_tokens
    decoded = length * (shape.cache + shape.cache // shape.layers)
    return int(HALF_AGAIN * rows * (max(read, decoded) + 2 * 4 * shape.vocabulary))


def forward_bytes(model: Any, rows: int, *, tokens: int, loss_tokens: int) -> int:
    """Estimate a forward pass without gradients, with logits at loss tokens.

    Args:
        model: The transformers model.
        rows: Batch size.
        tokens: Length of each row in tokens.
        loss_tokens: Loss tokens per row.
    """
    shape = ModelShape(model)
    row = tokens * shape.alive + MASK_BYTES * tokens**2 + LOGITS_BYTES * shape.vocabulary * loss_tokens
    return int(HALF_AGAIN * rows * row)


def training_bytes(model: Any, rows: int, *, tokens: int, loss_tokens: int, recomputed: bool) -> int:
    """Estimate the activations saved for backward.

    Args:
        model: The transformers model.
        rows: Batch size.
        tokens: Length of each row in tokens.
        loss_tokens: Loss tokens per row.
        recomputed: Whether activations are recomputed: then layer inputs and one whole layer are saved.
    """
    shape = ModelShape(model)
    saved = shape.layers * shape.hidden + shape.kept if recomputed else shape.layers * shape.kept
    row = tokens * saved + MASK_BYTES * tokens**2 + LOGITS_BYTES * shape.vocabulary * loss_tokens
    return int(HALF_AGAIN * rows * row)


class ModelShape:
    """Bytes per token of the parts of a model, and their number."""

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        size = torch.tensor([], dtype=model.dtype).element_size()
        heads = int(getattr(config, "num_attention_heads", None) or 1)  # state space models have none
        hidden = int(config.hidden_size)
        sizes = getattr(config, "intermediate_size", None) or 4 * hidden
        inner = max(map(int, sizes)) if isinstance(sizes, list | tuple) else int(sizes)
        width = int(getattr(config, "head_dim", None) or hidden // heads)
        keys = int(getattr(config, "num_key_value_heads", None) or heads) * width
        self.layers = int(config.num_hidden_layers)
        self.vocabulary = int(config.vocab_size)
        self.hidden = hidden * size
        self.cache = 2 * self.layers * keys * size
        self.alive = (2 * hidden + max(2 * hidden + 2 * keys, 3 * inner + hidden)) * size
        """Of one layer, in a forward pass."""
        self.kept = (6 * hidden + 2 * keys + 6 * inner) * size
        """Of one layer, saved for its backward pass."""
