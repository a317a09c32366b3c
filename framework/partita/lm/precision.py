"""Precision of weights: trained float32 layers of a 16-bit model, quantization to 4 or 8 bits.

On CPUs with AVX512-BF16 bitsandbytes repacks a 4-bit weight at the first forward pass in evaluation mode. The packed
kernel is fast and has no backward pass: gradients are silently wrong from then on. So weights of a model in training
are never repacked; see docs/decisions/0004-qlora-on-cpu.md.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from partita_schema.sections.quantization import BitsandbytesQuantization
from partita_trainers.libraries.bitsandbytes_import import import_bitsandbytes

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig


def bridge_types(module: nn.Module, *, dtype: torch.dtype) -> None:
    """Convert inputs and outputs of float32 copies of whole layers (norms, `modules_to_save`) from and to `dtype`.

    Low-rank adapters do not need this: peft converts around them.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return
    for layer in whole_layers(module):
        layer.register_forward_pre_hook(lambda _, inputs: convert(inputs, torch.float32))
        layer.register_forward_hook(lambda _, inputs, output: convert(output, dtype))


def whole_layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers that peft copied to train them in full."""
    holders = ("modules_to_save", "ln_tuning_layers")
    layers: list[nn.Module] = []
    for layer in module.modules():
        for holder in holders:
            copies = getattr(layer, holder, None)
            if isinstance(copies, nn.ModuleDict):
                layers.extend(copies.values())
    return layers


def convert(value: Any, dtype: torch.dtype) -> Any:
    """Convert floating-point tensors, also inside tuples; return other values unchanged."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(dtype)
    return tuple(convert(part, dtype) for part in value) if isinstance(value, tuple) else value


INT8_WEIGHT = "Int8Params"
"""Name of the class of 8-bit weights in bitsandbytes."""
PACKED_ROWS = 32
"""Number of outputs the packed CPU kernel processes at a time; it fails an assertion for a remainder."""


def bitsandbytes_config(
    quantization: BitsandbytesQuantization, *, device: torch.device, trained: Sequence[str] = ()
) -> "BitsAndBytesConfig":
    """Convert the section to the config of transformers. `trained` names modules that are trained whole."""
    from transformers import BitsAndBytesConfig

    import_bitsandbytes()
    skip = None if quantization.skip_modules is None and not trained else [*(quantization.skip_modules or ()), *trained]
    if quantization.bits == 8:
        return BitsAndBytesConfig(
            load_in_8bit=True,
            llm_int8_threshold=quantization.llm_int8_threshold,
            llm_int8_has_fp16_weight=quantization.llm_int8_has_fp16_weight,
            llm_int8_skip_modules=skip,
        )
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantization.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=quantization.bnb_4bit_use_double_quant,
        bnb_4bit_compute_dtype=compute_dtype(quantization, device=device),
        llm_int8_skip_modules=skip,
    )


def compute_dtype(quantization: BitsandbytesQuantization, *, device: torch.device) -> torch.dtype:
    """Return the dtype that 4-bit layers compute in."""
    if quantization.bnb_4bit_compute_dtype != "auto":
        dtype: torch.dtype = getattr(torch, quantization.bnb_4bit_compute_dtype)
        return dtype
    if device.type == "cpu":
        return torch.float32
    return (
        torch.bfloat16
        if device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
        else torch.float16
    )


def choose_kernels(module: nn.Module, *, may_pack: bool) -> None:
    """Disable repacking of 4-bit weights unless `may_pack`, and where the packed kernel would fail."""
    layers: list[Any] = [layer for layer in module.modules() if hasattr(layer, "support_avx512bf16_for_cpu")]
    for layer in layers:
        packs = may_pack and layer.out_features % PACKED_ROWS == 0
        layer.support_avx512bf16_for_cpu = layer.support_avx512bf16_for_cpu and packs


def is_quantized(layer: nn.Module) -> bool:
    """Return whether the weight of this layer is held in 4 or 8 bits by bitsandbytes."""
    # Not the attribute: wrappers expose the weight of their inner layer by it.
    weight = dict(layer.named_parameters(recurse=False)).get("weight")
    return type(weight).__name__ in ("Params4bit", INT8_WEIGHT)


def quantized_layers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers with 4-bit or 8-bit weights, by name."""
    return [(name, layer) for name, layer in module.named_modules() if is_quantized(layer)]


def reads_inputs_on_host(module: nn.Module) -> bool:
    """Return whether an 8-bit layer separates outliers of its inputs, for which bitsandbytes waits for the device."""
    layers: list[Any] = [layer for _, layer in quantized_layers(module)]
    return any(type(layer.weight).__name__ == INT8_WEIGHT and layer.state.threshold > 0 for layer in layers)


def plain_weight(layer: Any) -> torch.Tensor:
    """Return the weight [out, in] of a quantized layer in float32; the layer stays unchanged.

    peft's own function moves 8-bit weights between devices, and on a CPU they lose their scales.
    """
    weight: Any = layer.weight
    if type(weight).__name__ == INT8_WEIGHT:
        scale = weight.SCB if layer.state.SCB is None else layer.state.SCB
        scaled: torch.Tensor = weight.data.float() * (scale.float() / 127)[:, None]
        return scaled
    from bitsandbytes.functional import dequantize_4bit

    unpack(layer)
    plain: torch.Tensor = dequantize_4bit(weight.data, weight.quant_state)
    return plain.detach().float()


def unpack(layer: Any) -> None:
    """Undo the repacking of a 4-bit weight, if it was repacked."""
    state = getattr(layer.weight, "quant_state", None)
    if getattr(state, "packing_format_for_cpu", False):
        layer.state_dict()  # bitsandbytes unpacks in place when the state dict is requested
