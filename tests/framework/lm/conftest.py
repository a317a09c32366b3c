"""Small real models and batches for the tests of this folder."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from partita.lm.base import GenerationRequest
from partita.lm.huggingface import HuggingFaceModel, load_model
from partita.lm.tokenizers import load_tokenizer
from partita_schema.config import Config
from partita_trainers.base import Batch

SCRATCH = {"type": "scratch", "size": "nano", "tokenizer": "byte", "context_length": 64}


def build_config(**sections: Any) -> Config:
    architecture = sections.pop("architecture", "llama")
    given = {
        "base_model": SCRATCH | {"architecture": architecture},
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "trainer": {"type": "finetune"},
    }
    return Config.model_validate(given | sections)


def build_batch(seed: int = 0, *, lengths: tuple[int, ...] = (24, 5, 17, 2)) -> Batch:
    """Random rows whose last tokens, a few more in each, are learned."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 250, (len(lengths), max(lengths)), generator=generator)
    labels = torch.full_like(ids, -100)
    for row, length in enumerate(lengths):
        ids[row, length:] = 0
        start = max(1, length - 4 - row)
        labels[row, start:length] = ids[row, start:length]
    return Batch(ids, labels, torch.tensor(lengths), tuple(f"row {row}" for row in range(len(lengths))))


def build_requests(*sizes: tuple[int, int]) -> list[GenerationRequest]:
    """Random prompts of given lengths with their limits on new tokens."""
    draw = random.Random(0)
    return [GenerationRequest([draw.randrange(2, 250) for _ in range(length)], limit) for length, limit in sizes]


def sharpen(module: torch.nn.Module) -> None:
    """Make a random model's greedy answers vary."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)


def load(
    config: Config, *, folder: Path = Path(), saved: Path | None = None, trainable: bool = True
) -> HuggingFaceModel:
    tokenizer = load_tokenizer(config, folder=folder, texts=list, saved=saved)
    return load_model(
        config,
        folder=folder,
        tokenizer=tokenizer,
        saved=saved,
        batches=lambda: [build_batch(seed) for seed in range(3)],
        trainable=trainable,
    )


def take_steps(lm: HuggingFaceModel, *, steps: int, first: int = 1, learning_rate: float = 0.5) -> list[float]:
    """Plain clipped gradient descent, as a trainer would do it; the losses."""
    parameters = [parameter for parameter in lm.module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=learning_rate)
    losses = []
    with lm.training():
        for step in range(first, first + steps):
            loss = lm.loss(lm.module, build_batch(step))
            losses.append(loss.item())
            extra = lm.auxiliary_loss()
            (loss if extra is None else loss + extra).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            lm.after_step(step)
            optimizer.zero_grad()
    return losses


def held_out_loss(lm: HuggingFaceModel) -> float:
    with torch.no_grad():
        return lm.loss(lm.module, build_batch(99)).item()


@pytest.fixture(scope="session")
def small() -> Any:
    """The builders of this file, under short names."""

    class Builders:
        config: Callable[..., Config] = staticmethod(build_config)
        batch: Callable[..., Batch] = staticmethod(build_batch)
        requests: Callable[..., list[GenerationRequest]] = staticmethod(build_requests)
        load: Callable[..., HuggingFaceModel] = staticmethod(load)
        take_steps = staticmethod(take_steps)
        held_out_loss = staticmethod(held_out_loss)
        sharpen = staticmethod(sharpen)

    return Builders


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved llama with a byte tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "small"
    load(build_config()).save(folder)
    return folder
