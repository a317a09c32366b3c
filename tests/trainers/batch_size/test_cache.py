"""Tests of the cache of batch sizes between runs."""

import json
import logging
from pathlib import Path

import pytest

from partita_trainers.batch_size.cache import BatchSizeCache, bucket
from partita_trainers.batch_size.probe import BatchSize, ProbeResult

KNOWN = BatchSize(
    rows=24,
    origin="tuned",
    device="cpu",
    max_fitting=148,
    best=24,
    probes=(
        ProbeResult(
            1, "fits", used_bytes=10, taken_bytes=12, prefill_seconds=0.1, decode_seconds=0.01, rows_per_second=5.0
        ),
        ProbeResult(200, "out of memory", used_bytes=None, taken_bytes=None),
    ),
    throughputs=((1, 5.0), (24, 40.5)),
    prompt_tokens=461,
    new_tokens=32,
    budget_bytes=10**9,
    seconds=1.5,
)
KEY = {"model": {"base_model": "x", "adapter": None}, "options": [{"do_sample": False}, 2]}


def test_a_saved_size_is_loaded_unchanged(tmp_path: Path) -> None:
    BatchSizeCache(tmp_path / "new" / "folder").save(KEY, KNOWN)
    assert BatchSizeCache(tmp_path / "new" / "folder").load(KEY) == KNOWN


def test_another_key_finds_nothing(tmp_path: Path) -> None:
    cache, other = BatchSizeCache(tmp_path), {**KEY, "options": [{"do_sample": True}, 2]}
    cache.save(KEY, KNOWN)
    assert cache.load(other) is None
    cache.file(KEY).rename(cache.file(other))
    assert cache.load(other) is None, "the file contains its own key"


def test_the_order_of_a_key_does_not_matter(tmp_path: Path) -> None:
    BatchSizeCache(tmp_path).save(KEY, KNOWN)
    assert BatchSizeCache(tmp_path).load(dict(reversed(KEY.items()))) == KNOWN


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"key": 1, "found": {}}'])
def test_a_damaged_file_is_ignored_with_a_log_message(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    cache = BatchSizeCache(tmp_path)
    cache.file(KEY).write_text(text, encoding="utf8")
    assert cache.load(KEY) is None
    assert "is not used" in caplog.text or json.loads(text)["key"] == 1
    cache.save(KEY, KNOWN)
    assert cache.load(KEY) == KNOWN


def test_without_a_writable_folder_the_size_is_searched_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "file").write_text("in the way", encoding="utf8")
    cache = BatchSizeCache(tmp_path / "file" / "folder")
    cache.save(KEY, KNOWN)
    assert "not cached for the next run" in caplog.text
    assert cache.load(KEY) is None


def test_no_partial_file_is_left(tmp_path: Path) -> None:
    BatchSizeCache(tmp_path).save(KEY, KNOWN)
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_the_default_folder_is_the_cache_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path / "own"))
    assert BatchSizeCache.of_user().folder == tmp_path / "own" / "batch_sizes"


def test_fields_of_a_newer_version_are_ignored() -> None:
    record = KNOWN.record()
    record["newer"] = record["probes"][0]["newer"] = 1
    assert BatchSize.from_record(record) == KNOWN


def test_lengths_less_than_an_eighth_apart_share_a_key() -> None:
    assert bucket(461) == bucket(450) == 480
    assert bucket(461) != bucket(400)
    assert [bucket(tokens) for tokens in (0, 1, 7, 15, 16, 17)] == [0, 1, 7, 15, 16, 18]
    assert all(tokens <= bucket(tokens) <= tokens * 1.125 + 1 for tokens in range(1, 5000))
