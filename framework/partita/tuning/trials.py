"""What batch sizes are tried with where nothing is learned: answers to the longest prompt, and the loss of the longest
row. What training is tried with is its trainer's to say.

Shapes: B rows, S tokens of the longest prompt, N new tokens.
"""

from dataclasses import dataclass

import numpy as np
import torch

from partita.lm.base import GenerationOptions, GenerativeModel
from partita_trainers.batch_size.clock import now
from partita_trainers.batch_size.trial import Purpose, Timing, Volume
from partita_trainers.batch_size.worst_batch import worst_batch

MOST_ELEMENTS = 2**31 - 1
"""Elements of one tensor that kernels with 32-bit indices can count."""


@dataclass(frozen=True)
class GenerationTrial:
    """Answers to B prompts of S tokens, N new tokens each."""

    lm: GenerativeModel
    options: GenerationOptions
    lengths: np.ndarray
    """Tokens of each prompt of the data, none of them 0."""
    wanted_tokens: int
    """Most new tokens of an answer."""

    purpose: Purpose = "generation"

    @property
    def max_rows(self) -> int:
        """Rows of the data, and no more than one tensor of logits can hold."""
        wide = self.lm.vocabulary_size * int(self.options.arguments.get("num_beams", 1))
        return max(1, min(len(self.lengths), MOST_ELEMENTS // wide))

    @property
    def prompt_tokens(self) -> int:
        """S."""
        return int(self.lengths.max())

    @property
    def new_tokens(self) -> int:
        """N; less where the model's positions end before."""
        return self.lm.reachable_tokens(self.prompt_tokens, self.wanted_tokens)

    def warm_up(self) -> None:
        """A few tokens for a short prompt."""
        self.decode_step(1)

    def run(self, rows: int) -> Timing:
        """Prompts are read, and the last tokens of their answers generated."""
        return self.lm.generate_worst_case(
            rows, prompt_tokens=self.prompt_tokens, new_tokens=self.new_tokens, options=self.options
        )

    def estimated_bytes(self, rows: int) -> int:
        """What a batch should take by a formula, each beam a row."""
        wide = rows * int(self.options.arguments.get("num_beams", 1))
        return self.lm.estimated_bytes(
            "generation", wide, tokens=self.prompt_tokens, new_tokens=self.new_tokens, learned=0
        )

    def decode_step(self, rows: int) -> float:
        """Seconds of a step in the middle of an answer, in a batch of the usual length with its padding."""
        length = round(self.volume(rows).tokens / len(self.lengths)) + self.new_tokens // 2
        return self.lm.time_decode_step(rows, length=max(4, length), options=self.options)

    def volume(self, rows: int) -> Volume:
        """All prompts, the longest first, in batches of this many."""
        return sorted_volume(self.lengths, rows)


@dataclass(frozen=True)
class EvaluationTrial:
    """The loss of B of the longest rows, without gradients."""

    lm: GenerativeModel
    lengths: np.ndarray
    """Tokens of each row of the data."""
    most_learned: int
    """Most tokens with a loss in a row."""

    purpose: Purpose = "evaluation"
    new_tokens: int = 0

    @property
    def max_rows(self) -> int:
        """Rows of the data, and no more than one tensor of logits can hold."""
        return countable_rows(len(self.lengths), vocabulary_size=self.lm.vocabulary_size, learned=self.most_learned)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the longest row."""
        return int(self.lengths.max())

    def warm_up(self) -> None:
        """The loss of one row."""
        self.run(1)

    def run(self, rows: int) -> Timing:
        """One forward pass."""
        batch = worst_batch(rows, tokens=self.prompt_tokens, learned=self.most_learned, token_ids=self.lm.token_ids)
        self.lm.module.eval()
        started = now(self.lm.device)
        with torch.no_grad():
            self.lm.loss(self.lm.module, batch)
        return Timing(prefill_seconds=now(self.lm.device) - started)

    def estimated_bytes(self, rows: int) -> int:
        """What a batch should take by a formula."""
        return self.lm.estimated_bytes(
            "evaluation", rows, tokens=self.prompt_tokens, new_tokens=0, learned=self.most_learned
        )

    def decode_step(self, rows: int) -> float:
        """0: nothing is generated."""
        return 0.0

    def volume(self, rows: int) -> Volume:
        """All rows, the longest first, in batches of this many."""
        return sorted_volume(self.lengths, rows)


def countable_rows(rows: int, *, vocabulary_size: int, learned: int) -> int:
    """Rows whose logits kernels with 32-bit indices can count, up to `rows`."""
    return max(1, min(rows, MOST_ELEMENTS // (vocabulary_size * max(1, learned))))


def sorted_volume(lengths: np.ndarray, rows: int) -> Volume:
    """Batches and padded tokens of rows in descending order of length."""
    ordered = np.sort(lengths.astype(np.int64))[::-1]
    heads = ordered[::rows]
    counts = np.full(len(heads), rows)
    counts[-1] = len(ordered) - rows * (len(heads) - 1)
    return Volume(batches=len(heads), tokens=int((heads * counts).sum()))
