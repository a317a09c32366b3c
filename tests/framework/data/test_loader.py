import itertools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.data.encoded import EncodedRows, texts
from partita.data.encoder import build_encoder
from partita.data.ledger import Ledger
from partita.data.loader import EvaluationBatches, Loader, evenly
from partita.data.materialiser import collate
from partita.data.sources import open_rows
from partita.lm.tokenizers import byte_tokenizer
from partita_schema.config import Config
from partita_schema.data import BucketBatching, FixedBatching, LoaderOptions
from partita_schema.errors import DataError, ResumeError
from partita_schema.rows import row_schema
from partita_trainers.base import Batch, Step

Make = Callable[..., Any]
PAD = 0
CONFIG = Config.model_validate(
    {
        "base_model": "unused",
        "input_features": [{"name": "question"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "trainer": {"type": "finetune"},
    }
)


def encode(table: list[dict[str, Any]], *, config: Config = CONFIG, ledger: Ledger | None = None) -> EncodedRows:
    return EncodedRows.build(
        open_rows(table, folder=Path()),
        build_encoder(config, tokenizer=byte_tokenizer(), context_length=64),
        schema=row_schema(config, supervised=True),
        ledger=ledger or Ledger(None, max_bad_rows=0.5),
        chunk=7,
    )


def table(length: int) -> list[dict[str, Any]]:
    chance = np.random.default_rng(length)
    return [{"question": "q" * int(n), "answer": f"a{n}"} for n in chance.integers(1, 40, length)]


ENCODED = encode(table(53))


def make(
    *, workers: int = 0, start_method: str | None = None, encoded: EncodedRows = ENCODED, **changes: Any
) -> Loader:
    settings: dict[str, Any] = {
        "batching": BucketBatching(type="bucket", window=16),
        "batch_size": 4,
        "batches_per_step": 3,
        "seed": 5,
    }
    options = LoaderOptions(workers=workers)
    return Loader(encoded, options=options, pad_token_id=PAD, start_method=start_method, **settings | changes)


def plain(step: Step) -> Any:
    batches = [
        (batch.input_ids_BT.tolist(), batch.labels_BT.tolist(), batch.lengths_B.tolist(), batch.keys)
        for batch in step.batches
    ]
    return batches, dict(step.cursor), step.epoch


def take(loader: Loader, count: int) -> list[Any]:
    return [plain(step) for step in itertools.islice(loader.steps(), count)]


def test_a_batch_holds_its_rows_padded_on_the_right() -> None:
    encoded = encode(
        [{"question": "ab", "answer": "c"}, {"question": "d", "answer": ""}, {"question": "e", "answer": "fgh"}]
    )
    tokenizer = byte_tokenizer()

    batch = collate(encoded, np.array([1, 0]), pad_token_id=PAD)

    ids = [[*tokenizer.encode("efgh</s>")], [*tokenizer.encode("abc</s>"), PAD]]
    assert batch.input_ids_BT.tolist() == ids
    assert batch.labels_BT.tolist() == [[-100, *ids[0][1:]], [-100, -100, *ids[1][2:4], -100]]
    assert batch.lengths_B.tolist() == [5, 4]
    assert batch.keys == ("dataset:3", "dataset:1")
    assert {tensor.dtype for tensor in (batch.input_ids_BT, batch.labels_BT, batch.lengths_B)} == {torch.int64}
    assert (batch.rows, batch.tokens, batch.loss_tokens) == (2, 9, 6)


def test_a_batch_without_rows_is_empty() -> None:
    batch = collate(ENCODED, np.empty(0, dtype=np.int64), pad_token_id=PAD)

    assert batch.input_ids_BT.shape == batch.labels_BT.shape == (0, 0)
    assert (batch.rows, batch.tokens, batch.loss_tokens) == (0, 0, 0)


def test_every_epoch_holds_every_row_once_and_ends_are_told() -> None:
    loader = make()
    assert (loader.steps_per_epoch, loader.num_rows) == (5, 53)

    steps = list(itertools.islice(loader.steps(), 15))

    for epoch in range(3):
        part = steps[epoch * 5 : epoch * 5 + 5]
        assert sorted(key for step in part for batch in step.batches for key in batch.keys) == sorted(ENCODED.keys)
    assert [step.epoch for step in steps[:6]] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.2])
    assert [(step.cursor["epoch"], step.cursor["step"]) for step in steps[3:6]] == [(0, 4), (1, 0), (1, 1)]
    assert [plain(step)[0] for step in steps[:5]] != [plain(step)[0] for step in steps[5:10]]
    assert {len(step.batches) for step in steps} == {3}


def test_a_run_continues_from_every_step_as_if_never_stopped() -> None:
    straight = take(make(), 14)

    for done in range(1, 12):
        loader = make()
        loader.load_cursor(json.loads(json.dumps(straight[done - 1][1])))
        assert take(loader, 3) == straight[done : done + 3]


@settings(max_examples=20, deadline=None)
@given(
    stops=st.lists(st.integers(1, 6), min_size=1, max_size=10),
    batch_size=st.integers(1, 9),
    batches_per_step=st.integers(1, 4),
    batching=st.sampled_from([BucketBatching(type="bucket", window=10), FixedBatching(type="fixed")]),
)
def test_the_tenth_resume_is_like_the_first(stops: list[int], **settings: Any) -> None:
    straight = [plain(step) for step in itertools.islice(make(**settings).steps(), sum(stops))]

    found: list[Any] = []
    for stop in stops:
        loader = make(**settings)
        if found:
            loader.load_cursor(found[-1][1])
        found += take(loader, stop)

    assert found == straight


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # a machine with few cores
@pytest.mark.parametrize(("workers", "start_method"), [(1, None), (3, "fork"), (1, "spawn")])
def test_batches_are_the_same_for_any_number_of_workers(workers: int, start_method: str | None) -> None:
    assert take(make(workers=workers, start_method=start_method), 8) == take(make(), 8)


def test_what_workers_made_ahead_is_not_lost_on_resume() -> None:
    straight = take(make(), 9)
    ahead = make(workers=2)
    steps = ahead.steps()
    used = [plain(next(steps)) for _ in range(3)]
    steps.close()  # type: ignore[attr-defined]

    resumed = make(workers=1)
    resumed.load_cursor(used[-1][1])

    assert used + take(resumed, 6) == straight


def test_a_worker_that_dies_is_an_error_and_no_hang() -> None:
    import multiprocessing

    steps = make(workers=1).steps()
    next(steps)
    [worker] = multiprocessing.active_children()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)

    with pytest.raises(DataError, match=r"^a data worker died \(.+\); write fewer data\.loader\."):
        list(itertools.islice(steps, 100))
    assert multiprocessing.active_children() == []


def test_no_random_state_outside_is_touched() -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()

    take(make(), 3)
    take(make(workers=1), 3)

    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]


def test_a_position_cannot_be_loaded_once_steps_were_asked_for() -> None:
    loader = make()
    step = next(loader.steps())

    with pytest.raises(ResumeError, match=r"^a data position must be loaded before the first step is asked for$"):
        loader.load_cursor(step.cursor)


def test_other_data_or_settings_are_refused_by_name() -> None:
    cursor = next(make().steps()).cursor

    def told(loader: Loader) -> list[str]:
        with pytest.raises(ResumeError) as error:
            loader.load_cursor(cursor)
        return [line.split(":")[0].strip() for line in str(error.value).splitlines() if " -> " in line][1:]

    assert told(make(seed=6)) == ["seed"]
    assert told(make(batch_size=5)) == ["batch size"]
    assert told(make(batches_per_step=1)) == ["batches a step"]
    assert told(make(batching=BucketBatching(type="bucket", window=99))) == ["batching"]
    assert told(make(encoded=encode(table(54)))) == ["files", "encoded rows"]
    other = Config.model_validate(CONFIG.model_dump() | {"prompt": {"task": "x"}})
    assert told(make(encoded=encode(table(53), config=other))) == ["prompt", "encoded rows"]
    make(workers=2).load_cursor(cursor)


def test_a_position_behind_the_epoch_is_refused() -> None:
    from partita.data.cursor import Cursor

    cursor = Cursor.from_json(next(make().steps()).cursor)
    with pytest.raises(ResumeError, match=r"the data position is step 6 of an epoch of 5; continue from an older"):
        make().load_cursor(Cursor(cursor.parts, 0, 6).to_json())


def test_statistics_count_what_was_handed_out() -> None:
    loader = make()
    steps = list(itertools.islice(loader.steps(), 5))

    batches = [batch for step in steps for batch in step.batches]
    cells = sum(batch.input_ids_BT.numel() for batch in batches)
    found = loader.statistics
    assert found["steps"] == 5
    assert found["rows"] == 53
    assert found["tokens"] == len(ENCODED.ids_L)
    assert found["loss_tokens"] == sum(batch.loss_tokens for batch in batches)
    assert found["padding"] == cells - found["tokens"]
    assert found["padding_share"] == pytest.approx(found["padding"] / cells)


def test_evaluation_takes_every_row_once_the_longest_first() -> None:
    batches = list(EvaluationBatches(ENCODED, batch_size=8, pad_token_id=PAD))

    lengths = [length for batch in batches for length in batch.lengths_B.tolist()]
    assert lengths == sorted(lengths, reverse=True)
    assert sorted(key for batch in batches for key in batch.keys) == sorted(ENCODED.keys)
    assert [batch.rows for batch in batches] == [8] * 6 + [5]


@given(length=st.integers(1, 200), wanted=st.integers(1, 300))
def test_even_distances_repeat_nothing(length: int, wanted: int) -> None:
    places = evenly(length, wanted)

    assert len(set(places.tolist())) == min(length, wanted)
    assert places.max() < length


def test_bad_rows_go_to_the_ledger_with_reasons_and_the_rest_is_encoded(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, max_bad_rows=3)
    rows = [*table(10), {"question": " ", "answer": "x"}, {"question": "x" * 70, "answer": "x"}, *table(2)]
    rows.append({"question": "q" * 60, "answer": "too long"})

    encoded = encode(rows, ledger=ledger)

    kept = [*range(10), 12, 13, 14]
    assert encoded.places_N.tolist() == kept
    assert list(encoded.keys) == [f"dataset:{place + 1}" for place in kept]
    counts = ledger.split("training")
    assert (counts.rows, counts.used, counts.cut, counts.cut_tokens, counts.left_out) == (15, 13, 1, 5, 2)
    assert dict(counts.reasons) == {
        "column question is missing or empty": 1,
        "the prompt has 70 tokens, which leaves no room for an answer within 64": 1,
    }
    records = [json.loads(line) for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()]
    assert [(record["key"], record["row"]["answer"]) for record in records] == [
        ("dataset:11", "x"),
        ("dataset:12", "x"),
    ]


def test_unreadable_rows_are_counted_with_the_others(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "q", "answer": "a"}\nbroken\n')
    ledger = Ledger(None, max_bad_rows=0)

    with pytest.raises(DataError, match=r"1 of 2 rows cannot be used.*\n.*not JSON: Expecting value at character 1"):
        encode_file(tmp_path / "a.jsonl", ledger)


def encode_file(path: Path, ledger: Ledger) -> EncodedRows:
    encoder = build_encoder(CONFIG, tokenizer=byte_tokenizer(), context_length=64)
    rows = open_rows(path, folder=Path())
    return EncodedRows.build(rows, encoder, schema=row_schema(CONFIG, supervised=True), ledger=ledger)


def test_rows_that_are_all_bad_stop_the_run() -> None:
    with pytest.raises(DataError, match=r"^none of the 1 training rows can be used$"):
        encode([{"question": "", "answer": "a"}], ledger=Ledger(None, max_bad_rows=1.0))


def test_rows_in_memory_equal_rows_one_at_a_time() -> None:
    encoder = build_encoder(CONFIG, tokenizer=byte_tokenizer(), context_length=64)

    for place, row in enumerate(table(53)):
        example = encoder.encode(row, key="k")
        assert ENCODED.ids(place).tolist() == example.input_ids
        assert [tuple(span) for span in ENCODED.spans(place).tolist()] == list(example.spans)
    assert ENCODED.lengths.tolist() == np.diff(ENCODED.starts_N1).tolist()


def test_fingerprints_follow_the_content() -> None:
    assert encode(table(53)).fingerprint == ENCODED.fingerprint
    assert encode([*table(53)[:-1], {"question": "q", "answer": "other"}]).fingerprint != ENCODED.fingerprint


def test_progress_hears_of_every_row() -> None:
    heard: list[int] = []
    encoder = build_encoder(CONFIG, tokenizer=byte_tokenizer(), context_length=64)
    rows, schema = open_rows(table(25), folder=Path()), row_schema(CONFIG, supervised=True)

    EncodedRows.build(
        rows, encoder, schema=schema, ledger=Ledger(None, max_bad_rows=0), chunk=10, progress=heard.append
    )

    assert heard == [10, 10, 5]


def test_texts_for_a_tokenizer_are_prompts_and_answers_of_good_rows() -> None:
    rows = open_rows([{"question": "a", "answer": "b"}, {"question": "", "answer": "c"}], folder=Path())

    assert list(texts(rows, CONFIG, schema=row_schema(CONFIG, supervised=True))) == ["a", "b"]
    assert list(texts(rows, CONFIG, schema=row_schema(CONFIG, supervised=False))) == ["a"]


def test_a_batch_is_what_trainers_expect() -> None:
    assert isinstance(next(make().steps()).batches[0], Batch)
