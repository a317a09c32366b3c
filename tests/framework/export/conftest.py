"""Small runs to export."""

from pathlib import Path
from typing import Any

import pytest

from partita import Model
from partita.tokenizers.load import read_tokenizer
from partita_trainers.checkpoints.file_sums import FILE as SUMS

from ...head_models import tiny_model
from ...json_lines import write_json_lines

RATE: dict[str, Any] = {"learning_rate": 0.02, "learning_rate_scheduler": {"decay": "constant"}}
SPLIT = {"type": "random", "probabilities": [0.5, 0.1, 0.4]}
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A chat template of which each message is one piece."""
THINKS = (
    "{% for m in messages %}<{{ m['role'] }}>"
    "{% if loop.last and m['role'] == 'assistant' %}<think></think>{% endif %} {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
"""A chat template whose answers begin with a thought, unless thinking is disabled."""


def sentences(count: int) -> list[dict[str, str]]:
    """Return rows that a tiny model partly learns in a few steps."""
    pairs = [(("town", "school", "sea")[i % 3], ("ball", "dog", "book", "cake")[i % 4]) for i in range(count)]
    return [{"text": f"Lily is at {place} with a {thing}", "say": f"a {thing} at {place}"} for place, thing in pairs]


def text_config(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return the configuration of a tiny model that writes text, with rows in `folder`."""
    write_json_lines(folder / "rows.jsonl", sentences(96))
    config: dict[str, Any] = {
        "base_model": tiny_model("llama", context_length=64),
        "input_features": [{"name": "text", "type": "text"}],
        "output_features": [{"name": "say", "type": "text"}],
        "generation": {"max_new_tokens": 12},
        "data": {"source": str(folder / "rows.jsonl"), "split": SPLIT},
        "trainer": {"type": "finetune", "max_steps": 6, "batch_size": 16, **RATE},
    }
    return config | changes


def chat_base(folder: Path, template: str) -> Path:
    """Write an untrained model whose tokenizer has a chat template."""
    Model(text_config(folder.parent, trainer={"type": "none"}), quiet=True).save(folder)
    tokenizer = read_tokenizer(str(folder))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    (folder / SUMS).unlink()
    return folder


def copy_converter(folder: Path) -> Path:
    """Write a converter that writes the chat template in place of a GGUF file; return its folder."""
    program = (
        "import pathlib, sys\n"
        "template = pathlib.Path(sys.argv[1], 'chat_template.jinja')\n"
        "text = template.read_text() if template.exists() else 'GGUF'\n"
        "pathlib.Path(sys.argv[sys.argv.index('--outfile') + 1]).write_text(text)\n"
    )
    (folder / "convert_hf_to_gguf.py").write_text(program, encoding="utf8")
    return folder


def train_reward_model(folder: Path) -> Model:
    """Return a reward model that was trained for two steps."""
    rows = [{"prompt": f"the cat {i}", "chosen": f"sat {i} good", "rejected": f"ran {i} bad"} for i in range(40)]
    write_json_lines(folder / "pairs.jsonl", rows)
    reward = {
        "base_model": tiny_model("llama"),
        "input_features": [{"name": "prompt"}],
        "output_features": [{"name": "answer", "type": "preference"}],
        "data": {"source": str(folder / "pairs.jsonl"), "split": SPLIT},
        "adapter": {"type": "lora", "r": 2},
        "trainer": {"type": "reward", "batch_size": 8, "effective_batch_size": 8, "max_steps": 2, **RATE},
    }
    model = Model(reward, quiet=True)
    model.train(run=folder / "reward")
    return model


def train_encoder(folder: Path, kind: str) -> Model:
    """Return an encoder with a LoRA adapter and a head for `tags`, or without one for an `embedding`."""
    names = ("Anna", "Bo", "Carla")
    rows = [
        {"text": f"I met {names[i % 3]} again", "names": [{"start": 6, "end": 6 + len(names[i % 3]), "label": "PER"}]}
        for i in range(40)
    ]
    embedding = {"name": "vector", "type": "embedding", "column": "other"}
    write_json_lines(folder / "texts.jsonl", [{**row, "other": f"again {i} met"} for i, row in enumerate(rows)])
    config = {
        "base_model": tiny_model("bert"),
        "input_features": [{"name": "text", "type": "text"}],
        "output_features": [embedding if kind == "embedding" else {"name": "names", "type": "tags"}],
        "adapter": {"type": "lora", "r": 2},
        "data": {"source": str(folder / "texts.jsonl"), "split": SPLIT},
        "trainer": {"type": "finetune", "batch_size": 8, "max_steps": 2, "learning_rate": 0.01},
    }
    model = Model(config, quiet=True)
    model.train(run=folder / "encoder")
    return model


@pytest.fixture(scope="session")
def lora_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the finished run of a LoRA adapter, which also trains the output layer."""
    folder = tmp_path_factory.mktemp("lora")
    adapter = {"type": "lora", "r": 4, "modules_to_save": ["lm_head"]}
    model = Model(text_config(folder, adapter=adapter), quiet=True)
    model.train(run=folder / "run")
    return folder / "run"
