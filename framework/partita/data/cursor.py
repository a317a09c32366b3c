"""Where training stands in its data: a few numbers, and hashes of the plan that give them their meaning."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from partita.data.rows import digest
from partita_schema.errors import ResumeError

CURSOR_VERSION = 1


@dataclass(frozen=True)
class Cursor:
    """A position: the next step to be taken."""

    parts: Mapping[str, str]
    """What the plan is made of, by names that a person knows: files, tokenizer, seed ..."""
    epoch: int = 0
    step: int = 0
    """Step in the epoch."""

    def to_json(self) -> dict[str, Any]:
        """The position as JSON."""
        return {"version": CURSOR_VERSION, "plan_hash": plan_hash(self.parts), **asdict(self)}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "Cursor":
        """A position read back. Raises ResumeError where it is none, or of a newer version."""
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
        return cls(parts, epoch, step)

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


def plan_hash(parts: Mapping[str, str]) -> str:
    """One hash of all that decides the batches."""
    return digest(*(text for name in sorted(parts) for text in (name, parts[name])))
