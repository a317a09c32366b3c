"""Merging of an adapter into its base model, and dequantization; the model in memory stays unchanged.

A quantized base is merged in float32. The weight of a quantized layer with its adapter is computed by applying the
layer to unit vectors, which is exact for every adapter that is linear in its input.
"""

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from partita.lm.precision import is_quantized, plain_weight
from partita_schema.errors import ModelError
from partita_schema.rules.adapters import NOT_MERGED

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


@torch.no_grad()
def merged_model(adapted: "PeftModel") -> "PreTrainedModel":
    """Return a new model on the CPU with the adapter merged into its weights.

    Raises:
        ModelError: The adapter cannot be merged.
    """
    if adapted.active_peft_config.is_prompt_learning:
        raise ModelError(f"adapter.postprocessor.merge_adapter_into_base_model: {NOT_MERGED}")
    return plain_model(adapted.get_base_model())


@torch.no_grad()
def plain_model(base: Any) -> "PreTrainedModel":
    """Return a new model on the CPU with the weights of a model: its layers without adapters and quantization."""
    weights = merged_weights(base)
    config = copy.deepcopy(base.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    embedding, output = base.get_input_embeddings(), base.get_output_embeddings()
    names = {layer: name for name, layer in base.named_modules()}
    first, last = (weights.get(plain_name(names.get(layer, "") + ".weight")) for layer in (embedding, output))
    if first is not None and last is not None and not torch.equal(first, last):
        config.tie_word_embeddings = False
        weights = with_own_storage(weights)
    with torch.device("meta"):
        merged = type(base)(config)
    own = merged.state_dict()
    merged.load_state_dict({name: weights[name] for name in own}, assign=True)
    merged.tie_weights()
    return merged


def with_own_storage(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights that share no storage: of tensors that do, only one would be saved."""
    copied, seen = dict[str, torch.Tensor](), set[int]()
    for name, weight in weights.items():
        copied[name] = weight.clone() if weight.data_ptr() in seen else weight
        seen.add(weight.data_ptr())
    return copied


def merged_weights(base: nn.Module) -> dict[str, torch.Tensor]:
    """Return all weights of the model on the CPU, by their names without the adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    weights: dict[str, torch.Tensor] = {}
    covered: list[str] = []
    for name, layer in base.named_modules():
        if any(name.startswith(f"{outer}.") for outer in covered):
            continue
        if isinstance(layer, BaseTunerLayer):
            covered.append(name)
            state = {f"{name}.{key}": tensor for key, tensor in merged_layer(layer).items()}
        elif is_quantized(layer):
            covered.append(name)
            state = {f"{name}.weight": plain_weight(layer)}
            if getattr(layer, "bias", None) is not None:
                state[f"{name}.bias"] = layer.bias.float()
        else:
            own = {**dict(layer.named_parameters(recurse=False)), **dict(layer.named_buffers(recurse=False))}
            state = {f"{name}.{key}" if name else key: tensor for key, tensor in own.items()}
        for key, tensor in state.items():
            if ".original_module." not in key:
                weights[plain_name(key)] = tensor.detach().cpu().contiguous()
    return weights


def plain_name(name: str) -> str:
    """Return the name of a weight without peft's parts."""
    return name.replace(".modules_to_save.default", "").replace(".base_layer", "")


def merged_layer(layer: Any) -> dict[str, torch.Tensor]:
    """Return the weights of a layer with its adapter merged, by name.

    Adapters of several weights of a layer, such as those of experts, are nested in each other.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    if is_quantized(layer.get_base_layer()):
        return probed_layer(layer)
    nested = [copy.deepcopy(layer)]
    while isinstance(nested[-1].base_layer, BaseTunerLayer):
        nested.append(nested[-1].base_layer)
    for one in reversed(nested):
        one.merge(safe_merge=False)
    return dict(nested[0].get_base_layer().named_parameters())


def probed_layer(layer: Any) -> dict[str, torch.Tensor]:
    """Return weight and bias of a linear layer, from its outputs for zero and for unit vectors."""
    mode = layer.training
    layer.eval()
    base = layer.get_base_layer()
    device = base.weight.device
    rows = torch.eye(base.in_features, device=device)
    bias = layer(rows.new_zeros(1, base.in_features)).float()[0]
    weight = torch.cat([(layer(part).float() - bias).T for part in torch.split(rows, 512)], dim=1)
    layer.train(mode)
    return {"weight": weight} | ({"bias": bias} if base.bias is not None else {})
