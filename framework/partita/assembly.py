"""From a file to running parts: language model, encoder, decoder. Made once, used by every verb."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.data.dialogue.expand import expanded
from partita.data.encoded import EncodedRows, texts
from partita.data.evaluation_batches import EvaluationBatches
from partita.data.ledger import Ledger
from partita.data.rows import Rows
from partita.data.shaping.encoder import Encoder, build_encoder
from partita.data.shaping.retrieval import build_retriever
from partita.data.splits import has_answers
from partita.data.token_cache import TokenCache
from partita.inference.decode import Decoder
from partita.inference.predict import default_new_tokens
from partita.lm.base import GenerationOptions, GenerativeModel
from partita.lm.generation import generation_options
from partita.lm.huggingface import load_model
from partita.lm.tokenizers import load_tokenizer
from partita_schema.config import Config
from partita_schema.errors import DataError
from partita_schema.rows import row_schema

if TYPE_CHECKING:
    from partita_trainers.base import Batch

Labels = Mapping[str, tuple[str, ...]]

ROWS_TO_START_FROM = 4
"""Rows of a batch that an adapter's init looks at, before any size can be measured."""
NO_LIMIT = 10**9
"""Tokenizers without a length say a far larger number."""


@dataclass(frozen=True)
class Assembly:
    """The parts of a run on this process."""

    config: Config
    folder: Path
    """Where relative paths of the file start."""
    lm: GenerativeModel
    labels: Labels
    """Labels of each category output."""
    encoder: Encoder
    decoder: Decoder
    generation: GenerationOptions
    max_new_tokens: int
    """Tokens of an answer at most."""
    trainable: bool
    """Whether the model can be trained, or only used."""
    tokens: TokenCache | None = None
    """Where tokens are kept between runs; None where each run makes its own."""


def assemble(
    config: Config,
    *,
    folder: Path,
    labels: Labels,
    training: Rows | None,
    saved: Path | None = None,
    tokenizer_folder: Path | None = None,
    trainable: bool,
) -> Assembly:
    """All parts of a run.

    `folder` is where relative paths start. `training` rows give a new model its tokenizer, retrieval its examples and
    some adapters their start. With `saved` the model is the one that was saved in that folder. In `tokenizer_folder` a
    new model's tokenizer is kept.
    """

    def training_texts() -> Iterator[str]:
        if training is None:
            raise DataError("a new model needs rows for its tokenizer; write data.source in the file")
        # What is trained has answers always, what is only asked need not.
        supervised = config.trainer.type != "none" or has_answers(training, config)
        return texts(training, config, schema=row_schema(config, supervised=supervised))

    tokenizer = load_tokenizer(config, folder=folder, texts=training_texts, saved=saved, kept=tokenizer_folder)
    retriever = build_retriever(config, training=training, folder=folder)

    def encoder(context_length: int | None) -> Encoder:
        return build_encoder(
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

    lm = load_model(config, folder=folder, tokenizer=tokenizer, saved=saved, batches=batches, trainable=trainable)
    return Assembly(
        config=config,
        folder=folder,
        lm=lm,
        labels=labels,
        encoder=encoder(lm.context_length),
        decoder=Decoder(config, labels=labels),
        generation=generation_options(config, tokenizer=tokenizer),
        max_new_tokens=default_new_tokens(config, tokenizer=tokenizer, labels=labels),
        trainable=trainable,
        tokens=TokenCache.of_user() if config.data.encode == "cache" else None,
    )


def initial_batches(config: Config, training: Rows | None, encoder: Encoder, tokenizer: Any) -> Iterator["Batch"]:
    """Training batches for an adapter whose start depends on data."""
    if training is None:
        raise DataError("this adapter's init looks at training rows; write data.source in the file")
    ledger = Ledger(None, max_bad_rows=config.data.max_bad_rows)
    encoded = EncodedRows.build(expanded(training, encoder.expander), encoder, ledger=ledger)
    given = config.trainer.batch_size
    batch_size = ROWS_TO_START_FROM if given == "auto" else given
    return iter(EvaluationBatches(encoded, batch_size=batch_size, pad_token_id=tokenizer.pad_token_id))
