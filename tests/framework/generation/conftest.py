import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from partita.data.formatting.formatter import Formatter
from partita.data.formatting.row_tokenizer import RowTokenizer
from partita.data.rows import ListStore, RowKeys, Rows
from partita.generation.oom_backoff import BatchLimit, Capacity
from partita.generation.predict import generate_for_rows, predict_rows
from partita.generation.predictions import Answer, Predictions
from partita.generation.prompts import PromptRows
from partita.lm.base import GenerationOptions
from partita.lm.huggingface import HuggingFaceModel
from partita.outputs.decode import Decoder
from partita_schema.config import Config
from partita_schema.rows import row_schema

from ..lm.conftest import build_config, load
from ..outputs.conftest import MakeConfig, config_of


def nano_model(architecture: str = "llama") -> HuggingFaceModel:
    """A model with a context of 64 tokens, one for each byte, to answer only."""
    return load(build_config(architecture=architecture, trainer={"type": "none"}), trainable=False)


def encoder_of(config: Config, lm: Any, **options: Any) -> RowTokenizer:
    return RowTokenizer(Formatter(config, tokenizer=lm.tokenizer, labels={}, retriever=None), **options)


def parts_of(config: Config, lm: Any) -> dict[str, Any]:
    """What answers need beside rows and options."""
    return {
        "lm": lm,
        "encoder": encoder_of(config, lm),
        "schema": row_schema(config, supervised=False),
        "decoder": Decoder(config, labels={}),
    }


@pytest.fixture(scope="session")
def make_config() -> MakeConfig:
    """Return `config_of`."""
    return config_of


@pytest.fixture(scope="session")
def make_rows() -> Callable[[Sequence[Mapping[str, Any]]], Rows]:
    """Rows of a list, with keys `data:1`, `data:2`, ..."""

    def make(rows: Sequence[Mapping[str, Any]]) -> Rows:
        columns = tuple(rows[0]) if rows else ("question",)
        return Rows(ListStore(rows), columns=columns, keys=RowKeys.counted("data", len(rows)), fingerprint="f")

    return make


@pytest.fixture(scope="module")
def little_garbage() -> Iterator[None]:
    """Cleaning up after a failure looks at all objects of the process: not at those of the libraries here."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def predict(tmp_path: Path) -> Callable[..., Predictions]:
    """predict_rows with a journal in the test's folder; only what a test is about has to be given."""

    def call(lm: Any, rows: PromptRows, *, config: Config | None = None, **options: Any) -> Predictions:
        config = config or config_of()
        rows_at_a_time = options.pop("batch_size", 4)
        limit = options.pop("limit", None) or BatchLimit(rows_at_a_time)
        defaults: dict[str, Any] = {
            "generation": GenerationOptions({}),
            "max_new_tokens": 64,
            "capacity": lambda lengths: Capacity(rows_at_a_time, limit=limit),
            "seed": 1,
            "journal_path": tmp_path / "journal.jsonl",
            "output": None,
            "fingerprint": {"model": "scripted", "data": "rows"},
        }
        return predict_rows(rows=rows, config=config, **parts_of(config, lm), **(defaults | options))

    return call


@pytest.fixture(scope="session")
def answer() -> Callable[..., list[Answer]]:
    """answer_rows, to the end; only what a test is about has to be given."""

    def call(lm: Any, rows: PromptRows, *, config: Config | None = None, **options: Any) -> list[Answer]:
        defaults: dict[str, Any] = {
            "generation": GenerationOptions({}),
            "max_new_tokens": 64,
            "batch_size": 4,
            "seed": 1,
        }
        return list(generate_for_rows(rows=rows, **parts_of(config or config_of(), lm), **(defaults | options)))

    return call
