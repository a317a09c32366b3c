"""Tests of the two attentions to a paged cache.

The kernel of torch's varlen attention runs on GPUs only. Here its operation computes on the CPU what its documentation
says, so that all that is passed to it is tested: lines of tokens, lengths, block tables and windows.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.library import Library

from partita.lm.base import GenerationOptions
from partita.lm.paged.attention import ReferenceAttention, Scoring
from partita.lm.paged.blocks import RESERVED
from partita.lm.paged.cache import PagedPass, table_of
from partita.lm.paged.slots import PagedSlots
from partita.lm.paged.varlen import VarlenAttention, import_problem, why_no_varlen

from ..foreign_models import WINDOWED

HEADS, GROUP, SIZE = 2, 3, 8
LENGTHS = (37, 5, 16)
WIDTH = 3


def documented(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute what torch documents of `varlen_attn` with a block table, token by token."""
    assert window_size is not None
    assert seqused_k is not None
    assert block_table is not None
    assert (cu_seq_q.dtype, seqused_k.dtype, block_table.dtype) == (torch.int32, torch.int32, torch.int32)
    assert enable_gqa or query.shape[1] == key.shape[2]
    assert cu_seq_k is None
    group, output = query.shape[1] // key.shape[2], torch.zeros_like(query)
    for row, length in enumerate(seqused_k.tolist()):
        start, end = cu_seq_q[row : row + 2].tolist()
        assert end - start <= max_q
        assert length <= max_k
        keys, values = (pool[block_table[row].long()].flatten(0, 1)[:length] for pool in (key, value))
        for token in range(start, end):
            position = token - start + length - (end - start)
            first = 0 if window_size[0] == -1 else max(0, position - window_size[0])
            last = length if window_size[1] == -1 else position + window_size[1] + 1
            for head in range(query.shape[1]):
                scores = keys[first:last, head // group] @ query[token, head] * (scale or 1.0)
                output[token, head] = scores.softmax(0) @ values[first:last, head // group]
    return output, query.new_zeros(query.shape[1], len(query)), torch.zeros(2, dtype=torch.uint64)


@pytest.fixture
def kernel() -> Iterator[None]:
    """Compute the operation of varlen attention on the CPU."""
    from torch.nn.attention import varlen

    assert varlen.varlen_attn
    library = Library("torch_attn", "IMPL")
    library.impl("_varlen_attn", documented, "CPU")
    yield
    library._destroy()


def example(*, parts: tuple[tuple[int, int], ...] | None, block_tokens: int = 16) -> tuple[Any, ...]:
    """Return queries, pools and a pass, of one token of each row or of `parts`, with blocks in any order."""
    rng = torch.Generator().manual_seed(0)
    blocks = torch.randperm(len(LENGTHS) * WIDTH, generator=rng) + RESERVED
    rows = [
        row[: -(-length // block_tokens)]
        for row, length in zip(blocks.view(len(LENGTHS), WIDTH).tolist(), LENGTHS, strict=True)
    ]
    counts = [1] * len(LENGTHS) if parts is None else [tokens for tokens, _ in parts]
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    pools = torch.randn(2, RESERVED + len(blocks), block_tokens, HEADS, SIZE, generator=rng)
    query = torch.randn(sum(counts), HEADS * GROUP, SIZE, generator=rng)
    tables, lengths = table_of(rows, width=WIDTH, device=torch.device("cpu")), torch.tensor(LENGTHS, dtype=torch.int32)
    return query, pools[0], pools[1], PagedPass(tables, lengths, starts, torch.zeros(0, dtype=torch.long), parts)


def by_hand(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, now: PagedPass, scoring: Scoring) -> Any:
    """Compute attention token by token."""
    output = torch.zeros_like(query)
    for row, length in enumerate(now.lengths_N.tolist()):
        start, end = now.starts_Nplus1[row : row + 2].tolist()
        for token in range(start, end):
            position = length - (end - token)
            seen = range(max(0, position + 1 - (scoring.window or length)), position + 1)
            cells = [(int(now.tables_NM[row, other // 16]), other % 16) for other in seen]
            for head in range(query.shape[1]):
                scores = [float(keys[cell][head // GROUP] @ query[token, head]) * scoring.scale for cell in cells]
                if scoring.softcap is not None:
                    scores = [scoring.softcap * math.tanh(score / scoring.softcap) for score in scores]
                sink = [] if scoring.sinks is None else [float(scoring.sinks[head])]
                total = sum(math.exp(score) for score in [*scores, *sink])
                for score, cell in zip(scores, cells, strict=True):
                    output[token, head] += math.exp(score) / total * values[cell][head // GROUP]
    return output


SCORINGS = {
    "plain": Scoring(0.3),
    "window": Scoring(0.3, window=7),
    "softcap": Scoring(0.3, window=20, softcap=1.5),
    "sinks": Scoring(0.3, sinks=torch.linspace(-1, 2, HEADS * GROUP)),
}
PARTS = {"a token of each row": None, "parts of rows": ((37, 37), (2, 5), (9, 16))}


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("scoring", SCORINGS)
def test_the_reference_computes_the_formula(parts: str, scoring: str) -> None:
    given = example(parts=PARTS[parts])
    found = ReferenceAttention()(*given, SCORINGS[scoring])
    torch.testing.assert_close(found, by_hand(*given, SCORINGS[scoring]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("scoring", ["plain", "window"])
@pytest.mark.usefixtures("kernel")
def test_varlen_attention_is_called_as_it_is_documented(parts: str, scoring: str) -> None:
    given = example(parts=PARTS[parts])
    attention = VarlenAttention(torch.device("cpu"))
    attention.block_tokens = 16
    found = attention(*given, SCORINGS[scoring])
    torch.testing.assert_close(found, ReferenceAttention()(*given, SCORINGS[scoring]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scoring", ["softcap", "sinks"])
def test_varlen_attention_refuses_what_its_kernel_does_not_have(scoring: str) -> None:
    attention = VarlenAttention(torch.device("cpu"))
    with pytest.raises(NotImplementedError, match="neither a limit of the scores nor sinks"):
        attention(*example(parts=None), SCORINGS[scoring])


def test_varlen_attention_is_traced_without_a_gpu() -> None:
    query, keys, values, now = [held.to("meta") for held in example(parts=None)[:3]] + [example(parts=None)[3]]
    now = PagedPass(*(held.to("meta") for held in (now.tables_NM, now.lengths_N, now.starts_Nplus1, now.written_T)))
    found = VarlenAttention(torch.device("cpu"))(query, keys, values, now, Scoring(0.3, window=7))
    assert (found.device.type, found.shape) == ("meta", query.shape)


@pytest.mark.usefixtures("kernel")
def test_a_model_with_varlen_attention_gives_the_answers_of_transformers(small: Any, foreign: Any) -> None:
    lm = foreign("mistral", WINDOWED["mistral"])
    prefix = tuple(range(11, 31))
    requests = small.slot_requests((1, 5), (17, 4), (9, 8), prefix=prefix)
    slots = PagedSlots(
        lm,
        GenerationOptions({}),
        slots=3,
        tokens=64,
        prefix=prefix,
        seed=0,
        attention=VarlenAttention(lm.device),
    )
    found = {}
    with lm.evaluating():
        slots.admit(requests)
        while slots.live:
            found |= {answer.request.row: answer.generated.ids for answer in slots.step() if answer.generated}
    slots.close()
    assert found == {request.row: small.greedy_alone(lm, request) for request in requests}


def test_the_reason_against_varlen_attention_says_what_is_missing() -> None:
    reason = why_no_varlen(torch.device("cpu"), torch.float32)
    assert reason == "torch's varlen attention needs a GPU, and the model is on cpu"
    reason = why_no_varlen(torch.device("cuda"), torch.float32)
    assert reason == "torch's varlen attention needs dtype: bfloat16 or float16, and the model has torch.float32"


def test_a_kernel_that_cannot_be_imported_is_a_reason_against_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    needed = "torch's varlen attention takes a block table from FA3 only, and the module flash_attn_interface"
    import_problem.cache_clear()
    assert why_no_varlen(torch.device("cuda"), torch.bfloat16) == f"{needed} is missing"
    (tmp_path / "flash_attn_interface.py").write_text("raise OSError('undefined symbol: _ZN3c104cuda')\n")
    monkeypatch.syspath_prepend(tmp_path)
    import_problem.cache_clear()
    reason = why_no_varlen(torch.device("cuda"), torch.bfloat16)
    assert reason == f"{needed} cannot be imported: OSError: undefined symbol: _ZN3c104cuda"
    import_problem.cache_clear()
