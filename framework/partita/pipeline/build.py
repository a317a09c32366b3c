"""From a configuration to its pipeline: language model, tokenizer of rows and decoder, shared by all verbs."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.backends.endpoint.messages import Messages
from partita.backends.endpoint.protocol import server_options
from partita.backends.endpoint.server import EndpointClient, server_of
from partita.backends.ray.worker_pool import WorkerPool
from partita.data.batching.evaluation_batches import EvaluationBatches
from partita.data.dialogue.expand import expanded
from partita.data.formatting.formatter import Formatter
from partita.data.formatting.retrieval import build_retriever
from partita.data.formatting.row_tokenizer import RowTokenizer, build_row_tokenizer
from partita.data.ledger import Ledger
from partita.data.rows import Rows
from partita.data.splits import has_answers
from partita.data.token_cache import TokenCache
from partita.data.tokenized import TokenizedDataset, texts
from partita.generation.engine import refuse_without_slots
from partita.generation.predict import DEFAULT_NEW_TOKENS, default_new_tokens
from partita.lm.bag_model import load_bag
from partita.lm.base import GenerationOptions, GenerativeModel, Label
from partita.lm.generation import generation_options, log_checkpoint_settings
from partita.lm.generation_defaults import effective_generation
from partita.lm.huggingface import load_model
from partita.outputs.decode import Decoder
from partita.outputs.form import in_form, scored_labels
from partita.tokenizers.load import load_tokenizer
from partita_schema.config import Config
from partita_schema.errors import DataError
from partita_schema.features import CategoryOutput
from partita_schema.model import EmbeddingBagModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from partita_trainers.base import Batch

Labels = Mapping[str, tuple[str, ...]]

ROWS_TO_START_FROM = 4
"""Rows per batch for an adapter's data-dependent init, before a batch size can be measured."""
NO_LIMIT = 10**9
"""Tokenizers without a maximum length report a far larger number."""


@dataclass(frozen=True, kw_only=True)
class PipelineParts:
    """The parts of a run except the model."""

    config: Config
    folder: Path
    """Folder that relative paths of the file are resolved against."""
    labels: Labels
    """Labels by category output."""
    encoder: RowTokenizer
    decoder: Decoder
    generation: GenerationOptions
    max_new_tokens: int
    """Limit of generated tokens per answer."""
    tokens: TokenCache | None = None
    """Token cache shared between runs; None if each run tokenizes itself."""


@dataclass(frozen=True, kw_only=True)
class Pipeline(PipelineParts):
    """The parts of a run with a model in this process."""

    lm: GenerativeModel
    trainable: bool
    """Whether the model is loaded for training."""


@dataclass(frozen=True, kw_only=True)
class EndpointPipeline(PipelineParts):
    """The parts of a run whose model is on a server."""

    lm: EndpointClient


@dataclass(frozen=True, kw_only=True)
class RayPipeline(PipelineParts):
    """The parts of a run whose model is on Ray workers."""

    lm: WorkerPool


def build_pipeline(
    config: Config,
    *,
    folder: Path,
    labels: Labels,
    training: Rows | None,
    saved: Path | None = None,
    tokenizer_folder: Path | None = None,
    trainable: bool,
) -> Pipeline:
    """Load the model and build all parts of a run.

    Args:
        config: The configuration.
        folder: Folder that relative paths are resolved against.
        labels: Labels by category output.
        training: Training rows, for a new model's tokenizer, the examples of retrieval, and data-dependent inits.
        saved: Folder of trained weights to load instead of the base model's.
        tokenizer_folder: Folder in which the tokenizer of a new model is kept.
        trainable: Whether to prepare the model for training.
    """

    new_texts = partial(training_texts, config, training)
    tokenizer = load_tokenizer(config, folder=folder, texts=new_texts, saved=saved, kept=tokenizer_folder)
    retriever = build_retriever(config, training=training, folder=folder)

    def encoder(context_length: int | None) -> RowTokenizer:
        return build_row_tokenizer(
            config,
            tokenizer=tokenizer,
            context_length=context_length,
            labels=labels,
            retriever=retriever,
            folder=folder,
        )

    def batches() -> Iterator["Batch"]:
        limit = tokenizer.model_max_length
        return initial_batches(config, training, encoder(limit if limit < NO_LIMIT else None), tokenizer)

    lm: GenerativeModel
    if isinstance(config.base_model, EmbeddingBagModel):
        bag_labels = labels_of_bag(config, labels, encoder(None))
        lm = load_bag(config, tokenizer=tokenizer, labels=bag_labels, saved=saved)
    else:
        lm = load_model(config, folder=folder, tokenizer=tokenizer, saved=saved, batches=batches, trainable=trainable)
    parts = prediction_parts(config, lm, encoder(lm.context_length), folder=folder, labels=labels)
    return Pipeline(**vars(parts), lm=lm, trainable=trainable)


def labels_of_bag(config: Config, labels: Labels, encoder: RowTokenizer) -> tuple[Label, ...]:
    """Return the labels of an embedding bag. Raise ModelError if two of them have the same tokens."""
    output = config.output_features[0]
    assert isinstance(output, CategoryOutput), "the file is refused with another output"
    advice = "write a larger one, or rename a label"
    return scored_labels(output, labels, encoder, at="base_model.vocab_size", advice=advice)


def build_ray_pipeline(
    config: Config,
    start: Callable[["PreTrainedTokenizerFast"], WorkerPool],
    *,
    folder: Path,
    labels: Labels,
    training: Rows | None,
    saved: Path | None,
) -> RayPipeline:
    """Build the parts of a run on Ray workers; rows are tokenized in this process, which does not load the model.

    Args:
        config: The configuration.
        start: Starts the workers; called with the tokenizer.
        folder: Folder that relative paths are resolved against.
        labels: Labels by category output.
        training: Training rows, if anything needs them.
        saved: Folder of the trained weights, or None.
    """
    tokenizer = load_tokenizer(config, folder=folder, texts=partial(training_texts, config, training), saved=saved)
    retriever = build_retriever(config, training=training, folder=folder)
    pool = start(tokenizer)
    encoder = build_row_tokenizer(
        config,
        tokenizer=tokenizer,
        context_length=pool.context_length,
        labels=labels,
        retriever=retriever,
        folder=folder,
    )
    return RayPipeline(**vars(prediction_parts(config, pool, encoder, folder=folder, labels=labels)), lm=pool)


def prediction_parts(
    config: Config, lm: GenerativeModel | WorkerPool, encoder: RowTokenizer, *, folder: Path, labels: Labels
) -> PipelineParts:
    """Build the parts for prediction.

    Args:
        config: The configuration.
        lm: The model, or the pool of workers that hold it.
        encoder: Tokenizes rows.
        folder: Folder that relative paths are resolved against.
        labels: Labels by category output.

    Raises:
        ModelError: The model cannot constrain its answers as the file asks.
    """
    shipped = lm.checkpoint_generation
    options = generation_options(config, tokenizer=lm.tokenizer, checkpoint=shipped)
    generation = in_form(options, config, labels=labels, encoder=encoder)
    if not generation.labels:
        log_checkpoint_settings(config.generation, shipped)
    if generation.form and (reason := lm.why_no_slots(generation, tokens=1)) is not None:
        refuse_without_slots(generation, reason)
    most = effective_generation(config.generation, shipped).value("max_new_tokens")
    needed = default_new_tokens(config, tokenizer=lm.tokenizer, labels=labels, otherwise=most or DEFAULT_NEW_TOKENS)
    return PipelineParts(
        config=config,
        folder=folder,
        labels=labels,
        encoder=encoder,
        decoder=Decoder(config, labels=labels),
        generation=generation,
        max_new_tokens=max((len(label.ids) for label in generation.labels), default=needed),
        tokens=TokenCache.of_user() if config.data.encode == "cache" else None,
    )


def training_texts(config: Config, training: Rows | None) -> Iterator[str]:
    """Yield the texts that the tokenizer of a new model is trained on."""
    if training is None:
        raise DataError("a new model needs rows for its tokenizer; write data.source in the file")
    # Rows to train on always have answers; rows to predict need not.
    supervised = config.trainer.type != "none" or has_answers(training, config)
    return texts(training, config, supervised=supervised)


def build_endpoint_pipeline(config: Config, *, folder: Path, labels: Labels, training: Rows | None) -> EndpointPipeline:
    """Build the parts of a run on a server.

    Args:
        config: The configuration.
        folder: Folder that relative paths are resolved against.
        labels: Labels by category output.
        training: Rows from which retrieval takes its examples.
    """
    server = server_of(config)
    retriever = build_retriever(config, training=training, folder=folder)
    chat = Messages(system=config.prompt.system) if server.mode == "chat" else None
    formatter = Formatter(config, tokenizer=server.tokenizer, labels=labels, retriever=retriever, chat=chat)
    return EndpointPipeline(
        config=config,
        folder=folder,
        lm=server,
        labels=labels,
        encoder=RowTokenizer(formatter),
        decoder=Decoder(config, labels=labels),
        generation=server_options(config),
        # A label is never shorter in bytes than in tokens.
        max_new_tokens=default_new_tokens(config, tokenizer=server.tokenizer, labels=labels),
    )


def initial_batches(config: Config, training: Rows | None, encoder: RowTokenizer, tokenizer: Any) -> Iterator["Batch"]:
    """Yield training batches for an adapter with a data-dependent init.

    Args:
        config: The configuration.
        training: The training rows.
        encoder: Tokenizes rows.
        tokenizer: Names the padding token.

    Raises:
        DataError: There are no training rows.
    """
    if training is None:
        raise DataError("this adapter's init looks at training rows; write data.source in the file")
    ledger = Ledger(None, max_bad_rows=config.data.max_bad_rows)
    encoded = TokenizedDataset.build(expanded(training, encoder.expander), encoder, ledger=ledger)
    configured = config.trainer.batch_size
    batch_size = ROWS_TO_START_FROM if configured == "auto" else configured
    return iter(EvaluationBatches(encoded, batch_size=batch_size, pad_token_id=tokenizer.pad_token_id))
