"""The bytes of each token of a tokenizer.

The decoder distinguishes three kinds: byte-level tokens spell bytes in a special alphabet, byte-fallback tokens name
one byte, and for all others the bytes are what they add when decoded after another token.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def token_bytes(tokenizer: "PreTrainedTokenizerFast", *, size: int) -> list[bytes]:
    """Return the bytes of the first `size` ids; empty for special tokens and for ids without a token."""
    kinds = decoder_kinds(json.loads(tokenizer.backend_tokenizer.to_str())["decoder"])
    alphabet = byte_level_alphabet()
    added, special = tokenizer.added_tokens_decoder, special_ids(tokenizer)
    spelled, left = [b""] * size, []
    for token, place in tokenizer.get_vocab().items():
        if place >= size or place in special:
            continue
        if place in added:
            spelled[place] = token.encode()
        elif "ByteLevel" in kinds and all(character in alphabet for character in token):
            spelled[place] = bytes(alphabet[character] for character in token)
        elif "ByteFallback" in kinds and is_byte_name(token):
            spelled[place] = bytes([int(token[3:5], 16)])
        else:
            left.append(place)
    for place, text in zip(left, texts_behind_another(tokenizer, left), strict=True):
        spelled[place] = text.encode()
    return spelled


def special_ids(tokenizer: "PreTrainedTokenizerFast") -> set[int]:
    """Return the ids of special tokens."""
    marked = {place for place, token in tokenizer.added_tokens_decoder.items() if token.special}
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
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


def is_byte_name(token: str) -> bool:
    """Return whether a token has the form `<0x0A>`."""
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def texts_behind_another(tokenizer: "PreTrainedTokenizerFast", places: Sequence[int]) -> list[str]:
    """Return what each token adds to the text of the first one: decoded alone, a leading space may be removed."""
    if not places:
        return []
    decode = tokenizer.backend_tokenizer.decode_batch
    before = len(decode([[places[0]]], skip_special_tokens=False)[0])
    pairs = decode([[places[0], place] for place in places], skip_special_tokens=False)
    return [text[before:] for text in pairs]
