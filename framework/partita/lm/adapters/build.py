"""Conversion of the adapter section to a peft config, and its application to a base model.

Errors of peft are converted to a ModelError that names the modules of the model.
"""

import difflib
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from partita.lm.adapters.continued import check_continued, new_dropout, read_config
from partita.lm.adapters.inits import initialize, linear_targets, prepare_init
from partita.lm.adapters.methods import LAYERED, NAMES
from partita.lm.adapters.names import check_names, check_tied_modules
from partita.lm.heads.base import Head, head_modules
from partita.lm.model_config.architectures import check_pickles
from partita.lm.precision import bridge_types
from partita.tokenizers.hub import check_intact, loading
from partita_schema.errors import ModelError
from partita_schema.rules.encoder_decoders import VIRTUAL_TOKENS
from partita_schema.sections import adapter as schema
from partita_trainers.base import Batch
from partita_trainers.libraries.bitsandbytes_import import import_bitsandbytes

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

LINEAR = ("Linear", "Conv1D", "Linear4bit", "Linear8bitLt")
INHERITED = ("peft_type", "task_type", "auto_mapping", "inference_mode", "base_model_name_or_path", "peft_version")
"""Keys of every peft config that a config cannot set."""
ON_EMBEDDING = ("TRAINABLE_TOKENS",)
"""Methods of peft whose target modules are by default the input embedding."""


def add_adapter(
    model: "PreTrainedModel",
    adapter: schema.Adapter,
    *,
    batches: Callable[[], Iterable[Batch]] | None,
    original_weights: Callable[[], dict[str, Any]],
    tokenizer: Any,
    head: Head | None = None,
) -> "PeftModel":
    """Add a new adapter to a model; only the adapter requires gradients.

    Random numbers are drawn from torch's global state.

    Args:
        model: The base model.
        adapter: The adapter section.
        batches: Returns training batches, for inits that depend on data.
        original_weights: Returns the weights before quantization, for LoftQ.
        tokenizer: Tokenizer, for the init text of prompt tuning.
        head: Head on top of the model, which is trained whole.

    Raises:
        ModelError: The adapter does not fit the model.
    """
    import_bitsandbytes()
    from peft import get_peft_model

    settings = peft_config(adapter, model=model)
    if head is not None:
        train_head(settings, head, model=model)
    elif model.config.is_encoder_decoder and settings.is_prompt_learning:
        raise ModelError(f"adapter.type: {VIRTUAL_TOKENS.format(adapter.type)}")
    with peft_errors(model, adapter):
        prepare_init(model, settings, adapter, batches=batches)
        own = {id(parameter) for parameter in model.parameters()}
        modules = [name for name, _ in model.named_modules()]
        adapted = get_peft_model(model, settings)
        check_butterfly_factors(adapted, settings)
        check_names(adapted, adapter, modules)
        hold_in_float32(adapted, own=own)
        bridge_types(adapted, dtype=model.dtype)
        check_tied_modules(adapted, try_out(adapted))
        initialize(adapted, adapter, batches=batches, original_weights=original_weights, tokenizer=tokenizer)
    trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    if not trained:
        raise ModelError(f"adapter: nothing is trained by type {adapter.type}; the model has {linear_names(model)}")
    logger.info("adapter %s: %s trained parameters", adapter.type, f"{trained:,}")
    return adapted


def check_butterfly_factors(adapted: "PeftModel", settings: "PeftConfig") -> None:
    """Raise ModelError if peft has reduced the number of butterfly factors of BOFT to 1, as without its extension."""
    wanted = getattr(settings, "boft_n_butterfly_factor", 1)
    if wanted != 1 and any(len(part) != wanted for name, part in adapted.named_parameters() if ".boft_R." in name):
        raise ModelError(
            f"adapter.boft_n_butterfly_factor: peft computes {wanted} factors only with a CUDA extension, which it "
            "could not compile here; write 1"
        )


def train_head(settings: "PeftConfig", head: Head, *, model: "PreTrainedModel") -> None:
    """Write into a peft config that the head is trained whole, and saved with the adapter. Raise ModelError."""
    if not hasattr(settings, "modules_to_save"):
        raise ModelError(f"adapter: {settings.peft_type.value.lower()} does not train the head; write type: lora")
    settings.task_type = head.task_type
    if head.is_bare:
        return
    settings.modules_to_save = list(dict.fromkeys([*(settings.modules_to_save or ()), *head_modules(model)]))


@torch.no_grad()
def try_out(adapted: "PeftModel") -> set[nn.Module]:
    """Run a forward pass over two tokens: some adapters fail only then, for example on 4-bit weights.

    Returns:
        The modules that it has called.
    """
    device = next(adapted.parameters()).device
    adapted.eval()
    ids_12 = torch.zeros(1, 2, dtype=torch.int64, device=device)
    more = {"decoder_input_ids": ids_12} if adapted.get_base_model().config.is_encoder_decoder else {}
    called = set[nn.Module]()
    hooks = [module.register_forward_pre_hook(lambda module, _: called.add(module)) for module in adapted.modules()]
    try:
        adapted(input_ids=ids_12, use_cache=False, **more)
    finally:
        for hook in hooks:
            hook.remove()
    return called


def read_adapter(
    model: "PreTrainedModel", source: str, adapter: schema.Adapter | None, *, trainable: bool, pickles: bool = False
) -> "PeftModel":
    """Load the adapter of a folder or Hub id onto a model.

    Args:
        model: The base model.
        source: Folder or Hub id of the adapter.
        adapter: The adapter section, whose dropout is used in training.
        trainable: Whether the adapter requires gradients.
        pickles: Whether pickled weights are allowed.

    Raises:
        ModelError: The adapter cannot be loaded, or is not the one that the section describes.
    """
    import_bitsandbytes()
    from peft import PeftModel
    from peft.utils import load_peft_weights, set_peft_model_state_dict

    own = {id(parameter) for parameter in model.parameters()}
    check_intact(source, key="adapter")
    check_pickles(source, allowed=pickles, key="adapter", safe="adapter_model.safetensors")
    settings = read_config(source)
    if getattr(settings, "megatron_config", None):
        # peft would import any module that the config names as megatron_core.
        raise ModelError(f"adapter: {source}: its adapter_config.json has a megatron_config, which is not supported")
    if adapter is not None:
        check_type(settings, adapter, source=source)
        if adapter.pretrained_adapter_weights is not None:
            check_continued(
                adapter,
                settings,
                linear_layers=linear_targets(model),
                head=head_modules(model),
                source=source,
                trainable=trainable,
            )
        for key, value in new_dropout(adapter, settings).items():
            setattr(settings, key, value)
    with loading(source, part="adapter", key="adapter"), logged_warnings():
        adapted = PeftModel.from_pretrained(model, source, is_trainable=trainable, config=settings)
        if hold_in_float32(adapted, own=own):  # their values were rounded when loaded
            set_peft_model_state_dict(adapted, load_peft_weights(source, device="cpu"))
        bridge_types(adapted, dtype=model.dtype)
        return adapted


def hold_in_float32(adapted: "PeftModel", *, own: set[int]) -> bool:
    """Convert 16-bit parameters whose ids are not in `own` to float32; return whether there were any."""
    added = [parameter for parameter in adapted.parameters() if id(parameter) not in own]
    half = [parameter for parameter in added if parameter.dtype in (torch.bfloat16, torch.float16)]
    for parameter in half:
        parameter.data = parameter.data.float()
    return bool(half)


def check_type(settings: "PeftConfig", adapter: schema.Adapter, *, source: str) -> None:
    """Raise ModelError if a saved adapter has another type than the section."""
    loaded = str(settings.peft_type.value)
    wanted = adapter.peft_type.upper() if isinstance(adapter, schema.PeftAdapter) else NAMES[adapter.type][0]
    if loaded != wanted:
        types = {name: ours for ours, (name, _) in NAMES.items()}
        raise ModelError(
            f"adapter.type: the adapter in {source} is {loaded}; "
            f"write type: {types.get(loaded, f'peft, peft_type: {loaded}')}"
        )


def peft_config(adapter: schema.Adapter, *, model: "PreTrainedModel") -> "PeftConfig":
    """Convert the section to a peft config.

    Raises:
        ModelError: peft rejects a value.
    """
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    if isinstance(adapter, schema.PeftAdapter):
        return any_config(adapter, PEFT_TYPE_TO_CONFIG_MAPPING, task=task_type(model))
    name, keys = NAMES[adapter.type]
    values = {theirs: getattr(adapter, ours) for ours, theirs in keys.items()}
    values |= {key: tuple_to_list(getattr(adapter, key)) for key in LAYERED if hasattr(adapter, key)}
    if values.get("layers_to_transform") is not None and values["target_modules"] == "all-linear":
        values["target_modules"] = linear_suffixes(model)  # peft requires names to select layers by number
    values |= special_values(adapter, model=model)
    config_class = PEFT_TYPE_TO_CONFIG_MAPPING[name]
    with peft_errors(model, adapter):
        return config_class(task_type=task_type(model), **values)


def task_type(model: "PreTrainedModel") -> str:
    """Return peft's name of what the model does."""
    return "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"


def special_values(adapter: schema.Adapter, *, model: "PreTrainedModel") -> dict[str, Any]:
    """Return config values that are not copied key by key."""
    match adapter:
        case schema.LoraAdapter():
            patterns = {"rank_pattern": dict(adapter.rank_pattern), "alpha_pattern": dict(adapter.alpha_pattern)}
            return {"lora_alpha": alpha(adapter), **patterns, **init_values(adapter)}
        case schema.AdaloraAdapter():
            # The number of steps is known only when training starts; see adalora.py.
            scale = adapter.alpha or 2 * adapter.init_r
            return {"lora_alpha": scale, "total_step": 2**31, "tinit": 0, "tfinal": 0}
        case schema.LohaAdapter() | schema.LokrAdapter():
            return {"alpha": alpha(adapter)}
        case schema.FourierftAdapter():
            return {"init_weights": True}  # peft's name for a zero update
        case schema.Ia3Adapter():
            return ia3_targets(adapter, model)
        case schema.LnTuningAdapter():
            return {"target_modules": tuple_to_list(adapter.target_modules) or norm_names(model)}
    return {}


def init_values(adapter: schema.LoraAdapter) -> dict[str, Any]:
    """Return the LoRA init in peft's terms. LoftQ is our own: peft's needs CUDA and ignores the LoRA scale."""
    if adapter.init in ("default", "loftq"):
        return {"init_lora_weights": True}
    if adapter.init == "eva":
        from peft import EvaConfig

        options = adapter.eva or schema.EvaOptions()
        return {"init_lora_weights": "eva", "eva_config": EvaConfig(rho=options.rho, tau=options.tau)}
    if adapter.init == "corda":
        from peft.tuners.lora.config import CordaConfig

        return {"init_lora_weights": "corda", "corda_config": CordaConfig(corda_method=adapter.corda_method)}
    return {"init_lora_weights": adapter.init}


def alpha(adapter: schema.LoraAdapter | schema.LohaAdapter | schema.LokrAdapter) -> float:
    """Return alpha, by default 2 r; whole numbers are ints in saved configs."""
    value = 2 * adapter.r if adapter.alpha is None else adapter.alpha
    return int(value) if value == int(value) else value


def ia3_targets(adapter: schema.Ia3Adapter, model: "PreTrainedModel") -> dict[str, Any]:
    """Return peft's default target modules if it knows the architecture, else all linear layers."""
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING as KNOWN

    feedforward = tuple_to_list(adapter.feedforward_modules)
    if adapter.target_modules is None and feedforward is None and model.config.model_type in KNOWN:
        return {}
    targets = tuple_to_list(adapter.target_modules) or "all-linear"
    return {"target_modules": targets, "feedforward_modules": feedforward or []}


def any_config(adapter: schema.PeftAdapter, known: dict[Any, Any], *, task: str) -> "PeftConfig":
    """Create a peft config by the name of its method. Raise ModelError for an unknown name or key.

    Args:
        adapter: The adapter section.
        known: Config classes by method.
        task: peft's name of what the model does.
    """
    names = {str(name.value): name for name in known}
    wanted = adapter.peft_type.upper()
    if wanted not in names:
        raise ModelError(f"adapter.peft_type: peft has no {adapter.peft_type}; {nearest(wanted, names)}")
    config_class = known[names[wanted]]
    allowed = {field.name for field in fields(config_class) if field.init} - set(INHERITED)
    for key in adapter.parameters:
        if key not in allowed:
            raise ModelError(f"adapter.parameters: {wanted} has no key {key}; {nearest(key, allowed)}")
    on_layers = "target_modules" in allowed and wanted not in ON_EMBEDDING
    defaults = {"target_modules": "all-linear"} if on_layers else {}
    try:
        return config_class(task_type=task, **(defaults | adapter.parameters))
    except (TypeError, ValueError) as error:
        raise ModelError(f"adapter.parameters: {wanted}: {error}") from error


def nearest(word: str, known: Iterable[str]) -> str:
    """Suggest the most similar known name, or list all."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"it has {', '.join(names)}"


def tuple_to_list(value: Any) -> Any:
    """Convert tuples to lists, which peft writes to JSON."""
    return list(value) if isinstance(value, tuple) else value


def norm_names(model: nn.Module) -> list[str]:
    """Return the last name parts of all normalization layers."""
    return sorted(
        {name.rpartition(".")[2] for name, layer in model.named_modules() if "norm" in type(layer).__name__.lower()}
    )


def linear_suffixes(model: "PreTrainedModel") -> list[str]:
    """Return the last name parts of all linear layers except the output layer."""
    return sorted({name.rpartition(".")[2] for name in linear_targets(model)})


def linear_names(model: nn.Module) -> str:
    """Describe the linear layers by their last name parts, for messages."""
    names = {name.rpartition(".")[2] for name, layer in model.named_modules() if type(layer).__name__ in LINEAR}
    return f"the linear layers {', '.join(sorted(names))}"


@contextmanager
def peft_errors(model: nn.Module, adapter: schema.Adapter) -> Iterator[None]:
    """Convert exceptions of peft into a ModelError, and log its warnings."""
    linear_layers = linear_names(model)
    try:
        with logged_warnings():
            yield
    except (ValueError, TypeError, RuntimeError, LookupError, AttributeError, AssertionError) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        if "not found in the base model" in text or "No modules were targeted" in text:
            key = "target_modules" if not getattr(adapter, "layers_to_transform", None) else "layers_to_transform"
            value = getattr(adapter, key, None)
            shown = list(value) if isinstance(value, tuple) else value
            raise ModelError(f"adapter.{key}: {shown} matches no module; the model has {linear_layers}") from error
        raise ModelError(f"adapter: {adapter.type} does not fit this model: {text[:400]}") from error


@contextmanager
def logged_warnings() -> Iterator[None]:
    """Log warnings, except those addressed to library authors."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            shown = [one for one in caught if not issubclass(one.category, FutureWarning | DeprecationWarning)]
            for text in dict.fromkeys(" ".join(str(warning.message).split()) for warning in shown):
                logger.info("%s", text)
