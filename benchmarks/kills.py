"""SIGKILL at random moments: a job that was killed and restarted ends like an uninterrupted one.

Each attempt is a separate process, forked after the imports. Moments are drawn from a new seed in every run; the seed
is in the table.
"""

import json
import mmap
import os
import random
import shutil
import struct
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fixtures import (
    WHOLE,
    WORD_MODEL,
    batches_hash,
    count_differences,
    log_of,
    make_model,
    settings,
    snli_rows,
    steps_of,
    write_rows,
    write_shards,
    zero_shot,
)
from harness import ROOT, Limit, Result, Row, main
from processes import Ended, Kill, count_lines, fork, import_all, kill_when, must_run_ranks, run_fork, run_ranks

EPOCHS = 2
SLOTS = (8, 16, 32)
NEW_TOKENS = 24
ROUNDS = 3
RANK_STEPS = 60


def new_chance() -> tuple[int, random.Random]:
    """Return a new seed and its generator."""
    seed = random.randrange(2**32)
    return seed, random.Random(seed)


# Training


def training(folder: Path, quick: bool) -> Result:
    """Twenty SIGKILLs at random moments of training, half of them during the writing of a checkpoint.

    A new model is trained on 2,400 SNLI-like rows for two epochs, with a checkpoint every five steps: indexed rows in
    batches by a token budget, and a stream of four shards, each with two workers, two batches per step and ten kills.
    Losses, and hashes of every batch of every step of any attempt, are compared with an uninterrupted run. Rows are
    counted over the epochs.
    """
    count, kills = (600, 2) if quick else (2400, 10)
    seed, rng = new_chance()
    rows = list(snli_rows(count))
    path = write_rows(folder / "rows.jsonl", rows)
    shards = write_shards(folder / "shards", rows, 4)
    model = make_model(folder / "model")
    budget = {"type": "token_budget", "max_tokens": 512, "window": 512}
    stream = {"type": "jsonl", "path": shards, "streaming": True}
    kinds: dict[str, Row] = {
        "indexed, token_budget": {"source": str(path), "split": WHOLE, "batching": budget},
        "stream, bucket": {"source": stream, "batching": {"type": "bucket", "window": 256}},
    }
    table = []
    for kind, data in kinds.items():
        config = training_config(model, data, count)
        import_all()
        table.append(kill_training(folder / kind.split(",")[0], kind, config, count, kills, rng))
    limits = [
        Limit("losses, batches or checkpoints that differ", sum(row["differences"] for row in table), 0, "max"),
        Limit("rows lost or doubled", sum(row["lost"] + row["doubled"] for row in table), 0, "max"),
        Limit("kills", sum(row["kills"] for row in table), 2 * kills, "min"),
        Limit("kills while a checkpoint was written", sum(row["while saving"] for row in table), kills // 2, "min"),
    ]
    return [*table, {"training": f"random moments drawn with seed {seed}"}], limits


def training_config(model: Path, data: Row, count: int) -> Row:
    streaming = not isinstance(data["source"], str)
    # The length of an epoch of a stream is unknown; a step has two batches of 16 rows.
    changes: Row = {"max_steps": EPOCHS * count // 32} if streaming else {"epochs": EPOCHS}
    changes |= {"steps_per_checkpoint": 5, "checkpoints_per_epoch": 0, "gradient_accumulation_steps": 2}
    return settings(model, data | {"loader": {"workers": 2}}, batch_size=16, **changes)


def kill_training(folder: Path, kind: str, config: Row, count: int, kills: int, rng: random.Random) -> Row:
    """Train once without interruption and once with kills; return the row of the table."""
    folder.mkdir()
    started = time.perf_counter()
    straight, killed = folder / "straight", folder / "killed"
    run_fork(partial(train, config, straight))
    steps = len(log_of(straight))
    saving = rng.sample(range(kills), kills // 2)
    found = Counter[str]()
    for number, step in enumerate(sorted(rng.sample(range(1, steps - 5), kills))):
        found += kill_at(config, killed, step, in_checkpoint=number in saving, rng=rng)
    run_fork(partial(train, config, killed))
    wanted, taken = records(straight), records(killed)
    right = {record["step"]: record["hash"] for record in wanted}
    effective = {record["step"]: record["keys"] for record in taken}
    lost, doubled = counted([effective.get(step, []) for step in sorted(right)], count)
    return {
        "training": kind,
        "steps": steps,
        "kills": found["kills"],
        "while saving": found["while saving"],
        "steps taken again": len(taken) - len(effective),
        "differences": sum(record["hash"] != right.get(record["step"]) for record in taken)
        + len(right.keys() ^ effective.keys())
        + count_differences(steps_of(straight), steps_of(killed))
        + different_cursors(folder),
        "lost": lost,
        "doubled": doubled,
        "seconds": round(time.perf_counter() - started, 1),
    }


def train(config: Row, run: Path) -> None:
    """Train from the newest checkpoint, and record a hash of each step before it runs."""
    from partita.model import Model
    from partita_trainers.finetune_run import FinetuneRun

    take_step = FinetuneRun.take_step

    def recorded(training: Any, step: Any, *, number: int, **named: Any) -> Any:
        keys = [key for batch in step.micro_batches for key in batch.keys]
        record = {"step": number, "hash": batches_hash(step.micro_batches), "keys": keys}
        with run.with_suffix(".steps").open("a", encoding="utf8") as file:
            file.write(json.dumps(record) + "\n")
        return take_step(training, step, number=number, **named)

    FinetuneRun.take_step = recorded  # type: ignore[method-assign]
    Model(config, quiet=True).train(run=run)


def kill_at(config: Row, run: Path, step: int, *, in_checkpoint: bool, rng: random.Random) -> Counter[str]:
    """Kill an attempt shortly after a step, or while it writes the next checkpoint."""
    moment = rng.uniform(0, 0.1)
    reached: list[float] = []

    def due() -> bool:
        if not reached and count_lines(run, "log.jsonl") >= step:
            reached.append(time.perf_counter() + moment)
        return bool(reached) and time.perf_counter() >= reached[0] and (not in_checkpoint or unfinished(run))

    delay = rng.uniform(0, 0.002) if in_checkpoint else 0.0
    killed = kill_when(fork(partial(train, config, run)), due, delay=lambda: delay)
    return Counter({"kills": int(killed), "while saving": int(killed and unfinished(run))})


def unfinished(run: Path) -> bool:
    """Return whether there is an incomplete checkpoint."""
    return any(run.glob("checkpoints/.*"))


def records(run: Path) -> list[Row]:
    """Return the steps of all attempts, without partial lines."""
    found = []
    for line in run.with_suffix(".steps").read_bytes().splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def counted(keys: list[list[str]], count: int) -> tuple[int, int]:
    """Return the numbers of missing and of repeated rows over all complete epochs."""
    lost, doubled, epoch = 0, 0, Counter[str]()
    for step in keys:
        epoch.update(step)
        if epoch.total() >= count:
            lost += count - len(epoch)
            doubled += epoch.total() - len(epoch)
            epoch = Counter()
    return lost, doubled


def different_cursors(folder: Path) -> int:
    """Return how many positions in the kept checkpoints differ."""
    one, other = (
        {path.parent.name: path.read_text("utf8") for path in (folder / name).glob("checkpoints/*/data_position.json")}
        for name in ("straight", "killed")
    )
    return sum(one.get(name) != other.get(name) for name in one.keys() | other.keys())


# Prediction


def prediction(folder: Path, quick: bool) -> Result:
    """Twenty SIGKILLs at random moments of a prediction of 5,000 rows, compared with an uninterrupted prediction.

    A new model, prompts of 3 to 60 tokens, up to 24 new tokens, one thread. Work is counted in the model: tokens of
    prompts and answers, including lost ones and padding. A kill loses the work in the slots at that moment, on average
    a prompt and half an answer per slot: with R rows, K kills and S slots about K * S / R of the rows start again.
    """
    count, kills = (1000, 4) if quick else (5000, 20)
    rows = []
    os.chdir(folder)
    prompt_tokens = write_questions(Path("rows.jsonl"), count) / count
    import_all()
    for slots in SLOTS[:1] if quick else SLOTS:
        lost = slots * (prompt_tokens + NEW_TOKENS / 2) / (count * (prompt_tokens + NEW_TOKENS))
        rows.append(killed_often(slots, kills=kills) | {"expected work": round(1 + kills * lost, 4)})
    limits = [
        *(Limit(f"work over one pass, {row['slots']} slots", row["work"], 1.05, "max") for row in rows),
        Limit("files that are the straight run's", sum(row["the same file"] for row in rows), len(rows), "min"),
        Limit("kills, least", min(row["kills"] for row in rows), kills, "min"),
    ]
    return rows, limits


def killed_often(slots: int, *, kills: int) -> Row:
    """Kill a prediction at random moments until it ends; return its row of the table."""
    seed, rng = new_chance()
    names = [f"{kind}{slots}" for kind in ("straight", "killed")]
    straight = attempt(names[0], slots)
    killed = tokens = 0
    while killed < kills:
        # The remaining work shrinks: moments are drawn uniformly from the rest.
        after = rng.uniform(0.3, 1.0) * straight["seconds"] / (kills + 1) * 1.5
        found = attempt(names[1], slots, kill_after=after)
        tokens += found["tokens"]
        if not found["killed"]:
            break
        killed += 1
    if found["killed"]:
        tokens += attempt(names[1], slots)["tokens"]
    files = [Path(f"{name}.jsonl").read_bytes() for name in names]
    return {
        "rows": files[1].count(b"\n"),
        "slots": slots,
        "kills": killed,
        "tokens of the straight run": straight["tokens"],
        "tokens of all attempts": tokens,
        "work": round(tokens / straight["tokens"], 4),
        "the same file": files[0] == files[1],
        "seed": seed,
    }


def write_questions(path: Path, count: int) -> int:
    """Write questions; return their total number of tokens."""
    rng = random.Random(1)
    rows: list[Row] = []
    for number in range(count):
        question = " ".join(f"w{rng.randrange(200)}" for _ in range(rng.randint(3, 60)))
        rows.append({"number": number, "question": question, "answer": "w1"})
    write_rows(path, rows)
    return sum(len(row["question"].split()) for row in rows)


def attempt(output: str, slots: int, *, kill_after: float = float("inf")) -> Row:
    """Predict in a process that is killed `kill_after` seconds after its first token, unless it has ended."""
    counter = mmap.mmap(-1, 16)
    begun: list[float] = []

    def due() -> bool:
        if not begun and struct.unpack("q", counter[:8])[0]:
            begun.append(time.perf_counter())
        return bool(begun) and time.perf_counter() - begun[0] > kill_after

    killed = kill_when(fork(partial(predict, output, slots, counter)), due)
    seconds = time.perf_counter() - begun[0] if begun else 0.0
    found = {"tokens": struct.unpack("q", counter[:8])[0], "killed": killed, "seconds": seconds}
    print(output, found, flush=True)
    return found


def predict(output: str, slots: int, counter: mmap.mmap) -> None:
    """Predict, and count the tokens computed by the model in memory that survives a kill."""
    import torch

    from partita.lm.slots.slots import Slots
    from partita.model import Model

    run = Slots.run

    def counted(self: Any, ids_NL: torch.Tensor, *others: Any, **more: Any) -> Any:
        counter[:8] = struct.pack("q", struct.unpack("q", counter[:8])[0] + ids_NL.numel())
        return run(self, ids_NL, *others, **more)

    Slots.run = counted  # type: ignore[method-assign]
    config = zero_shot(
        WORD_MODEL, "question answer", tokens=NEW_TOKENS, data={"source": "rows.jsonl"}, trainer={"batch_size": slots}
    )
    Model(config, quiet=True).predict("rows.jsonl", output=f"{output}.jsonl")


# Self-training


def self_training(folder: Path, quick: bool) -> Result:
    """Twenty SIGKILLs at random moments of three rounds of 400 dialogues and training.

    A new model, sampled answers, two turns per dialogue, 8 steps on data and 10 in each round, one thread. An attempt
    is killed shortly after a random point: two points before the rounds, and in each round three during its dialogues
    and three during its steps. Transcripts, the rows and losses of every step, and all weights are compared with those
    of an uninterrupted job.
    """
    dialogues, each = (80, 1) if quick else (400, 3)
    seed, rng = new_chance()
    import_all()
    os.chdir(folder)
    shutil.copy(ROOT / "tests" / "framework" / "simulation" / "worlds_of_tests.py", folder)
    write_dialogues(Path("rows.jsonl"))
    run_fork(partial(train_rounds, "straight", dialogues))
    wanted = kill_points(rng, dialogues, each=each)
    reached = [point for point in wanted if killed_in(point, dialogues)]
    run_fork(partial(train_rounds, "killed", dialogues))
    differences = compare_rounds(Path("straight"), Path("killed"))
    names = [point.name for point in reached]
    row = {
        "kills": len(reached),
        "before the rounds": names.count("data"),
        "among dialogues": names.count("dialogues"),
        "among steps": names.count("steps"),
        **differences,
        "seed": seed,
    }
    limits = [
        Limit("kills", len(reached), len(wanted), "min"),
        Limit("differences", sum(differences.values()), 0, "max"),
    ]
    return [row], limits


class KillPoint(NamedTuple):
    """A point at which a job is killed: `delay` seconds after a file of the run has `lines` lines."""

    name: str
    file: str
    lines: int
    delay: float


def kill_points(rng: random.Random, dialogues: int, *, each: int) -> list[KillPoint]:
    """Return points in the order in which a job reaches them."""
    found = [KillPoint("data", "log.jsonl", lines, rng.uniform(0, 0.05)) for lines in (2, 6)]
    for number in range(1, ROUNDS + 1):
        kinds = (
            ("dialogues", f"rounds/{number}/transcripts/.predicted.jsonl", dialogues - 30),
            ("steps", f"rounds/{number}/log.jsonl", 9),
        )
        for name, file, most in kinds:
            lines = sorted(rng.sample(range(2, most), each))
            found += [KillPoint(name, file, line, rng.uniform(0, 0.05)) for line in lines]
    return found


def write_dialogues(path: Path) -> None:
    """Write dialogues of one turn."""
    words = random.Random(0).choices(("red", "green", "blue"), k=200)
    turns = [[{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": word}] for word in words]
    write_rows(path, [{"messages": messages} for messages in turns])


def rounds_config(dialogues: int) -> dict[str, Any]:
    """Return the config of both jobs."""
    return {
        "base_model": {
            "type": "scratch",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "context_length": 96,
            "tokenizer": "word",
            "vocab_size": 64,
        },
        "input_features": [{"name": "messages", "type": "dialogue"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "generation": {"max_new_tokens": 3, "do_sample": True},
        "data": {"source": "rows.jsonl", "split": {"type": "random", "probabilities": [0.9, 0.1, 0.0]}},
        "trainer": {
            "type": "finetune",
            "max_steps": 8,
            "batch_size": 16,
            "learning_rate": 0.003,
            "steps_per_checkpoint": 2,
        },
        "simulation": {
            "world": {"type": "environment", "environment": "worlds_of_tests:Repeat"},
            "tasks": {"count": 20},
            "self_training": {
                "rounds": ROUNDS,
                "tasks": {"count": dialogues},
                "max_steps": 10,
                "select": "all",
                "target": "every_agent_turn",
                "guard": None,
            },
        },
    }


def train_rounds(run: str, dialogues: int) -> None:
    from partita.model import Model

    Model(rounds_config(dialogues), quiet=True).train(run=run)


def killed_in(point: KillPoint, dialogues: int) -> bool:
    """Start a job and kill it at a point; return whether it was killed."""
    pid = fork(partial(train_rounds, "killed", dialogues))
    killed = kill_when(pid, lambda: count_lines(Path("killed"), point.file) >= point.lines, delay=lambda: point.delay)
    print(point, "killed" if killed else "ended", flush=True)
    return killed


def compare_rounds(straight: Path, killed: Path) -> dict[str, int]:
    """Return the numbers of different files and weights."""
    from safetensors.torch import load_file

    names = [f"rounds/{number}/transcripts/predicted.jsonl" for number in range(1, ROUNDS + 1)]
    runs = ["", *(f"rounds/{number}" for number in range(1, ROUNDS + 1))]
    models = ["model", *(f"rounds/{number}/model" for number in range(ROUNDS + 1))]
    weights = [[load_file(run / name / "model.safetensors") for run in (straight, killed)] for name in models]
    return {
        "transcripts that differ": sum(
            (straight / name).read_bytes() != (killed / name).read_bytes() for name in names
        ),
        "logs of steps that differ": sum(steps_of(straight / name) != steps_of(killed / name) for name in runs),
        "weights that differ": sum(
            one.keys() != other.keys() or any(not bool((one[name] == other[name]).all()) for name in one)
            for one, other in weights
        ),
    }


# Ranks


def ranks(folder: Path, quick: bool) -> Result:
    """Twenty SIGKILLs of one rank of 2 or 4 at random moments of training, predictions and scores.

    A model of 0.3 M parameters is trained on 600 SNLI-like rows in 60 steps, evaluated every ten and saved every five;
    then it answers 1,500 rows in 8 slots a rank, and is scored on 300. Rank and moment are drawn for each kill; some
    fall into a checkpoint, an evaluation or the end of a job. In training and scoring, the remaining ranks must end by
    themselves. In prediction they get SIGTERM, as from a launcher, because they wait for no other rank before the end.
    All results are compared with an uninterrupted job of one process.
    """
    kills = {"training": 2, "predictions": 1, "scores": 1} if quick else {"training": 11, "predictions": 6, "scores": 3}
    seed, rng = new_chance()
    import_all()
    config = ranks_config(folder)
    straight, killed = folder / "straight", folder / "killed"
    table: list[Row] = []
    for work, (job, files, most) in jobs(folder, config).items():
        must_run_ranks(1, partial(on_rank, job, straight))
        shares = [number / kills[work] for number in range(kills[work])]
        found = [kill_rank(partial(on_rank, job, killed), killed, files, most, rng, share) for share in shares]
        must_run_ranks(2, partial(on_rank, job, killed))
        hits = [one for one in found if one is not None]
        table.append(
            {
                "work": work,
                "kills": len(hits),
                "ended before": len(found) - len(hits),
                "seconds to the end, most": round(max((one.seconds_after for one in hits), default=0.0), 1),
                "ranks that ended well": sum(status == 0 for one in hits for status in one.status),
                "differences": differences(work, straight, killed),
            }
        )
        print(table[-1], flush=True)
    slowest = max(row["seconds to the end, most"] for row in table)
    limits = [
        Limit("differences", sum(row["differences"] for row in table), 0, "max"),
        Limit("kills", sum(row["kills"] for row in table), sum(kills.values()), "min"),
        Limit("seconds from a kill to the end of the job, most", slowest, 10, "max"),
    ]
    return [*table, {"work": f"ranks and moments drawn with seed {seed}"}], limits


def ranks_config(folder: Path) -> Row:
    write_rows(folder / "rows.jsonl", snli_rows(600))
    write_rows(folder / "others.jsonl", snli_rows(300, seed=1))
    write_rows(folder / "many.jsonl", snli_rows(1500, seed=2))
    others = str(folder / "others.jsonl")
    data = {"source": str(folder / "rows.jsonl"), "split": WHOLE, "validation": others, "test": others}
    config = settings(make_model(folder / "model"), data, max_steps=RANK_STEPS, steps_per_checkpoint=5)
    trainer = config["trainer"]
    del trainer["gradient_accumulation_steps"], trainer["skip_all_evaluation"]
    trainer |= {"effective_batch_size": 32, "batch_size": 4, "eval_batch_size": 8, "steps_per_evaluation": 10}
    trainer |= {"max_generated_rows": 16, "evaluate_generated": True}
    return config | {"generation": {"max_new_tokens": 8}}


def jobs(folder: Path, config: Row) -> dict[str, tuple[Callable[[Path], None], str, int]]:
    """Return the work in a run's folder, the files whose lines show the progress, and their number of lines."""
    from partita.model import Model

    def train(run: Path) -> None:
        Model(config, quiet=True).train(run=run)

    def predict(run: Path) -> None:
        Model.load(run, quiet=True).predict(folder / "many.jsonl", output=run / "answers.jsonl", batch_size=8)

    def score(run: Path) -> None:
        from partita.backends.launch import get_process_group

        model = Model.load(run, quiet=True)
        scores = model.evaluate(folder / "others.jsonl", batch_size=4)
        if get_process_group(model.config).rank == 0:
            (run / "scores.json").write_text(json.dumps(scores["label"]), encoding="utf8")

    return {
        "training": (train, "log.jsonl", RANK_STEPS),
        "predictions": (predict, "journal/*.jsonl", 1500),
        "scores": (score, "manifest.json", 0),
    }


def on_rank(job: Callable[[Path], None], run: Path, rank: int) -> None:
    job(run)


def kill_rank(
    work: Callable[[int], None], run: Path, files: str, most: int, rng: random.Random, share: float
) -> Ended | None:
    """Run a job with a kill shortly after this fraction of the work; return None if it ended before."""
    number = rng.choice((2, 4))
    lines = max(1, round(most * min(0.97, share + rng.uniform(0, 0.1))))
    delay = rng.uniform(0, 0.1) if most else rng.uniform(0.2, 1.2)
    kill = Kill(rng.randrange(number), lambda: count_lines(run, files) >= lines, delay, "journal" in files)
    ended = run_ranks(number, work, kill=kill)
    return ended if ended.status[kill.rank] == 9 else None


def differences(work: str, straight: Path, killed: Path) -> int:
    """Return the number of differences between the two runs."""
    if work != "training":
        name = {"predictions": "answers.jsonl", "scores": "scores.json"}[work]
        return int((straight / name).read_bytes() != (killed / name).read_bytes())
    steps = sum(
        a["batch_hash"] != b["batch_hash"] or abs(a["loss"] / b["loss"] - 1) > 1e-3
        for a, b in zip(log_of(straight), log_of(killed), strict=True)
    )
    evaluated = [json.loads((run / "manifest.json").read_text())["evaluations"] for run in (straight, killed)]
    return steps + sum(abs(a["loss"] / b["loss"] - 1) > 1e-3 for a, b in zip(*evaluated, strict=True))


if __name__ == "__main__":
    main(training, prediction, self_training, ranks)
