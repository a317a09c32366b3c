"""A one-line summary of a configuration."""

from partita_schema.config import Config
from partita_schema.counted import counted
from partita_schema.model import EmbeddingBagModel, ScratchModel


def summary(config: Config) -> str:
    """Return a summary such as `finetune of scratch llama with lora in 4 bits; 1 input, 2 outputs`."""
    verb = config.trainer.type if config.trains else "zero-shot"
    adapter = f" with {config.adapter.type}" if config.adapter is not None else ""
    bits = f" in {config.quantization.bits} bits" if config.quantization is not None else ""
    inputs, outputs = len(config.input_features), len(config.output_features)
    return f"{verb} of {model_name(config)}{adapter}{bits}; {counted(inputs, 'input')}, {counted(outputs, 'output')}"


def model_name(config: Config) -> str:
    """Return the name of the base model for a summary."""
    model = config.base_model
    if isinstance(model, ScratchModel):
        return f"scratch {model.architecture}"
    return "an embedding bag" if isinstance(model, EmbeddingBagModel) else model
