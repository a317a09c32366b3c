"""Rules for lock-free training of a bag of words: options that only language models support."""

from collections.abc import Iterator

from partita_schema.base import Refusal, is_set
from partita_schema.rules.constraints import READ_ANSWERS
from partita_schema.sections.backend import LocalBackendConfig
from partita_schema.sections.config_sections import ConfigSections
from partita_schema.sections.features import TextInput
from partita_schema.sections.model import EmbeddingBagModel, ModelParameters
from partita_schema.sections.trainer import HogwildTrainer

SAME_IN_EVERY_ROW = ("task", "system", "examples", "retrieval", "chat")
"""Prompt options that give instructions to a language model."""
OTHER_ORDERS = ("batching", "collate", "mix", "resume", "formatter")
"""Keys of `data` that control the batches of language models."""


def refused_by_hogwild(config: ConfigSections) -> Iterator[Refusal]:
    """Yield every key that conflicts with `trainer: {type: hogwild}` or with a bag of words."""
    bag, hogwild = isinstance(config.base_model, EmbeddingBagModel), isinstance(config.trainer, HogwildTrainer)
    if not bag and not hogwild:
        return
    if not bag:
        reason = "hogwild trains sparse models only, and a language model learns badly without locks"
        yield "base_model", f"{reason}; write {{type: embedding_bag}}, or trainer: {{type: finetune}}"
    if not hogwild:
        reason = f"a bag of words is trained by hogwild, not by {config.trainer.type}"
        yield "trainer.type", f"{reason}; write type: hogwild, with workers: 1 for a single process"
    yield from refused_models(config)
    yield from refused_features(config)
    yield from refused_prompts(config)
    yield from refused_data(config)
    if not isinstance(config.run_backend, LocalBackendConfig):
        reason = "the workers of hogwild share the memory of one machine and are started by the trainer"
        yield "backend.type", f"{reason}; remove backend, and write trainer.workers"


def refused_models(config: ConfigSections) -> Iterator[Refusal]:
    """Yield options of language models."""
    if config.model_parameters.device not in ("auto", "cpu"):
        reason = f"hogwild needs memory that processes share, which {config.model_parameters.device} has not"
        yield "model_parameters.device", f"{reason}; write cpu, or remove it"
    for key in ModelParameters.model_fields:
        if key != "device" and is_set(config.model_parameters, key):
            yield f"model_parameters.{key}", f"a bag of words has no {key}; remove it"
    for key in ("adapter", "quantization"):
        if getattr(config, key) is not None:
            yield key, f"a bag of words is small and trained whole; remove {key}"
    if config.trust_remote_code:
        yield "trust_remote_code", "a bag of words comes without code; remove it"


def refused_features(config: ConfigSections) -> Iterator[Refusal]:
    """Yield inputs that are not text, and outputs that are not categories."""
    for index, feature in enumerate(config.input_features):
        if not isinstance(feature, TextInput):
            yield f"input_features.{index}.type", "a bag holds the words of texts; write type: text"
    output = config.output_features[0]
    if len(config.output_features) > 1:
        yield "output_features.1", "a bag of words has one output; remove the others, or write a file for each"
    if not output.one_label:
        reason = f"a bag of words chooses a label, and this is a {output.type}"
        yield "output_features.0.type", f"{reason}; write type: category, or a language model as base_model"
        return
    for part, key in READ_ANSWERS:
        if is_set(getattr(output, part), key):
            reason = f"{key} reads generated answers, and a bag of words chooses a label"
            yield f"output_features.0.{part}.{key}", f"{reason}; remove it"


def refused_prompts(config: ConfigSections) -> Iterator[Refusal]:
    """Yield text that is the same in every row, and options of generated answers."""
    for key in SAME_IN_EVERY_ROW:
        if is_set(config.prompt, key):
            yield f"prompt.{key}", f"what all rows have in common tells a bag of words nothing; remove {key}"
    for key in type(config.generation).model_fields:
        if key != "logprobs" and is_set(config.generation, key):
            yield f"generation.{key}", f"a label is chosen and nothing is generated; remove {key}"
    if config.preprocessing.global_max_sequence_length is not None:
        reason = "a bag of words has no length limit"
        at = "preprocessing.global_max_sequence_length"
        yield at, f"{reason}; remove it, or write preprocessing.max_sequence_length in an input"


def refused_data(config: ConfigSections) -> Iterator[Refusal]:
    """Yield options for the order of rows, which hogwild decides itself."""
    if config.data.streaming:
        yield "data.source.streaming", "the workers share all rows in memory; remove streaming"
    for key in OTHER_ORDERS:
        if is_set(config.data, key):
            yield f"data.{key}", f"{key} has no effect on hogwild, whose workers take rows by chance; remove it"
