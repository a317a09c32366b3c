"""Tests of documents of language modelling: chunks for training, and pieces for evaluation."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.data.batching.collate import collate
from partita.data.batching.documents import cut_chunks, cut_pieces
from partita.data.batching.plan import alone
from partita.data.formatting.build import build_row_tokenizer
from partita.data.ledger import Ledger
from partita.data.rows import RowKeys
from partita.data.sources.sources import open_rows
from partita.data.tokenized import TokenizedDataset
from partita.tokenizers.load import byte_tokenizer
from partita_schema.config import Config
from partita_schema.errors import ModelError

from ....properties import examples

CONFIG = Config.model_validate(
    {
        "base_model": "unused",
        "output_features": [{"name": "text", "type": "text"}],
        "data": {"batching": {"type": "chunk", "context_length": 16}},
        "trainer": {"type": "finetune"},
    }
)
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def documents(lengths: list[int]) -> TokenizedDataset:
    """Return documents of these numbers of tokens; the ids are 100, 101 ... over all documents."""
    total = sum(lengths)
    spans = np.array([(0, length) for length in lengths], dtype=np.int32)
    return TokenizedDataset(
        ids_L=np.arange(100, 100 + total, dtype=np.int32),
        starts_Nplus1=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        loss_spans_S2=spans,
        span_starts_Nplus1=np.arange(len(lengths) + 1),
        keys=RowKeys.counted("docs.jsonl", len(lengths)),
        indices_N=np.arange(len(lengths)),
        fingerprint_inputs={},
    )


@examples(60)
@given(lengths=LENGTHS, length=st.integers(2, 20), isolate=st.booleans(), sources=st.integers(1, 3))
def test_every_token_is_in_exactly_one_chunk(lengths: list[int], length: int, isolate: bool, sources: int) -> None:
    docs = documents(lengths)
    sources_N = np.arange(len(docs)) % sources

    chunks = cut_chunks(docs, length, isolate=isolate, sources_N=sources_N)

    found = [token for row in range(len(chunks)) for token in chunks.ids(row).tolist()]
    assert len(found) == len(set(found))
    assert len(set(chunks.keys)) == len(chunks)
    assert int(chunks.loss_tokens.sum()) == len(found)
    batch = collate(chunks, alone(np.arange(len(chunks))), pad_token_id=0)
    assert all((batch.labels_BT != -100).any(1).tolist()), "something is predicted in every chunk"
    if length > 2 and not isolate and min(lengths) > 1:
        assert sorted(found) == docs.ids_L.tolist()
        short = [size for size in chunks.lengths.tolist() if size != length]
        assert all(size < length for size in short)
        assert len(short) <= 2 * len(np.unique(sources_N)), "only the last chunks of a source are shorter"


def test_no_chunk_holds_documents_of_two_sources() -> None:
    docs = documents([5, 6, 7, 8])  # tokens 100-104, 105-110, 111-117, 118-125

    chunks = cut_chunks(docs, 8, sources_N=np.array([0, 1, 0, 1]))

    assert [chunks.ids(row).tolist() for row in range(len(chunks))] == [
        [100, 101, 102, 103, 104, 111, 112, 113],
        [114, 115, 116, 117],
        [105, 106, 107, 108, 109, 110, 118, 119],
        [120, 121, 122, 123, 124, 125],
    ]
    assert list(chunks.keys) == ["docs.jsonl:1#1", "docs.jsonl:3#1", "docs.jsonl:2#1", "docs.jsonl:4#1"]


def test_a_last_chunk_of_one_token_takes_one_of_the_chunk_before() -> None:
    assert cut_chunks(documents([13]), 4).lengths.tolist() == [4, 4, 3, 2]
    assert cut_chunks(documents([12]), 4).lengths.tolist() == [4, 4, 4]
    assert len(cut_chunks(documents([1, 5]), 4, sources_N=np.array([0, 1]))) == 2, "a source of one token is left out"


def test_chunks_of_one_source_share_the_ids_of_the_documents() -> None:
    docs = documents([30, 30])

    assert cut_chunks(docs, 8).ids_L is docs.ids_L


def test_isolated_documents_are_packed_rows_with_positions_of_their_own() -> None:
    chunks = cut_chunks(documents([5, 2, 9]), 6, isolate=True)  # 100-104, 105-106, 107-115

    batch = collate(chunks, alone(np.array([1, 0, 2])), pad_token_id=0)

    assert batch.input_ids_BT.tolist() == [
        [106, 107, 108, 109, 110, 111],
        [100, 101, 102, 103, 104, 105],
        [112, 113, 114, 115, 0, 0],
    ]
    assert batch.position_ids_BT is not None
    assert batch.position_ids_BT.tolist() == [[0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 0], [0, 1, 2, 3, 0, 0]]
    assert batch.labels_BT.tolist() == [
        [-100, -100, 108, 109, 110, 111],
        [-100, 101, 102, 103, 104, -100],
        [-100, 113, 114, 115, -100, -100],
    ]
    assert len(batch.keys) == 5
    assert batch.rows == int(batch.row_starts().sum()), "one key for each document"


def test_documents_that_attend_to_each_other_have_no_positions() -> None:
    chunks = cut_chunks(documents([5, 2, 9]), 6)

    batch = collate(chunks, alone(np.array([0])), pad_token_id=0)

    assert batch.position_ids_BT is None
    assert batch.labels_BT.tolist() == [[-100, 101, 102, 103, 104, 105]]


@examples(60)
@given(lengths=LENGTHS, length=st.none() | st.integers(2, 20), prefix=st.none() | st.just(7))
def test_evaluation_predicts_every_token_of_a_document_once(
    lengths: list[int], length: int | None, prefix: int | None
) -> None:
    docs = documents(lengths)

    pieces = cut_pieces(docs, length, prefix=prefix)

    batch = collate(pieces, alone(np.arange(len(pieces))), pad_token_id=0)
    predicted = batch.labels_BT[batch.labels_BT != -100].tolist()
    first = set() if prefix is not None else {int(docs.ids_L[start]) for start in docs.starts_Nplus1[:-1]}
    assert sorted(predicted) == sorted(set(docs.ids_L.tolist()) - first)
    assert length is None or int(pieces.lengths.max()) <= length
    assert len(set(pieces.keys)) == len(pieces)
    assert pieces.indices_N.tolist() == sorted(pieces.indices_N.tolist())


def test_a_piece_begins_with_the_last_token_of_the_one_before() -> None:
    pieces = cut_pieces(documents([7, 2]), 4, prefix=9)

    assert [pieces.ids(row).tolist() for row in range(len(pieces))] == [
        [9, 100, 101, 102],
        [102, 103, 104, 105],
        [105, 106],
        [9, 107, 108],
    ]


def encode(rows: list[dict[str, Any]], *, context_length: int | None = 16, **changes: Any) -> TokenizedDataset:
    config = Config.model_validate(CONFIG.model_dump() | changes)
    row_tokenizer = build_row_tokenizer(config, tokenizer=byte_tokenizer(), context_length=context_length)
    return TokenizedDataset.build(open_rows(rows, folder=Path()), row_tokenizer, ledger=Ledger(None, max_bad_rows=0.5))


def test_documents_end_with_the_end_token_and_are_not_truncated() -> None:
    text = "a document that is longer than the context of the model"
    tokenizer = byte_tokenizer()
    end = tokenizer.eos_token_id

    encoded = encode([{"text": text}, {"text": "b"}])

    assert encoded.ids(0)[:-1].tolist() == tokenizer(text)["input_ids"]
    assert encoded.ids(0)[-1] == encoded.ids(1)[-1] == end
    assert encoded.loss_spans(0).tolist() == [[0, len(text) + 1]]


@pytest.mark.parametrize(
    ("written", "context", "length"), [(16, 64, 16), (None, 64, 64), (None, 100_000, 2048), (None, None, 2048)]
)
def test_the_length_of_chunks_is_written_or_the_context_up_to_2048(
    written: int | None, context: int | None, length: int
) -> None:
    config = CONFIG.model_dump() | {"data": {"batching": {"type": "chunk", "context_length": written}}}

    row_tokenizer = build_row_tokenizer(
        Config.model_validate(config), tokenizer=byte_tokenizer(), context_length=context
    )

    assert row_tokenizer.chunk_length == length
    assert row_tokenizer.max_length is None


def test_chunks_longer_than_the_context_are_refused() -> None:
    with pytest.raises(ModelError) as error:
        build_row_tokenizer(CONFIG, tokenizer=byte_tokenizer(), context_length=15)
    assert str(error.value) == (
        "data.batching.context_length: 16 is above the model's context of 15 tokens; write at most 15"
    )
