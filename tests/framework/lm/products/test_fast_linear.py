"""Tests of faster matrix products: same results, where they are used, and slots padded for oneDNN."""

import copy
import json
import math
import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from partita.generation.generator import generate_requests, scheduler_of_requests, stream_requests
from partita.generation.oom_backoff import BatchBudget
from partita.generation.requests import GenerationSettings
from partita.lm.base import GenerationOptions, GenerationRequest
from partita.lm.decoding import sampler
from partita.lm.products import fast_linear
from partita.lm.products.fast_linear import (
    LEAST,
    FastLinear,
    Least,
    PackedLinear,
    enable_fast_products,
    round_up,
    using_fast_products,
)
from partita.lm.products.product import Implementation
from partita.lm.slots.slots import Slots, SlotSupport
from partita_trainers.libraries import torch_internals

from ....properties import ends, first, in_long_tests

GREEDY = GenerationOptions({"do_sample": False, "num_beams": 1})
PREFIX = tuple(range(11, 20))


@cache
def is_onednn(func: Any) -> bool:
    """Return whether an operation is a product of oneDNN."""
    return "_linear_pointwise" in str(func)


class Watch(TorchDispatchMode):
    """Record the number of rows of every product that is not computed by torch with plain weights, and by what.

    `by_column` says whether to look for weights that are stored by column. Products of a backward pass look the same.
    """

    def __init__(self, *, by_column: bool = False) -> None:
        super().__init__()
        self.by_column = by_column
        self.rows = list[int]()
        self.used = set[Implementation]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        used = self.implementation(func, args)
        if used is not Implementation.TORCH:
            x = args[1] if func is torch.ops.aten.addmm.default else args[0]
            self.rows.append(x.numel() // x.shape[-1])
            self.used.add(used)
        return func(*args, **(kwargs or {}))

    def implementation(self, func: Any, args: Any) -> Implementation:
        """Return what computes this operation."""
        if is_onednn(func):
            return Implementation.PACKED if args[1].is_mkldnn else Implementation.ONEDNN
        if self.by_column and func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            return Implementation.BY_COLUMN if args[-1].is_contiguous() else Implementation.TORCH
        if self.by_column and func is torch.ops.aten.linear.default:  # in inference mode
            return Implementation.BY_COLUMN if args[1].t().is_contiguous() else Implementation.TORCH
        return Implementation.TORCH


@pytest.fixture(scope="module", autouse=True)
def one_dnn() -> None:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        pytest.skip("this build of torch has no oneDNN")


@pytest.fixture(params=list(Implementation))
def products(request: pytest.FixtureRequest) -> Implementation:
    """Return how even the smallest products of `lm` are computed, on any machine."""
    return Implementation(request.param)


@pytest.fixture
def faster(products: Implementation) -> bool:
    """Return whether they are not computed by torch with plain weights."""
    return products is not Implementation.TORCH


def fast_layer(
    implementation: Implementation = Implementation.ONEDNN,
    *,
    bias: bool = True,
    multiplications: int = 0,
    few_kernels: bool = True,
) -> Any:
    torch.manual_seed(1)
    layer = nn.Linear(128, 160, bias=bias)
    least = Least(multiplications=multiplications)
    assert enable_fast_products(layer, least=least, implementation=implementation, few_kernels=few_kernels) == 1
    return layer


COPYING = [Implementation.PACKED, Implementation.BY_COLUMN]
FASTER = [*COPYING, Implementation.ONEDNN]


@pytest.mark.parametrize("products", FASTER)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(8, 128), (3, 32, 128), (1, 4, 128), (96, 1, 128)])
def test_results_equal_those_of_a_plain_layer(shape: tuple[int, ...], bias: bool, products: Implementation) -> None:
    layer = fast_layer(products, bias=bias, multiplications=LEAST.multiplications)
    x = torch.randn(shape)
    with torch.no_grad(), using_fast_products(), Watch(by_column=True) as seen:
        found = layer(x)
    wanted = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
    assert found.shape == (*shape[:-1], 160)
    assert found.is_contiguous()
    assert (layer.copied is not None) == products.copies_weights
    assert seen.used <= {products}
    small = products.is_onednn and x.numel() * 160 < LEAST.multiplications
    assert seen.rows == ([] if small else [x.numel() // 128])
    torch.testing.assert_close(found.double(), wanted.detach(), rtol=1e-5, atol=1e-5)


def test_views_of_a_tensor_are_multiplied_like_copies() -> None:
    layer, x = fast_layer(), torch.randn(16, 5, 128)
    with torch.no_grad(), using_fast_products(), Watch(by_column=True) as seen:
        torch.testing.assert_close(layer(x[:, -1]), layer(x[:, -1].contiguous()))
    assert seen.rows == [16, 16]


@pytest.mark.parametrize("products", FASTER)
def test_faster_products_are_used_only_where_they_are_enabled(products: Implementation) -> None:
    layer, x = fast_layer(products), torch.randn(64, 128)
    with torch.no_grad(), Watch(by_column=True) as seen:
        plain = layer(x)
        with using_fast_products():
            layer(x)
            with using_fast_products(False):
                assert torch.equal(layer(x), plain)
            layer(x)
        assert torch.equal(layer(x), plain)
    assert seen.rows == [64, 64]
    assert torch.equal(plain, nn.functional.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("products", COPYING)
def test_a_weight_is_copied_once_even_if_the_first_product_is_small(products: Implementation) -> None:
    layer = fast_layer(products)
    with torch.no_grad():
        layer(torch.randn(1, 128))
        assert layer.copied is None
        with using_fast_products():
            layer(torch.randn(1, 128))
            copied = layer.copied
            layer(torch.randn(64, 128))
    assert copied is not None
    assert layer.copied is copied


def change_in_place(layer: nn.Linear) -> None:
    layer.weight.mul_(2)


def replace_weight(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(2 * layer.weight)


def replace_values(layer: nn.Linear) -> None:
    layer.weight.data = 2 * layer.weight.data


@pytest.mark.parametrize("products", COPYING)
@pytest.mark.parametrize("change", [change_in_place, replace_weight, replace_values])
@torch.no_grad()
def test_a_weight_that_changed_after_it_was_copied_is_used(change: Any, products: Implementation) -> None:
    layer, x = fast_layer(products), torch.randn(64, 128)
    with using_fast_products(), Watch(by_column=True) as seen:
        layer(x)
        change(layer)
        torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias), rtol=1e-5, atol=1e-5)
    assert seen.used == {products}


@pytest.mark.parametrize("products", COPYING)
@torch.no_grad()
def test_copies_and_saved_states_of_a_layer_are_without_the_copied_weight(products: Implementation) -> None:
    layer = fast_layer(products)
    with using_fast_products():
        layer(torch.randn(64, 128))
    assert layer.copied is not None
    assert set(layer.state_dict()) == {"weight", "bias"}
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.copied is None
        assert torch.equal(other.weight, layer.weight)


def test_any_number_of_rows_of_a_large_model_uses_onednn() -> None:
    layer, x = fast_layer(few_kernels=False), torch.randn(1023, 128)
    with torch.no_grad(), using_fast_products(), Watch(by_column=True) as seen:
        layer(x)
    assert seen.rows == [1023]


def test_any_number_of_rows_is_multiplied_by_column() -> None:
    layer = fast_layer(Implementation.BY_COLUMN)
    with torch.no_grad(), using_fast_products(), Watch(by_column=True) as seen:
        for rows in (1, 3, 4, 17, 1023):
            layer(torch.randn(rows, 128))
    assert seen.rows == [4, 17, 1023]


@pytest.mark.skipif(not torch_internals.onednn_has_bfloat16(), reason="oneDNN has no bfloat16 on this processor")
@pytest.mark.parametrize("rows", [0, 1, 3, 17, 64, 1000])
def test_packed_layers_in_bfloat16_have_the_bits_of_torch(rows: int) -> None:
    layer: Any = nn.Linear(128, 160).bfloat16()
    x = torch.randn(rows, 128).bfloat16()
    wanted = nn.functional.linear(x, layer.weight, layer.bias)
    layer.__class__ = PackedLinear
    layer(x)
    assert layer.copied is None, "a pass with gradients packs nothing"
    with torch.no_grad(), Watch(by_column=True) as seen:
        for _ in range(2):
            assert torch.equal(layer(x), wanted)
        layer.weight.mul_(2)
        assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    assert seen.used == ({Implementation.PACKED} if rows else set())


@pytest.mark.parametrize("rows", [0, 1, 3, 17, 1023])
def test_torch_computes_few_rows_and_float64(rows: int) -> None:
    layer, x = fast_layer(), torch.randn(rows, 128)
    with torch.no_grad(), using_fast_products(), Watch(by_column=True) as seen:
        assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    assert not seen.rows


def test_torch_computes_gradients_autocast_and_16_bits() -> None:
    layer, x = fast_layer(), torch.randn(64, 128, requires_grad=True)
    with using_fast_products(), Watch() as seen:
        layer(x).sum().backward()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        with torch.no_grad():
            assert layer.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    assert x.grad is not None
    assert not seen.rows


def test_only_plain_layers_in_float32_are_changed_and_keep_their_names() -> None:
    class Own(nn.Linear):
        """A subclass of nn.Linear."""

    module = nn.Sequential(
        nn.Linear(128, 128), nn.Linear(128, 128).bfloat16(), Own(128, 128), nn.Linear(16, 16), nn.Embedding(128, 128)
    )
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert enable_fast_products(module) == 1
    assert [type(part) for part in module] == [FastLinear, nn.Linear, Own, nn.Linear, nn.Embedding]
    after = module.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


@given(st.integers(1, 10**7))
def test_rounded_sizes_are_few_and_close(rows: int) -> None:
    found = round_up(rows)
    assert rows <= found <= rows * 1.125
    assert round_up(found) == found
    digits = f"{found:b}".rstrip("0")
    assert len(digits) <= fast_linear.DIGITS


@pytest.fixture
def lm(small: Any, tmp_path: Path, products: Implementation) -> Any:
    return small.load_sharp(tmp_path, products=products)


Alone = Callable[[Any, GenerationRequest], tuple[int, ...]]


@pytest.fixture(scope="module")
def alone(small: Any) -> Alone:
    """Return a function: answers of `small.greedy_alone`, computed once for the same weights and prompt.

    Rows alone are computed by torch with plain weights, whatever computes rows in slots.
    """
    known: dict[Any, tuple[int, ...]] = {}

    def answer(lm: Any, request: GenerationRequest) -> tuple[int, ...]:
        weights = b"".join(tensor.numpy().tobytes() for tensor in lm.module.state_dict().values())
        key = blake2b(weights).digest(), tuple(request.input_ids), request.max_new_tokens
        if key not in known:
            known[key] = small.greedy_alone(lm, request)
        return known[key]

    return answer


@pytest.mark.parametrize("slots", first([40, 1, 6, 17]))
@pytest.mark.parametrize("prefix", [in_long_tests(((),)), PREFIX])
def test_answers_equal_those_of_transformers_and_products_have_few_sizes(
    small: Any, lm: Any, alone: Alone, products: Implementation, slots: int, prefix: tuple[int, ...]
) -> None:
    sizes = [(1 + 7 * row % 41, 1 + 5 * row % 14) for row in range(40)]
    requests = small.slot_requests(*sizes, prefix=prefix)
    with Watch(by_column=True) as seen:
        answers = small.answer_in_slots(lm, requests, slots=slots, prefix=prefix)
    assert {row: answer.generated.ids for row, answer in answers.items()} == {
        request.row: alone(lm, request) for request in requests
    }
    assert seen.used == {products} - {Implementation.TORCH}
    assert all(round_up(rows) == rows for rows in seen.rows) == (products is not Implementation.BY_COLUMN)


def test_large_models_are_computed_without_idle_slots_and_longer_prompts(
    small: Any, lm: Any, alone: Alone, faster: bool
) -> None:
    lm.few_kernels = False
    for layer in lm.module.modules():
        if isinstance(layer, FastLinear):
            layer.few_kernels = False
    requests = small.slot_requests(*[(1 + 7 * row % 41, 1 + 5 * row % 14) for row in range(40)], prefix=PREFIX)
    with Watch(by_column=True) as seen:
        answers = small.answer_in_slots(lm, requests, slots=17, prefix=PREFIX)
    assert {row: answer.generated.ids for row, answer in answers.items()} == {
        request.row: alone(lm, request) for request in requests
    }
    assert any(round_up(rows) != rows for rows in seen.rows) == faster
    slots = Slots(lm, GREEDY, slots=40, tokens=60, prefix=(), seed=0, support=SlotSupport(True, True))
    assert slots.prompts_per_pass(60, 40) == 17
    assert slots.padded_length(37) == 37
    slots.close()


def test_idle_slots_that_pad_a_step_change_nothing(small: Any, lm: Any, products: Implementation) -> None:
    slots = Slots(lm, GREEDY, slots=24, tokens=60, prefix=PREFIX, seed=0, support=SlotSupport(True, True))
    requests = small.slot_requests(*[(1 + row, 30) for row in range(17)], prefix=PREFIX)
    slots.admit(requests)
    held = [tensor[:, :, : len(PREFIX)].clone() for tensor in slots.pool.held]
    rows = [tensor[:17].clone() for tensor in slots.pool.held]
    ends = [row.length for row in slots.rows]
    with Watch(by_column=True) as seen:
        slots.step()
    assert bool(seen.rows) == (products is not Implementation.TORCH)
    assert (18 in seen.rows) == products.is_onednn
    assert len(slots.live) == 17
    assert all(torch.equal(tensor[:, :, : len(PREFIX)], old) for tensor, old in zip(slots.pool.held, held, strict=True))
    for tensor, old in zip(slots.pool.held, rows, strict=True):
        for row, end in enumerate(ends):
            assert torch.equal(tensor[row, :, : end - 1], old[row, :, : end - 1])
    slots.close()


def test_prompts_are_prefilled_in_powers_of_two_for_onednn(lm: Any, products: Implementation) -> None:
    slots = Slots(lm, GREEDY, slots=40, tokens=60, prefix=(), seed=0, support=SlotSupport(True, True))
    found = [slots.prompts_per_pass(tokens, most) for tokens, most in ((60, 40), (60, 13), (1, 1), (5000, 40))]
    assert found == ([16, 8, 1, 1] if products.is_onednn else [17, 13, 1, 1])
    slots.close()


def test_prompts_as_long_as_their_slots_are_not_padded(small: Any, lm: Any, faster: bool) -> None:
    request = small.slot_requests((37, 1))[0]
    slots = Slots(lm, GREEDY, slots=1, tokens=37, prefix=(), seed=0, support=SlotSupport(True, True))
    answers = slots.admit([request])
    assert answers[0].generated is not None
    assert answers[0].generated.ids == small.greedy_alone(lm, request)
    slots.close()


def doubled(small: Any, lm: Any, prompts: list[GenerationRequest]) -> int:
    """Make another token as likely as the model's most frequent one; return the frequent one."""
    written = Counter(token for prompt in prompts for token in small.greedy_alone(lm, prompt))
    often = written.most_common(1)[0][0]
    with torch.no_grad():
        weight = lm.base.get_output_embeddings().weight
        weight[often + 1] = weight[often]
    return often


@pytest.mark.parametrize("slots", ends([1, 7, 32]))
@pytest.mark.parametrize("prefix", [in_long_tests(((),)), PREFIX])
def test_rows_with_near_ties_are_recomputed_with_the_products_of_torch(
    small: Any,
    lm: Any,
    alone: Alone,
    faster: bool,
    slots: int,
    prefix: tuple[int, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    requests = small.slot_requests(*[(1 + 7 * row % 31, 12) for row in range(24)], prefix=prefix)
    asked = [GenerationRequest(list(request.input_ids), 12) for request in requests]
    first = doubled(small, lm, asked)
    with caplog.at_level("DEBUG"):
        found = generate_requests(lm, asked, GenerationSettings(GREEDY, BatchBudget(slots), 0))
    wanted = [alone(lm, request) for request in requests]
    assert [one.ids for one in found] == wanted
    assert any(first in ids for ids in wanted), "two tokens must be equally likely"
    assert ("recomputed with torch" in caplog.text) == faster


def test_a_row_is_recomputed_in_passes_no_larger_than_before(small: Any, lm: Any, faster: bool) -> None:
    request = small.slot_requests((9, 50))[0]
    doubled(small, lm, [GenerationRequest(list(request.input_ids), 50)])
    slots = Slots(lm, GREEDY, slots=1, tokens=59, prefix=(), seed=0, support=SlotSupport(True, True), shortest_pass=4)
    answers = slots.admit([request])
    sizes: list[int] = []
    hook = lm.base.get_input_embeddings().register_forward_hook(
        lambda module, given, out: sizes.append(given[0].numel())
    )
    while slots.live:
        answers += slots.step()
    hook.remove()
    slots.close()
    assert [answer.generated.ids for answer in answers if answer.generated] == [small.greedy_alone(lm, request)]
    assert max(sizes) == (9 if faster else 1)


def test_torch_computes_everything_if_near_ties_are_frequent(
    small: Any, lm: Any, alone: Alone, faster: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.no_grad():
        weight = lm.base.get_output_embeddings().weight
        weight[1::2] = weight[::2][: len(weight[1::2])]
    requests = small.slot_requests(*[(1 + 7 * row % 31, 12) for row in range(24)], prefix=PREFIX)
    with Watch(by_column=True) as seen, caplog.at_level("DEBUG"):
        answers = small.answer_in_slots(lm, requests, slots=12, prefix=PREFIX)
    assert {row: answer.generated.ids for row, answer in answers.items()} == {
        request.row: alone(lm, request) for request in requests
    }
    assert bool(seen.rows) == faster
    assert ("near ties are too frequent" in caplog.text) == faster
    assert sum("were recomputed" in line for line in caplog.messages) == faster


def test_streamed_pieces_of_recomputed_answers_join_to_the_answer(small: Any, lm: Any, faster: bool) -> None:
    asked = [
        GenerationRequest(list(one.input_ids), 12) for one in small.slot_requests(*[(1 + row, 12) for row in range(9)])
    ]
    doubled(small, lm, asked)
    capacity = BatchBudget(4)
    whole = generate_requests(lm, asked, GenerationSettings(GREEDY, capacity, 0))
    pieces: dict[int, str] = {}
    for place, piece in stream_requests(lm, asked, GenerationSettings(GREEDY, capacity, 0)):
        pieces[place] = pieces.get(place, "") + piece
    assert [pieces.get(place, "") for place in range(9)] == [one.text for one in whole]


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [GenerationOptions({"do_sample": True, "num_beams": 1, "top_k": 0}), replace(GREEDY, logprobs=True)],
    ids=["sampled", "probabilities"],
)
def test_torch_computes_sampled_answers_and_log_probabilities(
    small: Any, lm: Any, faster: bool, options: GenerationOptions
) -> None:
    lm.why_no_slots(options, tokens=40)  # the check of slots runs once, before the products are watched
    requests = small.slot_requests(*[(1 + row, 8) for row in range(20)])
    asked = [GenerationRequest(list(request.input_ids), 8) for request in requests]
    with Watch(by_column=True) as seen:
        answers = [generate_requests(lm, asked, GenerationSettings(options, BatchBudget(n), 3)) for n in (1, 6, 20)]
    assert not seen.rows
    assert [one.ids for one in answers[0]] == [one.ids for one in answers[1]] == [one.ids for one in answers[2]]


def test_close_scores_are_near_ties() -> None:
    scores = torch.tensor(
        [
            [0.0, 4.0, 4.0, 0.0],
            [0.0, 4.0, 3.9, 0.0],
            [0.0, 4.0, 4.0 - 1e-5, 0.0],
            [0.0, math.nan, 1.0, 1.0],
            [-math.inf, 2.0, -math.inf, -math.inf],
            [-math.inf] * 4,
        ]
    )
    before = scores.clone()
    tokens, valid = sampler.greedy(scores)
    assert tokens.tolist()[:3] == [1, 1, 1]
    assert valid.tolist() == [True, True, True, False, True, True]
    for find in (sampler.near_ties, sampler.near_ties_on_cpu):
        assert find(scores, tokens, scores.mean(-1)) == [0, 2, 4], "excluded scores make the mean infinite"
        assert torch.equal(scores.nan_to_num(7), before.nan_to_num(7))
        assert find(scores[:, :1], torch.zeros(6, dtype=torch.long), scores[:, 0]) == []


def test_the_reported_padding_equals_the_computed_padding(small: Any, lm: Any, products: Implementation) -> None:
    asked = [GenerationRequest(list(one.input_ids), 1) for one in small.slot_requests(*[(33, 1)] * 4, (30, 1))]
    run = scheduler_of_requests(lm, asked, GenerationSettings(GREEDY, BatchBudget(8), 0))
    read: list[int] = []
    hook = lm.base.get_input_embeddings().register_forward_hook(
        lambda module, given, out: read.append(given[0].numel())
    )
    lm.why_no_slots(GREEDY, tokens=34)
    read.clear()
    batches = list(run.completions())
    hook.remove()
    assert sum(batch.spent.prompt_tokens for batch in batches) == 4 * 33 + 30
    padded = 4 * 34 + 30 if products.is_onednn else 5 * 33
    assert sum(batch.spent.padded_tokens for batch in batches) == sum(read) == padded


JOB = """
import json, random, sys
import torch
from partita import Model
from partita.lm.products.fast_linear import Least, enable_fast_products

torch.set_num_threads(1)

def held(name):
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024

def config(**trainer):
    return {
        "base_model": {"type": "scratch", "size": "tiny", "tokenizer": "byte", "context_length": 640},
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "generation": {"max_new_tokens": 12},
        "data": {"source": "rows.jsonl"},
        "trainer": {"type": "none", **trainer},
    }

def opened(**trainer):
    model = Model(config(**trainer), quiet=True)
    lm = model._backend.pipeline().lm
    assert enable_fast_products(lm.module, least=Least(multiplications=0, weights=1024))
    lm.has_fast_products = lm.few_kernels = True
    return model

rng = random.Random(1)
rows = [{"question": rng.choice("abcdefgh") * round(4 * 150 ** rng.random())} for _ in range(300)]
with open("rows.jsonl", "w") as file:
    file.writelines(json.dumps(row | {"answer": "a"}) + "\\n" for row in rows)
opened(batch_size=4).predict(rows[:2], fresh=True)
model = opened(memory_budget=held("VmRSS") + 50_000_000)
before = held("VmData")
stats = model.predict(rows, fresh=True).stats
print(json.dumps({"ok": stats.ok, "refused": stats.out_of_memory, "more": held("VmData") - before}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited and reported by Linux")
@pytest.mark.long
def test_kernels_of_many_sizes_stay_within_the_memory_budget(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", JOB],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name not in fast_linear.KERNEL_VARIABLES}
        | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["ok"], found["refused"]) == (300, 0), done.stderr
    assert found["more"] < 65_000_000, "it was 97 MB with all kernels cached"


@pytest.mark.parametrize("name", fast_linear.KERNEL_VARIABLES)
def test_the_kernel_cache_size_set_by_the_user_is_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in fast_linear.KERNEL_VARIABLES:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "7")
    fast_linear.keep_few_kernels()
    assert [os.environ.get(other) for other in fast_linear.KERNEL_VARIABLES if other != name] == [None]
    assert os.environ[name] == "7"
