"""HTML page of a simulation: one file without scripts, with the metrics first and then the worst dialogues.

The page shows a limited number of dialogues of each history, with examples of every kind. The transcript files next to
it hold all dialogues.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from partita.data.episode import AGENT, Episode
from partita.report.page import render_page
from partita.report.section import Dialogue, Dialogues, Section, Turn
from partita.report.sections.dialogues import history_parts, sentence_of
from partita.report.simulated import write_outcomes
from partita.runs.files import writing
from partita.simulation.report import column
from partita.simulation.run import SimulationResult
from partita_schema.common.files import write_atomically
from partita_schema.common.text import counted

MOST = 200
"""Maximum number of dialogues on a page, over all histories."""
LONGEST = 4000
"""Maximum number of characters of a message."""
MAX_MESSAGES = 100
"""Maximum number of messages of a dialogue."""
KINDS = ("failed", "truncated", "without success", "done", "success")
"""Outcomes of a dialogue, in the order of the page."""


def write_page(result: SimulationResult) -> None:
    """Write index.html and the numbers next to the transcripts."""
    folder = Path(result.report.folder)
    title = "/".join(folder.resolve().parts[-2:])
    columns = {history: column(outcomes) for history, outcomes in result.report.histories.items()}
    with writing(folder):
        write_outcomes(result.report)
        write_atomically(folder / "index.html", page(columns, result.episodes, title=f"Dialogues in {title}"))


def page(columns: Mapping[str, Mapping[str, float]], dialogues: Mapping[str, Sequence[Episode]], *, title: str) -> str:
    """Return the HTML page.

    Args:
        columns: Numbers by history.
        dialogues: Dialogues by history.
        title: Title of the page.
    """
    sections = [Section("Metrics", history_parts(columns, dialogues))]
    for history, all_of_it in dialogues.items():
        chosen = choose(all_of_it, most=MOST // len(dialogues))
        caption = f"{counted(len(all_of_it), 'dialogue')}, the worst first"
        if len(chosen) < len(all_of_it):
            caption += f"; {len(chosen):,} of them are shown, all are in {history}.jsonl"
        shown = Dialogues(caption, [render_episode(dialogue) for dialogue in chosen])
        sections.append(Section(f"{history.capitalize()} history", [shown]))
    return render_page(title, lead=sentence_of(columns, dialogues), sections=sections)


def kind_of(episode: Episode) -> str:
    """Return the outcome of a dialogue, one of KINDS."""
    if episode.status in ("failed", "truncated"):
        return str(episode.status)
    if episode.succeeded is None:
        return "done"
    return "success" if episode.succeeded else "without success"


def choose(dialogues: Sequence[Episode], *, most: int) -> list[Episode]:
    """Choose at most `most` dialogues of all kinds, the worst kind first, each kind in the order of the tasks."""
    kinds: dict[str, list[Episode]] = defaultdict(list)
    for dialogue in dialogues:
        kinds[kind_of(dialogue)].append(dialogue)
    remaining, shares = most, {}
    # A rare kind leaves the rest of its share to the others.
    for index, kind in enumerate(sorted(kinds, key=lambda kind: len(kinds[kind]))):
        shares[kind] = min(len(kinds[kind]), remaining // (len(kinds) - index))
        remaining -= shares[kind]
    return [dialogue for kind in KINDS if kind in kinds for dialogue in kinds[kind][: shares[kind]]]


def render_episode(episode: Episode) -> Dialogue:
    """Return a dialogue with the right answer below each wrong one."""
    replies = {reply.index: reply for reply in episode.replies}
    turns = []
    for index, message in enumerate(episode.messages[:MAX_MESSAGES]):
        exact = replies[index].exact if index in replies else None
        right = replies[index].gold if index in replies else None
        note = "" if exact is None else "right" if exact else f"right answer: {cut_text(right or '')}"
        kind: Literal["", "right", "wrong"] = "" if exact is None else "right" if exact else "wrong"
        turns.append(Turn(speaker(message), cut_text(message["content"]), note, kind))
    more = len(episode.messages) - len(turns)
    if more:
        turns.append(Turn("", counted(more, "more message")))
    return Dialogue(f"{episode.key}: {verdict(episode)}", turns)


def speaker(message: Mapping[str, Any]) -> str:
    """Return the speaker of a message. The agent `user` speaks in several roles, such as `tool`."""
    if message["agent"] == AGENT:
        return "model"
    return str(message["role"] if message["agent"] == "user" else message["agent"])


def verdict(episode: Episode) -> str:
    """Return status, reward and the verdict of the checker in one line."""
    parts = [f"{episode.status} ({cut_text(episode.reason)})" if episode.reason else str(episode.status)]
    if episode.reward is not None:
        parts.append(f"reward {episode.reward:g}")
    if episode.ok is not None:
        parts.append(f"checker: {'ok' if episode.ok else 'not ok'}")
    if episode.ok is False and episode.target is not None:
        parts.append(f"the right last answer is {cut_text(episode.target)!r}")
    if episode.rounds:
        parts.append(f"sent back {episode.rounds} {'time' if episode.rounds == 1 else 'times'}")
    parts += [f"{name} {value:g}" for name, value in episode.metrics.items()]
    return ", ".join(parts)


def cut_text(text: str) -> str:
    """Cut a text after LONGEST characters and state how many were cut."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ... and {len(text) - LONGEST:,} characters more"
