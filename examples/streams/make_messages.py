"""Write messages to a shop and the teams that should answer them, as shards: many short chats and a few long letters.

    python make_messages.py [FOLDER]

chats/*.jsonl and letters/*.jsonl.gz are training data; held_out.jsonl has twenty other messages of each kind.
"""

import gzip
import json
import random
import sys
from pathlib import Path

TEAMS = {
    "billing": ("invoice", "refund", "payment", "credit card", "price", "discount"),
    "delivery": ("parcel", "courier", "shipment", "tracking number", "package", "address"),
    "technical": ("login", "app", "password", "error message", "update", "website"),
}
ASIDES = (
    "I have been a customer of yours for many years.",
    "My sister told me about your shop last summer.",
    "The lamp in the hall is a joy every evening.",
    "It rains a lot here, so we sit inside and read.",
    "I do not like to complain, you know that.",
)

Message = dict[str, str]


def make_chat(rng: random.Random) -> Message:
    """Return a short message."""
    team = rng.choice(tuple(TEAMS))
    thing = rng.choice(TEAMS[team])
    return {"message": rng.choice(("where is my {0}?", "help with the {0}", "{0} wrong!!")).format(thing), "team": team}


def make_letter(rng: random.Random) -> Message:
    """Return a message of two to seven sentences, all but one of which are about something else."""
    team = rng.choice(tuple(TEAMS))
    sentences = [rng.choice(ASIDES) for _ in range(rng.randint(1, 6))]
    sentences.insert(rng.randrange(len(sentences)), f"There is something wrong with my {rng.choice(TEAMS[team])}.")
    return {"message": " ".join(sentences), "team": team}


def write(folder: Path) -> None:
    """Write 2,000 chats in four shards, 200 letters in two, and the held-out messages."""
    rng = random.Random(5)
    for shard in range(4):
        write_lines(folder / "chats" / f"{shard}.jsonl", [make_chat(rng) for _ in range(500)])
    for shard in range(2):
        write_lines(folder / "letters" / f"{shard}.jsonl.gz", [make_letter(rng) for _ in range(100)])
    write_lines(folder / "held_out.jsonl", [make(rng) for make in (make_chat, make_letter) for _ in range(20)])


def write_lines(path: Path, rows: list[Message]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path())
