"""Hogwild: lock-free training of one sparse model in shared memory by several processes.

The parent process does not train: it evaluates and saves between epochs, while the workers wait. A step is one batch of
one worker. Workers finish every batch they claim, so the weights of a checkpoint include all batches before its step
and none after it. A killed run therefore resumes at its last checkpoint, written at the end of an epoch or on Ctrl-C.
With one worker, a resumed run gives the same weights as an uninterrupted one, bit for bit; with several workers, runs
are not reproducible.
"""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, cast

from partita_schema.common.text import counted
from partita_schema.errors import ConfigError, DataError, Problem, ResumeError
from partita_schema.sections.trainer import HogwildTrainer, final_splits
from partita_trainers.base import Batches, Metrics, ProbeContext, TrainerContext, TrainResult, save_result
from partita_trainers.callbacks import Callbacks
from partita_trainers.checkpoints.checkpoint import (
    checkpoint_name,
    load_state,
    newest_intact,
    read_json,
    remove_checkpoints,
    write_checkpoint,
)
from partita_trainers.hogwild.bags import BagModel, Bags, joined
from partita_trainers.hogwild.worker import SharedCounters, SharedState, first_sums
from partita_trainers.hogwild.workers import HogwildWorkers, share
from partita_trainers.interrupt import Interruption, interruption

logger = logging.getLogger(__name__)

LEARNING_RATES = {"adagrad": 0.1, "sgd": 1.0}
ANSWERED_ROWS = 256
"""Validation rows that are scored after each epoch; at the end all are."""


class Hogwild:
    """Trains a bag classifier without locks."""

    calls_callbacks = True
    """Callbacks are called; `on_step` after each epoch, when a line is logged."""

    def __init__(self, config: HogwildTrainer) -> None:
        self.config = config

    def train(self, context: TrainerContext) -> TrainResult:
        """Train all epochs, then save and evaluate the last weights.

        Raises:
            ConfigError: There are several processes.
            DataError: There are no training rows.
            ResumeError: The run is beyond the end of the configuration, or its data differ.
            TrainingError: A worker or a callback has failed.
        """
        if context.process_group.world_size > 1:
            message = f"hogwild starts its workers itself, and here are {context.process_group.world_size} processes"
            raise ConfigError([Problem("trainer.type", f"{message}; start one, and write trainer.workers")])
        if context.batches is None or context.batches.num_rows == 0:
            raise DataError("there are no training rows; write data.source, or pass a dataset to train")
        training = HogwildRun(self.config, context, context.batches)
        training.train_loop()
        result = training.finalize()
        training.callbacks.call("on_end", results=result.metrics)
        return result

    def probe(self, context: ProbeContext) -> None:
        """Return None: the batch size is always a number."""


class HogwildRun:
    """One run: the rows, the state shared with the workers, and the current step."""

    def __init__(self, config: HogwildTrainer, context: TrainerContext, batches: Batches) -> None:
        """Restore the newest checkpoint, if any. Raises ResumeError if its rows or sizes differ."""
        self.config, self.work = config, context
        self.lm, self.run = cast(BagModel, context.lm), context.run  # the schema allows no other model for this trainer
        self.learning_rate = config.learning_rate or LEARNING_RATES[config.optimizer.type]
        self.sums = first_sums(self.lm.module) if config.optimizer.type == "adagrad" else ()
        self.counts = SharedCounters()
        self.resumed_from = newest_intact(self.run.checkpoints)
        self.step = self.resumed_from or 0
        self.run.truncate_log(self.step)
        if self.resumed_from is not None:
            folder = self.run.checkpoints / checkpoint_name(self.step)
            batches.load_data_position(
                read_json(folder / "data_position.json")
            )  # raises ResumeError if the rows have changed
            self.lm.load_checkpoint(folder)
            self.sums = tuple(load_state(folder / "optimizer-0")["sums"])
        self.run.note(learning_rate=self.learning_rate, workers=config.workers)
        self.rows, self.loss_tokens, self.data_position = read_rows(self.lm, batches)
        self.shared = self.share_tensors()
        self.total = config.epochs * self.shared.steps_per_epoch
        self.callbacks = Callbacks(context, total_steps=self.total)

    def share_tensors(self) -> SharedState:
        """Move the tensors into shared memory and return the state that the workers use."""
        self.lm.module.zero_grad()  # gradients would be shared too, and overwritten by other workers
        share((*self.lm.module.parameters(), *self.sums, *self.rows.tensors))
        return SharedState(
            module=self.lm.module,
            sums=self.sums,
            rows=self.rows,
            seed=self.work.config.seed,
            batch_size=self.config.batch_size,
            learning_rate=self.learning_rate,
            counts=self.counts,
        )

    def train_loop(self) -> None:
        """Train the remaining epochs, with an evaluation and a checkpoint after each."""
        shared, total = self.shared, self.total
        if self.step > total:
            raise ResumeError(
                f"the run is at step {self.step}, but the configuration ends at step {total}; raise trainer.epochs, or "
                "give this run another folder with --run"
            )
        self.start_callbacks()
        if self.step == total or self.callbacks.stopped_by is not None:
            return
        logger.info(
            "%s, %s an epoch", counted(self.config.workers, "worker"), counted(shared.steps_per_epoch, "update")
        )
        self.counts.step.value = self.step
        with (
            interruption("stopping after this batch") as interrupt,
            self.started_workers(interrupt) as workers,
            self.run.progress(total, "training", completed=self.step) as progress,
        ):
            shown = self.step

            def look() -> None:
                nonlocal shown
                self.pass_on(interrupt)
                claimed = self.counts.claimed
                if claimed > shown:
                    progress.advance(claimed - shown, epoch=claimed / shared.steps_per_epoch)
                shown = claimed

            while self.step < total and self.callbacks.stopped_by is None:
                until = (self.step // shared.steps_per_epoch + 1) * shared.steps_per_epoch
                started = time.perf_counter()
                cpu_seconds = workers.run(until, look=look)
                self.step = self.counts.claimed
                self.log(cpu_seconds, seconds=time.perf_counter() - started, per_epoch=shared.steps_per_epoch)
                self.maybe_evaluate_and_save(interrupt, ended=self.step == until, last=self.step == total)

    @contextmanager
    def started_workers(self, interrupt: Interruption) -> Iterator[HogwildWorkers]:
        """Yield the workers once all have started, so that the progress of training does not count their start."""
        with HogwildWorkers(self.shared, self.config.workers) as workers:
            workers.answers(look=partial(self.pass_on, interrupt))
            yield workers

    def pass_on(self, interrupt: Interruption) -> None:
        """Let the workers stop if the user asked for it."""
        self.counts.stop.value = interrupt.requested

    def start_callbacks(self) -> None:
        """Restore a stop that an earlier process was asked for, and call the callbacks before the first step."""
        checkpoint = None if self.resumed_from is None else self.run.checkpoints / checkpoint_name(self.step)
        if checkpoint is not None:
            self.callbacks.restore_stop(checkpoint, read_json(checkpoint / "trainer.json")["stop"])
        self.callbacks.call("on_start", step=self.step, checkpoint=checkpoint)

    def maybe_evaluate_and_save(self, interrupt: Interruption, *, ended: bool, last: bool) -> None:
        """Evaluate after a completed epoch, and save. Raises KeyboardInterrupt if the user asked to stop."""
        if ended and not last and "validation" in self.work.splits:
            metrics = self.work.evaluate("validation", max_rows=ANSWERED_ROWS, step=self.step)
            self.run.report(metrics, step=self.step, split="validation")
            self.callbacks.call("on_evaluate", metrics=metrics)
        self.save()
        self.callbacks.call_on_checkpoint(self.run.checkpoints / checkpoint_name(self.step))
        if interrupt.requested and not last:
            logger.info("saved step %d", self.step)
            raise KeyboardInterrupt

    def log(self, cpu_seconds: float, *, seconds: float, per_epoch: int) -> None:
        """Log a line for the steps since the last one. The loss is per loss token, as in all trainers."""
        loss, rows = self.counts.sums
        self.counts.sums[0] = self.counts.sums[1] = 0.0
        if not rows:
            return
        record = {
            "step": self.step,
            "epoch": self.step / per_epoch,
            "loss": loss / rows * len(self.rows) / self.loss_tokens,
            "learning_rate": self.learning_rate,
            "rows": int(rows),
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "rows_per_second": rows / seconds,
        }
        self.run.log_step(record)
        self.callbacks.call("on_step", step=self.step, epoch=record["epoch"], record=record)

    def save(self) -> None:
        """Save a checkpoint and remove older ones."""
        write_checkpoint(
            self.run.checkpoints,
            self.step,
            save_model=self.lm.save_checkpoint,
            optimizer_states=[{"sums": list(self.sums)}],
            data_position=self.data_position,
            trainer={"step": self.step, "stop": self.callbacks.stop_record()},
        )
        remove_checkpoints(self.run.checkpoints, keep={self.step})

    def finalize(self) -> TrainResult:
        """Save the model and evaluate it on validation and test rows."""
        save_result(self.lm, self.run.folder)
        wanted = final_splits(self.config)
        metrics: dict[str, Metrics] = {}
        for split in wanted:
            if split in self.work.splits:
                metrics[split] = self.work.evaluate(split, step=self.step)
                self.run.report(metrics[split], step=self.step, split=split)
        early = self.callbacks.stopped_by is not None and self.step < self.total
        self.run.note(stopped_by=self.callbacks.stopped_by if early else None)
        return TrainResult(
            run=self.run.folder,
            metrics=metrics,
            steps=self.step,
            resumed_from=self.resumed_from,
            stopped_early=early,
        )


def read_rows(lm: BagModel, batches: Batches) -> tuple[Bags, int, Mapping[str, Any]]:
    """Return all rows in data order, the number of loss tokens, and the data position after the last row."""
    steps = batches.steps_per_epoch
    assert steps is not None, "the file refuses streams"
    parts, loss_tokens, data_position = [], 0, dict[str, Any]()
    for step in islice(batches.steps(), steps):
        parts += [lm.bags(batch) for batch in step.micro_batches]
        loss_tokens += sum(batch.loss_tokens for batch in step.micro_batches)
        data_position = dict(step.data_position)
    return joined(parts), loss_tokens, data_position
