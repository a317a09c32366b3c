"""Training on preferences next to TRL: the same losses and gradients, in less time."""

import json
import random
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from fixtures import TRL, make_model, spending
from harness import Limit, Result, Row, call, main, one_thread, peer_environment

LORA = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
ADAPTER = {"type": "lora", "r": 8, "alpha": 16, "dropout": 0.0, "target_modules": ["q_proj", "v_proj"]}
PEER = Path(__file__).with_name("preference_peer.py")
PAIRS, BATCH_SIZE, LEARNING_RATE = 96, 8, 1e-4
SHAPES = ((7, 8192), (4, 2000))
"""Layers and tokens of the models of `epoch`."""
LOSSES: list[tuple[str, str, Row, Row]] = [
    *(
        (name, "dpo", {"loss_type": [name], "beta": 0.1}, {"type": "dpo", "variant": name})
        for name in ("sigmoid", "hinge", "ipo", "sppo_hard", "apo_zero", "apo_down", "nca_pair", "bco_pair")
    ),
    ("sigmoid_norm", "dpo", {"loss_type": ["sigmoid_norm"]}, {"type": "dpo", "variant": "sigmoid_norm"}),
    (
        "sigmoid, label smoothing",
        "cpo",
        {"loss_type": "sigmoid", "beta": 0.1, "label_smoothing": 0.2, "cpo_alpha": 0.0},
        {"type": "dpo", "label_smoothing": 0.2},
    ),
    (
        "robust",
        "dpo",
        {"loss_type": ["robust"], "label_smoothing": 0.2},
        {"type": "dpo", "variant": "robust", "label_smoothing": 0.2},
    ),
    ("orpo", "orpo", {"beta": 0.1}, {"type": "orpo"}),
    ("simpo", "cpo", {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0}, {"type": "simpo"}),
    ("kto", "kto", {"beta": 0.1, "undesirable_weight": 1.5}, {"type": "kto", "undesirable_weight": 1.5}),
    ("reward", "reward", {"center_rewards_coefficient": 0.01}, {"type": "reward", "center": 0.01}),
]
"""Name, case of the peer, options of TRL, and the section of partita."""


def parity(folder: Path, quick: bool) -> Result:
    """Loss and gradients of the first step, compared with the trainers of TRL 1.16 with the same constants.

    The model is a llama (2 layers of 64) with a LoRA adapter. Random numbers are added to the adapter, so that the
    model differs from its reference. Both libraries compute the same 12 rows of token ids in one micro-batch. TRL runs
    in a separate environment, which the script creates. `error` is the relative difference of the loss, and `gradient`
    the norm of the difference of the gradients, relative to their norm.

    TRL's ORPO averages the cross-entropy over all tokens of the micro-batch, also those of the prompts. partita
    averages it over the tokens of each chosen answer. Both are equal if prompts have one token and chosen answers have
    equal lengths, so ORPO is compared on such rows. TRL's DPOTrainer applies no label smoothing to sigmoid. Its
    CPOTrainer does, without a reference, so both are compared with references of 0. Reward models start with equal
    weights of the new head, and their pairs have margins.
    """
    python, reason = environment(folder)
    if python is None:
        return [{"loss": "skipped", "reason": reason}], []
    write_inputs(folder)
    own = call(own_losses, folder)
    theirs = peer(python, folder, what="parity", losses=[case[:3] for case in LOSSES])
    rows = []
    for name, *_ in LOSSES:
        error = abs(own[name] - theirs[name]) / abs(theirs[name])
        difference = gradient_difference(folder, name)
        rows.append({"loss": name, "partita": own[name], "TRL": theirs[name], "error": error, "gradient": difference})
    return rows, [
        Limit("largest relative difference of a loss", max(row["error"] for row in rows), 1e-5, "max"),
        Limit("largest relative difference of the gradients", max(row["gradient"] for row in rows), 1e-4, "max"),
    ]


def epoch(folder: Path, quick: bool) -> Result:
    """CPU seconds and peak memory of an epoch of DPO on 96 pairs: partita, and DPOTrainer of TRL.

    The model is a llama with LoRA. Prompts have 60 to 120 tokens and answers 10 to 60; a step has 8 pairs; there is one
    thread. CPU seconds are those of the training loop and of the reference log-probabilities, without imports, loading
    and tokenization. TRL computes the references in the steps (its default) or before training. The contenders run one
    after the other in separate processes, three times; the table has medians.

    TRL computes the logits of all tokens, also those of the prompts, so the ratio grows with the share of the weights
    that the output layer has. The limits are for a share of 28 %, as in Qwen2.5-0.5B: 7 layers of 256 and a vocabulary
    of 8,192. The other model has 4 layers of 256, a vocabulary of 2,000 and a share of 14 %.
    """
    python, reason = environment(folder)
    if python is None:
        return [{"contender": "skipped", "reason": reason}], []
    rows = [row for layers, vocabulary in SHAPES for row in epochs(folder, python, layers, vocabulary, quick)]
    seconds, memory = ({row["contender"]: row[key] for row in rows[:4]} for key in ("CPU s", "MB"))
    return rows, [
        Limit("CPU seconds, TRL over partita", round(seconds["TRL"] / seconds["partita"], 2), 3.0, "min"),
        Limit(
            "CPU seconds, separate rows over partita",
            round(seconds["partita, separate rows"] / seconds["partita"], 2),
            1.25,
            "min",
        ),
        Limit("peak memory over TRL's", round(memory["partita"] / memory["TRL"], 3), 1.0, "max"),
    ]


def epochs(folder: Path, python: str, layers: int, vocabulary: int, quick: bool) -> list[Row]:
    """Return the medians of each contender for one model."""
    write_inputs(folder, layers=layers, vocabulary=vocabulary)
    names = ("partita", "partita, separate rows", "TRL", "TRL, references before")
    found: dict[str, list[Row]] = {name: [] for name in names}
    for _ in range(1 if quick else 3):
        for name in names:
            if name.startswith("TRL"):
                result = peer(python, folder, what="epoch", precompute=name != "TRL")
            else:
                result = call(own_epoch, folder, name != "partita")
            found[name].append(result)
            print(name, result, flush=True)
    return [
        {
            "tokens": vocabulary,
            "contender": name,
            **{key: sorted(one[key] for one in results)[len(results) // 2] for key in results[0]},
        }
        for name, results in found.items()
    ]


# The environment of TRL


def environment(folder: Path) -> tuple[str | None, str]:
    """Create an environment with TRL and our versions of its requirements; return its Python, or a reason why not."""
    programs, reason = peer_environment(folder, f"trl=={TRL}", same=("transformers", "peft", "accelerate"))
    return (str(programs / "python") if programs else None), reason


def peer(python: str, folder: Path, **job: Any) -> Row:
    """Run a job of the peer; return its result."""
    path = folder / "job.json"
    rows = json.loads((folder / "rows.json").read_text(encoding="utf8"))
    settings = {"folder": str(folder), "model": str(folder / "model"), "lora": LORA, "learning_rate": LEARNING_RATE}
    rows_of_job = rows["few"] if job["what"] == "parity" else rows["pairs"]
    job |= settings | {"rows": rows_of_job, "short_rows": rows["short"], "batch_size": BATCH_SIZE}
    path.write_text(json.dumps(job), encoding="utf8")
    words = [python, str(PEER), str(path)]
    done = subprocess.run(words, env=one_thread(), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    result: Row = json.loads(done.stdout.splitlines()[-1])
    return result


# Inputs


def write_inputs(folder: Path, *, layers: int | None = None, vocabulary: int | None = None) -> None:
    """Write the model, with given layers of 256 instead of 2 of 64, token ids of pairs, and a disturbed adapter."""
    make_model(folder / "model", context=512)
    if layers is not None:
        call(write_model, folder, layers, vocabulary)
    rng = random.Random(0)

    def ids(shortest: int, longest: int) -> list[int]:
        return [rng.randrange(3, 250) for _ in range(rng.randint(shortest, longest))]

    def pair(prompt: tuple[int, int], chosen: tuple[int, int], rejected: tuple[int, int]) -> Row:
        good = rng.random() < 0.5
        answers = {"chosen_ids": ids(*chosen), "rejected_ids": ids(*rejected)}
        return {"prompt_ids": ids(*prompt), **answers, "good": good, "margin": len(answers["chosen_ids"]) / 20}

    rows = {
        "few": [pair((5, 30), (2, 20), (2, 20)) for _ in range(12)],
        "short": [pair((1, 1), (9, 9), (2, 20)) for _ in range(12)],
        "pairs": [pair((60, 120), (10, 60), (10, 60)) for _ in range(PAIRS)],
    }
    (folder / "rows.json").write_text(json.dumps(rows), encoding="utf8")
    call(write_adapters, folder)


def write_model(folder: str, layers: int, vocabulary: int) -> None:
    """Replace the weights by those of a larger model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_pretrained(f"{folder}/model")
    config.update(
        {
            "num_hidden_layers": layers,
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "vocab_size": vocabulary,
        }
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(f"{folder}/model")


def write_adapters(folder: str) -> None:
    """Write the weights of an adapter that changes the model, and of one with the head of a reward model."""
    import torch
    from safetensors.torch import save_file

    for trainer, file in (("preference", "adapter"), ("reward", "reward-adapter")):
        lm = own_model(folder, {"type": trainer})
        generator = torch.Generator().manual_seed(1)
        weights = {
            name: 0.1 * torch.randn(parameter.shape, generator=generator)
            for name, parameter in lm.module.named_parameters()
            if parameter.requires_grad
        }
        save_file(weights, f"{folder}/{file}.safetensors")


def own_model(folder: str, trainer: Row) -> Any:
    """Return the model with a new adapter, loaded by partita."""
    import torch

    from partita.lm.load_model import load_model
    from partita.pipeline.build import head_of
    from partita.tokenizers.load import load_tokenizer
    from partita_schema.config import Config

    torch.set_num_threads(1)
    kto = trainer["type"] == "kto"
    output = {"name": "answer", "type": "text", "label": "good"} if kto else {"name": "answer", "type": "preference"}
    config = Config.model_validate(
        {
            "base_model": f"{folder}/model",
            "adapter": ADAPTER,
            "input_features": [{"name": "prompt", "type": "text"}],
            "output_features": [output],
            "trainer": {"learning_rate": LEARNING_RATE, "batch_size": BATCH_SIZE, **trainer},
        }
    )
    tokenizer = load_tokenizer(config, folder=Path(folder), texts=list, saved=None)
    head = head_of(config, {})
    return load_model(config, folder=Path(folder), tokenizer=tokenizer, saved=None, trainable=True, head=head)


def batch_of(rows: list[Row], *, first: int = 0, answers: int = 2, value: str = "good") -> Any:
    """Return rows as a batch, with one or two answers after each prompt.

    `value` is the column that the objective reads: the label of KTO, or the margin of a reward model.
    """
    import torch

    from partita_trainers.base import Batch

    lines = []
    for row in rows:
        prompt, chosen, rejected = row["prompt_ids"], row["chosen_ids"], row["rejected_ids"] * (answers == 2)
        start = len(prompt)
        positions = [*range(start + len(chosen)), *range(start, start + len(rejected))]
        lines.append((prompt + chosen + rejected, [-100] * start + chosen + rejected, positions))
    width = max(len(line[0]) for line in lines)
    ids, labels, positions = (
        torch.tensor([line[part] + [filling] * (width - len(line[part])) for line in lines])
        for part, filling in enumerate((0, -100, 0))
    )
    return Batch(
        input_ids_BT=ids,
        labels_BT=labels,
        lengths_B=torch.tensor([len(line[0]) for line in lines]),
        keys=tuple(f"row:{first + index:04d}" for index in range(len(rows))),
        position_ids_BT=positions if answers == 2 else None,
        row_values_NK=torch.tensor([[float(row[value])] for row in rows]),
    )


# partita, each in a separate process


def own_losses(folder: str) -> dict[str, float]:
    """Return the loss of each configuration; the gradients go into a file for each."""
    from safetensors.torch import load_file, save_file

    from partita_trainers.objective import ObjectiveContext
    from partita_trainers.registry import build_trainer

    rows = json.loads(Path(folder, "rows.json").read_text(encoding="utf8"))
    losses = {}
    for name, kind, _, section in LOSSES:
        lm = own_model(folder, section if kind in ("kto", "reward") else {"type": "preference", "loss": section})
        lm.keep_reference()
        trained = {key: one for key, one in lm.module.named_parameters() if one.requires_grad}
        file = "reward-adapter" if kind == "reward" else "adapter"
        for key, weights in load_file(f"{folder}/{file}.safetensors").items():
            trained[key].data = weights
        objective: Any = build_trainer(lm.config.trainer).objective  # type: ignore[attr-defined]
        if getattr(objective, "references", None) is not None:
            objective.references.started = objective.references.in_step = True
        value = "margin" if kind == "reward" else "good"
        batch = batch_of(rows["short" if kind == "orpo" else "few"], answers=1 if kind == "kto" else 2, value=value)
        context = ObjectiveContext(lm, lm.module)
        lm.module.eval()
        objective.prepare(context, [batch])
        if kind == "cpo" and objective.references is not None:
            objective.references.log_probs = dict.fromkeys(objective.references.log_probs, (0.0, 0.0))
        loss = objective.loss(context, batch)[0] / objective.denominator(batch)
        loss.backward()
        losses[name] = loss.item()
        save_file({key: one.grad.contiguous() for key, one in trained.items()}, f"{folder}/own-{name}.safetensors")
    return losses


def gradient_difference(folder: Path, name: str) -> float:
    """Return the norm of the difference of all gradients, over that of TRL's."""
    from safetensors.torch import load_file

    own, theirs = (load_file(folder / f"{side}-{name}.safetensors") for side in ("own", "trl"))
    assert own.keys() == theirs.keys()
    difference = sum(float((own[key] - theirs[key]).double().square().sum()) for key in own)
    return float((difference / sum(float(one.double().square().sum()) for one in theirs.values())) ** 0.5)


def own_epoch(folder: str, separate: bool) -> Row:
    """Train an epoch; return its CPU seconds with the references."""
    import tempfile

    import torch

    from partita.lm.branches.masks import BranchSupport
    from partita_trainers.base import GlobalBatch, TrainerContext
    from partita_trainers.registry import build_trainer

    rows = json.loads(Path(folder, "rows.json").read_text(encoding="utf8"))["pairs"]
    lm = own_model(folder, {"type": "preference", "epochs": 1, "skip_all_evaluation": True, "checkpoints_per_epoch": 0})
    if separate:
        lm.branch_support = BranchSupport("measured")
    trainer = build_trainer(lm.config.trainer)
    with tempfile.TemporaryDirectory() as place, spending() as spent:
        context = TrainerContext(
            config=lm.config,
            lm=lm,
            batches=Epoch(rows, GlobalBatch),  # type: ignore[arg-type]
            evaluate=lambda *_, **__: {},  # type: ignore[arg-type,return-value]
            splits=("training",),
            run=Folder(Path(place)),  # type: ignore[arg-type]
            device=torch.device("cpu"),
        )
        steps = trainer.train(context).steps
    return {"CPU s": spent.cpu, "steps": steps, "MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


class Epoch:
    """The pairs as steps of one micro-batch, in random order."""

    def __init__(self, rows: list[Row], step: Any) -> None:
        self.rows = random.Random(1).sample(rows, len(rows))
        self.step, self.num_rows, self.steps_per_epoch = step, len(rows), len(rows) // BATCH_SIZE

    def from_start(self) -> "Epoch":
        return self

    def total_steps(self, epochs: float) -> int:
        return round(self.steps_per_epoch * epochs)

    def steps(self) -> Any:
        for start in range(0, len(self.rows), BATCH_SIZE):
            batch = batch_of(self.rows[start : start + BATCH_SIZE], first=start)
            yield self.step((batch,), {"row": start}, (start + BATCH_SIZE) / len(self.rows))

    def merge_data_positions(self, states: Any) -> Any:
        return states[0]


class Folder:
    """A run that records nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.checkpoints = folder, folder / "checkpoints"

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None

    def progress(self, *_: Any, **__: Any) -> Any:
        from contextlib import nullcontext

        return nullcontext(self)


if __name__ == "__main__":
    main(parity, epoch)
