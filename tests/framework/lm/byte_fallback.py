"""A tokenizer whose vocabulary has a token for each byte, as those of Llama 2 and Mistral."""

import json
from typing import Any

from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from partita.tokenizers.load import PAD, UNKNOWN, wrap


def sentencepiece_like() -> Any:
    """Return a tokenizer with words marked by an underline, and byte fallback."""
    backend = Tokenizer(BPE(byte_fallback=True, unk_token=UNKNOWN))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    special = [UNKNOWN, PAD, "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    backend.train_from_iterator(["some plain words and {marks} 12\n"] * 3, trainer)
    for byte in special[3:]:
        assert backend.token_to_id(byte) is not None
    # The trainer marks bytes as special, which real tokenizers of this kind do not.
    saved = json.loads(backend.to_str())
    saved["added_tokens"] = saved["added_tokens"][:3]
    return wrap(Tokenizer.from_str(json.dumps(saved)), max_length=None, unknown=UNKNOWN)
