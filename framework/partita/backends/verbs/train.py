"""`Model.train`: training in this process group, or in ranks that Ray starts."""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from partita.backends.context import ModelRuntime
from partita.backends.endpoint.verbs import TRAIN, refuse_served
from partita.backends.other_models import agent_models, other_models
from partita.backends.ray.verbs import (
    begin_where_started,
    check_is_alone,
    done_by_ranks,
    is_on_ray,
    refuse_on_ray,
    seen_by_all,
)
from partita.data.formatting.labels import find_labels
from partita.data.run_data import RunData
from partita.runs.directory import RunDirectory
from partita.runs.finding import ChosenRun
from partita.runs.manifest import read_manifest
from partita.training.run import check_same_rows, check_shared, check_validation_metric, finished_result, train_in
from partita.training.self_training import SelfTraining, check_rounds, rounds_of
from partita_schema.self_training import SelfTrainingConfig
from partita_trainers.base import TrainResult
from partita_trainers.process_group import synchronized_errors
from partita_trainers.registry import build_trainer

logger = logging.getLogger(__name__)


def train(runtime: ModelRuntime, dataset: Any = None, run: str | Path | None = None) -> TrainResult:
    """Train, or evaluate with `trainer: {type: none}`; see `Model.train`."""
    runtime.refuse_code("training")
    refuse_served(runtime.config, what=TRAIN)
    if not is_on_ray(runtime.config):
        return train_here(runtime, dataset, run)
    check_validation_metric(runtime.config)
    build_trainer(runtime.config.trainer, folder=runtime.loaded.folder)
    chosen = ChosenRun(Path(run)) if run is not None else runtime.choose_run()
    folder = chosen.folder
    manifest = read_manifest(folder)
    if manifest.get("status") == "done" and manifest.get("config") == runtime.config.model_dump(mode="json"):
        return train_here(runtime, dataset, folder)
    runtime.drop_model()
    if chosen.not_continued:
        logger.info("%s", chosen.not_continued)
    result = train_on_ray(runtime, dataset, folder=folder)
    runtime.run, runtime.splits = folder, {} if dataset is None else runtime.open_data(dataset).splits
    return result


def train_here(runtime: ModelRuntime, dataset: Any = None, run: str | Path | None = None) -> TrainResult:
    """Run `train` in this process group, whatever the backend."""
    runtime.refuse_code("training")
    check_validation_metric(runtime.config)
    check_rounds(runtime.config, dataset, folder=runtime.loaded.folder)
    trainer = build_trainer(runtime.config.trainer, folder=runtime.loaded.folder)
    process_group, rounds = runtime.process_group, rounds_of(runtime.config)
    if rounds is not None:
        other_models(runtime)  # a missing model is reported before training starts
    check_shared(trainer, runtime.config, process_group)
    chosen = (
        ChosenRun(Path(run))
        if run is not None
        else process_group.run_on_rank_zero(runtime.choose_run, "the folder of the run")
    )
    folder = chosen.folder
    with runtime.open_run(folder) as directory:
        if chosen.not_continued:
            logger.info("%s", chosen.not_continued)
        if directory.finished:
            logger.info("the run in %s is finished already", folder)
            if dataset is not None:
                check_same_rows(directory, runtime.open_data(dataset))
            runtime.run = folder
            runtime.drop_model()
            return finished_result(directory)
        with synchronized_errors(process_group, "opening the data"):
            data = runtime.open_data(dataset)
            labels = find_labels(runtime.config, data.training)
        trains = runtime.config.trainer.type != "none"
        if "rounds" not in directory.manifest and (rounds is None or data.training is not None):
            runtime.pipeline, runtime.found_sizing, result = train_in(
                directory,
                data,
                trainer=trainer,
                process_group=process_group,
                assemble=partial(runtime.build_pipeline, labels, data.training, trains),
            )
            directory.note(steps=result.steps, stopped_early=result.stopped_early)
        if rounds is not None:
            # Each round loads its model again, and memory may not fit two.
            runtime.drop_model()
            result = train_rounds(runtime, rounds, directory, data)
        model = "model" if (folder / "model").is_dir() else None
        directory.note(status="done", steps=result.steps, stopped_early=result.stopped_early, model=model)
    process_group.all_gather_object(None, "the end of the run")  # no rank may read the run before its status is written
    runtime.run, runtime.splits = folder, data.splits
    return replace(result, batch_sizes=directory.manifest.get("batch_sizes", {}))


def train_rounds(
    runtime: ModelRuntime, plan: SelfTrainingConfig, directory: RunDirectory, data: RunData
) -> TrainResult:
    """Run the self-training rounds after training on data.

    Args:
        runtime: State of the model.
        plan: The self-training section of the configuration.
        directory: The open run.
        data: The rows of the run.
    """
    if "rounds" not in directory.manifest:
        before = {"steps": directory.manifest.get("steps", 0), "metrics": directory.manifest.get("metrics", {})}
        directory.note(rounds=[], before_rounds=before)
    return SelfTraining(
        config=runtime.config,
        plan=plan,
        origin=runtime.loaded.folder,
        directory=directory,
        process_group=runtime.process_group,
        seed=runtime.sampling_seed,
        data=data,
        open_run=runtime.open_run,
        others=partial(agent_models, runtime),
    ).train()


def train_on_ray(runtime: ModelRuntime, dataset: Any, *, folder: Path) -> TrainResult:
    """Train in Ray ranks, each of which calls `train_here` with the folder of the run."""
    if runtime.config.trainer.type == "none":
        refuse_on_ray(runtime.config, verb="train with trainer: {type: none}")
    check_is_alone()
    with seen_by_all(folder) as mark:
        work = partial(train_as_rank, runtime.sent(), dataset, folder=folder.resolve(), mark=mark, start=Path.cwd())
        result: TrainResult = done_by_ranks(work, runtime.config, quiet=runtime.quiet, storage=mark)
    return replace(result, run=folder)


def train_as_rank(runtime: ModelRuntime, dataset: Any, *, folder: Path, mark: Path, start: Path) -> TrainResult:
    """Run `train_here` on one Ray rank, from the folder of the command.

    Args:
        runtime: State of the model.
        dataset: Replaces data.source, or None.
        folder: The run directory.
        mark: The marker folder of `seen_by_all`.
        start: The folder where the command was started.

    Raises:
        PartitaError: The run directory is not shared.
    """
    begin_where_started(start, folder=folder, mark=mark, option="--run")
    return train_here(runtime, dataset, folder)
