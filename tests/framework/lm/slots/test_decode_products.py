"""Tests of the products of new tokens with keys and values: equal sums, and the faster class by a measurement."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from partita.lm.products.speed import WORTH
from partita.lm.slots import decode_products
from partita.lm.slots.decode_products import (
    BatchedProducts,
    DecodePass,
    DecodeProducts,
    GatheredProducts,
    SlotSpan,
    gathering_is_faster,
    is_in_slots,
    measure,
)
from partita.lm.slots.kv_cache import CacheLayout
from partita_schema.common.checksums import sealed, unsealed
from partita_trainers.batch_size import linux

ROWS, HEADS, SIZE, TOKENS = 7, 2, 24, 19
LENGTHS = (4, 19, 7, 1, 12, 12, 2)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path / "cache"))
    gathering_is_faster.cache_clear()
    yield
    gathering_is_faster.cache_clear()


def masked(lengths: tuple[int, ...], *, window: int = TOKENS) -> torch.Tensor:
    """Return the mask of rows of these lengths that attend to the tokens of a window."""
    ends, positions = torch.tensor(lengths)[:, None], torch.arange(TOKENS)[None]
    seen = (positions < ends) & (positions >= ends - window)
    return torch.zeros(len(lengths), 1, 1, TOKENS).masked_fill_(~seen[:, None, None], -torch.inf)


PRODUCTS = {"batched": BatchedProducts, "gathered": GatheredProducts}


def attend(found: DecodeProducts, query: torch.Tensor) -> torch.Tensor:
    return found.output([part.softmax(-1) for part in found.scores(query * SIZE**-0.5)])


@pytest.mark.parametrize("kind", ["batched", "gathered"])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("first", [0, 2])
def test_rows_of_several_spans_attend_to_their_own_tokens(kind: str, group: int, first: int) -> None:
    torch.manual_seed(0)
    held = torch.randn(2, first + ROWS, HEADS, TOKENS, SIZE)[:, first:]
    query, mask = torch.randn(ROWS, HEADS, group, SIZE), masked(LENGTHS)
    spans = [
        SlotSpan(slice(0, 3), slice(0, 19)),
        SlotSpan(slice(3, 4), slice(0, 1)),
        SlotSpan(slice(4, 7), slice(0, 12)),
    ]
    layout = CacheLayout(slots=first + ROWS, tokens=TOKENS)
    found = attend(PRODUCTS[kind](DecodePass(layout, spans, *held, mask, group)), query)
    expected = scaled_dot_product_attention(query.double(), *held.double(), attn_mask=mask.double())
    assert found.shape == (ROWS, HEADS, group, SIZE)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


def test_layers_with_other_masks_or_heads_are_not_confused() -> None:
    torch.manual_seed(0)
    layout, spans = CacheLayout(slots=ROWS, tokens=TOKENS), [SlotSpan(slice(0, ROWS), slice(0, TOKENS))]
    for heads, group, window in ((2, 3, TOKENS), (2, 3, 4), (3, 2, 4), (2, 3, 4), (6, 1, TOKENS)):
        held, query = torch.randn(2, ROWS, heads, TOKENS, SIZE), torch.randn(ROWS, heads, group, SIZE)
        mask = masked(LENGTHS, window=window)
        found = attend(GatheredProducts(DecodePass(layout, spans, *held, mask, group)), query)
        expected = scaled_dot_product_attention(query.double(), *held.double(), attn_mask=mask.double())
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


def test_layers_with_the_same_mask_and_heads_share_the_pairs_until_the_next_pass() -> None:
    layout, spans = CacheLayout(slots=ROWS, tokens=TOKENS), [SlotSpan(slice(0, ROWS), slice(0, TOKENS))]
    held, mask = torch.randn(2, ROWS, HEADS, TOKENS, SIZE), masked(LENGTHS)
    given = DecodePass(layout, spans, *held, mask, 1)
    first, second = (GatheredProducts(given) for _ in range(2))
    assert first.pairs is second.pairs
    layout.extend(0, torch.zeros(ROWS, 1, dtype=torch.long), width=TOKENS)
    assert GatheredProducts(given).pairs is not first.pairs
    layout.read(0, 1, start=0)
    assert not layout.gathered


@pytest.mark.parametrize("faster", [False, True])
def test_only_keys_and_values_in_slots_and_in_float32_are_gathered(
    faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_products, "gathering_is_faster", lambda group, size: faster)
    layout, spans = CacheLayout(slots=ROWS, tokens=TOKENS), [SlotSpan(slice(0, ROWS), slice(0, 12))]
    mask = masked(LENGTHS)

    def chosen(held: torch.Tensor) -> type[DecodeProducts]:
        return type(decode_products.decode_products(DecodePass(layout, spans, *held, mask, 1)))

    slots = torch.zeros(2, ROWS, HEADS, TOKENS, SIZE)
    assert chosen(slots[..., :12, :]) is (GatheredProducts if faster else BatchedProducts)
    for other in (slots[..., :12, :].contiguous(), slots.bfloat16(), slots.transpose(2, 3), slots[:, :, :1]):
        assert chosen(other) is BatchedProducts


def test_the_faster_products_are_measured_once_per_machine_and_geometry(tmp_path: Path) -> None:
    assert gathering_is_faster(2, 64) in (False, True)
    [path] = (tmp_path / "cache" / "decode_attention").iterdir()
    document = unsealed(path.read_bytes(), required=True)
    assert set(document["seconds"]) == {"batched", "gathered"}
    assert all(0 < seconds < 5 for seconds in document["seconds"].values())
    assert document["key"] | {"group": 2, "size": 64, "threads": torch.get_num_threads()} == document["key"]
    for batched, faster in ((WORTH * 0.99, False), (WORTH * 1.01, True)):
        changed: Any = {"key": document["key"], "seconds": {"batched": batched, "gathered": 1.0}}
        path.write_text(json.dumps(sealed(changed)))
        gathering_is_faster.cache_clear()
        assert gathering_is_faster(2, 64) is faster
    gathering_is_faster(2, 32)
    assert len(list((tmp_path / "cache" / "decode_attention").iterdir())) == 2


def test_batched_products_are_used_if_nothing_can_be_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("a file where the folder would be")
    with caplog.at_level("INFO"):
        assert not gathering_is_faster(2, 64)
    assert "attention of new tokens uses batched products, because the measurement cannot be recorded" in caplog.text


def test_torch_does_not_warn_about_sparse_tensors_also_if_the_measurement_was_recorded() -> None:
    gathering_is_faster(1, 32)
    code = """
import torch
from partita.lm.slots.decode_products import DecodePass, GatheredProducts, SlotSpan, gathering_is_faster
from partita.lm.slots.kv_cache import CacheLayout
gathering_is_faster(1, 32)
held, mask = torch.zeros(2, 1, 1, 4, 8), torch.zeros(1, 1, 1, 4)
layout, spans = CacheLayout(slots=1, tokens=4), [SlotSpan(slice(0, 1), slice(0, 4))]
given = DecodePass(layout, spans, *held, mask, 1)
assert GatheredProducts(given).scores(held[0, :, :, :1])[0].shape == (1, 1, 1, 4)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)


def test_the_measurement_computes_both_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_products, "MEASURED_NUMBERS", 2**14)
    assert set(measure(2, 32)) == {"batched", "gathered"}


def test_the_measurement_reads_keys_and_values_from_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[DecodePass] = []

    def record(*given: Any) -> DecodePass:
        passes.append(DecodePass(*given))
        return passes[-1]

    monkeypatch.setattr(decode_products, "DecodePass", record)
    monkeypatch.setattr(decode_products, "shortest_seconds", lambda computations, **_: dict.fromkeys(computations, 1.0))
    measure(2, 64)
    held = [part for given in passes for part in (given.key_NHWD, given.value_NHWD)]
    assert sum(part.nbytes for part in held) == 64 * 2**20, "more than the caches of a core"
    assert len({part.data_ptr() for part in held}) == len(held)
    assert all(is_in_slots(part, given.layout) for given in passes for part in (given.key_NHWD, given.value_NHWD))
    assert all(given.layout.tokens > part.shape[2] for given in passes for part in held), "slots are not full"


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory")
def test_batched_products_are_used_if_memory_does_not_allow_the_measurement(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_products, "MEASURED_NUMBERS", 2**25)  # 1 GB, which no earlier test has left in the heap
    with caplog.at_level("INFO"), linux.exact_allocations(), linux.data_limit(40_000_000):
        assert not gathering_is_faster(2, 64)
    assert "uses batched products, because there is too little memory to measure other ones" in caplog.text
    assert not (tmp_path / "cache" / "decode_attention").exists(), "another process may have more"
