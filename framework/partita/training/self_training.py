"""Self-training (`simulation.self_training`): rounds of simulation and training, after the training on data.

Round N is stored in `rounds/N` of the run. Its dialogues use the weights of the previous round. When all of them have
ended, their results are written to `simulation.json`. The folder then becomes a run directory, in which the model is
trained from those weights on a mix of data and transcripts. A killed job resumes at the first unfinished step:
dialogues and training steps that were finished are not repeated.
"""

import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from partita.data.episode import AGENT, derived_seed
from partita.data.rows import Rows
from partita.data.run_data import RunData, open_run_data
from partita.data.sources.sources import open_rows
from partita.data.sources.transcripts import WantedRows
from partita.pipeline.batch_sizes import BatchSizeTuner
from partita.pipeline.build import LocalPipeline, build_pipeline
from partita.pipeline.fingerprint import model_fingerprint
from partita.report.transcript_page import write_page
from partita.runs.directory import RunDirectory
from partita.runs.files import strict_json, without_infinities
from partita.runs.rounds import round_folder
from partita.runs.row_results import BASE
from partita.runs.row_results import FOLDER as EVALUATIONS
from partita.simulation.build import build_world, load_rollout_and_transcripts, open_tasks, section_of
from partita.simulation.participants import AgentModel
from partita.simulation.programs import build_programs
from partita.simulation.reward_checker import RewardChecker
from partita.simulation.run import simulate
from partita.training.round_config import check_round_configs, round_config, transcripts_source
from partita.training.run import finished_result, train_in
from partita_schema.common.checksums import DamagedError, sealed, unsealed, unsealed_line
from partita_schema.common.files import replacing_folder, write_atomically
from partita_schema.common.text import counted
from partita_schema.config import Config
from partita_schema.errors import ConfigError, NothingToLearnError, Problem, ResumeError
from partita_schema.sections.self_training import SelfTrainingConfig
from partita_schema.sections.simulation import Simulation, Tasks
from partita_schema.sections.sources import SimulationSource
from partita_trainers.base import TrainResult
from partita_trainers.batch_size.device_errors import free_everything
from partita_trainers.process_group import ProcessGroup, synchronized_errors
from partita_trainers.registry import build_trainer

logger = logging.getLogger(__name__)

HISTORY = "predicted"
"""History of the dialogues of a round: the model sees its own earlier answers."""
ROUNDING = 1e-9
"""By how much more than the guard a success rate may fall: 8 of 20 less 7 of 20 is a little more than 0.05."""

OpenRun = Callable[[Path, Config], AbstractContextManager[RunDirectory]]
"""Opens a run directory for a configuration."""


def rounds_of(config: Config) -> SelfTrainingConfig | None:
    """Return the section `simulation.self_training`, or None if the file has none."""
    return config.simulation.self_training if config.simulation is not None else None


def check_rounds(config: Config, dataset: Any, *, folder: Path) -> None:
    """Check that self-training can start, before the training on data begins.

    Args:
        config: Validated configuration.
        dataset: Rows passed to `train`, which cannot be combined with self-training; None without them.
        folder: Folder that relative paths start from.

    Raises:
        ConfigError: A class or dataset cannot be loaded, a round cannot be trained, or `dataset` is given.
        DataError: A row cannot be used as a task.
    """
    plan = rounds_of(config)
    if plan is None:
        return
    if dataset is not None:
        message = "rounds are mixed with the rows of data.source; write them there, not next to the file"
        raise ConfigError([Problem("simulation.self_training", message)])
    check_round_configs(config, plan)
    section = dialogues_of_rounds(config, plan)
    with ExitStack() as resources:
        build_world(config, section, folder=folder, resources=resources)
    build_programs(section, folder=folder)
    load_rollout_and_transcripts(section, folder=folder)
    if section.tasks != Tasks():
        open_tasks(config, section, folder=folder)


def dialogues_of_rounds(config: Config, plan: SelfTrainingConfig) -> Simulation:
    """Return the `simulation` section for a round: with the tasks and attempts of self-training, and one history."""
    changes = {
        "tasks": Tasks(count=plan.tasks.count, source=plan.tasks.source),
        "history": (HISTORY,),
        "repeats": plan.attempts,
        "repeats_share_seed": True,
        "self_training": None,
    }
    return section_of(config).model_copy(update=changes)


@dataclass(frozen=True)
class SelfTraining:
    """Self-training of a run whose directory is open."""

    config: Config
    plan: SelfTrainingConfig
    origin: Path
    """Folder that relative paths of the file start from."""
    directory: RunDirectory
    process_group: ProcessGroup
    seed: int
    """Seed of sampling."""
    data: RunData
    """The rows configured in `data`."""
    open_run: OpenRun
    others: Callable[[], Mapping[str, AgentModel]]
    """Loads the models of other agents, by agent."""
    reward_checker: Callable[[], RewardChecker | None]
    """Loads the reward model that checks episodes, if there is one."""
    callbacks: Sequence[object] = ()
    """Called in the training of each round."""

    def train(self) -> TrainResult:
        """Run all unfinished rounds. The last weights that are kept become those of the run."""
        result = finished_result(self.directory)
        ended: list[dict[str, Any]] = list(self.directory.manifest.get("rounds", []))
        while len(ended) < self.plan.rounds and (not ended or ended[-1]["kept"]):
            dialogues = self.simulate_round(len(ended) + 1)
            if not self.should_continue(dialogues, ended):
                break
            result = self.train_round(len(ended) + 1)
            ended.append({"dialogues": dialogues, "steps": result.steps, "metrics": result.metrics, "kept": True})
            self.directory.note(rounds=ended)
        else:
            if self.plan.guard is not None and ended and ended[-1]["kept"]:
                dialogues = self.simulate_round(len(ended) + 1)
                ended[-1]["kept"] = not self.is_worse(dialogues, ended)
        self.directory.note(rounds=ended)
        return self.finish(ended, result)

    def should_continue(self, dialogues: dict[str, Any], ended: list[dict[str, Any]]) -> bool:
        """Return whether to train another round. Marks the previous round as not kept if it made the model worse."""
        if ended and self.is_worse(dialogues, ended):
            ended[-1]["kept"] = False
            return False
        return self.can_learn(len(ended) + 1)

    # One round

    def folder(self, number: int) -> Path:
        """Return the folder of a round."""
        return round_folder(self.directory.folder, number)

    def weights(self, number: int) -> Path | None:
        """Return the weights after a round; for round 0 those before all rounds, or None for the base model's."""
        saved = self.folder(number) / "model"
        if number or saved.is_dir():
            return saved
        return self.directory.folder / "model" if self.trained_on_data else None

    @property
    def trained_on_data(self) -> bool:
        """Whether the model is trained on data before the rounds."""
        return self.data.training is not None

    def simulate_round(self, number: int) -> dict[str, Any]:
        """Run the dialogues of a round and return their results. Finished dialogues are not repeated."""
        done = self.folder(number) / "simulation.json"
        before = self.process_group.run_on_rank_zero(lambda: self.read_dialogues(number), "a simulation")
        if before is not None:
            return before
        section = dialogues_of_rounds(self.config, self.plan)
        config = self.config.model_copy(update={"simulation": section})
        with synchronized_errors(self.process_group, "loading the model"):
            pipeline = self.build_pipeline(config, number, trainable=False)
        tuner = BatchSizeTuner(pipeline, process_group=self.process_group)
        fingerprint = model_fingerprint(pipeline, result=self.weights(number - 1), folder=pipeline.folder)
        simulated = simulate(
            {AGENT: AgentModel(pipeline, tuner, fingerprint), **self.others()},
            folder=self.folder(number) / "transcripts",
            seed=derived_seed(self.seed, "round", str(number)),
            batch_size=None,
            fresh=False,
            progress=self.directory.progress,
            rows=self.data.training if section.tasks == Tasks() else None,
            checker=self.reward_checker(),
            process_group=self.process_group,
        )
        self.process_group.run_on_rank_zero(partial(write_page, simulated), "the page of the dialogues")
        results = simulated.report.flat()[HISTORY]
        text = strict_json(sealed(without_infinities(results)), indent=2) + "\n"
        self.process_group.run_on_rank_zero(lambda: write_atomically(done, text), "a simulation")
        logger.info("round %d: %s", number, summary_of(results))
        return results

    def read_dialogues(self, number: int) -> dict[str, Any] | None:
        """Read the results of a round's dialogues; None if they have not all ended or a file is damaged."""
        done, lines = self.folder(number) / "simulation.json", Path(self.source(number).path)
        try:
            results = unsealed(done.read_bytes(), required=True)
            for line in (self.origin / lines).read_bytes().splitlines():
                unsealed_line(line, required=False)  # an answer may have been corrected by hand
        except FileNotFoundError:
            return None
        except DamagedError as error:
            logger.warning("round %d: a transcript file %s; damaged dialogues are run again", number, error)
            return None
        return results

    def is_worse(self, dialogues: dict[str, Any], ended: list[dict[str, Any]]) -> bool:
        """Return whether the success rate after the last finished round has dropped by more than the guard allows."""
        share, earlier = dialogues.get("success"), ended[-1]["dialogues"].get("success")
        if share is None and any(name.startswith("truncated") for name in dialogues):
            share = 0.0  # no episode got as far as its reward
        if self.plan.guard is None or share is None or earlier is None or earlier - share <= self.plan.guard + ROUNDING:
            return False
        logger.warning(
            "round %d lowered the success rate to %.3f from %.3f, by more than self_training.guard: %.3f; the weights "
            "before it are used",
            *(len(ended), share, earlier, self.plan.guard),
        )
        return True

    def can_learn(self, number: int) -> bool:
        """Return whether a round's dialogues give training rows; log the reason if they do not."""

        def why_not() -> str | None:
            wanted = WantedRows.by(self.config)
            try:
                rows = open_rows(self.source(number), folder=self.origin, wanted=wanted)
            except NothingToLearnError as error:
                return str(error)
            only_rounds = self.plan.mix == 1 or not self.trained_on_data
            return one_label(rows, wanted.label) if wanted.label is not None and only_rounds else None

        reason = self.process_group.run_on_rank_zero(why_not, "the rows of a round")
        if reason is not None:
            logger.info("round %d produced no training rows; stopping: %s", number, reason)
        return reason is None

    def train_round(self, number: int) -> TrainResult:
        """Train on the dialogues of the latest rounds, mixed with the rows of `data`."""
        config = round_config(self.config, self.plan, number, source_of=self.source)
        with self.open_run(self.folder(number), config) as directory:
            if directory.finished:  # by a process that may have been killed before it removed the checkpoints
                self.remove_checkpoints(directory)
                return finished_result(directory)
            with synchronized_errors(self.process_group, "opening the data"):
                data = open_run_data(config, folder=self.origin)
            _, _, result = train_in(
                directory,
                data,
                trainer=build_trainer(config.trainer, folder=self.origin),
                process_group=self.process_group,
                assemble=lambda _: self.build_pipeline(config, number, trainable=True),
                callbacks=self.callbacks,
            )
            directory.note(status="done", steps=result.steps, stopped_early=result.stopped_early, model="model")
        self.remove_checkpoints(directory)
        return result

    def remove_checkpoints(self, directory: RunDirectory) -> None:
        """Remove the checkpoints of a finished round."""
        self.process_group.run_on_rank_zero(
            lambda: shutil.rmtree(directory.checkpoints, ignore_errors=True), "the end of a round"
        )

    def build_pipeline(self, config: Config, number: int, *, trainable: bool) -> LocalPipeline:
        """Build the pipeline with the weights of the previous round, after freeing the memory of other models."""
        free_everything()
        return build_pipeline(
            config,
            folder=self.origin,
            labels={},
            training=self.data.training,
            saved=self.weights(number - 1),
            trainable=trainable,
        )

    def source(self, number: int) -> SimulationSource:
        """Return the data source that reads the training rows of a round's dialogues."""
        path = self.folder(number) / "transcripts" / f"{HISTORY}.jsonl"
        return transcripts_source(self.plan, os.path.relpath(path.resolve(), self.origin.resolve()))

    # The end

    def finish(self, ended: list[dict[str, Any]], result: TrainResult) -> TrainResult:
        """Copy the weights of the last round that is kept to the run, with their metrics."""
        number = max((number for number, round_ in enumerate(ended, start=1) if round_["kept"]), default=0)
        self.process_group.run_on_rank_zero(lambda: self.take(number), "the result")
        if number:
            self.process_group.run_on_rank_zero(lambda: self.take_results(number), "the results of rows")
        before = self.directory.manifest["before_rounds"]
        metrics = ended[number - 1]["metrics"] if number else before["metrics"]
        steps = before["steps"] + sum(round_["steps"] for round_ in ended)
        dialogues = self.process_group.run_on_rank_zero(self.all_dialogues, "the dialogues of all rounds")
        self.directory.note(metrics=metrics, dialogues=dialogues)
        return replace(result, run=self.directory.folder, metrics=metrics, steps=steps, dialogues=dialogues)

    def all_dialogues(self) -> list[dict[str, Any]]:
        """Return the results of the dialogues of each round, including those with the final weights."""
        paths = (self.folder(number) / "simulation.json" for number in range(1, self.plan.rounds + 2))
        results = []
        for path in (path for path in paths if path.exists()):
            try:
                results.append(unsealed(path.read_bytes(), required=True))
            except DamagedError as error:
                raise ResumeError(f"{path} {error}; restore it from a copy") from None
        return results

    def take(self, number: int) -> None:
        """Replace the weights of the run by those of a round; those before all rounds are moved to round 0."""
        chosen, final, first = self.weights(number), self.directory.folder / "model", self.folder(0) / "model"
        if chosen is None:
            logger.warning("no round is kept: the result is the base model, and the run has no model folder")
        if chosen is None or chosen == final:
            return
        with replacing_folder(final) as temporary:
            shutil.copytree(chosen, temporary)
            if final.exists() and not first.exists() and self.trained_on_data:
                first.parent.mkdir(parents=True, exist_ok=True)
                final.rename(first)

    def take_results(self, number: int) -> None:
        """Replace the results of rows of the run by those of a round; those of the base model stay."""
        results = self.directory.folder / EVALUATIONS
        for path in results_in(results):
            path.unlink()
        for path in results_in(self.folder(number) / EVALUATIONS):
            results.mkdir(exist_ok=True)
            write_atomically(results / path.name, path.read_bytes())


def one_label(rows: Rows, column: str) -> str | None:
    """Return why answers cannot be compared, if all have the same label; otherwise None."""
    labels = {row[column] for chunk in rows.iterate() for row in chunk}
    only = "good" if labels == {True} else "bad"
    return None if len(labels) > 1 else f"all answers are {only}, and good ones are compared with bad ones"


def results_in(folder: Path) -> list[Path]:
    """Return the files of results of rows in a folder, without those of a base model."""
    return [path for path in sorted(folder.glob("*.jsonl")) if not path.stem.endswith(BASE)]


def summary_of(dialogues: dict[str, Any]) -> str:
    """Return the number of dialogues and their success rate, in one line."""
    success = dialogues.get("success")
    share = "" if success is None else f", {success:.3f} of them succeed"
    return f"{counted(dialogues['dialogues.n'], 'dialogue')}{share}"
