"""Write chats with a waiter.

    python make_chats.py [FOLDER]

chats.jsonl: training chats.
chats.parlai: the same chats in ParlAI's format.
open_chats.jsonl: chats without their last answer.
guests.jsonl: the training chats from the guest's point of view.
orders.jsonl: orders for the prompts of guests.

The last answer of a chat names the order at its beginning, so it depends on the whole chat.
"""

import json
import random
import sys
from pathlib import Path

DRINKS = ("coffees", "teas", "juices", "beers", "waters")
NUMBERS = ("two", "three", "four")

Message = dict[str, str]


def make_chat(rng: random.Random) -> list[Message]:
    """Return a chat: the guest orders, sometimes talks about the weather, and pays."""
    order = f"{rng.choice(NUMBERS)} {rng.choice(DRINKS)}"
    said = [f"I take {order}", f"here are {order}"]
    if rng.random() < 0.5:
        said += ["nice weather", "the sun is out"]
    said += ["the bill please", f"that was {order}"]
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(said)]


def parlai_text(chat: list[Message]) -> str:
    """Return an episode in ParlAI's format: one line for each question and its answer."""
    pairs = list(zip(chat[::2], chat[1::2], strict=True))
    lines = [f"text:{question['content']}\tlabels:{answer['content']}" for question, answer in pairs]
    return "\n".join(lines) + "\tepisode_done:True\n"


def as_guest(chat: list[Message]) -> list[Message]:
    """Return the chat from the guest's point of view: the system message is the order, and the waiter starts."""
    order = chat[0]["content"].removeprefix("I take ")
    said = ["the sun is out", *(message["content"] for message in chat), "bye"]
    turns = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(said)]
    return [{"role": "system", "content": order}, *turns]


def write(folder: Path) -> None:
    """Write 400 chats to three files, 20 others without their last answer, and 60 orders."""
    rng = random.Random(7)
    chats = [make_chat(rng) for _ in range(420)]
    write_lines(folder / "chats.jsonl", chats[:400])
    write_lines(folder / "open_chats.jsonl", [chat[:-1] for chat in chats[400:]])
    write_lines(folder / "guests.jsonl", [as_guest(chat) for chat in chats[:400]])
    orders = [f"{number} {drink}" for number in NUMBERS for drink in DRINKS]
    (folder / "orders.jsonl").write_text("".join(json.dumps({"order": order}) + "\n" for order in orders * 4))
    (folder / "chats.parlai").write_text("".join(map(parlai_text, chats[:400])), encoding="utf8")


def write_lines(path: Path, chats: list[list[Message]]) -> None:
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats), encoding="utf8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path())
