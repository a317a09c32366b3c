"""Write dialogues with a state and an action for each turn.

    python make_dialogues.py [--sgd PATH] [FOLDER]

train.jsonl and test.jsonl: dialogues in the format `turns`, with `state` and `action` at each user message.

Without --sgd, they are short made-up dialogues about tables and taxis. With it, they are converted from the
Schema-Guided Dialogue dataset (Rastogi et al. 2020, CC BY-SA 4.0): PATH is a folder of the original, such as
`dstc8-schema-guided-dialogue/train`, or a .jsonl file with one dialogue per line whose turns have `speaker`, `text` and
`state`. The state of a turn has the slots of all services. Its action is the first dialogue act of the system's answer.
A .jsonl file without acts gets two coarse ones from the text of the answer: `ask` if it has a question mark, otherwise
`tell`.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Turn = dict[str, Any]
AREAS, FOODS, PLACES = ("north", "south", "west"), ("indian", "thai", "french"), ("airport", "station", "museum")
TIMES = ("at six", "at seven", "at nine")


def made_up(rng: random.Random) -> list[Turn]:
    """Return a dialogue about a table, a taxi or both; the state grows, and one value changes now and then."""
    turns: list[Turn] = []
    state: dict[str, str] = {}
    for service in rng.choice((("table",), ("taxi",), ("table", "taxi"))):
        slots = {"food": FOODS, "area": AREAS} if service == "table" else {"to": PLACES, "time": TIMES}
        (first, firsts), (second, seconds) = slots.items()
        state[f"{service}-{first}"] = rng.choice(firsts)
        turns += exchange(f"i need a {service} , {state[f'{service}-{first}']}", state, "ask", f"which {second} ?")
        state[f"{service}-{second}"] = rng.choice(seconds)
        turns += exchange(f"{state[f'{service}-{second}']} please", state, "confirm", "shall i book it ?")
        if rng.random() < 0.3:
            state[f"{service}-{first}"] = rng.choice(firsts)
            turns += exchange(f"no , {state[f'{service}-{first}']}", state, "confirm", "shall i book it ?")
        turns += exchange("yes", state, "tell", f"your {service} is booked")
    return turns


def exchange(question: str, state: dict[str, str], action: str, answer: str) -> list[Turn]:
    """Return a user message with the state after it and the system's next action, and the answer."""
    said = {"speaker": "user", "text": question, "state": dict(state), "action": action}
    return [said, {"speaker": "system", "text": answer}]


def shared(path: Path) -> Iterator[list[Turn]]:
    """Yield the dialogues of a .jsonl file, with an action from the text of each answer."""
    for line in path.read_text(encoding="utf8").splitlines():
        turns = json.loads(line)["turns"]
        for question, answer in zip(turns[::2], turns[1::2], strict=False):
            question["action"] = "ask" if "?" in answer["text"] else "tell"
        yield turns[: len(turns) // 2 * 2]


def original(folder: Path) -> Iterator[list[Turn]]:
    """Yield the dialogues of the original files, `dialogues_001.json` and so on."""
    for path in sorted(folder.glob("dialogues_*.json")):
        for dialogue in json.loads(path.read_text(encoding="utf8")):
            turns: list[Turn] = []
            state: dict[str, str] = {}
            for turn in dialogue["turns"]:
                if turn["speaker"] == "USER":
                    for frame in turn["frames"]:
                        values = frame["state"]["slot_values"].items()
                        state |= {f"{frame['service']}-{slot}": options[0] for slot, options in values}
                    turns.append({"speaker": "user", "text": turn["utterance"], "state": dict(state)})
                else:
                    acts = [action["act"].lower() for frame in turn["frames"] for action in frame["actions"]]
                    turns[-1]["action"] = acts[0]
                    turns.append({"speaker": "system", "text": turn["utterance"]})
            yield turns[: len(turns) // 2 * 2]


def write(folder: Path, *, sgd: Path | None = None) -> None:
    """Write four fifths of the dialogues to train.jsonl, the others to test.jsonl."""
    rng = random.Random(1)
    if sgd is None:
        dialogues = [made_up(rng) for _ in range(250)]
    else:
        dialogues = list(original(sgd) if sgd.is_dir() else shared(sgd))
        rng.shuffle(dialogues)
    border = len(dialogues) * 4 // 5
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", dialogues[:border]), ("test", dialogues[border:])):
        lines = (json.dumps({"turns": turns}, ensure_ascii=False) + "\n" for turns in part)
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write dialogues with a state and an action for each turn.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent)
    parser.add_argument("--sgd", type=Path, help="folder or .jsonl file of the Schema-Guided Dialogue dataset")
    arguments = parser.parse_args()
    write(arguments.folder, sgd=arguments.sgd)
