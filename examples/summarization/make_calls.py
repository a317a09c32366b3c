"""Write calls to a restaurant with their summaries: calls.jsonl to train on, and new_calls.jsonl to summarize."""

import json
import random
from pathlib import Path

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gita", "Hugo")
NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
SMALL_TALK = ("It rains a lot today.", "I was there last week.", "My sister likes your soup.", "The line is bad.")


def call(chance: random.Random) -> dict[str, str]:
    """Return a call, in which the guest may change the day, and its summary."""
    name, people, hour = chance.choice(NAMES), chance.choice(NUMBERS), chance.choice(NUMBERS)
    first, later = chance.sample(DAYS, 2)
    lines = [f"{name}: Hello, this is {name}. A table for {people}, please."]
    if chance.random() < 0.5:
        lines.append(f"{name}: {chance.choice(SMALL_TALK)}")
    lines += ["Desk: Which day?", f"{name}: On {first}."]
    full, changed = chance.random() < 0.2, chance.random() < 0.5
    if full:
        lines += [f"Desk: {first} is full.", f"{name}: Then {later}."]
    elif changed:
        lines += ["Desk: Good.", f"{name}: No, wait. {later} is better."]
    lines += ["Desk: At what time?", f"{name}: At {hour}.", "Desk: Thank you, see you then."]
    day = later if full or changed else first
    return {"call": "\n".join(lines), "summary": f"{name} books a table for {people} on {day} at {hour}."}


def write(folder: Path) -> None:
    """Write both files; no new call is among the others."""
    chance = random.Random(1)
    calls: dict[str, dict[str, str]] = {}
    while len(calls) < 1700:
        row = call(chance)
        calls[row["call"]] = row
    rows = list(calls.values())
    for name, part in (("calls.jsonl", rows[:1600]), ("new_calls.jsonl", rows[1600:])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (folder / name).write_text(text, encoding="utf8")


if __name__ == "__main__":
    write(Path())
