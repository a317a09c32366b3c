"""HTML page of a simulation: one file without scripts, with the metrics first and then the worst dialogues.

The page shows a limited number of dialogues of each history, with examples of every kind. The transcript files next to
it hold all dialogues.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from partita.data.episode import AGENT, Episode
from partita.report.page_head import HEAD
from partita.runs.files import writing
from partita.simulation.report import RolloutOutcomes, column
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

PAGE = (
    HEAD
    + """\
table { border-collapse: collapse; margin: 1rem 0; }
caption { text-align: left; font-weight: 600; }
th, td { padding: .15rem .9rem .15rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--faint); }
.numbers td { text-align: right; font-variant-numeric: tabular-nums; }
.turns { width: 100%; table-layout: fixed; }
.turns th { width: 5.5rem; font-weight: 400; }
.turns td { white-space: pre-wrap; overflow-wrap: anywhere; }
tr.model { background: var(--shade); }
summary { cursor: pointer; }
.wrong { font-weight: 700; }
.scroll { overflow-x: auto; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<div class="scroll"><table class="numbers">
<caption>By history</caption>
<thead><tr><th scope="col">metric</th>{% for name in columns %}<th scope="col">{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for name, cells in numbers %}
<tr><th scope="row">{{ name }}</th>{% for cell in cells %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table></div>
{% for sentence in sentences %}
<p>{{ sentence }}</p>
{% endfor %}
{% for part in parts %}
<section>
<h2>{{ part.name }} history</h2>
<p>{{ part.sentence }}</p>
{% for dialogue in part.dialogues %}
<details{% if loop.first %} open{% endif %}>
<summary>{{ dialogue.key }}: {{ dialogue.verdict }}</summary>
<table class="turns">
<tbody>
{% for turn in dialogue.turns %}
<tr{% if turn.agent == "model" %} class="model"{% endif %}><th scope="row">{{ turn.agent }}</th>
<td>{{ turn.text }}</td>
<td{% if turn.is_wrong %} class="wrong"{% endif %}>{{ turn.note }}</td></tr>
{% endfor %}
</tbody>
</table>
</details>
{% endfor %}
</section>
{% endfor %}
</body>
</html>
"""
)


def write_page(result: SimulationResult) -> None:
    """Write index.html next to the transcripts: the outcomes, and the worst episodes by history."""
    folder = Path(result.report.folder)
    title = "/".join(folder.resolve().parts[-2:])
    with writing(folder):
        text = page(result.report.histories, result.episodes, title=f"Dialogues in {title}")
        write_atomically(folder / "index.html", text)


def page(outcomes: Mapping[str, RolloutOutcomes], dialogues: Mapping[str, Sequence[Episode]], *, title: str) -> str:
    """Return the HTML page.

    Args:
        outcomes: Results by history.
        dialogues: Dialogues by history.
        title: Title of the page.
    """
    columns = {history: column(results) for history, results in outcomes.items()}
    names = list(dict.fromkeys(name for values in columns.values() for name in values))
    parts = []
    for history, all_of_it in dialogues.items():
        chosen = choose(all_of_it, most=MOST // len(dialogues))
        left_out = len(all_of_it) - len(chosen)
        sentence = f"{counted(len(all_of_it), 'dialogue')}, those first that went worst."
        if left_out:
            sentence += f" {left_out:,} of them are not on this page; all are in {history}.jsonl."
        parts.append(
            {"name": history, "sentence": sentence, "dialogues": [render_episode(dialogue) for dialogue in chosen]}
        )
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.from_string(PAGE).render(
        title=title,
        columns=list(columns),
        numbers=[(name, [cell(name, values.get(name)) for values in columns.values()]) for name in names],
        sentences=differences(columns),
        parts=parts,
    )


def cell(name: str, value: float | None) -> str:
    """Format a number of the table; counts have no decimals."""
    if value is None:
        return ""
    return f"{value:,.0f}" if name.endswith(".n") else f"{value:.4f}"


def differences(columns: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Explain the difference between gold and predicted history; empty unless the page has both."""
    if "gold" not in columns or "predicted" not in columns:
        return []
    sentences = [
        (
            "With gold history the model sees the right answers of turns before, as in most evaluations; with "
            "predicted history its own, as in use. What the second is lower by is what its own earlier mistakes cost."
        )
    ]
    for name in ("success", "exact_turns", "exact_last", "reward"):
        gold, predicted = columns["gold"].get(name), columns["predicted"].get(name)
        if gold is not None and predicted is not None:
            sentences.append(
                f"{name}: {gold:.4f} with gold history, {predicted:.4f} with its own: {predicted - gold:+.4f}."
            )
    return sentences


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


def render_episode(episode: Episode) -> dict[str, Any]:
    """Return a dialogue as values for the template."""
    replies = {reply.index: reply for reply in episode.replies}
    turns = []
    for index, message in enumerate(episode.messages[:MAX_MESSAGES]):
        exact = replies[index].exact if index in replies else None
        right = replies[index].gold if index in replies else None
        turns.append(
            {
                "agent": speaker(message),
                "text": cut_text(message["content"]),
                "note": "" if exact is None else "right" if exact else f"right answer: {cut_text(right or '')}",
                "is_wrong": exact is False,
            }
        )
    more = len(episode.messages) - len(turns)
    if more:
        turns.append({"agent": "", "text": counted(more, "more message"), "note": "", "is_wrong": False})
    return {"key": episode.key, "verdict": verdict(episode), "turns": turns}


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
        parts.append(f"it should have ended with {cut_text(episode.target)!r}")
    if episode.rounds:
        parts.append(f"sent back {episode.rounds} {'time' if episode.rounds == 1 else 'times'}")
    parts += [f"{name} {value:g}" for name, value in episode.metrics.items()]
    return ", ".join(parts)


def cut_text(text: str) -> str:
    """Cut a text after LONGEST characters and state how many were cut."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ... and {len(text) - LONGEST:,} characters more"
