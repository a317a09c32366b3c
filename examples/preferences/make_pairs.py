"""Sample answers of the first model, and judge them by the rule: pairs.jsonl, and labelled.jsonl for kto.

    python make_pairs.py [RUN]

Each question is answered SAMPLES times. Its best and its worst answer become a pair, if the rule tells them apart: a
right answer is better than a wrong one, and of two right ones the shorter one. Empty answers are left out.
"""

import json
import sys
from pathlib import Path

from make_questions import is_good, is_right, write_lines

from partita import Model

SAMPLES = 4


def write(run: str = "runs/first", *, seed: int = 0, most: int | None = None) -> None:
    """Write both files from the questions of answers.jsonl, or from the first `most` of them."""
    lines = Path("answers.jsonl").read_text(encoding="utf8").splitlines()[:most]
    asked = [{key: json.loads(line)[key] for key in ("question", "dish")} for line in lines]
    model = Model.load(run, overrides=[f"seed={seed}"], quiet=True)
    answers = [row["answer"] for row in model.predict([row for row in asked for _ in range(SAMPLES)])]
    pairs, labelled = [], []
    for number, row in enumerate(asked):
        own = dict.fromkeys(text for text in answers[SAMPLES * number : SAMPLES * (number + 1)] if text)
        ranked = sorted(own, key=lambda text: rank(row["dish"], text))
        if ranked and rank(row["dish"], ranked[0]) != rank(row["dish"], ranked[-1]):
            pairs.append(row | {"chosen": ranked[0], "rejected": ranked[-1]})
        labelled += [row | {"answer": text, "good": is_good(row["dish"], text)} for text in own]
    write_lines(Path("pairs.jsonl"), pairs)
    write_lines(Path("labelled.jsonl"), labelled)
    print(f"{len(pairs)} pairs, {sum(row['good'] for row in labelled)} good answers of {len(labelled)}")


def rank(dish: str, text: str) -> tuple[bool, int]:
    """Return what sorts answers, the best one first. Lengths of wrong answers do not matter."""
    right = is_right(dish, text)
    return (not right, len(text.split()) if right else 0)


if __name__ == "__main__":
    write(*sys.argv[1:])
