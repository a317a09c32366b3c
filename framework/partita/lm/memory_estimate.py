"""What a batch should take by the shape of the model, for devices that cannot tell what it takes.

Counted are the tensors that are alive at once where most are: for a forward pass those of one layer and the cache, for
training what every layer keeps for its backward pass, without attention scores, which fused kernels do not write
(Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.1). A formula knows
no workspace and no kernel of its own: half as much again is added. It tells the size of what is needed, no more.

H hidden size, I inner size of a feed-forward layer, K width of keys and of values, V vocabulary.
"""

from typing import Any

import torch

MASK_BYTES = 5
"""Of a mask, for each pair of tokens: a truth value, and the number that kernels make of it."""
HALF_AGAIN = 1.5
LOGITS_BYTES = 12
"""Of a logit with a label: itself, its probability and its gradient, in float32."""


def generation_bytes(model: Any, rows: int, *, prompt_tokens: int, new_tokens: int) -> int:
    """Reading prompts beside their cache, or the full cache and the copy of one layer that a decode step makes."""
    shape = ModelShape(model)
    read = prompt_tokens * (shape.alive + shape.cache) + MASK_BYTES * prompt_tokens**2
    length = prompt_tokens + new_tokens
    decoded = length * (shape.cache + shape.cache // shape.layers)
    return int(HALF_AGAIN * rows * (max(read, decoded) + 2 * 4 * shape.vocabulary))


def forward_bytes(model: Any, rows: int, *, tokens: int, learned: int) -> int:
    """A forward pass without gradients, with logits where labels stand."""
    shape = ModelShape(model)
    row = tokens * shape.alive + MASK_BYTES * tokens**2 + LOGITS_BYTES * shape.vocabulary * learned
    return int(HALF_AGAIN * rows * row)


def training_bytes(model: Any, rows: int, *, tokens: int, learned: int, recomputed: bool) -> int:
    """What layers keep for the backward pass; where that is recomputed, their inputs and all of one layer."""
    shape = ModelShape(model)
    kept = shape.layers * shape.hidden + shape.kept if recomputed else shape.layers * shape.kept
    row = tokens * kept + MASK_BYTES * tokens**2 + LOGITS_BYTES * shape.vocabulary * learned
    return int(HALF_AGAIN * rows * row)


class ModelShape:
    """Bytes a token of the parts of a model, and how many there are."""

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        size = torch.tensor([], dtype=model.dtype).element_size()
        heads = int(getattr(config, "num_attention_heads", None) or 1)  # state spaces have none
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
        """Of one layer, for its backward pass."""
