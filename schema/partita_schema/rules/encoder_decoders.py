"""Rules for encoder-decoders, whose rows have two sides: a prompt that the encoder reads, and an answer.

A file shows the architecture of a new model only. For other models the same rules are checked once their config.json
has been read.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from partita_schema.base import Refusal, is_set
from partita_schema.sections.adapter import LoraAdapter, PrefixTuningAdapter, PromptTuningAdapter, PTuningAdapter
from partita_schema.sections.batching import ChunkBatching, PackBatching
from partita_schema.sections.config_sections import ConfigSections
from partita_schema.sections.model import ENCODER_DECODERS, ScratchModel
from partita_schema.sections.trainer import KtoTrainer, PreferenceTrainer, RewardTrainer

VIRTUAL_TOKENS = (
    "the virtual tokens of {} precede one text, and an encoder-decoder has two; write type: lora"  # its type
)
LOOKS_AT_A_DECODER = (
    "{} looks at the activations of a decoder alone, and this model also has an encoder; write init: default or pissa"
)
GUIDANCE = "it is defined for causal models, and this is an encoder-decoder; remove it"


class Conflict(NamedTuple):
    """A key that an encoder-decoder does not support."""

    key: str
    """The dotted key."""
    value: Callable[[ConfigSections], object]
    """Returns the conflicting value of a configuration, or something false."""
    message: str
    """Why, and what to write instead; `{}` stands for the value."""


def joined_rows(config: ConfigSections) -> object:
    """Return the type of batching if it joins rows in one sequence."""
    batching = config.data.batching
    return isinstance(batching, PackBatching | ChunkBatching) and batching.type


def virtual_tokens(config: ConfigSections) -> object:
    """Return the type of adapter if it has virtual tokens."""
    adapter = config.adapter
    return isinstance(adapter, PromptTuningAdapter | PrefixTuningAdapter | PTuningAdapter) and adapter.type


def init_from_activations(config: ConfigSections) -> object:
    """Return the init of a LoRA adapter if it looks at activations."""
    adapter = config.adapter
    return isinstance(adapter, LoraAdapter) and adapter.init in ("eva", "corda") and adapter.init


def whole_dialogues(config: ConfigSections) -> object:
    """Return whether all answers of a dialogue are one row."""
    return config.dialogue_input is not None and config.data.dialogue.mode == "packed_dialogue"


def learns_preferences(config: ConfigSections) -> object:
    """Return the type of trainer if it compares answers."""
    trainer = config.trainer
    return isinstance(trainer, PreferenceTrainer | RewardTrainer | KtoTrainer) and trainer.type


CONFLICTS = (
    Conflict(
        "input_features",
        lambda config: config.plain_text,
        "an encoder-decoder reads a prompt and writes an answer; write an input feature, or choose a causal language "
        "model",
    ),
    Conflict(
        "data.batching.type",
        joined_rows,
        "{} joins rows in one sequence, and the rows of an encoder-decoder have two sides; write type: bucket, or "
        "token_budget",
    ),
    Conflict(
        "trainer.completion_only_loss",
        lambda config: not getattr(config.trainer, "completion_only_loss", True),
        "the prompt of an encoder-decoder is read by the encoder, which predicts nothing; write true",
    ),
    Conflict(
        "data.dialogue.mode",
        whole_dialogues,
        "packed_dialogue puts all answers of a dialogue in one sequence, and an encoder-decoder answers once per row; "
        "write mode: squash",
    ),
    Conflict(
        "data.dialogue.answers",
        lambda config: config.answers_in_sequence,
        "in_sequence continues an answer with the next one, and an encoder-decoder answers once per row; write "
        "answers: together",
    ),
    Conflict(
        "prompt.chat",
        lambda config: config.prompt.chat is True,
        "a chat template writes prompt and answer as one text, and an encoder-decoder has two; write chat: false",
    ),
    Conflict(
        "trainer.type",
        learns_preferences,
        "{} compares answers after one reading of the prompt, which is written for decoders, and this is an "
        "encoder-decoder; choose a causal language model",
    ),
    Conflict("adapter.type", virtual_tokens, VIRTUAL_TOKENS),
    Conflict("adapter.init", init_from_activations, LOOKS_AT_A_DECODER),
    Conflict(
        "model_parameters.neftune_noise_alpha",
        lambda config: config.model_parameters.neftune_noise_alpha,
        "NEFTune is defined for causal models, and this is an encoder-decoder; remove it",
    ),
    Conflict("generation.guidance_scale", lambda config: config.generation.asks_for("guidance_scale"), GUIDANCE),
)
"""What an encoder-decoder does not support, apart from options of its outputs."""


def refused_by_new_encoder_decoder(config: ConfigSections) -> Iterator[Refusal]:
    """Yield every key that conflicts with a new encoder-decoder."""
    if isinstance(config.base_model, ScratchModel) and config.base_model.architecture in ENCODER_DECODERS:
        yield from refused_by_encoder_decoder(config)


def refused_by_encoder_decoder(config: ConfigSections) -> Iterator[Refusal]:
    """Yield every key that conflicts with an encoder-decoder, given that the model is one."""
    for conflict in CONFLICTS:
        value = conflict.value(config)
        if value:
            yield conflict.key, conflict.message.format(value)
    for index, output in enumerate(config.output_features):
        if output.constrain and is_set(output.decoder, "constrain"):
            advice = "answers are constrained by a decoder alone, and this model also has an encoder; remove constrain"
            yield f"output_features.{index}.decoder.constrain", advice
