"""Tests of amounts of memory: parsed, or refused with what to write."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita_schema.sections.memory_size import parse_memory

WRITE = "write bytes, a text such as 12GB, or a share such as 0.5"


@pytest.mark.parametrize(
    ("written", "amount"),
    [
        ("12GB", 12 * 10**9),
        ("12 gb", 12 * 10**9),
        (" 12Gb ", 12 * 10**9),
        ("2.3GB", 2_300_000_000),
        ("500MB", 500 * 10**6),
        ("1500KB", 1_500_000),
        ("1TB", 10**12),
        ("1.5GiB", 3 * 2**29),
        ("1024 mib", 2**30),
        ("4096KiB", 2**22),
        ("1TiB", 2**40),
        (".5GB", 500 * 10**6),
        (10**6, 10**6),
        (12_000_000_000, 12_000_000_000),
        (1.2e10, 12_000_000_000),
        ("12e9", 12_000_000_000),
        ("12000000000", 12_000_000_000),
        (10**400, 10**400),
    ],
)
def test_bytes(written: object, amount: int) -> None:
    result = parse_memory(written)
    assert result == amount
    assert type(result) is int


@pytest.mark.parametrize(("written", "share"), [(0.5, 0.5), (1, 1.0), (1.0, 1.0), ("0.25", 0.25), ("1", 1.0)])
def test_a_share(written: object, share: float) -> None:
    result = parse_memory(written)
    assert result == share
    assert type(result) is float


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (12, "got 12; write 12GB, or a share such as 0.5"),
        ("12", "got 12; write 12GB, or a share such as 0.5"),
        (1.5, "got 1.5; write 1.5GB, or a share such as 0.5"),
        (8192, "got 8192; write 8192MB, or a share such as 0.5"),
        (0, f"got 0; {WRITE}"),
        (-1, f"got -1; {WRITE}"),
        (math.inf, f"got inf; {WRITE}"),
        (math.nan, f"got nan; {WRITE}"),
        (True, f"got True; {WRITE}"),
        (None, f"got None; {WRITE}"),
        ([12], f"got [12]; {WRITE}"),
        ("lots", f"got 'lots'; {WRITE}"),
        ("", f"got ''; {WRITE}"),
        ("12 GB of RAM", f"got '12 GB of RAM'; {WRITE}"),
        ("12,5GB", f"got '12,5GB'; {WRITE}"),
        ("12PB", f"got '12PB'; {WRITE}"),
        ("9" * 16 + "GB", f"got '{'9' * 16}GB'; {WRITE}"),
        ("-5GB", f"got '-5GB'; {WRITE}"),
        ("5KB", f"got '5KB', less than 1MB; {WRITE}"),
        ("0GB", f"got '0GB', less than 1MB; {WRITE}"),
        ("12G", "got '12G'; write 12GB or 12GiB"),
        ("1.5 gi", "got '1.5 gi'; write 1.5GB or 1.5GiB"),
        ("80%", "got '80%'; write 0.8"),
        ("100 %", "got '100 %'; write 1"),
        ("0%", f"got '0%'; {WRITE}"),
        ("auto", f"got 'auto'; remove the key for what is free, or {WRITE}"),
    ],
)
def test_an_invalid_amount_is_reported(written: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse_memory(written)


@given(st.one_of(st.text(st.sampled_from("0123456789.eE+-_%kKmMgGtTiIbB aZ")), st.floats(), st.integers(), st.none()))
def test_anything_is_an_amount_or_a_value_error(written: object) -> None:
    try:
        result = parse_memory(written)
    except ValueError:
        return
    assert (type(result) is int and result >= 10**6) or (type(result) is float and 0 < result <= 1)
