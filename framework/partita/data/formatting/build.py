"""Build the row tokenizer of a run: for a causal model, an encoder-decoder, or a model with a head."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from partita.data.formatting.base import Retriever
from partita.data.formatting.formatter import CustomFormatter, Formatter
from partita.data.formatting.head_tokenizer import HeadTokenizer
from partita.data.formatting.preferences import LabelTokenizer, PreferenceTokenizer, RewardTokenizer
from partita.data.formatting.row_tokenizer import RowTokenizer
from partita.data.formatting.sides import SideLimits, SideRowTokenizer
from partita.data.formatting.texts_tokenizer import EmbeddingTokenizer, PairTokenizer
from partita.data.formatting.word_tokenizer import WordTokenizer
from partita.lm.base import AnswerContext
from partita_schema.config import Config
from partita_schema.errors import ModelError
from partita_schema.rules.new_models import ABOVE_THE_CONTEXT
from partita_schema.sections.batching import Batching, ChunkBatching

HEAD_TOKENIZERS: Mapping[str, type[HeadTokenizer]] = {
    "text": HeadTokenizer,
    "words": WordTokenizer,
    "pair": PairTokenizer,
    "texts": EmbeddingTokenizer,
}
"""By what the head reads of a row."""
DEFAULT_CHUNK = 2048
"""Maximum tokens of a chunk, unless the configuration sets them."""


def build_row_tokenizer(
    config: Config,
    *,
    tokenizer: Any,
    context_length: int | None,
    answers: AnswerContext | None = None,
    labels: Mapping[str, Sequence[str]] | None = None,
    retriever: Retriever | None = None,
    folder: Path | None = None,
) -> RowTokenizer:
    """Return the row tokenizer of a run.

    Args:
        config: The configuration.
        tokenizer: A fast transformers tokenizer.
        context_length: The model's context in tokens; None for no limit.
        answers: The context of answers, for an encoder-decoder.
        labels: Labels of each output.
        retriever: Selects worked examples for each row.
        folder: Folder of the configuration file.

    Raises:
        ModelError: If preprocessing.global_max_sequence_length exceeds the context.
    """
    if answers is not None:
        # A template would add special tokens, which the tokenizer adds to both sides itself.
        config = config.model_copy(update={"prompt": config.prompt.model_copy(update={"chat": False})})
    wanted = config.preprocessing.global_max_sequence_length
    if wanted is not None and context_length is not None and wanted > context_length and answers is None:
        raise ModelError(
            "preprocessing.global_max_sequence_length: "
            + ABOVE_THE_CONTEXT.format(wanted, context_length, context_length)
        )
    outputs = config.output_features
    formatter = (
        Formatter(config, tokenizer=tokenizer, labels=labels, retriever=retriever)
        if config.data.formatter is None
        else CustomFormatter(config, tokenizer=tokenizer, folder=folder)
    )
    if (output := config.head_output) is not None and not config.scores_answers:
        known = (labels or {}).get(output.name) or output.answer_labels(())
        return HEAD_TOKENIZERS[output.head_reads](formatter, max_length=wanted or context_length, labels=tuple(known))
    answer_limit = outputs[0].length_limit if len(outputs) == 1 and outputs[0].truncated else None
    if answers is not None:
        limits = SideLimits(context_length, answers.length)
        return SideRowTokenizer(formatter, max_length=wanted, answer_limit=answer_limit, sides=limits)
    chunk_length = length_of_chunks(config.data.batching, context_length)
    kind = answer_tokenizer(config)
    return kind(
        formatter,
        max_length=wanted or context_length if chunk_length is None else None,
        answer_limit=answer_limit,
        completion_only=getattr(config.trainer, "completion_only_loss", True),
        chunk_length=chunk_length,
        beginning=beginning_of(tokenizer),
    )


def answer_tokenizer(config: Config) -> type[RowTokenizer]:
    """Return the class that tokenizes prompts with answers."""
    output = config.output_features[0]
    if output.has_pairs:
        return RewardTokenizer if config.scores_answers else PreferenceTokenizer
    return LabelTokenizer if output.has_label else RowTokenizer


def length_of_chunks(batching: Batching, context_length: int | None) -> int | None:
    """Return the tokens of a chunk with `data.batching: {type: chunk}`, else None.

    Raises:
        ModelError: If it exceeds the model's context.
    """
    if not isinstance(batching, ChunkBatching):
        return None
    length = batching.context_length or min(DEFAULT_CHUNK, context_length or DEFAULT_CHUNK)
    if context_length is not None and length > context_length:
        raise ModelError(
            f"data.batching.context_length: {ABOVE_THE_CONTEXT.format(length, context_length, context_length)}"
        )
    return length


def beginning_of(tokenizer: Any) -> tuple[int, ...]:
    """Return the BOS token if the tokenizer puts one before a text, else nothing."""
    ids = tokenizer("", verbose=False)["input_ids"]
    return (ids[0],) if ids and ids[0] == tokenizer.bos_token_id else ()
