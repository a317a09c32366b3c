import json
import logging
import os
import pydoc
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partita.data.dialogue import build_expander, expanded
from partita.data.formatting.build import build_row_tokenizer
from partita.data.formatting.retrieval import build_retriever
from partita.data.formatting.row_tokenizer import RowTokenizer
from partita.data.ledger import Ledger
from partita.data.rows import Rows
from partita.data.sources.sources import open_rows
from partita.data.token_cache import TokenCache
from partita.data.tokenized import TokenizedDataset
from partita.tokenizers.load import byte_tokenizer
from partita_schema.common.checksums import sealed
from partita_schema.config import Config
from partita_schema.errors import DataError, WriteError
from partita_schema.sections.data import LoaderOptions

from ...json_lines import read_json_lines

TABLE = [{"question": f"what is {n} and {n}?", "answer": str(2 * n) * (n % 10)} for n in range(60)]
"""Every tenth answer is missing, and some rows are too long."""


@pytest.fixture
def make_encoder(make_config: Callable[..., Config], tokenizer: Any) -> Callable[..., RowTokenizer]:
    def make(**sections: Any) -> RowTokenizer:
        return build_row_tokenizer(make_config(**sections), tokenizer=tokenizer, context_length=40)

    return make


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    file = tmp_path / "rows.jsonl"
    lines = [json.dumps(row) for row in TABLE]
    lines.insert(5, "{broken")
    file.write_text("\n".join(lines))
    return open_rows(file, folder=tmp_path)


def ledger(folder: Path | None = None) -> Ledger:
    return Ledger(folder, max_bad_rows=99)


def cached(folder: Path, rows: Rows, row_tokenizer: RowTokenizer, **options: Any) -> tuple[TokenizedDataset, bool]:
    """Return the rows read through a cache, and whether they were cached before."""
    cache = TokenCache(folder)
    encoded = cache.encode(rows, row_tokenizer, ledger=options.pop("ledger", ledger()), **options)
    (use,) = cache.uses.values()
    assert use.rows == len(encoded)
    assert use.bytes == sum(file.stat().st_size for file in Path(use.path).iterdir())
    return encoded, use.hit


def assert_same(found: TokenizedDataset, wanted: TokenizedDataset) -> None:
    for name in ("ids_L", "starts_Nplus1", "loss_spans_S2", "span_starts_Nplus1", "indices_N"):
        one, other = getattr(found, name), getattr(wanted, name)
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)
    assert list(found.keys) == list(wanted.keys)
    assert found.fingerprint_inputs == wanted.fingerprint_inputs
    assert found.fingerprint == wanted.fingerprint


def quarantined(folder: Path) -> list[Any]:
    return read_json_lines(folder / "quarantine.jsonl")


@pytest.mark.parametrize("workers", [0, 2])
def test_cached_rows_equal_newly_encoded_rows(
    tmp_path: Path, rows: Rows, make_encoder: Callable[..., RowTokenizer], workers: int
) -> None:
    row_tokenizer, options = make_encoder(), LoaderOptions(workers=workers)
    plain = ledger(tmp_path / "plain")
    wanted = TokenizedDataset.build(rows, row_tokenizer, ledger=plain, chunk=7)
    for hit in (False, True, True):
        counted = ledger(tmp_path / f"run{hit}")
        result, was_there = cached(tmp_path / "tokens", rows, row_tokenizer, ledger=counted, options=options, chunk=7)
        assert was_there == hit
        assert_same(result, wanted)
        assert isinstance(result.ids_L, np.memmap)
        assert counted.splits == plain.splits
        assert quarantined(tmp_path / f"run{hit}") == quarantined(tmp_path / "plain")
    assert counted.split("training").left_out == 7
    assert counted.split("training").cut > 0


def test_every_setting_that_affects_tokens_changes_the_cache_key(
    tmp_path: Path, rows: Rows, make_encoder: Callable[..., RowTokenizer], make_config: Callable[..., Config]
) -> None:
    tokens, row_tokenizer = tmp_path / "tokens", make_encoder()
    cached(tokens, rows, row_tokenizer)
    other = byte_tokenizer()
    other.add_special_tokens({"additional_special_tokens": ["what"]})
    labelled = [{"name": "answer", "type": "category", "decoder": {"labels": ["2", "44"]}}]
    asked = [{"name": "question", "type": "text", "preprocessing": {"max_sequence_length": 5}}]
    retrieval = make_config(prompt={"retrieval": {"type": "random", "k": 1}})

    def with_examples(pool: Rows) -> RowTokenizer:
        retriever = build_retriever(retrieval, training=pool, folder=tmp_path)
        return build_row_tokenizer(retrieval, tokenizer=byte_tokenizer(), context_length=90, retriever=retriever)

    variants: list[tuple[Rows, RowTokenizer]] = [
        (rows.select(range(30)), row_tokenizer),
        (rows, make_encoder(prompt={"task": "Add."})),
        (rows, make_encoder(output_features=labelled)),
        (rows, make_encoder(input_features=asked)),
        (rows, make_encoder(trainer={"type": "finetune", "completion_only_loss": False})),
        (rows, make_encoder(seed=3)),
        (rows, build_row_tokenizer(make_config(), tokenizer=byte_tokenizer(), context_length=39)),
        (rows, build_row_tokenizer(make_config(), tokenizer=other, context_length=40)),
        (rows, with_examples(rows)),
        (rows, with_examples(rows.select(range(9)))),
    ]
    for number, (variant, its_encoder) in enumerate(variants, start=2):
        assert not cached(tokens, variant, its_encoder)[1]
        assert len([path for path in tokens.iterdir() if path.is_dir()]) == number
    assert not cached(tokens, rows, row_tokenizer, split="validation")[1]
    assert cached(tokens, rows, make_encoder())[1]


def test_rows_expanded_from_dialogues_keep_their_keys(tmp_path: Path, make_config: Callable[..., Config]) -> None:
    config = make_config(input_features=[{"name": "chat", "type": "dialogue"}], data={"dialogue": {"mode": "squash"}})
    said = [("user", "a?"), ("assistant", "b"), ("user", "c?"), ("assistant", "d")]
    chat = [{"role": role, "content": content} for role, content in said]
    rows = open_rows([{"chat": chat}, {"chat": chat}], folder=tmp_path)
    row_tokenizer = build_row_tokenizer(config, tokenizer=byte_tokenizer(), context_length=99)
    made = expanded(rows, build_expander(config, mode="squash"))
    for _ in range(2):
        result, _ = cached(tmp_path / "tokens", made, row_tokenizer)
        assert list(result.keys) == ["dataset:1#1", "dataset:1#2", "dataset:2#1", "dataset:2#2"]


def test_changes_without_effect_on_tokens_use_the_same_cache(
    tmp_path: Path, rows: Rows, make_encoder: Callable[..., RowTokenizer]
) -> None:
    cached(tmp_path / "tokens", rows, make_encoder())
    data = {"batching": {"type": "fixed"}, "max_bad_rows": 3, "loader": {"workers": 1}}
    assert cached(tmp_path / "tokens", rows, make_encoder(data=data, generation={"max_new_tokens": 3}))[1]


def truncate(folder: Path) -> None:
    os.truncate(folder / "ids", 40)


def flip(folder: Path) -> None:
    data = bytearray((folder / "starts").read_bytes())
    data[100] ^= 1
    (folder / "starts").write_bytes(data)


def drop(folder: Path) -> None:
    (folder / "spans").unlink()


def edit(folder: Path) -> None:
    text = (folder / "contents.json").read_text()
    (folder / "contents.json").write_text(text.replace('"rows": 54', '"rows": 53'))


def tear(folder: Path) -> None:
    os.truncate(folder / "contents.json", 100)


def age(folder: Path) -> None:
    contents = json.loads((folder / "contents.json").read_text())
    (folder / "contents.json").write_text(json.dumps(sealed(contents | {"format": 0})))


def exchange(folder: Path) -> None:
    """Return a hash for another configuration."""
    contents = json.loads((folder / "contents.json").read_text())
    contents["made_from"]["settings"] = "else"
    (folder / "contents.json").write_text(json.dumps(sealed(contents)))


def lose_the_counts(folder: Path) -> None:
    (folder / "ledger.json").unlink()


def edit_the_quarantine(folder: Path) -> None:
    lines = (folder / "quarantine.jsonl").read_text().splitlines(keepends=True)
    (folder / "quarantine.jsonl").write_text("".join(lines[1:]))


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (truncate, "ids has 40 bytes instead of"),
        (flip, "starts is not as it was written"),
        (drop, "spans cannot be read: No such file or directory"),
        (edit, "contents.json is not as it was written"),
        (tear, "contents.json is not JSON ("),
        (age, "format 0, this partita reads 7"),
        (exchange, "made from other settings"),
        (lose_the_counts, "ledger.json cannot be read: No such file or directory"),
        (edit_the_quarantine, "quarantine.jsonl has "),
    ],
)
def test_damaged_tokens_are_encoded_again(
    tmp_path: Path,
    rows: Rows,
    make_encoder: Callable[..., RowTokenizer],
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
    expected: str,
) -> None:
    tokens, row_tokenizer = tmp_path / "tokens", make_encoder()
    wanted = TokenizedDataset.build(rows, row_tokenizer, ledger=ledger())
    cached(tokens, rows, row_tokenizer)
    (folder,) = (path for path in tokens.iterdir() if path.is_dir())
    damage(folder)
    with caplog.at_level(logging.WARNING):
        result, hit = cached(tokens, rows, row_tokenizer)
    assert not hit
    assert f"the tokens in {folder} are computed again: {expected}" in caplog.text
    assert_same(result, wanted)
    assert cached(tokens, rows, row_tokenizer)[1]
    assert {path.name for path in tokens.iterdir()} == {folder.name, f"{folder.name}.lock"}


def test_too_many_bad_rows_are_also_reported_for_cached_rows(
    tmp_path: Path, rows: Rows, make_encoder: Callable[..., RowTokenizer]
) -> None:
    for _ in range(2):
        with pytest.raises(DataError, match=r"7 of 61 rows cannot be used, and data.max_bad_rows accepts 2 rows"):
            cached(tmp_path / "tokens", rows, make_encoder(), ledger=Ledger(None, max_bad_rows=2))


def test_no_usable_rows_are_an_error(tmp_path: Path, make_encoder: Callable[..., RowTokenizer]) -> None:
    rows = open_rows([{"question": "a", "answer": ""}], folder=tmp_path)
    for _ in range(2):
        with pytest.raises(DataError, match=r"^no training row can be used, of 1:\n  1 x "):
            cached(tmp_path / "tokens", rows, make_encoder())


def test_one_process_encodes_and_the_others_wait(
    tmp_path: Path, rows: Rows, make_encoder: Callable[..., RowTokenizer], caplog: pytest.LogCaptureFixture
) -> None:
    began, may_go_on = threading.Event(), threading.Event()
    made: list[TokenizedDataset] = []

    def slowly(number: int) -> None:
        began.set()
        assert may_go_on.wait(30)

    def first() -> None:
        made.append(cached(tmp_path / "tokens", rows, make_encoder(), chunk=30, progress=slowly)[0])

    def second() -> None:
        result, hit = cached(tmp_path / "tokens", rows, make_encoder())
        assert hit
        made.append(result)

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    with caplog.at_level(logging.INFO):
        threads[0].start()
        assert began.wait(30)
        threads[1].start()
        while "another process computes the same tokens" not in caplog.text:
            assert threads[1].is_alive()
            time.sleep(0.01)
        may_go_on.set()
        for thread in threads:
            thread.join(30)
    assert_same(*made)


def test_a_process_that_hangs_while_encoding_is_reported(
    tmp_path: Path, rows: Rows, make_encoder: Callable[..., RowTokenizer]
) -> None:
    began, may_go_on = threading.Event(), threading.Event()

    def hang(number: int) -> None:
        began.set()
        assert may_go_on.wait(30)

    thread = threading.Thread(target=lambda: cached(tmp_path / "tokens", rows, make_encoder(), progress=hang))
    thread.start()
    assert began.wait(30)
    with pytest.raises(WriteError) as error:
        TokenCache(tmp_path / "tokens", silence=0.3).encode(rows, make_encoder(), ledger=ledger())
    may_go_on.set()
    thread.join(30)
    (lock,) = (tmp_path / "tokens").glob("*.lock")
    assert str(error.value) == (
        f"another process holds {lock} and has written no tokens for 0 seconds; end it, or write data.encode: online"
    )


@pytest.mark.parametrize("slow", ["partita.data.token_files.os.fsync", "partita.data.token_files.file_crc"])
def test_a_slow_disk_is_not_a_hanging_process(
    tmp_path: Path,
    rows: Rows,
    make_encoder: Callable[..., RowTokenizer],
    monkeypatch: pytest.MonkeyPatch,
    slow: str,
) -> None:
    began, quick, hits = threading.Event(), pydoc.locate(slow), list[bool]()

    def slowly(*given: Any) -> Any:
        if not began.is_set():
            began.set()
            time.sleep(1.5)
        return quick(*given)

    def encode() -> None:
        cache = TokenCache(tmp_path / "tokens", silence=0.5)
        cache.encode(rows, make_encoder(), ledger=ledger())
        hits.append(cache.uses["training"].hit)

    monkeypatch.setattr(slow, slowly)
    thread = threading.Thread(target=encode)
    thread.start()
    assert began.wait(30)
    encode()
    thread.join(30)

    assert sorted(hits) == [False, True]


def test_an_error_while_encoding_leaves_no_files(
    tmp_path: Path, rows: Rows, make_encoder: Callable[..., RowTokenizer]
) -> None:
    def interrupt(number: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached(tmp_path / "tokens", rows, make_encoder(), progress=interrupt)
    assert [path.suffix for path in (tmp_path / "tokens").iterdir()] == [".lock"]
    assert not cached(tmp_path / "tokens", rows, make_encoder())[1]


PROGRAM = """
import os, resource, signal, sys
from pathlib import Path
from partita.data.ledger import Ledger
from partita.data.sources.sources import open_rows
from partita.data.formatting.build import build_row_tokenizer
from partita.data.token_cache import TokenCache
from partita.tokenizers.load import byte_tokenizer
from partita_schema.config import Config
config = Config.model_validate({
    "base_model": "m", "input_features": [{"name": "question", "type": "text"}],
    "output_features": [{"name": "answer", "type": "text"}], "trainer": {"type": "finetune"}})
row_tokenizer = build_row_tokenizer(config, tokenizer=byte_tokenizer(), context_length=40)
rows = open_rows(Path("rows.jsonl"), folder=Path())
"""


def run_program(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM + text]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.long
def test_partial_tokens_after_a_kill_are_not_used(
    tmp_path: Path, rows: Rows, make_encoder: Callable[..., RowTokenizer]
) -> None:
    kill = "lambda number: os.kill(os.getpid(), signal.SIGKILL)"
    encode = "TokenCache(Path('tokens')).encode(rows, row_tokenizer, ledger=Ledger(None, max_bad_rows=99), chunk=20"
    ended = run_program(tmp_path, f"{encode}, progress={kill})")
    assert ended.returncode == -9, ended.stderr
    tokens = tmp_path / "tokens"
    assert any(path.name.startswith(".") for path in tokens.iterdir())
    wanted = TokenizedDataset.build(rows, make_encoder(), ledger=ledger())
    result, hit = cached(tokens, rows, make_encoder())
    assert not hit
    assert_same(result, wanted)
    assert not [path for path in tokens.iterdir() if path.name.startswith(".")]


def test_a_full_disk_is_reported_and_leaves_no_files(tmp_path: Path, rows: Rows) -> None:
    # A limit on file size simulates the free space on a disk.
    full = """
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    TokenCache(Path('tokens')).encode(rows, row_tokenizer, ledger=Ledger(None, max_bad_rows=99))
except Exception as error:
    print(type(error).__name__, error)
"""
    ended = run_program(tmp_path, full)
    assert ended.stdout == (
        "WriteError tokens cannot be stored in tokens: File too large; free space there, name another folder in the "
        "environment variable PARTITA_CACHE, or write data.encode: online\n"
    ), ended.stderr
    assert [path.suffix for path in (tmp_path / "tokens").iterdir()] == [".lock"]


@pytest.mark.long
def test_encoding_keeps_only_a_chunk_in_memory(tmp_path: Path, make_encoder: Callable[..., RowTokenizer]) -> None:
    text = "0123456789" * 100
    rows = open_rows({"question": [text] * 3000, "answer": ["y"] * 3000}, folder=tmp_path)
    row_tokenizer = build_row_tokenizer(
        make_encoder().formatter.config, tokenizer=byte_tokenizer(), context_length=None
    )
    cached(tmp_path / "first", rows.select(range(50)), row_tokenizer, chunk=50)  # created once for all
    tracemalloc.start()
    result, _ = cached(tmp_path / "tokens", rows, row_tokenizer, chunk=50)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert result.ids_L.nbytes > 12_000_000
    assert peak < 6_000_000


def test_the_cache_is_next_to_the_batch_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path))
    assert TokenCache.of_user().folder == tmp_path / "tokens"


def test_the_use_of_the_cache_is_recorded(
    tmp_path: Path, rows: Rows, make_encoder: Callable[..., RowTokenizer]
) -> None:
    cache = TokenCache(tmp_path / "tokens")
    cache.encode(rows, make_encoder(), ledger=ledger())
    record = cache.record()["training"]
    assert record.keys() == {"path", "rows", "bytes", "hit"}
    assert (record["rows"], record["hit"]) == (54, False)
    json.dumps(record)


@pytest.mark.long
def test_a_run_with_the_cache_gives_the_same_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from partita import Model

    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path / "cache"))
    table = [{"question": f"{n} and {n}?", "answer": str(2 * n)} for n in range(60)]
    config = {
        "base_model": {"type": "scratch", "size": "nano", "tokenizer": "byte"},
        "input_features": [{"name": "question"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "trainer": {"type": "finetune", "batch_size": 8, "max_steps": 3, "evaluate_generated": False},
    }
    losses, hits = [], []
    for number, encode in enumerate(("online", "cache", "cache")):
        run = tmp_path / str(number)
        Model(config | {"data": {"encode": encode}}, quiet=True).train(table, run=run)
        logged = read_json_lines(run / "log.jsonl")
        losses.append([(step["loss"], step["batch_hash"]) for step in logged])
        uses = json.loads((run / "manifest.json").read_text())["token_cache"]
        hits.append({split: use["hit"] for split, use in uses.items()})
    assert losses[0] == losses[1] == losses[2]
    splits = ("training", "validation", "test")
    assert hits == [{}, dict.fromkeys(splits, False), dict.fromkeys(splits, True)]
