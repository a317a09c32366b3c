"""One line about a configuration."""

from partita_schema.config import Config
from partita_schema.model import ScratchModel


def summary(config: Config) -> str:
    """`finetune of scratch llama with lora in 4 bits; 1 input, 2 outputs`."""
    model = config.base_model
    name = f"scratch {model.architecture}" if isinstance(model, ScratchModel) else model
    verb = "zero-shot" if config.trainer.type == "none" else config.trainer.type
    adapter = f" with {config.adapter.type}" if config.adapter is not None else ""
    bits = f" in {config.quantization.bits} bits" if config.quantization is not None else ""
    inputs, outputs = len(config.input_features), len(config.output_features)
    return f"{verb} of {name}{adapter}{bits}; {counted(inputs, 'input')}, {counted(outputs, 'output')}"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
