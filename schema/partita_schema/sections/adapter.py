"""Adapters: PEFT methods for training a small number of parameters on a frozen base model; a union on `type`."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from partita_schema.base import (
    ConfigModel,
    Fraction,
    InnerFraction,
    Name,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    StrictBool,
    check_regex,
    is_set,
    rule_error,
)

Names = Annotated[tuple[Name, ...], Field(min_length=1)]


class Postprocessor(ConfigModel):
    """What to do with an adapter after training."""

    merge_adapter_into_base_model: StrictBool = False
    """Merge the adapter into the base weights after training, so that `model/` is a regular model."""


class AdapterBase(ConfigModel):
    """Options of all adapters."""

    pretrained_adapter_weights: Name | None = None
    """Folder or Hub id of a trained adapter to start from. Default: a new adapter."""
    postprocessor: Postprocessor = Postprocessor.model_construct()
    """What to do with the adapter after training."""

    @model_validator(mode="after")
    def nothing_initializes_a_trained_adapter(self) -> Self:
        if self.pretrained_adapter_weights is None:
            return self
        for key in ("init", "init_text"):
            if key in type(self).model_fields and is_set(self, key):
                raise rule_error(
                    f"{key} is for a new adapter, and pretrained_adapter_weights loads a trained one; remove {key}",
                    at=key,
                )
        return self

    @model_serializer(mode="wrap")
    def without_keys_of_the_saved_adapter(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out keys that the file does not have if an adapter is loaded, whose values hold instead of defaults."""
        values: dict[str, Any] = serialize(self)
        if self.pretrained_adapter_weights is None:
            return values
        return {key: value for key, value in values.items() if key in self.model_fields_set | {"type", "postprocessor"}}


class TargetedAdapter(AdapterBase):
    """Options of adapters that are attached to selected modules."""

    target_modules: str | Names = "all-linear"
    """Modules to adapt: a list of names, a regular expression, or all-linear for every linear layer except the output
    layer."""
    modules_to_save: tuple[Name, ...] | None = None
    """Names of additional modules that are fully trained and saved with the adapter. Default: none."""

    @model_validator(mode="after")
    def patterns_are_regular_expressions(self) -> Self:
        for key in ("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"):
            value = getattr(self, key, None)
            patterns = [value] if isinstance(value, str) else list(value) if isinstance(value, dict) else []
            for pattern in patterns:
                check_regex(pattern, at=key)
        return self


class LayeredAdapter(TargetedAdapter):
    """Options of adapters that are attached to selected layers."""

    exclude_modules: str | tuple[Name, ...] | None = None
    """Modules not to adapt: a list of names or a regular expression. Default: none."""
    layers_to_transform: tuple[int, ...] | None = None
    """Indices of the layers to adapt, from 0. Default: all layers."""


class LoraBase(LayeredAdapter):
    """Options of the LoRA family."""

    alpha: Positive | None = None
    """LoRA alpha: the update is scaled by alpha / r. Default: 2 r."""
    dropout: Fraction = 0.0
    """Dropout probability of the adapter's input."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Which bias parameters are trained: none, all, or only those of adapted modules (lora_only)."""


class EvaOptions(ConfigModel):
    """Options of the EVA initialization, which uses activations on training batches (Paischer et al. 2024, section
    3)."""

    rho: Positive = 2.0
    """Maximum rank of a layer as a multiple of r when EVA redistributes ranks."""
    tau: Fraction = 0.99
    """Cosine similarity above which a component counts as converged."""
    batches: PositiveInt = 16
    """Maximum number of training batches to collect activations from."""


class LoraAdapter(LoraBase):
    """LoRA: low-rank adaptation (Hu et al. 2021), with its initializations and variants."""

    type: Literal["lora"]
    """Low-rank adaptation (LoRA)."""
    r: PositiveInt = 16
    """Rank of the update matrices."""
    use_rslora: StrictBool = False
    """Scale by alpha / sqrt(r) instead of alpha / r (rank-stabilized LoRA, Kalajdzievski 2023, theorem 3.2)."""
    use_dora: StrictBool = False
    """Train the magnitude and the direction of the weights separately (DoRA, Liu et al. 2024)."""
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
    """Initialization of the LoRA weights. pissa, olora and corda move principal components of the base weights into the
    adapter; loftq compensates for the quantization error; eva and corda use training batches."""
    eva: EvaOptions | None = None
    """Options of `init: eva`. Default: the defaults of that section."""
    loftq_bits: Literal[2, 4, 8] = 4
    """Number of quantization bits that `init: loftq` assumes."""
    loftq_iterations: PositiveInt = 1
    """Number of alternating steps of `init: loftq` (Li et al. 2023, algorithm 1)."""
    corda_method: Literal["ipm", "kpm"] = "ipm"
    """Mode of `init: corda`. ipm learns the new task faster; kpm preserves more of the model's knowledge (Yang et al.
    2024, section 3)."""
    rank_pattern: dict[str, PositiveInt] = {}
    """Ranks that override `r`, by module name or regular expression."""
    alpha_pattern: dict[str, Positive] = {}
    """Alpha values that override `alpha`, by module name or regular expression."""

    @model_validator(mode="after")
    def options_fit_the_init(self) -> "LoraAdapter":
        owners = {"eva": "eva", "loftq_bits": "loftq", "loftq_iterations": "loftq", "corda_method": "corda"}
        for key, init in owners.items():
            if is_set(self, key) and self.init != init:
                raise rule_error(f"{key} has no effect without init: {init}; remove it or write init: {init}", at=key)
        return self


class AdaloraAdapter(LoraBase):
    """AdaLoRA: LoRA that shifts its rank budget to the layers that need it (Zhang et al. 2023)."""

    type: Literal["adalora"]
    """LoRA with an adaptive rank budget (AdaLoRA)."""
    target_r: PositiveInt = 8
    """Average rank at the end of training."""
    init_r: PositiveInt = 12
    """Rank at the start of training; above target_r."""
    tinit: NonNegative = 0
    """Warm-up before pruning starts: a number of optimizer steps, or a fraction of all steps if below 1."""
    tfinal: NonNegative = 0
    """Final fine-tuning after pruning ends: a number of optimizer steps, or a fraction of all steps if below 1."""
    delta_t: PositiveInt = 1
    """Optimizer steps between two budget allocations."""
    beta1: InnerFraction = 0.85
    """Smoothing factor (EMA) of the sensitivity."""
    beta2: InnerFraction = 0.85
    """Smoothing factor (EMA) of the uncertainty."""
    orth_reg_weight: NonNegative = 0.5
    """Coefficient of the orthogonality penalty in the loss."""

    @model_validator(mode="after")
    def rank_shrinks(self) -> "AdaloraAdapter":
        if self.init_r <= self.target_r:
            raise rule_error(
                f"init_r {self.init_r} is not above target_r {self.target_r}; adalora only shrinks ranks, "
                f"write init_r of at least {self.target_r + 1}",
                at="init_r" if is_set(self, "init_r") else "target_r",
            )
        return self


class Ia3Adapter(TargetedAdapter):
    """IA3: learned rescaling of activations (Liu et al. 2022)."""

    type: Literal["ia3"]
    """Learned rescaling of activations (IA3)."""
    target_modules: str | Names | None = None  # type: ignore[assignment]  # peft has its own default
    """Modules to rescale: a list of names or a regular expression. Default: peft's choice for the architecture,
    otherwise all linear layers."""
    feedforward_modules: str | tuple[Name, ...] | None = None
    """Which of the target modules are feed-forward layers; IA3 rescales their input instead of their output."""


class VeraAdapter(TargetedAdapter):
    """VeRA: trained scaling vectors on shared, frozen random matrices (Kopiczko et al. 2023)."""

    type: Literal["vera"]
    """Vector-based random matrix adaptation (VeRA)."""
    layers_to_transform: tuple[int, ...] | None = None
    """Indices of the layers to adapt, from 0. Default: all layers."""
    r: PositiveInt = 256
    """Rank of the shared random matrices."""
    dropout: Fraction = 0.0
    """Dropout probability of the adapter's input."""
    d_initial: Fraction = 0.1
    """Initial value of the scaling vector d."""
    projection_prng_key: int = 0
    """Random seed of the shared matrices."""
    save_projection: StrictBool = True
    """Save the shared matrices with the adapter. false: they are recomputed from the seed on loading."""


class LycorisAdapter(LayeredAdapter):
    """Options of the adapters that peft adopted from LyCORIS."""

    r: PositiveInt = 8
    """Rank of each factor."""
    alpha: Positive | None = None
    """Scaling: the update is multiplied by alpha / r. Default: 2 r."""
    rank_dropout: Fraction = 0.0
    """Probability that a rank dimension is dropped during training."""
    module_dropout: Fraction = 0.0
    """Probability that a whole adapter module is skipped in a training step."""


class LohaAdapter(LycorisAdapter):
    """LoHa: Hadamard product of low-rank matrices (Hyeon-Woo et al. 2021)."""

    type: Literal["loha"]
    """Low-rank Hadamard product (LoHa)."""


class LokrAdapter(LycorisAdapter):
    """LoKr: low-rank Kronecker product (Edalati et al. 2022)."""

    type: Literal["lokr"]
    """Low-rank Kronecker product (LoKr)."""
    decompose_both: StrictBool = False
    """Also factorize the left matrix of the Kronecker product."""
    decompose_factor: int = Field(default=-1, strict=True, ge=-1)
    """Size of the left Kronecker factor; -1 chooses the most square factorization."""


class BoftAdapter(LayeredAdapter):
    """BOFT: orthogonal fine-tuning with butterfly factorization (Liu et al. 2023)."""

    type: Literal["boft"]
    """Butterfly orthogonal fine-tuning (BOFT)."""
    boft_block_size: NonNegativeInt = 4
    """Size of a rotation block; must divide the input width of the layer. 0: computed from boft_block_num."""
    boft_block_num: NonNegativeInt = 0
    """Number of rotation blocks per layer. 0: computed from boft_block_size."""
    boft_n_butterfly_factor: PositiveInt = 1
    """Number of butterfly factors. More than 1 needs peft's CUDA extension, which is compiled at the start."""
    boft_dropout: Fraction = 0.0
    """Multiplicative dropout probability."""
    bias: Literal["none", "all", "boft_only"] = "none"
    """Which bias parameters are trained: none, all, or only those of adapted modules."""

    @model_validator(mode="after")
    def block_size_or_number(self) -> "BoftAdapter":
        if (self.boft_block_size == 0) == (self.boft_block_num == 0):
            raise rule_error(
                f"boft_block_size is {self.boft_block_size} and boft_block_num is {self.boft_block_num}; "
                "write one of them, and 0 for the other",
                at="boft_block_num" if is_set(self, "boft_block_num") else "boft_block_size",
            )
        return self


class OftAdapter(LayeredAdapter):
    """OFT: orthogonal fine-tuning, which rotates the weights (Qiu et al. 2023)."""

    type: Literal["oft"]
    """Orthogonal fine-tuning (OFT)."""
    r: NonNegativeInt = 0
    """Number of rotation blocks per layer. 0: computed from oft_block_size."""
    oft_block_size: NonNegativeInt = 32
    """Size of a rotation block; must divide the input width of the layer. 0: computed from r."""
    coft: StrictBool = False
    """Constrained OFT: keep the rotation within `eps` of the identity."""
    eps: Positive = 6e-5
    """Maximum deviation from the identity; used with `coft`."""
    block_share: StrictBool = False
    """Share one rotation block across all blocks of a layer."""

    @model_validator(mode="after")
    def block_size_or_number(self) -> "OftAdapter":
        if (self.r == 0) == (self.oft_block_size == 0):
            raise rule_error(
                f"r is {self.r} and oft_block_size is {self.oft_block_size}; write one of them, and 0 for the other",
                at="r" if is_set(self, "r") else "oft_block_size",
            )
        return self


class FourierftAdapter(LayeredAdapter):
    """FourierFT: a weight update given by a few Fourier coefficients (Gao et al. 2024)."""

    type: Literal["fourierft"]
    """Discrete Fourier fine-tuning (FourierFT)."""
    n_frequency: PositiveInt = 1000
    """Number of trained frequencies per layer; at most the number of weights in the layer."""
    scaling: Positive = 150.0
    """Factor that the update is multiplied by."""
    random_loc_seed: int = 777
    """Random seed of the positions of the trained frequencies."""


class LnTuningAdapter(AdapterBase):
    """Layer-norm tuning: only the normalization layers are trained (Zhao et al. 2023)."""

    type: Literal["ln_tuning"]
    """Layer-norm tuning."""
    target_modules: str | Names | None = None
    """Normalization modules to train: a list of names or a regular expression. Default: peft's choice for the
    architecture."""
    modules_to_save: tuple[Name, ...] | None = None
    """Names of additional modules that are fully trained and saved with the adapter. Default: none."""


class VbloraAdapter(LayeredAdapter):
    """VB-LoRA: low-rank updates composed from one shared vector bank (Li et al. 2024)."""

    type: Literal["vblora"]
    """Vector-bank LoRA (VB-LoRA)."""
    r: PositiveInt = 4
    """Rank of the update matrices."""
    num_vectors: PositiveInt = 256
    """Number of vectors in the bank."""
    vector_length: PositiveInt = 256
    """Length of a vector in the bank; must divide the input and output widths of the adapted layers."""
    topk: PositiveInt = 2
    """Number of vectors from the bank that are mixed for each sub-vector."""
    dropout: Fraction = 0.0
    """Dropout probability of the adapter's input."""
    save_only_topk_weights: StrictBool = False
    """Save only the weights needed for inference. Such an adapter cannot be trained further."""


class PromptTuningAdapter(AdapterBase):
    """Prompt tuning: trained virtual tokens before the prompt (Lester et al. 2021)."""

    type: Literal["prompt_tuning"]
    """Prompt tuning."""
    num_virtual_tokens: PositiveInt = 8
    """Number of virtual tokens before the prompt."""
    init_text: Name | None = None
    """Text whose embeddings initialize the virtual tokens. Default: random tokens of the vocabulary."""


class PrefixTuningAdapter(AdapterBase):
    """Prefix tuning: trained keys and values in every layer (Li and Liang 2021)."""

    type: Literal["prefix_tuning"]
    """Prefix tuning."""
    num_virtual_tokens: PositiveInt = 8
    """Number of virtual token positions in each layer."""
    prefix_projection: StrictBool = False
    """Compute the prefix with a small MLP."""
    encoder_hidden_size: PositiveInt | None = None
    """Hidden size of that MLP. Default: the hidden size of the model."""


class PTuningAdapter(AdapterBase):
    """P-tuning: virtual tokens computed by a small trained encoder (Liu et al. 2021)."""

    type: Literal["p_tuning"]
    """P-tuning."""
    num_virtual_tokens: PositiveInt = 8
    """Number of virtual tokens before the prompt."""
    encoder_reparameterization_type: Literal["MLP", "LSTM"] = "MLP"
    """Type of the prompt encoder."""
    encoder_hidden_size: PositiveInt | None = None
    """Hidden size of the encoder. Default: the hidden size of the model."""
    encoder_num_layers: PositiveInt = 2
    """Number of layers of an LSTM encoder."""
    encoder_dropout: Fraction = 0.0
    """Dropout probability of an LSTM encoder."""


class PeftAdapter(AdapterBase):
    """Any other PEFT method, selected by its name in peft and configured with peft's own keys."""

    type: Literal["peft"]
    """A PEFT method without a dedicated section here."""
    peft_type: Name
    """Name of the method in peft (`PeftType`), such as MISS, HRA or SHIRA."""
    parameters: dict[str, Any] = {}
    """Arguments of the method's config class in peft; checked when the model is loaded."""


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
