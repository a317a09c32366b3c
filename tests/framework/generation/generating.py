"""Generation with a model in this process, as called by tests."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from partita.generation.generator import LocalGenerator
from partita.generation.oom_backoff import BatchBudget
from partita.generation.requests import BatchResult, GenerationJob, GenerationSettings
from partita.lm.base import GenerationOptions
from partita_trainers.interrupt import never
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup


def generate_rows(
    lm: Any,
    prompts: Any,
    *,
    engine: str,
    options: GenerationOptions,
    max_new_tokens: int,
    batch_size: int,
    seed: int,
    done: npt.NDArray[np.bool_],
    budget: BatchBudget | None = None,
    token_budget: int | None = None,
    stopping: Callable[[], bool] = never,
    process_group: ProcessGroup = SINGLE_PROCESS,
    num_samples: int = 1,
) -> Iterator[BatchResult]:
    """Yield the results of the rows that are not in `done`; a `budget` keeps its limit and gets the other sizes."""
    budget = BatchBudget(batch_size) if budget is None else budget
    budget.batch_size, budget.token_budget = batch_size, token_budget
    settings = GenerationSettings(options, budget, seed, stopping=stopping, process_group=process_group)
    job = GenerationJob(prompts, settings, engine, max_new_tokens, num_samples=num_samples)
    return LocalGenerator(lm).generate(job, done=done)
