"""Rules for language modelling: configurations without inputs, and chunks of text."""

from collections.abc import Iterator

from partita_schema.base import Refusal, is_set
from partita_schema.sections.backend import EndpointBackendConfig
from partita_schema.sections.batching import ChunkBatching
from partita_schema.sections.config_sections import ConfigSections
from partita_schema.sections.model import EmbeddingBagModel
from partita_schema.sections.trainer import FinetuneTrainer

PROMPT_KEYS = ("template", "task", "system", "examples", "retrieval", "chat")
"""Keys of `prompt` that write something before an answer."""


def language_modelling_conflicts(config: ConfigSections) -> Iterator[Refusal]:
    """Yield what needs a prompt, in a configuration without inputs."""
    if not config.plain_text:
        return
    output = config.output_features[0]
    if len(config.output_features) > 1 or (output.type != "text" and not output.has_pairs):
        what = "several outputs" if len(config.output_features) > 1 else f"an output of type {output.type}"
        yield "input_features", f"{what} without an input; name the columns that the model sees"
        return
    if isinstance(config.base_model, EmbeddingBagModel):
        yield "input_features", "a bag of words has no input; name the columns that it sees"
    for key in PROMPT_KEYS:
        if is_set(config.prompt, key):
            yield f"prompt.{key}", f"{key} has no effect without input_features; add them, or remove {key}"
    if is_set(output.preprocessing, "max_sequence_length"):
        yield (
            "output_features.0.preprocessing.max_sequence_length",
            "documents are limited by preprocessing.global_max_sequence_length; write that instead",
        )
    if isinstance(config.backend, EndpointBackendConfig):
        yield "backend", "a server computes no loss of a text; remove backend, or add input_features"
    yield from answers_to_score(config)


def answers_to_score(config: ConfigSections) -> Iterator[Refusal]:
    """Yield trainer options that need generated answers; documents without a prompt have none."""
    trainer = config.trainer
    if not isinstance(trainer, FinetuneTrainer):
        return
    if trainer.evaluate_generated is True:
        yield "trainer.evaluate_generated", "there is no prompt to answer without input_features; remove it"


def chunk_conflicts(config: ConfigSections) -> Iterator[Refusal]:
    """Yield what cannot be combined with `data.batching: {type: chunk}`."""
    if not isinstance(config.data.batching, ChunkBatching):
        return
    if not config.plain_text:
        yield (
            "data.batching.type",
            "chunk may cut between a prompt and its answer; write pack, or remove input_features",
        )
    if config.preprocessing.global_max_sequence_length is not None:
        yield (
            "preprocessing.global_max_sequence_length",
            "chunks hold all of a document; remove it, and write data.batching.context_length",
        )
    if config.data.batching.isolate_documents and config.data.collate is not None:
        yield "data.collate", "a custom class does not know the documents of a chunk; remove it, or isolate_documents"
