"""Rules for outputs that a head predicts: options that only generated text has."""

from collections.abc import Iterator

from partita_schema.base import Refusal, is_set
from partita_schema.rules.constraints import READ_ANSWERS
from partita_schema.sections.adapter import PrefixTuningAdapter, PromptTuningAdapter, PTuningAdapter
from partita_schema.sections.backend import EndpointBackendConfig, RayBackendConfig
from partita_schema.sections.batching import PackBatching
from partita_schema.sections.config_sections import ConfigSections
from partita_schema.sections.model import ENCODER_DECODERS, EmbeddingBagModel, ScratchModel
from partita_schema.sections.outputs import OutputFeature
from partita_schema.sections.outputs.set import SetOutput
from partita_schema.sections.trainer import FinetuneTrainer

OF_GENERATED_TEXT = (*READ_ANSWERS, ("decoder", "scoring"), ("decoder", "constrain"), ("decoder", "regex"))
"""Options of an output that have no effect without generated text."""
NOT_READ = ("task", "system", "examples", "retrieval")
"""Options of `prompt` that tell a generating model what to write."""
THRESHOLD = "threshold is for probabilities of a head; write head: linear next to it, or remove it"
NOTHING_IS_GENERATED = "a head predicts the value and nothing is generated"


def refused_by_heads(config: ConfigSections) -> Iterator[Refusal]:
    """Yield every key that conflicts with an output that a head predicts."""
    yield from encoders_without_heads(config)
    if isinstance(config.base_model, ScratchModel):
        yield from refused_without_heads(config)
    for index, output in enumerate(config.output_features):
        if output.has_head:
            yield from refused_models(config, output, f"output_features.{index}.head")
            yield from refused_answers(config, output, f"output_features.{index}")
            if output.head_reads in INPUTS_OF_HEADS:
                yield from refused_inputs(config, output.head_reads)
            if output.head_reads == "texts":
                yield from refused_by_embeddings(config)
            yield from refused_sections(config)
            if not config.scores_answers:
                yield from refused_prompts(config)
            return


def refused_models(config: ConfigSections, output: OutputFeature, at: str) -> Iterator[Refusal]:
    """Yield the head, whose path is `at`, if the model or other outputs do not support it."""
    base = config.base_model
    needs_head = config.is_new_encoder or output.head_reads != "text"
    removes = "" if needs_head else "remove head, or "
    if len(config.output_features) > 1:
        yield at, f"a head predicts a single output; {removes}write one file for each output"
    if isinstance(base, ScratchModel) and base.architecture in ENCODER_DECODERS:
        reason = f"{base.architecture} is an encoder-decoder, which writes its answers"
        yield at, f"{reason}; {removes}choose an encoder or decoder"


def refused_without_heads(config: ConfigSections) -> Iterator[Refusal]:
    """Yield options that only a head reads, given that the model writes its answers unless an output has a head."""
    for index, output in enumerate(config.output_features):
        if isinstance(output, SetOutput) and not output.has_head and is_set(output.decoder, "threshold"):
            yield f"output_features.{index}.decoder.threshold", THRESHOLD


def encoders_without_heads(config: ConfigSections) -> Iterator[Refusal]:
    """Yield outputs of a new encoder that no head can predict."""
    base = config.base_model
    if not isinstance(base, ScratchModel) or not config.is_new_encoder:
        return
    for index, output in enumerate(config.output_features):
        if not (output.can_have_head or output.has_head):
            yield f"output_features.{index}.type", why_no_text(base.architecture, output.type)


def why_no_text(model: str, output_type: str) -> str:
    """Return the error text for an output that an encoder cannot have."""
    reason = f"{model} is an encoder, which writes no text, and a {output_type} is written"
    return f"{reason}; write type: category, set, number, tags, score or embedding, or choose a decoder as base_model"


def refused_by_embeddings(config: ConfigSections) -> Iterator[Refusal]:
    """Yield backends on which the embeddings of a step cannot be compared."""
    if isinstance(config.run_backend, RayBackendConfig):
        yield "backend.type", "the embeddings of a step are compared in one place; remove backend"
    if getattr(config.run_backend, "sharding", "none") == "full":
        yield "backend.sharding", "the embeddings of a step need the whole model on each rank; remove sharding"


INPUTS_OF_HEADS = {
    "words": (1, "tags are for the words of one text", "one input"),
    "pair": (2, "a score is for two texts", "two inputs"),
}
"""By what a head reads: the number of inputs, why, and what to write."""


def refused_inputs(config: ConfigSections, head_reads: str) -> Iterator[Refusal]:
    """Yield what changes the texts that a head reads as they are."""
    count, why, advice = INPUTS_OF_HEADS[head_reads]
    if len(config.input_features) != count:
        yield "input_features", f"{why}; write {advice}"
    for number, feature in enumerate(config.input_features):
        if feature.length_limit is not None:
            message = "the head reads texts up to the context; write preprocessing.global_max_sequence_length"
            yield f"input_features.{number}.preprocessing.max_sequence_length", message
    if config.prompt.template is not None:
        yield "prompt.template", f"{why} as they are in the data; remove template"
    if config.data.formatter is not None:
        yield "data.formatter", f"{why} as they are in the data; remove formatter"


def refused_answers(config: ConfigSections, output: OutputFeature, at: str) -> Iterator[Refusal]:
    """Yield options of the output, whose path is `at`, that read or constrain generated text."""
    if config.scores_answers:
        keys: tuple[tuple[str, str], ...] = (("decoder", "max_new_tokens"),)
    else:
        keys = (*OF_GENERATED_TEXT, ("decoder", "pick"))
    for part, key in keys:
        section = getattr(output, part)
        if key in type(section).model_fields and is_set(section, key):
            yield f"{at}.{part}.{key}", f"{NOTHING_IS_GENERATED}, so {key} has no effect; remove it"


def refused_sections(config: ConfigSections) -> Iterator[Refusal]:
    """Yield options of the other sections that need generated text or its tokens."""
    if isinstance(config.base_model, EmbeddingBagModel):
        yield "base_model", "a bag of words is a classifier without a head; remove head from the output"
    if isinstance(config.backend, EndpointBackendConfig):
        yield "backend.type", "a server generates text and has no head; remove backend, or head from the output"
    for key in type(config.generation).model_fields:
        if config.generation.asks_for(key):
            yield f"generation.{key}", f"{NOTHING_IS_GENERATED}, so {key} has no effect; remove it"
    if isinstance(config.adapter, PromptTuningAdapter | PrefixTuningAdapter | PTuningAdapter):
        yield "adapter.type", f"{config.adapter.type} does not train the head; write lora"


def refused_prompts(config: ConfigSections) -> Iterator[Refusal]:
    """Yield options of prompts and answers, which a head that reads one text does not have."""
    for key in NOT_READ:
        if is_set(config.prompt, key):
            yield (
                f"prompt.{key}",
                f"{NOTHING_IS_GENERATED}, so {key} has no effect; write prompt.template, or remove it",
            )
    if config.prompt.chat is True:
        yield "prompt.chat", "a head reads the text as it is, without a chat template; remove chat"
    if isinstance(config.data.batching, PackBatching):
        yield "data.batching.type", "a head reads one row per sequence, so rows are not packed; write bucket"
    if isinstance(config.trainer, FinetuneTrainer) and is_set(config.trainer, "completion_only_loss"):
        yield "trainer.completion_only_loss", "the loss is that of the head, not of tokens; remove it"
