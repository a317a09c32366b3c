"""The dialogues that `rollout.py` measures: a program to talk with, and a model whose answers survive their text."""

import json
import random
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NEW_TOKENS = 24
"""Of an answer, at most."""


class Guide:
    """A program that talks: how often, and what, follows from the task and from what it hears."""

    def __init__(self, folder: str) -> None:
        self.texts = texts_of(folder)

    def reset(self, *, seed: int, task: Mapping[str, Any]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        """What the model is, and the first words; `seed` has no part, for the loop has none."""
        self.chance = random.Random(task["number"])
        self.turns = min(10, 2 + int(self.chance.expovariate(0.5)))
        system = {"role": "system", "content": " ".join(self.texts[0][:40])}
        return [system, {"role": "user", "content": self.words("")}], {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """The next words."""
        self.turns -= 1
        return self.words(action), float(len(action)), not self.turns, False, {}

    def words(self, heard: str) -> str:
        """Some of a text, and a number that another answer would change."""
        text = self.chance.choice(self.texts)
        start, count = self.chance.randrange(len(text)), self.chance.randint(8, 30)
        return " ".join([str(zlib.crc32(heard.encode()) % 1000), *text[start : start + count]])

    def close(self) -> None:
        """Nothing is held."""


KNOWN: dict[str, list[list[str]]] = {}
"""Words of texts, by folder."""


def texts_of(folder: str) -> list[list[str]]:
    """Words of real texts, read once."""
    if folder not in KNOWN:
        lines = Path(folder, "rows.jsonl").read_text(encoding="utf8").splitlines()
        KNOWN[folder] = [words for line in lines if len(words := json.loads(line)["prompt"].split()) > 40]
    return KNOWN[folder]


class Workload:
    """The model in a folder, and what is told of dialogues with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "talker"
        if not self.path.exists():
            make_talker(folder / "tiny", self.path)
        self.theirs: Any = None
        self.models: dict[int, Any] = {}

    def ours(self, count: int) -> Any:
        """What has so many dialogues; read once."""
        from partita import Model

        if count in self.models:
            return self.models[count]
        config = {
            "base_model": str(self.path),
            "input_features": [{"name": "messages", "type": "dialogue"}],
            "output_features": [{"name": "reply", "type": "text"}],
            "generation": {"max_new_tokens": NEW_TOKENS},
            "trainer": {"type": "none"},
            "simulation": {
                "world": {
                    "type": "environment",
                    "environment": "workloads_rollout:Guide",
                    "options": {"folder": str(self.folder)},
                },
                "tasks": {"count": count},
            },
        }
        self.models[count] = Model(config, quiet=True)
        return self.models[count]

    def module(self, kind: str, count: int) -> Any:
        """What a contender answers so many dialogues with; all have the same weights."""
        from transformers import AutoModelForCausalLM

        if kind == "partita":
            return self.ours(count)._backend.parts().lm.module
        if self.theirs is None:
            self.theirs = AutoModelForCausalLM.from_pretrained(self.path, dtype="float32").eval()
        return self.theirs


def make_talker(source: Path, target: Path) -> None:
    """A model that only says words, each a token that is found again in its text, and ends after some of them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    silent = [token for text, token in tokenizer.get_vocab().items() if not (text[0] == "Ġ" and text[1:].isalpha())]
    with torch.no_grad():
        weight = model.get_output_embeddings().weight
        ending = 2 * weight[tokenizer.eos_token_id]
        weight[silent] = 0
        weight[tokenizer.eos_token_id] = ending
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
