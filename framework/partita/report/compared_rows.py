"""The rows that several runs have in common: results of evaluations, or episodes of simulations."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from partita.data.episode import Episode, from_line, successes
from partita.report.evaluation import Evaluation, OutputColumn, read_evaluation
from partita.report.row_shares import EPISODE
from partita.report.simulated import HISTORIES, ROUND, round_files, transcript_files
from partita.runs.listing import SPLITS, RunSummary
from partita.runs.row_results import BASE, FOLDER, EvaluationHeader, OutputResult, RecordedRow
from partita.simulation.report import numbers_of
from partita_schema.common.checksums import DamagedError, unsealed_line
from partita_schema.common.text import counted, nearest
from partita_schema.errors import DataError, shortened

MAX_TEXT = 300
"""Characters of a message of an episode."""

Load = Callable[[], Evaluation]


@dataclass(frozen=True)
class ComparedRows:
    """The common rows of runs."""

    names: list[str]
    """Name of each run."""
    split: str | None = None
    """What was evaluated; None if the runs have nothing in common."""
    outputs: Mapping[str, str] = field(default_factory=dict)
    """Type of each output that all runs have, by name."""
    evaluations: list[Evaluation] = field(default_factory=list)
    """Results of each run, of the same rows in the same order, with the common outputs."""
    notes: list[str] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Number of common rows."""
        return len(self.evaluations[0]) if self.evaluations else 0

    @property
    def are_episodes(self) -> bool:
        """Whether the rows are episodes."""
        return EPISODE in self.outputs.values()


def load_rows(runs: Sequence[RunSummary], *, split: str | None) -> ComparedRows:
    """Read the rows that all runs have in common, with the same references.

    Args:
        runs: The runs.
        split: The evaluation, or the history of a simulation. Default: the first one that all runs have.

    Raises:
        DataError: A run has no such evaluation, its file is damaged, or there is no common row or output.
    """
    names = [run.name for run in runs]
    available = [evaluations_of(run.folder) for run in runs]
    chosen = split or choose_split(available)
    if chosen is None:
        return ComparedRows(names, notes=[missing_note(runs, available)])
    for run, evaluations in zip(runs, available, strict=True):
        if chosen not in evaluations:
            there = f"it has {', '.join(evaluations)}" if evaluations else "it has none"
            advice = advice_for(run, chosen, available)
            raise DataError(f"{run.folder} has no results of rows of {chosen}, {there}; {advice}")
    loaded = [evaluations[chosen]() for evaluations in available]
    outputs = common_outputs(names, loaded)
    for evaluation in loaded:
        evaluation.outputs = {name: evaluation.outputs[name] for name in outputs}
    try:
        indices, notes = common_rows(names, loaded, chosen)
    except DataError as error:
        if split is None and chosen.startswith(ROUND):
            return ComparedRows(names, notes=[str(error)])  # runs that learned from other tasks
        raise
    if any(len(rows) < len(evaluation) for rows, evaluation in zip(indices, loaded, strict=True)):
        notes += drop_ranks(loaded)
    selected = [evaluation.select(chosen_rows) for evaluation, chosen_rows in zip(loaded, indices, strict=True)]
    return ComparedRows(names, chosen, outputs, selected, notes + keep_common_numbers(selected))


def drop_ranks(evaluations: Sequence[Evaluation]) -> list[str]:
    """Remove the ranks and losses of embeddings, which depend on all rows of an evaluation; return a note of it."""
    names = {name for one in evaluations for name, column in one.outputs.items() if column.type == "embedding"}
    for evaluation in evaluations if names else ():
        evaluation.losses = [None] * len(evaluation)
        for name in names:
            evaluation.outputs[name].of_rows = []
    return [f"{name} is not compared, because its ranks are among all rows of an evaluation" for name in sorted(names)]


def keep_common_numbers(evaluations: Sequence[Evaluation]) -> list[str]:
    """Remove the numbers of dialogues that another run does not have, as of failed ones; return a note of it."""
    columns = [one.outputs[EPISODE] for one in evaluations if EPISODE in one.outputs]
    if not columns:
        return []
    changed = 0
    for index, row in enumerate(zip(*(column.values for column in columns), strict=True)):
        common = set.intersection(*map(set, row))
        changed += any(len(numbers) > len(common) for numbers in row)
        for column, numbers in zip(columns, row, strict=True):
            column.values[index] = {name: number for name, number in numbers.items() if name in common}
    if not changed:
        return []
    left_out = (
        f"numbers that one of the runs lacks, as for a failed dialogue, are left out ({counted(changed, 'dialogue')})"
    )
    return [f"{left_out}; for success, a failed dialogue counts as 0"]


def evaluations_of(folder: Path) -> dict[str, Load]:
    """Return what a run has results of rows of, by split or history."""
    found = dict[str, Load]()
    for path in sorted((folder / FOLDER).glob("*.jsonl")):
        if not path.stem.endswith(BASE):
            found[path.stem] = lambda path=path: read_evaluation(path)  # type: ignore[misc]
    for history, path in transcript_files(folder).items():
        found.setdefault(history, lambda path=path: evaluation_of_episodes(read_episodes(path), path.stem))  # type: ignore[misc]
    for name, path in round_files(folder).items():
        found.setdefault(name, lambda path=path, name=name: evaluation_of_episodes(read_episodes(path), name))  # type: ignore[misc]
    return found


def choose_split(available: Sequence[Mapping[str, Load]]) -> str | None:
    """Return the first split that all runs have: test, validation, another one, a history, or the last round."""
    common = [name for name in available[0] if all(name in one for one in available)]
    rounds = [name for name in common if name.startswith(ROUND)]
    others = [name for name in common if name not in (*SPLITS, *HISTORIES, *rounds)]
    order = (*SPLITS, *others, *reversed(HISTORIES), *reversed(rounds))
    return next((name for name in order if name in common), None)


def advice_for(run: RunSummary, split: str, available: Sequence[Mapping[str, Load]]) -> str:
    """Return how a run gets results of a split or history; if no run has any, which ones the name is close to."""
    known = list(dict.fromkeys(name for one in available for name in one))
    near = nearest(split, known)
    if split not in known and near:
        return f"did you mean {' or '.join(near)}?"
    folder = shlex.quote(str(run.folder))
    if split in HISTORIES:
        return f"simulate with partita simulate {folder}"
    if split in SPLITS:
        command = f"evaluate it again with {evaluate_command(run)}"
        return command if is_finished(run) else how_to_finish(run)
    if split.startswith(ROUND):
        return "compare a round that all runs have"
    return f"evaluate it on that file with partita evaluate {folder} --dataset FILE"


def is_finished(run: RunSummary) -> bool:
    """Return whether a run can be evaluated."""
    return run.status in ("done", "outputs")


def how_to_finish(run: RunSummary) -> str:
    """Return how an unfinished run is finished."""
    shown = f"partita runs show {shlex.quote(str(run.folder))}"
    return f"finish {run.folder} first, with the command that {shown} prints"


def evaluate_command(run: RunSummary) -> str:
    """Return the command that writes results of rows of a run, which takes the rows from the file if it has any."""
    data = run.config.get("data") or {}
    has_rows = not run.config or any(data.get(key) for key in ("source", "mix", "validation", "test"))
    return f"partita evaluate {shlex.quote(str(run.folder))}{'' if has_rows else ' --dataset FILE'}"


def missing_note(runs: Sequence[RunSummary], available: Sequence[Mapping[str, Load]]) -> str:
    """Return why rows cannot be compared, and what to do: simulate, if all runs can, or evaluate."""
    both = list(zip(runs, available, strict=True))
    there = "; ".join(f"{run.name} has {', '.join(found) or 'none'}" for run, found in both)
    if all(run.config.get("simulation") for run in runs):
        lacking = [run for run, found in both if not any(history in found for history in HISTORIES)]
        commands = [f"partita simulate {shlex.quote(str(run.folder))}" for run in lacking if is_finished(run)]
    else:
        lacking = [run for run, found in both if not found]
        commands = [evaluate_command(run) for run in lacking if is_finished(run)]
    advice = [f"write them with {', '.join(commands)}"] if commands else []
    advice += [how_to_finish(run) for run in lacking if not is_finished(run)]
    what = "; ".join(advice or ["evaluate the runs on the same dataset"])
    return f"the runs have no results of the same rows ({there}), so nothing is compared row by row; {what}"


def common_outputs(names: Sequence[str], evaluations: Sequence[Evaluation]) -> dict[str, str]:
    """Return the types of the outputs that all runs have, by name. Raise DataError if there are only others."""
    types = [evaluation.header.outputs for evaluation in evaluations]
    outputs = {name: kind for name, kind in types[0].items() if all(one.get(name) == kind for one in types)}
    if not outputs and any(types):
        shown = [", ".join(f"{name} ({kind})" for name, kind in one.items()) or "none" for one in types]
        there = "; ".join(f"{name} has {outputs}" for name, outputs in zip(names, shown, strict=True))
        raise DataError(
            f"the runs have no output in common ({there}); compare runs with outputs of the same name and type"
        )
    return outputs


def common_rows(
    names: Sequence[str], evaluations: Sequence[Evaluation], split: str
) -> tuple[list[list[int]], list[str]]:
    """Return the indices of the rows that are the same in all runs, with their references, and notes of those left out.

    Args:
        names: Names of the runs.
        evaluations: The results of each run.
        split: What was evaluated.

    Raises:
        DataError: There are none.
    """
    places = [places_of(evaluation.keys) for evaluation in evaluations]
    shared = [key for key in places[0] if all(key in one for one in places)]
    equal = [key for key in shared if have_same_content(evaluations, [one[key] for one in places])]
    keys = [key for key in equal if have_same_references(evaluations, [one[key] for one in places])]
    counts = ", ".join(f"{name} {len(one):,}" for name, one in zip(names, places, strict=True))
    if not keys:
        why = "with the same references" if equal else "with the same content" if shared else "in common"
        if EPISODE in evaluations[0].outputs:
            advice = "simulate the same tasks with all of them (partita simulate RUN)"
            raise DataError(f"the runs have different {split} dialogues ({counts}), none of them {why}; {advice}")
        raise DataError(
            f"the runs were evaluated on different {split} rows ({counts}), none of them {why}; evaluate all of them "
            "on the same file with partita evaluate RUN --dataset FILE"
        )
    notes = []
    if any(len(one) != len(shared) for one in places):
        notes.append(
            f"the runs were evaluated on different {split} rows ({counts}); only the {len(shared):,} common ones are "
            "compared"
        )
    for fewer, more, what in ((equal, shared, "content"), (keys, equal, "references")):
        if len(fewer) < len(more):
            notes.append(f"{counted(len(more) - len(fewer), 'common row')} with different {what} left out")
    return [[one[key] for key in keys] for one in places], notes


def places_of(keys: Sequence[str]) -> dict[tuple[str, int], int]:
    """Return the index of each row by its key, and for equal keys by their number."""
    places, seen = dict[tuple[str, int], int](), dict[str, int]()
    for index, key in enumerate(keys):
        seen[key] = seen.get(key, 0) + 1
        places[key, seen[key]] = index
    return places


def have_same_content(evaluations: Sequence[Evaluation], indices: Sequence[int]) -> bool:
    """Return whether a row is the same in the data of all runs, and has not only the same key."""
    return len({one.contents[index] for one, index in zip(evaluations, indices, strict=True)}) == 1


def have_same_references(evaluations: Sequence[Evaluation], indices: Sequence[int]) -> bool:
    """Return whether a row has the same references in all runs that have answered it."""
    known = []
    for evaluation, index in zip(evaluations, indices, strict=True):
        columns = evaluation.outputs.values()
        if any(column.rights[index] is not None or column.values[index] is not None for column in columns):
            known.append([column.references[index] for column in columns])
    return all(one == known[0] for one in known)


def read_episodes(path: Path) -> list[Episode]:
    """Read the episodes of a finished simulation. Raise DataError if a line is damaged."""
    episodes = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                episodes.append(from_line(unsealed_line(line.rstrip(b"\n"), required=False)))
            except (DamagedError, KeyError, TypeError):
                raise DataError(
                    f"{path}, line {number}, is damaged; to restore it, run the same partita simulate command again"
                ) from None
    return episodes


def evaluation_of_episodes(episodes: Sequence[Episode], history: str) -> Evaluation:
    """Return episodes as the results of rows: whether each one succeeded, and its numbers."""
    evaluation = Evaluation(EvaluationHeader(history, "result", "", outputs={EPISODE: EPISODE}))
    evaluation.outputs[EPISODE] = OutputColumn(EPISODE)
    known = zip(episodes, successes(episodes), strict=True)
    evaluation.add([asdict(row_of(episode, success=success)) for episode, success in known])
    return evaluation


def row_of(episode: Episode, *, success: bool | None) -> RecordedRow:
    """Return an episode as the result of a row, given whether it succeeded."""
    said = [message["content"] for message in episode.messages if message["role"] == "user"]
    numbers = {} if episode.status == "failed" else numbers_of(episode, success=success)
    value = {name: number for name, number in numbers.items() if name != "success"}
    return RecordedRow(
        episode.key,
        prompt=shortened(said[0] if said else "", MAX_TEXT),
        answer=shortened(last_answer(episode), MAX_TEXT),
        outputs={EPISODE: OutputResult(None, value, success)},
    )


def last_answer(episode: Episode) -> str:
    """Return the last answer of an episode, or why it failed."""
    if episode.status == "failed":
        return f"failed: {episode.reason or ''}"
    return episode.replies[-1].whole if episode.replies else ""
