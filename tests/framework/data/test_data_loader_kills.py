"""Tests of a hand-written loop over DataLoader that is killed: no row is lost or doubled, and no bit of the weights."""

import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ...forks import Forks
from ...json_lines import write_json_lines
from ...seeds import session_seed

pytestmark = pytest.mark.long

KILLS = 20
EPOCHS = 8
ROWS = 36
LOOP = f"""
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from partita.data import DataLoader

checkpoint, steps = Path("checkpoint.pt"), Path("steps")
torch.manual_seed(0)
loader = DataLoader("run.yaml")
shape = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(loader.tokenizer), max_position_embeddings=64, **shape)).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
keys = []
if checkpoint.exists():
    saved = torch.load(checkpoint)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    loader.load_state_dict(saved["loader"])
    keys = saved["keys"]
steps.write_text("")
for epoch in range(loader.next_epoch, {EPOCHS}):
    for batch in loader:
        model(**batch.model_inputs()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        keys += [(epoch, key) for key in batch.keys]
        parts = dict(model=model.state_dict(), optimizer=optimizer.state_dict(), loader=loader.state_dict(), keys=keys)
        torch.save(parts, "checkpoint.writing")
        Path("checkpoint.writing").replace(checkpoint)
        with steps.open("a") as file:
            file.write("step\\n")
"""


def write_run(folder: Path, data: dict[str, Any], **trainer: Any) -> Path:
    folder.mkdir()
    rows = [{"question": "q" * (1 + number * 7 % 23), "answer": f"a{number}"} for number in range(ROWS)]
    write_json_lines(folder / "part-0.jsonl", rows[:20])
    write_json_lines(folder / "part-1.jsonl", rows[20:])
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "context_length": 64}
    config = {
        "base_model": {"type": "scratch", "tokenizer": "byte", "vocab_size": 300, **shape},
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "data": data,
        "preprocessing": {"global_max_sequence_length": 64},
        "trainer": {"type": "finetune", "batch_size": 2, **trainer},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf8")
    return folder


def kill(forks: Forks, folder: Path, *, steps: int, delay: float) -> None:
    """Start the loop, and kill it `delay` seconds after it has taken `steps` steps."""
    path = folder / "steps"
    path.unlink(missing_ok=True)
    program = forks.start(LOOP, "loop", folder=folder)
    while not (path.exists() and path.read_bytes().count(b"\n") >= steps):
        assert program.poll() is None, program.communicate()
        time.sleep(0.001)
    time.sleep(delay)
    program.send_signal(signal.SIGKILL)
    assert program.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("data", "trainer"),
    [
        (
            {
                "source": "part-*.jsonl",
                "split": {"type": "random", "probabilities": [1.0, 0, 0]},
                "batching": {"type": "bucket", "noise": 0.1},
            },
            {},
        ),
        (
            {
                "source": {"type": "jsonl", "path": "part-*.jsonl", "streaming": True},
                "batching": {"type": "bucket", "window": 8},
                "loader": {"workers": 1},
            },
            {"max_steps": 1},
        ),
    ],
    ids=["indexed", "streamed with a worker"],
)
def test_a_loop_killed_twenty_times_equals_an_uninterrupted_one(
    forks: Forks, tmp_path: Path, data: dict[str, Any], trainer: dict[str, Any]
) -> None:
    seed = session_seed()
    rng = random.Random(seed)
    killed, straight = (write_run(tmp_path / name, data, **trainer) for name in ("killed", "straight"))
    for _ in range(KILLS):
        kill(forks, killed, steps=rng.randint(0, 4), delay=rng.uniform(0, 0.02))
    for folder in (killed, straight):
        done = forks.run(LOOP, "loop", folder=folder)
        assert done.returncode == 0, done.stderr

    one, other = (torch.load(folder / "checkpoint.pt") for folder in (killed, straight))
    counts = Counter(one["keys"])
    assert len(counts) == ROWS * EPOCHS, f"seed {seed}: rows were lost"
    assert set(counts.values()) == {1}, f"seed {seed}: rows were doubled"
    assert one["keys"] == other["keys"], f"seed {seed}"
    assert one["loader"] == other["loader"], f"seed {seed}"
    assert all(torch.equal(one["model"][name], tensor) for name, tensor in other["model"].items()), f"seed {seed}"
