"""Restore the model and random states bit for bit after a learning rate search or a batch size probe."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from partita_schema.errors import WriteError
from partita_trainers.base import LanguageModel
from partita_trainers.checkpoints.checkpoint import random_state, restore_random_state

PLAIN = (bool, int, float, str, type(None))


@contextmanager
def preserved_state(lm: LanguageModel) -> Iterator[None]:
    """Restore the model and all random generators on exit, also after an error.

    Trained weights and everything else in a checkpoint are kept in a temporary folder. Buffers and plain attributes of
    modules (training mode, the longest row that rotary embeddings have seen) are restored too. Gradients become None.
    """
    state = random_state()
    restore = snapshot(lm.module)
    with tempfile.TemporaryDirectory() as folder:
        save_trained_state(lm, Path(folder))
        try:
            yield
        finally:
            clear_gradients(lm.module)
            lm.load_checkpoint(Path(folder))
            restore()
            restore_random_state(state)


def save_trained_state(lm: LanguageModel, folder: Path) -> None:
    """Write what training changes. Raises WriteError if there is not enough space."""
    try:
        lm.save_checkpoint(folder)
    except OSError as error:
        raise WriteError(
            f"a copy of the trained weights cannot be written to {tempfile.gettempdir()} ({error}): set TMPDIR to a "
            "folder with more room, or write numbers for trainer.batch_size, eval_batch_size and learning_rate"
        ) from error


def snapshot(module: torch.nn.Module) -> Callable[[], None]:
    """Return a function that restores the current buffers and plain attributes of all submodules."""
    buffers = [
        (part, name, buffer, buffer.detach().to("cpu", copy=True))
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False, remove_duplicate=False)
    ]
    attributes = [
        (part, {name: value for name, value in vars(part).items() if isinstance(value, PLAIN)})
        for part in module.modules()
    ]

    @torch.no_grad()
    def restore() -> None:
        for part, name, buffer, value in buffers:
            buffer.copy_(value)
            setattr(part, name, buffer)
        for part, values in attributes:
            vars(part).update(values)

    return restore


def clear_gradients(module: torch.nn.Module, *, to_zero: bool = False) -> None:
    """Set all gradients to None; with `to_zero`, set existing gradients to zero instead."""
    for parameter in module.parameters():
        if to_zero and parameter.grad is not None:
            parameter.grad.zero_()
        else:
            parameter.grad = None
