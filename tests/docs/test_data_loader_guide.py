"""Tests of the loops in the guide on the data loader: they run, resume, and share steps among processes."""

import csv
import json
import random
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from partita.data import DataLoader
from partita.tokenizers.load import byte_tokenizer

from ..forks import ENVIRONMENT, Forks
from .test_docs import BLOCKS, ROOT

GUIDE = ROOT / "docs" / "guides" / "data-loader.md"
NUM_ROWS = 20


def block(start: str) -> str:
    """Return the block of the guide with this comment or first line."""
    (found,) = (one for one in BLOCKS if one.page == GUIDE and (one.comment == start or one.text.startswith(start)))
    return found.text


def write_files(folder: Path) -> str:
    """Write the files of the guide, with a tiny model; return its name in the guide."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir()
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=128, **shape)).save_pretrained(
        folder / "tiny"
    )
    tokenizer.save_pretrained(folder / "tiny")
    draw = random.Random(0)
    with (folder / "tickets.csv").open("w", newline="", encoding="utf8") as file:
        rows = csv.writer(file)
        rows.writerow(["message", "team"])
        rows.writerows([f"ticket {number}", draw.choice(["bills", "technical help"])] for number in range(NUM_ROWS))
    config = block("file: tickets.yaml")
    name = config.split("base_model: ")[1].split("\n")[0]
    (folder / "tickets.yaml").write_text(config.replace(name, "tiny"), encoding="utf8")
    return name


def change(text: str, **changes: str) -> str:
    """Replace lines of the guide that begin with `NAME = `."""
    for name, value in changes.items():
        (line,) = (line for line in text.splitlines() if line.startswith(f"{name} = "))
        text = text.replace(line, f"{name} = {value}")
    return text


@pytest.mark.long
def test_the_loop_of_the_guide_resumes_with_the_same_weights(forks: Forks, tmp_path: Path) -> None:
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    for folder in (straight, stopped):
        name = write_files(folder)
        (folder / "tickets.yaml").write_text(
            (folder / "tickets.yaml").read_text(encoding="utf8").replace("batch_size: 8", "batch_size: 3"),
            encoding="utf8",
        )
    loop = block("file: loop.py")
    assert f'MODEL = "{name}"' in loop
    loop = change(loop, MODEL='"tiny"', STEPS_PER_CHECKPOINT="4", device='"cpu"')

    whole = forks.run(loop, "loop", folder=straight)
    assert whole.returncode == 0, whole.stderr
    killed = loop.replace(
        "            if step %", "            if step == 10:\n                os._exit(9)\n            if step %"
    )
    assert forks.run(f"import os\n{killed}", "loop", folder=stopped).returncode == 9
    rest = forks.run(loop, "loop", folder=stopped)
    assert rest.returncode == 0, rest.stderr

    steps = whole.stdout.splitlines()
    assert [line.split(" loss")[0] for line in steps[:1] + steps[-1:]] == [
        "epoch 0 step 1",
        f"epoch 2 step {len(steps)}",
    ]
    assert rest.stdout.splitlines() == steps[8:], "the checkpoint of step 8"
    one, other = (load_file(folder / "model" / "model.safetensors") for folder in (straight, stopped))
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert (straight / "model" / "tokenizer.json").exists()


RANK = """
import json, sys
from pathlib import Path

from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from partita.data import DataLoader

dist.init_process_group("gloo")
model = DistributedDataParallel(AutoModelForCausalLM.from_pretrained("tiny").train())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader("tickets.yaml", batch_size=4)
keys, states = [], []
for batch in loader:
    mean_loss(model, batch, "cpu").backward()
    optimizer.step()
    optimizer.zero_grad()
    keys.append(batch.keys)
    states.append(loader.state_dict())
rank = dist.get_rank()
Path(f"{rank}.json").write_text(json.dumps([keys, states]))
if rank == 0:
    model.module.save_pretrained("trained")
dist.destroy_process_group()
"""


@pytest.mark.long
def test_processes_that_share_steps_train_as_one_process_does(forks: Forks, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "job"
    write_files(folder)
    code = block("import torch\nimport torch.distributed") + RANK
    with socket.socket() as free:
        free.bind(("localhost", 0))
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    ranks = [
        forks.start(code, "loop", folder=folder, environment=forks.environment | ENVIRONMENT | place | {"RANK": rank})
        for rank in ("0", "1")
    ]
    errors = [rank.communicate()[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)
    (first, states), (second, other_states) = (
        json.loads((folder / f"{rank}.json").read_text(encoding="utf8")) for rank in (0, 1)
    )
    assert states == other_states

    model = AutoModelForCausalLM.from_pretrained(folder / "tiny").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = list(DataLoader(folder / "tickets.yaml", batch_size=4))
    assert len(batches) % 2, "a rank gets a batch without rows in the last step"
    assert second[-1] == []
    for number in range(0, len(batches), 2):
        pair = batches[number : number + 2]
        assert [list(batch.keys) for batch in pair] == [keys[number // 2] for keys in (first, second)][: len(pair)]
        total = sum(model(**batch.model_inputs(), num_items_in_batch=1).loss for batch in pair)
        (total / sum(batch.loss_tokens for batch in pair)).backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = load_file(folder / "trained" / "model.safetensors")
    weights = dict(model.named_parameters())
    for name, tensor in trained.items():
        torch.testing.assert_close(tensor, weights[name].data, rtol=1e-4, atol=1e-6)
