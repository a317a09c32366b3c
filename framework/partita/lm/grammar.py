"""Answers that are held to a grammar: each row's tokens are followed, and only those that may come next have a score.

A token that ends an answer may come where the grammar is fulfilled, and nowhere else. Masks are made by llguidance, of
all rows at once in as many threads as torch has (docs/decisions/0010-constrained-outputs.md).

Shapes: N rows, V vocabulary.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from partita.lm.token_bytes import special_ids, token_bytes
from partita_schema.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from partita.lm.sampler import Row

NO_TOKEN = "no token of this model can go on as decoder.constrain asks"
NO_END = "decoder.constrain: the model has no token that ends an answer; write generation.stop_token_ids"


class Grammar:
    """A grammar in the tokens of a model."""

    def __init__(self, grammar: str, *, tokenizer: "PreTrainedTokenizerFast", ends: Sequence[int], size: int) -> None:
        """`size` is V, `ends` are the tokens that end an answer. Raises ModelError where there are none."""
        from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper

        self.ends = [end for end in ends if end < size]
        if not self.ends:
            raise ModelError(NO_END)
        self.size = size
        vocabulary = TokenizerWrapper(Vocabulary(tokenizer, ends=self.ends, size=size))
        known = LLTokenizer(vocabulary, n_vocab=size, eos_token=self.ends)
        self.first = LLMatcher(known, LLMatcher.grammar_from_lark(grammar), log_level=0)
        if self.first.is_error():
            raise ModelError(f"decoder.constrain: {self.first.get_error()}")
        self.executor = LLExecutor(num_threads=torch.get_num_threads())

    def matcher(self) -> Any:
        """What follows an answer from its beginning."""
        return self.first.deep_copy()

    def held(self, scores_NV: torch.Tensor, rows: Sequence["Row"], *, otherwise: torch.Tensor) -> torch.Tensor:
        """Scores without tokens that may not come next; not numbers where none may, and the row has the reason.

        Where options of the file leave none of the tokens that may come, the model's own scores `otherwise` count.
        """
        allowed_NV = self.allowed(rows).to(scores_NV.device)
        held_NV = scores_NV.masked_fill(~allowed_NV, -torch.inf)
        empty_N = held_NV.amax(-1) == -torch.inf
        if not empty_N.any():
            return held_NV
        held_NV = torch.where(empty_N[:, None], otherwise.float().masked_fill(~allowed_NV, -torch.inf), held_NV)
        return held_NV.masked_fill(~allowed_NV.any(-1, keepdim=True), torch.nan)

    def allowed(self, rows: Sequence["Row"]) -> torch.Tensor:
        """Tokens that may come next [N, V], on the CPU."""
        masks = np.zeros((len(rows), (self.size + 31) // 32), dtype=np.uint32)
        follows = [self.follow(row) for row in rows]
        asked = [(row.matcher, place) for place, row in enumerate(rows) if follows[place]]
        if asked:
            self.executor.unsafe_compute_mask_ptr(asked, masks.ctypes.data, masks.shape[1] * 4, len(rows))
        bits = np.unpackbits(masks.view(np.uint8), axis=1, count=self.size, bitorder="little")
        allowed_NV = torch.from_numpy(bits.view(np.bool_))
        some_N: list[bool] = np.any(masks, axis=1).tolist()
        for place, row in enumerate(rows):
            if row.matcher.is_error():
                allowed_NV[place] = False
                row.reason = f"{NO_TOKEN} ({first_line(row.matcher.get_error())})"
            elif row.matcher.is_stopped():
                allowed_NV[place] = False
                allowed_NV[place, self.ends] = True
            elif not some_N[place]:
                row.reason = NO_TOKEN
        return allowed_NV

    def follow(self, row: "Row") -> bool:
        """Tell a row's matcher the tokens that it does not know; whether it can say what comes next."""
        new, row.matched = row.new[row.matched :], len(row.new)
        if new and not row.matcher.is_stopped():
            row.matcher.consume_tokens(new)
        return not row.matcher.is_stopped()


class Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", *, ends: Sequence[int], size: int) -> None:
        self.tokenizer = tokenizer
        self.tokens = token_bytes(tokenizer, size=size)
        self.special_token_ids = sorted({*ends, *(place for place in special_ids(tokenizer) if place < size)})
        self.eos_token_id, self.bos_token_id = ends[0], None

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text; never asked, for no grammar here forces any."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids


def first_line(text: str) -> str:
    """The beginning of an error that shows whole states behind it."""
    return text.partition("\n")[0]
