"""Choice of the next token for rows at different positions of their completions.

Processors that depend on a row's tokens (penalties, n-grams, forbidden words) are transformers' own and run per row;
those that depend on scores only (temperature, top-k and the like) run for all rows at once. Sampling uses random
numbers of the row, so its output does not depend on the batch.

Shapes: N rows, V vocabulary.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from partita.lm.base import GenerationOptions, GenerationRequest, TokenLogprob
from partita.lm.decoding.grammar import Grammar
from partita.lm.decoding.row import Row

if TYPE_CHECKING:
    from transformers import LogitsProcessorList

HISTORY = (
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "exponential_decay_length_penalty",
    "suppress_tokens",
    "begin_suppress_tokens",
    "min_length",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "sequence_bias",
    "encoder_repetition_penalty",
    "encoder_no_repeat_ngram_size",
    "remove_invalid_values",
)
"""Options that depend on the tokens of a row."""
NEAR_TIE_TOLERANCE = 2e-5
"""Tolerance for near ties, relative to the distance of the highest score from the mean. With 12 layers, scores of two
math libraries differed by up to 2e-6 of that distance, so the difference of two scores by up to 4e-6."""


class Sampler:
    """Chooses the next token of rows."""

    def __init__(
        self,
        options: GenerationOptions,
        *,
        ends: Sequence[int],
        seed: int,
        device: torch.device,
        grammars: Sequence[Grammar | None] = (None,),
    ) -> None:
        """Prepare the processors that are shared by all rows.

        Args:
            options: Generation settings.
            ends: End tokens.
            seed: Seed of sampling.
            device: Device of the scores.
            grammars: Grammar that constrains the answer to a request, by `constraint_index` of the request.
        """
        self.grammars = grammars
        # Masks are computed from the matchers of rows, so that any of the grammars computes them for all rows.
        self.grammar = next((grammar for grammar in grammars if grammar is not None), None)
        self.arguments = options.arguments
        self.logprobs, self.top_logprobs = options.logprobs, options.top_logprobs
        self.seed, self.device = seed, device
        self.do_sample = options.do_sample
        self.end_ids = sorted(ends)
        self.ends = torch.tensor(self.end_ids, device=device, dtype=torch.long)
        self.min_new_tokens = int(self.arguments.get("min_new_tokens") or 0) if len(ends) else 0
        self.by_row = any(self.arguments.get(name) is not None for name in HISTORY)
        self.warpers = score_processors(self.arguments, device=device) if self.do_sample else None

    def prepare(self, row: Row) -> None:
        """Set up random numbers, processors and matcher of a row before its first token."""
        request = row.request
        if self.do_sample:
            row.uniforms = random_numbers(self.seed, request.key, count=request.max_new_tokens)
        if self.by_row:
            row.processors = row_processors(self.arguments, request, ends=self.ends)
        grammar = self.grammars[request.constraint_index]
        if grammar is not None:
            row.matcher = grammar.matcher()

    def choose(
        self,
        given_NV: torch.Tensor,
        rows: Sequence[Row],
        *,
        logits_NV: torch.Tensor | None = None,
        find_near_ties: bool = False,
    ) -> tuple[torch.Tensor, list[int]]:
        """Return the next token of each row [N], -1 for rows without one, and the rows with a near tie.

        Only log probabilities change the state of a row, so without them the call can be repeated.

        Args:
            given_NV: The scores to choose by, before the processors of the options.
            rows: The rows.
            logits_NV: The model's scores, of which log probabilities are computed. Default: `given_NV`.
            find_near_ties: Whether near ties are found.
        """
        scores_NV = given_NV.float()
        means_N = scores_NV.mean(-1) if find_near_ties and not self.do_sample else None  # before scores are masked
        if self.by_row:
            scores_NV = torch.cat([self.process(scores, row) for scores, row in zip(scores_NV, rows, strict=True)])
        elif self.min_new_tokens:
            early = [
                index
                for index, row in enumerate(rows)
                if len(row.new) < min(self.min_new_tokens, row.request.max_new_tokens)
            ]
            if early:
                indices = torch.tensor(early, device=self.device)
                scores_NV = scores_NV.clone() if self.logprobs or self.grammar is not None else scores_NV
                scores_NV[indices[:, None], self.ends] = -torch.inf
        if self.grammar is not None:
            scores_NV = self.grammar.mask_scores(scores_NV, rows, otherwise=given_NV)
        if self.do_sample:
            tokens_N, valid_N = self.sample(scores_NV, rows)
        else:
            tokens_N, valid_N = (greedy_on_cpu if scores_NV.device.type == "cpu" else greedy)(scores_NV)
        close = list[int]()
        if means_N is not None:
            find = near_ties_on_cpu if scores_NV.device.type == "cpu" else near_ties
            close = find(scores_NV, tokens_N, means_N)
        if self.logprobs:
            self.add_logprobs(given_NV if logits_NV is None else logits_NV, tokens_N, rows)
        return torch.where(valid_N, tokens_N, -1), close

    def add_logprobs(self, logits_NV: torch.Tensor, tokens_N: torch.Tensor, rows: Sequence[Row]) -> None:
        """Add the log probability of each row's next token to the row."""
        logprobs_NV = logits_NV.float().log_softmax(-1)
        logprobs = logprobs_NV.gather(1, tokens_N[:, None])[:, 0].tolist()
        for row, logprob in zip(rows, logprobs, strict=True):
            row.logprob += logprob
        if self.top_logprobs is None:
            return
        best_NK, ids_NK = logprobs_NV.topk(min(self.top_logprobs, logprobs_NV.shape[1]))
        found = zip(rows, tokens_N.tolist(), logprobs, ids_NK.tolist(), best_NK.tolist(), strict=True)
        for row, token, logprob, ids, best in found:
            row.token_logprobs.append(TokenLogprob(token, logprob, tuple(zip(ids, best, strict=True))))

    def process(self, scores_V: torch.Tensor, row: Row) -> torch.Tensor:
        """Return the scores of a row [1, V] after the processors that depend on its tokens."""
        ids = torch.tensor([[*row.request.input_ids, *row.new]], device=self.device)
        changed: torch.Tensor = row.processors(ids, scores_V[None])
        return changed

    def sample(self, scores_NV: torch.Tensor, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample a token per row by inverse transform; return tokens and whether they are valid."""
        uniforms_N1 = torch.tensor([[row.uniforms[len(row.new)]] for row in rows], device=self.device)
        return inverse_transform(scores_NV, uniforms_N1, warpers=self.warpers)


def inverse_transform(
    scores_NV: torch.Tensor, uniforms_N1: torch.Tensor, *, warpers: "LogitsProcessorList | None"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample a token per row by inverse transform; return tokens and whether they are valid.

    Args:
        scores_NV: Scores of the rows.
        uniforms_N1: A random number in [0, 1) for each row.
        warpers: Processors that depend on scores only.
    """
    usable_N = scores_NV.amax(-1).isfinite()
    # Some of transformers' processors raise on a row without scores, which would fail the whole batch. The mask
    # is applied in any case, because a check would wait for the GPU.
    scores_NV = scores_NV.masked_fill(~usable_N[:, None], 0)
    if warpers:
        scores_NV = warpers(None, scores_NV)
    reached_NV = scores_NV.softmax(-1).cumsum(-1)
    total_N1 = reached_NV[:, -1:]
    # A random number of 0.99999997 times the total may round to the total, which no cumulative sum exceeds.
    sought_N1 = torch.minimum(uniforms_N1 * total_N1, torch.nextafter(total_N1, torch.zeros_like(total_N1)))
    tokens_N = torch.searchsorted(reached_NV, sought_N1, right=True)[:, 0]
    return tokens_N.clamp(max=scores_NV.shape[1] - 1), usable_N & ~total_N1[:, 0].isnan()


def greedy(scores_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens with the highest scores [N], and whether the scores are numbers [N].

    Of equal scores, the first is the highest, and NaN is higher than all numbers.
    """
    best_N, tokens_N = scores_NV.max(-1)
    return tokens_N, ~best_N.isnan()


def greedy_on_cpu(scores_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result of `greedy` for scores on the CPU, three to six times as fast.

    numpy finds the highest score of a row with vector instructions, torch compares one score after the other.
    """
    tokens_N = torch.from_numpy(scores_NV.detach().numpy().argmax(-1))
    return tokens_N, ~scores_NV.gather(1, tokens_N[:, None])[:, 0].isnan()


def near_ties(scores_NV: torch.Tensor, tokens_N: torch.Tensor, means_N: torch.Tensor) -> list[int]:
    """Return the rows in which another token is tied with the chosen one within the tolerance."""
    best_N = scores_NV.gather(1, tokens_N[:, None])[:, 0]
    least_N = best_N - NEAR_TIE_TOLERANCE * (best_N - means_N).abs()
    rows: list[int] = ((scores_NV >= least_N[:, None]).sum(-1) > 1).nonzero()[:, 0].tolist()
    return rows


def near_ties_on_cpu(scores_NV: torch.Tensor, tokens_N: torch.Tensor, means_N: torch.Tensor) -> list[int]:
    """Return the result of `near_ties` for scores on the CPU, several times as fast.

    It compares with the second-best score. The scores are modified temporarily.
    """
    scores = scores_NV.detach().numpy()
    chosen = np.arange(len(scores)), tokens_N.numpy()
    best_N = scores[chosen]
    scores[chosen] = -np.inf
    second_N = scores.max(-1)
    scores[chosen] = best_N
    with np.errstate(invalid="ignore"):  # a row whose scores are all -inf has no near tie
        least_N = best_N - np.float32(NEAR_TIE_TOLERANCE) * np.abs(best_N - means_N.numpy())
    rows: list[int] = np.flatnonzero(second_N >= least_N).tolist()
    return rows


def random_numbers(seed: int, key: bytes, *, count: int) -> list[float]:
    """Return numbers in [0, 1) that depend only on the seed and the key of a row."""
    chance = np.random.Generator(np.random.Philox(key=row_seed(seed, key)))
    numbers: list[float] = chance.random(count, dtype=np.float32).tolist()
    return numbers


def row_seed(seed: int, key: bytes) -> int:
    """Return the 128-bit seed of a row."""
    digest = hashlib.blake2b(key, digest_size=16, salt=seed.to_bytes(16, "little")).digest()
    return int.from_bytes(digest, "little")


def row_processors(
    arguments: dict[str, Any], request: GenerationRequest, *, ends: torch.Tensor
) -> "LogitsProcessorList":
    """Return transformers' logits processors that depend on a row's tokens, in transformers' order.

    Args:
        arguments: Options by transformers' names.
        request: The row, whose prompt and limit are those of generation by itself.
        ends: End tokens, on the device of the scores.
    """
    import transformers as library

    encoded = request.input_ids if request.encoder_ids is None else request.encoder_ids
    prompt = torch.tensor([list(encoded)], device=ends.device)
    length, most = len(request.input_ids), request.max_new_tokens
    where = str(ends.device)
    first = length + (length <= 1 and arguments.get("forced_bos_token_id") is not None)
    makers: dict[str, Callable[[Any], Any]] = {
        "sequence_bias": library.SequenceBiasLogitsProcessor,
        "encoder_repetition_penalty": lambda value: library.EncoderRepetitionPenaltyLogitsProcessor(value, prompt),
        "repetition_penalty": library.RepetitionPenaltyLogitsProcessor,
        "no_repeat_ngram_size": library.NoRepeatNGramLogitsProcessor,
        "encoder_no_repeat_ngram_size": lambda value: library.EncoderNoRepeatNGramLogitsProcessor(value, prompt),
        "bad_words_ids": lambda value: library.NoBadWordsLogitsProcessor(value, ends if len(ends) else None),
        "min_length": lambda value: library.MinLengthLogitsProcessor(min(value, length + most), ends, device=where),
        "min_new_tokens": lambda value: library.MinNewTokensLengthLogitsProcessor(
            length, min(value, most), ends, device=where
        ),
        "forced_bos_token_id": library.ForcedBOSTokenLogitsProcessor,
        "forced_eos_token_id": lambda value: library.ForcedEOSTokenLogitsProcessor(length + most, value, device=where),
        "remove_invalid_values": lambda value: library.InfNanRemoveLogitsProcessor(),
        "exponential_decay_length_penalty": lambda value: library.ExponentialDecayLengthPenalty(value, ends, length),
        "suppress_tokens": lambda value: library.SuppressTokensLogitsProcessor(value, device=where),
        "begin_suppress_tokens": lambda value: library.SuppressTokensAtBeginLogitsProcessor(value, first, device=where),
    }
    without_effect = () if len(ends) else ("min_length", "min_new_tokens")
    names = (name for name in makers if is_given(name, arguments.get(name)) and name not in without_effect)
    return library.LogitsProcessorList([makers[name](arguments[name]) for name in names])


def is_given(name: str, value: Any) -> bool:
    """Return whether an option is set; 0, False and empty lists are unset, except for forced tokens."""
    return value is not None if name.startswith("forced_") else bool(value)


def score_processors(arguments: dict[str, Any], *, device: torch.device) -> "LogitsProcessorList":
    """Return transformers' logits processors that depend on scores only, in transformers' order."""
    from transformers import (
        EpsilonLogitsWarper,
        EtaLogitsWarper,
        LogitNormalization,
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
        TypicalLogitsWarper,
    )
    from transformers.generation.logits_process import TopHLogitsWarper

    processors = LogitsProcessorList()

    def given(name: str) -> Any:
        return arguments.get(name)

    if given("temperature") not in (None, 1.0):
        processors.append(TemperatureLogitsWarper(float(given("temperature"))))
    if given("top_h") is not None:
        processors.append(TopHLogitsWarper(given("top_h")))
    if given("top_k"):
        processors.append(TopKLogitsWarper(given("top_k")))
    if given("top_p") is not None and given("top_p") < 1:
        processors.append(TopPLogitsWarper(float(given("top_p"))))
    if given("min_p") is not None:
        processors.append(MinPLogitsWarper(given("min_p")))
    if given("typical_p") is not None and given("typical_p") < 1:
        processors.append(TypicalLogitsWarper(given("typical_p")))
    if given("epsilon_cutoff") is not None and 0 < given("epsilon_cutoff") < 1:
        processors.append(EpsilonLogitsWarper(given("epsilon_cutoff")))
    if given("eta_cutoff") is not None and 0 < given("eta_cutoff") < 1:
        processors.append(EtaLogitsWarper(given("eta_cutoff"), device=str(device)))
    if given("renormalize_logits"):
        processors.append(LogitNormalization())
    return processors
