"""Tests of the hash of base models, and of the record of an adapter's base model."""

import os
from pathlib import Path

import pytest

from partita.tokenizers.saved_adapters import BLOCK_BYTES, BLOCKS, FILE, RecordedBase, weights_hash
from partita_schema.errors import ModelError

WHOLE = BLOCKS * BLOCK_BYTES
"""Largest file that is read as a whole, in bytes."""


def write_weights(folder: Path, size: int, *, changed: int | None = None) -> Path:
    """Write a weight file of this size, whose byte at the index `changed` is another one."""
    folder.mkdir(exist_ok=True)
    content = bytearray(size)
    if changed is not None:
        content[changed] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    return folder


@pytest.mark.parametrize("size", [1, BLOCK_BYTES, BLOCK_BYTES + 1, WHOLE - 1, WHOLE])
def test_a_small_file_counts_with_every_byte(tmp_path: Path, size: int) -> None:
    before = weights_hash(write_weights(tmp_path / "a", size))
    for changed in {0, size // 3, size // 2, size - 1}:
        assert weights_hash(write_weights(tmp_path / "b", size, changed=changed)) != before


def test_a_large_file_counts_with_its_size_and_its_ends_and_not_with_its_age(tmp_path: Path) -> None:
    size = 5 * WHOLE
    folder = write_weights(tmp_path / "a", size)
    before = weights_hash(folder)
    os.utime(folder / "model.safetensors", (1, 1))
    assert weights_hash(folder) == before == weights_hash(write_weights(tmp_path / "b", size))
    for changed in (0, size - 1):
        assert weights_hash(write_weights(tmp_path / "b", size, changed=changed)) != before
    assert weights_hash(write_weights(tmp_path / "b", size + 1)) != before


def test_the_names_of_weight_files_count_and_other_files_do_not(tmp_path: Path) -> None:
    folder = write_weights(tmp_path / "a", 10)
    before = weights_hash(folder)
    (folder / "README.md").write_text("a page", encoding="utf8")
    assert weights_hash(folder) == before
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    assert weights_hash(folder) != before


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    assert RecordedBase.read(tmp_path) is None
    (tmp_path / FILE).write_text("{}", encoding="utf8")
    with pytest.raises(ModelError, match=rf"adapter: {tmp_path}: cannot load its {FILE}: KeyError: 'base_model'"):
        RecordedBase.read(tmp_path)
    RecordedBase("base", "0123").write(tmp_path)
    assert RecordedBase.read(tmp_path) == RecordedBase("base", "0123")
