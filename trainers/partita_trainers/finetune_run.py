"""The training loop of fine-tuning: steps, evaluations and checkpoints, from the newest checkpoint to the end.

A run that is killed at any time and restarted takes the same steps as an uninterrupted one: the data position, weights,
optimizer and random states are saved together and restored bit for bit.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

from accelerate.utils import set_seed

from partita_schema.common.text import counted
from partita_schema.config import Config
from partita_schema.errors import ResumeError
from partita_schema.metrics import full_name
from partita_schema.sections.trainer import FinetuneTrainer, final_splits
from partita_schema.training_defaults import default_learning_rate
from partita_trainers.base import Batches, GlobalBatch, Metrics, TrainerContext, TrainResult, save_result
from partita_trainers.callbacks import Callbacks
from partita_trainers.checkpoints.checkpoint import (
    check_intact,
    checkpoint_name,
    list_checkpoints,
    newest_intact,
    read_checkpoint,
    remove_checkpoints,
    write_checkpoint,
)
from partita_trainers.early_stopping import BestEvaluation
from partita_trainers.engine import TrainEngine
from partita_trainers.interrupt import interruption
from partita_trainers.learning_rate_search import find_learning_rate
from partita_trainers.objective import Objective
from partita_trainers.optimizers import evaluation_weights, keep_evaluation_weights
from partita_trainers.schedule import CheckpointTimer, learning_rate_share, plan_schedule
from partita_trainers.steps.loss_history import LossHistory
from partita_trainers.steps.micro_batches import MicroBatchSplitter
from partita_trainers.steps.source_counts import SourceCounts
from partita_trainers.steps.step import open_steps, take_step
from partita_trainers.steps.step_stats import StepRequests, StepResult, step_record

logger = logging.getLogger(__name__)


class FinetuneRun:
    """The training loop of one run and its state."""

    def __init__(
        self, config: FinetuneTrainer, context: TrainerContext, batches: Batches, *, objective: Objective
    ) -> None:
        """Plan the schedule and build the engine.

        Args:
            config: The trainer section.
            context: Model, evaluation, run directory and process group.
            batches: Training data; at least one row.
            objective: What is minimized.
        """
        self.config, self.context, self.batches = config, context, batches
        self.lm, self.run, self.process_group = context.lm, context.run, context.process_group
        self.schedule = plan_schedule(config, batches=batches, splits=context.splits)
        metric = full_name(config.validation_metric, context.config.output_features)
        self.best_evaluation = BestEvaluation(metric, config.early_stop, context.validation_rows)
        self.lm.prepare_training(self.schedule.total)
        sharded = is_sharded(context.config)
        self.engine = TrainEngine(
            config,
            self.lm,
            device=context.device,
            process_group=context.process_group,
            sharded=sharded,
            objective=objective,
        )
        if self.engine.shards is not None:
            local_numel, world_size = self.engine.shards.local_numel, self.process_group.world_size
            logger.info(
                "the weights are sharded over %d processes (FSDP): about %s parameters each",
                world_size,
                f"{local_numel:,}",
            )
            self.run.note(parameters_per_process=local_numel)
        self.splitter = MicroBatchSplitter()
        self.losses = LossHistory()
        self.sources = SourceCounts(context.config.data.mix_names)
        self.learning_rate = 0.0
        self.callbacks = Callbacks(
            context, total_steps=self.schedule.total, validation_metric=self.best_evaluation.metric
        )
        self.step = 0
        self.stopped_early = False
        self.timer = CheckpointTimer(config.minutes_per_checkpoint)
        self.timed_steps: list[int] = []
        """Steps of the last two checkpoints that were saved only because of the time."""

    def resume(self) -> int | None:
        """Restore the newest checkpoint and return its step; None for a new run."""
        step = self.process_group.run_on_rank_zero(lambda: newest_intact(self.run.checkpoints), "the checkpoints")
        if step is None:
            set_seed(self.context.config.seed)
            self.run.truncate_log(0)
            self.learning_rate = self.peak_learning_rate()
            self.run.note(learning_rate=self.learning_rate)
            return None
        if step > self.schedule.total:
            raise ResumeError(
                f"the run is at step {step}, but the configuration ends at step {self.schedule.total}; "
                "raise trainer.epochs or trainer.max_steps, or give this run another folder with --run"
            )
        self.load_checkpoint(step)
        self.run.truncate_log(step)
        logger.info("continuing at step %d of %d", step, self.schedule.total)
        return step

    def load_checkpoint(self, step: int) -> None:
        """Restore the model, optimizers, random states, data position and counters of a checkpoint."""
        data_position, state = self.restore_checkpoint(step)
        self.batches.load_data_position(data_position)
        self.best_evaluation.load_state_dict(state["validation"])
        if state["total_steps"] != self.schedule.total:  # more steps are asked for, as with a stop of callbacks
            self.best_evaluation.evaluations_without_improvement = 0
        self.splitter.load_state_dict(state["splitter"])
        self.sources.load_state_dict(state.get("sources", {}))
        self.timed_steps = state.get("timed_steps", [])
        self.step, self.learning_rate = step, state["learning_rate"]
        self.callbacks.restore_stop(self.run.checkpoints / checkpoint_name(step), state["stop"])
        self.stopped_early = self.should_stop
        if self.engine.accelerator.scaler is not None:
            self.engine.accelerator.scaler.load_state_dict(state["scaler"])

    @property
    def should_stop(self) -> bool:
        """Whether the run ends before its last step: no better evaluations, or a callback asked to stop."""
        asked = self.best_evaluation.should_stop or self.callbacks.stopped_by is not None
        return asked and self.step < self.schedule.total

    def start_callbacks(self, resumed_from: int | None) -> None:
        """Call the callbacks before the first step of this process."""
        checkpoint = None if resumed_from is None else self.run.checkpoints / checkpoint_name(resumed_from)
        best, best_step = self.best_evaluation.best, self.best_evaluation.best_step
        self.callbacks.call("on_start", step=self.step, checkpoint=checkpoint, best=best, best_step=best_step)
        self.stopped_early = self.should_stop

    def restore_checkpoint(self, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Restore the model, optimizers and random states; return the data position and counters."""
        return read_checkpoint(
            self.run.checkpoints, step, load_model=self.lm.load_checkpoint, optimizers=self.engine.raw_optimizers
        )

    def peak_learning_rate(self) -> float:
        """Return the configured learning rate, the result of the range test, or the default for what is trained."""
        configured = self.config.learning_rate
        if configured == "auto":
            search = find_learning_rate(self.lm, self.batches, try_step=self.try_step)
            self.engine.build_optimizers()
            self.run.note(learning_rate_search=asdict(search))
            return search.learning_rate
        if configured is not None:
            return configured
        return default_learning_rate(self.context.config)[0]

    def try_step(self, global_batch: GlobalBatch, learning_rate: float) -> float:
        """Take a step of the range test and return its loss."""
        return self.take_step(global_batch, number=1, learning_rate=learning_rate).loss

    def take_step(
        self,
        global_batch: GlobalBatch,
        *,
        number: int,
        learning_rate: float,
        requests: Callable[[], StepRequests] = StepRequests,
    ) -> StepResult:
        """Take a step and record out-of-memory events in the manifest.

        Args:
            global_batch: The micro-batches of this rank.
            number: Number of the step, from 1.
            learning_rate: Learning rate of this step.
            requests: Returns what this rank wants to happen after the step.

        Raises:
            DivergenceError: A loss is not finite; the message says why and what to change.
        """
        known = len(self.splitter.events)
        with self.losses.explaining(self.engine, learning_rate=self.learning_rate, checkpoints=self.run.checkpoints):
            outcome = take_step(
                global_batch,
                number=number,
                learning_rate=learning_rate,
                engine=self.engine,
                splitter=self.splitter,
                seed=self.context.config.seed,
                requests=requests,
            )
        if len(self.splitter.events) > known:
            self.run.note(out_of_memory=self.splitter.events)
        return outcome

    def train_loop(self) -> None:
        """Take the remaining steps, and evaluate and save when due."""
        total = self.schedule.total
        if self.stopped_early:
            self.log_stop()
        if self.step >= total or self.stopped_early:
            return
        with (
            interruption("stopping after this step") as interrupt,
            self.run.progress(total, "training", completed=self.step) as progress,
            open_steps(self.batches) as steps,
        ):
            self.timer.restart()

            def requests() -> StepRequests:
                return StepRequests(stop=interrupt.requested, checkpoint=self.timer.is_due())

            for step in islice(steps, total - self.step):
                self.step += 1
                started = time.perf_counter()
                share = learning_rate_share(self.config.learning_rate_scheduler, step=self.step, total_steps=total)
                rate = self.learning_rate * share
                outcome = self.take_step(step, number=self.step, learning_rate=rate, requests=requests)
                seconds = time.perf_counter() - started
                record = step_record(outcome, number=self.step, epoch=step.epoch, learning_rate=rate, seconds=seconds)
                record |= self.sources.add(step, self.process_group)
                self.run.log_step(record)
                self.losses.add(self.step, outcome.loss)
                tokens = outcome.stats.tokens
                progress.advance(1, loss=outcome.loss, epoch=step.epoch, tokens_per_second=tokens / seconds)
                self.callbacks.call("on_step", step=self.step, epoch=step.epoch, record=record)
                is_saved = self.maybe_evaluate_and_save(step, time_is_over=outcome.requests.checkpoint)
                if self.stopped_early:
                    self.log_stop()
                    break
                if outcome.requests.stop:
                    if not is_saved:
                        self.save_checkpoint(step)
                    logger.info("saved step %d of %d", self.step, total)
                    raise KeyboardInterrupt

    def maybe_evaluate_and_save(self, global_batch: GlobalBatch, *, time_is_over: bool) -> bool:
        """Evaluate and save a checkpoint if due after this step, or if the last one has become too old.

        Returns:
            Whether a checkpoint was saved.
        """
        improved = self.schedule.evaluation_is_due(self.step) and self.evaluate()
        self.stopped_early = self.should_stop
        due = improved or self.stopped_early or self.schedule.checkpoint_is_due(self.step)
        if due or time_is_over:
            if not due:
                self.timed_steps = [*self.timed_steps[-1:], self.step]
            self.save_checkpoint(global_batch)
            self.stopped_early = self.should_stop  # after a checkpoint, callbacks may ask to stop too
        return due or time_is_over

    def evaluate(self) -> bool:
        """Evaluate and report metrics. Return whether the validation metric is the best so far."""
        without_answers = ("loss", *self.config.METRICS)
        generated = self.config.evaluate_generated is True or self.best_evaluation.metric not in without_answers
        # A head answers a row in one pass, as fast as its loss is computed; a ranking is one of all rows of its query.
        head_answers = generated and self.context.config.head_output is not None
        max_rows = None if head_answers else self.config.max_generated_rows
        with evaluation_weights(self.engine.raw_optimizers), self.engine.summon_full_params():
            metrics = self.context.evaluate("validation", generated=generated, max_rows=max_rows, step=self.step)
        self.run.report(metrics, step=self.step, split="validation")
        improved = self.best_evaluation.update(metrics, step=self.step)
        training_loss, total = self.losses.take_mean(), self.schedule.total
        self.best_evaluation.log(
            metrics, step=self.step, total_steps=total, training_loss=training_loss, improved=improved
        )
        best, best_step = self.best_evaluation.best, self.best_evaluation.best_step
        self.callbacks.call("on_evaluate", metrics=metrics, best=best, best_step=best_step)
        return improved

    def log_stop(self) -> None:
        """Log why the run ends before its last step."""
        reason = self.callbacks.stopped_by
        if reason is None:
            evaluations = counted(self.best_evaluation.patience, "evaluation")
            reason = f"no better {self.best_evaluation.metric} in {evaluations}"
        logger.info("stopping after step %d of %d: %s", self.step, self.schedule.total, reason)

    def save_checkpoint(self, global_batch: GlobalBatch) -> None:
        """Save a checkpoint and remove older ones, except the best and the newest `keep_checkpoints`.

        One that was saved only because of the time is replaced by the next one, and does not count.
        """
        data_position = self.batches.merge_data_positions(
            self.process_group.all_gather_object(global_batch.data_position, "the data position")
        )
        states = self.engine.optimizer_states()
        with self.engine.summon_full_params():
            self.process_group.run_on_rank_zero(
                lambda: self.write_checkpoint_files(data_position, states), "a checkpoint"
            )
        self.timer.restart()
        self.callbacks.call_on_checkpoint(self.run.checkpoints / checkpoint_name(self.step))

    def write_checkpoint_files(self, data_position: Mapping[str, Any], optimizer_states: Sequence[Any]) -> None:
        """Write the files of a checkpoint; called on rank 0 only."""
        scaler = self.engine.accelerator.scaler
        write_checkpoint(
            self.run.checkpoints,
            self.step,
            save_model=self.lm.save_checkpoint,
            optimizer_states=optimizer_states,
            data_position=data_position,
            trainer={
                "step": self.step,
                "total_steps": self.schedule.total,
                "learning_rate": self.learning_rate,
                "scaler": scaler.state_dict() if scaler is not None else None,
                "validation": self.best_evaluation.state_dict(),
                "splitter": self.splitter.state_dict(),
                "sources": self.sources.state_dict(),
                "timed_steps": self.timed_steps,
                "stop": self.callbacks.stop_record(),
            },
        )
        lasting = [step for step in list_checkpoints(self.run.checkpoints) if step not in self.timed_steps]
        best = self.best_evaluation.best_step
        newest = {self.step, *lasting[-self.config.keep_checkpoints :]}
        remove_checkpoints(self.run.checkpoints, keep=newest | ({best} if best is not None else set()))

    def end_training(self) -> int:
        """Restore the best weights, remove the autocast of mixed precision, and return the step of the weights."""
        best, weights = self.best_evaluation.best_step, self.step
        if self.config.restore_best and best is not None and best != self.step:
            self.process_group.run_on_rank_zero(lambda: self.check_best(best), "the best checkpoint")
            self.restore_checkpoint(best)
            weights = best
        keep_evaluation_weights(self.engine.raw_optimizers)
        # Without accelerate's autocast: the model that is saved and scored computes what a loaded one computes.
        self.engine.release()
        return weights

    def finalize(self, weights: int, *, resumed_from: int | None) -> TrainResult:
        """Save the model and evaluate it.

        Args:
            weights: The step of the weights.
            resumed_from: The step that this process has continued at, if any.
        """
        self.process_group.run_on_rank_zero(lambda: save_result(self.lm, self.run.folder), "the result")
        metrics = self.final_metrics(weights)
        for split, values in metrics.items():
            self.run.report(values, step=self.step, split=split)
        self.run.note(best_step=self.best_evaluation.best_step, best=self.best_evaluation.best)
        if used := self.sources.state_dict():
            self.run.note(sources=used)
        self.run.note(stopped_by=self.callbacks.stopped_by if self.stopped_early else None)
        self.callbacks.call("on_end", results=metrics)
        return TrainResult(
            run=self.run.folder,
            metrics=metrics,
            steps=self.step,
            resumed_from=resumed_from,
            stopped_early=self.stopped_early,
        )

    def check_best(self, step: int) -> None:
        """Raise ResumeError if the checkpoint with the best weights is damaged."""
        try:
            check_intact(self.run.checkpoints, step)
        except ResumeError as error:
            raise ResumeError(
                f"the best weights cannot be restored: {error}; restore that file, or write trainer.restore_best: "
                "false to end with the last weights"
            ) from None

    def final_metrics(self, weights: int) -> dict[str, Metrics]:
        """Return the metrics of the final model, with the weights of a step, on validation and test rows."""
        if self.config.skip_all_evaluation:
            return {}
        wanted = final_splits(self.config)
        generated = self.config.evaluate_generated is not False
        return {
            split: self.context.evaluate(split, generated=generated, step=weights)
            for split in wanted
            if split in self.context.splits
        }


def is_sharded(config: Config) -> bool:
    """Return whether the ranks shard the weights of the model."""
    return getattr(config.backend, "sharding", "none") == "full"
