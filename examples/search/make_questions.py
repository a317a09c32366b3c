"""Write questions to a shop with the passages that answer them, and the items that they are about."""

import json
import random
from pathlib import Path

ITEMS = ("lamp", "office chair", "rain jacket", "kettle", "bread knife", "desk", "bicycle pump", "wool scarf", "tent")
INTENTS = {
    "Returns: a {item} can be sent back within 30 days, if it is unused.": (
        "How do I send back the {item}?",
        "I do not want my {item} any more, what now?",
        "The {item} is not what I wanted. Can I return it?",
    ),
    "Delivery: a {item} arrives two to four days after the order.": (
        "When will my {item} be here?",
        "How long does shipping of a {item} take?",
        "Still no {item}, and I ordered it on Monday!",
    ),
    "Warranty: we repair or replace a broken {item} for two years.": (
        "My {item} stopped working after a month.",
        "The {item} came with a crack, what can I do?",
        "Who fixes a {item} that fell apart?",
    ),
    "Price: a {item} that costs less elsewhere is refunded the difference.": (
        "I saw the same {item} cheaper in another shop.",
        "Can you match the price of a {item}?",
        "Is there a discount on the {item}?",
    ),
}


def write(folder: Path, *, count: int = 400, seed: int = 1) -> None:
    """Write pairs.jsonl and new_pairs.jsonl."""
    dice = random.Random(seed)
    for name, rows in (("pairs", count), ("new_pairs", count // 10)):
        lines = [json.dumps(make_pair(dice)) for _ in range(rows)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf8")


def make_pair(dice: random.Random) -> dict[str, object]:
    """Return a question with its passage, and the item in the question as a span of characters."""
    passage, questions = dice.choice(list(INTENTS.items()))
    item, question = dice.choice(ITEMS), dice.choice(questions)
    start = question.index("{item}")
    spans = [{"start": start, "end": start + len(item), "label": "ITEM"}]
    return {"question": question.format(item=item), "passage": passage.format(item=item), "items": spans}


if __name__ == "__main__":
    write(Path(__file__).parent)
