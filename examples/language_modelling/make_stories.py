"""Write short stories of a small vocabulary, as documents of very different lengths.

    python make_stories.py [FOLDER]

stories.jsonl holds 1,500 stories of two to forty sentences.
"""

import json
import random
import sys
from pathlib import Path

HEROES = ("the fox", "the baker", "a small robot", "the old captain", "a girl named Ida")
PLACES = ("in the forest", "by the sea", "at the market", "on a hill", "under the bridge")
THINGS = ("a silver key", "a broken clock", "a letter", "a lantern", "a map of the moon")
SENTENCES = (
    "{hero} found {thing} {place}.",
    "{hero} walked all day and slept {place}.",
    "It rained {place}, and {hero} waited.",
    "Nobody knew who had lost {thing}.",
    "In the evening {hero} came home with {thing}.",
)


def make_story(rng: random.Random) -> str:
    """Return a story about one hero and one thing."""
    words = {"hero": rng.choice(HEROES), "thing": rng.choice(THINGS)}
    count = rng.choice((2, 3, 5, 8, 40))
    sentences = (rng.choice(SENTENCES).format(place=rng.choice(PLACES), **words) for _ in range(count))
    return " ".join(sentence[0].upper() + sentence[1:] for sentence in sentences)


def write(folder: Path, *, count: int = 1500) -> None:
    """Write the stories."""
    rng = random.Random(7)
    lines = (json.dumps({"text": make_story(rng)}) + "\n" for _ in range(count))
    (folder / "stories.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path())
