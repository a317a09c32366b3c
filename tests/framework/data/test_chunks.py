import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from partita.data.chunks import ChunkTokenizer, RawChunk, Unreadable, parsed
from partita.data.dialogue import build_expander
from partita.data.formats.base import WRITE_ENCODING
from partita.data.formats.json import DECODER
from partita.data.formatting.build import build_row_tokenizer

SAID = {"episode": [{"text": "x1", "labels": ["y1"]}, {"text": "x2", "labels": ["y2"]}]}


def test_a_dialogue_of_a_stream_is_expanded_to_rows_during_encoding(
    make_config: Callable[..., Any], tokenizer: Any
) -> None:
    config = make_config(
        input_features=[{"name": "messages", "type": "dialogue"}], output_features=[{"name": "reply", "type": "text"}]
    )
    row_tokenizer = ChunkTokenizer(build_row_tokenizer(config, tokenizer=tokenizer, context_length=None))
    rows = [json.dumps(SAID).encode(), b'{"messages": []}', json.dumps(SAID).encode()]

    result = row_tokenizer(RawChunk(rows, ["a:1", "a:2", "a:3"]))

    assert result.indices.tolist() == [0, 0, 2, 2]
    assert [row.index for row in result.bad] == [1]
    texts = [tokenizer.decode(ids) for ids in np.split(result.ids, np.cumsum(result.lengths)[:-1])]
    assert texts == ["x1\ny1</s>", "x1\ny1\nx2\ny2</s>"] * 2
    made = [row for number, row in enumerate(rows) if number != 1]
    view = [part for row in made for _, part in row_tokenizer.row_tokenizer.expander.expand(json.loads(row), "k")]  # type: ignore[union-attr]
    again = row_tokenizer(RawChunk(view, [f"a:{number}" for number in range(4)]))
    assert again.ids.tolist() == result.ids.tolist()


def test_the_expander_of_a_chunk_is_created_once(
    make_config: Callable[..., Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(
        input_features=[{"name": "messages", "type": "dialogue"}], output_features=[{"name": "reply", "type": "text"}]
    )
    row_tokenizer = ChunkTokenizer(build_row_tokenizer(config, tokenizer=tokenizer, context_length=None))
    made: list[Any] = []

    def counted(*given: Any, **named: Any) -> Any:
        made.append(build_expander(*given, **named))
        return made[-1]

    monkeypatch.setattr("partita.data.formatting.formatter.build_expander", counted)
    row_tokenizer(RawChunk([json.dumps(SAID).encode()] * 20, [f"a:{number}" for number in range(20)]))

    assert len(made) == 1


def test_json_of_a_row_is_parsed_once_and_invalid_json_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    decode = DECODER.decode
    monkeypatch.setattr(DECODER, "decode", lambda text: (read.append(text), decode(text))[1])
    good, bad = parsed([b'{"a": "b"}', b'{"a": "\\u00e9"}', Unreadable("gone", "x"), {"a": 1}])

    assert good == {0: {"a": "b"}, 1: {"a": "\u00e9"}, 3: {"a": 1}}
    assert len(read) == 2
    monkeypatch.undo()
    _, message = parsed([b"[1]", b'{"a": "\\ud800"}', b"{", b"\xff{}", b"[" * 100_000])
    assert bad | {number + 4: reasons for number, reasons in message.items()} == {
        2: ("gone",),
        4: ("a row is a JSON object, this is a list",),
        5: ("not Unicode: half of a surrogate pair",),
        6: ("not JSON: Expecting property name enclosed in double quotes at character 2",),
        7: (f"not UTF-8: byte 0xff at position 1; {WRITE_ENCODING}",),
        8: ("nested more than 100 levels deep",),
    }


def test_an_answer_longer_than_a_batch_is_bad_and_the_others_of_its_dialogue_are_used(
    make_config: Callable[..., Any], tokenizer: Any
) -> None:
    config = make_config(
        input_features=[{"name": "messages", "type": "dialogue"}], output_features=[{"name": "reply", "type": "text"}]
    )
    made = build_row_tokenizer(config, tokenizer=tokenizer, context_length=None)
    rows = RawChunk([json.dumps(SAID).encode()], ["a:1"])
    short, long = ChunkTokenizer(made)(rows).lengths.tolist()

    result = ChunkTokenizer(made, max_row_tokens=long - 1)(rows)

    assert result.lengths.tolist() == [short]
    assert [row.reasons for row in result.bad] == [(f"more than the {long - 1} tokens of data.batching.max_tokens",)]
    assert [(row.index, row.number) for row in result.bad] == [(0, 2)]
    assert result.used.rows == 1
