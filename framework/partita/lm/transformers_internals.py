"""What partita uses of transformers that is not public, one function for each attribute.

Checked with transformers 5.23. If an attribute disappears, tests/framework/lm/test_transformers_internals.py says what
to change.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

from partita_trainers.base import Batch

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

TemplateCompiler = Callable[[str], Any]
"""Turns a chat template into a jinja template."""


def attention_of(config: "PretrainedConfig") -> str | None:
    """Return the name of the attention implementation: `PretrainedConfig._attn_implementation`.

    The public names are the argument `attn_implementation` and `PreTrainedModel.set_attn_implementation`, which only
    write it.
    """
    name: str | None = getattr(config, "_attn_implementation", None)
    return name


def set_attention(config: "PretrainedConfig", name: str | None) -> None:
    """Set the attention implementation of a config and its sub-configs: `PretrainedConfig._attn_implementation`.

    `PreTrainedModel.set_attn_implementation` looks through all submodules, and slots change it for each forward pass.
    """
    config._attn_implementation = name


def attention_settings(config: "PretrainedConfig") -> list[dict[str, Any]]:
    """Return the attributes of a config and of its sub-configs; their key `ATTENTION` sets the attention.

    `set_attention` takes 7 us, as long as a small operation of a model, and slots change the attention twice in each
    forward pass.
    """
    parts = [getattr(config, name, None) for name in config.sub_configs]
    return [vars(config), *(settings for part in parts if part is not None for settings in attention_settings(part))]


ATTENTION = "_attn_implementation_internal"
"""Attribute of a config that holds the name of its attention implementation."""


def is_stateful(model: "PreTrainedModel") -> bool:
    """Return whether a model keeps states that cannot be cut back to earlier tokens: `PreTrainedModel._is_stateful`."""
    return bool(getattr(model, "_is_stateful", False))


def replace_template_compiler(build: Callable[[TemplateCompiler], TemplateCompiler]) -> None:
    """Replace the function that compiles chat templates: `chat_template_utils._compile_jinja_template`.

    `build` gets transformers' own compiler and returns the new one. transformers has no way to pass an environment.
    """
    from transformers.utils import chat_template_utils

    chat_template_utils._compile_jinja_template = build(chat_template_utils._compile_jinja_template)


def prefill(
    model: "PreTrainedModel", input_ids: "torch.Tensor", settings: "GenerationConfig", inputs: dict[str, Any]
) -> Any:
    """Return the outputs of the first forward pass of `generate`: `GenerationMixin._prefill`.

    Args:
        model: The model.
        input_ids: The tokens before the first new one.
        settings: The generation config.
        inputs: The other inputs of the model.
    """
    return model._prefill(input_ids, settings, inputs)


def updated_inputs(model: "PreTrainedModel", outputs: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of the next forward pass: `GenerationMixin._update_model_kwargs_for_generation`."""
    updated: dict[str, Any] = model._update_model_kwargs_for_generation(
        outputs, inputs, is_encoder_decoder=model.config.is_encoder_decoder
    )
    return updated


def optimized_for_decoding(model: "PreTrainedModel") -> AbstractContextManager[None]:
    """Choose the computation of experts for single tokens: `GenerationMixin._optimize_model_for_decode`."""
    context: AbstractContextManager[None] = model._optimize_model_for_decode()
    return context


_packed: ContextVar[bool | None] = ContextVar("packed", default=None)
"""Whether the rows of the forward pass are packed; None if it is not known."""


def are_packed(batch: Batch) -> bool:
    """Return whether the positions of a batch restart or jump in a sequence, as transformers recognizes packed rows."""
    return batch.position_ids_BT is not None and bool((batch.position_ids_BT.diff(dim=1) != 1).any())


@contextmanager
def packing_known(*, packed: bool) -> Iterator[None]:
    """Declare whether the rows of a forward pass are packed, so that transformers reads no values from the device.

    Args:
        packed: Whether rows are packed.
    """
    patch_packing_checks()
    with context_variable_set(_packed, packed):
        yield


@cache
def patch_packing_checks() -> None:
    """Replace two functions that wait for the device in every forward pass.

    `masking_utils.find_packed_sequence_indices` reads whether there are packed rows. Its result stays the same.
    `PreTrainedModel.warn_if_padding_and_no_attention_mask` reads tokens to warn of padding, which is on the right and
    needs no mask. Both are called as before where `packing_known` says nothing, and while torch compiles.
    """
    import torch
    from transformers import PreTrainedModel, masking_utils

    search: Callable[[torch.Tensor], torch.Tensor | None] = masking_utils.find_packed_sequence_indices
    warn = PreTrainedModel.warn_if_padding_and_no_attention_mask

    def find_packed_sequence_indices(position_ids: torch.Tensor) -> torch.Tensor | None:
        if torch.compiler.is_compiling() or (packed := _packed.get()) is None:
            return search(position_ids)
        if not packed:
            return None
        return (position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)

    def warn_if_padding_and_no_attention_mask(
        self: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> None:
        if torch.compiler.is_compiling() or _packed.get() is None:
            warn(self, input_ids, attention_mask)

    masking_utils.find_packed_sequence_indices = find_packed_sequence_indices
    PreTrainedModel.warn_if_padding_and_no_attention_mask = warn_if_padding_and_no_attention_mask


_padded: ContextVar[bool | None] = ContextVar("padded", default=None)
"""Whether the attention mask of the forward pass masks padding; None if it is not known."""


@contextmanager
def padding_known(*, padded: bool) -> Iterator[None]:
    """Declare whether the attention mask of a forward pass masks padding, so that transformers does not read it."""
    patch_padding_checks()
    with context_variable_set(_padded, padded):
        yield


@contextmanager
def context_variable_set(variable: ContextVar[bool | None], value: bool) -> Iterator[None]:
    """Set a context variable in this context."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@cache
def patch_padding_checks() -> None:
    """Replace two functions that wait for the device to see whether a mask can be left out.

    `masking_utils._ignore_causal_mask_sdpa` and `_ignore_bidirectional_mask_sdpa`. Their results stay the same
    in passes without a KV cache. They are called as before outside of `padding_known`, and while torch compiles.
    """
    from transformers import masking_utils

    for name in ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"):
        setattr(masking_utils, name, with_known_padding(getattr(masking_utils, name)))


def with_known_padding(can_ignore: Callable[..., bool]) -> Callable[..., bool]:
    """Return the function with what `padding_known` declares instead of the values of the mask."""
    import torch

    @wraps(can_ignore)
    def can_ignore_mask(padding_mask: "torch.Tensor | None", *args: Any, **kwargs: Any) -> bool:
        padded = None if torch.compiler.is_compiling() else _padded.get()
        if padded and padding_mask is not None:
            return False
        return can_ignore(padding_mask if padded is None else None, *args, **kwargs)

    return can_ignore_mask


def initialize_again(model: Any, layers: "Iterable[nn.Module]") -> None:
    """Give layers of a model new random weights, as transformers initializes them: `PreTrainedModel._init_weights`.

    It skips weights that were loaded, which are marked by `_is_hf_initialized`.
    """
    for layer in layers:
        for parameter in layer.parameters():
            vars(parameter).pop("_is_hf_initialized", None)
        model._init_weights(layer)
