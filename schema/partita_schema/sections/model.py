"""The base model: where its weights come from, and how they are stored in memory."""

import re
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, model_validator

from partita_schema.base import (
    ConfigModel,
    Fraction,
    Name,
    NonNegative,
    Positive,
    PositiveInt,
    StrictBool,
    rule_error,
)

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
"""Architectures that write text."""
EncoderArchitecture = Literal["bert", "roberta", "distilbert", "deberta-v2", "modernbert"]
"""Architectures that write no text: their outputs have a head."""
ENCODERS: tuple[str, ...] = get_args(EncoderArchitecture)
EncoderDecoderArchitecture = Literal["t5", "bart"]
"""Architectures whose encoder reads the prompt, and whose decoder writes the answer."""
ENCODER_DECODERS: tuple[str, ...] = get_args(EncoderDecoderArchitecture)

SHAPES = {"nano": (64, 2, 2), "tiny": (128, 4, 4), "mini": (256, 6, 8), "small": (512, 8, 8), "medium": (768, 12, 12)}
"""Hidden size, layers and attention heads by `size`."""
ROTATED = {"stablelm": 0.25, "gpt_neox": 0.25, "phi": 0.5}
"""Fraction of each head with rotary positions, where it is not 1."""
UNROTATED = ("gpt2", "opt", "bert", "roberta", "distilbert", "deberta-v2", *ENCODER_DECODERS)
"""Architectures without rotary positions."""
UNGROUPED = ("gpt2", "gpt_neox", "opt", *ENCODERS, *ENCODER_DECODERS)
"""Architectures without grouped-query attention."""
BYTE_LEVEL_TOKENIZERS = ("bpe", "byte")
"""Tokenizers whose smallest tokens are bytes."""
WITH_OWN_TOKENIZER = ("qwen2",)
"""Architectures whose tokenizers AutoTokenizer of transformers reads with the class of the architecture."""


class ScratchModel(ConfigModel):
    """A new language model with random weights. Its tokenizer is trained on the training data."""

    type: Literal["scratch"]
    """Create a new model instead of loading one."""
    architecture: Literal[Architecture, EncoderDecoderArchitecture, EncoderArchitecture] = "llama"
    """Model architecture, as the `model_type` of a transformers config. t5 and bart are encoder-decoders. bert,
    roberta, distilbert, deberta-v2 and modernbert are encoders, which write no text: their outputs have a head."""
    size: Literal["nano", "tiny", "mini", "small", "medium"] = "tiny"
    """Preset for hidden_size x num_hidden_layers, and the number of heads; the keys below override it. nano: 64x2,
    tiny: 128x4, mini: 256x6, small: 512x8, medium: 768x12."""
    hidden_size: PositiveInt | None = None
    """Width of the hidden states. Default: set by `size`."""
    num_hidden_layers: PositiveInt | None = None
    """Number of transformer layers; of an encoder-decoder, layers of each side. Default: set by `size`."""
    num_attention_heads: PositiveInt | None = None
    """Number of attention heads; must divide hidden_size. Default: set by `size`."""
    num_key_value_heads: PositiveInt | None = None
    """Number of key/value heads for grouped-query attention; must divide num_attention_heads. Default:
    num_attention_heads."""
    intermediate_size: PositiveInt | None = None
    """Width of the feed-forward (MLP) layer. Default: 8/3 of hidden_size rounded up to a multiple of 32 for gated
    layers, otherwise 4 times hidden_size."""
    context_length: PositiveInt = 512
    """Maximum sequence length in tokens; with bart, of each side. t5 has no maximum, since its positions are
    relative."""
    tie_word_embeddings: StrictBool = True
    """Share the weights of the input and output embeddings."""
    tokenizer: Literal["bpe", "byte", "char", "word"] = "bpe"
    """Type of tokenizer. bpe: byte-level BPE trained on the data; byte: one token per byte, without training; char: one
    token per character; word: one token per word or punctuation mark. qwen2 has bpe and byte only."""
    vocab_size: PositiveInt = 2048
    """Maximum vocabulary size of the trained tokenizer, special tokens included."""

    @property
    def attention_shape(self) -> tuple[int, int, int]:
        """Hidden size, heads and key/value heads."""
        width, _, heads = SHAPES[self.size]
        heads = self.num_attention_heads or heads
        return self.hidden_size or width, heads, self.num_key_value_heads or heads

    @model_validator(mode="after")
    def heads_divide_the_width(self) -> "ScratchModel":
        width, heads, groups = self.attention_shape
        at = "num_attention_heads" if self.num_attention_heads else "hidden_size"
        if self.num_attention_heads and self.hidden_size and width % heads:
            raise rule_error(
                f"num_attention_heads {heads} does not divide hidden_size {width}; write a divisor of {width}", at=at
            )
        if width % heads or (width // heads) % 2:
            raise rule_error(
                f"hidden_size {width} and num_attention_heads {heads} give no even head width; write a hidden_size "
                f"that is a multiple of {2 * heads}, or other num_attention_heads",
                at=at,
            )
        if heads % groups:
            raise rule_error(
                f"num_key_value_heads {groups} does not divide num_attention_heads {heads}; write a divisor of {heads}",
                at="num_key_value_heads",
            )
        return self

    @model_validator(mode="after")
    def the_architecture_has_this_attention(self) -> "ScratchModel":
        width, heads, groups = self.attention_shape
        share = ROTATED.get(self.architecture, 1.0)
        if int(width // heads * share) % 2:
            raise rule_error(
                f"{self.architecture} rotates {share:.0%} of each head, and {width // heads} dimensions a head leave "
                f"an odd number; write a hidden_size that is a multiple of {heads * round(2 / share)}",
                at="num_attention_heads" if self.num_attention_heads else "hidden_size",
            )
        if groups != heads and self.architecture in UNGROUPED:
            raise rule_error(
                f"{self.architecture} has no grouped-query attention; remove num_key_value_heads",
                at="num_key_value_heads",
            )
        return self

    @model_validator(mode="after")
    def the_architecture_has_this_tokenizer(self) -> "ScratchModel":
        if self.architecture in WITH_OWN_TOKENIZER and self.tokenizer not in BYTE_LEVEL_TOKENIZERS:
            raise rule_error(
                f"transformers reads every tokenizer of {self.architecture} as a byte-level one; write "
                f"tokenizer: {' or '.join(BYTE_LEVEL_TOKENIZERS)}, or architecture: qwen3",
                at="tokenizer",
            )
        return self


class EmbeddingBagModel(ConfigModel):
    """A new bag-of-words classifier: the mean embedding of a text's words and n-grams, followed by a linear layer.

    The model of fastText (Joulin et al. 2016, section 2). Its tokenizer is trained on the training data.
    """

    type: Literal["embedding_bag"]
    """Create a new bag-of-words classifier."""
    embedding_dim: PositiveInt = 64
    """Width of an embedding."""
    ngrams: PositiveInt = 2
    """Length in tokens of the longest n-gram that has an embedding; 1 uses single tokens only."""
    buckets: PositiveInt = 65536
    """Number of hashed embeddings shared by all n-grams of two or more tokens."""
    tokenizer: Literal["bpe", "byte", "char", "word"] = "word"
    """Type of tokenizer, as for a scratch model. word: one token per word or punctuation mark; bpe: byte-level BPE
    trained on the data; char: one token per character; byte: one token per byte."""
    vocab_size: PositiveInt = 8192
    """Maximum vocabulary size of the trained tokenizer, special tokens included."""


NewModel = ScratchModel | EmbeddingBagModel
"""Models created from random weights, with a tokenizer trained on the training data."""


class RopeScaling(ConfigModel):
    """RoPE scaling for a longer context, as `rope_parameters` in transformers."""

    type: Literal["linear", "dynamic", "yarn", "longrope", "llama3", "proportional"]
    """RoPE scaling method, as `rope_type` in transformers."""
    factor: Positive | None = None
    """Factor by which the context is extended. Required for linear, dynamic, yarn and llama3."""
    original_max_position_embeddings: PositiveInt | None = None
    """Context length in tokens that the model was pretrained with (yarn, longrope, llama3)."""
    attention_factor: Positive | None = None
    """Scaling factor applied to the attention computation (yarn, longrope)."""
    beta_fast: Positive | None = None
    """Boundary for extrapolation in the ramp function (yarn)."""
    beta_slow: Positive | None = None
    """Boundary for interpolation in the ramp function (yarn)."""
    short_factor: tuple[Positive, ...] | None = None
    """Scaling factor of each frequency for short inputs (longrope). Required for longrope."""
    long_factor: tuple[Positive, ...] | None = None
    """Scaling factor of each frequency for long inputs (longrope). Required for longrope."""
    low_freq_factor: Positive | None = None
    """Scaling factor of the low-frequency components (llama3). Required for llama3."""
    high_freq_factor: Positive | None = None
    """Scaling factor of the high-frequency components (llama3). Required for llama3."""
    rope_theta: Positive | None = None
    """Base period of the rotary embeddings. Default: the value in the model's config."""
    partial_rotary_factor: Fraction | None = None
    """Fraction of each head's dimensions that is rotated (proportional). Default: the value in the model's config."""

    @model_validator(mode="after")
    def factor_stands_where_it_is_needed(self) -> "RopeScaling":
        needed = {"linear": ["factor"], "dynamic": ["factor"], "yarn": ["factor"]}
        needed |= {"llama3": ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]}
        needed |= {"longrope": ["short_factor", "long_factor"]}
        missing = [key for key in needed.get(self.type, []) if getattr(self, key) is None]
        if missing:
            raise rule_error(f"type {self.type} needs {', '.join(missing)}; add what is missing", at="type")
        return self


def check_device(device: str) -> str:
    if not re.fullmatch(r"auto|cpu|mps|(cuda|xpu)(:\d+)?", device):
        raise rule_error(f"got {device!r}; write auto, cpu, cuda, cuda:N, mps or xpu")
    return device


class ModelParameters(ConfigModel):
    """How the base model is loaded and run."""

    dtype: Literal["auto", "float32", "bfloat16", "float16", "fastest"] = "auto"
    """Data type of the weights. auto: the checkpoint's dtype on an accelerator, float32 on a CPU. fastest: bfloat16 if
    a short test on this machine shows it at least a fifth faster, otherwise float32; answers may differ between the
    two."""
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3"] = "auto"
    """Attention implementation, as `attn_implementation` in transformers. auto: sdpa if the model supports it."""
    device: Annotated[str, AfterValidator(check_device)] = "auto"
    """Device to run on: auto, cpu, cuda, cuda:N, mps or xpu. auto: an accelerator if there is one, otherwise the
    CPU."""
    revision: Name | None = None
    """Branch, tag or commit of a model on the Hub. Default: the main branch."""
    pickled_weights: StrictBool = False
    """Allow loading weights that are available only as pickle files (.bin), which can execute code. false: only
    safetensors are loaded."""
    rope_scaling: RopeScaling | None = None
    """RoPE scaling for a longer context. Default: none beyond the model's own."""
    neftune_noise_alpha: NonNegative | None = None
    """Scale (alpha) of the NEFTune noise added to the embeddings during training (Jain et al. 2023, section 2).
    Default: no noise."""
