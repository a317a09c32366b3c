"""Rules for adapters: options that virtual tokens, or weights that cannot be changed, exclude."""

from collections.abc import Iterator

from partita_schema.base import Refusal
from partita_schema.sections.adapter import LoraAdapter, PrefixTuningAdapter, PromptTuningAdapter, PTuningAdapter
from partita_schema.sections.batching import separates_rows
from partita_schema.sections.config_sections import ConfigSections
from partita_schema.sections.model import ScratchModel
from partita_schema.sections.trainer import FinetuneTrainer

NOT_PACKED = (
    "rows cannot be packed under the adapter {}: its virtual tokens would stand once in each sequence, not before each "
    "row; write data.batching: {{type: bucket}}"
)
NOT_RECOMPUTED = (
    "prefix_tuning lives in the cache, which recomputing leaves out; write gradient_checkpointing: false, or adapter: "
    "{type: prompt_tuning}"
)
NOT_MERGED = "virtual tokens are not weights and cannot be merged; remove it"
NO_BEAMS = "beam search does not work with prefix_tuning; write num_beams: 1"
MOVES_WEIGHTS = ("pissa", "pissa_niter_4", "pissa_niter_16", "olora", "corda")
"""Inits of LoRA after which base and adapter together equal the original weights."""
WEIGHTS_MOVED = (
    "{} changes the base weights, and quantized ones cannot be changed; write init: loftq or default, or remove "
    "quantization"
)
ORTHOGONAL = "orthogonal does not work on a quantized base; write init: default or loftq"
ONE_ITERATION = "a quantized base allows 1, its weights stay as they are; write 1"
NOT_OLORA = "olora does not work on layers of {}; write init: pissa"


def refused_by_virtual_tokens(config: ConfigSections) -> Iterator[Refusal]:
    """Yield every key that conflicts with an adapter of virtual tokens."""
    adapter = config.adapter
    if not isinstance(adapter, PromptTuningAdapter | PrefixTuningAdapter | PTuningAdapter):
        return
    if config.trains and separates_rows(config.data.batching) and config.head_output is None:
        yield "data.batching.type", NOT_PACKED.format(adapter.type)
    if adapter.postprocessor.merge_adapter_into_base_model:
        yield "adapter.postprocessor.merge_adapter_into_base_model", NOT_MERGED
    if adapter.type != "prefix_tuning":
        return
    if isinstance(config.trainer, FinetuneTrainer) and config.trainer.gradient_checkpointing:
        yield "trainer.gradient_checkpointing", NOT_RECOMPUTED
    if config.generation.asks_for("num_beams"):
        yield "generation.num_beams", NO_BEAMS


def inits_on_other_weights(config: ConfigSections) -> Iterator[Refusal]:
    """Yield an init of LoRA that does not work on the weights of the model."""
    adapter = config.adapter
    if not isinstance(adapter, LoraAdapter):
        return
    base = config.base_model
    if isinstance(base, ScratchModel) and base.architecture == "gpt2" and adapter.init == "olora":
        yield "adapter.init", NOT_OLORA.format(base.architecture)
    if config.quantization is None:
        return
    if adapter.init == "orthogonal":
        yield "adapter.init", ORTHOGONAL
    if adapter.init in MOVES_WEIGHTS:
        yield "adapter.init", WEIGHTS_MOVED.format(adapter.init)
    if adapter.loftq_iterations > 1:
        yield "adapter.loftq_iterations", ONE_ITERATION
