"""Where training stands in its data: a few numbers, and what the plan is made of, which gives them their meaning."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from partita.data.rows import digest
from partita_schema.batching import Batching
from partita_schema.errors import ResumeError

logger = logging.getLogger(__name__)

CURSOR_VERSION = 2
MOST_CHARACTERS = 96
"""Of a part; what is longer ends in a hash of the whole."""
FEWEST_CHARACTERS = 16
"""To which parts are cut where there are many; what is left is then nothing but a hash."""
FEWEST_OF_NAMES = 32
"""To which the names of parts are cut."""
MOST_OF_PARTS = 1500
"""Characters of all parts and their names as JSON, so that there is room for where the streams stand."""
Resume = Literal["strict", "restart_epoch", "fresh"]
"""What happens where the plan has changed, as `data.resume`."""


@dataclass(frozen=True)
class Cursor:
    """A position: the next step to be taken. As JSON it is smaller than 4 KB."""

    parts: Mapping[str, str]
    """What the plan is made of, by names that a person knows: files, tokenizer, seed ..."""
    epoch: int = 0
    step: int = 0
    """Step in the epoch."""
    place: Any = None
    """Where the step begins, as the planner understands it, as JSON; None for the beginning of the epoch."""

    def to_json(self) -> dict[str, Any]:
        """The position as JSON."""
        return {
            "version": CURSOR_VERSION,
            "plan_hash": plan_hash(self.parts),
            "parts": dict(self.parts),
            "epoch": self.epoch,
            "step": self.step,
            "place": self.place,
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "Cursor":
        """A position read back. Raises ResumeError where it is none, or of another version."""
        version = saved.get("version")
        if version != CURSOR_VERSION:
            raise ResumeError(
                f"the data position has version {version}, this partita reads {CURSOR_VERSION}; "
                "continue with the version that wrote it"
            )
        parts, epoch, step = saved.get("parts"), saved.get("epoch"), saved.get("step")
        numbers = all(type(number) is int and number >= 0 for number in (epoch, step))
        if not isinstance(parts, Mapping) or not numbers or saved.get("plan_hash") != plan_hash(parts):
            raise ResumeError("the data position is damaged; continue from an older checkpoint")
        assert isinstance(epoch, int)
        assert isinstance(step, int)
        return cls(parts, epoch, step, saved.get("place"))

    def check(self, parts: Mapping[str, str]) -> None:
        """Raise ResumeError when the position belongs to another plan, naming what differs."""
        names = dict.fromkeys([*self.parts, *parts])
        changed = [
            f"  {name}: {self.parts.get(name, 'none')} -> {parts.get(name, 'none')}"
            for name in names
            if self.parts.get(name) != parts.get(name)
        ]
        if changed:
            raise ResumeError(
                "the run cannot continue, since its batches would be others than before. Changed (old -> new):\n"
                + "\n".join(changed)
                + "\nUndo the change, or start a new run (another --run)"
            )


def continued(saved: Mapping[str, Any], parts: Mapping[str, str], *, resume: Resume) -> Cursor:
    """The position to continue from under a plan of these parts.

    strict: the saved one. Raises ResumeError where it belongs to another plan. restart_epoch and fresh go on in that
    case, with a warning that says what has changed: at the first step of the same epoch, or of epoch 0. A position that
    cannot be read at all is refused, but for fresh.
    """
    try:
        loaded = Cursor.from_json(saved)
    except ResumeError as error:
        if resume != "fresh":
            raise ResumeError(f"{error}; or write data.resume: fresh to begin the data again") from None
        logger.warning("%s. As data.resume: fresh says, the data begins again", error)
        return Cursor(parts)
    try:
        loaded.check(parts)
    except ResumeError as error:
        if loaded.parts.get("tokenizer") != parts.get("tokenizer"):
            raise ResumeError(
                f"{error}. Weights know the tokens of one tokenizer only, whatever data.resume says"
            ) from None
        if resume == "strict":
            raise ResumeError(
                f"{error}, or keep the weights and write data.resume: restart_epoch to begin epoch {loaded.epoch} "
                "again, or data.resume: fresh to begin the data again"
            ) from None
        epoch = loaded.epoch if resume == "restart_epoch" else 0
        changes = str(error).split("\n", 1)[1].rsplit("\n", 1)[0]
        logger.warning(
            "the data or its plan have changed (old -> new):\n%s\nAs data.resume: %s says, the run goes on at the "
            "beginning of epoch %d",
            *(changes, resume, epoch),
        )
        return Cursor(parts, epoch)
    return loaded


def short_parts(parts: Mapping[str, str]) -> dict[str, str]:
    """The parts, short enough to be kept in every position; what is cut ends in a hash of the whole.

    Each has up to MOST_CHARACTERS, and fewer where all together would have more than MOST_OF_PARTS. Should they have
    too many even so, the last ones become one, "and others".
    """
    for most in range(MOST_CHARACTERS, FEWEST_CHARACTERS - 1, -4):
        found = {short(name, max(most, FEWEST_OF_NAMES)): short(text, most) for name, text in parts.items()}
        if len(json.dumps(found)) <= MOST_OF_PARTS:
            return found
    kept = dict[str, str]()
    given = sorted(zip(found.items(), parts.items(), strict=True), key=lambda part: part[0][0] != "tokenizer")
    for place, ((name, text), _) in enumerate(given):
        others = digest(*(part for _, whole in given[place:] for part in whole))
        if len(json.dumps({**kept, name: text, "and others": others})) > MOST_OF_PARTS:
            return {**kept, "and others": others}
        kept[name] = text
    return kept


def short(text: str, most: int) -> str:
    """A text of at most so many characters of JSON; what is cut ends in a hash of the whole."""
    if len(json.dumps(text)) - 2 <= most:
        return text
    kept = most - 20
    while kept > 0 and len(json.dumps(text[:kept])) - 2 > most - 20:
        kept -= 1
    return f"{text[: max(0, kept)]}... {digest(text)[:16]}" if kept > 0 else digest(text)[:16]


def plan_hash(parts: Mapping[str, str]) -> str:
    """One hash of all that decides the batches."""
    return digest(*(text for name in sorted(parts) for text in (name, parts[name])))


def batching_parts(
    batching: Batching, *, batch_size: int, max_tokens: int | None, batches_per_step: int, seed: int
) -> dict[str, str]:
    """What decides the cuts, by the names of the file. `max_tokens` is what auto has come to."""
    settings = batching.model_dump(mode="json")
    if settings.get("max_tokens", 0) in (None, "auto"):
        settings["max_tokens"] = max_tokens
    parts = {"batching": settings.pop("type")} | {f"batching.{name}": str(value) for name, value in settings.items()}
    if batching.type != "token_budget":
        parts["batch size"] = str(batch_size)
    return parts | {"batches a step": str(batches_per_step), "seed": str(seed)}
