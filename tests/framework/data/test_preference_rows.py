"""Tests of pairs and labelled answers from files to batches: indexed, streamed, cached, packed and in the ledger."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from partita.data import DataLoader
from partita.data.formatting.build import build_row_tokenizer
from partita.data.ledger import Ledger
from partita.data.sources.sources import open_rows
from partita.data.token_cache import TokenCache
from partita.data.tokenized import TokenizedDataset
from partita.pipeline.eval_dataset import build_eval_dataset
from partita.tokenizers.load import byte_tokenizer
from partita_schema.errors import DataError
from partita_schema.load import load_config
from partita_trainers import Batch

from ...json_lines import read_json_lines, write_json_lines

PAIRS = [
    {"question": "q" * (1 + number % 5), "chosen": f"a{number}", "rejected": "b" * (1 + number % 3)}
    for number in range(12)
]
LABELLED = [{"question": f"q{number}", "answer": f"a{number}", "liked": number % 3 == 0} for number in range(12)]
PAIR = {"name": "answer", "type": "preference"}
ALL_ROWS = {"split": {"type": "random", "probabilities": [1.0, 0, 0]}}
BATCHINGS: list[dict[str, Any]] = [
    {"type": "fixed"},
    {"type": "bucket", "window": 8},
    {"type": "token_budget", "max_tokens": 96, "window": 8},
    {"type": "pack", "max_tokens": 64, "window": 8},
]


def settings(trainer: str = "preference", **changes: Any) -> dict[str, Any]:
    output = {"name": "answer", "type": "text", "label": "liked"} if trainer == "kto" else PAIR
    return {
        "base_model": {"type": "scratch", "tokenizer": "byte", "vocab_size": 300, "context_length": 64},
        "input_features": [{"name": "question"}],
        "output_features": [output],
        "data": ALL_ROWS,
        "preprocessing": {"global_max_sequence_length": 64},
        "trainer": {"type": trainer, "batch_size": 3},
    } | changes


def rows_of(batches: list[Batch]) -> dict[str, tuple[list[list[int]], list[float]]]:
    """Return the answers of each row and its values, by key."""
    found = {}
    for batch in batches:
        rows = batch.loss_token_rows.tolist()
        ids = batch.labels_BT[batch.labels_BT != -100].tolist()
        for number, key in enumerate(batch.keys):
            values = [] if batch.row_values_NK is None else batch.row_values_NK[number].tolist()
            found[key] = [token for token, row in zip(ids, rows, strict=True) if row == number], values
    return found


def answers(row: dict[str, Any]) -> list[int]:
    """Return the loss tokens of a pair."""
    ids: list[int] = byte_tokenizer()(row["chosen"] + "</s>" + row["rejected"] + "</s>")["input_ids"]
    return ids


def epoch_of(config: dict[str, Any], *, source: Any = None) -> list[Batch]:
    with DataLoader(config, dataset=source) as loader:
        return list(loader)


@pytest.mark.parametrize("batching", BATCHINGS, ids=lambda batching: batching["type"])
def test_each_pair_is_in_one_batch_with_both_answers(batching: dict[str, Any]) -> None:
    config = settings(data=ALL_ROWS | {"batching": batching})
    if batching["type"] == "token_budget":
        config["trainer"] = {"type": "preference"}
    batches = epoch_of(config, source=PAIRS)
    found = rows_of(batches)

    assert sorted(ids for ids, _ in found.values()) == sorted(map(answers, PAIRS))
    assert len(found) == len(PAIRS)
    for batch in batches:
        assert batch.position_ids_BT is not None
        assert batch.row_values_NK is None


def test_the_answers_of_a_pair_continue_the_positions_of_its_prompt() -> None:
    [batch] = epoch_of(settings(), source=PAIRS[4:5])

    assert batch.position_ids_BT is not None
    assert batch.position_ids_BT[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 5, 6, 7]  # qqqqq, a4 and bb
    assert batch.loss_tokens == 6


def test_streamed_pairs_are_those_of_the_file(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "pairs.jsonl", PAIRS)
    source = {"type": "jsonl", "path": str(tmp_path / "pairs.jsonl")}
    trainer = {"type": "preference", "batch_size": 3, "max_steps": 4}
    streamed = settings(data={"source": source | {"streaming": True}}) | {"trainer": trainer}
    found = rows_of(epoch_of(streamed))

    assert sorted(ids for ids, _ in found.values()) == sorted(map(answers, PAIRS))


@pytest.mark.parametrize(("trainer", "rows"), [("preference", PAIRS), ("kto", LABELLED)])
def test_cached_tokens_are_those_of_the_rows(trainer: str, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    write_json_lines(tmp_path / "rows.jsonl", rows)
    source = open_rows(tmp_path / "rows.jsonl", folder=tmp_path)
    row_tokenizer = build_row_tokenizer(
        load_config(settings(trainer)).config, tokenizer=byte_tokenizer(), context_length=64
    )
    plain = TokenizedDataset.build(source, row_tokenizer, ledger=Ledger(None, max_bad_rows=0))
    caches = [TokenCache(tmp_path / "cache") for _ in range(2)]
    stored = [cache.encode(source, row_tokenizer, ledger=Ledger(None, max_bad_rows=0)) for cache in caches]

    assert [cache.uses["training"].hit for cache in caches] == [False, True]
    for dataset in stored:
        assert dataset.fingerprint == plain.fingerprint
        assert dataset.branched == plain.branched == (trainer == "preference")
        assert np.array_equal(dataset.row_values_NK, plain.row_values_NK)  # type: ignore[arg-type]


def test_pairs_without_inputs_are_evaluated_as_pairs() -> None:
    rows = [{key: row["question"] + row[key] for key in ("chosen", "rejected")} for row in PAIRS]
    config = load_config(settings(input_features=[])).config
    row_tokenizer = build_row_tokenizer(config, tokenizer=byte_tokenizer(), context_length=64)
    parts: Any = SimpleNamespace(config=config, row_tokenizer=row_tokenizer, labels={}, tokens=None)
    source, ledger = open_rows(rows, folder=Path()), Ledger(None, max_bad_rows=0)
    evaluated = build_eval_dataset(parts, source, split="test", ledger=ledger)

    assert evaluated.encoded.branched
    assert evaluated.encoded.text_bytes is None
    assert [len(evaluated.encoded.loss_spans(index)) for index in range(len(rows))] == [2] * len(rows)


def test_another_column_of_answers_gives_other_cached_tokens(tmp_path: Path) -> None:
    rows = [row | {"worse": "c"} for row in PAIRS]
    write_json_lines(tmp_path / "rows.jsonl", rows)
    source, cache = open_rows(tmp_path / "rows.jsonl", folder=tmp_path), TokenCache(tmp_path / "cache")
    outputs = [PAIR, PAIR | {"rejected": "worse"}]
    configs = [load_config(settings(output_features=[output])).config for output in outputs]
    encoders = [build_row_tokenizer(config, tokenizer=byte_tokenizer(), context_length=64) for config in configs]
    first, other = (
        cache.encode(source, row_tokenizer, ledger=Ledger(None, max_bad_rows=0)) for row_tokenizer in encoders
    )

    assert first.fingerprint != other.fingerprint


def test_pairs_that_cannot_be_compared_are_in_the_quarantine_with_the_reason(tmp_path: Path) -> None:
    odd = [
        {"question": "q", "chosen": "a", "rejected": "a"},
        {"question": "q", "chosen": "a", "rejected": ""},
        {"question": "q" * 64, "chosen": "a", "rejected": "b"},
        {"question": "q" * 60, "chosen": "a" * 9, "rejected": "a" * 8},
    ]
    write_json_lines(tmp_path / "rows.jsonl", [*PAIRS, *odd])
    source = open_rows(tmp_path / "rows.jsonl", folder=tmp_path)
    row_tokenizer = build_row_tokenizer(load_config(settings()).config, tokenizer=byte_tokenizer(), context_length=64)
    ledger = Ledger(tmp_path, max_bad_rows=4)
    encoded = TokenizedDataset.build(source, row_tokenizer, ledger=ledger)
    records = read_json_lines(tmp_path / "quarantine.jsonl")

    assert len(encoded) == len(PAIRS)
    assert [record["reasons"] for record in records] == [
        ["the answers in the columns chosen and rejected are equal"],
        ["column rejected is missing or empty"],
        ["the prompt leaves no room for an answer within 64 tokens"],
        [
            (
                "the answers in the columns chosen and rejected are equal after 11 tokens beyond the length limits are "
                "cut off"
            )
        ],
    ]
    assert [record["row"] for record in records] == odd
    assert (ledger.split("training").used, ledger.split("training").left_out) == (12, 4)


def test_labels_are_the_values_of_the_rows() -> None:
    found = rows_of(epoch_of(settings("kto"), source=LABELLED))
    by_answer = {byte_tokenizer().decode(ids): values for ids, values in found.values()}

    assert by_answer == {f"{row['answer']}</s>": [float(row["liked"])] for row in LABELLED}


@pytest.mark.parametrize(("label", "kind"), [(True, "good"), (False, "bad")])
def test_answers_of_one_kind_are_refused(label: bool, kind: str) -> None:
    rows = [row | {"liked": label} for row in LABELLED]
    with pytest.raises(DataError) as caught:
        epoch_of(settings("kto"), source=rows)

    assert str(caught.value) == (
        f"all 12 training answers are {kind} by the column liked, and good ones are compared with bad ones; add rows "
        "of the other kind"
    )


@pytest.mark.parametrize("inputs", [[{"name": "question"}], [{"name": "question", "type": "dialogue"}]])
def test_a_missing_column_is_reported_before_the_rows_are_read(inputs: list[dict[str, Any]]) -> None:
    rows = [{key: value for key, value in row.items() if key != "rejected"} for row in PAIRS]
    with pytest.raises(DataError, match="has no column 'rejected', which output answer needs"):
        epoch_of(settings(input_features=inputs), source=rows)


def test_a_new_tokenizer_knows_the_characters_of_both_answers() -> None:
    model = {"type": "scratch", "tokenizer": "char", "context_length": 64}
    rows = [row | {"rejected": "xyz"} for row in PAIRS]
    [batch, *_] = epoch_of(settings(base_model=model), source=rows)
    ids = batch.labels_BT[batch.labels_BT != -100].tolist()

    assert len({*ids}) >= 5  # x, y, z, the end and those of the chosen answers, none of which is the unknown token
