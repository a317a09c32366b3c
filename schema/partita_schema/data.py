"""The rows of a run: how they are split, made ready and checked."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from partita_schema.base import Base, Count, Name, NonNegativeCount, Number, Positive, Share, broken, changed
from partita_schema.batching import AutoBatching, Batching
from partita_schema.dialogue import DialogueConfig
from partita_schema.sources import Source, WeightedSource, mix_names
from partita_schema.target import check_target


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


class LoaderOptions(Base):
    """How rows are made ready."""

    workers: NonNegativeCount = 0
    """Processes that encode rows beside the training; 0 for none. Batches are the same for any number."""
    prefetch: Count = 2
    """What workers are given ahead of what is used: windows of a stream, in all its lanes together; of rows by index,
    chunks of 1,000 for each worker."""
    start_method: Literal["fork", "spawn", "forkserver"] | None = None
    """How the processes are started. Default: the system's way."""
    timeout: Positive = 60.0
    """Seconds of waiting in which no process finishes any chunk of rows; then they count as hung."""


MOST_SOURCES = 1000
"""Sources of a mix: each keeps a file open, and more than these are a list of files rather than a mix."""


class Data(Base):
    """The rows of a run."""

    source: Source | Name | None = None
    """Rows to train on: a path, a glob, a Hub id, or a mapping with type. Default: what `train` is given."""
    mix: tuple[WeightedSource, ...] | None = None
    """Several sources in place of source, each with a weight; at most 1,000."""
    stop: Literal["first", "all", "all_once"] = "all"
    """When an epoch of a mix ends. first: with the first source that ends. all: when each has ended once, the shorter
    ones begin again. all_once: when each has ended, none begins again."""
    validation: Source | Name | None = None
    """Rows to validate on. Default: a share of source, by split."""
    test: Source | Name | None = None
    """Rows to test on. Default: a share of source, by split."""
    split: Split | None = None
    """How source is divided. Default: random 90/5/5, less what has a source of its own; a stream is not divided."""
    dialogue: DialogueConfig = DialogueConfig.model_construct()
    """How dialogues become rows."""
    formatter: Annotated[str, AfterValidator(check_target)] | None = None
    """`module:Class` that writes rows as text in place of prompt."""
    batching: Batching = AutoBatching.model_construct()
    """How rows are cut into batches."""
    collate: Annotated[str, AfterValidator(check_target)] | None = None
    """`module:Class` that makes tensors of a batch's rows in place of padding on the right."""
    encode: Literal["online", "cache"] = "online"
    """online: rows become tokens in each run, as they are needed. cache: once, on disk, for all runs with the same
    data, tokenizer and prompt."""
    resume: Literal["strict", "restart_epoch", "fresh"] = "strict"
    """When an interrupted run's data or plan have changed. strict: stop and say what. restart_epoch: go on with the
    weights at the beginning of the epoch. fresh: go on with the weights at the beginning of the data."""
    loader: LoaderOptions = LoaderOptions.model_construct()
    """How rows are made ready."""
    max_row_bytes: Count = 64_000_000
    """Longest row of a text file in bytes, decompressed. A longer line is a bad row, so that a broken or hostile file
    cannot fill the memory."""
    max_bad_rows: NonNegativeCount | Share = Field(default=0.01, union_mode="left_to_right")
    """Bad rows that a run accepts: a number, or a share below 1. Above it the run stops."""

    @model_validator(mode="after")
    def rows_come_from_one_place(self) -> "Data":
        if self.mix is not None and self.source is not None:
            raise broken("source and mix both say where rows come from; move source into mix", at="mix")
        if self.mix is not None and len(self.mix) < 2:
            raise broken("a mix needs two sources; write source for a single one", at="mix")
        if self.mix is not None and len(self.mix) > MOST_SOURCES:
            raise broken(
                f"got {len(self.mix):,} sources, at most {MOST_SOURCES:,} can be mixed; write a glob (data/*.jsonl) to "
                "read many files as one source",
                at="mix",
            )
        if self.mix is None and changed(self, "stop"):
            raise broken("stop has no effect without mix; remove it", at="stop")
        return self

    @model_validator(mode="after")
    def sources_of_a_mix_have_names(self) -> "Data":
        names = [part.name for part in self.mix or ()]
        for number, name in enumerate(names):
            if name is not None and "/" in name:
                raise broken(f"got {name!r}; write a name without a slash", at=f"mix.{number}.name")
            if name is not None and name in names[:number]:
                raise broken(f"two sources are named {name!r}; write another name", at=f"mix.{number}.name")
        return self

    @model_validator(mode="after")
    def streams_are_for_training(self) -> "Data":
        for key in ("validation", "test"):
            if getattr(getattr(self, key), "streaming", False):
                raise broken(f"{key} rows are all needed each time; remove streaming", at=f"{key}.streaming")
        kinds = {bool(getattr(part.source, "streaming", False)) for part in self.mix or ()}
        if len(kinds) > 1:
            raise broken("a mix has streams alone or none; write streaming: true for all of its sources", at="mix")
        if self.streaming and self.split is not None:
            raise broken(
                "a stream is not divided; remove split, and write validation for rows to validate on", at="split"
            )
        if self.streaming and getattr(self.batching, "drop_last", False):
            raise broken(
                "a stream is cut into windows, and each would lose rows at its end; remove drop_last",
                at="batching.drop_last",
            )
        if self.streaming and getattr(self.batching, "longest_first", False):
            raise broken(
                "nobody knows which row of a stream is the longest; remove longest_first", at="batching.longest_first"
            )
        if self.streaming and self.encode == "cache":
            raise broken("a stream is encoded while it is read; remove encode: cache, or streaming", at="encode")
        return self

    @property
    def mix_names(self) -> tuple[str, ...]:
        """Names of the sources of a mix; () without one. Keys of their rows begin with `name/`."""
        return mix_names(self.mix or ())

    @property
    def streaming(self) -> bool:
        """Whether training rows are read while they are used."""
        first = self.mix[0].source if self.mix else self.source
        return bool(getattr(first, "streaming", False))


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
