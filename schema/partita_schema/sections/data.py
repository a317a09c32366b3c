"""The data of a run: sources, splits, batching, and checks of rows."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from partita_schema.base import (
    ConfigModel,
    Fraction,
    Name,
    NonNegativeInt,
    Positive,
    PositiveFraction,
    PositiveInt,
    check_target,
    is_set,
    rule_error,
)
from partita_schema.sections.batching import AutoBatching, Batching
from partita_schema.sections.dialogue import DialogueConfig
from partita_schema.sections.sources import Source, WeightedSource, mix_names


class RandomSplit(ConfigModel):
    """Rows are assigned to splits at random, with the seed of the run."""

    type: Literal["random"] = "random"
    """Random split with the seed of the run."""
    probabilities: tuple[Fraction, Fraction, Fraction] = (0.9, 0.05, 0.05)
    """Fractions of training, validation and test rows; they sum to 1."""

    @model_validator(mode="after")
    def shares_sum_to_one(self) -> "RandomSplit":
        if abs(sum(self.probabilities) - 1) > 1e-6:
            raise rule_error(
                f"probabilities sum to {sum(self.probabilities):g}; write three shares with the sum 1",
                at="probabilities",
            )
        if self.probabilities[0] == 0:
            raise rule_error(
                "the share of training is 0; write a larger one, or nothing is trained", at="probabilities"
            )
        return self


class HashSplit(RandomSplit):
    """Rows are assigned to splits by a hash of one column, so a row stays in its split when other rows are added or
    removed."""

    type: Literal["hash"]  # type: ignore[assignment]
    """Split by the hash of a column."""
    column: Name
    """Column to hash."""


class StratifySplit(RandomSplit):
    """Rows are assigned to splits at random so that every label has the same fractions in each split."""

    type: Literal["stratify"]  # type: ignore[assignment]
    """Stratified split by label."""
    column: Name
    """Column with the label."""


class FixedSplit(ConfigModel):
    """A column of the data names the split of each row."""

    type: Literal["fixed"]
    """Split given by a column of the data."""
    column: Name = "split"
    """Column with 0, 1, 2 or train, validation, test."""


class KFoldSplit(ConfigModel):
    """Cross-validation: each row is a validation row of one fold and a training row of the others."""

    type: Literal["kfold"]
    """K-fold cross-validation; `train` trains once per fold."""
    folds: Annotated[int, Field(strict=True, ge=2)] = 5
    """Number of folds."""
    column: Name | None = None
    """Column with the label; every fold has the same share of each label. Default: none; rows are dealt at random."""
    fold: PositiveInt | None = None
    """Train only this fold, from 1. Default: all folds, one after another."""

    @model_validator(mode="after")
    def fold_is_one_of_the_folds(self) -> "KFoldSplit":
        if self.fold is not None and self.fold > self.folds:
            raise rule_error(f"there are {self.folds} folds, from 1; got {self.fold}", at="fold")
        return self


Split = Annotated[RandomSplit | HashSplit | StratifySplit | FixedSplit | KFoldSplit, Field(discriminator="type")]


class LoaderOptions(ConfigModel):
    """How rows are tokenized and loaded."""

    workers: NonNegativeInt = 0
    """Number of processes that tokenize rows in the background; 0 tokenizes in the training process. Batches do not
    depend on this number."""
    prefetch: PositiveInt = 2
    """How much data workers prepare in advance: for streams, the number of windows over all shard groups; for other
    data, the number of chunks of 1,000 rows per worker."""
    start_method: Literal["fork", "spawn", "forkserver"] | None = None
    """How worker processes are started. Default: the default of the operating system."""
    timeout: Positive = 60.0
    """Seconds without a finished chunk from any worker after which the workers count as hung."""

    @model_validator(mode="after")
    def options_of_workers_have_workers(self) -> "LoaderOptions":
        for key in ("prefetch", "start_method", "timeout"):
            if self.workers == 0 and is_set(self, key):
                raise rule_error(f"{key} has no effect without workers; write workers: 1 or more, or remove it", at=key)
        return self


MAX_SOURCES = 1000
"""Maximum number of sources in a mix. Each source keeps a file open; use a glob to read more files as one source."""


class Data(ConfigModel):
    """The data of a run."""

    source: Source | Name | None = None
    """Training rows: a path, a glob, a Hub dataset id, or a mapping with `type`. Default: the dataset passed to
    `train`."""
    mix: tuple[WeightedSource, ...] | None = None
    """Several weighted sources instead of `source`, from 2 to 1,000."""
    stop: Literal["first", "all", "all_once"] = "all"
    """When an epoch of a mix ends. first: when the first source is exhausted. all: when every source was exhausted
    once; shorter sources repeat. all_once: when every source is exhausted, without repeating any; without weights, the
    rows of each source are spread evenly over the epoch."""
    validation: Source | Name | None = None
    """Validation rows, as in `source`. Default: a fraction of `source`, given by `split`."""
    test: Source | Name | None = None
    """Test rows, as in `source`. Default: a fraction of `source`, given by `split`."""
    split: Split | None = None
    """How `source` is divided into training, validation and test rows. Default: random 90/5/5, without the parts that
    have a source above. Streams are not split."""
    dialogue: DialogueConfig = DialogueConfig.model_construct()
    """How dialogues become training rows; needs an input of type dialogue."""
    formatter: Annotated[str, AfterValidator(check_target)] | None = None
    """`module:Class` that formats rows as text, instead of `prompt`. Default: `prompt`."""
    batching: Batching = AutoBatching.model_construct()
    """How rows are grouped into batches."""
    collate: Annotated[str, AfterValidator(check_target)] | None = None
    """`module:Class` that collates the rows of a batch into tensors. Default: padding on the right."""
    encode: Literal["online", "cache"] = "online"
    """When rows are tokenized. online: in each run, as rows are needed. cache: once, to a disk cache that is reused by
    runs with the same data, tokenizer and prompt."""
    resume: Literal["strict", "restart_epoch", "fresh"] = "strict"
    """What to do when an interrupted run is resumed and its data or batch plan has changed. strict: stop with an error
    that lists the changes. restart_epoch: keep the weights and restart the current epoch. fresh: keep the weights and
    restart from the first epoch of the data."""
    loader: LoaderOptions = LoaderOptions.model_construct()
    """How rows are tokenized and loaded."""
    max_row_bytes: PositiveInt = 64_000_000
    """Maximum size in bytes of one row of a text file, after decompression. A longer row counts as a bad row, so a
    corrupt or malicious file cannot exhaust memory."""
    max_bad_rows: NonNegativeInt | Fraction = Field(default=0.01, union_mode="left_to_right")
    """Unusable rows that a run accepts: a number of rows (an integer), or a fraction of all rows (a decimal such as
    0.01). The run stops with an error above it."""

    @model_validator(mode="after")
    def rows_come_from_one_source(self) -> "Data":
        if self.mix is not None and self.source is not None:
            raise rule_error("source and mix cannot both be set; move source into mix", at="mix")
        if self.mix is not None and len(self.mix) < 2:
            raise rule_error("a mix needs two sources; write source for a single one", at="mix")
        if self.mix is not None and len(self.mix) > MAX_SOURCES:
            raise rule_error(
                f"got {len(self.mix):,} sources, at most {MAX_SOURCES:,} can be mixed; write a glob (data/*.jsonl) to "
                "read many files as one source",
                at="mix",
            )
        if self.mix is None and is_set(self, "stop"):
            raise rule_error("stop has no effect without mix; remove it", at="stop")
        return self

    @model_validator(mode="after")
    def sources_of_a_mix_have_names(self) -> "Data":
        names = [part.name for part in self.mix or ()]
        for number, name in enumerate(names):
            if name is not None and "/" in name:
                raise rule_error(f"got {name!r}; write a name without a slash", at=f"mix.{number}.name")
            if name is not None and name in names[:number]:
                raise rule_error(f"two sources are named {name!r}; write another name", at=f"mix.{number}.name")
        return self

    @model_validator(mode="after")
    def streams_are_for_training(self) -> "Data":
        for key in ("validation", "test"):
            if getattr(getattr(self, key), "streaming", False):
                raise rule_error(f"{key} rows are all needed each time; remove streaming", at=f"{key}.streaming")
        kinds = {bool(getattr(part.source, "streaming", False)) for part in self.mix or ()}
        if len(kinds) > 1:
            message = "the sources of a mix are all streamed, or none is; write streaming: true for all of them"
            raise rule_error(message, at="mix")
        if self.streaming and self.split is not None:
            raise rule_error(
                "a stream is not divided; remove split, and write validation for rows to validate on", at="split"
            )
        if self.streaming and getattr(self.batching, "drop_last", False):
            raise rule_error(
                "a stream is cut into windows, and each would lose rows at its end; remove drop_last",
                at="batching.drop_last",
            )
        if self.streaming and getattr(self.batching, "longest_first", False):
            raise rule_error(
                "the longest row of a stream is not known; remove longest_first", at="batching.longest_first"
            )
        if self.streaming and self.encode == "cache":
            raise rule_error("a stream is encoded while it is read; remove encode: cache, or streaming", at="encode")
        return self

    @property
    def mix_names(self) -> tuple[str, ...]:
        """Names of the sources of a mix, or () without one. Row keys start with `name/`."""
        return mix_names(self.mix or ())

    @property
    def mix_weights(self) -> list[float]:
        """Weights of the sources of a mix, 1 where none is written; empty without a mix."""
        return [part.weight or 1.0 for part in self.mix or ()]

    @property
    def streaming(self) -> bool:
        """Whether training rows are streamed."""
        first = self.mix[0].source if self.mix else self.source
        return bool(getattr(first, "streaming", False))


class Preprocessing(ConfigModel):
    """Row sampling and length limits of the whole run."""

    split: Split | None = None
    """Alias of data.split."""
    sample_ratio: PositiveFraction = 1.0
    """Fraction of the rows to use, above 0 and at most 1."""
    sample_size: PositiveInt | None = None
    """Number of rows to use. Default: all rows."""
    global_max_sequence_length: PositiveInt | None = None
    """Maximum length of an example in tokens, prompt and answer together. Default: the context length of the model."""

    @model_validator(mode="after")
    def sample_ratio_or_sample_size(self) -> "Preprocessing":
        if self.sample_size is not None and is_set(self, "sample_ratio"):
            raise rule_error("sample_ratio and sample_size cannot both be set; write one of them", at="sample_size")
        return self
