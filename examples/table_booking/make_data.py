"""Write sentences that book a table, with the fields of the booking: train.jsonl and test.jsonl.

    python make_data.py FOLDER [--rows 6000] [--seed 1]

Training and test rows share neither a sentence nor a booking (guests, day, time and name together).
"""

import argparse
import json
import random
from pathlib import Path

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
NAMES = (
    "Alba", "Bruno", "Carla", "Dario", "Elena", "Fabio", "Gilda", "Hugo", "Irene", "Jonas",
    "Karin", "Luca", "Marta", "Nadia", "Oscar", "Paula", "Quirin", "Rosa", "Sofia", "Tomas",
    "Ulla", "Viola", "Walter", "Yara", "Zeno",
)  # fmt: skip
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
SENTENCES = (
    "A table for {guests} on {day} at {time}, please. The name is {name}.",
    "Hello, this is {name}. Do you have room for {guests} {people} on {day} around {time}?",
    "Could I book for {day} at {time}? We are {guests}. {name}.",
    "{name} here, we would like to come on {day}, {guests} of us, at {time}.",
    "Please put {name} down for {guests} {people}, {day}, {time}.",
    "I need a table at {time} on {day} for {guests} under the name {name}.",
    "It is {guests} {people} this {day} at {time}, and my name is {name}, thank you.",
    "On {day} we are {guests}. Is {time} fine? It is for {name}.",
    "Hi! {guests} {people}, {time}, {day}. Regards, {name}",
    "We come at {time} on {day}, not later. A party of {guests}, booked by {name}.",
)


def spoken_time(hour: int, minute: int, rng: random.Random) -> str:
    """Return a time in one of the ways that people say it."""
    twelve = hour - 12
    if minute == 0:
        return rng.choice((f"{hour}:00", f"{twelve} pm", f"{NUMBERS[twelve - 1]} o'clock"))
    if minute == 30:
        return rng.choice((f"{hour}:30", f"{twelve}:30 pm", f"half past {NUMBERS[twelve - 1]}"))
    return rng.choice((f"{hour}:15", f"{twelve}:15 pm", f"quarter past {NUMBERS[twelve - 1]}"))


def booking(rng: random.Random) -> dict[str, object]:
    """Return a booking with a sentence that asks for it."""
    guests, day, name = rng.randint(1, 10), rng.choice(DAYS), rng.choice(NAMES)
    hour, minute = rng.randint(17, 21), rng.choice((0, 15, 30))
    sentence = rng.choice(SENTENCES).format(
        guests=rng.choice((str(guests), NUMBERS[guests - 1])),
        people=rng.choice(("people", "guests", "persons")),
        day=rng.choice((day, day.lower())),
        time=spoken_time(hour, minute, rng),
        name=name,
    )
    return {"request": sentence, "guests": guests, "day": day.lower(), "time": f"{hour}:{minute:02}", "name": name}


def make_rows(count: int, *, seed: int, test: int = 400) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Return training and test rows that share neither a sentence nor a booking."""
    rng = random.Random(seed)
    held_out: dict[tuple[object, ...], dict[str, object]] = {}
    while len(held_out) < test:
        row = booking(rng)
        held_out[meaning(row)] = row
    train: dict[object, dict[str, object]] = {}
    while len(train) < count:
        row = booking(rng)
        if meaning(row) not in held_out:
            train[row["request"]] = row
    return list(train.values()), list(held_out.values())


def meaning(row: dict[str, object]) -> tuple[object, ...]:
    return tuple(row[key] for key in ("guests", "day", "time", "name"))


def write(folder: Path, *, rows: int, seed: int) -> None:
    """Write both files into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in zip(("train", "test"), make_rows(rows, seed=seed), strict=True):
        text = "".join(json.dumps(row) + "\n" for row in table)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    write(arguments.folder, rows=arguments.rows, seed=arguments.seed)
