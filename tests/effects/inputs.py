"""The inputs of the configurations: rows, models, saved adapters and programs, in one folder."""

import csv
import json
import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file

from partita import Model

PROGRAMS = [Path(__file__).with_name(f"{name}_of_effects.py") for name in ("programs", "talkers")]
WORDS = ("red", "green", "blue", "one", "two", "three", "ball", "box", "say", "more")
ASKED = 4
"""Rows to predict."""
CHAT_TEMPLATE = (
    "{{ mood }}{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
SCRATCH: dict[str, Any] = {
    "type": "scratch",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "context_length": 64,
    "tie_word_embeddings": False,
    "tokenizer": "word",
    "vocab_size": 64,
}


def fill(folder: Path) -> None:
    """Write all inputs except saved adapters, which are created by the groups that need them."""
    for program in PROGRAMS:
        shutil.copy(program, folder)
    write_rows(folder)
    write_talks(folder)
    save_model(folder / "base", seed=1)
    save_model(folder / "other", seed=2)
    save_model(folder / "bytes", seed=1, tokenizer="byte", context_length=256)
    write_files_of_models(folder)
    for name, settings in (
        ("settled", {"do_sample": True, "temperature": 3.0}),
        ("brief", {"eos_token_id": list(range(1, 14))}),
    ):
        shutil.copytree(folder / "base", folder / name)
        file = folder / name / "generation_config.json"
        file.write_text(json.dumps(json.loads(file.read_text("utf8")) | settings), encoding="utf8")
    shutil.copytree(folder / "base", folder / "chat")
    settings = folder / "chat" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text("utf8")) | {"chat_template": CHAT_TEMPLATE}))


def write_rows(folder: Path) -> None:
    for name, seed in (("rows", 0), ("more", 1)):
        made = rows(24, seed=seed)
        write(folder / f"{name}.jsonl", made)
        with (folder / f"{name}.csv").open("w", encoding="utf8") as file:
            table = csv.DictWriter(file, list(made[0]))
            table.writeheader()
            table.writerows(made)
    made = rows(24, seed=0)
    with (folder / "quoted.csv").open("w", encoding="utf8") as file:
        table = csv.DictWriter(file, list(made[0]), quoting=csv.QUOTE_ALL)
        table.writeheader()
        table.writerows(made)
    write(folder / "three.jsonl", made[:3])
    write(folder / "asked.jsonl", made[:ASKED])
    write(folder / "gaps.jsonl", [row | ({"text": None} if place % 3 else {}) for place, row in enumerate(made)])
    write(folder / "capitals.jsonl", [{key: str(value).upper() for key, value in row.items()} for row in made])
    capitals = [row | {"answer": str(row["answer"]).upper()} for row in made]
    write_answers(folder, "open", [row["answer"] for row in made], capitals=[row["answer"] for row in capitals])
    write_answers(folder, "labels", ["red", "blue", "green"] * 8, capitals=["Red", "Blue", "Green"] * 8)
    write_answers(folder, "sets", [["red", "blue"], [], "green;red", "blue"] * 6, capitals=[["Red"], ["Blue"]] * 12)
    write_answers(folder, "numbers", list(range(3, 11)) * 3, capitals=["1E2", "2E3"] * 12)
    write_answers(folder, "values", [{"ball": place} for place in range(24)], capitals=[{"Ball": 1}, {"Box": 2}] * 12)
    colours = [{"text": row["text"], "colour": WORDS[place % 3]} for place, row in enumerate(made)]
    write(folder / "colours.jsonl", colours)
    tagged = [row | {"text": f"{row['text']}, ok", "tags": [[0, 3, "A"]], "others": []} for row in made]
    write(folder / "tags.jsonl", tagged)
    texts = [row | {"answer": None if place % 3 else "two"} for place, row in enumerate(made)]
    write(folder / "gaps-of-texts.jsonl", texts)
    scored = [row | {"score": place % 2, "other": 1 - place % 2} for place, row in enumerate(made)]
    write(folder / "scores.jsonl", scored)
    write(folder / "gaps-of-scores.jsonl", [row | ({"score": None} if row["score"] else {}) for row in scored])
    write_pairs(folder, made)
    write(folder / "tag-gaps.jsonl", [row | ({"tags": None} if place % 3 else {}) for place, row in enumerate(tagged)])
    for name in ("hub", "hub2"):
        write_hub(folder / name, rows(8, seed=2 if name == "hub" else 3))


def write_pairs(folder: Path, made: list[dict[str, Any]]) -> None:
    """Write rows with a better and a worse answer, and whether the better one is liked."""
    pairs = [
        row | {"chosen": row["answer"], "rejected": f"ball {row['answer']}", "other": "say say", "liked": place % 2}
        for place, row in enumerate(made)
    ]
    pairs = [row | {"disliked": 1 - row["liked"]} for row in pairs]
    write(folder / "pairs.jsonl", pairs)
    write(folder / "capital-pairs.jsonl", [row | {"rejected": row["rejected"].upper()} for row in pairs])
    write(folder / "gaps-of-pairs.jsonl", [row | ({"rejected": None} if row["liked"] else {}) for row in pairs])


def write_files_of_models(folder: Path) -> None:
    """Write a pickled model, a model with custom code, a saved model, and a configuration of one."""
    weights = load_file(folder / "base" / "model.safetensors")
    shutil.copytree(folder / "base", folder / "pickled")
    (folder / "pickled" / "model.safetensors").unlink()
    torch.save(weights, folder / "pickled" / "pytorch_model.bin")
    shutil.copytree(folder / "base", folder / "coded")
    (folder / "coded" / "own.py").write_text(
        "from transformers import Qwen2Config, Qwen2ForCausalLM\n\n\n"
        "class OwnConfig(Qwen2Config):\n    model_type = 'own'\n\n\n"
        "class Own(Qwen2ForCausalLM):\n    config_class = OwnConfig\n"
    )
    settings = folder / "coded" / "config.json"
    code = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}}
    settings.write_text(json.dumps(json.loads(settings.read_text("utf8")) | code), encoding="utf8")
    talk = {
        "base_model": str(folder / "other"),
        "input_features": [{"name": "messages", "type": "dialogue"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "generation": {"max_new_tokens": 3},
        "trainer": {"type": "none"},
    }
    Model(talk, quiet=True).save(folder / "trained")
    (folder / "other.yaml").write_text(yaml.safe_dump(talk), encoding="utf8")


def write_talks(folder: Path) -> None:
    for name, seed in (("talks", 4), ("more-talks", 5)):
        write(folder / f"{name}.jsonl", [talk(number, seed=seed) for number in range(8)])
    turns = [talk(number, seed=4) for number in range(8)]
    for row in turns:
        del row["other"], row["messages"][6:]
        for message in row["messages"]:
            message |= {"state": {"words": len(message["content"])}} if message["role"] == "assistant" else {}
    write(folder / "turns.jsonl", turns)
    odd = [talk(number, seed=4) for number in range(8)]
    odd[3]["messages"][1]["id"] = 7
    write(folder / "odd-talks.jsonl", odd)
    lines = []
    for row in rows(8, seed=6):
        lines.append(f"text:{row['text']}\tlabels:{row['answer']}|one|two\tepisode_done:True")
    (folder / "parlai.txt").write_text("\n".join(lines) + "\n", encoding="utf8")


def talk(number: int, *, seed: int) -> dict[str, Any]:
    """Return a dialogue with a system message and a tool result."""
    said = [row["text"] for row in rows(8, seed=10 * seed + number)]
    roles = ("system", "user", "assistant", "user", "tool", "assistant", "user", "assistant")
    messages: list[dict[str, Any]] = [{"role": r, "content": text} for r, text in zip(roles, said, strict=True)]
    return {"messages": messages, "other": messages[:3]}


@cache
def write_embedders(folder: Path) -> None:
    """Write two random sentence encoders."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    vocabulary = {word: place for place, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}
    for seed, name in enumerate(("embedder", "embedder2")):
        torch.manual_seed(seed)
        shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        bert = BertModel(BertConfig(vocab_size=len(vocabulary), max_position_embeddings=32, **shape))
        bert.embeddings.word_embeddings.weight.data.mul_(50)
        bert.save_pretrained(folder / f"{name}-bert")
        BertTokenizerFast(vocab=vocabulary).save_pretrained(folder / f"{name}-bert")
        transformer = Transformer(str(folder / f"{name}-bert"))
        SentenceTransformer(modules=[transformer, Pooling(32)], device="cpu").save(str(folder / name))


@cache
def write_classifier(folder: Path) -> None:
    """Write a random classifier with three labels."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    vocabulary = {word: place for place, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}
    torch.manual_seed(1)
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=len(vocabulary), max_position_embeddings=32, num_labels=3, **shape)
    BertForSequenceClassification(config).save_pretrained(folder / "classifier")
    BertTokenizerFast(vocab=vocabulary).save_pretrained(folder / "classifier")


@cache
def write_rewards(folder: Path) -> None:
    """Train two reward models of texts, and two of dialogues."""
    talks = rows(24, seed=7)
    pairs = [
        {**row, "messages": [{"role": "user", "content": row["text"]}], "chosen": row["answer"], "rejected": "say say"}
        for row in talks
    ]
    write(folder / "reward-pairs.jsonl", pairs)
    for number, feature in enumerate(({"name": "text"}, {"name": "messages", "type": "dialogue"})):
        for seed in (1, 2):
            config = {
                "base_model": str(folder / "base"),
                "seed": seed,
                "input_features": [feature],
                "output_features": [{"name": "answer", "type": "preference"}],
                "data": {"source": str(folder / "reward-pairs.jsonl")},
                "trainer": {"type": "reward", "max_steps": 2, "batch_size": 8, "eval_batch_size": 8},
            }
            Model(config, quiet=True).train(run=folder / f"rewards-{('texts', 'talks')[number]}{seed}")


@cache
def write_transcripts(folder: Path) -> None:
    """Write the dialogues of two simulations."""
    for name, seed in (("earlier", 1), ("more-earlier", 2)):
        config = {
            "base_model": str(folder / "base"),
            "seed": seed,
            "input_features": [{"name": "messages", "type": "dialogue"}],
            "output_features": [{"name": "answer", "type": "text"}],
            "generation": {"max_new_tokens": 3, "do_sample": True},
            "trainer": {"type": "none", "batch_size": 4},
            "simulation": {
                "world": {"type": "environment", "environment": "talkers_of_effects:Desk"},
                "tasks": {"count": 12},
            },
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config), encoding="utf8")
        Model(folder / f"{name}.yaml", quiet=True).simulate(folder / name)


def write_answers(folder: Path, name: str, answers: list[Any], *, capitals: list[Any]) -> None:
    """Write rows whose answers are partly missing, with other answers in the column `other`, and rows with capitals."""
    texts = [row["text"] for row in rows(24, seed=0)]
    other = answers[1:] + answers[:1]
    gaps = [None if place % 3 else answer for place, answer in enumerate(answers)]
    write(
        folder / f"{name}.jsonl",
        [{"text": t, "answer": a, "other": o} for t, a, o in zip(texts, gaps, other, strict=True)],
    )
    write(folder / f"{name}-capitals.jsonl", [{"text": t, "answer": a} for t, a in zip(texts, capitals, strict=True)])


def write_hub(folder: Path, made: list[dict[str, Any]]) -> None:
    """Write a dataset in the layout of the Hub, with two configurations of two splits each."""
    folder.mkdir()
    parts: dict[str, list[dict[str, str]]] = {"one": [], "two": []}
    for place, (subset, split) in enumerate((s, t) for s in parts for t in ("train", "test")):
        name = f"{subset}-{split}.jsonl"
        write(folder / name, made[place:])
        parts[subset].append({"split": split, "path": name})
    configs = [{"config_name": subset, "data_files": files} for subset, files in parts.items()]
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n", encoding="utf8")


def rows(count: int, *, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    results = []
    for number in range(count):
        said = [" ".join(rng.choices(WORDS, k=rng.randint(1, 7))) for _ in range(2)]
        results.append({"text": said[0], "answer": said[1], "split": number % 3, "label": number // 2 % 3})
    return results


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")


def save_model(folder: Path, *, seed: int, **shape: Any) -> None:
    """Save a random model whose greedy answers vary, with biases."""
    config = {
        "base_model": SCRATCH | shape,
        "seed": seed,
        "input_features": [{"name": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "data": {"source": str(folder.parent / "rows.jsonl")},
    }
    Model(config, quiet=True).save(folder)
    file = folder / "model.safetensors"
    weights = {name: value * 4 if value.ndim > 1 else value for name, value in load_file(file).items()}
    attention = [name for name in weights if "self_attn" in name]
    weights |= {name.replace("weight", "bias"): weights[name].new_zeros(len(weights[name])) for name in attention}
    save_file(weights, file, {"format": "pt"})
    described = json.loads((folder / "config.json").read_text("utf8")) | {"attention_bias": True}
    (folder / "config.json").write_text(json.dumps(described), encoding="utf8")
    (folder / "partita-checksums.json").unlink()


def place_of(folder: Path, place: Path) -> Path:
    """Make all files of `folder` available in `place`; return `place`."""
    for entry in folder.iterdir():
        (place / entry.name).symlink_to(entry)
    return place
