"""Answer the new questions with the models of runs, and judge the answers by the rule.

python judge.py runs/first runs/config
"""

import json
import sys
from pathlib import Path

from make_questions import is_good, is_right

from partita import Model


def judge(run: str) -> dict[str, float]:
    """Return the share of good and of right answers of a run to the new questions, and their mean number of words."""
    rows = [json.loads(line) for line in Path("new_questions.jsonl").read_text(encoding="utf8").splitlines()]
    answers = Model.load(run, quiet=True).predict([{"question": row["question"]} for row in rows])
    judged = [(row["dish"], str(one["answer"])) for row, one in zip(rows, answers, strict=True)]
    return {
        "good": sum(is_good(dish, text) for dish, text in judged) / len(judged),
        "right": sum(is_right(dish, text) for dish, text in judged) / len(judged),
        "words": sum(len(text.split()) for _, text in judged) / len(judged),
    }


if __name__ == "__main__":
    for name in sys.argv[1:]:
        found = judge(name)
        print(f"{name}: good {found['good']:.1%}, right {found['right']:.1%}, {found['words']:.1f} words")
