"""Training a bag of words without locks: one process, Hogwild workers, and synchronous processes.

Needs the shared folder next to the repository. The task is to classify which service a dialogue of the Schema-Guided
Dialogues is about, from one turn and the previous one; a fifth of the dialogues is the test set. Embeddings of words
and pairs of words, Adagrad, batches of 16 rows, the same number of updates and the same initial weights for all. The
synchronous processes are two of torch.distributed over gloo with 8 rows of each batch: they exchange the gradients of
all embeddings (dense), or of those in their batch (sparse), and make the same updates. Each process has one thread.
Rates are those of the updates, without the start of the processes; workers beyond the number of cores only take turns.
The accuracies of Hogwild differ from run to run.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from fixtures import read_rows
from harness import SHARED, Limit, Result, Row, main

from partita.lm.heads.embedding_bag import EmbeddingBagClassifier, bags_of
from partita_trainers.hogwild.bags import Bags, chosen
from partita_trainers.hogwild.worker import CONTEXT, SharedCounters, SharedState, change, first_sums, train_epoch
from partita_trainers.hogwild.workers import HogwildWorkers, share

BATCH_SIZE = 16
VOCABULARY = 8192
BUCKETS = 16384
DIM = 64
LEARNING_RATE = 0.1
SEED = 1


def hogwild(folder: Path, quick: bool) -> Result:
    torch.set_num_threads(1)
    training, test, labels = read_bags(SHARED / "data" / "sgd" / "dialogues.jsonl")
    epochs, rounds = (1, 1) if quick else (6, 3)
    cases = [("one process", 1), *(("hogwild", workers) for workers in (1, 2, 4)), ("sparse", 2), ("dense", 2)]
    found: dict[tuple[str, int], list[Row]] = {case: [] for case in cases}
    for number in range(rounds):
        for kind, processes in cases if number == 0 else cases[:-1]:  # the last is the slowest by far
            shared = make_shared(training, labels)
            found[kind, processes].append(measure(shared, test, kind, processes, epochs=epochs))
    rows = [summary(kind, processes, made, len(training) * epochs) for (kind, processes), made in found.items()]
    return rows, limits_of(found)


def limits_of(found: dict[tuple[str, int], list[Row]]) -> list[Limit]:
    """Return the limits: faster than one process and than synchronous processes, with the same quality."""

    def middle(kind: str, processes: int, name: str) -> float:
        return statistics.median(row[name] for row in found[kind, processes])

    alone, two = middle("one process", 1, "seconds"), middle("hogwild", 2, "seconds")
    lost = middle("one process", 1, "accuracy") - middle("hogwild", 2, "accuracy")
    return [
        Limit("rows a second, 2 workers over one process", alone / two, 1.3, "min"),
        Limit("rows a second, 2 workers over 2 that wait, sparse", middle("sparse", 2, "seconds") / two, 1.0, "min"),
        Limit("accuracy, one process less 2 workers", lost, 0.02, "max"),
    ]


def summary(kind: str, processes: int, made: list[Row], rows: int) -> Row:
    """Return the medians of the rounds."""
    seconds, cpu = (statistics.median(row[name] for row in made) for name in ("seconds", "cpu_seconds"))
    accuracies = [row["accuracy"] for row in made]
    return {
        "training": {"sparse": "waiting, sparse", "dense": "waiting, dense"}.get(kind, kind),
        "processes": processes,
        "updates": made[0]["updates"],
        "seconds": seconds,
        "CPU seconds": cpu,
        "rows a second": rows / seconds,
        "rows a CPU second": rows / cpu,
        "accuracy": statistics.median(accuracies),
        "lowest accuracy": min(accuracies),
        "test loss": statistics.median(row["loss"] for row in made),
    }


def read_turns(source: Path) -> Iterator[tuple[int, str, str]]:
    """Yield number, previous and current turn, and service of the dialogues with one service."""
    for number, dialogue in enumerate(read_rows(source)):
        texts = ["", *(turn["text"] for turn in dialogue["turns"])]
        if len(dialogue["services"]) == 1:
            for before, text in pairwise(texts):
                yield number, f"{before} {text}".lower(), dialogue["services"][0]


def read_bags(source: Path) -> tuple[Bags, Bags, int]:
    """Return training and test bags, and the number of services."""
    turns = list(read_turns(source))
    services = sorted({service for _, _, service in turns})
    words: dict[str, int] = {}
    parts: list[list[tuple[list[int], int]]] = [[], []]
    for number, text, service in turns:
        ids = [words.setdefault(word, min(len(words), VOCABULARY - 1)) for word in text.split()]
        parts[number % 5 == 0].append((ids, services.index(service)))
    made = []
    for part in parts:
        ids_K, starts_Nplus1 = bags_of([ids for ids, _ in part], ngrams=2, vocabulary=VOCABULARY, buckets=BUCKETS)
        made.append(Bags(ids_K, starts_Nplus1, torch.tensor([label for _, label in part])))
    return made[0], made[1], len(services)


def make_shared(rows: Bags, labels: int) -> SharedState:
    """Return new weights in shared memory, always with the same values."""
    torch.manual_seed(SEED)
    module = EmbeddingBagClassifier(embeddings=VOCABULARY + BUCKETS, dim=DIM, labels=labels)
    sums = first_sums(module)
    share((*module.parameters(), *sums, *rows.tensors))
    return SharedState(module, sums, rows, SEED, BATCH_SIZE, LEARNING_RATE, SharedCounters())


def measure(shared: SharedState, test: Bags, kind: str, processes: int, *, epochs: int) -> Row:
    """Return the seconds of all epochs, and the accuracy afterwards."""
    if kind == "one process":
        with torch.sparse.check_sparse_tensor_invariants(False):
            times = times_alone(shared, epochs)
    elif kind == "hogwild":
        times = times_of_workers(shared, processes, epochs)
    else:
        times = times_of_waiting(shared, processes, epochs, dense=kind == "dense")
    with torch.no_grad():
        logits_NC = shared.module(test.ids_K, test.starts_Nplus1[:-1])
    right = (logits_NC.argmax(1) == test.labels_N).float().mean()
    loss = torch.nn.functional.cross_entropy(logits_NC, test.labels_N)
    seconds, cpu_seconds = times
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "updates": epochs * shared.steps_per_epoch,
        "accuracy": float(right),
        "loss": float(loss),
    }


def times_alone(shared: SharedState, epochs: int) -> tuple[float, float]:
    """Return wall and CPU seconds of a worker's loop in this process."""
    started, used = time.perf_counter(), time.process_time()
    for epoch in range(epochs):
        train_epoch(shared, until=(epoch + 1) * shared.steps_per_epoch)
    return time.perf_counter() - started, time.process_time() - used


def times_of_workers(shared: SharedState, workers: int, epochs: int) -> tuple[float, float]:
    """Return wall and CPU seconds of Hogwild workers, measured after their start."""

    def look() -> None:
        """Show nothing."""

    with HogwildWorkers(shared, workers) as started_workers:
        started_workers.answers(look=look)
        started = time.perf_counter()
        used = sum(started_workers.run((epoch + 1) * shared.steps_per_epoch, look=look) for epoch in range(epochs))
        return time.perf_counter() - started, used


def times_of_waiting(shared: SharedState, processes: int, epochs: int, *, dense: bool) -> tuple[float, float]:
    """Return wall and CPU seconds of processes that exchange gradients; the first one has the weights of `shared`."""
    with tempfile.TemporaryDirectory() as folder:
        links, ranks = [], []
        for rank in range(processes):
            ours, theirs = CONTEXT.Pipe()
            words = (shared, rank, processes, epochs, dense, Path(folder) / "meeting", theirs)
            ranks.append(CONTEXT.Process(target=wait_for_others, args=words, daemon=True))
            ranks[-1].start()
            links.append(ours)
        found = [link.recv() for link in links]
        for process in ranks:
            process.join()
    return max(seconds for seconds, _ in found), sum(used for _, used in found)


def wait_for_others(
    shared: SharedState, rank: int, ranks: int, epochs: int, dense: bool, meeting: Path, link: Connection
) -> None:
    """Run a process with separate weights on its part of each batch."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.sparse.check_sparse_tensor_invariants.disable()
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    module, sums = shared.module, shared.sums
    if rank:  # the first one uses the shared weights, which are tested afterwards
        module = EmbeddingBagClassifier(embeddings=VOCABULARY + BUCKETS, dim=DIM, labels=module.output.out_features)
        module.load_state_dict(shared.module.state_dict())
        sums = tuple(total.clone() for total in shared.sums)
    dist.barrier()
    started, used = time.perf_counter(), time.process_time()
    for epoch in range(epochs):
        for rows in shared.order(epoch).split(BATCH_SIZE):
            update(module, sums, chosen(shared.rows, rows[rank::ranks]), len(rows), dense=dense)
    times = time.perf_counter() - started, time.process_time() - used
    dist.barrier()
    dist.destroy_process_group()
    link.send(times)


def update(module: torch.nn.Module, sums: tuple[torch.Tensor, ...], mine: Bags, rows: int, *, dense: bool) -> None:
    """Update the weights with the gradients of all processes."""
    logits_NC = module(mine.ids_K, mine.starts_Nplus1[:-1])
    total = torch.nn.functional.cross_entropy(logits_NC, mine.labels_N, reduction="sum")
    torch.autograd.backward(total / rows)
    with torch.no_grad():
        for parameter, squares in zip(module.parameters(), sums, strict=True):
            assert parameter.grad is not None
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense() if dense else parameter.grad.coalesce()
            dist.all_reduce(parameter.grad)
            change(parameter, squares, rate=LEARNING_RATE)
            parameter.grad = None


if __name__ == "__main__":
    main(hogwild)
