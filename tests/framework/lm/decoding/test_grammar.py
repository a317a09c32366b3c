"""Tests of constrained decoding: answers follow the grammar, and equal unconstrained answers if these are valid."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from partita.lm.base import GenerationOptions, SlotAnswer, SlotRequest
from partita.lm.decoding.grammar import Grammar, token_bytes
from partita.lm.decoding.row import Row
from partita.lm.load_model import load_model
from partita.tokenizers.load import (
    CHARACTER,
    UNKNOWN,
    WORD,
    byte_pair_backend,
    byte_tokenizer,
    piece_backend,
    wrap,
)
from partita_schema.config import Config
from partita_schema.errors import ModelError
from partita_schema.sections.outputs.grammar import answer_grammar
from partita_schema.sections.outputs.grammar_rules import json_rule, whole_grammar

from ....properties import ends, examples
from ..byte_fallback import sentencepiece_like

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["warm", "kühl"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "count", "kind", "tags"],
    "additionalProperties": False,
}
SIZES = tuple((length, 100) for length in (3, 9, 1, 20, 5, 14))
TEXTS = ['{"name": "Zoë", "count": 12, "kind": "kühl", "tags": [true, false]}', "a b  c\n\td", "☃ and 日本 - ok"]
SAMPLED = {"do_sample": True, "top_k": 0, "temperature": 3.0}
NARROW = {"top_k": 9, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9, "epsilon_cutoff": 1e-4, "eta_cutoff": 1e-4}
AGAINST = {"min_new_tokens": 90, "no_repeat_ngram_size": 1, "suppress_tokens": list(range(3, 250))}


def grammar_of(schema: dict[str, Any] | None, *others: dict[str, Any], labels: dict[str, Any] | None = None) -> str:
    """Return the grammar of a JSON output, alone or together with other outputs."""
    decoder = {"constrain": True} | ({"json_schema": schema} if schema is not None else {})
    config = Config.model_validate(
        {
            "base_model": "m",
            "input_features": [{"name": "q"}],
            "output_features": [{"name": "value", "type": "json", "decoder": decoder}, *others],
        }
    )
    grammar = answer_grammar(config.output_features, labels=labels or {})
    assert grammar is not None
    return grammar


@pytest.fixture(scope="module")
def lm(small: Any) -> Any:
    config = small.config()
    context = config.base_model.model_copy(update={"context_length": 160})
    model = small.load(config.model_copy(update={"base_model": context}), trainable=False)
    small.sharpen(model.module)
    return model


def texts(answers: dict[int, SlotAnswer]) -> dict[int, str]:
    assert all(answer.error is None for answer in answers.values())
    return {row: answer.generated.text for row, answer in answers.items() if answer.generated is not None}


@torch.no_grad()
def answer_alone(lm: Any, request: SlotRequest, grammar: str) -> str:
    """Return the likeliest permitted tokens, one after another, from full forward passes over one row."""
    size, end = lm.vocabulary_size, lm.tokenizer.eos_token_id
    matcher = Grammar(grammar, tokenizer=lm.tokenizer, ends=[end], size=size).matcher()
    ids: list[int] = []
    while len(ids) < request.max_new_tokens:
        logits = lm.base(input_ids=torch.tensor([[*request.input_ids, *ids]])).logits[0, -1]
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = torch.from_numpy(np.unpackbits(bits, bitorder="little")[:size].astype(bool))
        token = int(logits.masked_fill(~allowed, -torch.inf).argmax())
        if token == end:
            break
        ids.append(token)
        assert matcher.consume_token(token)
    return str(lm.tokenizer.decode(ids))


@pytest.mark.long
def test_greedy_answers_are_the_likeliest_allowed_ones_for_any_number_of_slots(small: Any, lm: Any) -> None:
    grammar = grammar_of(SCHEMA)
    options = GenerationOptions({"do_sample": False}, grammar=grammar)
    requests = small.slot_requests(*SIZES)
    wanted = {request.row: answer_alone(lm, request, grammar) for request in requests}
    for slots in (1, 2, 6):
        assert texts(small.answer_in_slots(lm, requests, slots=slots, options=options)) == wanted
    assert len(set(wanted.values())) > 3
    free = texts(small.answer_in_slots(lm, requests, slots=6, options=options.unconstrained))
    with pytest.raises(ValueError, match="Expecting value"):
        json.loads(free[0])


@pytest.mark.parametrize(
    "arguments",
    ends([SAMPLED, SAMPLED | NARROW, SAMPLED | {"top_h": 0.5}, AGAINST, {"repetition_penalty": 1.8}]),
    ids=["sampled", "narrow", "top_h", "against", "penalty"],
)
def test_every_answer_follows_the_schema_with_any_options(small: Any, lm: Any, arguments: dict[str, Any]) -> None:
    options = GenerationOptions(arguments, grammar=grammar_of(SCHEMA), logprobs=True)
    found = small.answer_in_slots(lm, small.slot_requests(*SIZES), slots=4, options=options)
    for answer in found.values():
        assert answer.generated.finish_reason == "stop"
        Draft202012Validator(SCHEMA).validate(json.loads(answer.generated.text))
        assert answer.generated.logprob < 0
    again = small.answer_in_slots(lm, small.slot_requests(*SIZES), slots=3, options=options)
    assert texts(again) == texts(found)


def test_a_token_limit_cuts_an_incomplete_answer(small: Any, lm: Any) -> None:
    options = GenerationOptions({"do_sample": False}, grammar=grammar_of(SCHEMA))
    found = small.answer_in_slots(lm, small.slot_requests((3, 8), (5, 100)), slots=2, options=options)
    assert found[0].generated.finish_reason == "length"
    assert len(found[0].generated.ids) == 8
    assert found[0].generated.text.lstrip().startswith('{"name')
    assert found[1].generated.finish_reason == "stop"


def test_several_outputs_are_one_object_in_the_order_of_the_configuration(small: Any, lm: Any) -> None:
    others = (
        {"name": 'a "title"', "type": "text"},
        {"name": "price", "type": "number", "decoder": {"minimum": 2, "maximum": 7}},
        {"name": "mood", "type": "category"},
        {"name": "stars", "type": "category", "preprocessing": {"lowercase": True}, "decoder": {"labels": ["A", "Bé"]}},
        {"name": "said", "type": "category", "decoder": {"match": {"x": {"value": "y"}}}},
    )
    grammar = grammar_of({"type": "array", "items": {"$ref": "#/$defs/i"}, "$defs": {"i": {"const": 1}}}, *others)
    assert grammar == grammar_of(
        {"type": "array", "items": {"$ref": "#/$defs/i"}, "$defs": {"i": {"const": 1}}},
        *others,
        labels={"said": ["x"]},
    )
    labels = {"mood": ["glad", "sad"], "stars": ["A", "Bé"], "said": ["x"]}
    grammar = grammar_of(
        {"type": "array", "items": {"$ref": "#/$defs/i"}, "$defs": {"i": {"const": 1}}}, *others, labels=labels
    )
    end = lm.tokenizer.eos_token_id
    held = Grammar(grammar, tokenizer=lm.tokenizer, ends=[end], size=lm.vocabulary_size)

    def allows(text: str) -> bool:
        matcher, ids = held.matcher(), lm.tokenizer.encode(text, add_special_tokens=False)
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())

    right = '{"value":[1,1],"a \\"title\\"":"any","price":6.5,"mood":"sad","stars":"bé","said":"whatever"}'
    assert allows(right)
    assert allows(" " + right.replace(":", ": ").replace(",", ", "))
    for wrong in ("[1,1]", "sad", "6.5", "bé", '"any"'):
        assert not allows(right.replace(wrong, "[2]" if wrong == "[1,1]" else "8"))
    assert not allows(right.replace('"mood":"sad",', ""))
    assert not allows('{"mood":"sad",' + right.replace('"mood":"sad",', "")[1:])


def test_without_a_schema_an_answer_is_an_object(small: Any, lm: Any) -> None:
    held = Grammar(grammar_of(None), tokenizer=lm.tokenizer, ends=[1], size=lm.vocabulary_size)
    for text, fits in (('{"a":[1,{"b":null}]}', True), ("{}", True), ("[1]", False), ("true", False), ("{}{}", False)):
        ids = lm.tokenizer.encode(text, add_special_tokens=False)
        matcher = held.matcher()
        assert (matcher.try_consume_tokens(ids) == len(ids)) == fits, text


def test_end_tokens_are_allowed_only_after_a_complete_value(lm: Any) -> None:
    size = lm.vocabulary_size + 3  # embeddings may have more rows than there are tokens
    held = Grammar(grammar_of({"type": "integer"}), tokenizer=lm.tokenizer, ends=[1, 9], size=size)
    digit = lm.tokenizer.encode("7")[0]
    rows = [Row(SlotRequest([5], 9, row), matcher=held.matcher()) for row in range(2)]
    rows[1].new.append(digit)
    allowed = held.allowed(rows)
    assert allowed.shape == (2, size)
    assert allowed[:, [1, 9]].tolist() == [[False, False], [True, True]]
    assert not allowed[:, -3:].any()
    rows[1].new.append(9)
    assert held.allowed(rows)[1].nonzero().flatten().tolist() == [1, 9]


def test_a_row_is_an_error_if_the_tokenizer_cannot_write_a_valid_answer(small: Any) -> None:
    config = small.config()
    base = config.base_model.model_copy(update={"tokenizer": "char", "vocab_size": 300})
    tokenizer = wrap(piece_backend(['{"a":1}'], pattern=CHARACTER, vocab_size=300), max_length=64, unknown=UNKNOWN)
    lm = load_model(config.model_copy(update={"base_model": base}), folder=None, tokenizer=tokenizer, trainable=False)
    request = SlotRequest([4, 5], 20, 0)
    for key, error in (
        ("a", None),
        (
            "b",
            "no token of this model can continue an answer as decoder.constrain, or the request, requires",
        ),
    ):
        schema = {"type": "object", "properties": {key: {"const": 1}}, "required": [key], "additionalProperties": False}
        options = GenerationOptions({"do_sample": False}, grammar=grammar_of(schema))
        answer = small.answer_in_slots(lm, [request], slots=1, options=options)[0]
        if error is None:
            assert answer.generated.text == '{"a":1}'
        else:
            assert answer.error.startswith(error)


def test_answers_cannot_be_constrained_without_an_end_token(lm: Any) -> None:
    with pytest.raises(ModelError, match=r"decoder\.constrain: the model has no token that ends an answer; write gen"):
        lm.grammar(grammar_of(SCHEMA), ends=[])


def test_a_grammar_is_compiled_once_per_model(lm: Any) -> None:
    grammar = grammar_of(SCHEMA)
    assert lm.grammar(grammar, ends=[1]) is lm.grammar(grammar, ends=[1])
    assert lm.grammar(grammar, ends=[1]) is not lm.grammar(grammar, ends=[1, 2])


def test_passes_that_measure_memory_also_apply_the_grammar(lm: Any) -> None:
    options = GenerationOptions({"do_sample": False}, grammar=grammar_of(SCHEMA))
    assert lm.generate_worst_case(3, prompt_tokens=8, new_tokens=40, options=options).decode_seconds > 0


def test_options_for_free_text_have_no_constraint() -> None:
    options = GenerationOptions({"do_sample": False}, stop=("x",), grammar=grammar_of(SCHEMA))
    assert options.unconstrained == replace(options, grammar=None)
    assert (options.constraint_hash != "", options.unconstrained.constraint_hash) == (True, "")
    assert options.constraint_hash != replace(options, grammar=grammar_of(None)).constraint_hash


TOKENIZERS = {
    "byte": byte_tokenizer(),
    "bpe": wrap(byte_pair_backend([*TEXTS, "a longer text of words"], vocab_size=300), max_length=None),
    "sentencepiece": sentencepiece_like(),
    "char": wrap(piece_backend(TEXTS, pattern=CHARACTER, vocab_size=400), max_length=None, unknown=UNKNOWN),
    "word": wrap(piece_backend(TEXTS, pattern=WORD, vocab_size=400), max_length=None, unknown=UNKNOWN),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_bytes_of_tokens_equal_those_of_the_text(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    known = token_bytes(tokenizer, size=len(tokenizer) + 5)
    assert len(known) == len(tokenizer) + 5
    assert known[-5:] == [b""] * 5
    assert all(known[token] == b"" for token in tokenizer.all_special_ids)
    lead = b" " if kind == "sentencepiece" else b""
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(known[token] for token in ids) == lead + text.encode()


@examples(60)
@given(text=st.text(st.characters(codec="utf-8"), min_size=1, max_size=20), kind=st.sampled_from(["byte", "bpe"]))
def test_the_bytes_of_byte_level_tokens_equal_those_of_any_text(text: str, kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    known = token_bytes(tokenizer, size=len(tokenizer))
    assert b"".join(known[token] for token in tokenizer.encode(text, add_special_tokens=False)) == text.encode()


def test_added_tokens_are_text_unless_they_are_special() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<tool>"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    known = token_bytes(tokenizer, size=len(tokenizer))
    assert known[tokenizer.convert_tokens_to_ids("<tool>")] == b"<tool>"
    assert known[tokenizer.convert_tokens_to_ids("<|turn|>")] == b""


@pytest.mark.parametrize("lead", [True, False])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_each_kind_of_tokenizer_can_write_a_value_that_leaves_no_choice(kind: str, lead: bool) -> None:
    tokenizer = TOKENIZERS[kind]
    grammar = whole_grammar("value", [json_rule("value", {"const": {"a": True}})], lead=lead)
    held = Grammar(grammar, tokenizer=tokenizer, ends=[tokenizer.eos_token_id], size=len(tokenizer))
    row: Any = SimpleNamespace(matcher=held.matcher(), new=[], matched=0, reason=None)
    while not (row.new and row.new[-1] in held.ends):
        row.new.append(int(held.allowed([row])[0].int().argmax()))
        assert row.reason is None
    written = b"".join(token_bytes(tokenizer, size=len(tokenizer))[token] for token in row.new[:-1])
    assert json.loads(written) == {"a": True}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_each_kind_of_tokenizer_can_be_constrained(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    held = Grammar(grammar_of(SCHEMA), tokenizer=tokenizer, ends=[tokenizer.eos_token_id], size=len(tokenizer))
    matcher = held.matcher()
    ids = tokenizer.encode(TEXTS[0], add_special_tokens=False)
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_accepting()
