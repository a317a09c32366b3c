"""Rows of dialogues that a simulation has had: what should have been said, behind what was said.

A row is a dialogue in its one form (`partita_schema.dialogue_formats`): everything up to an answer of the model, its
own words included, and the right answer as the label. So a model meets, while it learns, the mistakes that it makes
itself (DAgger, Ross et al. 2011).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from partita.data.reading.in_memory import open_in_memory
from partita.data.rows import Rows
from partita.simulation.episode import Episode, from_line
from partita_schema.errors import DataError, NothingToLearnError
from partita_schema.sealed import DamagedError, unsealed_line
from partita_schema.sources import Select, SimulationSource, Target

Row = dict[str, Any]


def open_transcripts(source: SimulationSource, *, paths: Sequence[str]) -> Rows:
    """Rows of all dialogues that are learned from.

    Raises NothingToLearnError where there are none, and DataError where a file has other lines.
    """
    found: list[Row] = []
    met: Counter[str] = Counter()
    for path in paths:
        for dialogue in dialogues_of(Path(path)):
            rows = rows_of(dialogue, select=source.select, target=source.target)
            met[what_came(dialogue)] += 1
            found += rows
    name = Path(paths[0]).name
    if not found:
        told = ", ".join(f"{count} {what}" for what, count in sorted(met.items())) or "no dialogues"
        raise NothingToLearnError(
            f"{name}: no dialogue can be learned from with select: {source.select}; there are {told}"
        )
    return open_in_memory(found, name=name)


def dialogues_of(path: Path) -> Iterator[Episode]:
    """The dialogues of a file. Raises DataError."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        try:
            found = unsealed_line(line, required=False)
        except DamagedError as error:
            raise DataError(f"{path.name}:{number} {error}; simulate again, or restore {path}") from None
        try:
            yield from_line(found)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(
                f"{path.name}:{number} is no dialogue of a simulation ({type(error).__name__}: {error}); write the "
                "transcripts of one, such as runs/NAME/transcripts/predicted.jsonl, or type: jsonl for other dialogues"
            ) from error


def what_came(episode: Episode) -> str:
    """What a dialogue came to, in a word or two."""
    if episode.status == "failed":
        return "failed"
    if episode.succeeded is False and episode.replies and right_answer(episode, len(episode.replies) - 1) is None:
        return "wrong, with no right answer known"
    return {True: "succeeded", False: "wrong", None: "of which nobody knows"}[episode.succeeded]


def rows_of(episode: Episode, *, select: Select, target: Target) -> list[Row]:
    """The rows of a dialogue; none where it is not to be learned from, or no right answer is known."""
    if episode.status == "failed" or not episode.replies or episode.succeeded is None:
        return []
    if select != "all" and episode.succeeded != (select == "succeeded"):
        return []
    places = range(len(episode.replies)) if target == "every_agent_turn" else [len(episode.replies) - 1]
    made = ((episode.replies[place].place, right_answer(episode, place)) for place in places)
    return [row_of(episode, start, right) for start, right in made if right is not None]


def right_answer(episode: Episode, number: int) -> str | None:
    """What the model should have said in a turn; None where that is not known."""
    reply = episode.replies[number]
    if episode.succeeded:
        return reply.text.strip() or None
    last = number == len(episode.replies) - 1
    return (episode.target if last and episode.target is not None else reply.gold) or None


def row_of(episode: Episode, end: int, right: str) -> Row:
    """What was said up to a message, and the right answer in its place."""
    own = {reply.place for reply in episode.replies}
    said = [
        {"role": message["role"], "content": message["content"]} | ({"learned": True} if place in own else {})
        for place, message in enumerate(episode.messages[:end])
    ]
    return {"messages": said, "labels": [right], "learn_all": False}
