"""Encoder-decoders: training beside Seq2SeqTrainer, and prediction beside a loop over `generate`."""

import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from fixtures import WORDS, read_rows, train_timed, words, write_rows
from harness import Limit, Result, Row, call, main

ARCHITECTURES = ("t5", "bart")
BATCH, NEW_TOKENS = 16, 24
"""Rows of a batch, and tokens of an answer."""
ROUNDS = 3
PEER = "Seq2SeqTrainer, group_by_length"
BATCHINGS: dict[str, tuple[Row, Row]] = {
    "partita, bucket": ({"type": "bucket"}, {"batch_size": BATCH}),
    "partita, token_budget": ({"type": "token_budget", "max_tokens": 3000}, {}),
}
"""`data.batching`, and the corresponding keys of the trainer."""


def save_model(folder: Path, architecture: str) -> None:
    """Save a new model of 128 dimensions and two layers a side, and a tokenizer that ends each text."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    special = ["<pad>", "</s>", "<unk>"]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate([*special, *WORDS])}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.save_pretrained(folder)
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0, "bos_token_id": None}
    sizes: Row = {"d_model": 128, "dropout_rate": 0.1, "d_kv": 32, "d_ff": 512, "num_layers": 2, "num_heads": 4}
    if architecture == "bart":
        sides = {"layers": 2, "attention_heads": 4, "ffn_dim": 512}
        sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sides.items()}
        sizes |= {"d_model": 128, "max_position_embeddings": 1024, "forced_eos_token_id": None}
    config = AutoConfig.for_model(architecture, vocab_size=len(tokenizer), **tokens, **sizes)
    torch.manual_seed(0)
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(folder)


def documents(count: int) -> list[Row]:
    """Return texts of 20 to 600 words, half of them up to 90, each with a summary of 5 to 80 words, half up to 16."""
    rng = random.Random(3)
    rows = []
    for _ in range(count):
        text, summary = rng.lognormvariate(4.5, 0.7), rng.lognormvariate(2.8, 0.5)
        lengths = min(600, max(20, round(text))), min(80, max(5, round(summary)))
        rows.append({"text": words(rng, lengths[0]), "summary": words(rng, lengths[1])})
    return rows


def config_of(folder: Path, architecture: str, **sections: Any) -> Row:
    return {
        "base_model": str(folder / architecture),
        "input_features": [{"name": "text", "type": "text"}],
        "output_features": [{"name": "summary", "type": "text"}],
        "generation": {"max_new_tokens": NEW_TOKENS, "defaults": "none"},
        **sections,
    }


# Training


def train(folder: Path, quick: bool) -> Result:
    """Tokens of both sides per CPU second, beside Seq2SeqTrainer with group_by_length on the same rows.

    A T5 and a BART of 128 dimensions and two layers a side; texts of 20 to 600 tokens and summaries of 5 to 80. The
    length that group_by_length sorts by is that of the text. One epoch in batches of 16 rows, or 3,000 tokens for
    token_budget; AdamW with a constant learning rate, gradients clipped at 1, dropout, fp32, one thread, no evaluation,
    no saving in between. Tokens are those of the rows without padding. Contenders run in turn, each in its own process;
    the ratio is the median over the rounds.
    """
    rounds = 1 if quick else ROUNDS
    write_rows(folder / "rows.jsonl", documents(320 if quick else 480))
    table: list[Row] = []
    limits: list[Limit] = []
    for architecture in ARCHITECTURES:
        save_model(folder / architecture, architecture)
        found: dict[str, list[Row]] = {PEER: [], **{name: [] for name in BATCHINGS}}
        for _ in range(rounds):
            found[PEER].append(call(train_library, folder, architecture))
            for name in BATCHINGS:
                found[name].append(call(train_partita, folder, architecture, name))
        table += [{"model": architecture, "contender": name, **median_of(rows)} for name, rows in found.items()]
        for name in BATCHINGS:
            pairs = zip(found[PEER], found[name], strict=True)
            ratio = statistics.median(ours["tokens/CPU s"] / theirs["tokens/CPU s"] for theirs, ours in pairs)
            limits.append(Limit(f"{architecture}: {name} over {PEER}", round(ratio, 3), 1.0, "min"))
    return table, limits


def median_of(rows: list[Row]) -> Row:
    return {key: round(statistics.median(row[key] for row in rows), 3) for key in rows[0]}


def train_library(name: str, architecture: str) -> Row:
    import torch
    from datasets import Dataset
    from transformers import (
        AutoModelForSeq2SeqLM,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        TrainerCallback,
    )

    torch.set_num_threads(1)
    folder = Path(name)
    tokenizer = AutoTokenizer.from_pretrained(folder / architecture)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder / architecture)
    rows = [
        dict(tokenizer(row["text"], text_target=row["summary"])) | {"length": 0}
        for row in read_rows(folder / "rows.jsonl")
    ]
    for row in rows:
        row["length"] = len(row["input_ids"])
    spent: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *given: Any, **more: Any) -> None:
            spent.append(time.process_time())

        def on_train_end(self, *given: Any, **more: Any) -> None:
            spent.append(time.process_time())

    with tempfile.TemporaryDirectory() as place:
        arguments = Seq2SeqTrainingArguments(
            output_dir=place,
            per_device_train_batch_size=BATCH,
            num_train_epochs=1,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            train_sampling_strategy="group_by_length",
            length_column_name="length",
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = Seq2SeqTrainer(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    tokens = sum(len(row["input_ids"]) + len(row["labels"]) for row in rows)
    return result_of(tokens, spent[1] - spent[0], losses)


def train_partita(name: str, architecture: str, batching: str) -> Row:
    folder = Path(name)
    policy, keys = BATCHINGS[batching]
    data = {
        "source": str(folder / "rows.jsonl"),
        "split": {"type": "random", "probabilities": [1, 0, 0]},
        "batching": policy,
    }
    trainer = {
        "type": "finetune",
        "epochs": 1,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-3,
        "learning_rate_scheduler": {"decay": "constant", "warmup_steps": 0},
        "skip_all_evaluation": True,
        "checkpoints_per_epoch": 0,
        **keys,
    }
    log, spent = train_timed(config_of(folder, architecture, data=data, trainer=trainer))
    return result_of(sum(line["tokens"] for line in log), spent.cpu, [line["loss"] for line in log])


def result_of(tokens: int, cpu: float, losses: list[float]) -> Row:
    return {
        "tokens/CPU s": round(tokens / cpu, 1),
        "CPU s": round(cpu, 2),
        "steps": len(losses),
        "last losses": round(statistics.mean(losses[-5:]), 3),
    }


# Prediction


def predict(folder: Path, quick: bool) -> Result:
    """Rows per CPU second of greedy answers of 24 tokens, beside a loop over `generate` on batches sorted by length.

    The models of the training part, untrained; texts of 20 to 600 tokens, batches of 16 rows, fp32, one thread.
    Reading, tokenization and decoding count for both. The ratio is the median over the rounds.
    """
    rounds = 1 if quick else ROUNDS
    write_rows(folder / "rows.jsonl", documents(96 if quick else 192))
    table: list[Row] = []
    limits: list[Limit] = []
    for architecture in ARCHITECTURES:
        save_model(folder / architecture, architecture)
        found: dict[str, list[Row]] = {"loop over generate": [], "partita": []}
        for _ in range(rounds):
            found["loop over generate"].append(call(predict_library, folder, architecture))
            found["partita"].append(call(predict_partita, folder, architecture))
        pairs = list(zip(*found.values(), strict=True))
        ratio = statistics.median(ours["rows/CPU s"] / theirs["rows/CPU s"] for theirs, ours in pairs)
        limits.append(Limit(f"{architecture}: rows per CPU second over the loop", round(ratio, 3), 1.0, "min"))
        different = sum(
            one != other for one, other in zip(*(rows[0].pop("answers") for rows in found.values()), strict=True)
        )
        limits.append(Limit(f"{architecture}: different answers", different, 0, "max"))
        for rows in found.values():
            for row in rows[1:]:
                del row["answers"]
        table += [{"model": architecture, "contender": name, **median_of(rows)} for name, rows in found.items()]
    return table, limits


def predict_library(name: str, architecture: str) -> Row:
    import torch
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    torch.set_num_threads(1)
    folder = Path(name)
    tokenizer = AutoTokenizer.from_pretrained(folder / architecture)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder / architecture).eval()
    started = time.process_time()
    rows = read_rows(folder / "rows.jsonl")
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index]["text"].split()))
    answers = [""] * len(rows)
    for start in range(0, len(order), BATCH):
        batch = order[start : start + BATCH]
        inputs = tokenizer([rows[index]["text"] for index in batch], padding=True, return_tensors="pt")
        inputs.pop("token_type_ids", None)
        with torch.no_grad():
            ids = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, num_beams=1)
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        for index, text in zip(batch, texts, strict=True):
            answers[index] = text.strip()
    cpu = time.process_time() - started
    return {"rows/CPU s": round(len(rows) / cpu, 2), "CPU s": round(cpu, 2), "answers": answers}


def predict_partita(name: str, architecture: str) -> Row:
    import torch

    from partita import Model

    torch.set_num_threads(1)
    folder = Path(name)
    config = config_of(folder, architecture, trainer={"type": "none", "batch_size": BATCH})
    model = Model(config, quiet=True)
    rows = read_rows(folder / "rows.jsonl")
    model.predict(rows[:2])  # loads the model
    started = time.process_time()
    found = model.predict(str(folder / "rows.jsonl"), fresh=True)  # not the answers that an earlier round has kept
    answers = [answer["summary"] for answer in found]
    cpu = time.process_time() - started
    return {"rows/CPU s": round(len(rows) / cpu, 2), "CPU s": round(cpu, 2), "answers": answers}


if __name__ == "__main__":
    main(train, predict)
