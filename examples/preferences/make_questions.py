"""Write questions about the menu of a cafe: answers.jsonl for the first training, and new_questions.jsonl to test on.

The answers of the first training are as people at the counter give them: of any length, and sometimes with a wrong
price. `is_good` is the rule that the second training should teach: the right price, in at most three words.
"""

import json
import random
import re
from itertools import product
from pathlib import Path

DISHES = ("soup", "salad", "bread", "tea", "coffee", "juice", "cake", "toast", "pasta", "curry", "pie", "ice")
PRICES = dict(zip(DISHES, (4, 6, 2, 3, 5, 7, 9, 8, 12, 11, 10, 1), strict=True))
GREETINGS = ("", "Hello!", "Good morning!", "Hi there!", "Excuse me!", "Sorry!")
QUESTIONS = (
    "How much is the {}?",
    "What does the {} cost?",
    "What is the price of the {}?",
    "What do you want for the {}?",
    "Can you tell me the price of the {}?",
    "How many euros is the {}?",
    "The {}, how much is it?",
    "I would like the {}. What is it?",
    "What would I pay for the {}?",
    "Is the {} expensive?",
)
ANSWERS = {
    "{price} euros.": 2,
    "The {dish} is {price} euros.": 3,
    "The {dish} is {price} euros, and we make it every day.": 3,
    "Thank you for the question, the {dish} is {price} euros today, and people like it a lot.": 2,
}
"""Answers, with how often each is given."""
WRONG = 0.2
"""Share of answers with a wrong price."""
MAX_WORDS = 3


def questions() -> list[dict[str, str]]:
    """Return all questions in random order, each with its dish."""
    found = [
        {"question": f"{greeting} {question.format(dish)}".strip(), "dish": dish}
        for greeting, question, dish in product(GREETINGS, QUESTIONS, DISHES)
    ]
    random.Random(1).shuffle(found)
    return found


def answer(dish: str, chance: random.Random) -> str:
    """Return an answer as it is given at the counter."""
    [text] = chance.choices(list(ANSWERS), weights=list(ANSWERS.values()))
    price = chance.choice(list(PRICES.values())) if chance.random() < WRONG else PRICES[dish]
    return text.format(dish=dish, price=price)


def is_right(dish: str, text: str) -> bool:
    """Return whether an answer names the price of a dish, and no other number."""
    return re.findall(r"\d+", text) == [str(PRICES[dish])]


def is_good(dish: str, text: str) -> bool:
    """Return whether an answer names the price of a dish in at most MAX_WORDS words."""
    return is_right(dish, text) and len(text.split()) <= MAX_WORDS


def write_lines(path: Path, rows: list[dict[str, object]]) -> None:
    """Write a JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")


def write(folder: Path, *, test: int = 120) -> None:
    """Write both files; no new question is among the others."""
    chance, found = random.Random(2), questions()
    learned = [row | {"answer": answer(row["dish"], chance)} for row in found[test:]]
    write_lines(folder / "answers.jsonl", learned)
    expected = [row | {"answer": f"{PRICES[row['dish']]} euros."} for row in found[:test]]
    write_lines(folder / "new_questions.jsonl", expected)


if __name__ == "__main__":
    write(Path())
