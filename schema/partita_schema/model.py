"""The language model of a run: where its weights come from and how they are held in memory."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, model_validator

from partita_schema.base import Base, Count, Flag, Name, NonNegative, Positive, Share, broken, changed

Architecture = Literal[
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gpt2",
    "gpt_neox",
    "opt",
    "gemma",
    "gemma2",
    "phi",
    "mixtral",
    "stablelm",
    "olmo2",
]


class ScratchModel(Base):
    """A new model with random weights, and a tokenizer trained on the run's own data."""

    type: Literal["scratch"]
    """Says that the model is made, not loaded."""
    architecture: Architecture = "llama"
    """The transformers model type that is built."""
    size: Literal["nano", "tiny", "mini", "small", "medium"] = "tiny"
    """A preset of width, depth and heads; the keys below override it. nano 64x2, tiny 128x4, mini 256x6, small 512x8,
    medium 768x12."""
    hidden_size: Count | None = None
    """Width of the residual stream. Default: what `size` says."""
    num_hidden_layers: Count | None = None
    """Number of transformer blocks. Default: what `size` says."""
    num_attention_heads: Count | None = None
    """Number of attention heads; divides hidden_size. Default: what `size` says."""
    num_key_value_heads: Count | None = None
    """Number of key/value heads for grouped-query attention. Default: num_attention_heads."""
    intermediate_size: Count | None = None
    """Width of the feed-forward layer. Default: 8/3 of hidden_size rounded up to a multiple of 32 for gated layers, 4
    times hidden_size otherwise."""
    context_length: Count = 512
    """Longest sequence in tokens."""
    tie_word_embeddings: Flag = True
    """Share the input and output embeddings."""
    tokenizer: Literal["bpe", "byte", "char", "word"] = "bpe"
    """bpe: byte-level BPE trained on the data; byte: 256 bytes, no training; char: one token a character; word: one
    token a word or mark."""
    vocab_size: Count = 2048
    """Upper limit of the trained vocabulary, special tokens included."""

    @model_validator(mode="after")
    def heads_divide_the_width(self) -> "ScratchModel":
        heads, width = self.num_attention_heads, self.hidden_size
        if heads and width and width % heads:
            raise broken(
                f"num_attention_heads {heads} does not divide hidden_size {width}; write a divisor of {width}",
                at="num_attention_heads",
            )
        if heads and self.num_key_value_heads and heads % self.num_key_value_heads:
            raise broken(
                f"num_key_value_heads {self.num_key_value_heads} does not divide num_attention_heads {heads}; "
                f"write a divisor of {heads}",
                at="num_key_value_heads",
            )
        return self


class EmbeddingBagModel(Base):
    """A new sparse classifier: the mean of the embeddings of a text's words and word sequences, and a linear layer.

    As fastText (Joulin et al. 2016, section 2). Its tokenizer is made from the run's own data.
    """

    type: Literal["embedding_bag"]
    """Says that the model is a bag of words."""
    embedding_dim: Count = 64
    """Numbers of an embedding."""
    ngrams: Count = 2
    """Longest sequence of tokens that has an embedding of its own; 1 for single tokens alone."""
    buckets: Count = 65536
    """Embeddings that sequences of two or more tokens share by their hash."""
    tokenizer: Literal["bpe", "byte", "char", "word"] = "word"
    """What a token is, as of a scratch model: word: a word or mark; bpe: byte-level BPE; char: a character; byte."""
    vocab_size: Count = 8192
    """Upper limit of the trained vocabulary, special tokens included."""


NewModel = ScratchModel | EmbeddingBagModel
"""Models that are made, with a tokenizer from the run's own data."""


class RopeScaling(Base):
    """A longer context by rescaled rotary positions, as transformers' `rope_parameters`."""

    type: Literal["linear", "dynamic", "yarn", "longrope", "llama3", "proportional"]
    """The rule by which positions are rescaled."""
    factor: Positive | None = None
    """How many times longer the context becomes. Required by linear, dynamic, yarn and llama3."""
    original_max_position_embeddings: Count | None = None
    """Context length in tokens that the model was trained with (yarn, longrope, llama3)."""
    attention_factor: Positive | None = None
    """Scale of the attention logits (yarn, longrope)."""
    beta_fast: Positive | None = None
    """Boundary of extrapolation (yarn)."""
    beta_slow: Positive | None = None
    """Boundary of interpolation (yarn)."""
    short_factor: tuple[Positive, ...] | None = None
    """Factor per frequency for short inputs (longrope)."""
    long_factor: tuple[Positive, ...] | None = None
    """Factor per frequency for long inputs (longrope)."""
    low_freq_factor: Positive | None = None
    """Scale of the low frequencies (llama3)."""
    high_freq_factor: Positive | None = None
    """Scale of the high frequencies (llama3)."""
    rope_theta: Positive | None = None
    """Base of the rotary frequencies. Default: the model's own."""
    partial_rotary_factor: Share | None = None
    """Share of each head's width that is rotated (proportional). Default: the model's own."""

    @model_validator(mode="after")
    def factor_stands_where_it_is_needed(self) -> "RopeScaling":
        needed = {"linear": ["factor"], "dynamic": ["factor"], "yarn": ["factor"]}
        needed |= {"llama3": ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]}
        needed |= {"longrope": ["short_factor", "long_factor"]}
        missing = [key for key in needed.get(self.type, []) if getattr(self, key) is None]
        if missing:
            raise broken(f"type {self.type} needs {', '.join(missing)}; add what is missing", at="type")
        return self


def check_device(device: str) -> str:
    if not re.fullmatch(r"auto|cpu|mps|(cuda|xpu)(:\d+)?", device):
        raise broken(f"got {device!r}; write auto, cpu, cuda, cuda:N, mps or xpu")
    return device


class ModelParameters(Base):
    """How the base model is loaded and run."""

    dtype: Literal["auto", "float32", "bfloat16", "float16", "fastest"] = "auto"
    """Type of the weights in memory. auto: the checkpoint's own on an accelerator, float32 on a CPU. fastest: bfloat16
    where the machine multiplies at least a fifth faster in it, which is tried, else float32; answers may differ."""
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3"] = "auto"
    """Attention kernel. auto: sdpa where the model offers it."""
    device: Annotated[str, AfterValidator(check_device)] = "auto"
    """auto, cpu, cuda, cuda:N, mps or xpu."""
    revision: Name | None = None
    """Branch, tag or commit of a Hub model."""
    pickled_weights: Flag = False
    """Read weights that are saved as pickles alone (.bin), which can carry code. false: safetensors only."""
    rope_scaling: RopeScaling | None = None
    """A longer context by rescaled rotary positions."""
    neftune_noise_alpha: NonNegative | None = None
    """Noise on the embeddings while training, as alpha of NEFTune (Jain et al. 2023, section 2)."""


class Quantization(Base):
    """Weights held in 4 or 8 bits by bitsandbytes, on CPU and GPU."""

    bits: Literal[4, 8] = 4
    """Bits a weight."""
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"
    """4-bit data type."""
    bnb_4bit_use_double_quant: Flag = True
    """Quantise the quantisation constants too; saves about 0.4 bits a weight."""
    bnb_4bit_compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type that 4-bit layers compute in. auto: float32 on a CPU, else bfloat16 where it is supported, else float16."""
    llm_int8_threshold: NonNegative = 6.0
    """Activations above this are computed in 16 bits (LLM.int8, Dettmers et al. 2022, section 3.2)."""
    llm_int8_has_fp16_weight: Flag = False
    """Keep 16-bit weights next to the 8-bit ones."""
    skip_modules: tuple[Name, ...] | None = None
    """Names of modules that stay unquantised. Default: the output layer."""

    @model_validator(mode="after")
    def keys_fit_the_bits(self) -> "Quantization":
        other = "bnb_4bit_" if self.bits == 8 else "llm_int8_"
        wrong = sorted(key for key in type(self).model_fields if key.startswith(other) and changed(self, key))
        if wrong:
            raise broken(f"{wrong[0]} has no effect with bits: {self.bits}; remove it", at=wrong[0])
        return self
