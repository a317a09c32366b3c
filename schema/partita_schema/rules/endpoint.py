"""Rules for configurations with `backend: {type: endpoint}`: options that need a model in this process."""

from collections.abc import Iterator

from partita_schema.base import Refusal, is_set
from partita_schema.sections.backend import EndpointBackendConfig
from partita_schema.sections.config_sections import ConfigSections
from partita_schema.sections.features import TextInput
from partita_schema.sections.model import ModelParameters, NewModel

NOT_ON_SERVERS = (
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "top_h",
    "num_beams",
    "no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "suppress_tokens",
    "begin_suppress_tokens",
    "bad_words",
    "renormalize_logits",
    "guidance_scale",
)
"""Generation options that the OpenAI protocol does not have."""
SIZES = ("batch_size", "eval_batch_size", "max_batch_size", "memory_budget")
TOKENS = "tokens are counted by the server, which has the tokenizer"


def refused_by_endpoint(config: ConfigSections) -> Iterator[Refusal]:
    """Yield every key that conflicts with `backend: {type: endpoint}`."""
    if not isinstance(config.backend, EndpointBackendConfig):
        return
    yield from refused_models(config)
    yield from refused_prompts(config, config.backend)
    yield from refused_lengths(config)
    yield from refused_generation(config)


def refused_models(config: ConfigSections) -> Iterator[Refusal]:
    """Yield options of a model in this process."""
    if config.trains:
        yield "trainer.type", "a server is only queried, never trained; write type: none, or remove backend"
    if isinstance(config.base_model, NewModel):
        yield "base_model", "a server has its model already; write the name that the server knows it by"
    for key in ("adapter", "quantization"):
        if getattr(config, key) is not None:
            reason = "the server's model is as the server loads it"
            yield key, f"{reason}; remove {key}, and give it to the server at its start"
    for key in ModelParameters.model_fields:
        if is_set(config.model_parameters, key):
            yield f"model_parameters.{key}", f"the model is loaded by the server; remove {key}"
    if config.trust_remote_code:
        yield "trust_remote_code", "the model is loaded by the server; remove it"
    if not config.trains:
        for key in SIZES:
            if is_set(config.trainer, key):
                yield f"trainer.{key}", f"the server makes its own batches; remove {key}, and write backend.concurrency"


def refused_prompts(config: ConfigSections, backend: EndpointBackendConfig) -> Iterator[Refusal]:
    """Yield options that conflict with the way prompts are sent."""
    if backend.mode == "completion" and config.prompt.chat is True:
        yield "backend.mode", "completion sends no chat; write mode: chat, or remove prompt.chat"
    if backend.mode == "chat" and config.prompt.chat is False:
        yield "backend.mode", "chat sends messages, and prompt.chat is false; write mode: completion, or remove one"
    if config.prompt.chat_template_kwargs:
        yield (
            "prompt.chat_template_kwargs",
            (
                "the chat template is applied by the server; remove it, and write backend.extra_body: "
                "{chat_template_kwargs: ...}"
            ),
        )
    if config.data.formatter is not None:
        yield (
            "data.formatter",
            "a custom formatter needs the tokenizer, which the server has; remove it, and write prompt",
        )
    if sends_chat(config) is False and config.data.dialogue.mode == "packed_dialogue":
        yield (
            "data.dialogue.mode",
            (
                "packed_dialogue ends each answer with a token, and text is sent here; write mode: squash, or "
                "backend.mode: chat"
            ),
        )


def refused_lengths(config: ConfigSections) -> Iterator[Refusal]:
    """Yield length limits in tokens, because the server has the tokenizer."""
    for index, feature in enumerate(config.input_features):
        if isinstance(feature, TextInput) and feature.preprocessing.max_sequence_length is not None:
            at = f"input_features.{index}.preprocessing.max_sequence_length"
            yield at, f"{TOKENS}; remove it, and shorten the column"
    if config.preprocessing.global_max_sequence_length is not None:
        yield (
            "preprocessing.global_max_sequence_length",
            f"{TOKENS}; remove it; rows that are too long are reported as errors",
        )
    if config.data.dialogue.context_tokens is not None:
        yield "data.dialogue.context_tokens", f"{TOKENS}; remove it, and write context_turns or context_length"
    if config.data.encode == "cache":
        yield "data.encode", f"{TOKENS}, so there are none to keep; remove it"


def refused_generation(config: ConfigSections) -> Iterator[Refusal]:
    """Yield generation options that cannot be sent."""
    for key in NOT_ON_SERVERS:
        if config.generation.asks_for(key):
            reason = f"the protocol of servers has no {key}"
            yield f"generation.{key}", f"{reason}; remove it, or write in backend.extra_body what your server calls it"
    if config.generation.defaults == "none":
        advice = "remove it, and start vLLM with --generation-config vllm"
        yield "generation.defaults", f"the server applies the defaults of its checkpoint; {advice}"
    if not config.generation.slots:
        yield "generation.slots", "the server makes its own batches; remove it"
    if config.generation.kv_cache != "auto":
        yield "generation.kv_cache", "the server manages the KV cache; remove it"


def sends_chat(config: ConfigSections) -> bool:
    """Return whether requests contain messages rather than one text."""
    mode = config.backend.mode if isinstance(config.backend, EndpointBackendConfig) else None
    return mode == "chat" or (mode is None and config.prompt.chat is not False)
