import json
from collections.abc import Callable
from typing import Any

import numpy as np

from partita.data.chunks import ChunkEncoder, RawChunk
from partita.data.shaping.encoder import build_encoder

SAID = {"episode": [{"text": "x1", "labels": ["y1"]}, {"text": "x2", "labels": ["y2"]}]}


def test_a_dialogue_of_a_stream_becomes_its_rows_where_it_is_encoded(
    make_config: Callable[..., Any], tokenizer: Any
) -> None:
    config = make_config(
        input_features=[{"name": "messages", "type": "dialogue"}], output_features=[{"name": "reply", "type": "text"}]
    )
    encoder = ChunkEncoder(build_encoder(config, tokenizer=tokenizer, context_length=None))
    rows = [json.dumps(SAID).encode(), b'{"messages": []}', json.dumps(SAID).encode()]

    found = encoder(RawChunk(rows, ["a:1", "a:2", "a:3"]))

    assert found.places.tolist() == [0, 0, 2, 2]
    assert [row.place for row in found.bad] == [1]
    texts = [tokenizer.decode(ids) for ids in np.split(found.ids, np.cumsum(found.lengths)[:-1])]
    assert texts == ["x1\ny1</s>", "x1\ny1\nx2\ny2</s>"] * 2
    made = [row for number, row in enumerate(rows) if number != 1]
    view = [part for row in made for _, part in encoder.encoder.expander.expand(json.loads(row), "k")]  # type: ignore[union-attr]
    again = encoder(RawChunk(view, [f"a:{number}" for number in range(4)]))
    assert again.ids.tolist() == found.ids.tolist()
