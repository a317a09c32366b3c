"""Tests that files converted from other tools train."""

from pathlib import Path

import pytest

from partita import Model

from ..json_lines import write_json_lines
from .conftest import Command

TINY = {
    "base_model": {
        "type": "scratch",
        "vocab_size": 300,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "context_length": 64,
    },
}
FILES = {
    "axolotl": """\
base_model: org/base
datasets: [{path: text.jsonl, ds_type: json, type: completion}]
sequence_len: 64
micro_batch_size: 2
max_steps: 2
learning_rate: 1e-3
""",
    "llama_factory": """\
model_name_or_path: org/base
stage: sft
do_train: true
finetuning_type: full
dataset: mine
cutoff_len: 64
per_device_train_batch_size: 2
max_steps: 2
""",
    "trl": """\
model_name_or_path: org/base
dataset_name: chat.jsonl
per_device_train_batch_size: 2
max_length: 64
max_steps: 2
""",
}


@pytest.fixture(autouse=True)
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    texts = [f"a cat sat on mat {number}" for number in range(16)]
    write_json_lines(tmp_path / "text.jsonl", [{"text": text} for text in texts])
    write_json_lines(
        tmp_path / "chat.jsonl",
        [{"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]} for text in texts],
    )
    write_json_lines(tmp_path / "data/qa.jsonl", [{"q": text, "a": "no"} for text in texts])
    described = '{"mine": {"file_name": "qa.jsonl", "columns": {"prompt": "q", "response": "a"}}}'
    (tmp_path / "data/dataset_info.json").write_text(described, encoding="utf-8")


@pytest.mark.parametrize("tool", FILES)
def test_a_converted_file_trains(tool: str, command: Command) -> None:
    Path("original.yaml").write_text(FILES[tool], encoding="utf-8")
    assert command("convert", "--from", tool, "original.yaml", "-o", "run.yaml") == 0
    assert Model(["run.yaml", TINY], quiet=True).train().steps == 2
