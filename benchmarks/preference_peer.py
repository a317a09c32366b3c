"""The trainers of TRL on given token ids; called by preference.py in an environment with TRL: `JOB.json`.

The job names the folder of the model, the rows and what to compute; the result is one line of JSON on stdout.
"""

import json
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

Job = dict[str, Any]
TEXTS = [{"prompt": "a b", "chosen": " c d", "rejected": " d"}] * 2
"""Rows for the constructors of trainers that get token ids later."""


def build(job: Job, trainer: Any, config: Any, rows: list[Job], **options: Any) -> Any:
    """Return a trainer of a new adapter on the model of the job, with a head for a reward model."""
    lora = dict(job["lora"])
    model: Any = AutoModelForCausalLM
    if trainer is RewardTrainer:
        model, lora = AutoModelForSequenceClassification, lora | {"task_type": "SEQ_CLS", "modules_to_save": ["score"]}
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    arguments = config(
        output_dir=f"{job['folder']}/trl",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=job["batch_size"],
        learning_rate=job["learning_rate"],
        num_train_epochs=1,
        save_strategy="no",
        logging_steps=1000,
        disable_tqdm=True,
        **options,
    )
    return trainer(
        model=model.from_pretrained(job["model"], **({"num_labels": 1} if trainer is RewardTrainer else {})),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(**lora),
    )


def parity(job: Job) -> Job:
    """Return the loss of each configuration; the gradients go into a file for each."""
    losses = {}
    for name, kind, options in job["losses"]:
        trainer, inputs = CASES[kind](job, options)
        file = "reward-adapter" if kind == "reward" else "adapter"
        weights = load_file(f"{job['folder']}/{file}.safetensors")
        trained = {name: one for name, one in trainer.model.named_parameters() if one.requires_grad}
        assert trained.keys() == weights.keys()
        for key, parameter in trained.items():
            parameter.data = weights[key].clone()
        trainer.model.eval()
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
        losses[name] = loss.item()
        gradients = {key: one.grad.contiguous() for key, one in trained.items()}
        save_file(gradients, f"{job['folder']}/trl-{name}.safetensors")
    return losses


def dpo_case(job: Job, options: Job) -> tuple[Any, Any]:
    trainer = build(job, DPOTrainer, DPOConfig, TEXTS, max_length=None, **options)
    return trainer, trainer.data_collator(job["rows"])


def reward_case(job: Job, options: Job) -> tuple[Any, Any]:
    """Reward models, on whole dialogues with margins."""
    trainer = build(job, RewardTrainer, RewardConfig, TEXTS, max_length=None, **options)
    rows = [
        {f"{name}_ids": row["prompt_ids"] + row[f"{name}_ids"] for name in ("chosen", "rejected")}
        | {"margin": row["margin"]}
        for row in job["rows"]
    ]
    return trainer, trainer.data_collator(rows)


def kto_case(job: Job, options: Job) -> tuple[Any, Any]:
    """KTO, with the answer of the row before each row as mismatched answer."""
    answers = [row["chosen_ids"] for row in job["rows"]]
    rows = [
        {"prompt_ids": row["prompt_ids"], "completion_ids": answer, "KL_completion_ids": other, "label": row["good"]}
        for row, answer, other in zip(job["rows"], answers, [answers[-1], *answers[:-1]], strict=True)
    ]
    texts = [{"prompt": "a b", "completion": " c", "label": label} for label in (True, False)]
    trainer = build(job, KTOTrainer, KTOConfig, texts, max_length=None, **options)
    return trainer, trainer.data_collator(rows)


def padded_case(trainer: Any, config: Any, rows: str) -> Any:
    """Return a case of a trainer whose inputs are padded tensors."""

    def case(job: Job, options: Job) -> tuple[Any, Any]:
        built = build(job, trainer, config, TEXTS, max_length=512, **options)
        inputs: Job = {}
        for name in ("chosen", "rejected"):
            whole = [row["prompt_ids"] + row[f"{name}_ids"] for row in job[rows]]
            width = max(map(len, whole))
            inputs[f"{name}_input_ids"] = torch.tensor([ids + [0] * (width - len(ids)) for ids in whole])
            inputs[f"{name}_attention_mask"] = torch.tensor(
                [[1] * len(ids) + [0] * (width - len(ids)) for ids in whole]
            )
            inputs[f"{name}_labels"] = torch.tensor(
                [
                    [-100] * len(row["prompt_ids"]) + row[f"{name}_ids"] + [-100] * (width - len(ids))
                    for row, ids in zip(job[rows], whole, strict=True)
                ]
            )
        return built, inputs

    return case


CASES = {
    "dpo": dpo_case,
    "kto": kto_case,
    "reward": reward_case,
    "orpo": padded_case(ORPOTrainer, ORPOConfig, "short_rows"),
    "cpo": padded_case(CPOTrainer, CPOConfig, "rows"),
}


def epoch(job: Job) -> Job:
    """Train an epoch; return its CPU seconds without imports, loading and the dataset."""
    options = {"precompute_ref_log_probs": job["precompute"], "max_length": None}
    trainer = build(job, DPOTrainer, DPOConfig, TEXTS, beta=0.1, **options)
    columns = ("prompt_ids", "chosen_ids", "rejected_ids")
    trainer.train_dataset = Dataset.from_list([{column: row[column] for column in columns} for row in job["rows"]])
    started = time.process_time()
    if job["precompute"]:
        trainer.train_dataset = trainer._precompute_ref_logps(trainer.train_dataset, "train", job["batch_size"])
    steps = trainer.train().global_step
    seconds = time.process_time() - started
    return {"CPU s": seconds, "steps": steps, "MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf8"))
    print(json.dumps({"parity": parity, "epoch": epoch}[job["what"]](job)))
