"""Loading of a model with its adapter: the model of the config, or one that `save` wrote."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from partita.lm.adapters.build import add_adapter, read_adapter
from partita.lm.adapters.inits import initial_adapter
from partita.lm.adapters.lora_linear import fuse_lora
from partita.lm.batch_generation.generation import reset_generation_config
from partita.lm.devices import find_device, seeded
from partita.lm.encoder_decoder.model import EncoderDecoderModel
from partita.lm.head_model import HeadModel
from partita.lm.heads.base import Head, labels_of_outputs, lists_labels, other_labels
from partita.lm.huggingface import HuggingFaceModel
from partita.lm.loading.base_models import BaseLoader
from partita.lm.loading.number_formats import quantize_faster_layers
from partita.lm.model_config.kinds import ModelKind, model_kind
from partita.lm.precision import choose_kernels
from partita.lm.reward_model import RewardModel
from partita.lm.training.freezing import freeze, recompute_activations
from partita.tokenizers.hub import quiet_libraries
from partita.tokenizers.saved_adapters import RecordedBase, find_sources
from partita_schema.config import Config
from partita_schema.errors import ModelError
from partita_schema.sections.adapter import Adapter
from partita_schema.sections.quantization import DynamicInt8Quantization
from partita_schema.sections.trainer import FinetuneTrainer
from partita_trainers.base import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

INT8 = "quantization.type: {}; {}"
MODELS: dict[ModelKind, type[HuggingFaceModel]] = {"decoder": HuggingFaceModel, "encoder-decoder": EncoderDecoderModel}
"""The class of each kind of model."""


def load_model(
    config: Config,
    *,
    folder: Path,
    tokenizer: "PreTrainedTokenizerFast",
    saved: Path | None = None,
    batches: Callable[[], Iterable[Batch]] | None = None,
    trainable: bool,
    head: Head | None = None,
) -> HuggingFaceModel | HeadModel:
    """Load the model of the config, or the one that `save` wrote.

    Args:
        config: The config.
        folder: Folder that relative names refer to.
        tokenizer: Tokenizer of the model.
        saved: Folder of a saved model.
        batches: Returns training batches, for adapter inits that depend on data.
        trainable: Whether parameters require gradients. If False, an adapter without weights in `saved` or
            `pretrained_adapter_weights` is skipped: untrained, it has no effect.
        head: Head on top of the model; None for a model that writes text.

    Raises:
        ModelError: The model cannot be loaded.
    """
    quiet_libraries()
    device = find_device(config.model_parameters)
    source, adapter_source, saved_by_run = find_sources(config, folder=folder, saved=saved)
    if head is not None and adapter_source is not None and saved is None:
        head = head_of_adapter(head, adapter_source, listed=lists_labels(config))
    loader = BaseLoader(config, source=source, tokenizer=tokenizer, device=device, saved_by_run=saved_by_run, head=head)
    base = loader.load()
    if head is not None:
        head = head.loaded_with(base.config)
        loader = replace(loader, head=head)
    original_generation_config = reset_generation_config(base) if head is None else None
    module, initial = prepare_module(base, loader, adapter_source=adapter_source, trainable=trainable, batches=batches)
    return class_of(head, base, source=source)(
        module,
        config=config,
        tokenizer=tokenizer,
        device=device,
        source=source,
        adapter_source=adapter_source,
        initial_adapter_tensors=initial,
        original_generation_config=original_generation_config,
        saved_by_run=saved_by_run,
        trainable=trainable,
        head=head,
    )


def head_of_adapter(head: Head, source: str, *, listed: bool) -> Head:
    """Return the head with its labels in the order of a saved adapter, which holds the weights of its head.

    Args:
        head: The head, with the labels of the file or of the data.
        source: Folder or Hub id of the adapter.
        listed: Whether the file lists the labels.

    Raises:
        ModelError: The head of the adapter is for other labels.
    """
    recorded = None if head.is_bare else RecordedBase.read(Path(source))
    if recorded is None or recorded.labels is None:
        return head
    labels = labels_of_outputs(head, recorded.labels, listed=listed)
    if labels is None:
        raise ModelError(
            f"adapter.pretrained_adapter_weights: {other_labels(head, recorded.labels, source=source)}; write those of "
            "the adapter in decoder.labels, or train a new one"
        )
    return head.with_labels(labels)


def prepare_module(
    base: "PreTrainedModel",
    loader: BaseLoader,
    *,
    adapter_source: str | None,
    trainable: bool,
    batches: Callable[[], Iterable[Batch]] | None,
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Add the adapter to a base model, and prepare it for training or for answers; it is in evaluation mode.

    Args:
        base: The base model as loaded.
        loader: What loaded it.
        adapter_source: Folder or Hub id of the adapter's weights; None for new ones.
        trainable: Whether the model is trained.
        batches: Returns training batches, for adapter inits that depend on data.

    Returns:
        The module, and initial values of an adapter that moved base weights.

    Raises:
        ModelError: The adapter does not fit, or the model cannot answer with int8 weights.
    """
    config = loader.config
    # Before any forward pass, which would repack the weights. A trained model predicts with the kernels it was
    # evaluated with.
    choose_kernels(base, may_pack=not trainable and not config.trains)
    base.requires_grad_(config.adapter is None and trainable)
    # Before an adapter replaces layers: only those of the base model are quantized to int8.
    layers = {name: part for name, part in base.named_modules() if type(part) is torch.nn.Linear}
    module, initial = with_adapter(base, loader, adapter_source=adapter_source, trainable=trainable, batches=batches)
    if trainable:
        prepare_for_training(module, base, config)
    else:
        module.requires_grad_(False)
    fuse_lora(module)
    if isinstance(config.quantization, DynamicInt8Quantization):
        check_int8(base, loader.head, trainable=trainable, source=loader.source)
        quantize_to_int8(module, base, layers, config.quantization)
    module.eval()
    return module, initial


def check_int8(base: "PreTrainedModel", head: Head | None, *, trainable: bool, source: str | None) -> None:
    """Raise ModelError if a model cannot answer with int8 weights.

    Args:
        base: The base model.
        head: Head on top of the model; None for a model that writes text.
        trainable: Whether the model is loaded for training.
        source: Folder or Hub id of the model.
    """
    if trainable:
        raise ModelError(
            INT8.format(
                "int8 weights are not supported in training", "remove quantization, and add it again to predict"
            )
        )
    if head is not None or model_kind(base.config, source=source or "scratch") != "decoder":
        raise ModelError(INT8.format("the model is not a decoder that writes text", "remove quantization"))
    if base.device.type != "cpu":
        advice = "write model_parameters.device: cpu, or quantization: {bits: 8}"
        raise ModelError(INT8.format(f"int8 products run on a CPU, and the model is on {base.device}", advice))


def quantize_to_int8(
    module: torch.nn.Module,
    base: "PreTrainedModel",
    layers: Mapping[str, torch.nn.Linear],
    section: DynamicInt8Quantization,
) -> None:
    """Convert layers to int8 that are faster in it, and free the memory of their other weights.

    safetensors maps a file to memory, and pages that were read stay there until none of its tensors is used. So the
    tensors that the model still uses are copied.

    Args:
        module: The model with its adapter.
        base: The base model.
        layers: Its linear layers, by name.
        section: The section of the file.
    """
    if quantize_faster_layers(base, layers, section):
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = tensor.data.clone()


def class_of(
    head: Head | None, base: "PreTrainedModel", *, source: str | None
) -> type[HuggingFaceModel] | type[HeadModel]:
    """Return the class of a loaded model with this head, or without one."""
    if head is None:
        return MODELS[model_kind(base.config, source=source or "scratch")]
    return RewardModel if head.scores_answers else HeadModel


def with_adapter(
    base: "PreTrainedModel",
    loader: BaseLoader,
    *,
    adapter_source: str | None,
    trainable: bool,
    batches: Callable[[], Iterable[Batch]] | None,
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the base model with its adapter, if it has one, and initial values of an adapter that moved base weights.

    Args:
        base: The base model.
        loader: Loaded the base model.
        adapter_source: Folder or Hub id of a saved adapter; None for a new one or none.
        trainable: Whether parameters of the adapter require gradients; a new adapter is added only then.
        batches: Returns training batches, for adapter inits that depend on data.
    """
    adapter = loader.config.adapter
    if adapter_source is not None:
        return saved_adapter(base, loader.config, adapter_source=adapter_source, trainable=trainable), {}
    if adapter is None or not trainable:
        return base, {}
    module = new_adapter(base, adapter, loader, batches=batches)
    return module, initial_adapter(module, adapter)


def saved_adapter(base: "PreTrainedModel", config: Config, *, adapter_source: str, trainable: bool) -> Any:
    """Return the base model with a saved adapter. Raise ModelError if it is not of the configured type.

    Args:
        base: The base model.
        config: The config.
        adapter_source: Folder or Hub id of the adapter.
        trainable: Whether parameters of the adapter require gradients.
    """
    pickles = config.model_parameters.pickled_weights
    return read_adapter(base, adapter_source, config.adapter, trainable=trainable, pickles=pickles)


def new_adapter(
    base: "PreTrainedModel",
    adapter: Adapter,
    loader: BaseLoader,
    *,
    batches: Callable[[], Iterable[Batch]] | None,
) -> Any:
    """Return the base model with a new adapter, initialized from the seed of the config.

    Args:
        base: The base model.
        adapter: The adapter section.
        loader: Loaded the base model, and loads its original weights for inits that depend on them.
        batches: Returns training batches, for adapter inits that depend on data.
    """

    def original_weights() -> dict[str, torch.Tensor]:
        return dict(replace(loader, device=torch.device("cpu"), saved_by_run=True).load().state_dict())

    with seeded(loader.config.seed, device=base.device):
        return add_adapter(
            base,
            adapter,
            batches=batches,
            original_weights=original_weights,
            tokenizer=loader.tokenizer,
            head=loader.head,
        )


def prepare_for_training(module: Any, base: "PreTrainedModel", config: Config) -> None:
    """Freeze what the config says, and set up gradient checkpointing."""
    freeze(module, config)
    if isinstance(config.trainer, FinetuneTrainer) and config.trainer.gradient_checkpointing:
        recompute_activations(base)
