"""How rows are grouped into batches; a union on `type`."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from partita_schema.base import ConfigModel, Fraction, PositiveInt, StrictBool, rule_error


class AutoBatching(ConfigModel):
    """A batching policy chosen from the row lengths. The log shows the choice and the reason."""

    type: Literal["auto"] = "auto"
    """Choose the policy from the row lengths."""


class FixedBatching(ConfigModel):
    """Batches of batch_size rows, in shuffled order."""

    type: Literal["fixed"]
    """Do not group rows by length."""
    shuffle: StrictBool = True
    """Shuffle the rows in every epoch. false: keep the order of the data."""
    drop_last: StrictBool = False
    """Drop the last rows of an epoch if they do not fill a batch."""


class SortedBatching(ConfigModel):
    """Options of policies that sort windows of shuffled rows by length."""

    window: PositiveInt = 2048
    """Number of rows that are sorted together. A larger window means less padding but less randomness."""
    noise: Fraction = 0.0
    """Random change of lengths before sorting, as a fraction: 0.1 changes them by up to 10 %. More noise means more
    randomness but more padding."""
    longest_first: StrictBool = False
    """Start each epoch with the longest rows, so that a batch too large for memory fails at once."""


class BucketBatching(SortedBatching):
    """Batches of rows with similar length: windows of shuffled rows are sorted by length and cut into batches, and the
    batches are shuffled."""

    type: Literal["bucket"]
    """Group rows of similar length into batches of batch_size rows."""
    length_spread: PositiveInt | None = None
    """Maximum difference in tokens between the shortest and the longest row of a batch; such batches may have fewer
    rows. Default: no limit."""
    drop_last: StrictBool = False
    """Drop batches with fewer than batch_size rows."""


class TokenBudgetBatching(SortedBatching):
    """Batches of rows with similar length, with as many rows as a token budget allows."""

    type: Literal["token_budget"]
    """Batches with a limited number of tokens."""
    max_tokens: PositiveInt | Literal["auto"] = "auto"
    """Maximum number of tokens per batch, padding included. auto: the batch size measured by `batch_size: auto` times
    the length of the longest row."""
    max_rows: PositiveInt | None = None
    """Maximum number of rows per batch. Default: no limit."""
    multiple_of: PositiveInt = 1
    """Round the number of rows of larger batches down to a multiple of this."""

    @model_validator(mode="after")
    def some_batches_are_larger_than_the_multiple(self) -> "TokenBudgetBatching":
        if self.max_rows is not None and 1 < self.multiple_of >= self.max_rows:
            raise rule_error(
                f"multiple_of: {self.multiple_of} has no effect with max_rows: {self.max_rows}, because it rounds only "
                "batches of more rows; write a larger max_rows, or remove multiple_of",
                at="multiple_of",
            )
        return self


class PackBatching(ConfigModel):
    """Several rows packed into one sequence, without attending to each other. Only the end of a sequence is padded."""

    type: Literal["pack"]
    """Pack several rows into each sequence."""
    max_tokens: PositiveInt | None = None
    """Length of a packed sequence in tokens. Default: preprocessing.global_max_sequence_length, otherwise the longest
    row."""
    window: PositiveInt = 2048
    """Number of rows that are packed together. A larger window means fuller sequences but less randomness."""


class ChunkBatching(ConfigModel):
    """Documents joined and cut into chunks of equal length, for language modelling: configurations without
    `input_features`. Every token is in one chunk; only the last chunk of a source, or of a window of a stream, is
    shorter."""

    type: Literal["chunk"]
    """Join documents and cut them into chunks."""
    context_length: Annotated[int, Field(strict=True, ge=2)] | None = None
    """Length of a chunk in tokens. Default: the model's context, at most 2,048."""
    shuffle: StrictBool = True
    """Shuffle the chunks in every epoch. false: keep the order of the data."""
    isolate_documents: StrictBool = False
    """Documents in one chunk do not attend to each other. false: a document sees those before it in its chunk."""
    window: PositiveInt = 1024
    """For streams, the number of documents that are joined and shuffled together."""


Batching = Annotated[
    AutoBatching | FixedBatching | BucketBatching | TokenBudgetBatching | PackBatching | ChunkBatching,
    Field(discriminator="type"),
]


def separates_rows(batching: Batching) -> bool:
    """Return whether several rows or documents of one sequence must not attend to each other."""
    return isinstance(batching, PackBatching) or (isinstance(batching, ChunkBatching) and batching.isolate_documents)
