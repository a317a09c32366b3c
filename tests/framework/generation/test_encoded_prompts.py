from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from partita.data.formatting.row_tokenizer import PromptExample
from partita.generation import encoded_prompts
from partita.generation.encoded_prompts import EncodedPrompts
from partita.generation.prompts import PREFIX_GROUP_TOKENS
from partita.lm.scripted import ScriptedModel
from partita_schema.rows import row_schema

from .conftest import encoder_of

UPPER = ScriptedModel(str.upper)
ROWS = [{"question": text} for text in ("one", "three", None, "x" * 30, "two")]


def prompts_of(rows: Any, row_tokenizer: Any, config: Any, **options: Any) -> EncodedPrompts:
    return EncodedPrompts(rows, row_tokenizer, row_schema(config, supervised=False), **options)


def test_lengths_keys_and_reasons_are_stored_and_tokens_are_encoded_when_needed(
    make_config: Any, make_rows: Any
) -> None:
    row_tokenizer = encoder_of(make_config(), UPPER, max_length=20)
    prompts = prompts_of(make_rows(ROWS), row_tokenizer, make_config(), chunk=2)
    ids = [
        list(row_tokenizer.encode_prompt(row, key="").input_ids) for row in ({"question": "two"}, {"question": "one"})
    ]
    assert prompts.prompts([4, 0]) == ids
    assert prompts.lengths.tolist() == [len(ids[1]), len(ids[1]) + 2, 0, 0, len(ids[0])]
    assert prompts.skipped == {2: "column question is missing or empty"}
    assert list(prompts.errors) == [3]
    assert len(set(map(bytes, prompts.keys))) == 5


def test_keys_change_with_the_prompt_the_row_and_the_fingerprint(make_config: Any, make_rows: Any) -> None:
    config = make_config()

    def keys(rows: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        return prompts_of(make_rows(rows), encoder_of(config, UPPER), config, **options).keys

    same = [{"question": "a"}, {"question": "a"}]
    first = keys(same, fingerprint="f")
    assert np.array_equal(first, keys(same, fingerprint="f", chunk=1))
    assert not np.array_equal(first[0], first[1])
    assert not np.array_equal(first[0], keys(same, fingerprint="g")[0])
    assert not np.array_equal(first[0], keys([{"question": "b"}], fingerprint="f")[0])


def test_a_prompt_that_cannot_be_created_does_not_affect_others(make_config: Any, make_rows: Any) -> None:
    class Picky:
        def encode_prompts(self, rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[PromptExample]:
            if any(row["question"] == "three" for row in rows):
                raise RuntimeError("the template refuses it")
            return [
                PromptExample(key, "", [1] * (row["question"] != "two")) for row, key in zip(rows, keys, strict=True)
            ]

    prompts = prompts_of(make_rows(ROWS), Picky(), make_config())
    assert prompts.lengths.tolist() == [1, 0, 0, 1, 0]
    assert prompts.errors == {1: "RuntimeError: the template refuses it", 4: "the prompt is empty"}


class Tokens:
    """Encodes the tokens that a row has as text."""

    def encode_prompts(self, rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[PromptExample]:
        ids = [[int(token) for token in row["question"].split()] for row in rows]
        return [PromptExample(key, "", one) for one, key in zip(ids, keys, strict=True)]


@pytest.mark.parametrize("held", [10_000, 300, 0])
def test_prompts_that_begin_alike_are_a_prefix_group(
    make_config: Any, make_rows: Any, monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    monkeypatch.setattr(encoded_prompts, "MAX_HELD_TOKENS", held)
    shared = range(9)
    first, second = ([*shared, *range(start, start + PREFIX_GROUP_TOKENS)] for start in (100, 300))
    almost = [*first[:-1], 7]
    tokens = [first, [*second, 1], [*first, 1], [*second, 2, 3], almost, [*first, 2], list(shared), [*shared, 5, 6]]
    # The first rows show how long the prefix of all prompts is.
    tokens = [[*shared, 99], [*shared, 98], *tokens]
    rows = make_rows([{"question": " ".join(map(str, ids))} for ids in tokens])
    prompts = prompts_of(rows, Tokens(), make_config())
    assert prompts.prefix == list(shared)
    prefix_groups = prompts.prefix_groups
    assert prefix_groups is not None
    assert prefix_groups[[2, 4, 7]].tolist() == [prefix_groups[2]] * 3
    assert prefix_groups[[3, 5]].tolist() == [prefix_groups[3]] * 2
    assert prefix_groups[2] != prefix_groups[3]
    assert [row for row, prefix_group in enumerate(prefix_groups) if prefix_group < 0] == [0, 1, 6, 8, 9]
    alone = prompts_of(
        make_rows([{"question": " ".join(map(str, ids))} for ids in tokens[:4]]), Tokens(), make_config()
    )
    assert alone.prefix_groups is None


def test_no_rows_give_no_prompts(make_config: Any, make_rows: Any) -> None:
    prompts = prompts_of(make_rows([]), encoder_of(make_config(), UPPER), make_config())
    assert (len(prompts), prompts.lengths.tolist(), prompts.prefix_groups) == (0, [], None)
