"""Training that leaves no trace: what a learning-rate search or a trial of a batch size did is undone, bit for bit."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from partita_schema.errors import WriteError
from partita_trainers.base import LanguageModel
from partita_trainers.checkpoint import random_state, restore_random_state

PLAIN = (bool, int, float, str, type(None))


@contextmanager
def preserved_state(lm: LanguageModel) -> Iterator[None]:
    """Afterwards the model and all random generators are what they were, whatever happened inside.

    Trained weights and what else a checkpoint holds wait in a temporary folder. Besides: buffers, the plain values that
    modules keep (training mode, the longest row that rotary positions have seen), and no gradients.
    """
    state = random_state()
    put_back = snapshot(lm.module)
    with tempfile.TemporaryDirectory() as folder:
        save_trained_state(lm, Path(folder))
        try:
            yield
        finally:
            clear_gradients(lm.module)
            lm.load_checkpoint(Path(folder))
            put_back()
            restore_random_state(state)


def save_trained_state(lm: LanguageModel, folder: Path) -> None:
    """Write what training changes. Raises WriteError where there is no room for it."""
    try:
        lm.save_checkpoint(folder)
    except OSError as error:
        raise WriteError(
            f"a copy of the trained weights cannot be written to {tempfile.gettempdir()} ({error}): set TMPDIR to a "
            "folder with more room, or write numbers for trainer.batch_size, eval_batch_size and learning_rate"
        ) from error


def snapshot(module: torch.nn.Module) -> Callable[[], None]:
    """A function that puts back the buffers and plain attributes that all parts of `module` have now."""
    buffers = [
        (part, name, buffer, buffer.detach().to("cpu", copy=True))
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    attributes = [
        (part, {name: value for name, value in vars(part).items() if isinstance(value, PLAIN)})
        for part in module.modules()
    ]

    @torch.no_grad()
    def put_back() -> None:
        for part, name, buffer, value in buffers:
            buffer.copy_(value)
            part._buffers[name] = buffer
        for part, values in attributes:
            vars(part).update(values)

    return put_back


def clear_gradients(module: torch.nn.Module, *, to_zero: bool = False) -> None:
    """No parameter has a gradient afterwards; with `to_zero` those that had one have one of zeros."""
    for parameter in module.parameters():
        if to_zero and parameter.grad is not None:
            parameter.grad.zero_()
        else:
            parameter.grad = None
