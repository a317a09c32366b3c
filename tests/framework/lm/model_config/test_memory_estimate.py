"""Tests of the memory formula for devices that cannot measure, against measurements of this machine."""

import json
import subprocess
import sys

import pytest

MEASURED = """
import json, torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from partita.lm.model_config.memory_estimate import forward_bytes, generation_bytes, training_bytes
from partita_trainers.batch_size.device_memory import device_memory
torch.set_num_threads(1)
memory = device_memory(torch.device("cpu"))
ROWS, TOKENS, NEW = 12, 300, 4

def peak(work):
    work()
    peaks = []
    for _ in range(2):  # the allocator keeps more in some runs than in others
        with memory.measure() as found:
            work()
        peaks.append(found.taken_bytes)
    return min(peaks)

def ids(rows):
    made = torch.randint(3, 900, (rows, TOKENS))
    mask = torch.ones_like(made)
    mask[-1, 0] = 0
    return {"input_ids": made, "attention_mask": mask}

def study(model):
    model.eval()
    def forward():
        with torch.no_grad():
            float(model(**ids(ROWS), use_cache=False).logits.float().logsumexp(-1).sum())
    def generate():
        model.generate(**ids(ROWS), max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=0, do_sample=False)
    def learn():
        inputs = ids(ROWS)
        model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
    found = {
        "forward": (forward_bytes(model, ROWS, tokens=TOKENS, loss_tokens=TOKENS), peak(forward)),
        "generation": (generation_bytes(model, ROWS, prompt_tokens=TOKENS, new_tokens=NEW), peak(generate)),
    }
    learn()  # gradients stay
    found["training"] = (training_bytes(model, ROWS, tokens=TOKENS, loss_tokens=TOKENS, recomputed=False), peak(learn))
    return found

shape = dict(vocab_size=1000, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4)
print(json.dumps({
    "llama": study(LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=2))),
    "gpt2": study(GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_embd=256, n_layer=4, n_head=4))),
}))
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured through Linux's procfs")
def test_the_formula_is_close_to_the_measurement() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", MEASURED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    ratios = {
        f"{model} {work}": foretold / measured
        for model, studied in found.items()
        for work, (foretold, measured) in studied.items()
    }
    assert all(0.5 < ratio < 3.5 for ratio in ratios.values()), sorted(ratios.values())
