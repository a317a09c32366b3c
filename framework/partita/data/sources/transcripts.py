"""Read transcripts of simulations as training rows: the correct answer after the model's own conversation.

A row is a dialogue in its standard form (`partita_schema.dialogues`): everything up to an answer of the model,
including the model's own messages, with the correct answer as the label. So training covers the mistakes that the model
makes itself (DAgger, Ross et al. 2011).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from partita.data.episode import Episode, answer_part, from_line
from partita.data.rows import Rows
from partita.data.sources.in_memory import open_in_memory
from partita_schema.common.checksums import DamagedError, unsealed_line
from partita_schema.errors import DataError, NothingToLearnError
from partita_schema.sections.sources import Select, SimulationSource, Target

Row = dict[str, Any]


def open_transcripts(source: SimulationSource, *, paths: Sequence[str]) -> Rows:
    """Return the rows of all dialogues that are selected for training.

    Raises:
        NothingToLearnError: If there are none.
        DataError: If a file cannot be read, or has other lines.
    """
    all_rows: list[Row] = []
    outcomes: Counter[str] = Counter()
    for path in paths:
        for dialogue in dialogues_of(Path(path)):
            rows = rows_of(dialogue, select=source.select, target=source.target)
            outcomes[outcome(dialogue)] += 1
            all_rows += rows
    name = Path(paths[0]).name
    if not all_rows:
        summary = ", ".join(f"{count} {what}" for what, count in sorted(outcomes.items())) or "no dialogues"
        raise NothingToLearnError(
            f"{name}: no dialogue can be trained on with select: {source.select}; there are {summary}"
        )
    return open_in_memory(all_rows, name=name)


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
            raise DataError(f"{path.name}:{number} {error}; simulate again, or restore {path}") from None
        try:
            yield from_line(record)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(
                f"{path.name}:{number} is not a dialogue of a simulation ({type(error).__name__}: {error}); write the "
                "transcripts of one, such as runs/NAME/transcripts/predicted.jsonl, or type: jsonl for other dialogues"
            ) from error


def outcome(episode: Episode) -> str:
    """Return the outcome of a dialogue in a few words."""
    if episode.status == "failed":
        return "failed"
    if episode.succeeded is False and episode.replies and right_answer(episode, len(episode.replies) - 1) is None:
        return "wrong, with no right answer known"
    return {True: "succeeded", False: "wrong", None: "of unknown outcome"}[episode.succeeded]


def rows_of(episode: Episode, *, select: Select, target: Target) -> list[Row]:
    """Return the rows of a dialogue; empty if it is not selected, or no correct answer is known."""
    if episode.status == "failed" or not episode.replies or episode.succeeded is None:
        return []
    if select != "all" and episode.succeeded != (select == "succeeded"):
        return []
    indices = range(len(episode.replies)) if target == "every_agent_turn" else [len(episode.replies) - 1]
    labeled = ((episode.replies[index].index, right_answer(episode, index)) for index in indices)
    return [row_of(episode, start, right) for start, right in labeled if right is not None]


def right_answer(episode: Episode, number: int) -> str | None:
    """Return the correct answer of the model's turn `number`; None if it is unknown."""
    reply = episode.replies[number]
    if episode.succeeded:
        return reply.whole.strip() or None
    last = number == len(episode.replies) - 1
    return (episode.target if last and episode.target is not None else reply.gold) or None


def row_of(episode: Episode, end: int, right: str) -> Row:
    """Return the messages before the one at `end`, with the correct answer as the label."""
    own = {reply.index for reply in episode.replies}
    messages = [
        {"role": message["role"], "content": message["content"]}
        | ({"train": True} | answer_part(message) if index in own else {})
        for index, message in enumerate(episode.messages[:end])
    ]
    return {"messages": messages, "labels": [right], "train_all": False}
