"""Loading of base models from a folder, the Hub or random weights, with the configured dtype and device."""

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from partita.lm.devices import seeded
from partita.lm.heads.base import (
    Head,
    fit_labels,
    has_other_labels,
    head_modules,
    is_of_head,
    is_of_pooler,
    lists_labels,
    output_layers,
)
from partita.lm.loading.number_formats import faster_dtype
from partita.lm.model_config.architectures import (
    check_loaded,
    check_numbers,
    check_pickles,
    check_tokens,
    nothing,
    scratch_config,
)
from partita.lm.model_config.context_length import read_config, scale_positions
from partita.lm.model_config.kinds import class_of_kind, model_kind
from partita.lm.precision import bitsandbytes_config
from partita.lm.transformers_internals import initialize_again
from partita.tokenizers.hub import check_intact, loading
from partita_schema.config import Config
from partita_schema.errors import ModelError
from partita_schema.sections.model import ModelParameters, ScratchModel
from partita_schema.sections.quantization import BitsandbytesQuantization

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BaseLoader:
    """Loads the base model of a config onto a device, with or without a head."""

    config: Config
    _: KW_ONLY
    source: str | None
    """Folder or Hub id; None for random weights."""
    tokenizer: "PreTrainedTokenizerFast"
    device: torch.device
    """Device of the weights."""
    saved_by_run: bool = False
    """Whether to ignore quantization and rope scaling of the config, which saved weights already include."""
    head: Head | None = None
    """Head on top of the model, with its labels; None for a model that writes text."""

    def load(self) -> "PreTrainedModel":
        """Return the model on its device, in evaluation mode. Raise ModelError if it cannot be loaded."""
        return self._new_model() if self.source is None else self._saved_model(self.source)

    def _new_model(self) -> "PreTrainedModel":
        """Create a model with random weights from the seed, drawn on the CPU so that all devices start equal."""
        base = self.config.base_model
        if not isinstance(base, ScratchModel):
            raise AssertionError("a model without a source is made from scratch")
        described = scratch_config(base, tokenizer=self.tokenizer)
        if self.config.model_parameters.rope_scaling is not None:
            scale_positions(described, self.config.model_parameters.rope_scaling)
        dtype = weights_dtype(self.config, device=self.device)
        implementation = attention(self.config.model_parameters)
        with loading("scratch", part="weights"), seeded(self.config.seed, device=torch.device("cpu")):
            auto_class = model_class(self.head, described, tokenizer=self.tokenizer)
            model = auto_class.from_config(described, dtype=torch.float32, attn_implementation=implementation)
        model.eval()
        return model.to(self.device, torch.float32 if dtype == "auto" else dtype)

    def _saved_model(self, source: str) -> "PreTrainedModel":
        """Load weights from a folder or the Hub, after checks of the files, and check what was loaded."""
        check_intact(source)
        check_pickles(source, allowed=self.config.model_parameters.pickled_weights, key="base_model")
        with loading(source, part="weights"), quiet_progress():
            described = self._checked_config(source)
            head = self._fitted_head(described, source=source)
            is_replaced = head is not None and has_other_labels(head, described, listed=self._lists_labels)
            auto_class = model_class(head, described, tokenizer=self.tokenizer)
            model, loading_info = self._from_pretrained(auto_class, described, source=source)
            if head is not None and is_replaced:
                with seeded(self.config.seed, device=torch.device("cpu")):
                    initialize_again(model, output_layers(model, size=head.size))
            check_loaded(loading_info, source=source, may_lack=self._may_lack(model))
            if getattr(model, "generation_config", None) is not None:
                check_tokens(model.generation_config, source=source, file="generation_config.json")
            check_vocabulary(model, self.tokenizer, source=source)
            keep_scale(model)
        # Quantized weights were loaded onto the device.
        return model.to(self.device) if self._quantization is None else model

    @property
    def _quantization(self) -> BitsandbytesQuantization | None:
        """The quantization that loading applies; int8 layers are made of the float32 ones of a loaded model."""
        quantization = self.config.quantization
        return quantization if isinstance(quantization, BitsandbytesQuantization) and not self.saved_by_run else None

    @property
    def _may_add_head(self) -> bool:
        """Whether a head may have random weights, which are then trained or loaded."""
        trains_all = self.config.trains and not self.saved_by_run
        return self.head is not None and (self.config.adapter is not None or trains_all)

    def _checked_config(self, source: str) -> "PretrainedConfig":
        """Return the transformers config of the checkpoint, with the configured rope scaling."""
        described = read_config(self.config, source)
        check_kind(described, head=self.head, source=source)
        check_numbers(described, source=source)
        scaling = self.config.model_parameters.rope_scaling
        if scaling is not None and not self.saved_by_run:
            scale_positions(described, scaling)
        return described

    def _fitted_head(self, described: "PretrainedConfig", *, source: str) -> Head | None:
        """Return the head with the labels in the order of the checkpoint."""
        if self.head is None:
            return None
        return fit_labels(self.head, described, source=source, listed=self._lists_labels, may_be_new=self._may_add_head)

    @property
    def _lists_labels(self) -> bool:
        """Whether the file lists the labels of the head."""
        return lists_labels(self.config)

    def _from_pretrained(
        self, auto_class: Any, described: "PretrainedConfig", *, source: str
    ) -> tuple["PreTrainedModel", dict[str, Any]]:
        """Load the weights; return the model and what transformers reports about missing and unused weights."""
        parameters = self.config.model_parameters
        with seeded(self.config.seed, device=torch.device("cpu")):  # a new head has random weights
            model, loading_info = auto_class.from_pretrained(
                source,
                config=described,
                revision=parameters.revision,
                trust_remote_code=self.config.trust_remote_code,
                dtype=weights_dtype(self.config, device=self.device),
                attn_implementation=attention(parameters),
                use_safetensors=None if parameters.pickled_weights else True,
                output_loading_info=True,
                ignore_mismatched_sizes=self.head is not None,
                **self._quantization_arguments(auto_class, described),
            )
        return model, loading_info

    def _quantization_arguments(self, auto_class: Any, described: "PretrainedConfig") -> dict[str, Any]:
        """Return the arguments of `from_pretrained` that quantize the weights; empty without quantization."""
        if self._quantization is None:
            return {}
        trained = modules_of_head(auto_class, described) if self.head is not None else ()
        return {
            "quantization_config": bitsandbytes_config(self._quantization, device=self.device, trained=trained),
            "device_map": {"": self.device},
        }

    def _may_lack(self, model: "PreTrainedModel") -> Callable[[str], bool]:
        """Return a function that says whether a checkpoint may lack a weight."""
        if self.head is not None and self.head.is_bare:
            return is_of_pooler
        return partial(is_of_head, prefix=model.base_model_prefix) if self._may_add_head else nothing


def model_class(head: Head | None, described: "PretrainedConfig", *, tokenizer: "PreTrainedTokenizerFast") -> Any:
    """Return the class of transformers that builds the model; write a head into its config.

    Args:
        head: The head; None for a model that writes text.
        described: The transformers config.
        tokenizer: Tokenizer of the model.
    """
    import transformers

    if head is None:
        return class_of_kind(model_kind(described, source="base_model"))
    head.describe(described)
    # A decoder reads the last token of a row that is not the pad token.
    described.get_text_config().pad_token_id = tokenizer.pad_token_id
    return getattr(transformers, head.auto_class)


def modules_of_head(auto_class: Any, described: "PretrainedConfig") -> list[str]:
    """Return the names of the modules that a model has for its head, without its weights."""
    with torch.device("meta"):
        return head_modules(auto_class.from_config(copy.deepcopy(described)))


def attention(parameters: ModelParameters) -> str | None:
    """Return the attention implementation for transformers; None for its default."""
    return None if parameters.attention == "auto" else parameters.attention


def weights_dtype(config: Config, *, device: torch.device) -> Any:
    """Return the dtype of the base weights; weights that are trained themselves are float32."""
    wanted = config.model_parameters.dtype
    if config.trains and config.adapter is None and wanted != "fastest":  # which a finished run may have
        if wanted in ("bfloat16", "float16"):
            logger.info("dtype: trained weights are held in float32; write mixed_precision to compute in %s", wanted)
        return torch.float32
    if wanted == "fastest":
        return faster_dtype(device).dtype
    if wanted != "auto":
        return getattr(torch, wanted)
    return torch.float32 if device.type == "cpu" else "auto"


def check_kind(described: "PretrainedConfig", *, head: Head | None, source: str) -> None:
    """Raise ModelError if the model writes no text, or cannot have a head."""
    if head is None:
        model_kind(described, source=source)
    elif described.is_encoder_decoder:
        raise ModelError(
            f"output_features: {source} is a {described.model_type} model, an encoder-decoder, which writes its "
            "answers; remove head, or choose an encoder or a causal language model"
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
