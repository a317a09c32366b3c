"""A booking desk with a bad line: a guest who says what to book, and a checker who has the guest repeat it.

A guest wants five things, says them over two to four turns, changes their mind about one in three dialogues out of ten,
and then says "book". The line is bad: each value that is said is lost with probability 0.10. The desk answers each turn
with the whole booking. What was lost nobody can know at that turn; a desk that is told again can.
"""

import random
from collections.abc import Iterator, Mapping
from typing import Any

from partita.simulation import Verdict

SLOTS = ("food", "area", "day", "time", "agents")
VALUES = 12
LOST = "..."
NOISE = 0.10
CHANGES = 0.30

Booking = dict[str, int]


def value(slot: str, number: int) -> str:
    """The word of a value, such as day7."""
    return f"{slot}{number}"


def written(booking: Mapping[str, int]) -> str:
    """A booking as the desk writes it: all slots in their order, `-` where nothing was said yet."""
    return " ".join(value(slot, booking[slot]) if slot in booking else "-" for slot in SLOTS)


def heard(slot: str, number: int, line: random.Random) -> str:
    """The word of a value as it comes through the line."""
    return LOST if line.random() < NOISE else value(slot, number)


def said(wishes: Mapping[str, int], line: random.Random) -> str:
    """Wishes as they come through the line."""
    return " , ".join(f"{slot} {heard(slot, number, line)}" for slot, number in wishes.items())


def wishes_of(seed: int | str) -> Iterator[tuple[str, Booking]]:
    """What a guest says turn by turn, each with the right booking behind it; the last one is the goal."""
    line = random.Random(seed)
    slots = line.sample(SLOTS, len(SLOTS))
    turns = line.randint(2, 4)
    cuts = sorted(line.sample(range(1, len(SLOTS)), turns - 1))
    booking: Booking = {}
    for start, end in zip([0, *cuts], [*cuts, len(SLOTS)], strict=True):
        wishes = {slot: line.randrange(VALUES) for slot in slots[start:end]}
        booking |= wishes
        yield said(wishes, line), dict(booking)
    if line.random() < CHANGES:
        slot = line.choice(SLOTS)
        other = {slot: line.choice([n for n in range(VALUES) if n != booking[slot]])}
        booking |= other
        yield "no , " + said(other, line), dict(booking)
    yield "book", dict(booking)


class Guest:
    """Says its wishes whatever the desk answers."""

    def reset(self, *, seed: int, task: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """The first wishes, with the right booking beside them."""
        self.turns = list(wishes_of(seed))
        return self.next()

    def step(self, action: str) -> tuple[str, float | None, bool, bool, dict[str, Any]]:
        """The next wishes; behind "book" nothing more."""
        if not self.turns:
            return "", None, True, False, {}
        text, info = self.next()
        return text, None, False, False, info

    def next(self) -> tuple[str, dict[str, Any]]:
        """A turn of the guest."""
        text, booking = self.turns.pop(0)
        return text, {"gold": written(booking)}

    def close(self) -> None:
        """The guest leaves."""


class Desk:
    """Compares the last booking with what the guest wants, and has the guest repeat what is wrong."""

    def check(self, dialogue: Any) -> Verdict:
        """Right if the last booking is the goal. The guest repeats wrong slots over the same bad line."""
        goal = list(wishes_of(dialogue.seed))[-1][1]
        booked = [*dialogue.replies[-1].text.split(), *"-----"][: len(SLOTS)]
        line = random.Random(f"{dialogue.seed} repair {dialogue.rounds}")
        repairs = [
            f"not {wrong} but {heard(slot, goal[slot], line)}"
            for slot, wrong in zip(SLOTS, booked, strict=True)
            if wrong != value(slot, goal[slot])
        ]
        right = dialogue.replies[-1].text.strip() == written(goal)
        return Verdict(ok=right, feedback=" , ".join(repairs), target=written(goal))
