"""Adapters: small trained parts on a frozen base model, a union on `type` over what peft offers."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from partita_schema.base import Base, Count, Flag, Name, NonNegative, NonNegativeCount, Positive, Share, broken, changed


class Postprocessor(Base):
    """What is done with an adapter after training."""

    merge_adapter_into_base_model: Flag = False
    """Add the adapter to the base weights, so that `model/` is a plain model."""


class AdapterBase(Base):
    """What all adapters share."""

    pretrained_adapter_weights: Name | None = None
    """Folder or Hub id of an adapter to start from."""
    postprocessor: Postprocessor = Postprocessor.model_construct()
    """What is done with the adapter after training."""


class TargetedAdapter(AdapterBase):
    """What adapters on chosen modules share."""

    target_modules: str | tuple[Name, ...] = "all-linear"
    """Names of modules to adapt, a regular expression, or all-linear."""
    modules_to_save: tuple[Name, ...] | None = None
    """Names of modules that are trained in full and saved with the adapter."""


class LayeredAdapter(TargetedAdapter):
    """What adapters on chosen layers share."""

    exclude_modules: str | tuple[Name, ...] | None = None
    """Names of modules, or a regular expression, to leave out."""
    layers_to_transform: tuple[int, ...] | None = None
    """Indices of the layers to adapt. Default: all."""


class LoraBase(LayeredAdapter):
    """What the LoRA family shares."""

    alpha: Positive | None = None
    """Scale: updates are multiplied by alpha / r. Default: 2 r."""
    dropout: Share = 0.0
    """Dropout before the adapter."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Which biases are trained."""


class EvaOptions(Base):
    """How EVA initialises LoRA from activations (Paischer et al. 2024, section 3)."""

    rho: Positive = 2.0
    """Factor by which a layer may grow beyond r when ranks are redistributed."""
    tau: Share = 0.99
    """Cosine similarity at which a component counts as converged."""
    batches: Count = 16
    """Training batches whose activations are used, at most."""


class LoraAdapter(LoraBase):
    """Low-rank adaptation (Hu et al. 2021), with its initialisations and variants."""

    type: Literal["lora"]
    """Low-rank adaptation."""
    r: Count = 16
    """Rank of the update."""
    use_rslora: Flag = False
    """Scale by alpha / sqrt(r) (rank-stabilised LoRA, Kalajdzievski 2023, theorem 3.2)."""
    use_dora: Flag = False
    """Learn magnitude and direction apart (DoRA, Liu et al. 2024)."""
    init: Literal[
        "default",
        "gaussian",
        "orthogonal",
        "pissa",
        "pissa_niter_4",
        "pissa_niter_16",
        "olora",
        "loftq",
        "eva",
        "corda",
    ] = "default"
    """How the adapter starts. pissa, olora and corda move principal components of the base weights into it; loftq
    makes up for quantisation; eva and corda look at training batches."""
    eva: EvaOptions | None = None
    """Options of `init: eva`."""
    loftq_bits: Literal[2, 4, 8] = 4
    """Bits that `init: loftq` assumes."""
    loftq_iterations: Count = 1
    """Alternating steps of `init: loftq` (Li et al. 2023, algorithm 1)."""
    corda_method: Literal["ipm", "kpm"] = "ipm"
    """`init: corda`: ipm learns the task faster, kpm keeps more of the old knowledge (Yang et al. 2024, section 3)."""
    rank_pattern: dict[str, Count] = {}
    """Rank by module name or regular expression, over `r`."""
    alpha_pattern: dict[str, Positive] = {}
    """Scale by module name or regular expression, over `alpha`."""

    @model_validator(mode="after")
    def options_fit_the_init(self) -> "LoraAdapter":
        owners = {"eva": "eva", "loftq_bits": "loftq", "loftq_iterations": "loftq", "corda_method": "corda"}
        for key, init in owners.items():
            if changed(self, key) and self.init != init:
                raise broken(f"{key} has no effect without init: {init}; remove it or write init: {init}", at=key)
        return self


class AdaloraAdapter(LoraBase):
    """LoRA whose rank budget moves to the layers that need it (Zhang et al. 2023)."""

    type: Literal["adalora"]
    """Adaptive budget LoRA."""
    target_r: Count = 8
    """Average rank at the end."""
    init_r: Count = 12
    """Rank at the start."""
    tinit: NonNegative = 0
    """Share of the steps before pruning starts, when below 1; else a number of steps."""
    tfinal: NonNegative = 0
    """Share of the steps after pruning ends, when below 1; else a number of steps."""
    delta_t: Count = 1
    """Steps between two budget allocations."""
    beta1: Share = 0.85
    """Smoothing of the sensitivity."""
    beta2: Share = 0.85
    """Smoothing of the uncertainty."""
    orth_reg_weight: NonNegative = 0.5
    """Weight of the orthogonality penalty in the loss."""

    @model_validator(mode="after")
    def rank_shrinks(self) -> "AdaloraAdapter":
        if self.init_r < self.target_r:
            raise broken(
                f"init_r {self.init_r} is below target_r {self.target_r}; adalora only shrinks ranks, "
                f"write init_r of at least {self.target_r}",
                at="init_r" if changed(self, "init_r") else "target_r",
            )
        return self


class Ia3Adapter(TargetedAdapter):
    """Learned rescaling of activations (IA3, Liu et al. 2022)."""

    type: Literal["ia3"]
    """Rescaled activations."""
    target_modules: str | tuple[Name, ...] | None = None  # type: ignore[assignment]  # peft has a choice of its own
    """Names of modules to rescale. Default: peft's choice for the architecture, else all linear layers."""
    feedforward_modules: str | tuple[Name, ...] | None = None
    """Which of them are feed-forward outputs, whose input is rescaled."""


class VeraAdapter(TargetedAdapter):
    """Shared random matrices with learned vectors (VeRA, Kopiczko et al. 2023)."""

    type: Literal["vera"]
    """Vector-based random matrix adaptation."""
    layers_to_transform: tuple[int, ...] | None = None
    """Indices of the layers to adapt. Default: all."""
    r: Count = 256
    """Rank of the shared matrices."""
    dropout: Share = 0.0
    """Dropout before the adapter."""
    d_initial: Share = 0.1
    """Start value of the scaling vector d."""
    projection_prng_key: int = 0
    """Seed of the shared matrices."""
    save_projection: Flag = True
    """Save the shared matrices with the adapter."""


class LycorisAdapter(LayeredAdapter):
    """What the adapters that came from LyCORIS share."""

    r: Count = 8
    """Rank of each factor."""
    alpha: Positive | None = None
    """Scale: updates are multiplied by alpha / r. Default: 2 r."""
    rank_dropout: Share = 0.0
    """Dropout over ranks."""
    module_dropout: Share = 0.0
    """Chance that a whole adapter is left out in a step."""


class LohaAdapter(LycorisAdapter):
    """Hadamard products of low-rank matrices (LoHa, Hyeon-Woo et al. 2021)."""

    type: Literal["loha"]
    """Low-rank Hadamard product."""


class LokrAdapter(LycorisAdapter):
    """Kronecker products (LoKr, Edalati et al. 2022)."""

    type: Literal["lokr"]
    """Low-rank Kronecker product."""
    decompose_both: Flag = False
    """Factorise both Kronecker factors."""
    decompose_factor: int = Field(default=-1, strict=True, ge=-1)
    """Size of the left factor; -1 for the squarest."""


class BoftAdapter(LayeredAdapter):
    """Butterfly-factorised rotations (BOFT, Liu et al. 2023)."""

    type: Literal["boft"]
    """Butterfly orthogonal fine-tuning."""
    boft_block_size: NonNegativeCount = 4
    """Size of a rotation block; divides the layer's input width. 0: given by boft_block_num."""
    boft_block_num: NonNegativeCount = 0
    """Number of blocks. 0: given by boft_block_size."""
    boft_n_butterfly_factor: Count = 1
    """Number of butterfly factors."""
    boft_dropout: Share = 0.0
    """Multiplicative dropout."""
    bias: Literal["none", "all", "boft_only"] = "none"
    """Which biases are trained."""

    @model_validator(mode="after")
    def block_size_or_number(self) -> "BoftAdapter":
        if (self.boft_block_size == 0) == (self.boft_block_num == 0):
            raise broken(
                f"boft_block_size is {self.boft_block_size} and boft_block_num is {self.boft_block_num}; "
                "write one of them, and 0 for the other",
                at="boft_block_num" if changed(self, "boft_block_num") else "boft_block_size",
            )
        return self


class OftAdapter(LayeredAdapter):
    """Orthogonal rotations of weights (OFT, Qiu et al. 2023)."""

    type: Literal["oft"]
    """Orthogonal fine-tuning."""
    r: NonNegativeCount = 0
    """Number of blocks. 0: given by oft_block_size."""
    oft_block_size: NonNegativeCount = 32
    """Size of a block; divides the layer's input width. 0: given by r."""
    coft: Flag = False
    """Keep the rotation within eps of the identity."""
    eps: Positive = 6e-5
    """Freedom of the rotation with `coft`."""
    block_share: Flag = False
    """Share one block in a layer."""

    @model_validator(mode="after")
    def block_size_or_number(self) -> "OftAdapter":
        if (self.r == 0) == (self.oft_block_size == 0):
            raise broken(
                f"r is {self.r} and oft_block_size is {self.oft_block_size}; write one of them, and 0 for the other",
                at="r" if changed(self, "r") else "oft_block_size",
            )
        return self


class FourierftAdapter(LayeredAdapter):
    """A sparse spectrum of the update (FourierFT, Gao et al. 2024)."""

    type: Literal["fourierft"]
    """Discrete Fourier fine-tuning."""
    n_frequency: Count = 1000
    """Learned frequencies a layer; at most the number of its weights."""
    scaling: Positive = 150.0
    """Scale of the update."""
    random_loc_seed: int = 777
    """Seed of the frequencies' places."""


class LnTuningAdapter(AdapterBase):
    """Only layer norms are trained (Zhao et al. 2023)."""

    type: Literal["ln_tuning"]
    """Layer-norm tuning."""
    target_modules: str | tuple[Name, ...] | None = None
    """Names of norm modules. Default: peft's choice for the architecture."""
    modules_to_save: tuple[Name, ...] | None = None
    """Names of modules that are trained in full and saved with the adapter."""


class VbloraAdapter(LayeredAdapter):
    """Low-rank updates from one shared vector bank (VB-LoRA, Li et al. 2024)."""

    type: Literal["vblora"]
    """Vector-bank LoRA."""
    r: Count = 4
    """Rank of the update."""
    num_vectors: Count = 256
    """Vectors in the bank."""
    vector_length: Count = 256
    """Length of a vector; divides the layers' widths."""
    topk: Count = 2
    """Vectors mixed for each sub-vector."""
    dropout: Share = 0.0
    """Dropout before the adapter."""
    save_only_topk_weights: Flag = False
    """Save only what inference needs; such an adapter cannot be trained on."""


class PromptTuningAdapter(AdapterBase):
    """Learned tokens before the prompt (Lester et al. 2021)."""

    type: Literal["prompt_tuning"]
    """Prompt tuning."""
    num_virtual_tokens: Count = 8
    """Learned tokens."""
    init_text: Name | None = None
    """Text whose embeddings the learned tokens start from. Default: random words of the vocabulary."""


class PrefixTuningAdapter(AdapterBase):
    """Learned keys and values in every layer (Li and Liang 2021)."""

    type: Literal["prefix_tuning"]
    """Prefix tuning."""
    num_virtual_tokens: Count = 8
    """Learned positions."""
    prefix_projection: Flag = False
    """Compute the prefix through a small network."""
    encoder_hidden_size: Count | None = None
    """Width of that network. Default: the model's."""


class PTuningAdapter(AdapterBase):
    """Learned tokens computed by a small encoder (P-tuning, Liu et al. 2021)."""

    type: Literal["p_tuning"]
    """P-tuning."""
    num_virtual_tokens: Count = 8
    """Learned tokens."""
    encoder_reparameterization_type: Literal["MLP", "LSTM"] = "MLP"
    """Kind of the encoder."""
    encoder_hidden_size: Count | None = None
    """Width of the encoder. Default: the model's."""
    encoder_num_layers: Count = 2
    """Layers of an LSTM encoder."""
    encoder_dropout: Share = 0.0
    """Dropout of an LSTM encoder."""


class PeftAdapter(AdapterBase):
    """Any other method of the peft library, by its name and with its own keys."""

    type: Literal["peft"]
    """A method of peft that has no section of its own here."""
    peft_type: Name
    """The name in peft, such as MISS, HRA or SHIRA."""
    parameters: dict[str, Any] = {}
    """Keys of that method's config class in peft; checked against it when the model is loaded."""


Adapter = Annotated[
    LoraAdapter
    | AdaloraAdapter
    | Ia3Adapter
    | VeraAdapter
    | LohaAdapter
    | LokrAdapter
    | BoftAdapter
    | OftAdapter
    | FourierftAdapter
    | LnTuningAdapter
    | VbloraAdapter
    | PromptTuningAdapter
    | PrefixTuningAdapter
    | PTuningAdapter
    | PeftAdapter,
    Field(discriminator="type"),
]
