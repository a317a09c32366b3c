"""`Model.simulate`: episodes in this process group, or in ranks that Ray starts."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from partita.backends import bag_verbs
from partita.backends.bag_verbs import refuse_bag
from partita.backends.context import ModelRuntime
from partita.backends.endpoint.verbs import SIMULATE, refuse_served
from partita.backends.other_models import agent_models
from partita.backends.ray.verbs import begin_where_started, check_is_alone, done_by_ranks, is_on_ray, seen_by_all
from partita.pipeline.fingerprint import model_fingerprint
from partita.simulation.opening import section_of
from partita.simulation.report import SimulationReport
from partita.simulation.run import simulate as simulate_dialogues
from partita.simulation.transcripts import forget


def simulate(
    runtime: ModelRuntime, output: str | Path | None = None, *, batch_size: int | None = None, fresh: bool = False
) -> SimulationReport:
    """Roll out the episodes of the `simulation` section; see `Model.simulate`."""
    refuse_bag(runtime.config, what=bag_verbs.SIMULATE)
    section_of(runtime.config)
    runtime.refuse_code("simulation")
    refuse_served(runtime.config, what=SIMULATE)
    if not is_on_ray(runtime.config):
        return simulate_here(runtime, output, batch_size=batch_size, fresh=fresh)
    runtime.use_finished_run()
    folder = Path(output) if output is not None else runtime.kept / "transcripts"
    return simulate_on_ray(runtime, folder=folder, batch_size=batch_size, fresh=fresh)


def simulate_here(
    runtime: ModelRuntime, output: str | Path | None = None, *, batch_size: int | None = None, fresh: bool = False
) -> SimulationReport:
    """Run `simulate` in this process group, whatever the backend."""
    runtime.refuse_code("simulation")
    pipeline = runtime.ready()
    report, used = simulate_dialogues(
        pipeline,
        folder=Path(output) if output is not None else runtime.kept / "transcripts",
        sizing=runtime.sizing,
        seed=runtime.sampling_seed,
        model=model_fingerprint(pipeline, config=runtime.config, result=runtime.result),
        others=agent_models(runtime),
        batch_size=batch_size,
        fresh=fresh,
        progress=runtime.progress,
        process_group=runtime.process_group,
    )
    runtime.note_memory(used)
    return report


def simulate_on_ray(runtime: ModelRuntime, *, folder: Path, batch_size: int | None, fresh: bool) -> SimulationReport:
    """Roll out episodes in Ray ranks, each of which calls `simulate_here`.

    Args:
        runtime: State of the model.
        folder: Folder for the transcripts.
        batch_size: Batch size set by the caller, or None.
        fresh: Discard earlier episodes and start over.
    """
    check_is_alone()
    if fresh:  # here and not in the ranks, which resume when they are restarted
        for history in section_of(runtime.config).history:
            forget(folder, history)
    with seen_by_all(folder) as mark:
        work = partial(
            simulate_as_rank,
            runtime.sent(),
            run=runtime.run.resolve() if runtime.run is not None else None,
            folder=folder.resolve(),
            mark=mark,
            start=Path.cwd(),
            batch_size=batch_size,
        )
        report: SimulationReport = done_by_ranks(
            work, runtime.config, quiet=runtime.quiet, storage=mark, again="and go on with what is left"
        )
    return replace(report, folder=str(folder))


def simulate_as_rank(
    runtime: ModelRuntime, *, run: Path | None, folder: Path, mark: Path, start: Path, batch_size: int | None
) -> SimulationReport:
    """Run `simulate_here` on one Ray rank with the model of a run.

    Args:
        runtime: State of the model.
        run: Directory of the trained run, or None.
        folder: Folder for the transcripts.
        mark: The marker folder of `seen_by_all`.
        start: The folder where the command was started.
        batch_size: Batch size set by the caller, or None.

    Raises:
        PartitaError: The folder of transcripts is not shared.
    """
    begin_where_started(start, folder=folder, mark=mark, option="--output")
    runtime.run = run
    return simulate_here(runtime, folder, batch_size=batch_size)
