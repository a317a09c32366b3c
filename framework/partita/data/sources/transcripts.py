"""Read transcripts of simulations as training rows: single answers to learn, labelled answers, or pairs of answers.

A row is a dialogue in the common form (`partita_schema.dialogues`): everything up to an answer of the model,
including the model's own messages, with the correct answer as the label. So training covers the mistakes that the model
makes itself (DAgger, Ross et al. 2011). Pairs are in `transcript_pairs`.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from partita.data.episode import Episode, from_line, successes
from partita.data.rows import Rows
from partita.data.sources.in_memory import open_in_memory
from partita.data.sources.transcript_answers import (
    Row,
    is_good,
    is_right,
    last_retry,
    right_answer,
    row_of,
    turns_of,
)
from partita.data.sources.transcript_pairs import best_and_worst, corrected_pairs
from partita_schema.common.checksums import DamagedError, unsealed_line
from partita_schema.common.text import counted, describe_error
from partita_schema.config import Config
from partita_schema.errors import DataError, NothingToLearnError
from partita_schema.sections.sources import Select, SimulationSource, Target

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WantedRows:
    """What transcripts are read for."""

    pairs: bool = False
    """Whether a row has a chosen and a rejected answer."""
    label: str | None = None
    """Column that says whether an answer is good; None if answers have no label."""

    @classmethod
    def by(cls, config: Config) -> "WantedRows":
        """Return what the outputs of a configuration learn from."""
        output = config.output_features[0]
        return cls(pairs=output.has_pairs, label=output.more_columns[0] if output.has_label else None)


ANSWERS = WantedRows()
"""Rows of single answers to learn."""


def summary_of(outcomes: Mapping[str, int], source: SimulationSource) -> str:
    """Return the number of dialogues, or of tasks with several attempts, of each outcome."""
    attempts = source.select == "best_and_worst"
    parts = (f"{counted(count, 'task') if attempts else count} {what}" for what, count in sorted(outcomes.items()))
    return ", ".join(parts) or "no dialogues"


def advice(source: SimulationSource) -> str:
    """Return what makes attempts at a task differ, if they are compared."""
    if source.select != "best_and_worst":
        return ""
    return (
        "; sample several attempts at each task, with generation: {do_sample: true}, repeats: 4 and "
        "repeats_share_seed: true in simulation"
    )


def open_transcripts(source: SimulationSource, *, paths: Sequence[str], wanted: WantedRows) -> Rows:
    """Return the rows of all dialogues that are selected for training, and log how many dialogues give none.

    Args:
        source: The source.
        paths: Its files.
        wanted: What the rows are for.

    Raises:
        NothingToLearnError: If there are none.
        DataError: If a file cannot be read, or has other lines.
    """
    all_rows: list[Row] = []
    outcomes: Counter[str] = Counter()
    cut = 0
    for path in paths:
        episodes = judged(list(dialogues_of(Path(path))))
        rows, counts, num_cut = rows_of_file(episodes, source=source, wanted=wanted)
        all_rows += rows
        outcomes += counts
        cut += num_cut
    name = Path(paths[0]).name
    summary = summary_of(outcomes, source)
    if not all_rows:
        kind = "pair of answers can be made" if wanted.pairs else "dialogue can be trained on"
        raise NothingToLearnError(
            f"{name}: no {kind} with select: {source.select}; there are {summary}{advice(source)}"
        )
    if cut:
        logger.warning(
            "%s: %s of %s to learn ended at the token limit; training on them teaches the model to stop there: "
            "simulate with a larger generation.max_new_tokens",
            name,
            f"{cut:,}",
            counted(len(all_rows), "answer"),
        )
    if wanted.pairs and outcomes:
        logger.info("%s: %s of answers; without any: %s", name, counted(len(all_rows), "pair"), summary)
    return open_in_memory(all_rows, name=name)


def rows_of_file(
    episodes: Sequence[Episode], *, source: SimulationSource, wanted: WantedRows
) -> tuple[list[Row], Counter[str], int]:
    """Return the rows of the dialogues of a file, the outcomes of the dialogues, for pairs only of those without, and
    the number of answers to learn that ended at the token limit.

    Args:
        episodes: The dialogues.
        source: The source.
        wanted: What the rows are for.
    """
    if wanted != ANSWERS:
        refuse_several_outputs(episodes)
    if source.select == "best_and_worst":
        return pairs_of_tasks(episodes)
    rows: list[Row] = []
    outcomes: Counter[str] = Counter()
    for episode in episodes:
        if wanted.pairs:
            own = corrected_pairs(episode, target=source.target)
        elif wanted.label is not None:
            own = labelled_rows(episode, target=source.target, column=wanted.label)
        else:
            own = rows_of_episode(episode, select=source.select, target=source.target)
        rows += own
        if not (own and wanted.pairs):
            outcomes[outcome(episode)] += 1
    return rows, outcomes, num_cut_answers(episodes, source, label=wanted.label is not None)


def pairs_of_tasks(episodes: Sequence[Episode]) -> tuple[list[Row], Counter[str], int]:
    """Return a pair for each task with a best and a worst attempt, why other tasks have none, and the number of chosen
    answers that ended at the token limit."""
    attempts = dict[str, list[Episode]]()
    for episode in episodes:
        attempts.setdefault(episode.task_key, []).append(episode)
    found = [best_and_worst(of_task) for of_task in attempts.values()]
    pairs = [pair for pair in found if not isinstance(pair, str)]
    reasons = Counter(reason for reason in found if isinstance(reason, str))
    return [pair.row for pair in pairs], reasons, sum(pair.is_cut for pair in pairs)


def refuse_several_outputs(episodes: Sequence[Episode]) -> None:
    """Raise DataError if a turn has several outputs, which are not compared."""
    for episode in episodes:
        if any(reply.values is not None for reply in episode.replies):
            raise DataError(
                f"dialogue {episode.key} has turns with several outputs, and single texts are compared; simulate with "
                "a model of one text output"
            )


def dialogues_of(path: Path) -> Iterator[Episode]:
    """Yield the dialogues of a file. Raise DataError if it cannot be read or has other lines."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        try:
            record = unsealed_line(line, required=False)
        except DamagedError as error:
            raise DataError(
                f"{path.name}:{number} {error}; simulate again, restore {path}, or remove the checksum of a line that "
                "you have changed"
            ) from None
        try:
            yield from_line(record)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(
                f"{path.name}:{number} is not a dialogue of a simulation ({describe_error(error)}); write the "
                "transcripts of one, such as runs/NAME/transcripts/predicted.jsonl, or type: jsonl for other dialogues"
            ) from error


def judged(episodes: list[Episode]) -> list[Episode]:
    """Return episodes, in which those that were truncated before they were judged are no success, as in reports."""
    for episode, success in zip(episodes, successes(episodes), strict=True):
        if episode.succeeded is None:
            episode.ok = success
    return episodes


def outcome(episode: Episode) -> str:
    """Return the outcome of a dialogue in a few words."""
    right = is_right(episode)
    if episode.status == "failed":
        return "failed"
    if right is False and episode.replies and right_answer(episode, len(episode.replies) - 1) is None:
        return "wrong, with no right answer known"
    return {True: "succeeded", False: "wrong", None: "of unknown outcome"}[right]


def rows_of_episode(episode: Episode, *, select: Select, target: Target) -> list[Row]:
    """Return the rows of a dialogue; empty if it is not selected, or no correct answer is known."""
    answers = right_answers(episode, select=select, target=target)
    return [row_of(episode, episode.replies[number].index, right) for number, right in answers]


def right_answers(episode: Episode, *, select: Select, target: Target) -> list[tuple[int, str]]:
    """Return the numbers of the turns to learn with their correct answers; empty if the dialogue is not selected."""
    right = is_right(episode)
    if right is None or (select != "all" and right != (select == "succeeded")):
        return []
    answers = ((number, right_answer(episode, number)) for number in turns_of(episode, target))
    return [(number, answer) for number, answer in answers if answer is not None]


def num_cut_answers(episodes: Sequence[Episode], source: SimulationSource, *, label: bool) -> int:
    """Return the number of answers to learn that the model generated up to the limit of new tokens.

    Args:
        episodes: The dialogues.
        source: The source.
        label: Whether answers are labelled; then the good ones are learned.
    """
    if label:
        return sum(
            episode.replies[number].is_cut and bool(is_good(episode, number))
            for episode in episodes
            for number in turns_of(episode, source.target)
        )
    return sum(
        final.is_cut and final.whole.strip() == right
        for episode in episodes
        for number, right in right_answers(episode, select=source.select, target=source.target)
        for final in [last_retry(episode, number)]
    )


def labelled_rows(episode: Episode, *, target: Target, column: str) -> list[Row]:
    """Return a row for each answer whose label is known, with the answer as it was generated.

    Args:
        episode: The dialogue.
        target: Which answers are used.
        column: Column of the label.
    """
    rows = []
    for number in turns_of(episode, target):
        reply, label = episode.replies[number], is_good(episode, number)
        if label is not None and reply.text.strip():
            rows.append(row_of(episode, reply.index, reply.text) | {column: label})
    return rows
