"""What a fleet's workers are told and what they tell, other than rows and answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.lm.base import GenerationOptions
from partita_schema.config import Config
from partita_trainers.batch_size.probe import BatchSize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class LoadRequest:
    """What a worker loads."""

    config: Config
    folder: Path
    """Where relative paths of the file start."""
    tokenizer: "PreTrainedTokenizerFast | None"
    """The one that was made for a new model; None where it lies beside the weights."""
    saved: Path | None
    """The folder of trained weights, if there is one."""
    threads: str
    """OMP_NUM_THREADS where the command was started; empty where nobody has set it."""


@dataclass(frozen=True)
class WorkerLocation:
    """Where a worker runs."""

    node: str
    """Its machine."""
    process: int


@dataclass(frozen=True)
class ModelFacts:
    """What is told of a model that was loaded: the same on all workers."""

    fingerprint: str
    context_length: int | None
    checkpoint_generation: Mapping[str, Any]
    """What the checkpoint's generation_config.json says."""


@dataclass(frozen=True)
class Offer:
    """What a worker's device holds."""

    size: BatchSize
    room_tokens: int | None
    """Tokens of rows in all, where memory decided the size."""


@dataclass(frozen=True)
class WorkerJob:
    """A job, as workers are told of it; its rows come afterwards."""

    number: int
    """Tells errands apart; it grows."""
    engine: str
    options: GenerationOptions
    max_new_tokens: int
    seed: int
    rows: int
    """Rows of the data."""
    batch_size: int
    size: BatchSize | None
    """The size that was found; None where nobody looked for one."""
    room_tokens: int | None
    prefix: Sequence[int]
    """Tokens that all prompts begin with."""


@dataclass(frozen=True)
class LogMessage:
    """What a worker has logged."""

    level: int
    text: str
