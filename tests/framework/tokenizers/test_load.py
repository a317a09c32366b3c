import json
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.tokenizers.load import byte_tokenizer, load_tokenizer, read_tokenizer, tokenizer_digest, train_tokenizer
from partita_schema.errors import ModelError
from partita_schema.sections.model import (
    BYTE_LEVEL_TOKENIZERS,
    WITH_OWN_TOKENIZER,
    Architecture,
    EncoderArchitecture,
    EncoderDecoderArchitecture,
    ScratchModel,
)

from ...properties import examples
from ..lm.conftest import build_config

TEXTS = ["Hello, world!  The quick\nbrown fox.", "the lazy dog's 3 naps", "héllo"]


def scratch(kind: str, vocab_size: int = 300) -> ScratchModel:
    return ScratchModel.model_validate({"type": "scratch", "tokenizer": kind, "vocab_size": vocab_size})


@pytest.mark.parametrize("kind", ["bpe", "byte", "char", "word"])
def test_decoding_the_ids_of_training_texts_returns_the_texts(kind: str) -> None:
    tokenizer = train_tokenizer(scratch(kind), TEXTS)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", ["bpe", "byte", "char", "word"])
def test_training_twice_gives_the_same_tokenizer_and_other_texts_another(kind: str) -> None:
    first, again = (train_tokenizer(scratch(kind), TEXTS) for _ in range(2))
    other = train_tokenizer(scratch(kind), ["zebra xylophone zebra"])
    assert tokenizer_digest(first) == tokenizer_digest(again)
    assert (tokenizer_digest(first) == tokenizer_digest(other)) == (kind == "byte")


@given(st.text())
@examples(50)
def test_byte_tokenizers_encode_any_text(text: str) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text.replace("<pad>", "").replace("</s>", ""))
    assert tokenizer.decode(ids) == text.replace("<pad>", "").replace("</s>", "")


def test_unseen_words_and_characters_become_the_unknown_token() -> None:
    assert train_tokenizer(scratch("word"), TEXTS).encode("zebra") == [2]
    assert train_tokenizer(scratch("char"), TEXTS).encode("ж") == [2]


def test_the_vocabulary_has_the_most_frequent_pieces_up_to_its_limit() -> None:
    tokenizer = train_tokenizer(scratch("word", 5), ["a b b c c c", "c"])
    assert len(tokenizer) == 5
    assert tokenizer.encode(" c") == [3]


def test_a_byte_level_vocabulary_below_256_is_refused() -> None:
    with pytest.raises(ModelError, match=r"base_model\.vocab_size: 100 holds no byte-level .* at least 258"):
        train_tokenizer(scratch("bpe", 100), TEXTS)


def test_a_word_tokenizer_without_texts_is_refused() -> None:
    with pytest.raises(ModelError, match="0 different pieces in the training texts"):
        train_tokenizer(scratch("word"), [])


def test_a_tokenizer_without_a_pad_token_pads_with_its_end_token(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    settings_file = tmp_path / "tokenizer_config.json"
    written = json.loads(settings_file.read_text())
    del written["pad_token"]
    settings_file.write_text(json.dumps(written))
    read = read_tokenizer(str(tmp_path))
    assert (read.pad_token, len(read)) == ("</s>", len(tokenizer))


def test_a_tokenizer_without_pad_and_end_tokens_is_refused(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    settings_file = tmp_path / "tokenizer_config.json"
    written = json.loads(settings_file.read_text())
    del written["pad_token"], written["eos_token"]
    settings_file.write_text(json.dumps(written))
    with pytest.raises(ModelError, match="has no pad, end or unknown token; set pad_token in its files"):
        read_tokenizer(str(tmp_path))


def test_a_saved_tokenizer_does_not_change_after_padding_a_batch(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(max_length=64)
    before = tokenizer_digest(tokenizer)
    tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)
    tokenizer.save_pretrained(tmp_path)
    read = load_tokenizer(build_config(), folder=Path(), texts=list, saved=tmp_path)
    assert before == tokenizer_digest(tokenizer) == tokenizer_digest(read)


@pytest.mark.parametrize("kind", ["bpe", "char", "word"])
def test_a_saved_model_of_an_architecture_with_its_own_tokenizer_class_keeps_its_tokens(
    kind: str, tmp_path: Path
) -> None:
    tokenizer = train_tokenizer(scratch(kind), TEXTS)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}', encoding="utf8")
    assert tokenizer_digest(read_tokenizer(str(tmp_path))) == tokenizer_digest(tokenizer)
    assert read_tokenizer(str(tmp_path)).encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])


ARCHITECTURES = (*get_args(Architecture), *get_args(EncoderArchitecture), *get_args(EncoderDecoderArchitecture))
OTHER_TEXTS = ("in 1984 we'RE 12345", "e\u0301 as two characters", "a \n\n b\tc  ", "<unk> of another model")
NEW_MODELS = [
    (architecture, kind)
    for architecture in ARCHITECTURES
    for kind in ("bpe", "byte", "char", "word")
    if architecture not in WITH_OWN_TOKENIZER or kind in BYTE_LEVEL_TOKENIZERS
]


@pytest.mark.parametrize(("architecture", "kind"), NEW_MODELS)
def test_transformers_reads_the_tokenizer_of_a_new_model_with_the_same_tokens(
    architecture: str, kind: str, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    described = {"type": "scratch", "architecture": architecture, "tokenizer": kind, "vocab_size": 300}
    tokenizer = train_tokenizer(ScratchModel.model_validate(described), [*TEXTS, *OTHER_TEXTS])
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": architecture}), encoding="utf8")
    read = AutoTokenizer.from_pretrained(tmp_path)
    assert len(read) == len(tokenizer)
    for text in (*TEXTS, *OTHER_TEXTS):
        assert read(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert read.decode(tokenizer(text)["input_ids"]) == tokenizer.decode(tokenizer(text)["input_ids"])
