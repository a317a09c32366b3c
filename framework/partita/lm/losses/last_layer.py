"""The last layer of a model, computed in two parts: keys and values for all tokens, and the rest for some of them.

After the keys and values of the last layer, a prefill needs the last token of each prompt only, and a loss the tokens
that predict a label. A hook runs the layer until its attention has the keys and values of all tokens, stops it by an
exception, and then passes the selected tokens through.

Shapes: B sequences, T tokens of the longest, H hidden size.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn


class KeysComputed(Exception):  # noqa: N818 - it is no error
    """Raised when the attention of the layer has the keys and values of all tokens."""


class SplitLayerHook(ABC):
    """The hook on a layer. A subclass raises KeysComputed in its attention or its cache, and selects tokens."""

    enabled = False
    """Whether the next forward pass is split."""

    def __init__(self, layer: nn.Module) -> None:
        """Register the hook."""
        self.layer = layer
        self.signature = inspect.signature(layer.forward)
        self.handle = layer.register_forward_pre_hook(self.narrow, with_kwargs=True)

    def close(self) -> None:
        """Remove the hook."""
        self.handle.remove()

    def narrow(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the layer's arguments for the selected tokens, after the keys of all tokens are computed.

        Raises:
            RuntimeError: The layer computed everything: it cannot be split.
        """
        if not self.enabled:
            return None
        given = self.signature.bind(*args, **kwargs)
        hidden_BTH = next(iter(given.arguments.values()))
        try:
            with self.stopping(hidden_BTH):
                self.layer.forward(*args, **kwargs)
        except KeysComputed:
            for name, value in given.arguments.items():
                given.arguments[name] = map_tokens(value, self.choose, length=hidden_BTH.shape[1])
            completed = self.completed(given)
            return completed.args, completed.kwargs
        raise RuntimeError("the last layer does not stop after its keys and values")

    @contextmanager
    def enable(self) -> Iterator[None]:
        """Split the forward passes in this context."""
        self.enabled = True
        try:
            yield
        finally:
            self.enabled = False

    @abstractmethod
    def stopping(self, hidden_BTH: torch.Tensor) -> AbstractContextManager[None]:
        """Return a context in which the layer raises KeysComputed as soon as it has computed its keys and values.

        Args:
            hidden_BTH: Inputs of the layer.
        """

    @abstractmethod
    def choose(self, value: torch.Tensor) -> torch.Tensor:
        """Return the selected tokens of a tensor of all tokens [B or 1, T, ...], after the keys are computed."""

    def completed(self, given: inspect.BoundArguments) -> inspect.BoundArguments:
        """Return the arguments for the selected tokens, with what else has to change."""
        return given


def map_tokens(value: Any, choose: Callable[[torch.Tensor], torch.Tensor], *, length: int) -> Any:
    """Apply a function to all tensors of all tokens in a value, also in tuples and dictionaries.

    Args:
        value: An argument of the layer.
        choose: Selects tokens of a tensor [B or 1, T, ...].
        length: T; other tensors stay as they are.
    """
    if isinstance(value, dict):
        return {name: map_tokens(one, choose, length=length) for name, one in value.items()}
    if isinstance(value, tuple):
        return tuple(map_tokens(one, choose, length=length) for one in value)
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[1] != length:
        return value
    return choose(value)


def last_layer(base: Any) -> tuple[nn.Module, int] | None:
    """Return a model's last layer and the number of layers; None if they cannot be identified."""
    number = int(base.config.get_text_config().num_hidden_layers)
    lists = [module for module in base.modules() if isinstance(module, nn.ModuleList) and len(module) == number]
    kinds = [layers for layers in lists if len({type(layer) for layer in layers}) == 1]
    return (kinds[0][-1], number) if len(kinds) == 1 else None
