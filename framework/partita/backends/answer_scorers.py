"""Reward models of finished runs, for files that compare answers with them."""

from pathlib import Path

from partita.backends.context import RunContext
from partita.pipeline.answer_scores import AnswerScorer
from partita.pipeline.batch_sizes import BatchSizeTuner
from partita.pipeline.build import build_pipeline
from partita_schema.errors import ConfigError, PartitaError, Problem
from partita_trainers.batch_size.cache import Cache
from partita_trainers.process_group import SINGLE_PROCESS


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
    return AnswerScorer(pipeline, BatchSizeTuner(pipeline, cache=Cache.of_user(), process_group=SINGLE_PROCESS))
