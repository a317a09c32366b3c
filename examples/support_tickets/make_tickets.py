"""Write messages to a shop and the teams that should answer them: tickets.csv and new_tickets.csv.

    python make_tickets.py [FOLDER]

No message of new_tickets.csv is in tickets.csv.
"""

import csv
import random
import sys
from pathlib import Path

TOPICS = {
    "billing": ("invoice", "refund", "payment", "credit card", "price", "discount"),
    "delivery": ("parcel", "courier", "shipment", "tracking number", "package", "address"),
    "technical": ("login", "app", "password", "error message", "update", "website"),
}
OPENINGS = ("Hello,", "Hi team,", "Good morning,", "Sorry to bother you,", "Hey,")
SENTENCES = (
    "I have a question about my {thing}.",
    "there is a problem with the {thing}.",
    "the {thing} is not what I expected.",
    "could somebody look at my {thing}?",
    "I am still waiting for news about the {thing}.",
    "what happened to the {thing} of last week?",
)
ENDINGS = ("Thanks!", "Best regards, Ana", "Please answer soon.", "It is urgent.", "")


def make_rows(count: int, *, seed: int) -> list[tuple[str, str]]:
    """Return `count` different messages with their teams, in random order."""
    rng = random.Random(seed)
    rows: dict[str, str] = {}
    while len(rows) < count:
        team = rng.choice(tuple(TOPICS))
        sentence = rng.choice(SENTENCES).format(thing=rng.choice(TOPICS[team]))
        rows[f"{rng.choice(OPENINGS)} {sentence} {rng.choice(ENDINGS)}".strip()] = team
    return list(rows.items())


def write(folder: Path, *, rows: int = 400, new: int = 50) -> None:
    """Write both files into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tickets = make_rows(rows + new, seed=0)
    for name, part in (("tickets.csv", tickets[:rows]), ("new_tickets.csv", tickets[rows:])):
        with (folder / name).open("w", newline="", encoding="utf8") as file:
            csv.writer(file).writerows([("message", "team"), *part])


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path())
