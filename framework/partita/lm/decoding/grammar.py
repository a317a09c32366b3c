"""Constrained decoding: a grammar masks the tokens that may not come next.

End tokens are allowed only where the grammar is complete. llguidance computes the masks of all rows at once, in as many
threads as torch uses (docs/decisions/0010-constrained-outputs.md). It needs the bytes of each token: byte-level tokens
spell bytes in a special alphabet, byte-fallback tokens name one byte, and for all others the bytes are what they add
when decoded after another token.

Shapes: N rows, V vocabulary.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from partita.lm.decoding.row import Row
from partita_schema.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def token_bytes(tokenizer: "PreTrainedTokenizerFast", *, size: int) -> list[bytes]:
    """Return the bytes of the first `size` ids; empty for special tokens and for ids without a token."""
    kinds = decoder_kinds(json.loads(tokenizer.backend_tokenizer.to_str())["decoder"])
    alphabet = byte_level_alphabet()
    added, special = tokenizer.added_tokens_decoder, special_ids(tokenizer)
    spelled, left = [b""] * size, []
    for token, token_id in tokenizer.get_vocab().items():
        if token_id >= size or token_id in special:
            continue
        if token_id in added:
            spelled[token_id] = token.encode()
        elif "ByteLevel" in kinds and all(character in alphabet for character in token):
            spelled[token_id] = bytes(alphabet[character] for character in token)
        elif "ByteFallback" in kinds and is_byte_name(token):
            spelled[token_id] = bytes([int(token[3:5], 16)])
        else:
            left.append(token_id)
    for token_id, text in zip(left, texts_after_another(tokenizer, left), strict=True):
        spelled[token_id] = text.encode()
    return spelled


def special_ids(tokenizer: "PreTrainedTokenizerFast") -> set[int]:
    """Return the ids of special tokens."""
    marked = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return marked | set(tokenizer.all_special_ids)


def decoder_kinds(decoder: dict[str, Any] | None) -> set[str]:
    """Return the names of all steps of a decoder of the tokenizers library."""
    if decoder is None:
        return set()
    return {decoder["type"]}.union(*map(decoder_kinds, decoder.get("decoders", ())))


def byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each character of byte-level tokens (Radford et al. 2019, in their published code)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


def is_byte_name(token: str) -> bool:
    """Return whether a token has the form `<0x0A>`."""
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def texts_after_another(tokenizer: "PreTrainedTokenizerFast", ids: Sequence[int]) -> list[str]:
    """Return what each token adds to the text of the first one: decoded alone, a leading space may be removed."""
    if not ids:
        return []
    decode = tokenizer.backend_tokenizer.decode_batch
    before = len(decode([[ids[0]]], skip_special_tokens=False)[0])
    pairs = decode([[ids[0], other] for other in ids], skip_special_tokens=False)
    return [text[before:] for text in pairs]


NO_TOKEN = "no token of this model can continue an answer as decoder.constrain, or the request, requires"
NO_END = "decoder.constrain: the model has no token that ends an answer; write generation.stop_token_ids"


class Grammar:
    """A grammar compiled for the tokenizer of a model."""

    def __init__(self, grammar: str, *, tokenizer: "PreTrainedTokenizerFast", ends: Sequence[int], size: int) -> None:
        """Compile the grammar.

        Args:
            grammar: Grammar in the syntax of llguidance.
            tokenizer: Tokenizer of the model.
            ends: End tokens.
            size: V, the number of logits.

        Raises:
            ModelError: There is no end token, or the grammar is not valid.
        """
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
        """Return a matcher at the beginning of an answer."""
        return self.first.deep_copy()

    def mask_scores(self, scores_NV: torch.Tensor, rows: Sequence[Row], *, otherwise: torch.Tensor) -> torch.Tensor:
        """Return scores with disallowed tokens masked; NaN if no token is allowed, with the reason in the row.

        If generation settings mask all allowed tokens, the model's scores `otherwise` are used.
        """
        allowed_NV = self.allowed(rows).to(scores_NV.device)
        held_NV = scores_NV.masked_fill(~allowed_NV, -torch.inf)
        empty_N = held_NV.amax(-1) == -torch.inf
        if not empty_N.any():
            return held_NV
        held_NV = torch.where(empty_N[:, None], otherwise.float().masked_fill(~allowed_NV, -torch.inf), held_NV)
        return held_NV.masked_fill(~allowed_NV.any(-1, keepdim=True), torch.nan)

    def allowed(self, rows: Sequence[Row]) -> torch.Tensor:
        """Return which tokens may come next [N, V], on the CPU; all of them in rows without a matcher."""
        masks = np.zeros((len(rows), (self.size + 31) // 32), dtype=np.uint32)
        follows = [self.follow(row) for row in rows]
        asked = [(row.matcher, index) for index, row in enumerate(rows) if follows[index]]
        if asked:
            self.executor.unsafe_compute_mask_ptr(asked, masks.ctypes.data, masks.shape[1] * 4, len(rows))
        bits = np.unpackbits(masks.view(np.uint8), axis=1, count=self.size, bitorder="little")
        allowed_NV = torch.from_numpy(bits.view(np.bool_))
        some_N: list[bool] = np.any(masks, axis=1).tolist()
        for index, row in enumerate(rows):
            if row.matcher is None:
                allowed_NV[index] = True
            elif row.matcher.is_error():
                allowed_NV[index] = False
                row.reason = f"{NO_TOKEN} ({first_line(row.matcher.get_error())})"
            elif row.matcher.is_stopped():
                allowed_NV[index] = False
                allowed_NV[index, self.ends] = True
            elif not some_N[index]:
                row.reason = NO_TOKEN
        return allowed_NV

    def follow(self, row: Row) -> bool:
        """Advance a row's matcher by its new tokens; return whether it can compute a mask."""
        if row.matcher is None:
            return False
        new, row.matched = row.new[row.matched :], len(row.new)
        if new and not row.matcher.is_stopped():
            row.matcher.consume_tokens(new)
        return not row.matcher.is_stopped()


class Vocabulary:
    """The tokenizer interface that llguidance expects."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", *, ends: Sequence[int], size: int) -> None:
        self.tokenizer = tokenizer
        self.tokens = token_bytes(tokenizer, size=size)
        self.special_token_ids = sorted({*ends, *(token_id for token_id in special_ids(tokenizer) if token_id < size)})
        self.eos_token_id, self.bos_token_id = ends[0], None

    def __call__(self, text: str) -> list[int]:
        """Tokenize a text; not called, as no grammar here forces tokens."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids


def first_line(text: str) -> str:
    """Return the first line of an error message, which continues with internal states."""
    return text.partition("\n")[0]
