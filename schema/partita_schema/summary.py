"""One line about a configuration."""

from partita_schema.config import Config
from partita_schema.counted import counted
from partita_schema.model import EmbeddingBagModel, ScratchModel


def summary(config: Config) -> str:
    """`finetune of scratch llama with lora in 4 bits; 1 input, 2 outputs`."""
    verb = "zero-shot" if config.trainer.type == "none" else config.trainer.type
    adapter = f" with {config.adapter.type}" if config.adapter is not None else ""
    bits = f" in {config.quantization.bits} bits" if config.quantization is not None else ""
    inputs, outputs = len(config.input_features), len(config.output_features)
    return f"{verb} of {model_name(config)}{adapter}{bits}; {counted(inputs, 'input')}, {counted(outputs, 'output')}"


def model_name(config: Config) -> str:
    """What the base model is called in a line about it."""
    model = config.base_model
    if isinstance(model, ScratchModel):
        return f"scratch {model.architecture}"
    return "an embedding bag" if isinstance(model, EmbeddingBagModel) else model
