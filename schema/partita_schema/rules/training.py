"""Rules for the trainer and the model that it trains."""

from collections.abc import Iterator

from partita_schema.base import Refusal
from partita_schema.metrics import metric_problem, metrics_without_output
from partita_schema.sections.adapter import AdaloraAdapter
from partita_schema.sections.batching import separates_rows
from partita_schema.sections.config_sections import ConfigSections
from partita_schema.sections.model import ScratchModel
from partita_schema.sections.quantization import DynamicInt8Quantization
from partita_schema.sections.trainer import FinetuneTrainer

RANDOM_MODEL = "a new model has random weights"
NEW_VIRTUAL_TOKENS = "new virtual tokens disturb the model until they are trained"
NOTHING_LEARNED = "{}, so that its metrics say nothing; remove evaluate_base"


def trained_quantization(config: ConfigSections) -> Iterator[Refusal]:
    """Yield a quantization that cannot be trained or has no effect."""
    int8 = isinstance(config.quantization, DynamicInt8Quantization)  # in training, untrainable_formats refuses it
    if config.quantization is not None and isinstance(config.base_model, ScratchModel) and not (int8 and config.trains):
        yield "quantization", "a new model has no weights worth quantizing; remove quantization"
    if config.quantization is not None and not int8 and config.adapter is None and config.trains:
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
    if isinstance(config.adapter, AdaloraAdapter):
        yield "adapter.type", "peft cannot train adalora further once it has reduced ranks, as rounds do; write lora"
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


def uncalled_callbacks(config: ConfigSections) -> Iterator[Refusal]:
    """Yield callbacks that are never called."""
    if config.callbacks and not config.trains:
        yield "callbacks", "they are called during training, and trainer.type is none; remove them"


def meaningless_base(config: ConfigSections) -> Iterator[Refusal]:
    """Yield an evaluation of the model before training where that model has learned nothing."""
    if not isinstance(config.trainer, FinetuneTrainer) or config.trainer.evaluate_base is not True:
        return
    adapter, reason = config.adapter, None
    if isinstance(config.base_model, ScratchModel):
        reason = RANDOM_MODEL
    elif getattr(adapter, "num_virtual_tokens", 0) and adapter and adapter.pretrained_adapter_weights is None:
        reason = NEW_VIRTUAL_TOKENS
    if reason is not None:
        yield "trainer.evaluate_base", NOTHING_LEARNED.format(reason)


def packed_attention(config: ConfigSections) -> Iterator[Refusal]:
    """Yield an attention implementation that cannot separate packed rows."""
    attention = config.model_parameters.attention
    if config.trains and separates_rows(config.data.batching) and attention not in ("auto", "sdpa", "eager"):
        reason = f"rows are packed with sdpa or eager attention only, not with {attention}"
        yield "model_parameters.attention", f"{reason}; write sdpa, or data.batching: {{type: bucket}}"


def half_precision(config: ConfigSections) -> Iterator[Refusal]:
    """Yield what cannot be combined with `trainer.mixed_precision: fp16`."""
    trainer = config.trainer
    if not isinstance(trainer, FinetuneTrainer) or trainer.mixed_precision != "fp16":
        return
    if config.model_parameters.device == "cpu":
        yield "trainer.mixed_precision", "fp16 needs a GPU; on a CPU write bf16 or no"
    if trainer.optimizer.type == "muon":
        yield "trainer.mixed_precision", "fp16 cannot be combined with optimizer.type: muon; write bf16 or no"
    if trainer.learning_rate == "auto":
        yield "trainer.mixed_precision", "fp16 cannot be combined with learning_rate: auto; write bf16 or no"


def two_batch_sizes(config: ConfigSections) -> Iterator[Refusal]:
    """Yield a batch size that has no effect with a token budget."""
    if config.trains and config.data.batching.type == "token_budget" and isinstance(config.trainer.batch_size, int):
        yield (
            "trainer.batch_size",
            "batch_size has no effect with data.batching: {type: token_budget}; write max_tokens or max_rows there",
        )


def ungenerated_metric(config: ConfigSections) -> Iterator[Refusal]:
    """Yield a metric of generated answers where none are generated."""
    trainer = config.trainer
    if not isinstance(trainer, FinetuneTrainer) or trainer.evaluate_generated is not False:
        return
    if any(output.type == "embedding" for output in config.output_features):  # its metrics come with the loss
        return
    named = [("trainer.validation_metric", trainer.validation_metric)]
    named += [("sweep.metric", config.sweep.metric)] if config.sweep is not None and config.sweep.metric else []
    for key, metric in named:
        if metric not in metrics_without_output(config):
            yield key, f"{metric} needs answers, and evaluate_generated: false writes none; remove it, or write loss"


def unknown_metric(config: ConfigSections) -> Iterator[Refusal]:
    """Yield a validation metric that no output has."""
    if not isinstance(config.trainer, FinetuneTrainer):
        return
    problem = metric_problem(config.trainer.validation_metric, config)
    if problem is not None:
        yield "trainer.validation_metric", problem
