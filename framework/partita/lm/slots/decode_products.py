"""Products of single new tokens with the keys and values of slots, in float32 on a CPU.

torch's batched product multiplies the matrices of each row and key head separately. With a few query heads per key
head, these are so small that on some processors it reaches a third of the speed of memory. `GatheredProducts` computes
the same with two kernels of torch for sparse data, which read keys and values row by row:

- `torch.sparse.sampled_addmm` computes the dot products of queries with the keys that they attend to;
- `torch.nn.functional.embedding_bag` adds up values with the attention weights as factors.

Which of the two classes is faster depends on the processor, the head size and the number of query heads per key head.
It is measured once per machine and recorded in the cache directory of the user, as for linear layers
(docs/decisions/0054-float32-decoding.md).

Shapes: N rows, H key/value heads, G query heads per key/value head, W tokens, D head size, T tokens of a slot, P pairs
of a query and a key.
"""

import logging
import warnings
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.functional import embedding_bag

from partita.lm.products.measurement_cache import cache_path, cached_measurement, cpu_description
from partita.lm.products.speed import WORTH, shortest_seconds
from partita.lm.slots.kv_cache import CacheLayout
from partita_trainers.batch_size.device_errors import attempt

FORMAT = 2
"""Increased when the measurement changes."""
MEASURED_TOKENS = 128
"""Tokens of each row in the measurement."""
MEASURED_SLOT = 160
"""Tokens of a slot in the measurement; some are not used, as in a job."""
MEASURED_ROWS = 32
"""Rows of a span in the measurement."""
MEASURED_NUMBERS = 2**21
"""Numbers in the keys of a layer in the measurement."""
MEASURED_LAYERS = 4
"""Layers in the measurement, 64 MB of keys and values: they are read from memory, not from a cache of the processor."""
ROUNDS = 4
BATCHED = "attention of new tokens uses batched products"

logger = logging.getLogger(__name__)


class SlotSpan(NamedTuple):
    """Rows that attend to the same positions of their slots."""

    rows: slice
    positions: slice


class DecodePass(NamedTuple):
    """What single new tokens of several rows attend to in a layer."""

    layout: CacheLayout
    spans: Sequence[SlotSpan]
    key_NHWD: torch.Tensor
    value_NHWD: torch.Tensor
    mask_N11W: torch.Tensor
    """Additive mask."""
    group: int
    """G."""


class DecodeProducts(Protocol):
    """Computes scores, and outputs from attention weights, for the rows of each span."""

    def scores(self, query_NHGD: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the masked scores [rows, H, G, positions] of each span.

        Args:
            query_NHGD: Queries, multiplied by the factor of the scores.
        """

    def output(self, shares: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sums of values [N, H, G, D].

        Args:
            shares: The attention weights [rows, H, G, positions] of each span.
        """


def decode_products(given: DecodePass) -> DecodeProducts:
    """Return the products of a pass that are faster on this machine."""
    in_slots = all(is_in_slots(held, given.layout) for held in (given.key_NHWD, given.value_NHWD))
    plain = in_slots and given.key_NHWD.dtype == torch.float32
    gathers = plain and gathering_is_faster(given.group, given.key_NHWD.shape[3])
    return GatheredProducts(given) if gathers else BatchedProducts(given)


def is_in_slots(held_NHWD: torch.Tensor, layout: CacheLayout) -> bool:
    """Return whether keys or values are a view of the slots, and no copy that the model made."""
    _, heads, _, size = held_NHWD.shape
    return held_NHWD.stride() == (heads * layout.tokens * size, layout.tokens * size, size, 1)


class BatchedProducts:
    """Multiplies the matrices of all rows and heads of a span in one batch."""

    def __init__(self, given: DecodePass) -> None:
        """Prepare the products of a pass."""
        self.given = given

    def scores(self, query_NHGD: torch.Tensor) -> list[torch.Tensor]:
        """Return the masked scores of each span.

        In float32 the product of queries by keys is up to twice as fast as that of keys by queries, and in bfloat16
        half as fast.
        """
        return [
            masked_scores(query_NHGD[rows], self.given.key_NHWD[rows, :, own], self.given.mask_N11W[rows, :, :, own])
            for rows, own in self.given.spans
        ]

    def output(self, shares: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sums of values."""
        values = (self.given.value_NHWD[rows, :, own] for rows, own in self.given.spans)
        parts = [
            batched_product(shares_NHGW, value_NHWD) for shares_NHGW, value_NHWD in zip(shares, values, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def masked_scores(query_NHGD: torch.Tensor, key_NHWD: torch.Tensor, mask_N11W: torch.Tensor) -> torch.Tensor:
    """Return the scores [N, H, G, W] of the rows of a span."""
    if key_NHWD.dtype != torch.float32:
        return batched_product(key_NHWD, query_NHGD.transpose(2, 3)).transpose(2, 3) + mask_N11W
    rows, heads, group, _ = query_NHGD.shape
    mask_B1W = mask_N11W.expand(-1, heads, -1, -1).flatten(0, 1)
    scores_BGW = torch.baddbmm(mask_B1W, query_NHGD.flatten(0, 1), key_NHWD.flatten(0, 1).transpose(1, 2))
    return scores_BGW.view(rows, heads, group, -1)


def batched_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply matrices [N, H, ...] in one batch without copying views of slots."""
    rows, heads = left.shape[:2]
    return torch.bmm(left.flatten(0, 1), right.flatten(0, 1)).view(rows, heads, left.shape[2], right.shape[3])


class QueryKeyPairs(NamedTuple):
    """The pairs of a query and a key in a pass, the same for all layers with this mask and these heads."""

    indices_P: torch.Tensor
    """Row of the key in the cache viewed as [N * H * T, D]."""
    mask_P: torch.Tensor
    """Additive mask."""
    starts: torch.Tensor
    """First pair of each query [N * H * G], and the number of pairs."""
    mask_N11W: torch.Tensor
    """The mask that `mask_P` was taken from. Kept, so that no other mask gets its identity during the pass."""


class GatheredProducts:
    """Multiplies queries by their keys, and adds up values by their weights, row by row of the cache."""

    def __init__(self, given: DecodePass) -> None:
        """Find the pairs of the pass, once for all layers."""
        hide_beta_warning()
        rows, heads = given.key_NHWD.shape[:2]
        self.spans, self.shape = given.spans, (rows, heads, given.group)
        lines = rows * heads * given.layout.tokens
        self.keys, self.values = (
            held.as_strided((lines, held.shape[3]), (held.shape[3], 1)) for held in (given.key_NHWD, given.value_NHWD)
        )
        key = (id(given.mask_N11W), heads, given.group, *(own.start for _, own in given.spans))
        found = given.layout.gathered.get(key)
        if found is None:
            found = given.layout.gathered[key] = find_pairs(given)
        self.pairs: QueryKeyPairs = found

    def scores(self, query_NHGD: torch.Tensor) -> list[torch.Tensor]:
        """Return the masked scores of each span."""
        query_BD = query_NHGD.reshape(-1, query_NHGD.shape[3])
        pattern = torch.sparse_csr_tensor(
            self.pairs.starts,
            self.pairs.indices_P,
            self.pairs.mask_P,
            (len(query_BD), len(self.keys)),
            check_invariants=False,
        )
        scores_P = torch.sparse.sampled_addmm(pattern, query_BD, self.keys.t()).values()
        shapes = [(rows.stop - rows.start, *self.shape[1:], own.stop - own.start) for rows, own in self.spans]
        parts = scores_P.split([n * heads * group * width for n, heads, group, width in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def output(self, shares: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sums of values."""
        output_BD = embedding_bag(
            self.pairs.indices_P,
            self.values,
            self.pairs.starts,
            mode="sum",
            per_sample_weights=torch.cat([part.reshape(-1) for part in shares]),
            include_last_offset=True,
        )
        return output_BD.view(*self.shape, -1)


def find_pairs(given: DecodePass) -> QueryKeyPairs:
    """Return the pairs of a pass."""
    rows, heads = given.key_NHWD.shape[:2]
    lines_NH11 = (torch.arange(rows * heads) * given.layout.tokens).view(rows, heads, 1, 1)
    indices, masks, counts = [], [], [torch.zeros(1, dtype=torch.long)]
    for some, own in given.spans:
        positions_W = torch.arange(own.start, own.stop)
        shape = (some.stop - some.start, heads, given.group, len(positions_W))
        indices.append((lines_NH11[some] + positions_W).expand(shape).reshape(-1))
        masks.append(given.mask_N11W[some, :, :, own].expand(shape).reshape(-1))
        counts.append(torch.full((shape[0] * heads * given.group,), len(positions_W)))
    return QueryKeyPairs(torch.cat(indices), torch.cat(masks), torch.cat(counts).cumsum(0), given.mask_N11W)


@cache
def hide_beta_warning() -> None:
    """Create a sparse tensor without torch's warning, which it gives once per process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        torch.sparse_csr_tensor([0, 0], [], [], (1, 1), check_invariants=False)


@cache
def gathering_is_faster(group: int, size: int) -> bool:
    """Return whether `GatheredProducts` is faster on this machine; measured in some 0.15 s, and recorded.

    Args:
        group: G.
        size: D.
    """
    key = {
        "format": FORMAT,
        **cpu_description(),
        "group": group,
        "size": size,
        "tokens": MEASURED_TOKENS,
        "slot": MEASURED_SLOT,
        "rows": MEASURED_ROWS,
        "numbers": MEASURED_NUMBERS,
        "layers": MEASURED_LAYERS,
    }
    seconds, failure = attempt(
        lambda: cached_measurement(
            cache_path("decode_attention", key),
            key,
            measure=partial(measure, group, size),
            read=lambda saved: {name: float(saved[name]) for name in ("batched", "gathered")},
            fallback=BATCHED,
        )
    )
    if failure is not None:
        logger.info("%s, because there is too little memory to measure other ones", BATCHED)
    return seconds is not None and seconds["batched"] > WORTH * seconds["gathered"]


@torch.no_grad()
def measure(group: int, size: int) -> dict[str, Any]:
    """Return the seconds of the products of several layers, by the implementation."""
    rows = max(1, MEASURED_NUMBERS // (MEASURED_TOKENS * size))
    layout = CacheLayout(slots=rows, tokens=MEASURED_SLOT)
    query, mask = torch.ones(rows, 1, group, size), torch.zeros(rows, 1, 1, MEASURED_TOKENS)
    spans = [
        SlotSpan(slice(start, min(start + MEASURED_ROWS, rows)), slice(0, MEASURED_TOKENS))
        for start in range(0, rows, MEASURED_ROWS)
    ]
    layers = [
        DecodePass(layout, spans, slot_view(rows, size), slot_view(rows, size), mask, group)
        for _ in range(MEASURED_LAYERS)
    ]

    def compute(kind: type[BatchedProducts] | type[GatheredProducts]) -> None:
        layout.gathered = {}  # as in a new pass
        for layer in layers:
            products = kind(layer)
            products.output(products.scores(query))

    return shortest_seconds(
        {"batched": partial(compute, BatchedProducts), "gathered": partial(compute, GatheredProducts)},
        device=query.device,
        rounds=ROUNDS,
    )


def slot_view(rows: int, size: int) -> torch.Tensor:
    """Return the keys or values [N, 1, W, D] of a measured layer, a view of its slots, which are longer."""
    held = torch.empty(rows, 1, MEASURED_SLOT, size)
    return held[:, :, :MEASURED_TOKENS].fill_(1.0)
