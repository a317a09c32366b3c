"""Rules for the trainer and the model that it trains."""

from collections.abc import Iterator

from partita_schema.base import Refusal
from partita_schema.common.text import nearest
from partita_schema.sections.config_sections import ConfigSections
from partita_schema.sections.model import ScratchModel
from partita_schema.sections.outputs import ranking_metrics
from partita_schema.sections.trainer import FinetuneTrainer


def trained_quantization(config: ConfigSections) -> Iterator[Refusal]:
    """Yield a quantization that cannot be trained or has no effect."""
    if config.quantization is not None and isinstance(config.base_model, ScratchModel):
        yield "quantization", "a new model has no weights worth quantizing; remove quantization"
    if config.quantization is not None and config.adapter is None and config.trains:
        yield "quantization", "quantized weights cannot be trained; add adapter: {type: lora} or remove quantization"


def untrained_adapter(config: ConfigSections) -> Iterator[Refusal]:
    """Yield an adapter that is neither trained nor loaded."""
    if config.adapter is not None and config.adapter.pretrained_adapter_weights is None and not config.trains:
        yield (
            "adapter",
            (
                "a new adapter has no effect with trainer: {type: none}; write trainer: {type: finetune}, or remove "
                "adapter"
            ),
        )


def impossible_self_training(config: ConfigSections) -> Iterator[Refusal]:
    """Yield what makes rounds of self-training impossible."""
    if config.simulation is None or config.simulation.self_training is None:
        return
    if not isinstance(config.trainer, FinetuneTrainer):
        yield (
            "simulation.self_training",
            (
                f"trainer: {{type: {config.trainer.type}}} trains no rounds; write type: finetune, or remove "
                "self_training"
            ),
        )
    if config.data.streaming:
        yield (
            "simulation.self_training",
            (
                "rounds are mixed with rows by index; remove streaming, or train on data first and write rounds in a "
                "separate file, with base_model: runs/NAME/model"
            ),
        )
    if isinstance(config.base_model, ScratchModel) and config.data.source is None and config.data.mix is None:
        yield "data", "a new model cannot speak yet; write data.source, rows to learn from"


def fastest_dtype(config: ConfigSections) -> Iterator[Refusal]:
    """Yield a dtype that is meant for inference only."""
    if config.model_parameters.dtype == "fastest" and config.trains:
        yield "model_parameters.dtype", "fastest is for answers alone; write auto, or with an adapter bfloat16"


def two_batch_sizes(config: ConfigSections) -> Iterator[Refusal]:
    """Yield a batch size that has no effect with a token budget."""
    if config.data.batching.type == "token_budget" and isinstance(config.trainer.batch_size, int):
        yield (
            "trainer.batch_size",
            "batch_size has no effect with data.batching: {type: token_budget}; write max_tokens or max_rows there",
        )


def unknown_metric(config: ConfigSections) -> Iterator[Refusal]:
    """Yield a validation metric that no output has."""
    if not isinstance(config.trainer, FinetuneTrainer) or config.trainer.validation_metric == "loss":
        return
    wanted, outputs = config.trainer.validation_metric, config.output_features
    names = [output.name for output in outputs]
    if "." in wanted and not any(wanted.startswith(f"{name}.") for name in names):
        yield (
            "trainer.validation_metric",
            f"{wanted!r} names no output; write loss, or a metric after one of {', '.join(f'{n}.' for n in names)}",
        )
    # A bare name is a metric of the first output, even if all outputs together have a metric of that name.
    first = f"{names[0]}."
    full = wanted if "." in wanted else first + wanted
    known = ["loss", *(f"{output.name}.{metric}" for output in outputs for metric in ranking_metrics(output))]
    if full not in known and ".field." not in full:
        short = [name.removeprefix(first) for name in known]
        near = nearest(wanted, [*short, *known]) or [name for name in known if name.endswith(f".{wanted}")]
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
        yield "trainer.validation_metric", f"no metric is named {wanted}; {hint}"
