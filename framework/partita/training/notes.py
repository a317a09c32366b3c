"""What a training run notes in its manifest and log about its work: sizes, batches, rows left out."""

import json
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from partita.data.ledger import Ledger, reasons_in_words
from partita.data.run_data import RunData
from partita.data.splits import VALIDATION
from partita.data.training_rows import only_label
from partita.lm.branches.plan import cost
from partita.lm.loaded_model import LoadedModel
from partita.lm.loading.number_formats import number_format
from partita.lm.model_config.same_config import changes, compared
from partita.lm.training.exporting import origin
from partita.pipeline.batch_sizes import BatchSizes, BatchSizeTuner
from partita.pipeline.build import LocalPipeline
from partita.runs.directory import RunDirectory
from partita.runs.manifest import MODEL_BEFORE_TRAINING
from partita.runs.step_totals import step_totals
from partita.tokenizers.saved_adapters import folder_hashes
from partita.training.datasets import TrainingDatasets
from partita.training.recorded_data import length_histograms, write_samples
from partita_schema.base import is_set
from partita_schema.cells import shown
from partita_schema.common.text import counted
from partita_schema.config import Config
from partita_schema.errors import ConfigError, Problem, ResumeError
from partita_schema.sections.trainer import FinetuneTrainer, KtoTrainer
from partita_trainers.batch_size.probe import BatchSize
from partita_trainers.objectives.of_config import compares_with_start
from partita_trainers.process_group import ProcessGroup

if TYPE_CHECKING:
    from partita.lm.branches.masks import BranchSupport

logger = logging.getLogger(__name__)

MIN_WAIT_SECONDS = 10.0
"""Seconds spent waiting for rows above which a warning is logged."""
LONG_WAIT = 0.1
"""Share of the time spent waiting above which a warning is logged."""


def warn_of_replaced_mix(config: Config, data: RunData) -> None:
    """Warn if rows that were passed replace a mix of sources, whose weights and rows then have no effect."""
    if config.data.mix is not None and not data.mixed:
        logger.warning(
            "the passed rows replace data.mix: its sources %s are not read; pass no rows to train on the mix",
            ", ".join(config.data.mix_names),
        )


def warn_of_single_labels(config: Config, labels: Mapping[str, Sequence[str]]) -> None:
    """Warn of each category whose training rows all have the same label.

    Args:
        config: The configuration.
        labels: The labels of the training rows, by output.
    """
    for output in config.output_features:
        known = labels.get(output.name, ())
        if output.type == "category" and len(known) == 1:
            logger.warning(
                "%s: all training rows have the label %s, so the model learns no other; check the data",
                output.name,
                shown(known[0]),
            )


def warn_of_replaced_head(pipeline: LocalPipeline) -> None:
    """Warn if the base model has a head for other labels, which training replaces."""
    reason = pipeline.lm.replaced_head if isinstance(pipeline.lm, LoadedModel) else None
    if reason is not None:
        logger.warning(
            "base_model: %s: training starts with a new head; list the labels of the model, in its order, in "
            "decoder.labels to keep its head",
            reason,
        )


def warn_of_slow_compilation(pipeline: LocalPipeline) -> None:
    """Warn if `trainer.compile` is set on a CPU, where no training was faster with it."""
    if getattr(pipeline.config.trainer, "compile", False) and pipeline.lm.device.type == "cpu":
        logger.warning("trainer.compile: on a CPU, steps take longer with it, and compiling takes up to a minute")


def note_missing_validation(config: Config) -> None:
    """Log what a run without validation rows cannot do: a warning for keys that have no effect."""
    trainer = config.trainer
    if not isinstance(trainer, FinetuneTrainer) or trainer.skip_all_evaluation:
        return
    keys = [f"trainer.{key}" for key in ("validation_metric", "early_stop") if is_set(trainer, key)]
    if keys:
        logger.warning(
            "there are no validation rows: %s and restore_best have no effect, and the last weights are the result; "
            "write data.validation, or a data.split with a share for validation",
            ", ".join(keys),
        )
    elif trainer.restore_best:
        logger.info("there are no validation rows: the last weights are the result")


def check_labels(config: Config, datasets: TrainingDatasets, *, warns: bool) -> None:
    """Warn if all answers of an evaluation split have the same label, because some metrics of KTO are then undefined.

    Args:
        config: The configuration.
        datasets: The rows.
        warns: Whether to log a warning.

    Raises:
        ConfigError: `trainer.validation_metric` is one of these metrics of the validation split.
    """
    trainer, output = config.trainer, config.output_features[0]
    if not isinstance(trainer, KtoTrainer) or trainer.skip_all_evaluation:
        return
    for split, dataset in datasets.eval_datasets.items():
        only = only_label(dataset.encoded)
        if only is None:
            continue
        answers = f"all {len(dataset.encoded):,} {split} answers are {only} by the column {output.more_columns[0]}"
        other = "rejected" if only == "good" else "chosen"
        missing = ["rewards/margins", f"rewards/{other}", f"logps/{other}"]
        metric = trainer.validation_metric
        # Without good answers, generated answers have nothing to be compared with either.
        if split == VALIDATION and (metric in missing or (only == "bad" and metric != "loss")):
            message = f"{answers}, so they have no {metric}; add rows of the other kind, or write loss"
            raise ConfigError([Problem("trainer.validation_metric", message)])
        if warns:
            logger.warning("%s: they have no %s, %s and %s", answers, *missing)


def note_origin(directory: RunDirectory, pipeline: LocalPipeline) -> None:
    """Record what the weights were loaded from, if the loss compares with the model before training."""
    if not compares_with_start(pipeline.config) or (
        directory.has_checkpoints and MODEL_BEFORE_TRAINING in directory.manifest
    ):
        return
    if isinstance(pipeline.lm, LoadedModel):
        directory.note(**{MODEL_BEFORE_TRAINING: origin(pipeline.lm)})


def note_weights(directory: RunDirectory, pipeline: LocalPipeline) -> None:
    """Record what the run starts from: config of the base model, hashes of the weights in folders.

    A resumed run keeps what was recorded at its start.

    Raises:
        ResumeError: The run is resumed, and the config.json of its base model has changed; or it resumes an adapter,
            and the weights that it belongs to have changed.
    """
    hashes = folder_hashes(pipeline.config, folder=pipeline.folder)
    config = loaded_config(pipeline)
    if not directory.has_checkpoints:
        directory.note(**{"initial_weights": hashes} if hashes else {}, **{"initial_config": config} if config else {})
        return
    change = next(changes(directory.manifest.get("initial_config", {}), config), None)
    if change is not None:
        raise ResumeError(
            f"the config.json of {pipeline.config.base_model} has changed since the run in {directory.folder} began "
            f"({change}); restore it, or give this run another folder with --run"
        )
    before = directory.manifest.get("initial_weights", {})
    changed = [name for name, value in hashes.items() if before.get(name, value) != value]
    if changed and pipeline.config.adapter is not None:
        raise ResumeError(
            f"the weights in {changed[0]} have changed since the run in {directory.folder} began, and its checkpoints "
            "hold an adapter for the earlier ones; restore them, or give this run another folder with --run"
        )


def loaded_config(pipeline: LocalPipeline) -> dict[str, Any]:
    """Return the keys of the config of a base model that are compared at the next start; {} for a new model."""
    if not isinstance(pipeline.lm, LoadedModel) or not isinstance(pipeline.config.base_model, str):
        return {}
    values: dict[str, Any] = json.loads(pipeline.lm.base.config.to_json_string(use_diff=False))
    return compared(values)


def note_number_format(directory: RunDirectory, pipeline: LocalPipeline) -> None:
    """Record the number format of the weights, which the machine may have chosen."""
    if isinstance(pipeline.lm, LoadedModel):
        directory.note(number_format=number_format(pipeline.lm.base))


def note_branches(directory: RunDirectory, pipeline: LocalPipeline, datasets: TrainingDatasets) -> None:
    """Record how the answers of pairs are computed, and log what it costs if each is a separate row."""
    if datasets.training is None or not datasets.training.encoded.branched:
        return
    support: BranchSupport | None = getattr(pipeline.lm, "branch_support", None)
    if support is None:
        return
    repeated_tokens = datasets.training.encoded.repeated_tokens
    if support.reason is not None:
        logger.info("%s: each answer is computed as a separate row, %s", support.reason, cost(repeated_tokens))
    noted = {"separate_rows": support.reason is not None, "reason": support.reason, "repeated_tokens": repeated_tokens}
    directory.note(branches=noted)


def note_batches(directory: RunDirectory) -> None:
    """Record the sums over all logged steps of the run; nothing if the trainer logs none."""
    if totals := step_totals(directory.folder / "log.jsonl"):
        directory.note(batches=totals)


def note_waits(directory: RunDirectory, waits: Mapping[str, float], *, workers: int, streamed: bool) -> None:
    """Record how long this process waited for rows since its start, and warn if that was long.

    Args:
        directory: The open run.
        waits: Those of its loader.
        workers: Number of data workers.
        streamed: Whether rows are read during training.
    """
    directory.note(waits=waits)
    if streamed and waits["waited_seconds"] > MIN_WAIT_SECONDS and waits["wait_share"] > LONG_WAIT:
        logger.warning(
            "%.0f %% of the time was spent waiting for rows: write data.loader.workers: %d, or more",
            *(100 * waits["wait_share"], max(2, 2 * workers)),
        )


def recorded_sizes(directory: RunDirectory, datasets: TrainingDatasets) -> dict[str, Any]:
    """Return the batch sizes that the run started with; not that of training if longer rows were added since."""
    recorded: dict[str, Any] = directory.manifest.get("batch_sizes", {}) if directory.has_checkpoints else {}
    measured = recorded.get("training", {}).get("prompt_tokens")
    if datasets.shape is not None and measured is not None and datasets.shape.longest > measured:
        return {name: record for name, record in recorded.items() if name != "training"}
    return recorded


def note_cuts(directory: RunDirectory, tuner: BatchSizeTuner, sizes: BatchSizes) -> None:
    """Record the reduced training batch size after an out-of-memory error, also for later runs."""
    cuts = directory.manifest.get("out_of_memory")
    if cuts and sizes.training is not None and not sizes.training.out_of_memory:
        cut = tuner.training_was_cut(sizes.training, rows=rows_that_fitted(sizes.training, cuts[-1]))
        directory.note(batch_sizes={**directory.manifest["batch_sizes"], "training": cut.record()})


def rows_that_fitted(size: BatchSize, cut: Mapping[str, int]) -> int:
    """Return the batch size that fitted; with a token budget, convert from many short rows to the longest."""
    rows, tokens, longest = int(cut["now"]), int(cut["tokens"]), size.prompt_tokens
    return rows if size.max_tokens is None or longest is None else max(1, rows * tokens // longest)


def log_left_out(ledger: Ledger, directory: RunDirectory) -> None:
    """Log the number of rows left out and truncated, the path of the quarantine, and warnings of the ledger."""
    ledger.log_warnings()
    for split, counts in ledger.splits.items():
        if counts.left_out:
            details = (split, counts.left_out, counted(counts.rows, "row"), reasons_in_words(counts))
            logger.warning("%s: %d of %s left out (%s); see %s", *details, directory.folder / "quarantine.jsonl")
        if counts.cut:
            cut, lost = counted(counts.cut, "row"), counted(counts.cut_tokens, "token")
            logger.warning("%s: %s cut to the length limit, %s lost", split, cut, lost)


def record_data(
    directory: RunDirectory,
    pipeline: LocalPipeline,
    data: RunData,
    datasets: TrainingDatasets,
    *,
    process_group: ProcessGroup,
) -> None:
    """Record the lengths of the rows and samples of the training rows.

    Args:
        directory: The open run.
        pipeline: The model, tokenizer and decoder of the run.
        data: The rows of the run.
        datasets: The same rows, tokenized.
        process_group: The ranks that train; rank 0 writes.
    """
    directory.note(lengths=length_histograms(datasets))
    training = datasets.training
    if training is not None:
        write = partial(write_samples, directory.folder, pipeline, data, training.encoded)
        process_group.run_on_rank_zero(write, "samples of the training rows")


def note_left_out(directory: RunDirectory, ledger: Ledger) -> None:
    """Record the number of rows left out, by split."""
    directory.note(ledger={split: counts.left_out for split, counts in ledger.splits.items()})


def note_work(
    directory: RunDirectory,
    pipeline: LocalPipeline,
    data: RunData,
    ledger: Ledger,
    *,
    batch_sizes: dict[str, Any],
) -> None:
    """Record in the manifest the device, data, labels, batch sizes and number of parameters.

    Args:
        directory: The open run.
        pipeline: The model, tokenizer and decoder of the run.
        data: The rows of the run.
        ledger: Counts of the rows left out.
        batch_sizes: Records of the batch sizes, by purpose.
    """
    note_left_out(directory, ledger)
    directory.note(
        device=str(pipeline.lm.device),
        data=data.record(),
        labels={name: list(labels) for name, labels in pipeline.labels.items()},
        batch_sizes=batch_sizes,
        token_cache=pipeline.tokens.record() if pipeline.tokens is not None else {},
        parameters=sum(parameter.numel() for parameter in pipeline.lm.module.parameters()),
        trained_parameters=sum(p.numel() for p in pipeline.lm.module.parameters() if p.requires_grad),
    )
