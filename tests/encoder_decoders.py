"""Tiny encoder-decoders with the tokenizers of their architectures, built in a test."""

from pathlib import Path
from typing import Any

import torch

WORDS = ("red", "blue", "green", "ball", "box", "one", "two", "three", "four", "I", "see", "and", "they", "are", "the")
LETTERS = "abcdefghijklmnopqrstuvwxyzI0123456789:.,?!_-\"'{}[]"
SIZES = {"t5": "t5", "mt5": "t5", "bart": "bart", "pegasus": "bart"}
"""Architectures, with the one that names the sizes of their configs."""


def build_tokenizer(architecture: str) -> Any:
    """Return the fast tokenizer of an architecture with a small vocabulary."""
    from transformers import PegasusTokenizer, RobertaTokenizer, T5Tokenizer

    if architecture == "bart":
        from tokenizers.pre_tokenizers import ByteLevel

        pieces = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *sorted(ByteLevel.alphabet())]
        return RobertaTokenizer(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[])
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces = [(f"\u2581{word}", -3.0) for word in WORDS]
    pieces += [("\u2581", -4.0), *((letter, -6.0) for letter in LETTERS)]
    if architecture == "pegasus":
        return PegasusTokenizer(vocab=[*special, ("<mask_2>", 0.0), ("<mask_1>", 0.0), *pieces], offset=2)
    return T5Tokenizer(vocab=[*special, *pieces], extra_ids=0)


def build_config(architecture: str, *, vocab_size: int, dropout: float, width: int, context: int) -> Any:
    """Return a small config; dropout is 0.0 to compare losses."""
    from transformers import AutoConfig

    if SIZES[architecture] == "t5":
        sizes = {"d_model": width, "d_kv": width // 4, "d_ff": 2 * width, "num_layers": 2, "num_heads": 4}
        own = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False} if architecture == "mt5" else {}
        more = {"dropout_rate": dropout, "decoder_start_token_id": 0, **sizes, **own}
    else:
        names = ("layers", "attention_heads", "ffn_dim")
        sizes = {
            f"{side}_{name}": size
            for side in ("encoder", "decoder")
            for name, size in zip(names, (2, 4, 2 * width), strict=True)
        }
        more = {"d_model": width, "max_position_embeddings": context, "dropout": dropout, **sizes}
        more |= {"attention_dropout": 0.0, "activation_dropout": 0.0, "scale_embedding": architecture == "pegasus"}
    return AutoConfig.for_model(architecture, vocab_size=vocab_size, **more)


def save_encoder_decoder(
    folder: Path, architecture: str, *, dropout: float = 0.0, width: int = 32, context: int = 64, sharp: float = 4.0
) -> Path:
    """Write a random model with its tokenizer; `sharp` multiplies matrices, so that greedy answers vary."""
    from transformers import AutoModelForSeq2SeqLM

    tokenizer = build_tokenizer(architecture)
    config = build_config(architecture, vocab_size=len(tokenizer), dropout=dropout, width=width, context=context)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForSeq2SeqLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "position" not in name:
                parameter.mul_(sharp)
        if SIZES[architecture] == "bart":
            # The embeddings are tied, and the decoder starts with the end token, which would be predicted at once.
            model.final_logits_bias[0, tokenizer.eos_token_id] = -3.0 * sharp
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
