"""Dialogue states of the Schema-Guided Dialogues, with the right states of before in view and with the model's own.

A pretrained model of 260,000 parameters learns, from four fifths of 384 dialogues, to write the whole state after each
turn of the user: `squash`, with the state before and what was said since in view. The others are had again by `replay`,
once with gold and once with predicted history. A state counts if all of it is right (joint goal accuracy). Beside it
stand two answers that need no model: the right state before, written again, and the empty state.
"""

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import SHARED, Limit, about, parse_arguments, report

DIALOGUES = SHARED / "data" / "sgd" / "dialogues.jsonl"
MODEL = SHARED / "models" / "stories260k"
EMPTY = "none"
EPOCHS = 4
Row = dict[str, Any]


def main() -> None:
    arguments = parse_arguments(__doc__ or "")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        held_out = write(folder, every=8 if arguments.quick else 1)
        trained, had = learn_and_replay(folder, epochs=1 if arguments.quick else EPOCHS)
        first = {history: first_answers(folder / "said" / f"{history}.jsonl") for history in ("gold", "predicted")}
    plain = without_a_model(held_out)
    table = [
        {
            "turn": str(turn),
            "states": n,
            "gold history": round(had["gold"][turn], 3),
            "predicted history": round(had["predicted"][turn], 3),
            "state before, again": round(before, 3),
            "empty state": round(empty, 3),
        }
        for turn, (n, before, empty) in plain.items()
    ]
    table.append(total(table) | trained)
    limits = [
        Limit("dialogues whose first state is another one, with nothing before it", different(**first), 0, "max"),
        Limit("exact states, gold history", table[-1]["gold history"], table[-1]["empty state"], "min"),
        Limit("exact states, predicted history", table[-1]["predicted history"], table[-1]["empty state"], "min"),
        Limit("CPU seconds of training", trained["train CPU s"], 300, "max"),
    ]
    report("dialogue_state", table, limits, arguments=arguments, about=about(__doc__))


def write(folder: Path, *, every: int) -> list[list[str]]:
    """Rows to learn, to validate on and to hold out, in files; the states of those held out, by dialogue."""
    files: dict[str, list[Row]] = defaultdict(list)
    with DIALOGUES.open(encoding="utf8") as lines:
        for number, line in enumerate(lines):
            part = "test" if number % 5 == 0 else "validation" if number % 20 == 1 else "train"
            if number // 5 % every == 0:
                files[part].append({"messages": list(messages(json.loads(line)))})
    for part, rows in files.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{part}.jsonl").write_text(text, encoding="utf8")
    return [[message["content"] for message in row["messages"][1::2]] for row in files["test"]]


def messages(dialogue: Row) -> Iterator[Row]:
    """What the system and the user say, and the state as the answer to it."""
    heard = ""
    for turn in dialogue["turns"]:
        if turn["speaker"] == "system":
            heard = f"{turn['text']} "
            continue
        yield {"role": "user", "content": f"{heard}User: {turn['text']}"}
        yield {"role": "assistant", "content": state_text(turn["state"])}
        heard = ""


def state_text(state: dict[str, str]) -> str:
    """A state as one text, its slots by name, without the service that all of them belong to."""
    slots = sorted((name.partition("-")[2].replace("_", " "), value) for name, value in state.items())
    return "; ".join(f"{name}={value}" for name, value in slots) or EMPTY


def settings() -> Row:
    return {
        "base_model": str(MODEL),
        "input_features": [{"name": "messages", "type": "dialogue"}],
        "output_features": [{"name": "state", "type": "text"}],
        "generation": {"max_new_tokens": 160},
        "data": {
            "source": "train.jsonl",
            "validation": "validation.jsonl",
            "test": "test.jsonl",
            "dialogue": {
                "mode": "squash",
                "context_length": 2,
                "speakers": {"user": "", "assistant": "State: "},
            },
            "batching": {"type": "bucket"},
        },
        "trainer": {
            "type": "finetune",
            "epochs": EPOCHS,
            "batch_size": 8,
            "learning_rate": 0.003,
            "evaluate_generated": False,
        },
        "simulation": {"world": {"type": "replay"}, "history": ["gold", "predicted"]},
    }


def learn_and_replay(folder: Path, *, epochs: int) -> tuple[Row, dict[str, dict[int, float]]]:
    """Seconds of both, and the share of exact states by history and turn."""
    from partita import Model

    (folder / "state.yaml").write_text(json.dumps(settings()), encoding="utf8")
    started = time.process_time()
    model = Model(folder / "state.yaml", overrides=[f"trainer.epochs={epochs}"])
    result = model.train(run=folder / "run")
    learned = time.process_time()
    found = model.simulate(folder / "said")
    seconds = {"train CPU s": round(learned - started), "replay CPU s": round(time.process_time() - learned)}
    shares = {
        history: {turn: mean.mean for turn, mean in outcomes.by_turn.items()}
        for history, outcomes in found.histories.items()
    }
    return {"steps": result.steps, **seconds}, shares


def without_a_model(held_out: list[list[str]]) -> dict[int, tuple[int, float, float]]:
    """By turn: states, and the shares that are those of the turn before, and that are empty."""
    turns: dict[int, list[tuple[bool, bool]]] = defaultdict(list)
    for states in held_out:
        for turn, (before, state) in enumerate(zip([EMPTY, *states], states, strict=False), start=1):
            turns[turn].append((before == state, state == EMPTY))
    return {
        turn: (len(found), sum(same for same, _ in found) / len(found), sum(empty for _, empty in found) / len(found))
        for turn, found in sorted(turns.items())
    }


def total(table: list[Row]) -> Row:
    """All turns, each state once."""
    states = sum(row["states"] for row in table)
    shares = {name: sum(row[name] * row["states"] for row in table) / states for name in list(table[0])[2:]}
    return {"turn": "all", "states": states} | {name: round(share, 3) for name, share in shares.items()}


def first_answers(path: Path) -> list[str]:
    """The model's first state of each dialogue."""
    with path.open(encoding="utf8") as lines:
        return [json.loads(line)["messages"][1]["content"] for line in lines]


def different(*, gold: list[str], predicted: list[str]) -> int:
    """Places at which both differ."""
    return sum(one != other for one, other in zip(gold, predicted, strict=True))


if __name__ == "__main__":
    main()
