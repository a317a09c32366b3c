"""The last layer for the tokens that predict a label only.

A loss needs the output of these tokens only; all other tokens contribute keys and values to the last layer. The result
is the same, but for rounding.

Shapes: B sequences, T tokens of the longest, K selected tokens, M most selected tokens of a sequence, A heads, D head
size.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from partita.lm.losses.last_layer import KeysComputed, SplitLayerHook
from partita.lm.transformers_internals import set_attention

NAME = "partita_loss_tokens"
ATTENTION = "sdpa"
"""The attention that is replaced."""
MOST_SELECTED = 0.75
"""Share of the tokens that predict a label above which the whole layer is computed."""

current = threading.local()


class SelectedTokens:
    """The selected tokens of a batch, ordered by sequence, and what they attend to."""

    def __init__(self, indices_K: torch.Tensor, *, sequences: int, length: int, device: torch.device) -> None:
        """Find the index of each token in a rectangle of sequences.

        Args:
            indices_K: Indices of the tokens in the flattened sequences, on the CPU.
            sequences: Number of sequences.
            length: Tokens of a sequence.
            device: Device of the model.
        """
        self.sequences, self.length = sequences, length
        sequence_K, column_K = indices_K // length, indices_K % length
        counts_B = torch.bincount(sequence_K, minlength=sequences)
        order_K = sequence_K.argsort(stable=True)
        rank_K = torch.empty_like(sequence_K)
        rank_K[order_K] = torch.arange(len(sequence_K)) - (counts_B.cumsum(0) - counts_B)[sequence_K[order_K]]
        self.most = int(counts_B.max())
        cell_K = sequence_K * self.most + rank_K
        token_N = torch.zeros(sequences * self.most, dtype=torch.long)
        token_N[cell_K] = torch.arange(len(sequence_K))
        column_N = torch.zeros_like(token_N)
        column_N[cell_K] = column_K
        self.indices_K, self.columns_K = indices_K.to(device), column_K.to(device)
        self.cell_K, self.token_N = cell_K.to(device), token_N.to(device)
        self.column_BM = column_N.view(sequences, self.most).to(device)
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        self.mask: torch.Tensor | None = None

    def pick(self, value: torch.Tensor) -> torch.Tensor:
        """Select the tokens [1, K, ...] of a tensor of all tokens [B or 1, T, ...]."""
        if value.shape[0] == self.sequences:
            return value.flatten(0, 1).index_select(0, self.indices_K)[None]
        return value.index_select(1, self.columns_K) if value.shape[0] == 1 else value

    def attend(self, module: nn.Module, query_1AKD: torch.Tensor, settings: Mapping[str, Any]) -> torch.Tensor:
        """Return the attention output [1, K, A, D] of the tokens over the keys of all tokens of their sequences."""
        query_AND = query_1AKD[0].index_select(1, self.token_N)
        query_BAMD = query_AND.view(len(query_AND), self.sequences, self.most, -1).transpose(0, 1)
        found_BMAD, _ = sdpa_attention_forward(module, query_BAMD, self.keys, self.values, self.mask_B1MT(), **settings)
        found_1KAD: torch.Tensor = found_BMAD.flatten(0, 1).index_select(0, self.cell_K)[None]
        return found_1KAD

    def mask_B1MT(self) -> torch.Tensor:
        """Return the attention mask of the tokens, from the mask of all tokens; it is causal without one."""
        if self.mask is None:
            columns_T = torch.arange(self.length, device=self.column_BM.device)
            return (columns_T <= self.column_BM[..., None])[:, None]
        mask_BTT = self.mask[:, 0].expand(self.sequences, -1, -1)
        return mask_BTT.gather(1, self.column_BM[..., None].expand(-1, -1, self.length))[:, None]


class LossTokenHook(SplitLayerHook):
    """Passes only selected tokens through the rest of the last layer, while enabled."""

    indices_K: torch.Tensor

    def __init__(self, layer: nn.Module, config: Any) -> None:
        """Register the hook on the last layer of a model with this config."""
        super().__init__(layer)
        self.config = config

    @staticmethod
    def pays_off(indices_K: torch.Tensor, *, tokens: int) -> bool:
        """Return whether computing the layer for the selected tokens only is faster than for all tokens.

        Args:
            indices_K: Indices of the selected tokens.
            tokens: Number of all tokens.
        """
        return len(indices_K) <= MOST_SELECTED * tokens

    @contextmanager
    def only(self, indices_K: torch.Tensor) -> Iterator[None]:
        """Continue after the keys of the last layer with these tokens of the flattened sequences: [1, K, H], in this
        order.

        Raises:
            RuntimeError: In the forward pass, if the attention of the layer cannot be replaced.
        """
        self.indices_K = indices_K
        try:
            with self.enable():
                yield
        finally:
            self.use(None)

    @contextmanager
    def stopping(self, hidden_BTH: torch.Tensor) -> Iterator[None]:
        """Stop the layer in its attention; the next time, the selected tokens attend."""
        sequences, length = hidden_BTH.shape[:2]
        self.use(SelectedTokens(self.indices_K, sequences=sequences, length=length, device=hidden_BTH.device))
        yield

    def choose(self, value: torch.Tensor) -> torch.Tensor:
        """Return the selected tokens [1, K, ...] of a tensor of all tokens [B or 1, T, ...]."""
        tokens: SelectedTokens = current.tokens
        return tokens.pick(value)

    def use(self, tokens: SelectedTokens | None) -> None:
        """Replace the attention of the model until the selected tokens have attended, or restore it."""
        current.tokens = tokens
        set_attention(self.config, NAME if tokens is not None else ATTENTION)


def loss_token_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Keep the keys and values of all tokens in the first pass; attend to them in the second.

    Args:
        module: The attention layer.
        query: Queries [B, A, T, D], in the second pass [1, A, K, D].
        key: Keys [B, A, T, D].
        value: Values [B, A, T, D].
        attention_mask: Mask [B or 1, 1, T, T], or None if attention is causal.
        settings: Passed to the sdpa function.

    Raises:
        KeysComputed: In the first pass.
    """
    tokens: SelectedTokens = current.tokens
    if tokens.keys is None:
        if settings.get("position_bias") is not None:
            raise RuntimeError("the attention of the last layer has a bias for each pair of positions")
        tokens.keys, tokens.values, tokens.mask = key, value, attention_mask
        raise KeysComputed
    return tokens.attend(module, query, settings), None


AttentionInterface.register(NAME, loss_token_attention)
