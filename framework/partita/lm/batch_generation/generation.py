"""Batch generation with transformers models: left padding, per-row limits, stop strings.

The output of a row does not depend on its batch: padding is on the left, masked, and does not shift positions. Logits
processors that depend on a row's tokens, and the choice of a token, run per row, as in slots.

Shapes: B rows, T tokens of the longest prompt, N new tokens.
"""

import json
import logging
import warnings
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from partita.lm.base import Generated, GenerationOptions, GenerationRequest
from partita.lm.batch_generation.batch_decoding import BatchDecoder, StopStrings
from partita.lm.decoding.batch_prompts import BatchPrompts, Decode
from partita.lm.decoding.continuation import decode_continuation
from partita.lm.decoding.generation_defaults import BEAMS, SAMPLING, effective_generation
from partita.lm.decoding.row import Row
from partita.lm.decoding.sampler import Sampler, row_processors
from partita.lm.loaded_model import TextModel
from partita_schema.config import Config
from partita_schema.errors import ModelError, shortened
from partita_schema.rules.adapters import NO_BEAMS
from partita_schema.sections.prompt import Generation

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

logger = logging.getLogger(__name__)


def generation_options(
    config: Config, *, tokenizer: "PreTrainedTokenizerFast", checkpoint: Mapping[str, Any] | None = None
) -> GenerationOptions:
    """Return the generation options of the config, completed by those of the checkpoint.

    Args:
        config: The config.
        tokenizer: Tokenizes `bad_words`, and knows which texts of `stop` are special tokens.
        checkpoint: Settings of the checkpoint's generation_config.json, by transformers' names.

    Raises:
        ModelError: A setting of the checkpoint is not valid.
    """
    effective = effective_generation(config.generation, checkpoint or {})
    arguments = {
        key: as_lists(setting.value)
        for key, setting in effective.settings.items()
        if key not in ("bad_words", "stop", "max_new_tokens")
    }
    words = effective.value("bad_words")
    if words:
        arguments["bad_words_ids"] = bad_words_ids(words, tokenizer=tokenizer)
    stop = effective.value("stop") or ()
    return GenerationOptions(
        arguments=arguments,
        stop=stop,
        stop_token_ids=(*config.generation.stop_token_ids, *special_tokens_of(stop, tokenizer=tokenizer)),
        logprobs=config.generation.logprobs,
        slots=config.generation.slots,
        kv_cache=config.generation.kv_cache,
    )


def check_token_ids(generation: Generation, *, size: int) -> None:
    """Raise ModelError if the file names a token id that a model with `size` tokens does not have."""
    for key in ("stop_token_ids", "suppress_tokens", "begin_suppress_tokens"):
        mistake = unknown_token(getattr(generation, key) or (), size=size)
        if mistake is not None:
            raise ModelError(f"generation.{key}: {mistake}; write ids below {size:,}")


def unknown_token(ids: Sequence[int], *, size: int) -> str | None:
    """Return an error text for the first id that a model with `size` tokens does not have; None if it has all."""
    wrong = next((token for token in ids if not 0 <= token < size), None)
    return None if wrong is None else f"{wrong} is not a token of this model, which has {size:,}"


def as_lists(value: Any) -> Any:
    """Convert tuples to lists, as transformers expects."""
    return [as_lists(item) for item in value] if isinstance(value, tuple) else value


def log_checkpoint_settings(generation: Generation, checkpoint: Mapping[str, Any]) -> None:
    """Log which settings of the checkpoint apply, and which are not supported."""
    effective = effective_generation(generation, checkpoint)
    shipped = effective.of_checkpoint()
    if shipped:
        logger.info(
            "answers follow the checkpoint's generation_config.json: %s (generation: {defaults: none} ignores it)",
            format_settings(shipped),
        )
    if effective.not_applied:
        logger.warning(
            "the checkpoint's generation_config.json has settings that are not applied: %s",
            format_settings(effective.not_applied),
        )


def format_settings(settings: Mapping[str, Any]) -> str:
    """Format settings in one line; long values are shortened."""
    return ", ".join(f"{key} {shortened(json.dumps(value, default=str))}" for key, value in settings.items())


def bad_words_ids(words: Sequence[str], *, tokenizer: "PreTrainedTokenizerFast") -> list[list[int]]:
    """Return the token ids of each word, at the start of a text and after a space."""
    sequences: list[list[int]] = []
    for word in words:
        for text in (word, f" {word}"):
            ids = tokenizer.encode(text, add_special_tokens=False)
            if ids and ids not in sequences:
                sequences.append(ids)
    return sequences


class RowLimits:
    """A stopping criterion of transformers with a token limit per row and stop strings."""

    def __init__(self, limits: Sequence[int], *, stop: StopStrings, prompt_length: int) -> None:
        """Set up the criterion for a batch.

        Args:
            limits: Maximum number of new tokens of each row.
            stop: Stop strings.
            prompt_length: Length of the padded prompts in tokens.
        """
        self.limits = limits
        self.stop = stop
        self.prompt_length = prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: Any = None) -> torch.Tensor:
        """Return which rows have ended [B * beams]."""
        new_BN = input_ids[:, self.prompt_length :]
        beams = len(new_BN) // len(self.limits)
        limits_B = torch.tensor(self.limits, device=new_BN.device).repeat_interleave(beams)
        stopped = [self.stop.end(ids) for ids in new_BN.tolist()]
        return (limits_B <= new_BN.shape[1]) | torch.tensor(stopped, device=new_BN.device)


class BeamScores:
    """A logits processor of transformers that processes the scores of each beam by its own tokens."""

    def __init__(
        self,
        options: GenerationOptions,
        requests: Sequence[GenerationRequest],
        *,
        prompt_length: int,
        ends: torch.Tensor,
    ) -> None:
        """Create the processors of each row.

        Args:
            options: Generation settings.
            requests: Prompts with their limits.
            prompt_length: Length of the padded prompts in tokens.
            ends: End tokens, on the device of the scores.
        """
        self.requests = requests
        self.prompt_length = prompt_length
        self.processors = [row_processors(options.arguments, request, ends=ends) for request in requests]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the processed scores."""
        if not any(self.processors):
            return scores
        beams = len(input_ids) // len(self.requests)
        processed = []
        for index, new in enumerate(input_ids[:, self.prompt_length :]):
            prompt = torch.tensor(self.requests[index // beams].input_ids, device=new.device)
            ids = torch.cat([prompt, new])[None]
            processed.append(self.processors[index // beams](ids, scores[index : index + 1]))
        return torch.cat(processed)


def generate_batch(
    model: "PreTrainedModel",
    prompts: BatchPrompts,
    options: GenerationOptions,
    *,
    sampler: Sampler,
    tokenizer: "PreTrainedTokenizerFast",
) -> list[Generated]:
    """Generate for one batch; the model must be in evaluation mode.

    Args:
        model: The model.
        prompts: The padded prompts with their limits.
        options: Generation settings.
        sampler: Chooses the tokens.
        tokenizer: Names the special tokens.

    Raises:
        ModelError: The scores of a row are NaN.
    """
    limits = [request.max_new_tokens for request in prompts.requests]
    settings = generation_config_of(options, max_new_tokens=max(limits), end_ids=sampler.end_ids, tokenizer=tokenizer)
    stop = StopStrings(options.stop, decode=prompts.decode)
    rows: Sequence[Row | None] = [None] * len(limits)
    if options.beams > 1:
        criterion = RowLimits(limits, stop=stop, prompt_length=prompts.length)
        sequences = beam_search(model, prompts, options, settings=settings, ends=sampler.ends, criteria=[criterion])
        answers = sequences[:, prompts.length :].tolist()
    else:
        decoder = BatchDecoder(sampler, prompts.requests, stop=stop)
        model.generate(**prompts.inputs, generation_config=settings, custom_generate=decoder)
        rows = decoder.rows
        answers = [row.new for row in decoder.rows]
    return [
        finish(
            ids,
            limit=limit,
            ends=sampler.end_ids,
            stop=options.stop,
            decode=prompts.decode,
            scored=row if options.logprobs else None,
        )
        for ids, limit, row in zip(answers, limits, rows, strict=True)
    ]


@torch.no_grad()
def beam_search(
    model: "PreTrainedModel",
    prompts: BatchPrompts,
    options: GenerationOptions,
    *,
    settings: "GenerationConfig",
    ends: torch.Tensor,
    criteria: Sequence[Any],
) -> Any:
    """Return what transformers' `generate` returns for a batch.

    Args:
        model: The model.
        prompts: The padded prompts with their limits.
        options: Generation settings.
        settings: The same for transformers; see `generation_config_of`.
        ends: End tokens, on the device of the scores.
        criteria: Stopping criteria.
    """
    from transformers import StoppingCriteriaList

    scores = BeamScores(options, prompts.requests, prompt_length=prompts.length, ends=ends)
    return model.generate(
        **prompts.inputs,
        generation_config=settings,
        logits_processor=[scores],
        stopping_criteria=StoppingCriteriaList(criteria),
    )


def generation_config_of(
    options: GenerationOptions, *, max_new_tokens: int, end_ids: Sequence[int], tokenizer: "PreTrainedTokenizerFast"
) -> "GenerationConfig":
    """Return transformers' generation config for what `BatchDecoder` and `BeamScores` do not do.

    Args:
        options: Generation settings.
        max_new_tokens: Maximum number of new tokens of the batch.
        end_ids: End tokens.
        tokenizer: Names the special tokens.
    """
    from transformers import GenerationConfig

    names = ["guidance_scale"]
    if options.beams > 1:
        names += ["num_beams", *BEAMS, "renormalize_logits", *(("do_sample", *SAMPLING) if options.do_sample else ())]
    return GenerationConfig(
        **{name: options.arguments[name] for name in names if name in options.arguments},
        max_new_tokens=max_new_tokens,
        eos_token_id=list(end_ids) or None,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        use_cache=True,
    )


def finish(
    row: list[int],
    *,
    limit: int,
    ends: Sequence[int],
    stop: Sequence[str],
    decode: Decode,
    scored: Row | None = None,
) -> Generated:
    """Cut a row at its limit, at its end token and at a stop string.

    Args:
        row: New tokens, possibly with padding.
        limit: Maximum number of new tokens.
        ends: End tokens.
        stop: Stop strings.
        decode: Decodes the tokens.
        scored: The row with the log probabilities of its tokens, if they are wanted.
    """
    ids = row[:limit]
    end = next((index for index, token in enumerate(ids) if token in ends), None)
    ended = end is not None
    if ended:
        ids = ids[:end]
    text = decode(ids)
    cut = first_stop(text, stop)
    if cut is None:
        return with_scores(Generated(tuple(ids), text, "stop" if ended else "length"), scored)
    # A row that ended with a stop string is padded until the batch ends: find the first token that completes the
    # string.
    needed = bisect_left(
        range(len(ids)),
        True,
        key=lambda length: first_stop(decode(ids[:length]), stop) is not None,
    )
    return with_scores(Generated(tuple(ids[:needed]), text[:cut], "stop"), scored)


def with_scores(answer: Generated, scored: Row | None) -> Generated:
    """Return an answer with the log probabilities of its row, if they are wanted."""
    if scored is None:
        return answer
    return replace(answer, logprob=scored.logprob, token_logprobs=tuple(scored.token_logprobs[: len(answer.ids)]))


def first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Return the position of the first stop string."""
    return min((start for end in stop if (start := text.find(end)) >= 0), default=None)


def left_padded(
    requests: Sequence[GenerationRequest], *, pad_token_id: int, device: torch.device, gap: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and attention mask [B, gap + T].

    Args:
        requests: Rows with their prompts.
        pad_token_id: Id of the padding.
        device: Device of the result.
        gap: Positions before each prompt reserved for virtual tokens: pad id, but attended.
    """
    width = max(len(request.input_ids) for request in requests) + gap
    ids_BT = torch.full((len(requests), width), pad_token_id)
    mask_BT = torch.zeros_like(ids_BT)
    for row, request in enumerate(requests):
        length = len(request.input_ids)
        ids_BT[row, width - length :] = torch.tensor(request.input_ids)
        mask_BT[row, width - length - gap :] = 1
    return ids_BT.to(device), mask_BT.to(device)


def left_padded_prompts(lm: TextModel, requests: Sequence[GenerationRequest], *, beams: int) -> BatchPrompts:
    """Return the prompts of a causal model, whose sequences continue them."""
    inputs = prompt_inputs(lm, requests, beams=beams)
    decode = partial(decode_continuation, lm.tokenizer)
    return BatchPrompts(inputs, requests, inputs["input_ids"].shape[1], decode)


@torch.no_grad()
def prompt_inputs(lm: TextModel, requests: Sequence[GenerationRequest], *, beams: int) -> dict[str, Any]:
    """Return the inputs of the base model's `generate`; virtual tokens are between padding and prompt."""
    pad, count = lm.tokenizer.pad_token_id, lm.virtual_tokens
    ids_BT, mask_BT = left_padded(
        requests, pad_token_id=pad, device=lm.device, gap=count if lm.virtual_tokens_are_embeddings else 0
    )
    if not count:
        return {"input_ids": ids_BT, "attention_mask": mask_BT}
    if lm.virtual_tokens_are_embeddings:
        learned = lm.adapted.get_prompt(batch_size=len(requests))
        embedded = lm.base.get_input_embeddings()(ids_BT).clone()
        for row, request in enumerate(requests):
            start = ids_BT.shape[1] - len(request.input_ids) - count
            embedded[row, start : start + count] = learned[row].to(embedded.dtype)
        return {"input_ids": ids_BT, "inputs_embeds": embedded, "attention_mask": mask_BT}
    if beams > 1:
        raise ModelError(f"generation.num_beams: {NO_BEAMS}")
    front = ids_BT.new_full((len(requests), count), pad)
    return {
        "input_ids": torch.cat([front, ids_BT], dim=1),
        "attention_mask": torch.cat([torch.ones_like(front), mask_BT], dim=1),
        "past_key_values": lm.adapted.get_prompt(batch_size=len(requests)),
    }


def end_token_ids(model: "PreTrainedModel", *, tokenizer: "PreTrainedTokenizerFast") -> tuple[int, ...]:
    """Return all end tokens of the checkpoint's generation settings, its config and its tokenizer."""
    ids: set[int] = set()
    for value in (model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id):
        ids.update([value] if isinstance(value, int) else value or ())
    return tuple(sorted(ids))


def answer_ends(lm: TextModel, options: GenerationOptions) -> list[int]:
    """Return the tokens that end an answer, sorted: those of `end_token_ids` and of the options."""
    own = end_token_ids(lm.base, tokenizer=lm.tokenizer)
    return sorted({*own, *options.stop_token_ids, *special_tokens_of(options.stop, tokenizer=lm.tokenizer)})


def special_tokens_of(stop: Sequence[str], *, tokenizer: "PreTrainedTokenizerFast") -> list[int]:
    """Return the special tokens with which stop strings begin.

    Answers are decoded without special tokens, so these stop strings are not found in them. What follows the token in a
    stop string, such as the line break in `<|im_end|>\\n`, would come after the end.
    """
    if not stop:
        return []
    added = tokenizer.added_tokens_decoder.items()
    return [token for token, one in added if one.special and any(text.startswith(one.content) for text in stop)]


def reset_generation_config(model: "PreTrainedModel") -> Any:
    """Reset the model's generation config, so that transformers applies none of it; return the original."""
    from transformers import GenerationConfig

    own = model.generation_config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.generation_config = GenerationConfig(
            bos_token_id=own.bos_token_id,
            eos_token_id=own.eos_token_id,
            pad_token_id=own.pad_token_id,
            decoder_start_token_id=own.decoder_start_token_id,
        )
    return own


def may_run_past_context(model: "PreTrainedModel") -> bool:
    """Return whether finished rows may run past the context while others continue.

    True if positions are computed rather than learned and do not depend on the longest row.
    """
    rotary = str(getattr(model.config.get_text_config(), "rope_parameters", None) or "")
    return rotary != "" and "dynamic" not in rotary and "longrope" not in rotary
