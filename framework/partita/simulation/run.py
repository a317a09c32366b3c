"""Run the simulation of a configuration and build its report."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from partita.data.episode import AGENT, Episode
from partita.data.rows import Rows, digest
from partita.pipeline.build import LocalPipeline
from partita.runs.progress import ShowProgress
from partita.simulation.agent_sections import check_columns, other_agents
from partita.simulation.build import (
    Task,
    build_world,
    load_rollout_and_transcripts,
    new_episode,
    open_tasks,
    section_of,
    settings_of,
)
from partita.simulation.participants import AgentModel, Participants, answer_limit, find_sizes
from partita.simulation.programs import build_programs
from partita.simulation.report import RolloutOutcomes, ScoreTurns, SimulationReport, outcomes_of
from partita.simulation.reward_checker import RewardChecker
from partita.simulation.shared_rollout import rollout
from partita.simulation.transcripts import Transcripts, open_transcripts
from partita.simulation.turn_answers import build_turn_answers
from partita.simulation.worlds import World
from partita_schema.common.text import counted
from partita_schema.sections.agents import ModelAgentConfig
from partita_schema.sections.simulation import ReplayWorldConfig, Simulation
from partita_trainers.batch_size.probe import BatchSize
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup, synchronized_errors

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RolloutSetup:
    """Everything that the rollouts of a configuration need."""

    section: Simulation
    tasks: list[Task]
    world: World
    participants: Participants
    transcripts: type[Transcripts]
    """Class that saves the episodes."""
    decided_by: dict[str, Any]
    """Hashes of everything that affects the episodes, by name."""
    checker: RewardChecker | None = None
    """Judges finished episodes by a reward model."""

    def open_transcripts(
        self, folder: Path, history: str, *, fresh: bool, process_group: ProcessGroup
    ) -> AbstractContextManager[Transcripts]:
        """Open the transcripts of one history.

        Args:
            folder: Output folder.
            history: `gold` or `predicted`.
            fresh: Whether to discard existing transcripts.
            process_group: The ranks that share the episodes.
        """
        return open_transcripts(
            folder, history, decided_by=self.decided_by, fresh=fresh, process_group=process_group, kind=self.transcripts
        )

    def episodes(self, *, shows_gold: bool) -> list[Episode]:
        """Create all episodes, in the order of the tasks."""
        return [
            new_episode(task, repeat, self.section, seed=self.participants.seed, shows_gold=shows_gold)
            for task in self.tasks
            for repeat in range(self.section.repeats)
        ]


@dataclass(frozen=True)
class SimulationResult:
    """A finished simulation."""

    report: SimulationReport
    """The same on every rank."""
    episodes: Mapping[str, Sequence[Episode]]
    """All episodes by history; on rank 0 only."""


def simulate(
    models: Mapping[str, AgentModel],
    *,
    folder: Path,
    seed: int,
    batch_size: int | None,
    fresh: bool,
    progress: ShowProgress,
    rows: Rows | None = None,
    checker: RewardChecker | None = None,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> SimulationResult:
    """Run all episodes of a configuration that are not in the transcripts of `folder` yet.

    All ranks of the process group must call this function; each runs a part of the episodes.

    Args:
        models: Models by agent; the main agent's, `AGENT`, has the configuration.
        folder: Output folder for transcripts.
        seed: Seed of environments, sampling and programs.
        batch_size: Batch size that overrides the configuration.
        fresh: Whether to discard existing transcripts.
        progress: Creates progress displays.
        rows: Rows that replace the dataset of the tasks.
        checker: Judges finished episodes by a reward model, if the configuration has one.
        process_group: The ranks that share the episodes.

    Raises:
        SimulationError: Too many episodes failed.
    """
    main = models[AGENT]
    section = section_of(main.pipeline.config)
    models = with_own_agents(models, section)
    score = score_of_turns(main.pipeline, section)
    with ExitStack() as resources:
        with synchronized_errors(process_group, "opening the tasks and the world"):
            setup = build_setup(main.pipeline, models, seed=seed, rows=rows, checker=checker, resources=resources)
        run = SimulationRun(
            setup,
            main,
            sizes=find_sizes(models, section, num_episodes=len(setup.tasks) * section.repeats, batch_size=batch_size),
            folder=folder,
            fresh=fresh,
            progress=progress,
            score=score,
            process_group=process_group,
        )
        finished: dict[str, HistoryResult] = {history: run.rollout(history) for history in section.history}
    outcomes = {history: result.outcomes for history, result in finished.items()}
    episodes = {history: result.episodes for history, result in finished.items()}
    return SimulationResult(SimulationReport(outcomes, str(folder)), episodes)


def score_of_turns(pipeline: LocalPipeline, section: Simulation) -> ScoreTurns | None:
    """Return a function for the metrics of turns with several outputs; None if a turn is only a text."""
    answers = build_turn_answers(pipeline.config, pipeline.decoder, reply=section.reply)
    return None if answers is None else partial(answers.scores, pipeline.config)


def with_own_agents(models: Mapping[str, AgentModel], section: Simulation) -> dict[str, AgentModel]:
    """Return the models by agent, with the main agent's model for agents that share it."""
    own = {
        name: models[AGENT]
        for name, agent in other_agents(section).items()
        if isinstance(agent, ModelAgentConfig) and agent.is_own
    }
    return {**models, **own}


class HistoryResult(NamedTuple):
    """The episodes of one history."""

    outcomes: RolloutOutcomes
    """The same on every rank."""
    episodes: list[Episode]
    """In the order of the tasks; empty on ranks other than 0."""


@dataclass(frozen=True)
class SimulationRun:
    """Runs the episodes of a configuration, one history after the other."""

    setup: RolloutSetup
    main: AgentModel
    """Model of the main agent."""
    _: KW_ONLY
    sizes: Mapping[str, BatchSize]
    """Batch sizes by agent."""
    folder: Path
    """Output folder for transcripts."""
    fresh: bool
    """Whether to discard existing transcripts."""
    progress: ShowProgress
    """Creates progress displays."""
    score: ScoreTurns | None
    """Returns the metrics of turns with several outputs; None if a turn is only a text."""
    process_group: ProcessGroup
    """The ranks that share the episodes."""

    def rollout(self, history: str) -> HistoryResult:
        """Run the episodes of a history that are not in its transcripts yet, and log the outcomes.

        Raises:
            SimulationError: Too many episodes failed.
        """
        setup, process_group = self.setup, self.process_group
        episodes = setup.episodes(shows_gold=history == "gold")
        with (
            setup.open_transcripts(self.folder, history, fresh=self.fresh, process_group=process_group) as transcripts,
            self.main.tuner.work("generation", self.sizes[AGENT]) as budget,
        ):
            rollout(
                start_order(episodes, setup.section),
                transcripts,
                begin=partial(setup.participants.begin, setup.world, self.sizes),
                budget=budget,
                limits=setup.section.limits,
                name=f"{history} history",
                progress=self.progress,
                checker=setup.checker,
                process_group=process_group,
            )
            # Rank 0 alone has the episodes of all ranks; the outcomes are sent to the others.
            outcomes = process_group.run_on_rank_zero(
                partial(self._finish, transcripts, episodes), "the outcomes of the dialogues"
            )
            finished = [transcripts.done[one.key] for one in episodes] if process_group.rank == 0 else []
        log_outcomes(history, outcomes, finished)
        log_cut_answers(history, finished, limit=answer_limit(self.main.pipeline))
        return HistoryResult(outcomes, finished)

    def _finish(self, transcripts: Transcripts, episodes: Sequence[Episode]) -> RolloutOutcomes:
        """Write the transcripts in the order of the tasks, and return the outcomes of all episodes."""
        finished = transcripts.finish([episode.key for episode in episodes])
        return outcomes_of(finished, repeats=self.setup.section.repeats, score=self.score)


def build_setup(
    pipeline: LocalPipeline,
    models: Mapping[str, AgentModel],
    *,
    seed: int,
    rows: Rows | None,
    checker: RewardChecker | None,
    resources: ExitStack,
) -> RolloutSetup:
    """Open the tasks, the world and the agents of a configuration.

    Args:
        pipeline: Pipeline of the main agent.
        models: Models by agent.
        seed: Seed of environments, sampling and programs.
        rows: Rows that replace the dataset of the tasks.
        checker: Judges finished episodes by a reward model.
        resources: Stack that closes opened resources, such as processes of environments.

    Raises:
        ConfigError: A program was not found, or cannot be created with its options.
        DataError: The tasks cannot be read, or lack a column.
    """
    section = section_of(pipeline.config)
    tasks, tasks_hash = open_tasks(pipeline.config, section, folder=pipeline.folder, rows=rows)
    check_columns(section, [(task.key, task.values) for task in tasks])
    world, parts = build_world(pipeline.config, section, folder=pipeline.folder, resources=resources)
    programs, program_hashes = build_programs(section, folder=pipeline.folder)
    rollout, transcripts, rollout_hashes = load_rollout_and_transcripts(section, folder=pipeline.folder)
    main = models[AGENT]
    # Agents that share the main agent's model add nothing: its weights and settings are part of the hashes already.
    others = {f"agent {name}": other.identity for name, other in models.items() if other is not main}
    settings = settings_of(pipeline.config, section, seed=seed)
    decided_by = {"model": main.fingerprint, "tasks": tasks_hash}
    decided_by |= {} if checker is None else {"checker": digest(checker.reward.fingerprint)}
    decided_by |= parts | program_hashes | rollout_hashes | others | settings
    participants = Participants(section, models, programs, seed=seed, rollout=rollout)
    return RolloutSetup(section, tasks, world, participants, transcripts, decided_by, checker)


def start_order(episodes: Sequence[Episode], section: Simulation) -> Sequence[Episode]:
    """Return episodes in the order in which they start: for replay, those with the most answers and text first.

    A long episode that starts last would run while all other slots and ranks are idle. The lengths of other worlds'
    episodes are unknown.
    """
    if not isinstance(section.world, ReplayWorldConfig):
        return episodes

    def length(episode: Episode) -> tuple[int, int]:
        messages = episode.task["messages"]
        answers = sum(bool(message.get("train")) for message in messages)
        return min(answers, section.max_turns), sum(len(message["content"]) for message in messages)

    return sorted(episodes, key=length, reverse=True)


def log_outcomes(history: str, outcomes: RolloutOutcomes, finished: Sequence[Episode]) -> None:
    """Log how many episodes were truncated or failed, and the reason of the last failure."""
    for status, count in sorted(outcomes.statuses.items()):
        if status != "done":
            level = logging.WARNING if status.startswith("failed") else logging.INFO
            of_all = counted(outcomes.dialogues, "dialogue")
            logger.log(level, "%s history: %s of %s %s", history, count, of_all, status)
    failed = next((episode for episode in reversed(finished) if episode.status == "failed"), None)
    if failed is not None:
        logger.warning("%s history: %s failed: %s", history, failed.key, failed.reason)


def log_cut_answers(history: str, finished: Sequence[Episode], *, limit: int) -> None:
    """Log how many answers of the model were cut off at the limit of new tokens."""
    replies = [reply for episode in finished for reply in episode.replies]
    cut = [reply for reply in replies if reply.is_cut]
    earlier = sum(len(reply.tokens) < limit for reply in cut)
    if cut:
        logger.warning(
            "%s history: %s of %s ended at the limit of %s (generation.max_new_tokens)%s",
            *(history, f"{len(cut):,}", counted(len(replies), "answer"), counted(limit, "token")),
            f", and {earlier:,} of these at a smaller limit, of an output or of the dialogue" if earlier else "",
        )
