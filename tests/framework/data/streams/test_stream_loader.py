"""Tests of the loader on streams: every row once, the same batches for any workers and ranks, exact resume anywhere."""

import itertools
import json
import multiprocessing
import time
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from partita.data.batching.collate import collate
from partita.data.batching.policies import Policy, build_policy
from partita.data.chunks import ChunkTokenizer
from partita.data.dialogue import expanded
from partita.data.formatting.build import build_row_tokenizer
from partita.data.formatting.row_tokenizer import RowTokenizer
from partita.data.ledger import Ledger
from partita.data.run_data import TrainingStreams
from partita.data.sources.sources import open_rows
from partita.data.streams import shard_group as shard_group_module
from partita.data.streams.interleaved_reader import InterleavedReader
from partita.data.streams.shard_group import rows_of_chunk
from partita.data.streams.stream_loader import StreamLoader, count_shard_groups, merged
from partita.data.tokenized import TokenizedDataset
from partita.distributed.thread_group import ThreadGroup
from partita.tokenizers.load import byte_tokenizer, train_tokenizer
from partita_schema.config import Config
from partita_schema.errors import DataError, ResumeError
from partita_schema.sections.batching import BucketBatching, FixedBatching, PackBatching, TokenBudgetBatching
from partita_schema.sections.data import LoaderOptions
from partita_schema.sections.model import ScratchModel
from partita_schema.sections.sources import FileSource
from partita_trainers.base import GlobalBatch

from ....properties import ends, examples

CONFIG = Config.model_validate(
    {
        "base_model": "unused",
        "input_features": [{"name": "question"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "trainer": {"type": "finetune"},
    }
)
ENCODER = build_row_tokenizer(CONFIG, tokenizer=byte_tokenizer(), context_length=64)
BUDGET = TokenBudgetBatching(type="token_budget", max_tokens=160, window=16)
IN_ORDER = FixedBatching(type="fixed", shuffle=False)
BATCHINGS = [
    FixedBatching(type="fixed"),
    IN_ORDER,
    BucketBatching(type="bucket", window=12, noise=0.1),
    BUDGET,
    PackBatching(type="pack", max_tokens=70, window=16),
]


def write_shards(folder: Path, sizes: "list[int]", *, broken: frozenset[int] = frozenset()) -> Path:
    """Write a file with each of these numbers of rows; rows whose number over all files is in `broken` are invalid
    JSON."""
    folder.mkdir(exist_ok=True)
    rng, number = np.random.default_rng(3), 0
    for index, size in enumerate(sizes):
        lines = []
        for _ in range(size):
            row = {"question": "q" * int(rng.integers(1, 40)), "answer": f"a{number}"}
            lines.append("{broken\n" if number in broken else json.dumps(row) + "\n")
            number += 1
        (folder / f"part-{index:02}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def policy_of(batching: Any) -> Policy:
    return build_policy(batching, batch_size=4)


def make(
    folder: Path,
    *,
    batching: Any = BUDGET,
    batches_per_step: int = 3,
    workers: int = 0,
    ledger: Ledger | None = None,
    seed: int = 7,
    row_tokenizer: RowTokenizer = ENCODER,
    options: LoaderOptions | None = None,
    streams: TrainingStreams | None = None,
    **changes: Any,
) -> StreamLoader:
    streams = streams or TrainingStreams(
        [FileSource(type="jsonl", path="*.jsonl", streaming=True)], [1.0], "all", folder, seed
    )
    return StreamLoader(
        streams.plan(policy_of(batching), num_groups=count_shard_groups(batches_per_step)),
        row_tokenizer,
        options=options or LoaderOptions(workers=workers),
        batches_per_step=batches_per_step,
        more_inputs={"batching": batching.model_dump_json(), "seed": str(seed)},
        ledger=ledger or Ledger(None, max_bad_rows=0.5),
        collate_batch=partial(collate, pad_token_id=0),
        **changes,
    )


def plain(global_batch: GlobalBatch) -> Any:
    return [(batch.input_ids_BT.tolist(), batch.labels_BT.tolist(), batch.keys) for batch in global_batch.micro_batches]


def epoch_of(loader: StreamLoader, number: int = 0) -> list[GlobalBatch]:
    after = itertools.dropwhile(lambda step: step.epoch < number, loader.steps())
    return list(itertools.takewhile(lambda step: step.epoch == number, after))


def keys_of(steps: "list[GlobalBatch]") -> Counter[str]:
    return Counter(key for step in steps for batch in step.micro_batches for key in batch.keys)


@pytest.mark.parametrize("batching", BATCHINGS, ids=lambda batching: batching.type)
def test_every_row_is_used_exactly_once_per_epoch(tmp_path: Path, batching: Any) -> None:
    folder = write_shards(tmp_path / "data", [50, 1, 33, 0, 20])

    for epoch in (0, 1):
        keys = keys_of(epoch_of(make(folder, batching=batching), epoch))

        assert set(keys.values()) == {1}
        assert len(keys) == 104
        assert "part-02.jsonl:33" in keys


def test_epochs_differ(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "data", [50, 40])

    first, second = (list(map(plain, epoch_of(make(folder), number))) for number in (0, 1))

    assert first != second


@examples(12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=5).filter(any),
    batching=st.sampled_from(BATCHINGS),
    batches_per_step=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_resuming_from_any_position_is_exact(
    tmp_path_factory: pytest.TempPathFactory, sizes: "list[int]", batching: Any, batches_per_step: int, seed: int
) -> None:
    folder = write_shards(tmp_path_factory.mktemp("data") / "rows", sizes)

    def loader() -> StreamLoader:
        return make(folder, batching=batching, batches_per_step=batches_per_step, seed=seed)

    length = len(epoch_of(loader()))
    straight = list(itertools.islice(loader().steps(), length + 3))
    for index, step in enumerate(straight[:-1]):
        resumed = loader()
        resumed.load_data_position(json.loads(json.dumps(step.data_position)))
        assert plain(next(iter(resumed.steps()))) == plain(straight[index + 1])


def test_the_tenth_resume_behaves_like_the_first(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "data", [70, 40])
    straight = [plain(step) for step in itertools.islice(make(folder, batches_per_step=2).steps(), 25)]

    result, data_position = [], None
    for _ in range(12):
        loader = make(folder, batches_per_step=2)
        if data_position is not None:
            loader.load_data_position(data_position)
        for step in itertools.islice(loader.steps(), 2):
            result.append(plain(step))
            data_position = step.data_position

    assert result == straight[:24]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_steps_are_the_same_for_any_number_of_workers(tmp_path: Path, workers: int) -> None:
    folder = write_shards(tmp_path / "data", [300, 200], broken=frozenset({17, 301}))
    alone, ledger = [Ledger(None, max_bad_rows=0.5) for _ in range(2)]

    expected = list(map(plain, epoch_of(make(folder, ledger=alone))))
    results = list(map(plain, epoch_of(make(folder, workers=workers, ledger=ledger))))

    assert results == expected
    assert ledger.state() == alone.state()


def count_takes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the number of rows of each window read from now on is appended."""
    results: list[int] = []
    take = InterleavedReader.take

    def counted(reader: InterleavedReader, count: int) -> Any:
        rows = take(reader, count)
        results.append(len(rows))
        return rows

    monkeypatch.setattr(InterleavedReader, "take", counted)
    return results


def test_workers_read_ahead_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_shards(tmp_path / "data", [300, 300])
    windows = count_takes(monkeypatch)

    with closing(make(folder, batches_per_step=4, workers=1).steps()) as steps:
        next(steps)

        num_groups, prefetch = 4, 2
        assert windows == [16] * (num_groups + prefetch)


def test_the_first_batch_of_rows_in_order_waits_for_no_other_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_shards(tmp_path / "data", [900])
    rows = count_takes(monkeypatch)

    with closing(make(folder, batching=IN_ORDER, batches_per_step=1).steps()) as steps:
        next(steps)
        assert rows == [4]
        for _ in range(900 // 4 - 1):
            next(steps)

    assert sum(rows) == 900
    assert rows[:5] == [4, 8, 16, 32, 4]
    assert max(rows) == 32


@pytest.mark.parametrize(
    ("batch_size", "first", "later"),
    [
        (1, [1, 2, 4, 8, 16, 32, 32], 32),
        (32, [32, 32], 32),
        (48, [48, 48], 48),
        (64, [64, 64], 64),
        (65, [33, 33], 33),
        (200, [50, 50, 50, 50], 50),
    ],
)
def test_the_first_chunks_of_rows_in_order_hold_the_first_batch(batch_size: int, first: list[int], later: int) -> None:
    policy = build_policy(IN_ORDER, batch_size=batch_size)

    assert [rows_of_chunk(policy, 0, chunk) for chunk in range(len(first))] == first
    assert rows_of_chunk(policy, 1, 0) == later


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_rows_in_order_are_cut_window_by_window_without_the_broken_ones(
    tmp_path: Path, workers: int, drop_last: bool
) -> None:
    broken = frozenset({0, 5, 6, 40, 62, 63, *range(64, 192), 300, 449})
    folder = write_shards(tmp_path / "data", [450], broken=broken)
    batching = FixedBatching(type="fixed", shuffle=False, drop_last=drop_last)
    windows = [range(64), range(64, 192), range(192, 448), range(448, 450)]
    wanted = []
    for window in windows:
        good = [f"part-00.jsonl:{row + 1}" for row in window if row not in broken]
        wanted += [tuple(good[start : start + 4]) for start in range(0, len(good), 4)]
    if drop_last:
        wanted = [keys for keys in wanted if len(keys) == 4]

    steps = epoch_of(make(folder, batching=batching, batches_per_step=1, workers=workers))

    assert [step.micro_batches[0].keys for step in steps] == wanted


def test_ordered_rows_give_the_same_batches_with_any_window_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_shards(tmp_path / "data", [301, 300])
    growing = list(map(plain, epoch_of(make(folder, batching=IN_ORDER))))

    monkeypatch.setattr(shard_group_module, "rows_of_window", lambda policy, number: policy.window)

    assert list(map(plain, epoch_of(make(folder, batching=IN_ORDER)))) == growing


@pytest.mark.parametrize("workers", [0, 1])
def test_memory_holds_a_window_per_shard_group_and_those_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    folder = write_shards(tmp_path / "data", [700, 700])
    windows = count_takes(monkeypatch)
    loader = make(folder, batching=BucketBatching(type="bucket", window=64), batches_per_step=4, workers=workers)

    rows, ahead = 0, list[int]()
    for step in itertools.islice(loader.steps(), 60):
        rows += sum(batch.rows for batch in step.micro_batches)
        ahead.append(sum(windows) - rows)

    num_groups, prefetch = 4, 2 if workers else 0
    assert max(ahead) <= (num_groups + prefetch) * 64
    # In steps where every shard group is at the end of a window, as many windows are ready.
    assert workers == 0 or min(ahead[1:]) >= num_groups * 64


def test_the_text_of_rows_is_freed_after_encoding(tmp_path: Path) -> None:
    text = "x" * 60_000
    rows = [json.dumps({"question": "q", "answer": "a", "unused": f"{number}{text}"}) for number in range(300)]
    (tmp_path / "part-00.jsonl").write_text("\n".join(rows), encoding="utf-8")
    loader = make(tmp_path, batching=BucketBatching(type="bucket", window=64), batches_per_step=4)
    tracemalloc.start()
    with closing(loader.steps()) as steps:
        next(steps)
        held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    window = 64 * 60_000
    assert peak > window
    assert held < 2 * window  # each of the four shard groups has a window


def test_closed_steps_close_files_and_end_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, closed = write_shards(tmp_path / "data", [300, 300]), list[InterleavedReader]()
    close = InterleavedReader.close
    monkeypatch.setattr(InterleavedReader, "close", lambda reader: (closed.append(reader), close(reader)))
    steps = make(folder, batches_per_step=4, workers=1).steps()
    next(steps)
    assert len(multiprocessing.active_children()) == 1

    steps.close()  # type: ignore[attr-defined]

    assert len(closed) == 4
    assert multiprocessing.active_children() == []


@pytest.mark.long
def test_a_step_as_long_as_the_timeout_is_not_a_hung_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, encode = write_shards(tmp_path / "data", [300, 300]), ChunkTokenizer.__call__
    monkeypatch.setattr(ChunkTokenizer, "__call__", lambda self, chunk: (time.sleep(1.0), encode(self, chunk))[1])
    options = LoaderOptions(workers=1, timeout=3.0, start_method="fork")

    with closing(make(folder, batches_per_step=4, options=options).steps()) as steps:
        first = plain(next(steps))

    with closing(make(folder, batches_per_step=4).steps()) as steps:
        assert first == plain(next(steps))


def steps_of_ranks(
    folder: Path, batching: Any, *, ranks: int, number: int, data_position: Any
) -> list[tuple[GlobalBatch, ...]]:
    """Return the steps of every rank; each rank runs in a thread."""

    def take(process_group: ThreadGroup) -> list[GlobalBatch]:
        loader = make(folder, batching=batching, batches_per_step=4, process_group=process_group)
        if data_position is not None:
            loader.load_data_position(data_position)
        return list(itertools.islice(loader.steps(), number))

    with ThreadPoolExecutor(ranks) as threads:
        return list(zip(*threads.map(take, ThreadGroup.of(ranks)), strict=True))


@pytest.mark.parametrize("batching", [BUDGET, FixedBatching(type="fixed", shuffle=False)], ids=["budget", "in order"])
@pytest.mark.parametrize("sizes", [[90, 80, 10, 64], [40, 4, 4, 4]])
def test_ranks_share_steps_and_the_world_size_may_change_in_an_epoch(
    tmp_path: Path, sizes: list[int], batching: Any
) -> None:
    folder = write_shards(tmp_path / "data", sizes)
    straight = [
        plain(step) for step in itertools.islice(make(folder, batching=batching, batches_per_step=4).steps(), 20)
    ]

    results: list[Any] = []
    data_position = None
    for ranks, number in ((4, 5), (1, 4), (2, 11)):
        for together in steps_of_ranks(folder, batching, ranks=ranks, number=number, data_position=data_position):
            results.append([plain(together[slot % ranks])[slot // ranks] for slot in range(4)])
            data_position = merged([step.data_position for step in together])

    assert results == straight


@pytest.mark.parametrize(("batches", "num_groups", "ranks"), [(4, 4, 2), (8, 2, 4), (12, 6, 4)])
def test_every_rank_counts_the_rows_of_all_ranks_once(
    tmp_path: Path, batches: int, num_groups: int, ranks: int
) -> None:
    """Also when several ranks read the same group, because there are more ranks than groups or they do not divide
    evenly."""
    broken = frozenset({3, 50, 51, 120})
    folder = write_shards(tmp_path / "data", [60, 60, 60], broken=broken)
    ledgers: list[Ledger] = []

    def take(process_group: ThreadGroup) -> None:
        streams = TrainingStreams([FileSource(type="jsonl", path="*.jsonl", streaming=True)], [1.0], "all", folder, 7)
        ledger = Ledger(None, max_bad_rows=0.5)
        loader = StreamLoader(
            streams.plan(policy_of(BUDGET), num_groups=num_groups),
            ENCODER,
            options=LoaderOptions(),
            batches_per_step=batches,
            more_inputs={},
            ledger=ledger,
            collate_batch=partial(collate, pad_token_id=0),
            process_group=process_group,
        )
        epoch_of(loader)
        ledgers.append(ledger)

    with ThreadPoolExecutor(ranks) as threads:
        list(threads.map(take, ThreadGroup.of(ranks, timeout_seconds=20)))

    counts = [ledger.split("training") for ledger in ledgers]
    assert [(one.rows, one.used, one.left_out) for one in counts] == [(180, 176, 4)] * ranks


def test_rows_of_one_dialogue_have_different_keys(tmp_path: Path) -> None:
    messages = [{"role": role, "content": f"{role} {number}"} for number in range(3) for role in ("user", "assistant")]
    (tmp_path / "part-00.jsonl").write_text(json.dumps({"messages": messages}) + "\n", encoding="utf-8")
    dialogues = Config.model_validate(
        {
            "base_model": "unused",
            "input_features": [{"name": "messages", "type": "dialogue"}],
            "output_features": [{"name": "reply", "type": "text"}],
            "data": {"dialogue": {"mode": "squash"}},
            "trainer": {"type": "finetune"},
        }
    )
    row_tokenizer = build_row_tokenizer(dialogues, tokenizer=byte_tokenizer(), context_length=512)

    keys = keys_of(epoch_of(make(tmp_path, batching=FixedBatching(type="fixed"), row_tokenizer=row_tokenizer)))

    assert keys == Counter({f"part-00.jsonl:1#{number}": 1 for number in (1, 2, 3)})


def dialogue_tokenizer(**settings: Any) -> RowTokenizer:
    """Return a tokenizer of dialogues with a row for each answer, of at most 64 tokens."""
    config = Config.model_validate(
        {
            "base_model": "unused",
            "input_features": [{"name": "messages", "type": "dialogue"}],
            "output_features": [{"name": "reply", "type": "text"}],
            "preprocessing": {"global_max_sequence_length": 64},
            "data": {"dialogue": {"mode": "squash", **settings}},
            "trainer": {"type": "finetune"},
        }
    )
    return build_row_tokenizer(config, tokenizer=byte_tokenizer(), context_length=64)


def write_dialogues(folder: Path) -> Path:
    """Write dialogues whose rows are used, all, some or none of them."""
    folder.mkdir()
    short, long = {"text": "q", "labels": ["a", "b"]}, {"text": "q" * 80, "labels": ["c", "d"]}
    lines = [
        json.dumps({"episode": [short, short]}),
        json.dumps({"episode": [short, long]}),
        json.dumps({"episode": [long]}),
        json.dumps({"episode": [{"labels": ["no question"]}]}),
        "{broken",
        json.dumps({"episode": [short, {"text": "q", "labels": ["fits", "too long" * 40]}]}),
    ]
    (folder / "part-00.jsonl").write_text("\n".join(lines * 4) + "\n", encoding="utf-8")
    return folder


def outcome(ledger: Ledger, folder: Path) -> tuple[dict[str, int], Any]:
    """Return the counts of a ledger, and what it wrote to the quarantine in `folder`."""
    ledger.save()
    records = map(json.loads, (folder / "quarantine.jsonl").read_text(encoding="utf-8").splitlines())
    return ledger.state(), sorted((record["key"], record["reasons"], str(record["row"])) for record in records)


def by_index(folder: Path, row_tokenizer: RowTokenizer, *, ledger_folder: Path) -> tuple[set[str], Any]:
    """Return the keys of the rows that are used by index, and the `outcome`."""
    ledger = Ledger(ledger_folder, max_bad_rows=1.0)
    rows = expanded(open_rows("part-00.jsonl", folder=folder), row_tokenizer.expander)
    keys = set(TokenizedDataset.build(rows, row_tokenizer, ledger=ledger).keys)
    return keys, outcome(ledger, ledger_folder)


@pytest.mark.parametrize("workers", ends([0, 1]))
@pytest.mark.parametrize("labels", ["first", "all"])
def test_answers_of_a_stream_are_counted_as_those_by_index(tmp_path: Path, labels: str, workers: int) -> None:
    folder, row_tokenizer = write_dialogues(tmp_path / "data"), dialogue_tokenizer(labels=labels)
    keys, counted = by_index(folder, row_tokenizer, ledger_folder=tmp_path / "indexed")
    ledger = Ledger(tmp_path / "streamed", max_bad_rows=1.0)

    steps = epoch_of(make(folder, row_tokenizer=row_tokenizer, ledger=ledger, workers=workers))

    assert set(keys_of(steps)) == keys
    assert "part-00.jsonl:2#1" in keys
    result = outcome(ledger, tmp_path / "streamed")
    assert result == counted
    assert result[0]["used"] == len(keys)
    left_out = {
        key for key, *_ in result[1] if key.startswith(("part-00.jsonl:2#", "part-00.jsonl:4", "part-00.jsonl:5"))
    }
    wanted = ["part-00.jsonl:2#2"] if labels == "first" else ["part-00.jsonl:2#3", "part-00.jsonl:2#4"]
    assert left_out == {*wanted, "part-00.jsonl:4#1", "part-00.jsonl:5"}


@pytest.mark.parametrize("batching", [BUDGET, IN_ORDER], ids=lambda batching: batching.type)
def test_answers_that_are_left_out_are_counted_once_wherever_a_run_continues(tmp_path: Path, batching: Any) -> None:
    folder, row_tokenizer = write_dialogues(tmp_path / "data"), dialogue_tokenizer(labels="all")
    _, counted = by_index(folder, row_tokenizer, ledger_folder=tmp_path / "indexed")

    data_position, done, kills = None, False, 0
    while not done:
        ledger = Ledger(tmp_path / "killed", max_bad_rows=1.0, resumable=True)
        loader = make(folder, batching=batching, batches_per_step=2, row_tokenizer=row_tokenizer, ledger=ledger)
        if data_position is not None:
            loader.load_data_position(data_position)
        steps = list(itertools.islice(loader.steps(), 2))
        done = steps[-1].epoch > 0
        data_position, kills = steps[0].data_position, kills + 1  # killed after the second step, before it was saved

    assert kills > 2
    assert outcome(ledger, tmp_path / "killed") == counted


def test_answers_that_are_left_out_are_counted_once_by_ranks(tmp_path: Path) -> None:
    folder, row_tokenizer = write_dialogues(tmp_path / "data"), dialogue_tokenizer()
    _, counted = by_index(folder, row_tokenizer, ledger_folder=tmp_path / "indexed")

    def take(process_group: ThreadGroup) -> Any:
        own = tmp_path / f"rank{process_group.rank}"
        ledger = Ledger(own, max_bad_rows=1.0)
        epoch_of(
            make(folder, batches_per_step=4, row_tokenizer=row_tokenizer, ledger=ledger, process_group=process_group)
        )
        return outcome(ledger, own)

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(take, ThreadGroup.of(2, timeout_seconds=20))) == [counted, counted]


def test_ranks_that_do_not_divide_a_step_are_refused(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "data", [9])

    with pytest.raises(DataError, match="the 6 batches of a step cannot be shared by 4 processes; start 1, 2, 3 or 6"):
        make(folder, batches_per_step=6, process_group=ThreadGroup.of(4)[0])


@pytest.mark.parametrize(("batches", "num_groups"), [(1, 1), (4, 4), (7, 7), (17, 1), (32, 16), (36, 12), (512, 16)])
def test_shard_groups_divide_the_batches_of_a_step(batches: int, num_groups: int) -> None:
    assert count_shard_groups(batches) == num_groups


def test_a_stream_with_too_many_unknown_tokens_is_refused(tmp_path: Path) -> None:
    base = ScratchModel.model_validate({"type": "scratch", "tokenizer": "char"})
    row_tokenizer = build_row_tokenizer(CONFIG, tokenizer=train_tokenizer(base, ["abq"]), context_length=64)
    answers = [*["ab" * 10] * 60, *["яa" * 10] * 200]
    lines = [json.dumps({"question": "q", "answer": answer}) + "\n" for answer in answers]
    (tmp_path / "part.jsonl").write_text("".join(lines), encoding="utf-8")
    ledger = Ledger(None, max_bad_rows=0)
    fixed = FixedBatching(type="fixed")

    with pytest.raises(
        DataError, match=r"training: [0-9.]+% of the loss tokens \(.*\) are the tokenizer's unknown token"
    ):
        epoch_of(make(tmp_path, row_tokenizer=row_tokenizer, batching=fixed, ledger=ledger))

    assert 1000 < ledger.split("training").loss_tokens < 260 * 21


def test_a_token_budget_is_never_exceeded(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "data", [200])

    sizes = [batch.input_ids_BT.numel() for step in epoch_of(make(folder)) for batch in step.micro_batches]

    assert 100 < max(sizes) <= 160


def test_a_row_longer_than_the_budget_is_skipped_and_counted(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "data", [5])
    with (folder / "part-00.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"question": "q" * 40, "answer": "a"}) + "\n")
    small = TokenBudgetBatching(type="token_budget", max_tokens=41, window=16)
    ledger = Ledger(tmp_path, max_bad_rows=1)

    keys = keys_of(epoch_of(make(folder, batching=small, ledger=ledger)))
    ledger.save()

    assert keys == Counter(f"part-00.jsonl:{number}" for number in range(1, 6))
    counts = ledger.splits["training"]
    assert (counts.rows, counts.used, counts.left_out) == (6, 5, 1)
    assert counts.reasons == {"more than the 41 tokens of data.batching.max_tokens": 1}
    [kept] = (tmp_path / "quarantine.jsonl").read_text().splitlines()
    assert json.loads(kept)["key"] == "part-00.jsonl:6"
    assert "q" * 40 in str(json.loads(kept)["row"])


@pytest.mark.parametrize("batching", [BUDGET, IN_ORDER], ids=lambda batching: batching.type)
def test_bad_rows_that_are_read_again_are_counted_once(tmp_path: Path, batching: Any) -> None:
    folder = write_shards(tmp_path / "data", [60, 60], broken=frozenset(range(0, 120, 10)))
    straight = Ledger(tmp_path / "straight", max_bad_rows=0.5)
    epoch_of(make(folder, batching=batching, ledger=straight))
    straight.save()

    data_position, done = None, False
    while not done:
        ledger = Ledger(tmp_path / "killed", max_bad_rows=0.5, resumable=True)
        loader = make(folder, batching=batching, ledger=ledger)
        if data_position is not None:
            loader.load_data_position(data_position)
        steps = list(itertools.islice(loader.steps(), 3))
        done = steps[-1].epoch > 0
        data_position = steps[1].data_position  # the third was taken, and the program was killed before it was saved
    ledger.save()

    assert ledger.state() == straight.state()
    assert ledger.split("training").left_out == 12
    result, expected = (
        sorted(
            json.loads(line)["key"]
            for line in (tmp_path / name / "quarantine.jsonl").read_text(encoding="utf-8").splitlines()
        )
        for name in ("killed", "straight")
    )
    assert result == expected


@pytest.mark.parametrize("batches_per_step", [1, 3])
def test_rows_that_a_mix_repeats_are_counted_once(tmp_path: Path, batches_per_step: int) -> None:
    for name, sizes, broken in (("many", [150, 50], {3, 160}), ("few", [6, 8], {2, 11})):
        write_shards(tmp_path / name, sizes, broken=frozenset(broken))
    sources = [FileSource(type="jsonl", path=f"{name}/*.jsonl", streaming=True) for name in ("many", "few")]
    streams = TrainingStreams(sources, [1.0, 1.0], "all", tmp_path, 7, ("many", "few"), ("many", "few"))
    loader = partial(make, tmp_path, batches_per_step=batches_per_step, streams=streams)

    whole = Ledger(tmp_path / "whole", max_bad_rows=4)
    steps = epoch_of(loader(ledger=whole))

    assert keys_of(steps).most_common(1)[0][1] > 5, "few rows are repeated"
    state, quarantine = outcome(whole, tmp_path / "whole")
    assert (state["rows"], state["used"], state["left_out"]) == (214, 210, 4)
    assert len(quarantine) == 4
    resumed = Ledger(tmp_path / "resumed", max_bad_rows=4)
    rest = loader(ledger=resumed)
    rest.load_data_position(json.loads(json.dumps(steps[len(steps) // 2].data_position)))
    assert list(map(plain, epoch_of(rest))) == list(map(plain, steps[len(steps) // 2 + 1 :]))
    assert resumed.state() == state


def test_rows_in_order_are_counted_once_wherever_a_run_continues(tmp_path: Path) -> None:
    """Also in a window whose last rows, or all rows, are broken."""
    broken = frozenset({0, 5, 6, 40, 62, 63, *range(64, 192), 300, 330})
    folder = write_shards(tmp_path / "data", [331], broken=broken)
    straight = Ledger(None, max_bad_rows=0.9)
    steps = epoch_of(make(folder, batching=IN_ORDER, batches_per_step=1, ledger=straight))

    for number, step in enumerate(steps):
        ledger = Ledger(None, max_bad_rows=0.9)
        loader = make(folder, batching=IN_ORDER, batches_per_step=1, ledger=ledger, workers=int(number % 20 == 5))
        loader.load_data_position(json.loads(json.dumps(step.data_position)))
        rest = list(itertools.takewhile(lambda step: step.epoch == 0, loader.steps()))

        assert list(map(plain, rest)) == list(map(plain, steps[number + 1 :]))
        assert [step.data_position for step in rest] == [step.data_position for step in steps[number + 1 :]]
        assert ledger.state() == straight.state()
    assert straight.split("training").rows == 331


def test_too_many_bad_rows_stop_the_run(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "data", [60], broken=frozenset(range(0, 60, 2)))

    with pytest.raises(DataError, match="30 of 60 rows cannot be used"):
        epoch_of(make(folder, ledger=Ledger(None, max_bad_rows=0.1)))


def test_too_many_bad_rows_stop_the_run_before_the_rest_of_the_file_is_read(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "data", [20_000], broken=frozenset(range(1, 20_000)))
    ledger = Ledger(None, max_bad_rows=2)

    with pytest.raises(DataError, match=r"rows cannot be used, and data\.max_bad_rows accepts 2 rows"):
        list(make(folder, batches_per_step=1, ledger=ledger).steps())

    assert ledger.state()["rows"] <= BUDGET.window


@pytest.mark.long
def test_a_mostly_broken_stream_is_refused_before_it_is_read_completely(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "q", "answer": "a"}\n' * 16 + "x\n" * 300_000, encoding="utf-8")
    batching = TokenBudgetBatching(type="token_budget", max_tokens=160, window=20_000)
    ledger = Ledger(None, max_bad_rows=1.0)

    with pytest.raises(DataError) as error:
        list(make(tmp_path, batching=batching, batches_per_step=1, ledger=ledger).steps())

    assert str(error.value) == (
        "*.jsonl: 119,984 rows are broken and 16 are good; the last broken one is a.jsonl:120000: not JSON: "
        "Expecting value at character 1; repair the file or leave it out"
    )
    assert ledger.state()["rows"] == 120_000


def test_a_stream_without_a_good_row_ends_with_an_error(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "data", [3], broken=frozenset(range(3)))

    with pytest.raises(DataError, match=r"has no row that can be used"):
        next(iter(make(folder, ledger=Ledger(None, max_bad_rows=1.0)).steps()))


def test_a_changed_file_is_reported(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "data", [30])
    data_position = next(iter(make(folder).steps())).data_position
    write_shards(folder, [31])

    with pytest.raises(ResumeError, match="the run cannot be resumed, because its batches would differ"):
        make(folder).load_data_position(data_position)
    restarted = make(folder, resume="restart_epoch")
    restarted.load_data_position(data_position)
    assert len(keys_of(epoch_of(restarted))) == 31


def test_rows_of_an_epoch_that_begins_again_after_a_change_are_counted_and_checked(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "data", [20, 20])
    before = make(folder, ledger=Ledger(None, max_bad_rows=0))
    epoch_of(before)
    data_position = next(iter(before.epoch_steps(1))).data_position
    with (folder / "b.jsonl").open("a", encoding="utf8") as file:
        file.write("{ broken\n" * 3)

    ledger = Ledger(None, max_bad_rows=5)
    restarted = make(folder, resume="restart_epoch", ledger=ledger)
    restarted.load_data_position(data_position)
    steps = list(restarted.epoch_steps(1))
    assert (ledger.state()["rows"], ledger.state()["left_out"]) == (43, 3)
    list(itertools.islice(restarted.epoch_steps(2), 2))
    assert ledger.state()["rows"] == 43, "a later epoch adds nothing"

    killed = Ledger(None, max_bad_rows=5)
    again = make(folder, ledger=killed)
    again.load_data_position(steps[1].data_position)
    list(again.epoch_steps(1))
    assert (killed.state()["rows"], killed.state()["left_out"]) == (43, 3)

    strict = make(folder, resume="restart_epoch", ledger=Ledger(None, max_bad_rows=0))
    strict.load_data_position(data_position)
    with pytest.raises(DataError, match="3 of 16 rows cannot be used"):
        list(strict.epoch_steps(1))


def test_the_position_is_small(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "data", [40] * 40)

    loader = make(folder, batches_per_step=64, batching=BucketBatching(type="bucket", window=4))
    sizes = [len(json.dumps(step.data_position)) for step in itertools.islice(loader.steps(), 4)]

    assert max(sizes) < 4096


def test_epochs_of_a_stream_cannot_be_converted_to_steps(tmp_path: Path) -> None:
    loader = make(write_shards(tmp_path / "data", [3]))

    with pytest.raises(
        DataError, match="a stream has no known length, so 2 epochs is not a number of steps; write max"
    ):
        loader.total_steps(2)


def test_rows_of_an_attempt_without_a_checkpoint_are_not_counted(tmp_path: Path) -> None:
    folder, run = write_shards(tmp_path / "data", [60], broken=frozenset({3, 9, 50})), tmp_path / "run"
    lost = Ledger(run, max_bad_rows=0.5, resumable=True)
    list(itertools.islice(make(folder, ledger=lost).steps(), 1))  # killed before its first checkpoint
    assert (run / "quarantine.jsonl").read_text()

    started = make(folder, ledger=Ledger(run, max_bad_rows=0.5, resumable=True))
    data_position = epoch_of(started)[-1].data_position  # killed after its last one
    ledger = Ledger(run, max_bad_rows=0.5, resumable=True)
    loader = make(folder, ledger=ledger)
    loader.load_data_position(data_position)
    next(loader.steps())
    ledger.save()

    assert "before the run was continued" not in ledger.splits["training"].reasons
    assert [json.loads(line)["number"] for line in (run / "quarantine.jsonl").read_text().splitlines()] == [4, 10, 51]
