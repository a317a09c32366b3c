"""A simulation from its section in the file to its report."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from partita.data.episode import AGENT, Episode
from partita.data.rows import Rows
from partita.generation.predict import ShowProgress
from partita.pipeline.batch_sizes import BatchSizes, BatchSizeTuner
from partita.pipeline.build import Pipeline
from partita.report.transcript_page import page
from partita.runs.files import write_atomically, writing
from partita.simulation.opening import (
    Task,
    build_world,
    find_keepers,
    new_dialogue,
    open_tasks,
    section_of,
    settings_of,
)
from partita.simulation.participants import (
    AgentModel,
    Participants,
    build_programs,
    check_columns,
    find_sizes,
    other_agents,
)
from partita.simulation.report import RolloutOutcomes, SimulationReport, outcomes_of
from partita.simulation.shared_rollout import rollout
from partita.simulation.transcripts import Transcripts, open_transcripts
from partita.simulation.worlds import World
from partita_schema.agents import ModelAgentConfig
from partita_schema.simulation import ReplayWorldConfig as ReplaySection
from partita_schema.simulation import Simulation
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup, synchronized_errors

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RolloutSetup:
    """What the dialogues of a file need: what they are about, how they go, and who speaks."""

    section: Simulation
    tasks: list[Task]
    world: World
    cast: Participants
    transcripts: type[Transcripts]
    """What keeps them."""
    decided_by: dict[str, str]
    """Hashes of all that decides the dialogues, by part."""

    def open_transcripts(
        self, folder: Path, history: str, *, fresh: bool, process_group: ProcessGroup
    ) -> AbstractContextManager[Transcripts]:
        """Those of one history."""
        return open_transcripts(
            folder, history, decided_by=self.decided_by, fresh=fresh, process_group=process_group, kind=self.transcripts
        )

    def dialogues(self, *, shows_gold: bool) -> list[Episode]:
        """All, in the order of the tasks, before their first words."""
        return [
            new_dialogue(task, repeat, self.section, seed=self.cast.seed, shows_gold=shows_gold)
            for task in self.tasks
            for repeat in range(self.section.repeats)
        ]


def simulate(
    pipeline: Pipeline,
    *,
    folder: Path,
    sizing: BatchSizeTuner,
    seed: int,
    model: str,
    others: Mapping[str, AgentModel] | None = None,
    batch_size: int | None,
    fresh: bool,
    progress: ShowProgress,
    rows: Rows | None = None,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> tuple[SimulationReport, BatchSizes]:
    """All dialogues of the file, with their transcripts in `folder`, and the size that they were had with.

    Those that are in the transcripts already are not had again. `model` is a hash of all weights, `others` are models
    that speak in other agents. `rows` take the place of the data set that replay has its dialogues from. The ranks of
    `process_group` call it together and come to the same; each has the dialogues that it claims. Raises SimulationError
    where too many fail.
    """
    section = section_of(pipeline.config)
    models = {AGENT: AgentModel(pipeline, sizing, model), **(others or {})}
    for name, agent in other_agents(section).items():
        if isinstance(agent, ModelAgentConfig) and agent.is_own:
            models[name] = models[AGENT]
    found: dict[str, RolloutOutcomes] = {}
    had: dict[str, list[Episode]] = {}
    with ExitStack() as held:
        with synchronized_errors(process_group, "opening the tasks and the world"):
            stage = set_stage(pipeline, models, seed=seed, rows=rows, held=held)
        sizes = find_sizes(models, section, dialogues=len(stage.tasks) * section.repeats, rows=batch_size)
        for history in section.history:
            dialogues = stage.dialogues(shows_gold=history == "gold")
            with (
                stage.open_transcripts(folder, history, fresh=fresh, process_group=process_group) as transcripts,
                sizing.work("generation", sizes[AGENT]) as capacity,
            ):
                rollout(
                    in_order(dialogues, section),
                    transcripts,
                    begin=partial(stage.cast.begin, stage.world, sizes),
                    capacity=capacity,
                    limits=section.limits,
                    name=f"{history} history",
                    progress=progress,
                    process_group=process_group,
                )
                found[history] = process_group.run_on_rank_zero(
                    partial(come_to, transcripts, dialogues, repeats=section.repeats), "what the dialogues came to"
                )
                had[history] = (
                    [transcripts.done[dialogue.key] for dialogue in dialogues] if process_group.rank == 0 else []
                )
            tell(history, found[history], had[history])
    process_group.run_on_rank_zero(partial(write_page, folder, found, had), "the page of the dialogues")
    return SimulationReport(found, str(folder)), BatchSizes(generation=sizes[AGENT])


def set_stage(
    pipeline: Pipeline, models: Mapping[str, AgentModel], *, seed: int, rows: Rows | None, held: ExitStack
) -> RolloutSetup:
    """Open what the file names; it is `held` until it is needed no more. Raises ConfigError and DataError."""
    section = section_of(pipeline.config)
    tasks, about = open_tasks(pipeline.config, section, folder=pipeline.folder, rows=rows)
    check_columns(section, [(task.key, task.values) for task in tasks])
    world, parts = build_world(section, folder=pipeline.folder, held=held)
    programs, about_programs = build_programs(section, folder=pipeline.folder)
    rollout, transcripts, about_rollout = find_keepers(section, folder=pipeline.folder)
    own = models[AGENT]
    others = {f"agent {name}": other.identity for name, other in models.items() if other is not own}
    settings = settings_of(pipeline.config, section, seed=seed)
    decided_by = {"model": own.fingerprint, "tasks": about}
    decided_by |= parts | about_programs | about_rollout | others | settings
    cast = Participants(section, models, programs, seed=seed, rollout=rollout)
    return RolloutSetup(section, tasks, world, cast, transcripts, decided_by)


def come_to(transcripts: Transcripts, dialogues: Sequence[Episode], *, repeats: int) -> RolloutOutcomes:
    """What all dialogues came to; their file is written."""
    return outcomes_of(transcripts.finish([dialogue.key for dialogue in dialogues]), repeats=repeats)


def in_order(dialogues: Sequence[Episode], section: Simulation) -> Sequence[Episode]:
    """Dialogues in the order in which they are begun: of a data set the longest first, as far as that is known.

    What is begun last should not take long: the other processes have ended then.
    """
    if not isinstance(section.world, ReplaySection):
        return dialogues

    def length(episode: Episode) -> tuple[int, int]:
        messages = episode.task["messages"]
        answers = sum(bool(message.get("learned")) for message in messages)
        return min(answers, section.max_turns), sum(len(message["content"]) for message in messages)

    return sorted(dialogues, key=length, reverse=True)


def write_page(folder: Path, found: Mapping[str, RolloutOutcomes], had: Mapping[str, list[Episode]]) -> None:
    """A page to be read beside the transcripts."""
    title = "/".join(folder.resolve().parts[-2:])
    with writing(folder):
        write_atomically(folder / "index.html", page(found, had, title=f"Dialogues in {title}"))


def tell(history: str, outcomes: RolloutOutcomes, had: Sequence[Episode]) -> None:
    """Say how many dialogues did not come to an end of their own, and why the last one failed."""
    for status, count in sorted(outcomes.statuses.items()):
        if status != "done":
            logger.info("%s history: %s of %s dialogues %s", history, count, outcomes.dialogues, status)
    failed = next((dialogue for dialogue in reversed(had) if dialogue.status == "failed"), None)
    if failed is not None:
        logger.info("%s history: %s failed: %s", history, failed.key, failed.reason)
