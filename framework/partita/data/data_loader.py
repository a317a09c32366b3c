"""DataLoader: the training batches of a configuration, for training loops that users write themselves."""

import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from partita.data.indexed_loader import IndexedLoader
from partita.data.labels import find_labels
from partita.data.ledger import Ledger, RowCounts
from partita.data.run_data import open_run_data
from partita.data.splits import TRAINING
from partita.data.training_rows import LoaderSetup, configured_row_tokenizer, tokenized_rows
from partita.distributed.init import joined_process_group
from partita.lm.model_config.encoders import heads_of_encoder
from partita_schema.common.text import counted
from partita_schema.config import Config
from partita_schema.errors import ConfigError, DataError, Problem, ResumeError
from partita_schema.layers import ConfigSource
from partita_schema.load import load_config
from partita_schema.sections.batching import TokenBudgetBatching
from partita_schema.sections.trainer import HogwildTrainer
from partita_trainers.base import Batch, GlobalBatch
from partita_trainers.batch_size.probe import BatchSize
from partita_trainers.process_group import ProcessGroup, synchronized_errors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)
file_logger = logging.getLogger("partita.file")
"""Logger for warnings about the configuration file."""

STATE_VERSION = 1


class DataLoader:
    """The training batches of a configuration, with an exact position, for your own training loop.

    Each `iter()` yields the batches of one epoch: every row once, shuffled as `data.batching` says. `state_dict()` is
    the position after the last batch that was yielded; `load_state_dict()` continues there, as torchdata's
    StatefulDataLoader does.

    If torch.distributed is initialized, every rank gets one batch per step, and all ranks create the loader and iterate
    over it together. In the last step of an epoch, some ranks may get a batch without rows.
    """

    def __init__(
        self,
        config: ConfigSource,
        dataset: Any = None,
        *,
        overrides: Sequence[str] = (),
        batch_size: int | None = None,
        tokenizer: "PreTrainedTokenizerFast | None" = None,
        context_length: int | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        """Open the training rows and tokenize them; of a stream, only the first ones, to estimate lengths.

        No model is loaded, and no run directory is written.

        Args:
            config: A path, YAML text, a dictionary or a Config, or a list of these that is merged; with a trainer.
            dataset: Replaces data.source: a path or glob, a Hub name, a pandas frame, a dataset of `datasets` or torch,
                a generator function, a list of dicts or a dict of lists.
            overrides: Values for keys of the file, such as `data.batching.type=pack`.
            batch_size: Rows per batch; for packed rows and chunks, sequences. Default: trainer.batch_size.
            tokenizer: A fast tokenizer with a pad token. Default: that of the base model. For a new model, it is
                trained on the training rows.
            context_length: Maximum length of a row in tokens. Default: the context of the configured model, read from
                its config.json.
            process_group: The processes that share the batches. Default: those of torch.distributed if it is
                initialized, else this process alone.

        Raises:
            ConfigError: The configuration is invalid, has no trainer that reads batches in order, or no batch size.
            DataError: There are no rows, or too many of them cannot be used (data.max_bad_rows).
            ModelError: The tokenizer or config.json of the base model cannot be read.
        """
        loaded = load_config(config, overrides=overrides)
        for warning in loaded.warnings:
            file_logger.warning("%s", warning)
        config, size = sized(heads_of_encoder(loaded.config, folder=loaded.folder), batch_size)
        self._process_group = joined_process_group() if process_group is None else process_group
        with synchronized_errors(self._process_group, "reading the rows"):
            setup = training_setup(
                config,
                dataset,
                folder=loaded.folder,
                size=size,
                tokenizer=tokenizer,
                context_length=context_length,
                process_group=self._process_group,
            )
            self._loader = setup.open()
        self._ledger = setup.ledger
        self._tokenizer: PreTrainedTokenizerFast = setup.row_tokenizer.formatter.tokenizer
        self._restarts_epoch = config.data.resume == "restart_epoch"
        self._steps: Generator[GlobalBatch] | None = None
        self._started = False
        self._position = self._loader.data_position
        # Epoch that an iterator continues after `_position` is loaded, and the one that the next iterator yields.
        self._epoch = 0
        self._next_epoch = 0
        if isinstance(self._loader, IndexedLoader):
            self._log_left_out()

    def __repr__(self) -> str:
        indexed = isinstance(self._loader, IndexedLoader)
        length = f"{counted(len(self), 'batch', 'batches')} an epoch" if indexed else "streamed"
        return f"<DataLoader: {length}, next epoch {self._next_epoch}>"

    def __len__(self) -> int:
        """Return the batches of the first epoch on this rank.

        Later epochs may have a few more or fewer if batches are filled up to a number of tokens.

        Raises:
            TypeError: The rows are streamed, so their number is unknown.
        """
        if not isinstance(self._loader, IndexedLoader):
            raise TypeError("a streamed DataLoader has no length: the number of rows is unknown")
        return self._loader.steps_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of the next epoch; after `load_state_dict`, the rest of the loaded one.

        An iterator that was not exhausted ends here, and the rest of its epoch is skipped.

        Raises:
            DataError: Too many rows cannot be used, or a stream cannot be read.
        """
        self.close()
        self._started = True
        self._epoch = self._next_epoch
        self._next_epoch += 1
        self._steps = self._loader.epoch_steps(self._epoch)
        return self._batches(self._steps)

    @property
    def tokenizer(self) -> "PreTrainedTokenizerFast":
        """The tokenizer of the rows. Save it with the model if it was trained for a new one."""
        return self._tokenizer

    @property
    def next_epoch(self) -> int:
        """Epoch that the next `iter()` yields, from 0; after `load_state_dict`, the epoch that it continues."""
        return self._next_epoch

    @property
    def row_counts(self) -> RowCounts:
        """Training rows that were read, used, truncated and left out, with reasons; of a stream, so far.

        Rows are counted once, in the first epoch, and on all ranks together.
        """
        return self._ledger.split(TRAINING)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was yielded, as JSON of a few KB. It is equal on all ranks."""
        return {"version": STATE_VERSION, "epoch": self._epoch, "data_position": dict(self._position)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batch at which `state` was saved. Call it before the first `iter()`.

        Raises:
            ResumeError: An iterator was created before, the state is damaged, or the batches would differ, for example
                with another batch size or number of processes; see data.resume.
        """
        if self._started:
            raise ResumeError(
                "a state must be loaded before the first iterator is created; create a new DataLoader and load it there"
            )
        epoch, position = epoch_and_position(state)
        self._loader.load_data_position(position)
        self._position = self._loader.data_position
        # If the data has changed, data.resume may have put the position at the beginning of an epoch.
        kept = self._restarts_epoch or self._position == position
        self._epoch = self._next_epoch = epoch if kept else self._position["epoch"]

    def close(self) -> None:
        """End the current iterator, with its worker processes and open files. The position is kept."""
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _batches(self, steps: Generator[GlobalBatch]) -> Iterator[Batch]:
        try:
            while True:
                if self._steps is not steps:
                    raise DataError(
                        "this iterator has ended, because the DataLoader was closed or another iterator of it was "
                        "created; use one iterator at a time"
                    )
                step = next(steps, None)
                if step is None:
                    break
                self._position = self._merged(step.data_position)
                self._epoch = self._position["epoch"]
                (batch,) = step.micro_batches
                yield batch
            if not isinstance(self._loader, IndexedLoader) and self._epoch == self._loader.counted_epoch:
                self._log_left_out()
            self._epoch = self._next_epoch
        finally:
            if self._steps is steps:
                self.close()

    def _merged(self, position: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the position of all ranks; each rank knows only its own parts of a stream."""
        if isinstance(self._loader, IndexedLoader) or self._process_group.world_size == 1:
            return position
        return self._loader.merge_data_positions(self._process_group.all_gather_object(position, "the data position"))

    def _log_left_out(self) -> None:
        self._ledger.log_warnings()
        counts = self.row_counts
        if counts.left_out and self._process_group.rank == 0:
            rows = counted(counts.rows, "training row")
            logger.warning("%d of %s left out:\n%s", counts.left_out, rows, self._ledger.main_reasons())


def training_setup(
    config: Config,
    dataset: Any,
    *,
    folder: Path,
    size: int,
    tokenizer: "PreTrainedTokenizerFast | None",
    context_length: int | None,
    process_group: ProcessGroup,
) -> LoaderSetup:
    """Open and tokenize the training rows; return them with everything that their loader needs.

    Args:
        config: The configuration.
        dataset: Replaces data.source.
        folder: Base of relative paths in the configuration.
        size: Rows per batch.
        tokenizer: Replaces the tokenizer of the base model.
        context_length: Replaces the context of the model.
        process_group: The ranks that share the batches; each gets one batch per step.

    Raises:
        DataError: There are no training rows.
        ModelError: See `configured_row_tokenizer`.
    """
    data = open_run_data(config, folder=folder, dataset=dataset)
    ledger = Ledger(None, max_bad_rows=config.data.max_bad_rows, num_rows=data.num_rows)
    if data.training is None:
        raise DataError("there are no training rows; write data.source in the file, or pass a dataset")
    row_tokenizer = configured_row_tokenizer(
        config,
        data.training,
        tokenizer,
        folder=folder,
        labels=find_labels(config, data.training),
        context_length=context_length,
    )
    rows = tokenized_rows(data, row_tokenizer, ledger, ranks=process_group.world_size)
    return LoaderSetup(
        config=config,
        rows=rows,
        row_tokenizer=row_tokenizer,
        ledger=ledger,
        size=rows.shape.with_tokens(BatchSize(rows=size, origin="file", device="none")),
        batches_per_step=process_group.world_size,
        folder=folder,
        process_group=process_group,
    )


def sized(config: Config, batch_size: int | None) -> tuple[Config, int]:
    """Return the configuration with its batch size, and the size; 1 if a token budget decides it.

    Raises:
        ConfigError: The trainer reads no batches in order, or the batch size is not a number.
    """
    if not config.trains:
        message = "nothing is trained, so there are no training rows; write trainer: {type: finetune, batch_size: 8}"
        raise ConfigError([Problem("trainer", message)])
    if isinstance(config.trainer, HogwildTrainer):
        message = "is hogwild, whose workers draw their rows themselves; write trainer: {type: finetune, batch_size: 8}"
        raise ConfigError([Problem("trainer.type", message)])
    if isinstance(config.data.batching, TokenBudgetBatching):
        if batch_size is not None:
            message = "batch_size has no effect with a token budget; write max_tokens or max_rows here"
            raise ConfigError([Problem("data.batching", message)])
        if config.data.batching.max_tokens == "auto":
            message = "is auto, which only `partita train` can measure; write a number of tokens, such as 4096"
            raise ConfigError([Problem("data.batching.max_tokens", message)])
        return config, 1
    size = config.trainer.batch_size if batch_size is None else batch_size
    if size == "auto":
        message = "is auto, which only `partita train` can measure; write a number, or pass batch_size to DataLoader"
        raise ConfigError([Problem("trainer.batch_size", message)])
    if type(size) is not int or size < 1:
        raise ConfigError([Problem("batch_size", f"is {size!r}; pass a whole number of at least 1")])
    trainer = config.trainer.model_copy(update={"batch_size": size})
    return config.model_copy(update={"trainer": trainer}), size


def epoch_and_position(state: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return the epoch and the position of a saved state. Raise ResumeError if it is malformed."""
    version = state.get("version") if isinstance(state, Mapping) else None
    if version != STATE_VERSION:
        raise ResumeError(
            f"this is not a state of a DataLoader (version {version}, expected {STATE_VERSION}); load what "
            "state_dict() returned"
        )
    epoch, position = state.get("epoch"), state.get("data_position")
    if type(epoch) is not int or not isinstance(position, Mapping) or epoch < position.get("epoch", 0):
        raise ResumeError("the state of the DataLoader is damaged; load an older one")
    return epoch, dict(position)
