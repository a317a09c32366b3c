"""A booking desk: an environment that plays the guest, and a checker that makes the guest repeat what is wrong.

A guest wants five things, says them over two to four turns, changes one of them in three of ten dialogues, and then
says "book". Each value is lost in transmission with probability 0.10. The desk answers each turn with the whole
booking. It cannot know a lost value in that turn, but it can after the guest has repeated it.
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
    """Return the word of a value, such as day7."""
    return f"{slot}{number}"


def written(booking: Mapping[str, int]) -> str:
    """Return a booking as the desk writes it: all slots in order, `-` for a slot without a value."""
    return " ".join(value(slot, booking[slot]) if slot in booking else "-" for slot in SLOTS)


def heard(slot: str, number: int, line: random.Random) -> str:
    """Return the word of a value as the desk receives it, or LOST."""
    return LOST if line.random() < NOISE else value(slot, number)


def said(wishes: Mapping[str, int], line: random.Random) -> str:
    """Return a message with wishes as the desk receives it."""
    return " , ".join(f"{slot} {heard(slot, number, line)}" for slot, number in wishes.items())


def wishes_of(seed: int | str) -> Iterator[tuple[str, Booking]]:
    """Yield the messages of a guest, each with the right booking after it; the last booking is the goal."""
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
    """An environment that says the wishes of a guest, independent of the answers."""

    def reset(self, *, seed: int, task: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the first message, with the right booking as `gold`."""
        self.turns = list(wishes_of(seed))
        return self.next()

    def step(self, action: str) -> tuple[str, float | None, bool, bool, dict[str, Any]]:
        """Return the next message; the dialogue ends after "book"."""
        if not self.turns:
            return "", None, True, False, {}
        text, info = self.next()
        return text, None, False, False, info

    def next(self) -> tuple[str, dict[str, Any]]:
        """Return the next message of the guest."""
        text, booking = self.turns.pop(0)
        return text, {"gold": written(booking)}

    def close(self) -> None:
        """Do nothing: the environment holds no resources."""


class Desk:
    """A checker that compares the last booking with the goal and makes the guest repeat what is wrong."""

    def check(self, dialogue: Any) -> Verdict:
        """Check that the last booking is the goal. The feedback repeats wrong slots, and values can be lost again."""
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
