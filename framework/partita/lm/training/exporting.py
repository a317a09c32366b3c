"""Export of trained models in the layout of transformers and peft, and what identifies a loaded model."""

import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from partita.lm.adapters.merging import merged_model
from partita.lm.loaded_model import LoadedModel
from partita.lm.loading.base_models import BaseLoader, quiet_progress
from partita.lm.precision import quantized_layers
from partita.lm.products.int8_linear import int8_layers, weight_levels
from partita.lm.training.saving import adapter_tensors, save_adapter
from partita.tokenizers.hub import BASE, folder_digest, hub_commit, short_digest
from partita.tokenizers.load import tokenizer_digest
from partita.tokenizers.saved_adapters import RecordedBase, weights_hash
from partita.tokenizers.vocabulary_file import copy_vocabulary
from partita_schema.errors import ModelError
from partita_schema.sections.adapter import LoraAdapter
from partita_schema.sections.model import ScratchModel
from partita_schema.sections.quantization import DynamicInt8Quantization
from partita_trainers.checkpoints.file_sums import summed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


def export(lm: LoadedModel, folder: Path) -> None:
    """Write the model and its tokenizer.

    The result is a plain model without an adapter, with a merged adapter, or if the init rounded the base weights;
    otherwise the adapter, and under `base/` the base model if it is new.

    Raises:
        ModelError: The model has int8 weights.
    """
    refuse_int8(lm)
    with quiet_progress(), summed(folder):
        if lm.adapted is None:
            export_plain(lm, lm.base, folder)
        elif must_merge(lm):
            export_plain(lm, merged_model(lm.adapted), folder)
        else:
            save_adapter(
                lm.adapted, folder, base=BASE if lm.source is None else lm.source, initial=lm.initial_adapter_tensors
            )
            if lm.source is None or lm.saved_by_run:
                export_base(lm, folder / BASE)
            else:
                record_base(lm, folder)
        lm.tokenizer.save_pretrained(folder)
        copy_vocabulary(lm.source, folder, revision=lm.config.model_parameters.revision)


def record_base(lm: LoadedModel, folder: Path) -> None:
    """Record the base model of an adapter next to it."""
    local = local_folder(lm.source)
    labels = None if lm.head is None or not lm.head.labels else lm.head.labels
    RecordedBase(str(lm.config.base_model), None if local is None else weights_hash(local), labels).write(folder)


def refuse_int8(lm: LoadedModel) -> None:
    """Raise ModelError if the model has int8 weights, which are computed at each start and never saved."""
    quantization = lm.config.quantization
    if isinstance(quantization, DynamicInt8Quantization):
        message = f"quantization.type: weights in {quantization.type} are not saved"
        raise ModelError(f"{message}; remove quantization, or add --set quantization=null")


def must_merge(lm: LoadedModel) -> bool:
    """Return whether an adapter is saved merged into a plain model."""
    adapter = lm.config.adapter
    if adapter is None:
        return False
    rounded = isinstance(adapter, LoraAdapter) and adapter.init == "loftq" and not quantized_layers(lm.module)
    if rounded and lm.adapter_source is None:
        logger.info("init loftq changed the base weights: the result is saved as a plain, merged model")
        return True
    if adapter.postprocessor.merge_adapter_into_base_model and quantized_layers(lm.module):
        logger.info("the quantized base is saved in float32, with the adapter merged into it")
    return adapter.postprocessor.merge_adapter_into_base_model


def export_plain(lm: LoadedModel, model: "PreTrainedModel", folder: Path) -> None:
    """Write a model with the original generation config of its checkpoint, if it generates."""
    if lm.head is not None:
        model.save_pretrained(str(folder))
        lm.head.write_files(folder, model=model, max_length=lm.context_length)
        return
    quiet, model.generation_config = model.generation_config, lm.original_generation_config
    try:
        model.save_pretrained(str(folder))
    finally:
        model.generation_config = quiet


def export_base(lm: LoadedModel, folder: Path) -> None:
    """Write the base model as it was before the adapter was added."""
    if lm.source is not None:
        shutil.copytree(lm.source, folder, dirs_exist_ok=True)
        return
    cpu = torch.device("cpu")
    fresh = BaseLoader(lm.config, source=None, tokenizer=lm.tokenizer, device=cpu, head=lm.head).load()
    fresh.save_pretrained(str(folder))


def changed_tensors(lm: LoadedModel) -> dict[str, torch.Tensor]:
    """Return the tensors that differ from the base model, by name."""
    if lm.adapted is not None:
        return adapter_tensors(lm.adapted, initial=lm.initial_adapter_tensors)
    if lm.trainable or lm.saved_by_run:
        return dict(lm.module.named_parameters())
    return {}


def origin(lm: LoadedModel, *, adapter: bool = True) -> str:
    """Return a hash of what the weights of a model were loaded from: equal on all devices, and in all dtypes.

    Without `adapter`, that of the base model alone, which is also that of the base model with a new adapter.
    """
    base = new_weights(lm) if lm.source is None else source_origin(lm.source, lm=lm)
    return short_digest(base, source_origin(lm.adapter_source if adapter else None, lm=lm))


def new_weights(lm: LoadedModel) -> list[Any]:
    """Return what random weights depend on; [] if the base model is a checkpoint."""
    base = lm.config.base_model
    return [base.model_dump(mode="json"), lm.config.seed] if isinstance(base, ScratchModel) else []


def source_origin(source: str | None, *, lm: LoadedModel) -> list[Any]:
    """Return what identifies the content of a folder or Hub id; [] without one."""
    folder = local_folder(source)
    if folder is not None:
        return [folder_digest(folder)]
    return [] if source is None else [source, hub_commit(source, revision=lm.config.model_parameters.revision)]


def identity(lm: LoadedModel) -> str:
    """Return a hash of the model without trained weights."""
    config = lm.config
    base: list[Any] = []
    if lm.adapted is not None or not (lm.trainable or lm.saved_by_run):
        base = new_weights(lm) or source_origin(lm.source, lm=lm)
    int8 = [name for name, _ in int8_layers(lm.module)]
    sections = [config.model_parameters, config.quantization, config.adapter if lm.adapted is not None else None]
    dumped = [section.model_dump(mode="json") if section is not None else None for section in sections]
    kernels = [getattr(layer, "support_avx512bf16_for_cpu", None) for _, layer in quantized_layers(lm.module)]
    # In 16 bits the remaining base weights were rounded when an init moved a part of them; files do not round them.
    moved = bool(lm.initial_adapter_tensors) and lm.base.dtype != torch.float32
    dtypes = sorted({str(parameter.dtype) for parameter in lm.module.parameters()})
    return short_digest(
        base,
        dumped,
        kernels,
        moved,
        dtypes,
        lm.device.type,
        tokenizer_digest(lm.tokenizer),
        *([int8, weight_levels()] if int8 else ()),
    )


def local_folder(source: str | None) -> Path | None:
    """Return the path if the source is a local folder, else None."""
    return Path(source) if source is not None and Path(source).is_dir() else None
