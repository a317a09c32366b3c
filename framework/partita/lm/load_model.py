"""Loading of a model with its adapter: the model of the config, or one that `save` wrote."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from partita.lm.adapters.build import add_adapter, check_type, read_adapter
from partita.lm.adapters.inits import initial_adapter
from partita.lm.adapters.lora_linear import fuse_lora
from partita.lm.freezing import freeze, recompute_activations
from partita.lm.generation import quiet_settings
from partita.lm.huggingface import HuggingFaceModel
from partita.lm.loading import find_device, load_base, seeded
from partita.lm.precision import choose_kernels
from partita.tokenizers.hub import find_sources, quiet_libraries
from partita_schema.config import Config
from partita_schema.sections.adapter import Adapter
from partita_schema.sections.trainer import FinetuneTrainer
from partita_trainers.base import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


def load_model(
    config: Config,
    *,
    folder: Path,
    tokenizer: "PreTrainedTokenizerFast",
    saved: Path | None = None,
    batches: Callable[[], Iterable[Batch]] | None = None,
    trainable: bool,
) -> HuggingFaceModel:
    """Load the model of the config, or the one that `save` wrote.

    Args:
        config: The config.
        folder: Folder that relative names refer to.
        tokenizer: Tokenizer of the model.
        saved: Folder of a saved model.
        batches: Returns training batches, for adapter inits that depend on data.
        trainable: Whether parameters require gradients. If False, an adapter without weights in `saved` or
            `pretrained_adapter_weights` is skipped: untrained, it has no effect.

    Raises:
        ModelError: The model cannot be loaded.
    """
    quiet_libraries()
    device = find_device(config.model_parameters)
    source, adapter_source, plain = find_sources(config, folder=folder, saved=saved)
    base = load_base(config, source=source, tokenizer=tokenizer, device=device, plain=plain)
    own_settings = quiet_settings(base)
    # Before any forward pass, which would repack the weights. A trained model predicts with the kernels it was
    # evaluated with.
    choose_kernels(base, may_pack=not trainable and not config.trains)
    base.requires_grad_(config.adapter is None and trainable)
    module: Any = base
    initial: dict[str, torch.Tensor] = {}
    if adapter_source is not None:
        pickles = config.model_parameters.pickled_weights
        module = read_adapter(base, adapter_source, trainable=trainable, pickles=pickles)
        if config.adapter is not None:
            check_type(module, config.adapter, source=adapter_source)
    elif config.adapter is not None and trainable:
        module = new_adapter(base, config.adapter, config, source=source, tokenizer=tokenizer, batches=batches)
        initial = initial_adapter(module, config.adapter)
    if trainable:
        freeze(module, config)
        if isinstance(config.trainer, FinetuneTrainer) and config.trainer.gradient_checkpointing:
            recompute_activations(base, config)
        fuse_lora(module)
    else:
        module.requires_grad_(False)
    module.eval()
    return HuggingFaceModel(
        module,
        config=config,
        tokenizer=tokenizer,
        device=device,
        source=source,
        adapter_source=adapter_source,
        initial=initial,
        own_settings=own_settings,
        plain=plain,
        trainable=trainable,
    )


def new_adapter(
    base: "PreTrainedModel",
    adapter: Adapter,
    config: Config,
    *,
    source: str | None,
    tokenizer: "PreTrainedTokenizerFast",
    batches: Callable[[], Iterable[Batch]] | None,
) -> Any:
    """Add a new adapter to the base model, initialized from the seed of the config.

    Args:
        base: The base model.
        adapter: The adapter section.
        config: The config.
        source: Folder or Hub id of the base model; None for random weights.
        tokenizer: Tokenizer of the model.
        batches: Returns training batches, for adapter inits that depend on data.
    """

    def original_weights() -> dict[str, torch.Tensor]:
        cpu = torch.device("cpu")
        return dict(load_base(config, source=source, tokenizer=tokenizer, device=cpu, plain=True).state_dict())

    with seeded(config.seed, device=base.device):
        return add_adapter(base, adapter, batches=batches, original_weights=original_weights, tokenizer=tokenizer)
