"""What a model answers to the prompts of a check: tokens, or the outputs of a head."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from partita.export.prompts import CheckPrompts
from partita.lm.base import GenerationOptions, GenerationRequest
from partita.lm.generation import answer_ends
from partita.lm.head_model import HeadModel
from partita.lm.huggingface import HuggingFaceModel

END = -1
"""Stands for the end of an answer, whichever end token ended it."""
ROWS = 8
"""Prompts that are answered at a time."""
GREEDY = {"do_sample": False, "num_beams": 1}


@dataclass(frozen=True)
class Answers:
    """The answers of a model to all prompts: tokens, or the outputs of its head."""

    tokens: tuple[tuple[int, ...], ...] = ()
    """New tokens of each answer, with END if it ended before its limit."""
    outputs: tuple[np.ndarray, ...] = ()
    """Output of the head for each prompt: [outputs], or [tokens, outputs] if it has one for each token."""


def model_answers(lm: HuggingFaceModel | HeadModel, prompts: CheckPrompts) -> Answers:
    """Return the greedy answers of a run's model, or the outputs of its head."""
    if isinstance(lm, HeadModel):
        return Answers(outputs=tuple(row for part in batches(prompts, ROWS) for row in head_outputs(lm, part)))
    options = GenerationOptions(GREEDY, stop_token_ids=lm.config.generation.stop_token_ids)
    tokens: list[tuple[int, ...]] = []
    for part in batches(prompts, rows_at_a_time(lm)):
        for answer in lm.generate(part, options, seed=0):
            tokens.append((*answer.ids, END) if answer.finish_reason == "stop" else tuple(answer.ids))
    return Answers(tokens=tuple(tokens))


def batches(prompts: CheckPrompts, rows: int) -> list[tuple[GenerationRequest, ...]]:
    """Return the prompts, `rows` at a time."""
    return [prompts.requests[start : start + rows] for start in range(0, len(prompts.requests), rows)]


def rows_at_a_time(lm: HuggingFaceModel) -> int:
    """Return the prompts of a batch: one if padding changes the answers of the model."""
    return ROWS if lm.batch_way(GenerationOptions(GREEDY), tokens=1).rows == "padded" else 1


def head_outputs(lm: HeadModel, requests: Sequence[GenerationRequest], module: Any = None) -> list[np.ndarray]:
    """Return the first output of a module with a head for each prompt, without padding.

    Args:
        lm: The model, which prepares the inputs.
        requests: The prompts.
        module: The module; that of the model by default.
    """
    inputs = lm.inputs(lm.prompts(requests))
    with lm.evaluating(), torch.inference_mode():
        output = (lm.module if module is None else module)(**inputs)[0]
    return without_padding(output.float().cpu().numpy(), inputs["attention_mask"].cpu().numpy())


def without_padding(output: np.ndarray, mask_BT: np.ndarray) -> list[np.ndarray]:
    """Return the output of each row: of its tokens without padding, if there is one for each token."""
    if output.ndim < 3:
        return list(output)
    return [row[:length] for row, length in zip(output, mask_BT.sum(1).tolist(), strict=True)]


def plain_answers(lm: HuggingFaceModel, model: Any, prompts: CheckPrompts, *, ends: Sequence[int]) -> Answers:
    """Return the greedy answers of a plain transformers model, by its own `generate`.

    Args:
        lm: The model of the run, which prepares the inputs.
        model: A model that was loaded with transformers.
        prompts: The prompts.
        ends: End tokens of its own generation config.
    """
    from transformers import GenerationConfig

    tokens: list[tuple[int, ...]] = []
    for part in batches(prompts, rows_at_a_time(lm)):
        most = max(request.max_new_tokens for request in part)
        settings = GenerationConfig(
            max_new_tokens=most,
            do_sample=False,
            eos_token_id=list(ends) or None,
            pad_token_id=model.generation_config.pad_token_id,
            bos_token_id=model.generation_config.bos_token_id,
            decoder_start_token_id=model.generation_config.decoder_start_token_id,
        )
        inputs, length = plain_inputs(lm, part)
        with torch.inference_mode():
            sequences = model.generate(**inputs, generation_config=settings)[:, length:].tolist()
        limits = [request.max_new_tokens for request in part]
        tokens += [cut(row, ends=ends, limit=limit) for row, limit in zip(sequences, limits, strict=True)]
    return Answers(tokens=tuple(tokens))


def plain_inputs(lm: HuggingFaceModel, requests: Sequence[GenerationRequest]) -> tuple[dict[str, torch.Tensor], int]:
    """Return ids and mask of prompts for transformers, and the positions before the first new token."""
    from partita.lm.encoder_decoder import EncoderDecoderModel
    from partita.lm.generation import left_padded

    if isinstance(lm, EncoderDecoderModel):
        prompts = lm.batch_prompts(requests, beams=1)
        return dict(prompts.inputs), prompts.length
    ids_BT, mask_BT = left_padded(requests, pad_token_id=lm.tokenizer.pad_token_id, device=lm.device)
    return {"input_ids": ids_BT, "attention_mask": mask_BT}, ids_BT.shape[1]


def cut(row: Sequence[int], *, ends: Sequence[int], limit: int) -> tuple[int, ...]:
    """Return new tokens up to the limit or an end token, which becomes END."""
    end = next((index for index, token in enumerate(row[:limit]) if token in ends), None)
    return tuple(row[:limit]) if end is None else (*row[:end], END)


def ends_of_run(lm: HuggingFaceModel) -> list[int]:
    """Return the tokens that end an answer of the run."""
    return answer_ends(lm, GenerationOptions(GREEDY, stop_token_ids=lm.config.generation.stop_token_ids))
