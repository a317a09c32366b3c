import itertools
import json
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partita.data.batching.collate import EvaluationBatches, collate, evenly
from partita.data.batching.plan import NOTHING, PlannedBatch, alone
from partita.data.batching.settings import BatchSettings
from partita.data.formatting.build import build_row_tokenizer
from partita.data.indexed_loader import IndexedLoader
from partita.data.ledger import Ledger
from partita.data.sources.sources import open_rows
from partita.data.tokenized import TokenizedDataset
from partita.data.tokenizer_texts import tokenizer_texts
from partita.distributed.thread_group import ThreadGroup
from partita.tokenizers.load import byte_tokenizer, train_tokenizer
from partita_schema.config import Config
from partita_schema.errors import DataError, ResumeError
from partita_schema.sections.batching import Batching, BucketBatching, FixedBatching, PackBatching, TokenBudgetBatching
from partita_schema.sections.model import ScratchModel
from partita_trainers.base import Batch, GlobalBatch

from ...json_lines import read_json_lines
from ...properties import examples

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


def encode(table: list[dict[str, Any]], *, config: Config = CONFIG, ledger: Ledger | None = None) -> TokenizedDataset:
    return TokenizedDataset.build(
        open_rows(table, folder=Path()),
        build_row_tokenizer(config, tokenizer=byte_tokenizer(), context_length=64),
        ledger=ledger or Ledger(None, max_bad_rows=0.5),
        chunk=7,
    )


def table(length: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(length)
    return [{"question": "q" * int(n), "answer": f"a{n}"} for n in rng.integers(1, 40, length)]


ENCODED = encode(table(53))
BATCHINGS: list[Batching] = [
    FixedBatching(type="fixed"),
    BucketBatching(type="bucket", window=10, noise=0.1, longest_first=True),
    BucketBatching(type="bucket", window=16, length_spread=8),
    BucketBatching(type="bucket", window=16, drop_last=True),
    TokenBudgetBatching(type="token_budget", max_tokens=150, window=16, max_rows=7),
    PackBatching(type="pack", max_tokens=70, window=16),
]


def make(*, encoded: TokenizedDataset = ENCODED, **changes: Any) -> IndexedLoader:
    values: dict[str, Any] = {
        "batching": BucketBatching(type="bucket", window=16),
        "batch_size": 4,
        "batches_per_step": 3,
        "seed": 5,
    }
    names = {field.name for field in fields(BatchSettings)} & changes.keys()
    settings = BatchSettings(**values | {name: changes.pop(name) for name in names})
    return IndexedLoader(encoded, settings=settings, pad_token_id=PAD, **changes)


def plain(global_batch: GlobalBatch) -> Any:
    batches = [
        (
            batch.input_ids_BT.tolist(),
            batch.labels_BT.tolist(),
            batch.lengths_B.tolist(),
            batch.keys,
            None if batch.position_ids_BT is None else batch.position_ids_BT.tolist(),
        )
        for batch in global_batch.micro_batches
    ]
    return batches, dict(global_batch.data_position), global_batch.epoch


def take(loader: IndexedLoader, count: int) -> list[Any]:
    return [plain(step) for step in itertools.islice(loader.steps(), count)]


def test_rows_of_a_batch_are_padded_on_the_right() -> None:
    encoded = encode(
        [{"question": "ab", "answer": "c"}, {"question": "d", "answer": ""}, {"question": "e", "answer": "fgh"}]
    )
    tokenizer = byte_tokenizer()

    batch = collate(encoded, alone(np.array([1, 0])), pad_token_id=PAD)

    ids = [[*tokenizer.encode("efgh</s>")], [*tokenizer.encode("abc</s>"), PAD]]
    assert batch.input_ids_BT.tolist() == ids
    assert batch.labels_BT.tolist() == [[-100, *ids[0][1:]], [-100, -100, *ids[1][2:4], -100]]
    assert batch.lengths_B.tolist() == [5, 4]
    assert batch.keys == ("dataset:3", "dataset:1")
    assert {tensor.dtype for tensor in (batch.input_ids_BT, batch.labels_BT, batch.lengths_B)} == {torch.int64}
    assert (batch.rows, batch.tokens, batch.loss_tokens) == (2, 9, 6)
    assert batch.position_ids_BT is None


def test_packed_rows_are_concatenated_with_separate_positions() -> None:
    encoded = encode(
        [{"question": "ab", "answer": "c"}, {"question": "d", "answer": "x"}, {"question": "e", "answer": "fgh"}]
    )
    tokenizer = byte_tokenizer()

    batch = collate(encoded, PlannedBatch(np.array([1, 0, 2]), np.array([0, 0, 1])), pad_token_id=PAD)

    ids = [tokenizer.encode("dx</s>"), tokenizer.encode("abc</s>"), tokenizer.encode("efgh</s>")]
    assert batch.input_ids_BT.tolist() == [[*ids[0], *ids[1]], [*ids[2], PAD, PAD]]
    learned = [[-100, *ids[0][1:]], [-100, -100, *ids[1][2:]], [-100, *ids[2][1:]]]
    assert batch.labels_BT.tolist() == [[*learned[0], *learned[1]], [*learned[2], -100, -100]]
    assert batch.position_ids_BT is not None
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0, 0]]
    assert batch.lengths_B.tolist() == [7, 5]
    assert batch.keys == ("dataset:2", "dataset:1", "dataset:3")
    assert (batch.rows, batch.tokens, batch.loss_tokens) == (3, 12, 8)


@given(rows=st.lists(st.integers(0, 52), max_size=12), data=st.data())
def test_a_batch_equals_a_reference_built_from_lists(rows: list[int], data: st.DataObject) -> None:
    grow = [0, *data.draw(st.lists(st.integers(0, 1), min_size=max(0, len(rows) - 1), max_size=max(0, len(rows) - 1)))]
    lines = np.cumsum(grow[: len(rows)]).astype(np.int64)

    batch = collate(ENCODED, PlannedBatch(np.array(rows, dtype=np.int64), lines), pad_token_id=PAD)

    expected: list[tuple[list[int], list[int], list[int]]] = [([], [], []) for _ in set(lines.tolist())]
    for row, line in zip(rows, lines.tolist(), strict=True):
        ids = ENCODED.ids(row).tolist()
        learned = {index for start, end in ENCODED.loss_spans(row).tolist() for index in range(start, end)} - {0}
        expected[line][0].extend(ids)
        expected[line][1].extend(token if index in learned else -100 for index, token in enumerate(ids))
        expected[line][2].extend(range(len(ids)))
    width = max((len(line[0]) for line in expected), default=0)
    padded = [[(line[kind] + [fill] * width)[:width] for line in expected] for kind, fill in enumerate((PAD, -100, 0))]
    assert batch.input_ids_BT.tolist() == padded[0]
    assert batch.labels_BT.tolist() == padded[1]
    if len(expected) < len(rows):
        assert batch.position_ids_BT is not None
        assert batch.position_ids_BT.tolist() == padded[2]
    else:
        assert batch.position_ids_BT is None


def test_a_batch_without_rows_is_empty() -> None:
    batch = collate(ENCODED, NOTHING, pad_token_id=PAD)

    assert batch.input_ids_BT.shape == batch.labels_BT.shape == (0, 0)
    assert (batch.rows, batch.tokens, batch.loss_tokens) == (0, 0, 0)


def test_every_epoch_has_every_row_once_and_epoch_ends_are_reported() -> None:
    loader = make()
    assert (loader.steps_per_epoch, loader.num_rows) == (5, 53)

    steps = list(itertools.islice(loader.steps(), 15))

    for epoch in range(3):
        part = steps[epoch * 5 : epoch * 5 + 5]
        assert sorted(key for step in part for batch in step.micro_batches for key in batch.keys) == sorted(
            ENCODED.keys
        )
    rows = np.cumsum([sum(batch.rows for batch in step.micro_batches) for step in steps[:6]])
    assert [step.epoch for step in steps[:6]] == pytest.approx((rows / 53).tolist())
    assert [(step.data_position["epoch"], step.data_position["step"]) for step in steps[3:6]] == [
        (0, 4),
        (1, 0),
        (1, 1),
    ]
    assert [plain(step)[0] for step in steps[:5]] != [plain(step)[0] for step in steps[5:10]]
    assert {len(step.micro_batches) for step in steps} == {3}


def test_a_run_resumed_from_any_step_equals_an_uninterrupted_one() -> None:
    for batching in BATCHINGS:
        straight = take(make(batching=batching), 18)

        for done in range(1, 15):
            saved = json.dumps(straight[done - 1][1])
            assert len(saved) < 4096
            loader = make(batching=batching)
            loader.load_data_position(json.loads(saved))
            assert take(loader, 3) == straight[done : done + 3]


@examples(20)
@given(
    stops=st.lists(st.integers(1, 6), min_size=1, max_size=10),
    batch_size=st.integers(1, 9),
    batches_per_step=st.integers(1, 4),
    batching=st.sampled_from(BATCHINGS),
)
def test_the_tenth_resume_is_like_the_first(stops: list[int], **settings: Any) -> None:
    straight = [plain(step) for step in itertools.islice(make(**settings).steps(), sum(stops))]

    results: list[Any] = []
    for stop in stops:
        loader = make(**settings)
        if results:
            loader.load_data_position(results[-1][1])
        results += take(loader, stop)

    assert results == straight


@examples(20)
@given(
    ranks=st.lists(st.sampled_from([1, 2, 3, 4, 6, 12]), min_size=1, max_size=5),
    steps=st.integers(1, 4),
    batching=st.sampled_from(BATCHINGS),
)
def test_steps_do_not_depend_on_the_number_of_ranks(ranks: list[int], steps: int, batching: Batching) -> None:
    """Stopped and restarted with other numbers of processes: micro-batch s belongs to rank s % ranks."""
    settings: dict[str, Any] = {"batching": batching, "batch_size": 2, "batches_per_step": 12}
    straight = take(make(**settings), steps * len(ranks))

    results: list[Any] = []
    for number in ranks:
        loaders = [make(**settings, process_group=process_group) for process_group in ThreadGroup.of(number)]
        for loader in loaders:
            if results:
                loader.load_data_position(results[-1][1])
        for together in zip(*(take(loader, steps) for loader in loaders), strict=True):
            assert len({json.dumps(data_position) for _, data_position, _ in together}) == 1
            batches = [together[slot % number][0][slot // number] for slot in range(12)]
            results.append((batches, *together[0][1:]))

    assert results == straight


def test_a_world_size_that_does_not_divide_a_step_is_refused_with_possible_ones() -> None:
    with pytest.raises(DataError) as error:
        make(batches_per_step=12, process_group=ThreadGroup.of(5)[0])

    assert str(error.value) == (
        "the 12 batches of a step cannot be shared by 5 processes; start 1, 2, 3, 4, 6 or 12, or write a smaller "
        "trainer.batch_size for a new run"
    )


def test_the_predicted_number_of_steps_equals_the_steps_taken() -> None:
    for batching in BATCHINGS:
        taken = [step.data_position["epoch"] for step in itertools.islice(make(batching=batching).steps(), 40)]
        loader = make(batching=batching)
        first = loader.steps_per_epoch

        assert first == taken.index(1) + 1
        assert loader.total_steps(1) == first
        assert loader.total_steps(3) == taken.index(3) + 1
        assert loader.total_steps(0.5) == -(-first // 2)
        assert loader.total_steps(2.001) == taken.index(2) + 2
        assert loader.total_steps(1e-9) == 1


def test_a_row_too_long_for_the_budget_is_reported() -> None:
    longest = int(ENCODED.lengths.argmax())
    with pytest.raises(
        DataError, match=rf"^row {ENCODED.keys[longest]} has 4\d tokens, more than the 40 of data\.batch"
    ):
        make(batching=TokenBudgetBatching(type="token_budget", max_tokens=40))


def test_global_random_states_are_not_changed() -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()

    take(make(), 3)

    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]


def test_rows_can_be_read_before_a_position_is_loaded() -> None:
    loader = make()
    steps = list(itertools.islice(make().steps(), 3))
    wanted = [plain(step) for step in steps]
    assert take(loader.from_start(), 3) == wanted
    assert loader.waits["seconds"] == 0

    loader.load_data_position(steps[0].data_position)
    assert take(loader.from_start(), 3) == wanted
    assert take(loader, 2) == wanted[1:]


def test_a_position_cannot_be_loaded_after_steps_were_requested() -> None:
    loader = make()
    step = next(loader.steps())

    with pytest.raises(ResumeError, match=r"^a data position must be loaded before the first step is requested$"):
        loader.load_data_position(step.data_position)


def test_other_data_or_settings_are_refused_with_their_keys() -> None:
    data_position = next(make().steps()).data_position

    def message(loader: IndexedLoader) -> list[str]:
        with pytest.raises(ResumeError) as error:
            loader.load_data_position(data_position)
        return [line.split(":")[0].strip() for line in str(error.value).splitlines() if line.startswith("  ")]

    assert message(make(seed=6)) == ["seed"]
    assert message(make(batch_size=5)) == ["batch size"]
    assert message(make(batches_per_step=1)) == ["batches a step"]
    assert message(make(batching=BucketBatching(type="bucket", window=99))) == ["batching.window"]
    assert message(make(batching=BucketBatching(type="bucket", window=16, noise=0.5))) == ["batching.noise"]
    assert message(make(order=lambda epoch, rng: np.arange(53), more_inputs={"mix": "a, b"})) == ["mix"]
    assert message(make(encoded=encode(table(54)))) == ["files", "encoded rows"]
    other = Config.model_validate(CONFIG.model_dump() | {"prompt": {"task": "x"}})
    assert message(make(encoded=encode(table(53), config=other))) == ["prompt", "encoded rows"]
    make(process_group=ThreadGroup.of(3)[1]).load_data_position(data_position)


@pytest.mark.parametrize(("resume", "epoch"), [("restart_epoch", 1), ("fresh", 0)])
def test_changed_data_resume_at_the_start_of_an_epoch_if_requested(resume: str, epoch: int) -> None:
    loader = make()
    steps = [plain(step) for step in itertools.islice(loader.steps(), 7)]
    grown = encode(table(60))
    resumed = make(encoded=grown, resume=resume)

    resumed.load_data_position(steps[-1][1])

    straight = [plain(step) for step in itertools.islice(make(encoded=grown).steps(), 12)]
    begin = 0 if epoch == 0 else make(encoded=grown).steps_per_epoch
    assert take(resumed, 3) == straight[begin : begin + 3]


def test_a_position_after_the_epoch_is_refused() -> None:
    from partita.data.batching.data_position import DataPosition

    data_position = DataPosition.from_json(next(make().steps()).data_position)
    message = (
        r"^the data position is step 6 at batch 0 of window 4, and epoch 0 of 4 windows has no such position; contin"
    )
    with pytest.raises(ResumeError, match=message):
        make().load_data_position(DataPosition(data_position.fingerprint_inputs, 0, 6, [4, 0]).to_json())
    for position in ([1], [1, -1], {"a": 1}, [1, "2"]):
        with pytest.raises(ResumeError, match=r"^the data position is damaged; continue from an older checkpoint$"):
            make().load_data_position(DataPosition(data_position.fingerprint_inputs, 0, 6, position).to_json())


def test_a_loader_knows_how_long_its_steps_were_waited_for() -> None:
    loader = make()
    for _ in itertools.islice(loader.steps(), 3):
        time.sleep(0.05)

    waits = loader.waits
    assert 0 < waits["waited_seconds"] <= waits["seconds"] - 0.1
    assert waits["wait_share"] == waits["waited_seconds"] / waits["seconds"]


def test_evaluation_uses_every_row_once_longest_first() -> None:
    batches = list(EvaluationBatches(ENCODED, batch_size=8, pad_token_id=PAD))

    lengths = [length for batch in batches for length in batch.lengths_B.tolist()]
    assert lengths == sorted(lengths, reverse=True)
    assert sorted(key for batch in batches for key in batch.keys) == sorted(ENCODED.keys)
    assert [batch.rows for batch in batches] == [8] * 6 + [5]


@given(length=st.integers(1, 200), wanted=st.integers(1, 300))
def test_evenly_spaced_samples_have_no_duplicates(length: int, wanted: int) -> None:
    indices = evenly(length, wanted)

    assert len(set(indices.tolist())) == min(length, wanted)
    assert indices.max() < length


def test_bad_rows_are_recorded_with_reasons_and_the_rest_is_encoded(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, max_bad_rows=3)
    rows = [*table(10), {"question": " ", "answer": "x"}, {"question": "x" * 70, "answer": "x"}, *table(2)]
    rows.append({"question": "q" * 60, "answer": "too long"})

    encoded = encode(rows, ledger=ledger)

    kept = [*range(10), 12, 13, 14]
    assert encoded.indices_N.tolist() == kept
    assert list(encoded.keys) == [f"dataset:{index + 1}" for index in kept]
    counts = ledger.split("training")
    assert (counts.rows, counts.used, counts.cut, counts.cut_tokens, counts.left_out) == (15, 13, 1, 5, 2)
    assert dict(counts.reasons) == {
        "column question is missing or empty": 1,
        "the prompt leaves no room for an answer within 64 tokens": 1,
    }
    records = read_json_lines(tmp_path / "quarantine.jsonl")
    assert [(record["key"], record["row"]["answer"]) for record in records] == [
        ("dataset:11", "x"),
        ("dataset:12", "x"),
    ]


def test_unreadable_rows_are_counted_as_bad_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "q", "answer": "a"}\nbroken\n')
    ledger = Ledger(None, max_bad_rows=0)

    with pytest.raises(DataError, match=r"1 of 2 rows cannot be used.*\n.*not JSON: Expecting value at character 1"):
        encode_file(tmp_path / "a.jsonl", ledger)


def encode_file(path: Path, ledger: Ledger) -> TokenizedDataset:
    row_tokenizer = build_row_tokenizer(CONFIG, tokenizer=byte_tokenizer(), context_length=64)
    rows = open_rows(path, folder=Path())
    return TokenizedDataset.build(rows, row_tokenizer, ledger=ledger)


def test_a_run_stops_if_all_rows_are_bad() -> None:
    with pytest.raises(DataError, match=r"^no training row can be used, of 1:\n  1 x "):
        encode([{"question": "", "answer": "a"}], ledger=Ledger(None, max_bad_rows=1.0))


def test_rows_in_memory_equal_rows_one_at_a_time() -> None:
    row_tokenizer = build_row_tokenizer(CONFIG, tokenizer=byte_tokenizer(), context_length=64)

    for index, row in enumerate(table(53)):
        example = row_tokenizer.encode(row, key="k")
        assert ENCODED.ids(index).tolist() == example.input_ids
        assert [tuple(span) for span in ENCODED.loss_spans(index).tolist()] == list(example.spans)
    assert ENCODED.lengths.tolist() == np.diff(ENCODED.starts_Nplus1).tolist()


def test_fingerprints_depend_on_the_content() -> None:
    assert encode(table(53)).fingerprint == ENCODED.fingerprint
    assert encode([*table(53)[:-1], {"question": "q", "answer": "other"}]).fingerprint != ENCODED.fingerprint


def test_progress_counts_every_row() -> None:
    heard: list[int] = []
    row_tokenizer = build_row_tokenizer(CONFIG, tokenizer=byte_tokenizer(), context_length=64)
    rows = open_rows(table(25), folder=Path())

    TokenizedDataset.build(rows, row_tokenizer, ledger=Ledger(None, max_bad_rows=0), chunk=10, progress=heard.append)

    assert heard == [10, 10, 5]


def test_texts_for_a_tokenizer_are_prompts_and_answers_of_valid_rows() -> None:
    rows = open_rows([{"question": "a", "answer": "b"}, {"question": "", "answer": "c"}], folder=Path())

    assert list(tokenizer_texts(rows, CONFIG, supervised=True)) == ["a", "b"]
    assert list(tokenizer_texts(rows, CONFIG, supervised=False)) == ["a"]


@pytest.mark.parametrize("shown", [{"context_length": 1}, {"context_turns": 1}, {"include_labels": False}])
def test_texts_for_a_tokenizer_include_every_answer_of_a_dialogue_with_any_history(shown: dict[str, Any]) -> None:
    config = CONFIG.model_validate(
        CONFIG.model_dump(exclude_unset=True)
        | {
            "input_features": [{"name": "messages", "type": "dialogue"}],
            "data": {"dialogue": {"mode": "squash", **shown}},
        }
    )
    said = [{"text": "x1", "labels": ["y1"]}, {"text": "x2", "labels": ["y2"]}, {"text": "x3", "labels": ["y3"]}]
    rows = open_rows([{"episode": said}], folder=Path())

    results = list(tokenizer_texts(rows, config, supervised=True))

    assert [text for text in results if text.startswith("y")] == ["y1", "y2", "y3"]


@pytest.mark.parametrize(
    ("rare", "share"),
    [(0, None), (1, "0.50% of the loss tokens (1 of 200)"), (11, "5.50% of the loss tokens (11 of 200)")],
)
def test_unknown_tokens_in_the_loss_give_a_warning_and_from_5_percent_an_error(
    rare: int, share: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    base = ScratchModel.model_validate({"type": "scratch", "tokenizer": "char"})
    tokenizer = train_tokenizer(base, ["ab"])
    rows = [{"question": "z", "answer": "z" if index < rare else "b"} for index in range(100)]
    ledger = Ledger(None, max_bad_rows=0)
    row_tokenizer = build_row_tokenizer(CONFIG, tokenizer=tokenizer, context_length=64)

    TokenizedDataset.build(open_rows(rows, folder=Path()), row_tokenizer, ledger=ledger)
    ledger.log_warnings()

    message = f"training: {share} are the tokenizer's unknown token"
    assert caplog.messages == ([message] if share else [])
    if rare < 10:
        ledger.refuse_unknown_tokens("training")
        return
    with pytest.raises(DataError) as error:
        ledger.refuse_unknown_tokens("training")
    assert str(error.value) == (
        f"{message}, which the model would learn to generate; write a larger base_model.vocab_size or "
        "base_model.tokenizer: "
        "bpe for a new model, else choose a base model whose tokenizer knows this text (partita preview shows the rows "
        "as their tokens hold them)"
    )


def test_an_end_token_that_is_also_the_unknown_token_counts_as_known() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.unk_token = tokenizer.eos_token
    ledger = Ledger(None, max_bad_rows=0)
    row_tokenizer = build_row_tokenizer(CONFIG, tokenizer=tokenizer, context_length=64)

    TokenizedDataset.build(open_rows(table(3), folder=Path()), row_tokenizer, ledger=ledger)

    counts = ledger.split("training")
    assert counts.loss_tokens > 3
    assert counts.unknown_tokens == 0


def test_a_batch_implements_the_interface_for_trainers() -> None:
    assert isinstance(next(make().steps()).micro_batches[0], Batch)
