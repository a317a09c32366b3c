"""Dialogues: selection of rows, and their contents."""

from typing import Any

from .bases import FINETUNE, SEEN
from .effects import Flip, Group
from .observers import Config, resuming, training

TALK: Config = SEEN | {
    "input_features": [{"name": "messages", "type": "dialogue"}],
    "data": {
        "source": "odd-talks.jsonl",
        "batching": {"type": "fixed", "shuffle": False},
        "max_bad_rows": 30,
        "dialogue": {"mode": "squash"},
    },
}
SAID = {"input_features": [{"name": "messages", "type": "dialogue", "column": "messages"}]}


TURNS: Config = {
    "base_model": {"type": "scratch", "size": "nano", "tokenizer": "byte", "context_length": 512},
    "output_features": [
        {"name": "state", "type": "json"},
        {"name": "answer", "type": "text", "column": "content"},
    ],
    "data": {"source": "turns.jsonl", "max_bad_rows": 0, "dialogue": {"answers": "in_sequence"}},
}
"""Two outputs for each turn, which are answered one after the other."""
STREAM: Config = {
    "data": {
        "source": {
            "type": "custom",
            "target": "programs_of_effects:Counted",
            "options": {"count": 80},
            "streaming": True,
        },
        "split": None,
        "batching": {"type": "bucket", "window": 4},
        "loader": {"workers": 1, "prefetch": 2},
    },
    "trainer": {"options": {"steps": 2}},
}


def loader(**keys: Any) -> Config:
    return {"data": {"loader": keys, "formatter": "programs_of_effects:Worker"}}


def dialogue(keys: dict[str, Any]) -> dict[str, Any]:
    return {f"data.dialogue.{key}": value for key, value in keys.items()}


DIALOGUES = [
    Group(
        "dialogues",
        training,
        TALK,
        "batches",
        {
            **dialogue(
                {
                    "mode": "last_turn",
                    "format": Flip("sharegpt", part="refusal", given={"data": {"max_bad_rows": 0.9}}),
                    "ignore_keys": ["id"],
                    "columns": {"messages": "other"},
                    "include_labels": False,
                    "context_length": 1,
                    "context_turns": 1,
                    "context_tokens": 4,
                    "labels": Flip("all", given={"data": {"source": {"type": "parlai", "path": "parlai.txt"}}}),
                    "answers": Flip("together", given=TURNS),
                    "questions": Flip({"answer": "more"}, given=TURNS),
                    "include_outputs": Flip(["answer"], given=TURNS),
                    "delimiter": " more ",
                    "speakers.system": "box",
                    "speakers.user": "box",
                    "speakers.assistant": "box",
                    "speakers.tool": "box",
                }
            ),
            "input_features[dialogue].name": Flip(
                "talk", given={"input_features": [{"name": "messages", "type": "dialogue"}]}, part="left out"
            ),
            "input_features[dialogue].column": Flip("other", given=SAID),
            "input_features[dialogue].type": Flip({"name": "messages", "type": "text"}, part="refusal"),
        },
    ),
    Group(
        "loading",
        training,
        SEEN,
        "batches",
        {
            "data.loader.workers": Flip(1, given=loader(), also=loader(start_method="fork")),
            "data.loader.start_method": Flip("spawn", given=loader(workers=1, start_method="fork")),
            "data.loader.prefetch": Flip(4, given=STREAM, part="read"),
            "data.loader.timeout": Flip(
                0.2, given={"data": {"loader": {"workers": 1}, "formatter": "programs_of_effects:Slow"}}, part="refusal"
            ),
        },
        long=True,
    ),
    Group(
        "resuming",
        resuming,
        FINETUNE,
        "plan",
        {"data.resume": Flip("fresh", given={"data": {"source": "changing.jsonl", "resume": "restart_epoch"}})},
        long=True,
    ),
]
