"""A run from its rows to its result: what `Model.train` does inside a run directory."""

import logging
from contextlib import nullcontext
from difflib import get_close_matches

from partita.assembly import Assembly
from partita.data.encoded import EncodedRows
from partita.data.ledger import Ledger
from partita.data.loader import Loader
from partita.data.rows import Rows
from partita.evaluation import Examination, mean_loss, prepare, score
from partita.inference.metrics import metric_names
from partita.inference.predict import READING_IS_SHOWN
from partita.runs.directory import RunDirectory
from partita_schema.config import Config
from partita_schema.errors import ConfigError, Problem
from partita_schema.rows import row_schema
from partita_schema.trainer import FinetuneTrainer
from partita_trainers.base import Metrics, Trainer, TrainResult, Work

logger = logging.getLogger(__name__)


def run_trainer(trainer: Trainer, assembly: Assembly, splits: dict[str, Rows], directory: RunDirectory) -> TrainResult:
    """Encode the rows, and let the trainer work on them."""
    config = assembly.config
    ledger = Ledger(directory.folder, max_bad_rows=config.data.max_bad_rows)
    loader = training_loader(assembly, splits, ledger, directory=directory)
    examinations = {
        split: prepare(assembly, rows, split=split, ledger=ledger)
        for split, rows in splits.items()
        if split != "training" or (config.trainer.type == "none" and "training" in config.trainer.evaluate)
    }
    tell_left_out(ledger, directory)
    note_work(directory, assembly, splits, ledger)
    evaluation_batch_size = config.trainer.eval_batch_size or config.trainer.batch_size

    def evaluate(split: str, generated: bool, max_rows: int | None) -> Metrics:
        examination: Examination | None = examinations.get(split)
        if examination is None:
            return {}
        metrics = mean_loss(assembly, examination.encoded, batch_size=evaluation_batch_size)
        if generated:
            scores = score(
                assembly,
                examination.rows,
                batch_size=evaluation_batch_size,
                max_rows=max_rows,
                progress=directory.progress,
            )
            metrics |= scores.flat
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
    result = trainer.train(work)
    if config.trainer.type == "custom" and not (directory.folder / "model").is_dir():
        assembly.lm.save(directory.folder / "model")
    return result


def training_loader(
    assembly: Assembly, splits: dict[str, Rows], ledger: Ledger, *, directory: RunDirectory
) -> Loader | None:
    """Batches of the training rows; None where nothing is trained or there are none."""
    config = assembly.config
    trainer = config.trainer
    if trainer.type == "none" or "training" not in splits:
        return None
    schema = row_schema(config, supervised=True)
    rows = splits["training"]
    with directory.progress(len(rows), "reading") if len(rows) >= READING_IS_SHOWN else nullcontext() as display:
        encoded = EncodedRows.build(
            rows, assembly.encoder, schema=schema, ledger=ledger, progress=display.advance if display else None
        )
    loader = Loader(
        encoded,
        batching=config.data.batching,
        options=config.data.loader,
        batch_size=trainer.batch_size,
        batches_per_step=trainer.accumulation if isinstance(trainer, FinetuneTrainer) else 1,
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


def note_work(directory: RunDirectory, assembly: Assembly, splits: dict[str, Rows], ledger: Ledger) -> None:
    """Write down what the run works on, and with which sizes."""
    trainer = assembly.config.trainer
    said = trainer.model_fields_set
    device = str(assembly.lm.device)

    def size(rows: int, key: str) -> dict[str, object]:
        return {"rows": rows, "origin": "file" if key in said else "default", "device": device}

    evaluation = trainer.eval_batch_size or trainer.batch_size
    key = "eval_batch_size" if trainer.eval_batch_size else "batch_size"
    sizes = {"generation": size(evaluation, key), "evaluation": size(evaluation, key)}
    if trainer.type != "none":
        sizes["training"] = size(trainer.batch_size, "batch_size")
    directory.note(
        device=device,
        data={split: {"rows": len(rows), "fingerprint": rows.fingerprint} for split, rows in splits.items()},
        ledger={split: counts.left_out for split, counts in ledger.splits.items()},
        labels={name: list(labels) for name, labels in assembly.labels.items()},
        batch_sizes=sizes,
        parameters=sum(parameter.numel() for parameter in assembly.lm.module.parameters()),
        trained_parameters=sum(p.numel() for p in assembly.lm.module.parameters() if p.requires_grad),
    )
