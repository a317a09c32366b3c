from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from partita.data.formatting.formatter import Formatter
from partita.data.formatting.row_tokenizer import RowTokenizer
from partita.data.rows import ListStore, RowKeys, Rows
from partita.generation.best_of import BestOf
from partita.generation.generator import LocalGenerator
from partita.generation.job import PredictionPipeline
from partita.generation.oom_backoff import BatchBudget
from partita.generation.predict import PredictionFiles, generate_for_rows, predict_rows
from partita.generation.predictions import Answer, Predictions
from partita.generation.prompts import PromptRows
from partita.lm.base import GenerationOptions
from partita.lm.huggingface import HuggingFaceModel
from partita.outputs.decode import Decoder
from partita_schema.config import Config

from ..lm.conftest import build_config, load
from ..outputs.conftest import MakeConfig, config_of


def nano_model(architecture: str = "llama") -> HuggingFaceModel:
    """Return a model with a context of 64 tokens, one per byte, for generation only."""
    return load(build_config(architecture=architecture, trainer={"type": "none"}), trainable=False)


def encoder_of(config: Config, lm: Any, **options: Any) -> RowTokenizer:
    return RowTokenizer(Formatter(config, tokenizer=lm.tokenizer, labels={}, retriever=None), **options)


def pipeline_of(
    config: Config,
    lm: Any,
    *,
    generation: GenerationOptions | None = None,
    max_new_tokens: int = 64,
    seed: int = 1,
    best_of: BestOf | None = None,
) -> PredictionPipeline:
    """Return the pipeline from rows to answers of a model in this process."""
    return PredictionPipeline(
        config=config.model_copy(update={"seed": seed}),
        generator=LocalGenerator(lm),
        row_tokenizer=encoder_of(config, lm),
        decoder=Decoder(config, labels={}),
        generation=generation or GenerationOptions({}),
        max_new_tokens=max_new_tokens,
        best_of=best_of,
    )


OF_PIPELINE = ("generation", "max_new_tokens", "seed", "best_of")
FILES = ("output", "safe_csv", "retry_errors", "fresh", "fingerprint")


@pytest.fixture(scope="session")
def make_config() -> MakeConfig:
    """Return `config_of`."""
    return config_of


@pytest.fixture(scope="session")
def make_rows() -> Callable[[Sequence[Mapping[str, Any]]], Rows]:
    """Return rows of a list, with keys `data:1`, `data:2`, ..."""

    def make(rows: Sequence[Mapping[str, Any]]) -> Rows:
        columns = tuple(rows[0]) if rows else ("question",)
        return Rows(ListStore(rows), columns=columns, keys=RowKeys.counted("data", len(rows)), fingerprint="f")

    return make


@pytest.fixture
def predict(tmp_path: Path) -> Callable[..., Predictions]:
    """Call predict_rows with a journal in the test's folder; options have defaults."""

    def call(
        lm: Any,
        rows: PromptRows,
        *,
        config: Config | None = None,
        batch_size: int = 4,
        budget: BatchBudget | None = None,
        **options: Any,
    ) -> Predictions:
        pipeline = pipeline_of(config or config_of(), lm, **taken(options, OF_PIPELINE))
        files: dict[str, Any] = {"fingerprint": {"model": "scripted", "data": "rows"}} | taken(options, FILES)
        journal = options.pop("journal_path", tmp_path / "journal.jsonl")
        limit = budget or BatchBudget(batch_size)
        return predict_rows(
            pipeline, rows, PredictionFiles(journal=journal, **files), budget=lambda prompts: limit, **options
        )

    return call


def taken(options: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Remove the options with these names, and return them."""
    return {name: options.pop(name) for name in names if name in options}


@pytest.fixture(scope="session")
def answer() -> Callable[..., list[Answer]]:
    """Run answer_rows to the end; options have defaults."""

    def call(
        lm: Any,
        rows: PromptRows,
        *,
        config: Config | None = None,
        batch_size: int = 4,
        budget: BatchBudget | None = None,
        **options: Any,
    ) -> list[Answer]:
        pipeline = pipeline_of(config or config_of(), lm, **taken(options, OF_PIPELINE))
        return list(generate_for_rows(pipeline, rows, budget=budget or BatchBudget(batch_size), **options))

    return call
