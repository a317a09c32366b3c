"""A run from its rows to its result: what `Model.train` does inside a run directory."""

import logging
from contextlib import nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from partita.assembly import Assembly
from partita.data.encoded import EncodedRows
from partita.data.ledger import Ledger
from partita.data.loader import Loader
from partita.data.rows import Rows
from partita.evaluation import Examination, mean_loss, prepare, score
from partita.inference.metrics import metric_names
from partita.inference.predict import READING_IS_SHOWN, ShowProgress
from partita.runs.directory import RunDirectory
from partita.tuning.run import run_sizes
from partita.tuning.sizes import BatchSizes, Sizing
from partita_schema.config import Config
from partita_schema.errors import ConfigError, Problem
from partita_schema.rows import row_schema
from partita_schema.trainer import FinetuneTrainer
from partita_trainers.base import Metrics, Trainer, TrainResult, Work
from partita_trainers.batch_size.trial import BatchSize

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Material:
    """What a run works on, checked and encoded once."""

    training: EncodedRows | None
    """Rows to learn from; None where nothing is trained or there are none."""
    examinations: dict[str, Examination]
    """Rows to evaluate on, by split."""


def run_trainer(
    trainer: Trainer, assembly: Assembly, splits: dict[str, Rows], directory: RunDirectory, *, sizing: Sizing
) -> TrainResult:
    """Encode the rows, find the batch sizes, and let the trainer work."""
    config = assembly.config
    ledger = Ledger(directory.folder, max_bad_rows=config.data.max_bad_rows)
    material = read_material(assembly, splits, ledger, progress=directory.progress)
    tell_left_out(ledger, directory)
    begun = directory.manifest.get("batch_sizes", {}) if directory.has_checkpoints else {}
    sizes = run_sizes(
        trainer, assembly, sizing, encoded=material.training, examinations=material.examinations, begun=begun
    )
    loader = training_loader(assembly, material.training, size=sizes.training)
    note_work(directory, assembly, splits, ledger, batch_sizes={**sizes.records(), **begun})

    def evaluate(split: str, generated: bool, max_rows: int | None) -> Metrics:
        examination = material.examinations.get(split)
        if examination is None:
            return {}
        with sizing.work("evaluation", sizes.evaluation) as capacity:
            metrics = mean_loss(assembly, examination.encoded, batch_size=capacity.rows, limit=capacity.limit)
        if generated:
            with sizing.work("generation", sizes.generation) as capacity:
                scores = score(
                    assembly,
                    examination.rows,
                    batch_size=capacity.rows,
                    limit=capacity.limit,
                    max_rows=max_rows,
                    progress=directory.progress,
                )
            metrics |= scores.flat
        after = sizing.after(sizes)
        if after != sizes:
            directory.note(batch_sizes=after.records())
        return metrics

    work = Work(
        config=config,
        lm=assembly.lm,
        batches=loader,
        evaluate=evaluate,
        splits=tuple(splits),
        run=directory,
        device=assembly.lm.device,
    )
    try:
        with sizing.guard(sizes.training) if sizes.training is not None else nullcontext():
            result = trainer.train(work)
    finally:
        note_cuts(directory, sizing, sizes)
    if config.trainer.type == "custom" and not (directory.folder / "model").is_dir():
        assembly.lm.save(directory.folder / "model")
    return result


def note_cuts(directory: RunDirectory, sizing: Sizing, sizes: BatchSizes) -> None:
    """Where steps ran out of memory, say so beside the size as well, and let later runs begin with less."""
    cuts = directory.manifest.get("out_of_memory")
    if cuts and sizes.training is not None and not sizes.training.out_of_memory:
        cut = sizing.training_was_cut(sizes.training, rows=int(cuts[-1]["now"]))
        directory.note(batch_sizes={**directory.manifest["batch_sizes"], "training": cut.record()})


def find_sizes(trainer: Trainer, assembly: Assembly, splits: dict[str, Rows], *, sizing: Sizing) -> BatchSizes:
    """The batch sizes that a run would begin with."""
    ledger = Ledger(None, max_bad_rows=assembly.config.data.max_bad_rows)
    material = read_material(assembly, splits, ledger)
    return run_sizes(trainer, assembly, sizing, encoded=material.training, examinations=material.examinations, begun={})


def read_material(
    assembly: Assembly, splits: dict[str, Rows], ledger: Ledger, *, progress: ShowProgress | None = None
) -> Material:
    """All rows of a run; those that cannot be used go to the ledger."""
    trainer = assembly.config.trainer
    training = encode_training(assembly, splits, ledger, progress=progress)
    examinations = {
        split: prepare(assembly, rows, split=split, ledger=ledger)
        for split, rows in splits.items()
        if split != "training" or (trainer.type == "none" and "training" in trainer.evaluate)
    }
    return Material(training, examinations)


def encode_training(
    assembly: Assembly, splits: dict[str, Rows], ledger: Ledger, *, progress: ShowProgress | None
) -> EncodedRows | None:
    """The training rows, encoded; None where nothing is trained or there are none."""
    if assembly.config.trainer.type == "none" or "training" not in splits:
        return None
    schema = row_schema(assembly.config, supervised=True)
    rows = splits["training"]
    shown = progress is not None and len(rows) >= READING_IS_SHOWN
    with progress(len(rows), "reading") if progress is not None and shown else nullcontext() as display:
        return EncodedRows.build(
            rows, assembly.encoder, schema=schema, ledger=ledger, progress=display.advance if display else None
        )


def training_loader(assembly: Assembly, encoded: EncodedRows | None, *, size: BatchSize | None) -> Loader | None:
    """Batches of the training rows; None where there are none."""
    if encoded is None or size is None:
        return None
    config = assembly.config
    trainer = config.trainer
    loader = Loader(
        encoded,
        batching=config.data.batching,
        options=config.data.loader,
        batch_size=size.rows,
        batches_per_step=trainer.accumulation(size.rows) if isinstance(trainer, FinetuneTrainer) else 1,
        seed=config.seed,
        pad_token_id=assembly.lm.tokenizer.pad_token_id,
    )
    logger.info(
        "%s training rows, %s tokens, longest %s; %s steps an epoch",
        *(f"{number:,}" for number in (len(encoded), int(encoded.starts_N1[-1]), int(encoded.lengths.max()))),
        f"{loader.steps_per_epoch:,}",
    )
    return loader


def tell_left_out(ledger: Ledger, directory: RunDirectory) -> None:
    """Say how many rows are left out and cut, and where their reasons stand."""
    for split, counts in ledger.splits.items():
        if counts.left_out:
            told = (split, counts.left_out, counts.rows, counts.reasons.most_common(1)[0][0])
            logger.warning("%s: %d of %d rows left out (%s); see %s", *told, directory.folder / "quarantine.jsonl")
        if counts.cut:
            logger.warning("%s: %d rows cut to the length limit, %d tokens lost", split, counts.cut, counts.cut_tokens)


def check_validation_metric(config: Config) -> None:
    """Raises ConfigError where no metric of the outputs has the name that the trainer asks for."""
    trainer = config.trainer
    if not isinstance(trainer, FinetuneTrainer) or trainer.validation_metric == "loss":
        return
    known = metric_names(config)
    first = f"{config.output_features[0].name}."
    wanted = trainer.validation_metric
    full = wanted if "." in wanted or wanted in known else first + wanted
    if full in known or ".field." in full:
        return
    short = [name.removeprefix(first) for name in known]
    near = get_close_matches(wanted, [*short, *known], n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
    raise ConfigError([Problem("trainer.validation_metric", f"no metric is named {wanted}; {hint}")])


def note_work(
    directory: RunDirectory,
    assembly: Assembly,
    splits: dict[str, Rows],
    ledger: Ledger,
    *,
    batch_sizes: dict[str, Any],
) -> None:
    """Write down what the run works on, and with which sizes."""
    directory.note(
        device=str(assembly.lm.device),
        data={split: {"rows": len(rows), "fingerprint": rows.fingerprint} for split, rows in splits.items()},
        ledger={split: counts.left_out for split, counts in ledger.splits.items()},
        labels={name: list(labels) for name, labels in assembly.labels.items()},
        batch_sizes=batch_sizes,
        parameters=sum(parameter.numel() for parameter in assembly.lm.module.parameters()),
        trained_parameters=sum(p.numel() for p in assembly.lm.module.parameters() if p.requires_grad),
    )
