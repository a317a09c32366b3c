"""Tests of batches with the loss on every token; loss on answers only is tested with the loader."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partita.data.batching.collate import collate
from partita.data.batching.plan import PlannedBatch
from partita.data.formatting.build import build_row_tokenizer
from partita.data.ledger import Ledger
from partita.data.rows import RowKeys
from partita.data.sources.sources import open_rows
from partita.data.tokenized import TokenizedDataset


@pytest.mark.parametrize("lines", [[0, 1, 2], [0, 0, 0], [0, 1, 1]])
def test_the_first_token_of_a_packed_row_is_not_in_the_loss(make_config: Any, tokenizer: Any, lines: list[int]) -> None:
    config = make_config(trainer={"type": "finetune", "completion_only_loss": False})
    rows = open_rows([{"question": text, "answer": "c"} for text in ("ab", "d", "efg")], folder=Path())
    row_tokenizer = build_row_tokenizer(config, tokenizer=tokenizer, context_length=64)
    encoded = TokenizedDataset.build(rows, row_tokenizer, ledger=Ledger(None, max_bad_rows=0))
    assert [encoded.loss_spans(row).tolist()[0][0] for row in range(3)] == [0, 0, 0]

    batch = collate(encoded, PlannedBatch(np.arange(3), np.array(lines)), pad_token_id=0)

    results = [label for line in batch.labels_BT.tolist() for label in line]
    learned = [token for row in range(3) for token in encoded.ids(row).tolist()[1:]]
    assert [label for label in results if label != -100] == learned
    assert batch.loss_tokens == len(learned)


def test_keys_of_a_batch_are_those_of_its_rows(make_config: Any, tokenizer: Any) -> None:
    rows = open_rows([{"question": text, "answer": "c"} for text in ("ab", "d", "efg")], folder=Path())
    row_tokenizer = build_row_tokenizer(make_config(), tokenizer=tokenizer, context_length=64)
    encoded = TokenizedDataset.build(rows, row_tokenizer, ledger=Ledger(None, max_bad_rows=0))
    keys = encoded.keys
    for known in (keys, RowKeys(keys.names, keys.files, keys.numbers, examples=np.array([2, 1, 3]))):
        batch = collate(replace(encoded, keys=known), PlannedBatch(np.array([2, 0]), np.arange(2)), pad_token_id=0)

        assert batch.keys == (known[2], known[0])
    assert batch.keys[0].endswith("#3")
