"""torchtune on the work of train.py; called there in an environment with torchtune: `JOB.json`.

The modules, data sets and loss of torchtune, and the loop of its recipes for a single device. It has no batches of
similar lengths: rows are in random order, 8 in a batch, or packed in two lines of 512 tokens.
"""

import json
import resource
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from torchtune.data import padded_collate_packed, padded_collate_sft
from torchtune.datasets import PackedDataset
from torchtune.models.convert_weights import hf_to_tune
from torchtune.models.llama2 import llama2, lora_llama2
from torchtune.modules.loss import CEWithChunkedOutputLoss
from torchtune.modules.peft import get_adapter_params, set_trainable_params
from train_peer import rows_of
from transformers import AutoModelForCausalLM, AutoTokenizer

Job = dict[str, Any]


def load(job: Job) -> torch.nn.Module:
    """Return the model of the work as a model of torchtune."""
    source = AutoModelForCausalLM.from_pretrained(f"{job['folder']}/tiny", dtype=torch.float32)
    config = source.config
    heads = {"num_heads": config.num_attention_heads, "num_kv_heads": config.num_key_value_heads}
    shape = heads | {
        "vocab_size": config.vocab_size,
        "num_layers": config.num_hidden_layers,
        "embed_dim": config.hidden_size,
        "max_seq_len": 512,
        "intermediate_dim": config.intermediate_size,
        "norm_eps": config.rms_norm_eps,
    }
    weights = hf_to_tune(source.state_dict(), dim=config.hidden_size, **heads)
    if job["full"]:
        model = llama2(**shape)
        model.load_state_dict(weights)
        return model
    layers = ["q_proj", "k_proj", "v_proj", "output_proj"]
    model = lora_llama2(layers, apply_lora_to_mlp=True, lora_rank=8, lora_alpha=16, **shape)
    unknown = model.load_state_dict(weights, strict=False).unexpected_keys
    assert not unknown, unknown
    set_trainable_params(model, get_adapter_params(model))
    return model


def batches(job: Job) -> Any:
    """Return the loader of the batches."""
    tokenizer = AutoTokenizer.from_pretrained(f"{job['folder']}/tiny")
    rows = [
        {
            "tokens": row["input_ids"],
            "labels": [
                token if used else -100 for token, used in zip(row["input_ids"], row["completion_mask"], strict=True)
            ],
        }
        for row in rows_of(job, tokenizer)
    ]
    order = torch.Generator().manual_seed(0)
    if job["packed"]:
        packed = PackedDataset(rows, max_seq_len=512)
        return DataLoader(packed, batch_size=2, shuffle=True, generator=order, collate_fn=padded_collate_packed)
    collate = partial(padded_collate_sft, padding_idx=0, ignore_idx=-100)
    return DataLoader(rows, batch_size=8, shuffle=True, generator=order, collate_fn=collate)


def train(job: Job) -> Job:
    """Train one epoch; return what was measured."""
    model, loader, loss_function = load(job), batches(job), CEWithChunkedOutputLoss()
    model.set_num_output_chunks(loss_function.num_output_chunks)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=job["learning_rate"], weight_decay=0.0)
    losses, padded = [], 0
    wall, cpu = time.perf_counter(), time.process_time()
    for batch in loader:
        labels = batch.pop("labels")
        padded += labels.numel()
        shifted = torch.hstack((labels[:, 1:], torch.full((len(labels), 1), -100)))
        loss = loss_function(model(**batch), shifted)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    tokenizer = AutoTokenizer.from_pretrained(f"{job['folder']}/tiny")
    tokens = sum(len(row["input_ids"]) for row in rows_of(job, tokenizer))
    return {
        "steps": len(losses),
        "wall": round(wall, 2),
        "cpu": round(cpu, 2),
        "tokens": tokens,
        "tokens_per_cpu_s": round(tokens / cpu, 1),
        "padding": round(1 - tokens / padded, 3),
        "loss": round(sum(losses) / len(losses), 4),
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(json.dumps(train(json.loads(Path(sys.argv[1]).read_text(encoding="utf8")))))
