"""Tests of damaged and malicious saved models: each is refused with an error message."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from partita import ModelError
from partita_trainers.checkpoints.file_sums import FILE

from .conftest import build_config, load

Change = Callable[[Path], None]
DEEP = "[" * 100_000


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model as saved by transformers: without checksums."""
    folder = tmp_path_factory.mktemp("plain") / "model"
    load(build_config()).save(folder)
    (folder / FILE).unlink()
    return folder


@pytest.fixture
def copied(plain: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(plain, tmp_path / "model"))


def read(folder: Path, **parameters: Any) -> None:
    load(build_config(base_model=str(folder), trainer={"type": "none"}, model_parameters=parameters), trainable=False)


def settings(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text("utf8")) | changes), encoding="utf8")

    return change


def text(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content, encoding="utf8") and None


def weights(change: Callable[[bytes], bytes]) -> Change:
    def edit(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return edit


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Change:
    def edit(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        change(found)
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})

    return edit


def pickled(content: Any = None) -> Change:
    def change(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        if isinstance(content, bytes):
            (folder / "pytorch_model.bin").write_bytes(content)
        else:
            torch.save(found if content is None else content, folder / "pytorch_model.bin")

    return change


class Planted:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (settings(vocab_size=10**12), "its config.json says vocab_size: 1000000000000; a model has 1 to 2,147,483,648"),
        (
            settings(vocab_size=10**9),
            "its config.json says vocab_size: 1,000,000,000 and hidden_size: 64, and its weights",
        ),
        (settings(num_hidden_layers=-1), "its config.json says num_hidden_layers: -1; a model has 1 to 10,000"),
        (settings(num_hidden_layers=10**9), "its config.json says num_hidden_layers: 1000000000"),
        (settings(max_position_embeddings=-5), "its config.json says max_position_embeddings: -5"),
        (settings(num_attention_heads=0), "cannot load its "),
        (settings(eos_token_id="x"), "Field 'eos_token_id' with value 'x'"),
        (text("generation_config.json", '{"eos_token_id": "x"}'), "its generation_config.json says eos_token_id: 'x'"),
        (text("config.json", DEEP), "one of its JSON files is nested too deeply to be read"),
        (text("tokenizer_config.json", DEEP), "one of its JSON files is nested too deeply to be read"),
        (text("tokenizer.json", DEEP), "one of its JSON files is nested too deeply to be read"),
        (text("generation_config.json", DEEP), "one of its JSON files is nested too deeply to be read"),
        (text("config.json", "[]"), "its config.json names no model type that transformers knows"),
        (weights(lambda data: data[: len(data) // 2]), "a safetensors file is damaged or not complete"),
        (weights(lambda data: b""), "a safetensors file is damaged or not complete"),
        (weights(lambda data: bytes(len(data))), "a safetensors file is damaged or not complete"),
        (weights(lambda data: struct.pack("<Q", 2**60) + data[8:]), "a safetensors file is damaged or not complete"),
        (
            tensors(lambda found: found.pop("model.norm.weight")),
            "its files lack model.norm.weight, which would be random",
        ),
        (
            tensors(lambda found: found.update({"model.norm.weight": torch.ones(3)})),
            "its weights have other shapes than its config.json says",
        ),
    ],
)
def test_a_damaged_model_is_refused_with_an_error_message(copied: Path, change: Change, said: str) -> None:
    change(copied)
    with pytest.raises(ModelError) as caught:
        read(copied)
    assert str(caught.value).startswith(f"base_model: {copied}: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_pickled_weights_need_the_consent_of_the_user(copied: Path) -> None:
    pickled()(copied)
    with pytest.raises(ModelError) as caught:
        read(copied)
    assert str(caught.value) == (
        f"base_model: {copied} holds its weights as a pickle (pytorch_model.bin), a format that can carry code; save "
        "them as safetensors, or write model_parameters: {pickled_weights: true} if you trust its source"
    )
    read(copied, pickled_weights=True)


@pytest.mark.parametrize("kind", ["code", "garbage", "nothing", "a list"])
def test_an_allowed_pickle_without_weights_is_refused(kind: str, copied: Path, tmp_path: Path) -> None:
    ballast = torch.zeros(10_000)  # the number of bytes that config.json implies
    contents = {
        "code": {"a": Planted(tmp_path / "ran"), "b": ballast},
        "garbage": b"\x80\x02garbage" * 10_000,
        "nothing": b"",
        "a list": [1, ballast],
    }
    pickled(contents[kind])(copied)
    with pytest.raises(ModelError, match="cannot load its weights: "):
        read(copied, pickled_weights=True)
    assert not (tmp_path / "ran").exists()


def test_an_adapter_that_would_import_a_module_is_refused(tmp_path: Path, plain: Path) -> None:
    folder = tmp_path / "adapter"
    load(build_config(base_model=str(plain), adapter={"type": "lora", "r": 2})).save(folder)
    (folder / FILE).unlink()
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf8")) | {"megatron_config": {"a": 1}}), encoding="utf8")
    config = build_config(
        base_model=str(plain), adapter={"type": "lora", "r": 2, "pretrained_adapter_weights": str(folder)}
    )
    with pytest.raises(ModelError, match=r"adapter_config\.json has a megatron_config, which is not supported"):
        load(config)


def test_changes_in_any_file_of_a_saved_model_are_detected(plain: Path, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    lm = load(build_config())
    lm.save(folder)
    read(folder)
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        half = len(whole) // 2
        path.write_bytes(whole[:half] + bytes([whole[half] ^ 4]) + whole[half + 1 :])
        with pytest.raises(ModelError, match=rf"^base_model: {path} .*; restore it from a copy, train with --run"):
            read(folder)
        path.write_bytes(whole)
    (folder / FILE).unlink()
    settings(initializer_range=0.03)(folder)
    read(folder)  # files that a user changed after removing the checksums
