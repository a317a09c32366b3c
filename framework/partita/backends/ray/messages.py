"""Messages between a worker pool and its workers, except rows and results."""

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
    """Folder that relative paths of the file are resolved against."""
    tokenizer: "PreTrainedTokenizerFast | None"
    """Tokenizer of a new model; None if it is saved with the weights."""
    saved: Path | None
    """Folder of the trained weights, if there is one."""
    threads: str
    """OMP_NUM_THREADS of the command; empty if it is not set."""


@dataclass(frozen=True)
class WorkerLocation:
    """Machine and process of a worker."""

    node: str
    """Name of the machine."""
    process: int


@dataclass(frozen=True)
class ModelFacts:
    """Properties of a loaded model; equal on all workers."""

    fingerprint: str
    context_length: int | None
    checkpoint_generation: Mapping[str, Any]
    """Content of the checkpoint's generation_config.json."""


@dataclass(frozen=True)
class Offer:
    """How many rows a worker's device fits."""

    size: BatchSize
    token_budget: int | None
    """Total tokens of rows that fit, if memory determined the size."""


@dataclass(frozen=True)
class WorkerJob:
    """Description of a job; its rows follow."""

    number: int
    """Increasing number of the job."""
    engine: str
    options: GenerationOptions
    max_new_tokens: int
    seed: int
    rows: int
    """Number of rows in the dataset."""
    batch_size: int
    size: BatchSize | None
    """The measured batch size; None if it was not measured."""
    token_budget: int | None
    prefix: Sequence[int]
    """Tokens that all prompts begin with."""


@dataclass(frozen=True)
class LogMessage:
    """A log message of a worker."""

    level: int
    text: str
