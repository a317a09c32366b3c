"""Atomic checkpoints: written to a temporary folder, synced and renamed. Only safetensors and JSON are read back.

A folder `step-000120` holds
    model files             whatever the language model writes: weights or adapter
    optimizer.*             the state of each optimizer: tensors in .safetensors, the rest in .json
    rng.*                   states of the random generators: torch, its devices, Python, numpy
    data_position.json      the position in the data
    trainer.json            counters of the trainer: step, best metric, patience
    stop.json               a stop that a callback asked for after the checkpoint was written
    partita-checksums.json  size and hash of all other files, to detect damage
"""

import json
import logging
import os
import random
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from partita_schema.common.checksums import DamagedError
from partita_schema.common.files import sync_folder
from partita_schema.common.json_text import parse_json
from partita_schema.errors import ResumeError
from partita_trainers.checkpoints.file_sums import check_sums, write_sums
from partita_trainers.sharding import sharded_state

logger = logging.getLogger(__name__)

NAME = re.compile(r"step-(\d{6,})$")
TENSOR = "__tensor__"


def checkpoint_name(step: int) -> str:
    """Return the folder name of a step."""
    return f"step-{step:06d}"


def list_checkpoints(folder: Path) -> list[int]:
    """Return the steps that have a complete checkpoint, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for path in folder.iterdir() if (match := NAME.fullmatch(path.name)))


def newest_intact(folder: Path) -> int | None:
    """Return the step of the newest checkpoint whose checksums match; None if there are no checkpoints.

    Newer damaged ones are renamed to `damaged-step-N` and logged. Raises ResumeError if all are damaged.
    """
    clear_unfinished(folder)
    steps = list_checkpoints(folder)
    damages: list[str] = []
    for step in reversed(steps):
        path = folder / checkpoint_name(step)
        try:
            check_sums(path, required=True)
        except DamagedError as error:
            damages.append(str(error))
            continue
        for damaged, reason in zip(reversed(steps), damages, strict=False):
            aside = set_aside(folder / checkpoint_name(damaged))
            logger.warning("%s; it was renamed to %s, and the run resumes from step %d", reason, aside.name, step)
        return step
    if damages:
        raise ResumeError(f"{damages[0]}, and there is no other intact checkpoint; restore it or start a new run")
    return None


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that the run can write that step again. Return its new path."""
    aside = path.with_name(f"damaged-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    return path.rename(aside)


def check_intact(folder: Path, step: int) -> None:
    """Raise ResumeError if a file of a step's checkpoint is damaged or missing."""
    try:
        check_sums(folder / checkpoint_name(step), required=True)
    except DamagedError as error:
        raise ResumeError(str(error)) from None


def clear_unfinished(folder: Path) -> None:
    """Remove incomplete checkpoints of killed processes."""
    for path in folder.glob(".step-*"):
        shutil.rmtree(path)


def write_checkpoint(
    folder: Path,
    step: int,
    *,
    save_model: Callable[[Path], None],
    optimizer_states: Sequence[Any],
    data_position: Mapping[str, Any],
    trainer: Mapping[str, Any],
) -> Path:
    """Write the checkpoint of `step` atomically and return its folder.

    Args:
        folder: Folder of all checkpoints of the run.
        step: Step that the state belongs to.
        save_model: Writes the model into a folder.
        optimizer_states: State dicts of the optimizers.
        data_position: The position in the data, JSON.
        trainer: Counters of the trainer, JSON.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / checkpoint_name(step)
    if final.exists():
        return final  # the state of a step is deterministic
    temporary = folder / f".{final.name}-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        save_model(temporary)
        for number, state in enumerate(optimizer_states):
            save_state(temporary / f"optimizer-{number}", state)
        save_state(temporary / "rng", random_state())
        write_json(temporary / "data_position.json", data_position)
        write_json(temporary / "trainer.json", trainer)
        write_sums(temporary)
        sync_tree(temporary)
        temporary.rename(final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(folder)
    return final


def read_checkpoint(
    folder: Path,
    step: int,
    *,
    load_model: Callable[[Path], None],
    optimizers: list[torch.optim.Optimizer],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Restore the model, optimizers and random states; return the data position and the trainer's counters.

    Args:
        folder: Folder of all checkpoints of the run.
        step: Step to restore.
        load_model: Restores the model from a folder.
        optimizers: Optimizers to restore, in the order in which they were saved.

    Raises:
        ResumeError: The optimizers do not match the checkpoint.
    """
    path = folder / checkpoint_name(step)
    saved = len(list(path.glob("optimizer-*.json")))
    if saved != len(optimizers):
        raise ResumeError(f"{path} holds {saved} optimizers and this run has {len(optimizers)}; start a new run")
    load_model(path)
    for number, optimizer in enumerate(optimizers):
        try:
            optimizer.load_state_dict(sharded_state(load_state(path / f"optimizer-{number}"), optimizer))
        except ValueError as error:
            message = f"{path / f'optimizer-{number}'} does not fit this run's parameters ({error}); start a new run"
            raise ResumeError(message) from error
    restore_random_state(load_state(path / "rng"))
    return read_json(path / "data_position.json"), read_json(path / "trainer.json")


def remove_checkpoints(folder: Path, *, keep: set[int]) -> None:
    """Remove all checkpoints except those of the steps in `keep`."""
    for step in list_checkpoints(folder):
        if step not in keep:
            # Renamed first: a kill in the middle of the removal must not leave a folder that looks complete.
            doomed = folder / f".{checkpoint_name(step)}-removed"
            (folder / checkpoint_name(step)).rename(doomed)
            shutil.rmtree(doomed)


def save_state(path: Path, state: Any) -> None:
    """Write nested dicts and lists that contain tensors as `path`.safetensors and `path`.json."""
    tensors: dict[str, torch.Tensor] = {}
    write_json(path.with_suffix(".json"), strip_tensors(state, tensors))
    save_file(apart(tensors), path.with_suffix(".safetensors"))


def apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors on the CPU without shared memory, which safetensors rejects and bitsandbytes uses."""
    separated: dict[str, torch.Tensor] = {}
    pointers: set[int] = set()
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        pointer = own.untyped_storage().data_ptr()
        separated[name] = own.clone() if pointer in pointers else own
        pointers.add(pointer)
    return separated


def load_state(path: Path) -> Any:
    """Read what `save_state` wrote."""
    tensors = load_file(path.with_suffix(".safetensors"))
    return put_tensors(read_json(path.with_suffix(".json")), tensors)


def strip_tensors(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a nested value as JSON; each tensor moves into `tensors` under a number and leaves a placeholder."""
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = value
        return {TENSOR: name}
    if isinstance(value, Mapping):
        # As pairs, because JSON would turn the optimizer's number keys into text.
        return {"__pairs__": [[key, strip_tensors(item, tensors)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"__tuple__": [strip_tensors(item, tensors) for item in value]}
    if isinstance(value, list):
        return [strip_tensors(item, tensors) for item in value]
    return value


def put_tensors(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Rebuild the nested value from its JSON and tensors."""
    if isinstance(value, list):
        return [put_tensors(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if TENSOR in value:
        return tensors[value[TENSOR]]
    if "__tuple__" in value:
        return tuple(put_tensors(item, tensors) for item in value["__tuple__"])
    return {key: put_tensors(item, tensors) for key, item in value["__pairs__"]}


def random_state() -> dict[str, Any]:
    """Return the states of all random generators that training may use."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": list(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
    }


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Restore the states; those of missing devices are skipped."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    random.setstate(state["python"])
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON."""
    path.write_text(json.dumps(value), encoding="utf8")


def read_json(path: Path) -> Any:
    """Return the value in a JSON file. Raises ResumeError if it cannot be parsed."""
    try:
        return parse_json(path.read_bytes())
    except ValueError as error:
        raise ResumeError(f"{path} is not JSON ({error}); restore it or start a new run") from None


def sync_tree(folder: Path) -> None:
    """Flush all files in `folder` to disk."""
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir():
            sync_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
