"""Where rows come from, how they are split, and how they are cut into batches."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from partita_schema.base import Base, Count, Flag, Name, NonNegativeCount, Number, Share, broken, changed


class FileSource(Base):
    """Rows in files."""

    type: Literal["csv", "tsv", "json", "jsonl", "parquet", "arrow", "txt"]
    """Format of the files."""
    path: Name
    """A file, a glob, or a URL that fsspec opens. Relative paths start at the folder of the YAML file."""


class HubSource(Base):
    """Rows of a data set on the Hugging Face Hub, or of a folder in its layout."""

    type: Literal["hub"]
    """A Hub data set."""
    name: Name
    """Data set id, or a folder."""
    subset: Name | None = None
    """Configuration of the data set."""
    split: Name = "train"
    """Split of the data set."""
    revision: Name | None = None
    """Branch, tag or commit."""


Source = Annotated[FileSource | HubSource, Field(discriminator="type")]
"""A source by its type; a plain text stands for a path whose ending tells the type, or a Hub id."""


class RandomSplit(Base):
    """Rows are dealt at random, seeded."""

    type: Literal["random"] = "random"
    """A seeded deal."""
    probabilities: tuple[Share, Share, Share] = (0.9, 0.05, 0.05)
    """Shares of training, validation and test; their sum is 1."""

    @model_validator(mode="after")
    def shares_sum_to_one(self) -> "RandomSplit":
        if abs(sum(self.probabilities) - 1) > 1e-6:
            raise broken(
                f"probabilities sum to {sum(self.probabilities):g}; write three shares with the sum 1",
                at="probabilities",
            )
        if self.probabilities[0] == 0:
            raise broken(
                "the share of training is 0; write one above 0, or nothing could be learned", at="probabilities"
            )
        return self


class HashSplit(RandomSplit):
    """Rows are dealt by a hash of one column, so that a row stays where it is when others come or go."""

    type: Literal["hash"]  # type: ignore[assignment]
    """A deal by hash."""
    column: Name
    """Column that is hashed."""


class StratifySplit(RandomSplit):
    """Rows are dealt so that each label has the same shares."""

    type: Literal["stratify"]  # type: ignore[assignment]
    """A deal by label."""
    column: Name
    """Column of the label."""


class FixedSplit(Base):
    """A column says which row belongs where."""

    type: Literal["fixed"]
    """Given in the data."""
    column: Name = "split"
    """Column with 0, 1, 2 or train, validation, test."""


Split = Annotated[RandomSplit | HashSplit | StratifySplit | FixedSplit, Field(discriminator="type")]


class FixedBatching(Base):
    """Rows in shuffled order, cut every batch_size rows."""

    type: Literal["fixed"]
    """No sorting."""
    shuffle: Flag = True
    """A new order each epoch."""


class BucketBatching(Base):
    """Rows of like length together: windows of shuffled rows are sorted by length, cut, and the batches shuffled."""

    type: Literal["bucket"]
    """Sorted windows."""
    window: Count = 2048
    """Rows sorted together; more is less padding and less randomness."""


Batching = Annotated[FixedBatching | BucketBatching, Field(discriminator="type")]


class LoaderOptions(Base):
    """How batches are made ready."""

    workers: NonNegativeCount = 0
    """Processes that make batches beside the training; 0 for none. Batches are the same for any number."""
    prefetch: Count = 2
    """Batches made ahead by each worker."""


class Data(Base):
    """The rows of a run."""

    source: Source | Name | None = None
    """Rows to train on: a path, a glob, a Hub id, or a mapping with type. Default: what `train` is given."""
    validation: Source | Name | None = None
    """Rows to validate on. Default: a share of source, by split."""
    test: Source | Name | None = None
    """Rows to test on. Default: a share of source, by split."""
    split: Split | None = None
    """How source is divided. Default: random 90/5/5, less what has a source of its own."""
    batching: Batching = BucketBatching(type="bucket")
    """How rows are cut into batches."""
    loader: LoaderOptions = LoaderOptions()
    """How batches are made ready."""
    max_bad_rows: NonNegativeCount | Share = Field(default=0.01, union_mode="left_to_right")
    """Bad rows that a run accepts: a number, or a share below 1. Above it the run stops."""


class Preprocessing(Base):
    """Choice of rows and length limits for the whole run."""

    split: Split | None = None
    """The same as data.split."""
    sample_ratio: Annotated[Number, Field(gt=0, le=1)] = 1.0
    """Share of the rows that are used."""
    sample_size: Count | None = None
    """Number of rows that are used. Default: all."""
    global_max_sequence_length: Count | None = None
    """Longest example in tokens, prompt and answer together. Default: the model's context."""

    @model_validator(mode="after")
    def sample_is_said_once(self) -> "Preprocessing":
        if self.sample_size is not None and changed(self, "sample_ratio"):
            raise broken("sample_ratio and sample_size say the same; keep one", at="sample_size")
        return self
