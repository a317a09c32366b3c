"""Classifiers with a head: training next to the Hugging Face Trainer, and prediction next to scored labels."""

import functools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import SHARED, Limit, Result, Row, call, main

SEEDS = (0, 1, 2)
TRAINERS = ("Trainer, random batches", "Trainer, group_by_length", "partita")
PEER, OWN = TRAINERS[0], TRAINERS[-1]
LONGEST = 128
"""Tokens of a row at most, in training."""
SHAPE = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
BATCH_SIZE, EPOCHS, LEARNING_RATE = 16, 3, 5e-4
OUTPUTS = [{"name": "service", "type": "category"}]


def training(folder: Path, quick: bool) -> Result:
    """CPU seconds and test accuracy of a new BERT (4 layers of 128) that names the service of a dialogue turn.

    Needs the shared folder next to the repository. Rows are the turns of users in Schema-Guided Dialogue, each with the
    turn before it. All contenders start from the same weights, take steps of 16 rows for three epochs (AdamW, 5e-4,
    linear decay, no dropout, fp32) and are called on the same rows with three seeds (group_by_length with one), in
    turn. CPU seconds are those of the whole call, with tokens, steps and the saved model; a call on 32 rows precedes it
    in the same process, so that imports do not count. `deviation` is the standard deviation of the accuracy over seeds.
    """
    labels = prepare(folder, limit=600 if quick else None)
    found: dict[str, list[Row]] = {name: [] for name in TRAINERS}
    for seed in SEEDS[: 1 if quick else None]:
        for name in TRAINERS:
            if seed and name not in (PEER, OWN):
                continue
            function = train_partita if name == OWN else train_peer
            found[name].append(call(function, folder, name, seed, labels))
            print(name, found[name][-1], flush=True)
    table = [summary(name, results) for name, results in found.items()]
    ratios = [own["cpu"] / peer["cpu"] for own, peer in zip(found[OWN], found[PEER], strict=True)]
    accuracies = {name: [result["accuracy"] for result in found[name]] for name in (OWN, PEER)}
    means = {name: statistics.mean(values) for name, values in accuracies.items()}
    # Twice the standard error of a difference of means over these seeds, at least half a point.
    noise = max(0.005, 2 * (sum(variance(values) / len(values) for values in accuracies.values())) ** 0.5)
    return table, [
        Limit(f"CPU seconds, {OWN} over {PEER}", round(statistics.median(ratios), 3), 0.7, "max"),
        Limit(f"accuracy below {PEER}", round(means[PEER] - means[OWN], 4), round(noise, 4), "max"),
    ]


def predicting(folder: Path, quick: bool) -> Result:
    """Rows per CPU second: a BERT with a head, and a llama of the same size that scores the labels.

    Needs the shared folder next to the repository. Both have 4 layers of 128 and random weights, predict the test rows
    of the part `training` in batches of 16 rows, and write a file of answers. Labels are the 9 services, or the slots
    that a turn can fill, such as Flights_3-airlines. Scoring computes the tokens of every label, a head does not: the
    ratio grows with the number of labels. The time is that of the call without imports and loading. `rows/model s` are
    the rows per CPU second inside the layers of the model. They bound the ratio: scoring computes a prompt once for all
    labels, and with few short labels five times its rows per CPU second is more than the layers under the head reach,
    even if tokens, journal and answers took no time.
    """
    services = prepare(folder, limit=600 if quick else None)
    rows: list[Row] = []
    rates: dict[tuple[str, str], float] = {}
    for kind, labels in (("services", services), ("slots", slots())):
        for name in ("head, bert", "head, llama", "scored labels, llama"):
            results = [call(predict, folder, name, labels) for _ in range(1 if quick else 3)]
            rates[kind, name] = statistics.median(result["rows/CPU s"] for result in results)
            row = {"contender": name, "labels": len(labels), "rows/CPU s": round(rates[kind, name], 1)}
            row["rows/model s"] = round(statistics.median(result["rows/model s"] for result in results), 1)
            rows.append(row | {"rows": results[0]["rows"], "errors": results[0]["errors"]})
            print(rows[-1], flush=True)
    ratios = {kind: rates[kind, "head, bert"] / rates[kind, "scored labels, llama"] for kind in ("services", "slots")}
    return rows, [
        Limit("rows a CPU second, head of a bert over scored labels, 9 labels", round(ratios["services"], 2), 5, "min"),
        Limit(f"the same, {len(slots())} labels", round(ratios["slots"], 2), 5, "min"),
    ]


def variance(values: list[float]) -> float:
    return statistics.variance(values) if len(values) > 1 else 0.0


def summary(name: str, results: list[Row]) -> Row:
    accuracies = [result["accuracy"] for result in results]
    return {
        "contender": name,
        "CPU s": statistics.median(result["cpu"] for result in results),
        "accuracy": round(statistics.mean(accuracies), 4),
        "deviation": round(variance(accuracies) ** 0.5, 4),
        "steps": results[0]["steps"],
        "rows": results[0]["rows"],
    }


# Data and models


def prepare(folder: Path, *, limit: int | None) -> list[str]:
    """Write train.jsonl, test.jsonl and the models; return the labels."""
    dialogues = read_rows(SHARED / "data" / "sgd" / "dialogues.jsonl")
    random.Random(0).shuffle(dialogues)
    quarter = len(dialogues) // 4
    splits = {"test": rows_of(dialogues[:quarter]), "train": rows_of(dialogues[quarter:])}
    labels = sorted({row["service"] for row in splits["train"]})
    splits["test"] = [row for row in splits["test"] if row["service"] in labels]
    splits["few"] = splits["train"][: 2 * BATCH_SIZE]
    for name, rows in splits.items():
        text = "".join(json.dumps(row) + "\n" for row in rows[:limit])
        (folder / f"{name}.jsonl").write_text(text, encoding="utf8")
    call(write_models, folder, labels)
    return labels


def read_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf8").splitlines()]


def slots() -> list[str]:
    """Return all slots of the dialogues."""
    dialogues = read_rows(SHARED / "data" / "sgd" / "dialogues.jsonl")
    return sorted({name for dialogue in dialogues for turn in dialogue["turns"] for name in turn.get("state", {})})


def rows_of(dialogues: list[dict[str, Any]]) -> list[Row]:
    """Return a row for each turn of a user: the turn, the one before it, and its service."""
    rows = []
    for dialogue in dialogues:
        for index, turn in enumerate(dialogue["turns"]):
            services = sorted({name.split("-")[0] for name in turn.get("state", {})})
            if len(services) == 1:
                earlier = dialogue["turns"][max(0, index - 1) : index + 1]
                text = " | ".join(f"{one['speaker']}: {one['text']}" for one in reversed(earlier))
                rows.append({"text": text, "service": services[0]})
    return rows


def write_models(folder: str, labels: list[str]) -> None:
    """Write a random `bert` with a head and a random `llama`, each with a tokenizer trained on the rows."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from partita.lm.model_config.architectures import scratch_config
    from partita.tokenizers.load import train_tokenizer
    from partita_schema.sections.model import ScratchModel

    rows = read_rows(Path(folder, "train.jsonl"))
    for name, kind in (("bert", AutoModelForSequenceClassification), ("llama", AutoModelForCausalLM)):
        base = ScratchModel.model_validate(
            {"type": "scratch", "architecture": name, "vocab_size": 4096, "context_length": 512, **SHAPE}
        )
        tokenizer = train_tokenizer(base, (row["text"] for row in rows))
        config = scratch_config(base, tokenizer=tokenizer)
        name_labels(config, labels)
        torch.manual_seed(0)
        kind.from_config(config).save_pretrained(f"{folder}/{name}")
        tokenizer.save_pretrained(f"{folder}/{name}")


def name_labels(config: Any, labels: list[str]) -> None:
    """Write labels into a transformers config."""
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: index for index, label in enumerate(labels)}
    config.problem_type = "single_label_classification"


def write_with_labels(folder: str, name: str, labels: list[str]) -> str:
    """Write the model with a random head for these labels; return its folder."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    target = f"{folder}/{name}-{len(labels)}"
    config = AutoConfig.from_pretrained(f"{folder}/{name}")
    name_labels(config, labels)
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(target)
    AutoTokenizer.from_pretrained(f"{folder}/{name}").save_pretrained(target)
    return target


# Contenders, each in a separate process


def measured(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of some work and its CPU seconds."""
    started = time.process_time()
    return work(), round(time.process_time() - started, 2)


def train_partita(folder: str, name: str, seed: int, labels: list[str]) -> Row:
    """Train with partita."""
    import torch

    from partita import Model

    torch.set_num_threads(1)
    config = {
        "base_model": f"{folder}/bert",
        "seed": seed,
        "input_features": [{"name": "text", "type": "text"}],
        "output_features": OUTPUTS,
        "preprocessing": {"global_max_sequence_length": LONGEST},
        "data": {"split": {"type": "random", "probabilities": [1, 0, 0]}},
        "trainer": {
            "type": "finetune",
            "epochs": EPOCHS,
            "batch_size": BATCH_SIZE,
            "learning_rate": LEARNING_RATE,
            "learning_rate_scheduler": {"decay": "linear", "warmup_steps": 0},
            "checkpoints_per_epoch": 0,
            "skip_all_evaluation": True,
        },
    }
    with tempfile.TemporaryDirectory() as place:
        Model(config, quiet=True).train(f"{folder}/few.jsonl", run=f"{place}/few")  # imports what is used
        model = Model(config, quiet=True)
        result, cpu = measured(lambda: model.train(f"{folder}/train.jsonl", run=f"{place}/run"))
        metrics = model.evaluate(f"{folder}/test.jsonl", batch_size=32)["service"]
    return {"cpu": cpu, "accuracy": metrics["accuracy"], "steps": result.steps, "rows": int(metrics["n"])}


def train_peer(folder: str, name: str, seed: int, labels: list[str]) -> Row:
    """Train with the Trainer of transformers."""
    import torch
    from datasets import load_dataset
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(f"{folder}/bert")

    def encode(rows: dict[str, list[str]]) -> dict[str, Any]:
        tokens = tokenizer(rows["text"], truncation=True, max_length=LONGEST)
        return {**tokens, "labels": [labels.index(label) for label in rows["service"]]}

    def run(place: str, file: str) -> tuple[Any, Any]:
        set_seed(seed)
        model = AutoModelForSequenceClassification.from_pretrained(f"{folder}/bert")
        rows = load_dataset("json", data_files=f"{folder}/{file}", split="train", cache_dir=f"{place}/cache")
        rows = rows.map(encode, batched=True, remove_columns=["text", "service"])
        sampling = "group_by_length" if name.endswith("group_by_length") else "random"
        arguments = TrainingArguments(
            output_dir=place,
            per_device_train_batch_size=BATCH_SIZE,
            num_train_epochs=EPOCHS,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="linear",
            report_to=[],
            save_strategy="no",
            logging_steps=50,
            use_cpu=True,
            disable_tqdm=True,
            seed=seed,
            train_sampling_strategy=sampling,
        )
        trainer = Trainer(
            model=model, args=arguments, train_dataset=rows, data_collator=DataCollatorWithPadding(tokenizer)
        )
        result = trainer.train()
        trainer.save_model(f"{place}/model")
        return trainer, result

    with tempfile.TemporaryDirectory() as place:
        run(place, "few.jsonl")  # imports what is used
        (trainer, result), cpu = measured(lambda: run(place, "train.jsonl"))
        test = load_dataset("json", data_files=f"{folder}/test.jsonl", split="train", cache_dir=f"{place}/cache")
        test = test.map(encode, batched=True, remove_columns=["text", "service"])
        output = trainer.predict(test)
    right = int((output.predictions.argmax(-1) == output.label_ids).sum())
    return {"cpu": cpu, "accuracy": right / len(test), "steps": result.global_step, "rows": len(test)}


def predict(folder: str, name: str, labels: list[str]) -> Row:
    """Predict the test rows with partita, with a new head."""
    import torch

    from partita import Model

    torch.set_num_threads(1)
    kind, architecture = name.split(", ")
    output: dict[str, Any] = {"name": "service", "type": "category", "decoder": {"labels": labels}}
    if kind == "head":
        output["head"] = "linear"
    else:
        output["decoder"]["scoring"] = True
    source = write_with_labels(folder, architecture, labels) if kind == "head" else f"{folder}/{architecture}"
    config = {
        "base_model": source,
        "input_features": [{"name": "text", "type": "text"}],
        "output_features": [output],
        "trainer": {"type": "none"},
    }
    model = Model(config, quiet=True)
    inside = time_layers()
    with tempfile.TemporaryDirectory() as place:
        first = read_rows(Path(folder, "test.jsonl"))[:4]
        model.predict(first, output=f"{place}/first.jsonl", batch_size=4)  # loads and checks the model
        inside.clear()
        answers, cpu = measured(lambda: model.predict(f"{folder}/test.jsonl", f"{place}/out.jsonl", batch_size=16))
    return {
        "rows/CPU s": round(len(answers) / cpu, 1),
        "rows/model s": round(len(answers) / sum(inside), 1),
        "rows": len(answers),
        "errors": answers.stats.errors,
    }


def time_layers() -> list[float]:
    """Return a list to which each forward pass of the layers of a bert or llama adds its CPU seconds."""
    from transformers import BertModel, LlamaModel

    seconds: list[float] = []

    def timed(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(*given: Any, **more: Any) -> Any:
            started = time.process_time()
            output = forward(*given, **more)
            seconds.append(time.process_time() - started)
            return output

        return run

    for kind in (BertModel, LlamaModel):
        kind.forward = timed(kind.forward)
    return seconds


if __name__ == "__main__":
    main(training, predicting)
