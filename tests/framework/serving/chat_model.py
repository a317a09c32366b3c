"""A small model with a chat template, whose answers are random words."""

import random
from pathlib import Path
from typing import Any

import yaml

from partita import Model
from partita.tokenizers.load import read_tokenizer
from partita_trainers.checkpoints.file_sums import FILE as SUMS

WORDS = ("red", "blue", "green", "white", "one", "two", "three", "what", "colour", "is", "it", "be", "short")
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% if m['role'] == 'assistant' %}</s>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def chat_config(**sections: Any) -> dict[str, Any]:
    """Return a configuration of dialogues; `sections` replace those of the same name."""
    config: dict[str, Any] = {
        "base_model": {
            "type": "scratch",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "context_length": 2048,
            "tokenizer": "byte",
        },
        "input_features": [{"name": "messages", "type": "dialogue"}],
        "output_features": [{"name": "reply", "type": "text"}],
        "generation": {"max_new_tokens": 12, "min_new_tokens": 3},
        "trainer": {"type": "none"},
    }
    return config | sections


def write_chat_model(folder: Path, **sections: Any) -> Path:
    """Write the model and `chat.yaml`, a configuration that uses it, and return that file."""
    rng = random.Random(1)
    texts = [" ".join(rng.choices(WORDS, k=5)) for _ in range(40)]
    roles = "system: red\nuser: red\nassistant: red\n"
    rows = [
        {"messages": [{"role": "user", "content": roles + one}, {"role": "assistant", "content": one}]} for one in texts
    ]
    split = {"type": "random", "probabilities": [1.0, 0.0, 0.0]}
    data = {"dialogue": {"speakers": {"user": "", "assistant": " "}}, "split": split}
    trainer = {"type": "finetune", "max_steps": 40, "batch_size": 8, "learning_rate": 0.02, "evaluate_generated": False}
    model = Model(chat_config(data=data, trainer=trainer), quiet=True)
    model.train(rows, run=folder / "run")
    model.save(folder / "model")
    tokenizer = read_tokenizer(str(folder / "model"))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    (folder / "model" / SUMS).unlink()
    file = folder / "chat.yaml"
    file.write_text(yaml.safe_dump(chat_config(base_model=str(folder / "model"), **sections)), encoding="utf8")
    return file
