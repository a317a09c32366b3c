"""Tests of chunks over streams: every token once, the same for any workers and ranks, and exact resume."""

import itertools
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partita.data.batching.collate import collate
from partita.data.batching.policies import build_policy
from partita.data.formatting.build import build_row_tokenizer
from partita.data.ledger import Ledger
from partita.data.run_data import TrainingStreams
from partita.data.streams.stream_loader import StreamLoader, count_shard_groups
from partita.distributed.thread_group import ThreadGroup
from partita.tokenizers.load import byte_tokenizer
from partita_schema.config import Config
from partita_schema.sections.batching import ChunkBatching
from partita_schema.sections.data import LoaderOptions
from partita_schema.sections.sources import FileSource
from partita_trainers.base import GlobalBatch

CHUNKS = ChunkBatching(type="chunk", context_length=24, window=8)
ISOLATED = ChunkBatching(type="chunk", context_length=24, window=8, isolate_documents=True)
CONFIG = Config.model_validate(
    {
        "base_model": "unused",
        "output_features": [{"name": "text", "type": "text"}],
        "data": {"batching": CHUNKS.model_dump()},
        "trainer": {"type": "finetune"},
    }
)
ENCODER = build_row_tokenizer(CONFIG, tokenizer=byte_tokenizer(), context_length=64)


def write_documents(folder: Path, sizes: list[int]) -> Counter[int]:
    """Write a file with each of these numbers of documents; return how often each token occurs."""
    folder.mkdir()
    rng, counts = np.random.default_rng(3), Counter[int]()
    for number, size in enumerate(sizes):
        texts = ["abcdefgh"[document % 8] * int(rng.integers(1, 60)) for document in range(size)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"part-{number}.jsonl").write_text(lines, encoding="utf-8")
        counts.update(token for text in texts for token in ENCODER.formatter.tokenizer(text)["input_ids"])
    counts[ENCODER.end or -1] += sum(sizes)
    return counts


def make(
    folder: Path, *, batching: ChunkBatching = CHUNKS, batches_per_step: int = 3, workers: int = 0, **changes: Any
) -> StreamLoader:
    streams = TrainingStreams([FileSource(type="jsonl", path="*.jsonl", streaming=True)], [1.0], "all", folder, 7)
    num_groups = count_shard_groups(batches_per_step)
    return StreamLoader(
        streams.plan(build_policy(batching, batch_size=2), num_groups=num_groups, chunks=batching),
        ENCODER,
        options=LoaderOptions(workers=workers),
        batches_per_step=batches_per_step,
        more_inputs={"batching": batching.model_dump_json()},
        ledger=Ledger(None, max_bad_rows=0.5),
        collate_batch=partial(collate, pad_token_id=0),
        **changes,
    )


def plain(step: GlobalBatch) -> Any:
    return [
        (
            batch.input_ids_BT.tolist(),
            batch.labels_BT.tolist(),
            batch.keys,
            None if batch.position_ids_BT is None else batch.position_ids_BT.tolist(),
        )
        for batch in step.micro_batches
    ]


def epoch_of(loader: StreamLoader) -> list[GlobalBatch]:
    return list(itertools.takewhile(lambda step: step.epoch == 0, loader.steps()))


@pytest.mark.parametrize("batching", [CHUNKS, ISOLATED], ids=["joined", "isolated"])
def test_every_token_is_in_one_chunk_of_an_epoch(tmp_path: Path, batching: ChunkBatching) -> None:
    wanted = write_documents(tmp_path / "data", [30, 1, 0, 17])

    found = Counter[int]()
    for step in epoch_of(make(tmp_path / "data", batching=batching)):
        for batch in step.micro_batches:
            for ids_T, length in zip(batch.input_ids_BT.tolist(), batch.lengths_B.tolist(), strict=True):
                assert length <= 24
                found.update(ids_T[:length])

    assert found == wanted


@pytest.mark.parametrize("batching", [CHUNKS, ISOLATED], ids=["joined", "isolated"])
def test_a_run_continues_from_every_position_with_the_same_chunks(tmp_path: Path, batching: ChunkBatching) -> None:
    write_documents(tmp_path / "data", [20, 9])
    steps = list(itertools.islice(make(tmp_path / "data", batching=batching).steps(), 25))
    assert steps[-1].epoch > 0, "the steps span two epochs"

    for number in range(0, 24, 3):
        resumed = make(tmp_path / "data", batching=batching)
        resumed.load_data_position(json.loads(json.dumps(steps[number].data_position)))
        following = list(itertools.islice(resumed.steps(), 24 - number))
        assert list(map(plain, following)) == list(map(plain, steps[number + 1 :]))


def test_chunks_are_the_same_with_workers(tmp_path: Path) -> None:
    write_documents(tmp_path / "data", [20, 9])

    alone, helped = (list(map(plain, epoch_of(make(tmp_path / "data", workers=workers)))) for workers in (0, 1))

    assert alone == helped


def test_ranks_share_the_chunks_of_a_step(tmp_path: Path) -> None:
    write_documents(tmp_path / "data", [20, 9])
    wanted = [plain(step) for step in itertools.islice(make(tmp_path / "data", batches_per_step=4).steps(), 6)]

    def steps_of(group: ThreadGroup) -> list[Any]:
        loader = make(tmp_path / "data", batches_per_step=4, process_group=group)
        return [plain(step) for step in itertools.islice(loader.steps(), 6)]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(steps_of, ThreadGroup.of(2))

    assert [[a[0], b[0], a[1], b[1]] for a, b in zip(first, second, strict=True)] == wanted
