"""Loading of base models from a folder, the Hub or random weights, with the configured dtype and device."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from partita.distributed.init import local_device_index
from partita.lm.architectures import check_loaded, check_numbers, check_pickles, check_tokens, scratch_config
from partita.lm.onednn_linear import keep_few_kernels
from partita.lm.precision import bitsandbytes_config, faster_dtype
from partita.tokenizers.hub import check_intact, find_base, loading
from partita_schema.config import Config
from partita_schema.errors import ModelError
from partita_schema.sections.model import EmbeddingBagModel, ModelParameters, RopeScaling, ScratchModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

logger = logging.getLogger(__name__)


@contextmanager
def seeded(seed: int, *, device: torch.device) -> Iterator[None]:
    """Seed torch on the CPU and on `device` in this context, and restore the random state on exit."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    states = [generator.get_state() for generator in generators]
    # MPS has functions for its generator, but not the generator itself.
    mps_state = torch.mps.get_rng_state() if device.type == "mps" else None
    try:
        for generator in generators:
            generator.manual_seed(seed)
        if mps_state is not None:
            torch.mps.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        if mps_state is not None:
            torch.mps.set_rng_state(mps_state)


def find_device(parameters: ModelParameters) -> torch.device:
    """Return the configured device; auto is the first accelerator that torch finds.

    On CUDA the allocator is set to expandable segments, if CUDA is not initialized yet. On a CPU the oneDNN kernel
    cache is limited.

    Raises:
        ModelError: The device does not exist.
    """
    device = asked_device(parameters)
    if device.type == "cuda":
        grow_segments()
    elif device.type == "cpu":
        keep_few_kernels()
    return device


def grow_segments() -> None:
    """Enable expandable segments of CUDA's allocator, unless the user configured it or CUDA is initialized."""
    chosen = any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    # On other platforms torch only warns that it is not supported.
    able = sys.platform == "linux" and torch.version.hip is None
    begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch has no types there
    if able and not chosen and not begun:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def asked_device(parameters: ModelParameters) -> torch.device:
    """Return the configured device without setting it up. Raise ModelError if it does not exist."""
    wanted = parameters.device
    if wanted == "auto":
        for kind in ("cuda", "xpu", "mps"):
            if is_there(kind):
                return torch.device(kind, local_device_index(kind)) if kind != "mps" else torch.device(kind)
        return torch.device("cpu")
    device = torch.device(wanted)
    if device.type in ("cuda", "xpu") and device.index is None:
        device = torch.device(device.type, local_device_index(device.type) if is_there(device.type) else 0)
    if device.type != "cpu" and not is_there(device.type):
        raise ModelError(f"model_parameters.device: torch sees no {device.type} device here; write auto or cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(
            f"model_parameters.device: there is no {wanted}; torch sees {torch.cuda.device_count()} cuda devices"
        )
    return device


def is_there(kind: str) -> bool:
    """Return whether torch finds a device of this type."""
    backend = torch.backends.mps if kind == "mps" else getattr(torch, kind)
    return bool(backend.is_available())


def load_base(
    config: Config,
    *,
    source: str | None,
    tokenizer: "PreTrainedTokenizerFast",
    device: torch.device,
    plain: bool = False,
) -> "PreTrainedModel":
    """Load the base model onto its device, in evaluation mode.

    Args:
        config: The config.
        source: Folder or Hub id; None for random weights.
        tokenizer: Tokenizer of the model.
        device: Device of the weights.
        plain: Whether to ignore quantization and rope scaling of the config, which saved weights already include.

    Raises:
        ModelError: The model cannot be loaded.
    """
    parameters = config.model_parameters
    scaling = None if plain else parameters.rope_scaling
    if source is None:
        if not isinstance(config.base_model, ScratchModel):
            raise AssertionError("a model without a source is made from scratch")
        return new_model(config, config.base_model, tokenizer=tokenizer, device=device)
    check_intact(source)
    check_pickles(source, allowed=parameters.pickled_weights, key="base_model")
    with loading(source, part="weights"), quiet_progress():
        from transformers import AutoConfig, AutoModelForCausalLM

        origin: dict[str, Any] = {"revision": parameters.revision, "trust_remote_code": config.trust_remote_code}
        described = AutoConfig.from_pretrained(source, **origin)
        check_decoder(described, source=source)
        check_numbers(described, source=source)
        if scaling is not None:
            scale_positions(described, scaling)
        quantization: dict[str, Any] = {}
        if config.quantization is not None and not plain:
            quantization = {
                "quantization_config": bitsandbytes_config(config.quantization, device=device),
                "device_map": {"": device},
            }
        model, loading_info = AutoModelForCausalLM.from_pretrained(
            source,
            config=described,
            dtype=weights_dtype(config, device=device),
            attn_implementation=attention(parameters),
            use_safetensors=None if parameters.pickled_weights else True,
            output_loading_info=True,
            **origin,
            **quantization,
        )
        check_loaded(loading_info, source=source)
        if model.generation_config is not None:
            check_tokens(model.generation_config, source=source, file="generation_config.json")
        check_vocabulary(model, tokenizer, source=source)
        keep_scale(model)
    return model if quantization else model.to(device)


def new_model(
    config: Config, base: ScratchModel, *, tokenizer: "PreTrainedTokenizerFast", device: torch.device
) -> "PreTrainedModel":
    """Create a model with random weights from the seed, drawn on the CPU so that all devices start equal.

    Args:
        config: The config.
        base: The new model's section.
        tokenizer: Tokenizer, whose size is that of the vocabulary.
        device: Device of the weights.
    """
    from transformers import AutoModelForCausalLM

    described = scratch_config(base, tokenizer=tokenizer)
    parameters = config.model_parameters
    if parameters.rope_scaling is not None:
        scale_positions(described, parameters.rope_scaling)
    dtype = weights_dtype(config, device=device)
    with loading("scratch", part="weights"), seeded(config.seed, device=torch.device("cpu")):
        model = AutoModelForCausalLM.from_config(
            described, dtype=torch.float32, attn_implementation=attention(parameters)
        )
    model.eval()
    return model.to(device, torch.float32 if dtype == "auto" else dtype)


def attention(parameters: ModelParameters) -> str | None:
    """Return the attention implementation for transformers; None for its default."""
    return None if parameters.attention == "auto" else parameters.attention


def weights_dtype(config: Config, *, device: torch.device) -> Any:
    """Return the dtype of the base weights; weights that are trained themselves are float32."""
    wanted = config.model_parameters.dtype
    if config.trains and config.adapter is None:
        if wanted in ("bfloat16", "float16"):
            logger.info("dtype: trained weights are held in float32; write mixed_precision to compute in %s", wanted)
        return torch.float32
    if wanted == "fastest":
        return faster_dtype(device)
    if wanted != "auto":
        return getattr(torch, wanted)
    return torch.float32 if device.type == "cpu" else "auto"


def check_decoder(described: "PretrainedConfig", *, source: str) -> None:
    """Raise ModelError for encoders, which transformers would load as a decoder with a warning."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    encoder = described.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(described, "is_decoder", False)
    if encoder or getattr(described, "is_encoder_decoder", False):
        raise ModelError(
            f"base_model: {source} is a {described.model_type} model, an encoder that writes no text; "
            "choose a decoder-only (causal) language model"
        )


def check_vocabulary(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerFast", *, source: str) -> None:
    """Raise ModelError if the tokenizer has tokens without an embedding."""
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ModelError(
            f"base_model: {source}: its tokenizer has {len(tokenizer)} tokens and its embedding {rows}; "
            "the files do not belong together"
        )


def keep_scale(model: "PreTrainedModel") -> None:
    """Stop RWKV from halving its weights in place in evaluation mode, which would change saved weights.

    The halving prevents overflow in float16 and is undone in the computation, so outputs are the same.
    """
    if getattr(model.config, "rescale_every", 0) and model.dtype != torch.float16:
        model.config.rescale_every = 0


def scale_positions(described: "PretrainedConfig", scaling: RopeScaling) -> None:
    """Write the configured rope scaling into a model's config, and extend its maximum length."""
    own = getattr(described, "rope_parameters", None)
    if not own:
        raise ModelError(
            f"model_parameters.rope_scaling: a {described.model_type} model has no rotary positions; remove it"
        )
    settings = scaling.model_dump(exclude_none=True, exclude={"type"})
    settings |= {key: list(value) for key, value in settings.items() if isinstance(value, tuple)}
    described.rope_parameters = {**own, **settings, "rope_type": scaling.type}
    trained = scaling.original_max_position_embeddings or described.max_position_embeddings
    if scaling.factor is not None and scaling.type != "dynamic":
        described.rope_parameters.setdefault("original_max_position_embeddings", trained)
        described.max_position_embeddings = round(trained * scaling.factor)


def context_length(model: "PreTrainedModel", *, virtual_tokens: int) -> int | None:
    """Return the maximum sequence length in tokens without virtual tokens; None without limit."""
    return described_length(model.config, virtual_tokens=virtual_tokens)


def described_length(described: "PretrainedConfig", *, virtual_tokens: int) -> int | None:
    """Return the context length of a model with this config.json, without virtual tokens; None without limit."""
    described = described.get_text_config()
    limit = getattr(described, "max_position_embeddings", None)
    if limit is None or limit < 0:  # XLNet's is -1
        return None
    scaling = getattr(described, "rope_parameters", None) or {}
    if scaling.get("rope_type") == "dynamic":
        limit = round(limit * scaling.get("factor", 1))
    return int(limit) - virtual_tokens


def configured_context_length(config: Config, *, folder: Path) -> int | None:
    """Return the context length that the configured model will have, without loading its weights.

    Args:
        config: The configuration.
        folder: Base of relative paths in the configuration.

    Raises:
        ModelError: The model's config.json cannot be read.
    """
    base = config.base_model
    virtual_tokens = getattr(config.adapter, "num_virtual_tokens", 0)
    if isinstance(base, EmbeddingBagModel):
        return None
    if isinstance(base, ScratchModel):
        return base.context_length - virtual_tokens
    source = find_base(base, folder=folder)
    with loading(source, part="config"):
        from transformers import AutoConfig

        parameters = config.model_parameters
        described = AutoConfig.from_pretrained(
            source, revision=parameters.revision, trust_remote_code=config.trust_remote_code
        )
        if parameters.rope_scaling is not None:
            scale_positions(described, parameters.rope_scaling)
    return described_length(described, virtual_tokens=virtual_tokens)


@contextmanager
def quiet_progress() -> Iterator[None]:
    """Disable progress bars in this context."""
    from transformers.utils import logging as library

    before = library.is_progress_bar_enabled()
    library.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            library.enable_progress_bar()


def local_folder(source: str | None) -> Path | None:
    """Return the path if the source is a local folder, else None."""
    return Path(source) if source is not None and Path(source).is_dir() else None
