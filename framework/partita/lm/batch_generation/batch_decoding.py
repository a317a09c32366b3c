"""The decoding loop of a batch without beams: tokens are chosen as in slots.

transformers' `generate` prepares the inputs and calls `BatchDecoder` instead of its own loop. In an encoder-decoder,
rows that have ended leave the batch, so that a long answer does not keep the short ones in the model.

Shapes: B rows of the batch at present, T tokens of a sequence, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from partita.lm.base import GenerationRequest, SlotRequest
from partita.lm.decoding.batch_prompts import Decode
from partita.lm.decoding.row import NOT_NUMBERS, Row
from partita.lm.decoding.sampler import Sampler
from partita.lm.transformers_internals import optimized_for_decoding, prefill, updated_inputs
from partita_schema.errors import ModelError

if TYPE_CHECKING:
    from transformers import LogitsProcessorList, PreTrainedModel

FULL = 0.75
"""A batch is made smaller when at most this part of its rows is left: selecting rows copies their keys and values."""
SELECTED = ("attention_mask", "decoder_attention_mask")
"""Inputs of an encoder-decoder with a line per row."""


class StopStrings:
    """Finds stop strings in the last tokens of a row: a string of n bytes has at most n tokens."""

    def __init__(self, stop: Sequence[str], *, decode: Decode) -> None:
        """Find `stop` in the results of `decode`, which decodes answers and may strip a space at their beginning."""
        self.stop = stop
        self.decode = decode
        self.tail = max((len(text.encode()) for text in stop), default=0) + 4

    def end(self, ids: Sequence[int]) -> bool:
        """Return whether the new tokens of a row have a stop string near their end."""
        if not self.stop:
            return False
        text = self.decode(ids[-self.tail :])
        return any(stop in text for stop in self.stop)


class BatchDecoder:
    """Decodes all rows of a batch to their ends; the value of `custom_generate` in transformers' `generate`."""

    def __init__(
        self,
        sampler: Sampler,
        requests: Sequence[GenerationRequest],
        *,
        stop: StopStrings,
        after_token: Callable[[], None] | None = None,
    ) -> None:
        """Prepare the rows.

        Args:
            sampler: Chooses the tokens.
            requests: The rows; `input_ids` are the tokens before the first new one.
            stop: Ends a row.
            after_token: Called after each token of the batch.
        """
        self.sampler = sampler
        self.stop = stop
        self.after_token = after_token
        self.rows = [
            Row(
                SlotRequest(
                    request.input_ids, request.max_new_tokens, row, key=request.key, encoder_ids=request.encoder_ids
                )
            )
            for row, request in enumerate(requests)
        ]
        """All rows, in the order of the requests."""
        self.batch: list[Row | None] = list(self.rows)
        """The rows that the model computes; None for one that has ended."""
        self.cache: Any = None
        """The KV cache at the end."""
        for row in self.rows:
            sampler.prepare(row)

    @torch.no_grad()
    def __call__(
        self,
        model: "PreTrainedModel",
        input_ids: torch.Tensor,
        *,
        logits_processor: "LogitsProcessorList",
        stopping_criteria: Any,
        generation_config: Any,
        **inputs: Any,
    ) -> torch.Tensor:
        """Generate until all rows have ended; the new tokens are in `rows`.

        Args:
            model: The model.
            input_ids: The tokens before the first new one, [B, T].
            logits_processor: Processors that transformers adds, such as that of guidance_scale.
            stopping_criteria: Not used; rows end by their limits.
            generation_config: The settings for the first forward pass.
            inputs: The other inputs of the model.

        Raises:
            ModelError: The scores of a row are NaN.
        """
        outputs = prefill(model, input_ids, generation_config, inputs)
        with optimized_for_decoding(model):
            while True:
                inputs = updated_inputs(model, outputs, inputs)
                # The copy frees the logits of the other positions.
                copy = outputs.logits.shape[1] > 1
                scores_BV = outputs.logits[:, -1].to(input_ids.device, torch.float32, copy=copy)
                del outputs
                processed_BV = logits_processor(input_ids, scores_BV) if logits_processor else scores_BV
                tokens_B = self.choose(processed_BV, logits_BV=scores_BV)
                if self.after_token is not None:
                    self.after_token()
                if not any(self.batch):
                    break
                input_ids = self.drop_ended(torch.cat([input_ids, tokens_B[:, None]], dim=1), inputs)
                length = 1 if inputs["use_cache"] else None
                prepared = model.prepare_inputs_for_generation(input_ids, next_sequence_length=length, **inputs)
                outputs = model(**prepared, return_dict=True)
        self.cache = inputs.get("past_key_values")
        return input_ids

    def choose(self, scores_BV: torch.Tensor, *, logits_BV: torch.Tensor) -> torch.Tensor:
        """Return the next token of each row [B], any for rows that have ended; add it to the rows.

        Tokens are chosen by `scores_BV`; log probabilities are computed from the model's scores, `logits_BV`.
        """
        going = [(index, row) for index, row in enumerate(self.batch) if row is not None]
        indices, rows = [index for index, _ in going], [row for _, row in going]
        whole = len(going) == len(self.batch)
        if not whole:
            scores_BV, logits_BV = scores_BV[indices], logits_BV[indices]
        tokens_N, _ = self.sampler.choose(scores_BV, rows, logits_NV=logits_BV)
        for index, row, token in zip(indices, rows, tokens_N.tolist(), strict=True):
            if token < 0:
                raise ModelError(NOT_NUMBERS)
            row.new.append(token)
            if token in self.sampler.end_ids or len(row.new) >= row.request.max_new_tokens or self.stop.end(row.new):
                self.batch[index] = None
        if whole:
            return tokens_N
        tokens_B = tokens_N.new_zeros(len(self.batch))
        tokens_B[indices] = tokens_N
        return tokens_B

    def drop_ended(self, input_ids: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """Remove rows that have ended from the batch, if they are many and the model's state permits it.

        Args:
            input_ids: The sequences so far, [B, T].
            inputs: The other inputs of the model; changed.

        Returns:
            The sequences that are left.
        """
        left = [index for index, row in enumerate(self.batch) if row is not None]
        if len(left) > FULL * len(self.batch) or not can_select(inputs):
            return input_ids
        indices = torch.tensor(left, device=input_ids.device)
        inputs["past_key_values"].batch_select_indices(indices)
        for name in SELECTED:
            if inputs.get(name) is not None:
                inputs[name] = inputs[name][indices]
        encoded = inputs["encoder_outputs"]
        inputs["encoder_outputs"] = type(encoded)(last_hidden_state=encoded[0][indices])
        self.batch = [self.batch[index] for index in left]
        return input_ids[indices]


def can_select(inputs: dict[str, Any]) -> bool:
    """Return whether rows can be removed from the inputs of a model: an encoder-decoder with a plain, growing cache."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache
    from transformers.utils import ModelOutput

    cache: Any = inputs.get("past_key_values")
    encoded = inputs.get("encoder_outputs")
    if type(cache) is not EncoderDecoderCache or not isinstance(encoded, ModelOutput):
        return False
    tensors = {name for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    if tensors - set(SELECTED) or list(encoded) != ["last_hidden_state"]:
        return False
    sides = (cache.self_attention_cache, cache.cross_attention_cache)
    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    return all(type(side) is DynamicCache and all(type(layer) in plain for layer in side.layers) for side in sides)
