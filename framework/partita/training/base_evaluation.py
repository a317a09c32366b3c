"""Evaluation of the model before the first step (`trainer.evaluate_base`)."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from partita.lm.loaded_model import LoadedModel
from partita.pipeline.build import LocalPipeline
from partita.pipeline.eval_dataset import EvalDataset
from partita.pipeline.evaluate import is_answered
from partita.runs.row_results import evaluation_path
from partita.training.datasets import PlannedLoader
from partita.training.evaluations import Evaluations
from partita_schema.errors import ConfigError, Problem
from partita_schema.rules.training import NEW_VIRTUAL_TOKENS, NOTHING_LEARNED, RANDOM_MODEL
from partita_schema.sections.model import ScratchModel
from partita_schema.sections.trainer import FinetuneTrainer, final_splits
from partita_trainers.base import LanguageModel
from partita_trainers.checkpoints.checkpoint import random_state, restore_random_state
from partita_trainers.checkpoints.preserved_state import snapshot

logger = logging.getLogger(__name__)

BASE_ROWS = "base_rows"
"""Key of the manifest with the hashes of the rows of these evaluations, by split."""
TRAINING_PASSES = 3.0
"""Cost of training on a token, in forward passes: a backward pass costs twice as much (Kaplan et al. 2020, Scaling Laws
for Neural Language Models, section 2.1)."""
DECODE_PASSES = 10.0
"""Cost of a generated token, in forward passes of a token of a prompt. Decoding reads all weights for a few tokens."""
MAX_SHARE = 0.1
"""Share of the cost of training up to which `auto` evaluates the model before training."""


def evaluate_base(evaluations: Evaluations, planned: PlannedLoader | None) -> None:
    """Evaluate the model before the first step on the splits of the final evaluation, if the configuration asks for it.

    `trainer.evaluate_base: auto` evaluates it if that is estimated to cost less than a tenth of the training
    (`share_of_training`). Splits that are recorded already, by an earlier start of the run, are skipped. Random states,
    buffers and modes of the model are restored, so that training takes the same steps as without.

    Args:
        evaluations: The evaluations of the run.
        planned: The loader of the training rows; None without any.

    Raises:
        ConfigError: `evaluate_base` is true, and the model before training has learned nothing.
    """
    pipeline = evaluations.evaluator.pipeline
    trainer = pipeline.config.trainer
    if not isinstance(trainer, FinetuneTrainer) or planned is None or trainer.skip_all_evaluation:
        return
    if trainer.evaluate_base is False:
        return
    reason = why_meaningless(pipeline)
    if reason is not None:
        if trainer.evaluate_base is True:
            raise ConfigError([Problem("trainer.evaluate_base", NOTHING_LEARNED.format(reason))])
        return
    wanted = final_splits(trainer)
    generated = trainer.evaluate_generated is not False
    splits = {split: evaluations.datasets[split] for split in wanted if split in evaluations.datasets}
    share = share_of_training(pipeline, splits.values(), planned, generated=generated)
    if trainer.evaluate_base == "auto" and share > MAX_SHARE:
        logger.info(
            "the model is not evaluated before training, which would cost about %s; write trainer.evaluate_base: true "
            "for it",
            cost_in_words(share),
        )
        return
    with preserved(pipeline.lm):
        for split in splits:
            evaluate_split(evaluations, split, generated=generated)


def evaluate_split(evaluations: Evaluations, split: str, *, generated: bool) -> None:
    """Evaluate the model before training on a split, unless an earlier start of the run has recorded it.

    Args:
        evaluations: The evaluations of the run.
        split: Name of the split.
        generated: Whether answers are generated.
    """
    directory, process_group = evaluations.directory, evaluations.evaluator.process_group
    path = evaluation_path(directory.folder, split, base=True)
    rows = evaluations.datasets[split].encoded.fingerprint

    def is_recorded() -> bool:
        known = split in directory.manifest.get("metrics_base", {})
        return known and directory.manifest.get(BASE_ROWS, {}).get(split) == rows and path.exists()

    if process_group.run_on_rank_zero(is_recorded, "the evaluation before training"):
        return
    logger.info("evaluating the model before training on %s", split)
    metrics = evaluations.base(split, generated=generated)
    noted = {key: directory.manifest.get(key, {}) for key in ("metrics_base", BASE_ROWS)}
    directory.note(metrics_base=noted["metrics_base"] | {split: metrics}, base_rows=noted[BASE_ROWS] | {split: rows})


def why_meaningless(pipeline: LocalPipeline) -> str | None:
    """Return why the model before training has learned nothing; None if it can be evaluated."""
    lm = pipeline.lm
    if not isinstance(lm, LoadedModel) or isinstance(pipeline.config.base_model, ScratchModel):
        return RANDOM_MODEL
    if lm.has_new_head:
        return "a new head has random weights"
    if lm.virtual_tokens and lm.adapter_source is None:
        return NEW_VIRTUAL_TOKENS
    return None


def cost_in_words(share: float) -> str:
    """Return a share of the training as a percentage, or from two times it on as a number of times."""
    return f"{100 * share:.0f} % of the training" if share < 2 else f"{share:,.0f} times the training"


def share_of_training(
    pipeline: LocalPipeline, datasets: Iterable[EvalDataset], planned: PlannedLoader, *, generated: bool
) -> float:
    """Estimate the cost of an evaluation as a share of that of the training, from numbers of tokens.

    A training token costs three forward passes. In an evaluation, each token of a row costs one for the loss, and one
    more if answers are generated; each generated token costs ten, for as many tokens as an answer may have.

    Args:
        pipeline: The model, tokenizer and decoder of the run.
        datasets: The datasets to evaluate on.
        planned: The loader of the training rows.
        generated: Whether answers are generated.
    """
    passes = 0.0
    for dataset in datasets:
        tokens = float(dataset.encoded.lengths.sum())
        answers = len(dataset.rows) * pipeline.max_new_tokens * DECODE_PASSES
        passes += tokens + (tokens + answers if generated and is_answered(pipeline.config) else 0)
    return passes / (TRAINING_PASSES * planned.tokens)


@contextmanager
def preserved(lm: LanguageModel) -> Iterator[None]:
    """Restore the random states, and the buffers and modes of the model, which evaluations may change."""
    state, put_back = random_state(), snapshot(lm.module)
    try:
        yield
    finally:
        put_back()
        restore_random_state(state)
