"""From a configuration to its pipeline: language model, tokenizer of rows and decoder, shared by all verbs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from partita.data.batching.collate import EvaluationBatches
from partita.data.column_checks import has_answers
from partita.data.dialogue import expanded
from partita.data.formatting.build import build_row_tokenizer
from partita.data.formatting.retrieval import build_retriever
from partita.data.formatting.row_tokenizer import RowTokenizer
from partita.data.ledger import Ledger
from partita.data.rows import Rows
from partita.data.token_cache import TokenCache
from partita.data.tokenized import TokenizedDataset
from partita.data.tokenizer_texts import tokenizer_texts
from partita.generation.answer_lengths import DEFAULT_NEW_TOKENS, default_new_tokens, new_tokens_by_output
from partita.generation.engine import EngineSupport, refuse_without_slots
from partita.generation.generator import Generator, LocalGenerator
from partita.generation.job import PredictionPipeline
from partita.generation.requests import AnswerSequence
from partita.lm.bag_model import load_bag
from partita.lm.base import AnswerContext, GenerationOptions, GenerativeModel, Label
from partita.lm.batch_generation.generation import check_token_ids, generation_options, log_checkpoint_settings
from partita.lm.decoding.generation_defaults import effective_generation
from partita.lm.heads.base import Head
from partita.lm.load_model import load_model
from partita.outputs.constraints import scored_labels, with_constraints
from partita.outputs.decode import Decoder
from partita.outputs.registry import output_type
from partita.runs.waiting import waiting
from partita.tokenizers.load import load_tokenizer
from partita_schema.config import Config
from partita_schema.errors import DataError
from partita_schema.sections.model import EmbeddingBagModel

if TYPE_CHECKING:
    from partita_trainers.base import Batch

Labels = Mapping[str, tuple[str, ...]]

ROWS_TO_START_FROM = 4
"""Rows per batch for an adapter's data-dependent init, before a batch size can be measured."""
NO_LIMIT = 10**9
"""Tokenizers without a maximum length report a far larger number."""


@dataclass(frozen=True, kw_only=True)
class Pipeline(PredictionPipeline):
    """Everything that a verb needs, wherever the model is."""

    row_tokenizer: RowTokenizer
    folder: Path
    """Folder that relative paths of the file are resolved against."""
    labels: Labels
    """Labels by output."""
    tokens: TokenCache | None = None
    """Token cache shared between runs; None if each run tokenizes itself."""


@dataclass(frozen=True, kw_only=True)
class LocalPipeline(Pipeline):
    """Everything that a verb needs, with a model in this process."""

    lm: GenerativeModel
    trainable: bool
    """Whether the model is loaded for training."""


AnyPipeline = TypeVar("AnyPipeline", bound=Pipeline)


class CheckpointedModel(EngineSupport, Protocol):
    """A model loaded from a checkpoint, in this process or on workers."""

    @property
    def tokenizer(self) -> Any:
        """Tokenizes prompts."""

    @property
    def checkpoint_generation(self) -> Mapping[str, Any]:
        """Content of the checkpoint's generation_config.json."""

    @property
    def vocabulary_size(self) -> int:
        """Number of logits per position."""


@waiting("loading the model")
def build_pipeline(
    config: Config,
    *,
    folder: Path,
    labels: Labels,
    training: Rows | None,
    saved: Path | None = None,
    tokenizer_folder: Path | None = None,
    trainable: bool,
) -> LocalPipeline:
    """Load the model and build the pipeline of a run.

    Args:
        config: The configuration.
        folder: Folder that relative paths are resolved against.
        labels: Labels by output.
        training: Training rows, for a new model's tokenizer, the examples of retrieval, and data-dependent inits.
        saved: Folder of trained weights to load instead of the base model's.
        tokenizer_folder: Folder in which the tokenizer of a new model is kept.
        trainable: Whether to prepare the model for training.
    """
    new_texts = partial(training_texts, config, training)
    tokenizer = load_tokenizer(config, folder=folder, texts=new_texts, saved=saved, cache_folder=tokenizer_folder)
    retriever = build_retriever(config, training=training, folder=folder)

    def new_row_tokenizer(context_length: int | None, answers: AnswerContext | None = None) -> RowTokenizer:
        return build_row_tokenizer(
            config,
            tokenizer=tokenizer,
            context_length=context_length,
            answers=answers,
            labels=labels,
            retriever=retriever,
            folder=folder,
        )

    def batches() -> Iterator["Batch"]:
        limit = tokenizer.model_max_length
        return initial_batches(config, training, new_row_tokenizer(limit if limit < NO_LIMIT else None), tokenizer)

    lm: GenerativeModel
    if isinstance(config.base_model, EmbeddingBagModel):
        bag_labels = labels_of_bag(config, labels, new_row_tokenizer(None))
        lm = load_bag(config, tokenizer=tokenizer, labels=bag_labels, saved=saved)
    else:
        lm = load_model(
            config,
            folder=folder,
            tokenizer=tokenizer,
            saved=saved,
            batches=batches,
            trainable=trainable,
            head=head_of(config, labels),
        )
        if lm.head is not None and config.head_output is not None:  # in the order of the checkpoint's head
            labels = {**labels, config.head_output.name: lm.head.labels}
    generator = LocalGenerator(lm)
    row_tokenizer = new_row_tokenizer(lm.context_length, lm.answer_context)
    pipeline = assemble_pipeline(config, lm, generator, row_tokenizer, folder=folder, labels=labels)
    return LocalPipeline(**vars(pipeline), lm=lm, trainable=trainable)


def head_of(config: Config, labels: Labels) -> Head | None:
    """Return the head of the output that is predicted by one, with its labels as far as they are known, else None."""
    output = config.head_output
    return None if output is None else output_type(output).head(labels.get(output.name, ()))


def labels_of_bag(config: Config, labels: Labels, row_tokenizer: RowTokenizer) -> tuple[Label, ...]:
    """Return the labels of an embedding bag. Raise ModelError if two of them have the same tokens."""
    output = config.output_features[0]
    advice = "write a larger one, or rename a label"
    return scored_labels(output, labels, row_tokenizer, at="base_model.vocab_size", advice=advice)


def assemble_pipeline(
    config: Config,
    model: CheckpointedModel,
    generator: Generator,
    row_tokenizer: RowTokenizer,
    *,
    folder: Path,
    labels: Labels,
) -> Pipeline:
    """Build the pipeline of a model that is loaded, in this process or on workers.

    Args:
        config: The configuration.
        model: The model, or the workers that hold it.
        generator: Generates with it.
        row_tokenizer: Tokenizes rows.
        folder: Folder that relative paths are resolved against.
        labels: Labels by output.

    Raises:
        ModelError: The model cannot constrain its answers as the file asks, or does not have a token id in the file.
    """
    check_token_ids(config.generation, size=model.vocabulary_size)
    shipped = model.checkpoint_generation
    options = generation_options(config, tokenizer=model.tokenizer, checkpoint=shipped)
    generation = with_constraints(options, config, labels=labels, row_tokenizer=row_tokenizer)
    if not generation.labels:  # else nothing is generated
        log_checkpoint_settings(config.generation, shipped)
    if generation.constraint_hash and (reason := model.why_no_slots(generation, tokens=1)) is not None:
        refuse_without_slots(generation, reason, support=model.batch_support(generation, tokens=1))
    most = effective_generation(config.generation, shipped).value("max_new_tokens")
    otherwise = most or DEFAULT_NEW_TOKENS
    needed = default_new_tokens(config, tokenizer=model.tokenizer, labels=labels, otherwise=otherwise)
    sequence = None
    if config.answers_in_sequence:
        sequence = answer_sequence(config, generation, row_tokenizer, labels=labels, otherwise=otherwise)
        needed = sequence.max_tokens()
    return Pipeline(
        config=config,
        generator=generator,
        folder=folder,
        labels=labels,
        row_tokenizer=row_tokenizer,
        decoder=Decoder(config, labels=labels),
        generation=generation,
        max_new_tokens=max((len(label.ids) for label in generation.labels), default=needed),
        sequence=sequence,
        tokens=TokenCache.of_user() if config.data.encode == "cache" else None,
    )


def answer_sequence(
    config: Config, options: GenerationOptions, row_tokenizer: RowTokenizer, *, labels: Labels, otherwise: int
) -> AnswerSequence:
    """Return the answers of a dialogue turn that follow one another.

    Args:
        config: The configuration.
        options: Generation options with the constraints of each output.
        row_tokenizer: Tokenizes rows.
        labels: Labels by output.
        otherwise: Tokens for an output without a limit.
    """
    limits = new_tokens_by_output(
        config, tokenizer=row_tokenizer.formatter.tokenizer, labels=labels, otherwise=otherwise
    ).values()
    longest = [max((len(label.ids) for label in constraint.labels), default=0) for constraint in options.constraints]
    names = tuple(output.name for output in config.output_features)
    new_tokens = tuple(label or limit for label, limit in zip(longest, limits, strict=True))
    return AnswerSequence(names, new_tokens, row_tokenizer.question_tokens(names))


def training_texts(config: Config, training: Rows | None) -> Iterator[str]:
    """Yield the training texts of the tokenizer of a new model. They are read lazily: a byte tokenizer needs none.

    Raises:
        DataError: There are no rows.
    """
    if training is None:
        raise DataError("a new model needs rows for its tokenizer; write data.source in the file")
    # Rows to train on always have answers; rows to predict need not.
    supervised = config.trains or has_answers(training, config)
    yield from tokenizer_texts(training, config, supervised=supervised)


def initial_batches(
    config: Config, training: Rows | None, row_tokenizer: RowTokenizer, tokenizer: Any
) -> Iterator["Batch"]:
    """Yield training batches for an adapter with a data-dependent init.

    Args:
        config: The configuration.
        training: The training rows.
        row_tokenizer: Tokenizes rows.
        tokenizer: Names the padding token.

    Raises:
        DataError: There are no training rows.
    """
    if training is None:
        raise DataError("this adapter's init looks at training rows; write data.source in the file")
    ledger = Ledger(None, max_bad_rows=config.data.max_bad_rows)
    encoded = TokenizedDataset.build(expanded(training, row_tokenizer.expander), row_tokenizer, ledger=ledger)
    configured = config.trainer.batch_size
    batch_size = ROWS_TO_START_FROM if configured == "auto" else configured
    return iter(EvaluationBatches(encoded, batch_size=batch_size, pad_token_id=tokenizer.pad_token_id))
