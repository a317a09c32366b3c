"""Exact checkpoints of a model, and adapters in the layout of peft.

A checkpoint contains only what training changes. An exported adapter applies to the original base model.
"""

import copy
import json
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from partita.lm.training.freezing import trained_parameters
from partita_schema.errors import ResumeError
from partita_trainers.sharding import shard_like

if TYPE_CHECKING:
    from peft import PeftModel

logger = logging.getLogger(__name__)

CHECKPOINT = "model.safetensors"
DESCRIPTION = "model.json"
INITIAL = "initial."
"""Name prefix of an adapter's initial values in a checkpoint."""
PAGE = "README.md"
"""The page of a model on the Hub."""
FORMAT = 1
SAME_PRODUCT = 1e-3
"""Relative difference up to which two initializations count as equal."""


def write_checkpoint(
    folder: Path,
    *,
    module: nn.Module,
    initial: Mapping[str, torch.Tensor],
    extra: Mapping[str, torch.Tensor],
    **notes: Any,
) -> None:
    """Write trained parameters, an adapter's initial values and extra tensors, and notes as JSON.

    Args:
        folder: Folder of the checkpoint.
        module: The model.
        initial: Initial values of the adapter.
        extra: Further tensors by name.
        notes: JSON values.
    """
    from safetensors.torch import save_file

    tensors = {name: parameter.detach() for name, parameter in trained_parameters(module).items()}
    tensors |= {INITIAL + name: tensor for name, tensor in initial.items()}
    tensors |= extra
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / CHECKPOINT)
    (folder / DESCRIPTION).write_text(json.dumps({"format": FORMAT, **notes}, indent=1), encoding="utf-8")


def read_checkpoint(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors and notes of a checkpoint. Raise ResumeError if it is incomplete or of another format."""
    from safetensors.torch import load_file

    for name in (CHECKPOINT, DESCRIPTION):
        if not (folder / name).exists():
            raise ResumeError(f"{folder / name} is missing; the checkpoint is not complete, remove {folder}")
    notes = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
    if notes.get("format") != FORMAT:
        raise ResumeError(f"{folder / DESCRIPTION}: format {notes.get('format')} is not known here; update partita")
    return load_file(folder / CHECKPOINT), notes


@torch.no_grad()
def restore_parameters(module: nn.Module, tensors: Mapping[str, torch.Tensor], *, folder: Path) -> None:
    """Copy tensors into the trained parameters, in place. Raise ResumeError unless names and shapes match."""
    trained = trained_parameters(module)
    missing, unknown = sorted(trained.keys() - tensors.keys()), sorted(tensors.keys() - trained.keys())
    if missing or unknown:
        raise ResumeError(
            f"{folder} holds other parameters than this model trains: {summary(missing)} missing, "
            f"{summary(unknown)} not known; the file or the base model changed since"
        )
    for name, parameter in trained.items():
        saved = tensors[name]
        if saved.shape != parameter.shape or saved.dtype != parameter.dtype:
            raise ResumeError(
                f"{folder}: {name} is {list(saved.shape)} {saved.dtype} there and "
                f"{list(parameter.shape)} {parameter.dtype} here; the file or the base model changed since"
            )
    for name, parameter in trained.items():
        parameter.copy_(shard_like(tensors[name], parameter))


def summary(names: list[str]) -> str:
    """Shorten a list of names for messages."""
    return f"{len(names)} ({', '.join(names[:2])}, ...)" if len(names) > 2 else ", ".join(names) or "none"


def check_initial(saved: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], *, folder: Path) -> None:
    """Raise ResumeError if the init moved something else out of the base weights than in the checkpoint.

    An SVD may differ in signs or rounding on another machine; what counts is the product of the factors.
    """
    if saved.keys() != own.keys():
        raise ResumeError(f"{folder} started from another adapter.init; write the one that the run began with")
    for name in own:
        if ".lora_A." not in name or torch.equal(saved[name], own[name]):
            continue
        partner = name.replace(".lora_A.", ".lora_B.")
        then, now = saved[partner] @ saved[name], own[partner] @ own[name]
        if (then - now).norm() > SAME_PRODUCT * then.norm():
            raise ResumeError(
                f"{folder}: {name} was initialised to other values than now; "
                "the base model, the data or the number of threads changed since"
            )
        logger.warning("%s: initial values differ in the last digits; the run continues, but not bit for bit", name)


def save_adapter(adapted: "PeftModel", folder: Path, *, base: str, initial: Mapping[str, torch.Tensor]) -> None:
    """Write the adapter in peft's layout, for the base model as it was before initialization.

    Args:
        adapted: The model with its adapter.
        folder: Folder to write to.
        base: Name of the base model to record.
        initial: Initial values of the adapter, if its init moved base weights.
    """
    from safetensors.torch import save_file

    had_page = (folder / PAGE).exists()
    own = adapted.active_peft_config.base_model_name_or_path
    adapted.active_peft_config.base_model_name_or_path = base
    try:
        with warnings.catch_warnings():
            # AdaLoRA can prune all ranks of a matrix, which peft takes for a shard of a matrix.
            warnings.filterwarnings("ignore", message="Adapter .*have invalid shape")
            adapted.save_pretrained(str(folder), save_embedding_layers=False)
        if initial:
            weights = adapter_tensors(adapted, initial=initial)
            save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
            plain_lora_settings(adapted).save_pretrained(str(folder))
        if not had_page:
            # peft's page has no content but the path of the base model. partita push writes one.
            (folder / PAGE).unlink(missing_ok=True)
    finally:
        adapted.active_peft_config.base_model_name_or_path = own


def adapter_tensors(adapted: "PeftModel", *, initial: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the adapter's weights as they are saved, on the CPU.

    With `initial` they are those of a LoRA of twice the rank, for the unchanged base: B A - B0 A0 = [B, -B0] [A; A0].
    """
    from peft import get_peft_model_state_dict

    first = {name.replace(".default", ""): tensor for name, tensor in initial.items()}
    weights = {}
    for name, tensor in get_peft_model_state_dict(adapted, save_embedding_layers=False).items():
        now = tensor.detach().cpu()
        if first and ".lora_A." in name:
            now = torch.cat([now, first[name]], dim=0)
        elif first and ".lora_B." in name:
            now = torch.cat([now, -first[name]], dim=1)
        weights[name] = now.contiguous()
    return weights


def plain_lora_settings(adapted: "PeftModel") -> Any:
    """Return the peft config of that LoRA of twice the rank, with the same scale."""
    settings: Any = copy.deepcopy(adapted.active_peft_config)
    growth = 2**0.5 if settings.use_rslora else 2
    settings.r *= 2
    settings.lora_alpha *= growth
    settings.rank_pattern = {key: 2 * rank for key, rank in settings.rank_pattern.items()}
    settings.alpha_pattern = {key: growth * alpha for key, alpha in settings.alpha_pattern.items()}
    settings.init_lora_weights, settings.corda_config = True, None
    settings.inference_mode = True
    return settings
