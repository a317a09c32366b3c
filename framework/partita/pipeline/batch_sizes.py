"""Batch sizes of a loaded model: set in the config, cached, or found by probing."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from partita.data.training_shape import TrainingShape
from partita.generation.oom_backoff import BatchBudget
from partita.generation.requests import usable_lengths
from partita.lm.base import GenerationOptions, request_limit
from partita.pipeline.probes import EvaluationProbe, GenerationProbe
from partita.pipeline.size_key import ROWS_THAT_COUNT, TunedPipeline, size_key
from partita_schema.common.text import counted
from partita_schema.errors import OtherRankError
from partita_schema.sections.trainer import FinetuneTrainer
from partita_trainers.batch_size.cache import BatchSizeCache, bucket
from partita_trainers.batch_size.device_memory import device_memory
from partita_trainers.batch_size.probe import BatchSize, Probe, Purpose
from partita_trainers.batch_size.probe_runner import ProbeRunner
from partita_trainers.batch_size.search import candidate_sizes, predicted_bytes
from partita_trainers.batch_size.tune import Sizes, tune, verify
from partita_trainers.objective import CROSS_ENTROPY, CrossEntropy, Objective
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup

logger = logging.getLogger(__name__)

FRAGMENTATION = 2.2
"""Ratio of process memory to allocated memory with the default malloc; measured on Linux."""


@dataclass(frozen=True)
class BatchSizes:
    """Batch sizes by purpose; None if there is no such work."""

    generation: BatchSize | None = None
    """Size for generation."""
    evaluation: BatchSize | None = None
    """Size for evaluation."""
    training: BatchSize | None = None
    """Size for training."""

    def by_purpose(self) -> dict[str, BatchSize]:
        """Return the sizes that are set, by purpose."""
        named = {"generation": self.generation, "evaluation": self.evaluation, "training": self.training}
        return {name: size for name, size in named.items() if size is not None}

    def records(self) -> dict[str, dict[str, Any]]:
        """Return the sizes as JSON, for the manifest."""
        return {name: size.record() for name, size in self.by_purpose().items()}


@dataclass(frozen=True)
class KnownBatchSize:
    """A size that is known in this process."""

    size: BatchSize
    rows: int
    """Number of rows it was found for."""
    key: Mapping[str, Any]
    """Its key in the cache."""


class BatchSizeTuner:
    """Finds batch sizes for one model, and remembers them.

    A size found for longer prompts is reused for shorter ones. A size that ran out of memory is lowered to what fitted.
    """

    def __init__(
        self,
        pipeline: TunedPipeline,
        *,
        fresh: bool = False,
        process_group: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        """Set up the tuner.

        Args:
            pipeline: Config, model and generation settings.
            fresh: Whether to ignore cached sizes.
            process_group: The ranks that look for a size together and get the same one.
        """
        self.pipeline, self.fresh = pipeline, fresh
        self.cache = BatchSizeCache.of_user()
        self.config, self.lm = pipeline.config, pipeline.lm
        self.process_group = process_group
        self.memory = device_memory(
            self.lm.device, memory_budget=self.config.trainer.memory_budget, processes=process_group.local_world_size
        )
        self.device = str(self.lm.device)
        self.known: dict[Purpose, KnownBatchSize] = {}
        self.budgets: dict[Purpose, BatchBudget] = {}
        """Budgets of the latest jobs, lowered when memory ran out."""
        self.used: dict[Purpose, BatchSize] = {}
        """Sizes that jobs had a budget for."""
        self.with_training_state = False
        """Whether the optimizer state is on the device."""
        self.noted_training_size = False

    # Origin of sizes

    def generation(
        self,
        lengths: np.ndarray,
        *,
        shared_tokens: int = 0,
        batch_size: int | None = None,
        max_new_tokens: int | None = None,
        options: GenerationOptions | None = None,
    ) -> BatchSize:
        """Return the batch size of generation.

        Args:
            lengths: Length of each prompt in tokens, 0 for rows that are not generated for.
            shared_tokens: Number of prompt tokens shared by all rows.
            batch_size: Size set by the caller, which overrides the config.
            max_new_tokens: Maximum number of new tokens; None for that of the pipeline.
            options: Generation settings; None for those of the pipeline.
        """
        wanted = max_new_tokens or self.pipeline.max_new_tokens
        usable, _ = usable_lengths(
            lengths, min(1, wanted), context_length=request_limit(self.lm), answers=self.lm.answer_context
        )
        requested = lengths[usable > 0]
        fixed = self.user_set("generation", batch_size) or self.single_row(len(requested))
        if fixed is not None:
            if batch_size is None and fixed.origin == "file":
                self.note_training_size(fixed.rows)
            return fixed
        options = options or self.pipeline.generation
        probe = GenerationProbe(self.lm, options, lengths=requested, wanted_tokens=wanted, shared_tokens=shared_tokens)
        kind = [
            options.arguments,
            len(options.stop),
            options.logprobs,
            options.kv_cache,
            probe.engine,
            bucket(shared_tokens),
        ]
        return self.find(probe, options=kind)

    def evaluation(
        self,
        lengths: np.ndarray,
        max_loss_tokens: int,
        *,
        batch_size: int | None = None,
        objective: Objective = CROSS_ENTROPY,
    ) -> BatchSize:
        """Return the batch size of evaluation, a forward pass without gradients.

        Args:
            lengths: Length of each row in tokens, including its answer.
            max_loss_tokens: Maximum number of loss tokens of a row.
            batch_size: Size set by the caller, which overrides the config.
            objective: What is computed.
        """
        fixed = self.user_set("evaluation", batch_size) or self.single_row(len(lengths))
        if fixed is not None:
            return fixed
        probe = EvaluationProbe(self.lm, lengths=lengths, max_loss_tokens=max_loss_tokens, objective=objective)
        name = [] if isinstance(objective, CrossEntropy) else [type(objective).__qualname__]
        return self.find(probe, options=[bucket(max_loss_tokens), *name])

    def training(self, probe: Probe, shape: TrainingShape) -> BatchSize:
        """Return the batch size of training; it divides the rows per step if the config sets those.

        With batches filled by tokens, a batch has on average no more rows than a step.
        """
        trainer = self.config.trainer
        step_rows = trainer.step_rows if isinstance(trainer, FinetuneTrainer) else None
        if step_rows is not None:
            step_rows = shape.rows_of_a_rank(step_rows)
        limit = None if step_rows is None else shape.max_rows_for(step_rows)
        batching = shape.batching.model_dump(mode="json")
        options = [shape.max_loss_tokens, step_rows, batching, shape.more_rows]
        if step_rows is None or shape.counts_tokens:
            return self.find(probe, options=options, max_rows=limit)
        sizes = divisors_of(step_rows)
        size = self.find(probe, options=options, sizes=sizes, max_rows=limit)
        if size.max_fitting:
            largest, could = max(sizes(size.max_fitting)), min(size.max_fitting, step_rows)
            if 2 * largest <= could:
                logger.warning(
                    "effective_batch_size %s can be cut into batches of %s at most, and %s would fit; "
                    "a number with more divisors would be faster",
                    *(f"{count:,}" for count in (step_rows, largest, could)),
                )
        return size

    def user_set(self, purpose: Purpose, batch_size: int | None) -> BatchSize | None:
        """Return the size if the caller or the config sets a number, else None."""
        trainer = self.config.trainer
        chosen: int | str = trainer.batch_size
        if purpose != "training" and trainer.eval_batch_size is not None:
            chosen = trainer.eval_batch_size
        chosen = batch_size if batch_size is not None else chosen
        return BatchSize(rows=chosen, origin="file", device=self.device) if isinstance(chosen, int) else None

    def note_training_size(self, rows: int) -> None:
        """Log once that prediction has the batch size of training, which the file sets."""
        trainer = self.config.trainer
        if self.noted_training_size or trainer.eval_batch_size is not None or not self.config.trains:
            return
        self.noted_training_size = True
        if self.config.head_output is None:
            what = "answers are generated"
        else:
            what = "answers are scored" if self.config.scores_answers else "values are predicted"
        logger.info(
            "%s for %s at a time, as trainer.batch_size says; trainer.eval_batch_size: auto measures how many fit",
            what,
            counted(rows, "row"),
        )

    def single_row(self, rows: int) -> BatchSize | None:
        """Return size 1 for at most one row, which needs no probe; else None."""
        return BatchSize(rows=1, origin="default", device=self.device) if rows <= 1 else None

    def find(
        self,
        probe: Probe,
        *,
        options: Sequence[Any],
        sizes: Sizes = candidate_sizes,
        max_rows: int | None = None,
    ) -> BatchSize:
        """Return the known size, else the verified size of an earlier run, else a new one.

        Args:
            probe: Measures sizes.
            options: Further settings that affect the size.
            sizes: Returns the candidate sizes.
            max_rows: Upper limit of the size.

        Raises:
            OtherRankError: Rank 0 failed to find a size.
        """
        # Limits lowered by jobs may differ between ranks, and so may the known sizes.
        known = self.process_group.run_on_rank_zero(lambda: self.known_size(probe, options), "a known batch size")
        if known is not None:
            return known
        limits = [limit for limit in (max_rows, self.config.trainer.max_batch_size) if limit is not None]
        limit = min(limits, default=None)
        state = self.with_training_state
        key = size_key(self.pipeline, probe, self.memory, options=options, max_rows=limit, with_training_state=state)
        runner = ProbeRunner(probe, self.memory, process_group=self.process_group)
        size = (
            self.search(runner, key, max_rows=limit, sizes=sizes) if self.process_group.rank == 0 else runner.follow()
        )
        self.memory.clear()
        if size is None:
            raise OtherRankError("rank 0 failed to find a batch size; see its own message")
        self.known[probe.purpose] = KnownBatchSize(size, rows=probe.max_rows, key=key)
        self.budgets.pop(probe.purpose, None)
        return size

    def search(self, runner: ProbeRunner, key: Mapping[str, Any], *, max_rows: int | None, sizes: Sizes) -> BatchSize:
        """Return the verified size of an earlier run, else a new one; broadcast it to the other ranks.

        Args:
            runner: Runs the probe.
            key: Key of the size in the cache.
            max_rows: Upper limit of the size.
            sizes: Returns the candidate sizes.
        """
        size = None
        try:
            earlier = None if self.fresh else self.cache.load(key)
            size = verify(runner, earlier, max_rows=max_rows, sizes=sizes) if earlier is not None else None
            if size is None:
                size = tune(runner, device=self.device, max_rows=max_rows, sizes=sizes)
                self.cache.save(key, size)
            return size
        finally:
            runner.end(size)

    def known_size(self, probe: Probe, options: Sequence[Any]) -> BatchSize | None:
        """Return a known size for work of the same kind that is not harder and not far larger."""
        known = self.known.get(probe.purpose)
        if known is None:
            return None
        size = known.size
        harder = probe.prompt_tokens > (size.prompt_tokens or 0) or probe.new_tokens > (size.new_tokens or 0)
        larger = min(probe.max_rows, ROWS_THAT_COUNT) > 2 * known.rows
        was_limited = size.rows >= known.rows and probe.max_rows > known.rows
        other = list(options) != known.key["options"]
        return None if harder or larger or was_limited or other else size

    # Use of sizes

    def budget(self, purpose: Purpose, size: BatchSize) -> BatchBudget:
        """Return the batch budget of a job; one that was lowered when memory ran out stays lowered."""
        token_budget = None
        if size.max_fitting is not None and size.rows >= size.max_fitting and size.prompt_tokens is not None:
            token_budget = size.rows * (size.prompt_tokens + (size.new_tokens or 0))
        budget = BatchBudget(size.rows, token_budget=token_budget, guard=lambda: self.guard(size))
        before = self.budgets.get(purpose)
        if before is not None and before.out_of_memory and before.current_limit <= size.rows:
            budget = replace(before, batch_size=budget.batch_size, token_budget=budget.token_budget, guard=budget.guard)
        self.budgets[purpose] = budget
        self.used[purpose] = size
        return budget

    @contextmanager
    def work(self, purpose: Purpose, size: BatchSize | None) -> Iterator[BatchBudget]:
        """Guard memory during work of a purpose and yield its budget; a size must have been found."""
        if size is None:
            raise AssertionError(f"no batch size was found for {purpose}")
        budget = self.budget(purpose, size)
        with budget.guard():
            yield budget

    def guard(self, size: BatchSize) -> AbstractContextManager[None]:
        """Return a context manager that guards memory, with exact memory management if memory is short."""
        fitting = [probe for probe in size.probes if probe.verdict == "fits"]
        short = False
        if fitting and size.budget_bytes is not None:
            short = FRAGMENTATION * predicted_bytes(fitting, size.rows) > size.budget_bytes
        return self.memory.guard(exact=short)

    def after(self, sizes: BatchSizes) -> BatchSizes:
        """Return the sizes after work: those that ran out of memory are lowered to what fitted.

        Later jobs start with the lowered sizes, in this process and in others.
        """
        return replace(sizes, **{name: self.lower_after_oom(name, size) for name, size in sizes.by_purpose().items()})

    def training_was_cut(self, size: BatchSize, *, rows: int) -> BatchSize:
        """Mark a training size whose batches were split: the plan keeps it, later runs start with what fitted."""
        known = self.known.get("training")
        if known is not None and known.size == replace(size, max_tokens=None):
            self.cache.save(known.key, replace(known.size, rows=min(size.rows, rows), out_of_memory=True))
        return replace(size, out_of_memory=True)

    def lower_after_oom(self, purpose: Any, size: BatchSize) -> BatchSize:
        """Return a size, lowered and cached if memory ran out since."""
        budget = self.budgets.get(purpose)
        if budget is None or not budget.out_of_memory:
            return size
        lowered = replace(size, rows=min(size.rows, budget.current_limit), out_of_memory=True)
        known = self.known.get(purpose)
        if known is not None and known.size == size != lowered:
            self.known[purpose] = replace(known, size=lowered)
            self.cache.save(known.key, lowered)
        return lowered


def divisors_of(step_rows: int) -> Sizes:
    """Return candidate sizes that divide the rows of a step, so that batches fill it exactly."""

    def sizes(largest: int) -> list[int]:
        return [rows for rows in range(1, min(largest, step_rows) + 1) if step_rows % rows == 0]

    return sizes
