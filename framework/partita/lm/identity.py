"""Identity of a loaded model: its fixed part, and the weights that training changed."""

from typing import Any

import torch

from partita.lm.loaded_model import LoadedModel
from partita.lm.loading import local_folder
from partita.lm.quantization import quantized_layers
from partita.lm.saving import adapter_tensors
from partita.tokenizers.hub import digest, folder_digest, hub_commit
from partita.tokenizers.load import tokenizer_digest
from partita_schema.model import ScratchModel


def changed_tensors(lm: LoadedModel) -> dict[str, torch.Tensor]:
    """Return the tensors that differ from the base model, by name."""
    if lm.adapted is not None:
        return adapter_tensors(lm.adapted, initial=lm.initial)
    if lm.trainable or lm.plain:
        return dict(lm.module.named_parameters())
    return {}


def identity(lm: LoadedModel) -> str:
    """Return a hash of the model without trained weights."""
    config = lm.config
    base: list[Any] = []
    if lm.adapted is not None or not (lm.trainable or lm.plain):
        place = local_folder(lm.source)
        if isinstance(config.base_model, ScratchModel):
            base = [config.base_model.model_dump(mode="json"), config.seed]
        elif place is not None:
            base = [folder_digest(place)]
        elif lm.source is not None:
            base = [lm.source, hub_commit(lm.source, revision=config.model_parameters.revision)]
    sections = [config.model_parameters, config.quantization, config.adapter if lm.adapted is not None else None]
    dumped = [section.model_dump(mode="json") if section is not None else None for section in sections]
    kernels = [getattr(layer, "support_avx512bf16_for_cpu", None) for _, layer in quantized_layers(lm.module)]
    # In 16 bits the remaining base weights were rounded when an init moved a part of them; files do not round them.
    moved = bool(lm.initial) and lm.base.dtype != torch.float32
    dtypes = sorted({str(parameter.dtype) for parameter in lm.module.parameters()})
    return digest(base, dumped, kernels, moved, dtypes, lm.device.type, tokenizer_digest(lm.tokenizer))
