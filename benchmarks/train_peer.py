"""A trainer of another library on the work of train.py; called there in an environment with TRL: `JOB.json`.

The job names the folder of the work, the trainer, and whether all weights are trained; the result is one line of JSON
on stdout. Options as for a careful user: rows of similar lengths in a batch, loss on the response only.
"""

import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, set_seed

Job = dict[str, Any]


def rows_of(job: Job, tokenizer: Any) -> list[Job]:
    """Return the token ids of the rows, and 1 for those of the response."""
    rows = []
    for line in Path(job["folder"], "rows.jsonl").read_text(encoding="utf8").splitlines():
        row = json.loads(line)
        prompt = tokenizer(row["prompt"])["input_ids"]
        response = [*tokenizer(row["response"])["input_ids"], tokenizer.eos_token_id]
        rows.append(
            {
                "input_ids": (prompt + response)[:512],
                "completion_mask": ([0] * len(prompt) + [1] * len(response))[:512],
            }
        )
    return rows


def padded(rows: list[Job]) -> dict[str, torch.Tensor]:
    """Return a batch for the Trainer."""
    width = max(len(row["input_ids"]) for row in rows)
    ids, labels, mask = [], [], []
    for row in rows:
        missing = width - len(row["input_ids"])
        wanted = [token if used else -100 for token, used in zip(row["input_ids"], row["completion_mask"], strict=True)]
        ids.append(row["input_ids"] + [0] * missing)
        labels.append(wanted + [-100] * missing)
        mask.append([1] * len(row["input_ids"]) + [0] * missing)
    return {
        "input_ids": torch.tensor(ids),
        "labels": torch.tensor(labels),
        "attention_mask": torch.tensor(mask),
    }


def build(job: Job, output: str) -> Any:
    """Return the trainer of the job."""
    tokenizer = AutoTokenizer.from_pretrained(f"{job['folder']}/tiny")
    model = AutoModelForCausalLM.from_pretrained(f"{job['folder']}/tiny", dtype=torch.float32)
    lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    data = Dataset.from_list(rows_of(job, tokenizer))
    settings: Job = {
        "output_dir": output,
        "per_device_train_batch_size": 8,
        "num_train_epochs": 1,
        "learning_rate": job["learning_rate"],
        "lr_scheduler_type": "constant",
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 16,
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 0,
        "train_sampling_strategy": "group_by_length",
    }
    if job["trainer"] == "SFTTrainer":
        from trl import SFTConfig, SFTTrainer

        arguments = SFTConfig(**settings, max_length=512, bf16=False, gradient_checkpointing=False)
        return SFTTrainer(
            model=model,
            args=arguments,
            train_dataset=data,
            processing_class=tokenizer,
            peft_config=None if job["full"] else lora,
        )
    model = model if job["full"] else get_peft_model(model, lora)
    arguments = TrainingArguments(**settings, remove_unused_columns=False)
    return Trainer(model=model, args=arguments, train_dataset=data, data_collator=padded)


def train(job: Job) -> Job:
    """Train one epoch; return what was measured."""
    seen = {"real": 0, "padded": 0}
    with tempfile.TemporaryDirectory() as output:
        trainer = build(job, output)
        collate = trainer.data_collator

        def counted(rows: list[Job]) -> Any:
            batch = collate(rows)
            seen["real"] += sum(len(row["input_ids"]) for row in rows)
            seen["padded"] += batch["input_ids"].numel()
            return batch

        trainer.data_collator = counted
        wall, cpu = time.perf_counter(), time.process_time()
        result = trainer.train()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "steps": result.global_step,
        "wall": round(wall, 2),
        "cpu": round(cpu, 2),
        "tokens": seen["real"],
        "tokens_per_cpu_s": round(seen["real"] / cpu, 1),
        "padding": round(1 - seen["real"] / seen["padded"], 3),
        "loss": round(result.training_loss, 4),
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    set_seed(0)
    print(json.dumps(train(json.loads(Path(sys.argv[1]).read_text(encoding="utf8")))))
