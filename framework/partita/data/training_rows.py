"""Training rows, from tokens to a loader: what `partita train`, `partita explain --data` and `DataLoader` share."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from partita.data.batching.collate import Collate, build_collate, collate_inputs
from partita.data.batching.documents import cut_chunks
from partita.data.batching.settings import BatchSettings
from partita.data.dialogue import expanded
from partita.data.formatting.build import build_row_tokenizer
from partita.data.formatting.retrieval import build_retriever
from partita.data.formatting.row_tokenizer import RowTokenizer
from partita.data.formatting.sides import SideRowTokenizer
from partita.data.indexed_loader import IndexedLoader
from partita.data.ledger import LOSS_TOKENS_FOR_A_SHARE, Ledger
from partita.data.rows import Rows
from partita.data.run_data import RunData, TrainingStreams
from partita.data.sources.mixed import mixed_order, row_indices_by_source
from partita.data.splits import TRAINING
from partita.data.streams.shard_group import CHUNK
from partita.data.streams.stream_loader import StreamLoader, count_shard_groups
from partita.data.token_cache import TokenCache
from partita.data.tokenized import TokenizedDataset
from partita.data.tokenizer_texts import tokenizer_texts
from partita.data.training_shape import TrainingShape, training_shape
from partita.tokenizers.load import load_tokenizer
from partita_schema.common.text import counted
from partita_schema.config import Config
from partita_schema.errors import DataError, ModelError
from partita_schema.sections.batching import ChunkBatching
from partita_schema.sections.data import LoaderOptions
from partita_trainers.batch_size.probe import BatchSize
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingRows:
    """Tokenized training rows, and how they are batched."""

    encoded: TokenizedDataset
    """The rows, or chunks of them; of streams, the first ones."""
    shape: TrainingShape
    """How the rows are batched."""
    order_inputs: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of the row order of mixed sources."""
    streams: TrainingStreams | None = None
    """The streams that rows are read from during training, if any."""


def configured_row_tokenizer(
    config: Config,
    rows: Rows,
    tokenizer: "PreTrainedTokenizerFast | None" = None,
    *,
    folder: Path,
    labels: Mapping[str, Sequence[str]],
    supervised: bool = True,
    context_length: int | None = None,
) -> RowTokenizer:
    """Return the row tokenizer of a run, without loading the weights of its model.

    Args:
        config: The configuration.
        rows: The first rows that the run reads.
        tokenizer: Replaces the tokenizer of the base model.
        folder: Base of relative paths in the configuration.
        labels: Labels by output.
        supervised: Whether the rows hold answers.
        context_length: Replaces the context of the model, in tokens.

    Raises:
        ModelError: The tokenizer cannot be used, or a file of the base model cannot be read.
    """
    from partita.lm.model_config.context_length import configured_context

    if tokenizer is None:
        tokenizer = load_tokenizer(
            config, folder=folder, texts=lambda: tokenizer_texts(rows, config, supervised=supervised)
        )
    elif not getattr(tokenizer, "is_fast", False):
        raise ModelError(f"the tokenizer is a {type(tokenizer).__name__}; pass a fast one, as AutoTokenizer loads it")
    elif tokenizer.pad_token_id is None:
        raise ModelError("the tokenizer has no pad token; set tokenizer.pad_token = tokenizer.eos_token")
    known_length, answers = configured_context(config, folder=folder)
    return build_row_tokenizer(
        config,
        tokenizer=tokenizer,
        context_length=known_length if context_length is None else context_length,
        answers=answers,
        labels=labels,
        retriever=build_retriever(config, training=rows, folder=folder),
        folder=folder,
    )


def tokenized_rows(data: RunData, row_tokenizer: RowTokenizer, ledger: Ledger, *, ranks: int) -> TrainingRows:
    """Tokenize the training rows, or the first ones of streams.

    Args:
        data: The opened rows.
        row_tokenizer: Tokenizes the rows.
        ledger: Counts the rows.
        ranks: Number of ranks that share the batches of a step.
    """
    if data.streams is not None:
        encoded = encode_first(data, row_tokenizer)
    else:
        config, rows = data.config.data, expanded(data.splits[TRAINING], row_tokenizer.expander)
        cache = TokenCache.of_user() if config.encode == "cache" else None
        encoded = encode_training(rows, row_tokenizer, ledger, options=config.loader, cache=cache)
    assert encoded is not None
    return batch_rows(data, encoded, row_tokenizer, ranks=ranks)


def encode_training(
    rows: Rows,
    row_tokenizer: RowTokenizer,
    ledger: Ledger,
    *,
    options: LoaderOptions,
    cache: TokenCache | None,
    progress: Callable[[int], None] | None = None,
) -> TokenizedDataset:
    """Tokenize the training rows. Raise DataError if too many rows or tokens cannot be used.

    Args:
        rows: The rows; dialogues are already expanded.
        row_tokenizer: Tokenizes the rows.
        ledger: Counts the rows.
        options: Worker processes and prefetching.
        cache: The token cache, if the configuration asks for it.
        progress: Called with the number of rows processed since the last call.
    """
    encode = TokenizedDataset.build if cache is None else cache.encode
    encoded = encode(rows, row_tokenizer, ledger=ledger, options=options, progress=progress)
    ledger.refuse_unknown_tokens(TRAINING)
    if row_tokenizer.formatter.config.output_features[0].has_label:
        refuse_one_label(row_tokenizer.formatter.config, encoded)
    return encoded


def refuse_one_label(config: Config, encoded: TokenizedDataset) -> None:
    """Raise DataError if all answers are good, or all are bad."""
    only, [output] = only_label(encoded), config.output_features
    if only is not None:
        raise DataError(
            f"all {len(encoded):,} training answers are {only} by the column {output.more_columns[0]}, and good ones "
            "are compared with bad ones; add rows of the other kind"
        )


def only_label(encoded: TokenizedDataset) -> str | None:
    """Return good or bad if all answers have this label; None if there are both, or none has a label."""
    values = encoded.row_values_NK
    if values is None or not len(values) or (values != values[0]).any():
        return None
    return "good" if values[0, 0] else "bad"


def batch_rows(
    data: RunData,
    encoded: TokenizedDataset,
    row_tokenizer: RowTokenizer,
    *,
    ranks: int = 1,
    recorded_batches: int | None = None,
) -> TrainingRows:
    """Cut documents into chunks if configured, order the rows of a mix, and resolve the batching.

    Args:
        data: The rows of the run.
        encoded: The tokenized training rows; of streams, the first ones.
        row_tokenizer: Tokenized the rows.
        ranks: Number of ranks that share the batches of a step.
        recorded_batches: Batches per step of a run to resume.
    """
    encoded = chunks_of(data.config, encoded, row_tokenizer)
    mixed = mixed_order(data.config.data, encoded.keys) if data.mixed and data.streams is None else None
    shape = training_shape(
        data.config,
        encoded,
        order=mixed.order if mixed is not None else None,
        more_rows=data.streams is not None,
        ranks=ranks,
        recorded_batches=recorded_batches,
        chunk_length=row_tokenizer.chunk_length,
    )
    return TrainingRows(encoded, shape, mixed.fingerprint_inputs if mixed is not None else {}, data.streams)


def chunks_of(config: Config, documents: TokenizedDataset, row_tokenizer: RowTokenizer) -> TokenizedDataset:
    """Return documents cut into chunks, if `data.batching` says so; other rows as they are."""
    batching = config.data.batching
    if not isinstance(batching, ChunkBatching) or row_tokenizer.chunk_length is None:
        return documents
    sources_N = np.zeros(len(documents), dtype=np.int64)
    for number, indices in enumerate(row_indices_by_source(config.data, documents.keys).values()):
        sources_N[indices] = number
    return cut_chunks(documents, row_tokenizer.chunk_length, isolate=batching.isolate_documents, sources_N=sources_N)


def encode_first(data: RunData, row_tokenizer: RowTokenizer) -> TokenizedDataset | None:
    """Tokenize the first rows of streams, to estimate lengths. The ledger counts them later, as they are read."""
    if data.training is None:
        return None
    rows = expanded(data.training, row_tokenizer.expander)
    ledger = Ledger(None, max_bad_rows=1.0)
    encoded = TokenizedDataset.build(rows, row_tokenizer, ledger=ledger, options=data.config.data.loader, chunk=CHUNK)
    ledger.refuse_unknown_tokens(TRAINING, least=LOSS_TOKENS_FOR_A_SHARE)
    output = data.config.output_features[0]
    if output.has_label and (only := only_label(encoded)) is not None:
        logger.warning(
            "the first %s of the stream are %s by the column %s, and good ones are compared with bad ones; training "
            "stops if the next ones are %s too",
            *(counted(len(encoded), "answer"), only, output.more_columns[0], only),
        )
    return encoded


@dataclass(frozen=True, kw_only=True)
class LoaderSetup:
    """Everything that the loader of training rows needs."""

    config: Config
    rows: TrainingRows
    row_tokenizer: RowTokenizer
    """Tokenizes streamed rows."""
    ledger: Ledger
    """Counts the streamed rows that cannot be used."""
    size: BatchSize
    """Batch size, with its number of tokens if batches are filled up to one."""
    batches_per_step: int
    """Batches in one step, summed over all ranks."""
    folder: Path
    """Base of relative paths in the configuration."""
    process_group: ProcessGroup = SINGLE_PROCESS
    """The ranks that share the batches of a step."""

    def open(self) -> IndexedLoader | StreamLoader:
        """Return the loader.

        Raises:
            DataError: There is nothing to read, or the batches of a step cannot be divided evenly among the ranks.
            ConfigError: The class in data.collate does not exist.
        """
        return self._indexed_loader() if self.rows.streams is None else self._stream_loader(self.rows.streams)

    def _indexed_loader(self) -> IndexedLoader:
        """Return the loader of tokenized rows."""
        return IndexedLoader(
            self.rows.encoded,
            settings=self._settings,
            pad_token_id=self._pad_token_id,
            order=self.rows.shape.order,
            more_inputs={**self.rows.order_inputs, **self._collate_inputs()},
            collate_batch=self._collate(),
            resume=self.config.data.resume,
            process_group=self.process_group,
        )

    def _stream_loader(self, streams: TrainingStreams) -> StreamLoader:
        """Return the loader that reads and tokenizes rows of streams during training."""
        shape = self.rows.shape
        num_groups = count_shard_groups(self.batches_per_step, sources=len(streams.sources))
        return StreamLoader(
            streams.plan(self._settings.policy(), num_groups=num_groups, chunks=shape.chunks),
            self.row_tokenizer,
            options=self.config.data.loader,
            batches_per_step=self.batches_per_step,
            more_inputs=self._settings.fingerprint_inputs() | self._collate_inputs(),
            ledger=self.ledger,
            collate_batch=self._collate(),
            resume=self.config.data.resume,
            process_group=self.process_group,
        )

    @property
    def _settings(self) -> BatchSettings:
        return BatchSettings(
            batching=self.rows.shape.batching,
            batch_size=self.size.rows,
            max_tokens=self.size.max_tokens,
            batches_per_step=self.batches_per_step,
            seed=self.config.seed,
        )

    def _collate(self) -> Collate:
        """Return what builds the tensors of a batch."""
        two_sided = isinstance(self.row_tokenizer, SideRowTokenizer)
        return build_collate(
            self.config.data.collate, folder=self.folder, pad_token_id=self._pad_token_id, two_sided=two_sided
        )

    def _collate_inputs(self) -> dict[str, str]:
        return collate_inputs(self.config.data.collate, folder=self.folder)

    @property
    def _pad_token_id(self) -> int:
        return int(self.row_tokenizer.formatter.tokenizer.pad_token_id)
