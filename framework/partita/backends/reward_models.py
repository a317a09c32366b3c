"""The reward models that a file names: for `generation.best_of`, and as the checker of a simulation."""

import logging
from pathlib import Path
from typing import Any

from partita.backends.context import RunContext
from partita.data.column_checks import check_prompt_columns
from partita.data.rows import Rows
from partita.generation.best_of import BestOf
from partita.lm.base import GenerationOptions
from partita.pipeline.answer_scores import AnswerScorer
from partita.pipeline.batch_sizes import BatchSizeTuner
from partita.pipeline.build import build_pipeline
from partita.simulation.build import section_of
from partita.simulation.reward_checker import RewardChecker
from partita.tokenizers.load import tokenizer_digest
from partita_schema.errors import ConfigError, DataError, PartitaError, Problem
from partita_trainers.process_group import SINGLE_PROCESS

logger = logging.getLogger(__name__)


def load_answer_scorer(folder: Path, *, key: str, quiet: bool = False, trust_remote_code: bool = False) -> AnswerScorer:
    """Load the reward model of a finished run.

    Args:
        folder: The run directory.
        key: Key of the file that names it, for errors.
        quiet: Whether to show no progress.
        trust_remote_code: Whether to run code that the saved model names.

    Raises:
        ConfigError: The run is not finished, cannot be loaded, or trained no reward model.
    """
    try:
        context = RunContext.load(folder, quiet=quiet, trust_remote_code=trust_remote_code)
    except (PartitaError, OSError) as error:
        raise ConfigError([Problem(key, str(error))]) from error
    if not context.config.scores_answers:
        message = f"{folder} is a run of trainer: {{type: {context.config.trainer.type}}}, which scores no answers"
        raise ConfigError([Problem(key, f"{message}; name a run with trainer: {{type: reward}}")])
    labels, training = context.known_labels()
    pipeline = build_pipeline(
        context.config,
        folder=context.loaded.folder,
        labels=labels,
        training=training,
        saved=context.weights,
        trainable=False,
    )
    # Each rank scores its own answers, so the tuner may not wait for others.
    return AnswerScorer(pipeline, BatchSizeTuner(pipeline, process_group=SINGLE_PROCESS))


def load_best_of(context: RunContext, options: GenerationOptions, *, tokenizer: Any) -> BestOf:
    """Load the reward model of a file with `generation.best_of`; log if its tokenizer differs.

    Args:
        context: The file.
        options: Its generation options.
        tokenizer: The tokenizer of the model that answers; not used for a server, whose tokenizer is unknown.

    Raises:
        ConfigError: Answers are not sampled, or the folder holds no reward model.
    """
    generation = context.config.generation
    assert generation.best_of is not None, "the file asks for one answer"
    assert generation.reward is not None, "best_of needs a reward model"
    if not options.do_sample or options.beams > 1:
        reason = "the checkpoint searches with beams" if options.do_sample else "answers are not sampled"
        message = f"{reason}, so all answers to a row are the same; write generation: {{do_sample: true, num_beams: 1}}"
        raise ConfigError([Problem("generation.best_of", message)])
    reward = load_answer_scorer(
        context.loaded.folder / generation.reward,
        key="generation.reward",
        quiet=context.quiet,
        trust_remote_code=context.allows_saved_code,
    )
    of_reward = reward.pipeline.lm.tokenizer
    if context.config.backend.loads_model and tokenizer_digest(tokenizer) != tokenizer_digest(of_reward):
        logger.info(
            "the tokenizer or chat template of %s differs from that of the model: answers are scored as texts, which "
            "the reward model formats and tokenizes as its own file says",
            generation.reward,
        )
    return BestOf(generation.best_of, reward, keep_samples=generation.keep_samples)


def check_columns_of_reward(rows: Rows, best_of: BestOf | None) -> None:
    """Raise DataError if rows lack a column that the reward model of best_of reads."""
    if best_of is None:
        return
    try:
        check_prompt_columns(rows, best_of.reward.config)
    except DataError as error:
        raise DataError(f"generation.reward: {error}; the reward model reads the same rows") from None


def load_reward_checker(context: RunContext) -> RewardChecker | None:
    """Load the reward model that checks the episodes of a file; None if no reward model does.

    Raises:
        ConfigError: The folder holds no reward model.
    """
    section = section_of(context.config).checker
    if section is None or section.model is None:
        return None
    reward = load_answer_scorer(
        context.loaded.folder / section.model,
        key="simulation.checker.model",
        quiet=context.quiet,
        trust_remote_code=context.allows_saved_code,
    )
    return RewardChecker(reward, turns=section.turns, threshold=section.threshold)
