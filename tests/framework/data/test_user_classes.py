import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from partita.data.batching.collate import build_collate
from partita.data.batching.plan import NOTHING, PlannedBatch, alone
from partita.data.formatting.build import build_row_tokenizer
from partita.data.formatting.row_tokenizer import RowTokenizer
from partita.data.ledger import Ledger
from partita.data.sources.sources import open_rows
from partita.data.token_cache import TokenCache
from partita.data.tokenized import TokenizedDataset
from partita.tokenizers.load import byte_tokenizer
from partita_schema.config import Config
from partita_schema.errors import ConfigError, DataError
from partita_schema.sections.data import LoaderOptions

Make = Callable[..., Config]
CLASSES = """
from dataclasses import replace

import torch

from partita.data.batching.collate import collate
from partita.data.batching.plan import alone
from partita_schema.errors import RowError
from partita.data.formatting.base import Segment, FormattedText


class Loud:
    def __init__(self, config, *, tokenizer):
        self.mark = config.prompt.task or ""

    def format_all(self, rows, keys, *, supervised):
        return [self.shape(row, supervised) for row in rows]

    def shape(self, row, supervised):
        if row["question"] == "bad":
            raise RowError("this is bad")
        prompt = Segment(row["question"].upper() + self.mark, False)
        answer = (Segment(row["answer"], True),) if supervised else ()
        return FormattedText((prompt, *answer), begins=True, ends=supervised)


class NoTokenizer(Loud):
    def __init__(self, config):
        self.mark = ""


class Raises(Loud):
    def __init__(self, config, *, tokenizer):
        self.marks = {}["marks"]


class Exits(Loud):
    def __init__(self, config, *, tokenizer):
        raise SystemExit(3)


class Failing(Loud):
    def format_all(self, rows, keys, *, supervised):
        return [row["answre"] for row in rows]


class Exiting(Loud):
    def format_all(self, rows, keys, *, supervised):
        raise SystemExit(3)


class Fewer(Loud):
    def format_all(self, rows, keys, *, supervised):
        return []


class Texts(Loud):
    def format_all(self, rows, keys, *, supervised):
        return ["text" for _ in rows]


class Reversed:
    def __call__(self, encoded, planned, pad_token_id):
        batch = collate(encoded, planned, pad_token_id=pad_token_id)
        return replace(batch, input_ids_BT=batch.input_ids_BT.flip(1), labels_BT=batch.labels_BT.flip(1))


class TakesWidth:
    def __init__(self, width):
        self.width = width


class Broken:
    def __call__(self, encoded, planned, pad_token_id):
        return {}["batch"]


class Nothing:
    def __call__(self, encoded, planned, pad_token_id):
        return None


class OtherRows:
    def __call__(self, encoded, planned, pad_token_id):
        return replace(collate(encoded, planned, pad_token_id=pad_token_id), keys=("x",))


class OtherShapes:
    def __call__(self, encoded, planned, pad_token_id):
        batch = collate(encoded, planned, pad_token_id=pad_token_id)
        return replace(batch, labels_BT=batch.labels_BT[:, 1:])


class OwnSequences:
    def __call__(self, encoded, planned, pad_token_id):
        return collate(encoded, alone(planned.rows), pad_token_id=pad_token_id)


class NoPositions:
    def __call__(self, encoded, planned, pad_token_id):
        return replace(collate(encoded, planned, pad_token_id=pad_token_id), position_ids_BT=None)


class OtherPositions:
    def __call__(self, encoded, planned, pad_token_id):
        batch = collate(encoded, planned, pad_token_id=pad_token_id)
        return replace(batch, position_ids_BT=batch.position_ids_BT[:, 1:])


class Straight:
    def __call__(self, encoded, planned, pad_token_id):
        batch = collate(encoded, planned, pad_token_id=pad_token_id)
        return replace(batch, position_ids_BT=torch.arange(batch.input_ids_BT.shape[1]).expand(batch.sequences, -1))


class Longer:
    def __call__(self, encoded, planned, pad_token_id):
        batch = collate(encoded, planned, pad_token_id=pad_token_id)
        return replace(batch, lengths_B=batch.lengths_B + 1)


class Same:
    def __call__(self, encoded, planned, pad_token_id):
        return collate(encoded, planned, pad_token_id=pad_token_id)
"""
ROWS = [{"question": "ab", "answer": "c"}, {"question": "bad", "answer": "c"}, {"question": "abc", "answer": "d"}]


@pytest.fixture
def module(tmp_path: Path) -> str:
    """Return a module in tmp_path with a unique name."""
    name = f"parts_{os.urandom(4).hex()}"
    (tmp_path / f"{name}.py").write_text(CLASSES)
    return name


def row_tokenizer(config: Config, folder: Path) -> RowTokenizer:
    return build_row_tokenizer(config, tokenizer=byte_tokenizer(), context_length=None, folder=folder)


def build(config: Config, folder: Path, **options: Any) -> TokenizedDataset:
    ledger = Ledger(None, max_bad_rows=9)
    return TokenizedDataset.build(
        open_rows(ROWS, folder=folder), row_tokenizer(config, folder), ledger=ledger, **options
    )


def text(encoded: TokenizedDataset, row: int) -> str:
    return str(byte_tokenizer().decode(encoded.ids(row)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"workers": 1, "start_method": "fork"},
        pytest.param({"workers": 1, "start_method": "spawn"}, marks=pytest.mark.long),
    ],
)
def test_a_custom_formatter_writes_rows_in_every_process(
    tmp_path: Path, make_config: Make, module: str, options: dict[str, Any]
) -> None:
    config = make_config(data={"formatter": f"{module}:Loud"}, prompt={"task": "!"})
    result = build(config, tmp_path, options=LoaderOptions(**options))
    assert list(result.keys) == ["dataset:1", "dataset:3"]
    assert [text(result, row) for row in range(2)] == ["AB!c</s>", "ABC!d</s>"]
    assert result.loss_spans(0).tolist() == [[3, 5]]


def test_prompts_of_a_custom_formatter_have_no_answer(tmp_path: Path, make_config: Make, module: str) -> None:
    made = row_tokenizer(make_config(data={"formatter": f"{module}:Loud"}), tmp_path)
    assert made.encode_prompt({"question": "ab"}, key="k").text == "AB"


def test_a_changed_module_changes_the_plan(tmp_path: Path, make_config: Make, module: str) -> None:
    config = make_config(data={"formatter": f"{module}:Loud"})
    before = row_tokenizer(config, tmp_path).fingerprint_inputs()
    (tmp_path / f"{module}.py").write_text(CLASSES + "\n")
    del sys.modules[module]  # as in another process
    after = row_tokenizer(config, tmp_path).fingerprint_inputs()
    assert {name for name in after if after[name] != before[name]} == {"formatter"}
    rows = open_rows(ROWS, folder=tmp_path)
    cache = TokenCache(tmp_path / "tokens")
    cache.encode(rows, row_tokenizer(config, tmp_path), ledger=Ledger(None, max_bad_rows=9))
    (tmp_path / f"{module}.py").write_text(CLASSES)
    del sys.modules[module]
    cache.encode(rows, row_tokenizer(config, tmp_path), ledger=Ledger(None, max_bad_rows=9))
    assert not cache.uses["training"].hit


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Failing", "raised KeyError: 'answre' ({module}.py, line 44)"),
        ("Exiting", "called sys.exit(3) ({module}.py, line 49); raise an exception instead"),
        ("Fewer", "gave 0 texts for 2 rows; give a FormattedText for each"),
        ("Texts", "gave a str for a row; give a FormattedText for each"),
    ],
)
def test_a_custom_formatter_with_wrong_results_is_reported(
    tmp_path: Path, make_config: Make, module: str, name: str, expected: str
) -> None:
    made = row_tokenizer(make_config(data={"formatter": f"{module}:{name}"}), tmp_path)
    with pytest.raises(DataError) as error:
        made.formatter.format_all(ROWS[:2], ["a", "b"], supervised=True)
    assert str(error.value) == f"data.formatter: {module}:{name} {expected.format(module=module)}"


def test_a_formatter_that_cannot_be_created_is_reported_with_its_key(
    tmp_path: Path, make_config: Make, module: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        row_tokenizer(make_config(data={"formatter": f"{module}:NoTokenizer"}), tmp_path)
    assert str(refused.value) == (
        f"data.formatter: {module}:NoTokenizer cannot be created: got an unexpected keyword argument 'tokenizer'; "
        "write def __init__(self, config, *, tokenizer)"
    )
    with pytest.raises(DataError, match=rf"^data\.formatter: {module}:Raises raised KeyError: 'marks' \(parts_"):
        row_tokenizer(make_config(data={"formatter": f"{module}:Raises"}), tmp_path)
    called = rf"^data\.formatter: {module}:Exits called sys\.exit\(3\) \({module}\.py, line \d+\); raise an exception"
    with pytest.raises(DataError, match=called):
        row_tokenizer(make_config(data={"formatter": f"{module}:Exits"}), tmp_path)


def test_a_collate_function_that_cannot_be_created_is_reported_with_its_key(tmp_path: Path, module: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build_collate(f"{module}:TakesWidth", folder=tmp_path, pad_token_id=0)
    assert str(refused.value) == (
        f"data.collate: {module}:TakesWidth cannot be created: missing a required argument: 'width'; write "
        "def __init__(self)"
    )


@pytest.mark.parametrize(
    ("path", "error"),
    [("none.csv", "raised FileNotFoundError: .*none.csv' [(]source_"), (None, r"called sys\.exit\(\) \(")],
)
def test_an_error_of_the_constructor_of_a_source_names_the_class(path: str | None, error: str, tmp_path: Path) -> None:
    name = f"source_{os.urandom(4).hex()}"
    (tmp_path / f"{name}.py").write_text(
        "import sys\n"
        "class Opens:\n"
        "    def __init__(self, path):\n"
        "        self.file = open(path) if path else sys.exit()\n"
        "    def rows(self):\n"
        "        return [{'question': 'a', 'answer': 'b'}]\n"
    )
    source = {"type": "custom", "target": f"{name}:Opens", "options": {"path": path}}
    with pytest.raises(DataError, match=rf"^{name}:Opens {error}"):
        open_rows(source, folder=tmp_path)


def test_a_custom_collate_function_creates_the_batches(tmp_path: Path, make_config: Make, module: str) -> None:
    encoded = build(make_config(), tmp_path)
    rows = alone(torch.arange(2).numpy())
    plain = build_collate(None, folder=tmp_path, pad_token_id=0)(encoded, rows)
    own = build_collate(f"{module}:Reversed", folder=tmp_path, pad_token_id=0)(encoded, rows)
    assert own.input_ids_BT.tolist() == plain.input_ids_BT.flip(1).tolist()
    assert own.keys == plain.keys


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Broken", "raised KeyError: 'batch' ({module}.py, line 75)"),
        ("Nothing", "gave a NoneType; give a partita_trainers.Batch"),
        ("OtherRows", "gave 1 row for 2, or others; give the same keys"),
        ("OtherShapes", "gave ids of shape (2, 5) and labels of shape (2, 4)"),
    ],
)
def test_a_custom_collate_function_with_wrong_results_is_reported(
    tmp_path: Path, make_config: Make, module: str, name: str, expected: str
) -> None:
    encoded = build(make_config(), tmp_path)
    make = build_collate(f"{module}:{name}", folder=tmp_path, pad_token_id=0)
    with pytest.raises(DataError) as error:
        make(encoded, alone(torch.arange(2).numpy()))
    assert str(error.value) == f"data.collate: {module}:{name} {expected.format(module=module)}"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "OwnSequences",
            "gave ids of shape (2, 5) for 1 sequence; put each row into its sequence in planned.sequences",
        ),
        (
            "NoPositions",
            (
                "gave no position_ids_BT for 2 rows in 1 sequence; give the position of each token in its row, 0 at "
                "the first"
            ),
        ),
        ("OtherPositions", "gave ids of shape (1, 9) and positions of shape (1, 8)"),
        (
            "Straight",
            (
                "gave positions that begin [1] rows in the sequences, for [2]; give a row position 0 at its first "
                "token alone"
            ),
        ),
        ("Longer", "gave lengths [10] for ids of shape (1, 9); give the real tokens of each sequence"),
    ],
)
def test_a_custom_collate_function_that_does_not_pack_as_planned_is_reported(
    tmp_path: Path, make_config: Make, module: str, name: str, expected: str
) -> None:
    encoded = build(make_config(), tmp_path)
    packed = PlannedBatch(np.arange(2), np.zeros(2, dtype=np.int64))
    with pytest.raises(DataError) as error:
        build_collate(f"{module}:{name}", folder=tmp_path, pad_token_id=0)(encoded, packed)
    assert str(error.value) == f"data.collate: {module}:{name} {expected}"
    for planned in (packed, alone(np.arange(2)), NOTHING):
        build_collate(f"{module}:Same", folder=tmp_path, pad_token_id=0)(encoded, planned)


def test_a_missing_class_is_reported_with_its_key(tmp_path: Path, make_config: Make, module: str) -> None:
    with pytest.raises(ConfigError) as error:
        row_tokenizer(make_config(data={"formatter": f"{module}:Lout"}), tmp_path)
    assert str(error.value) == f"data.formatter: module {module} has no class Lout; did you mean Loud?"
    with pytest.raises(ConfigError) as error:
        build_collate("no_such_module:C", folder=tmp_path, pad_token_id=0)
    assert str(error.value) == (
        "data.collate: there is no module no_such_module; install it or put its folder on PYTHONPATH"
    )


def test_rows_of_a_custom_source_are_used_like_others(tmp_path: Path, make_config: Make) -> None:
    name = f"source_{os.urandom(4).hex()}"
    (tmp_path / f"{name}.py").write_text(
        "class Sums:\n"
        "    def __init__(self, count):\n"
        "        self.count = count\n"
        "    def rows(self):\n"
        "        for n in range(self.count):\n"
        "            yield {'question': f'{n}+{n}', 'answer': str(2 * n)}\n"
    )
    rows = open_rows({"type": "custom", "target": f"{name}:Sums", "options": {"count": 3}}, folder=tmp_path)
    assert json.dumps(rows.get([2])) == '[{"question": "2+2", "answer": "4"}]'
    assert list(rows.keys) == ["Sums:1", "Sums:2", "Sums:3"]
