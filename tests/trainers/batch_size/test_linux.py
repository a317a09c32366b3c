"""Tests of the allocator, the data limit, /proc and control groups, in separate processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from partita_trainers.batch_size import linux
from partita_trainers.batch_size.device_memory import device_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="this tests Linux")

GB = 10**9

BLOCKS = """
import ctypes, resource
from partita_trainers.batch_size import linux
library = linux.c_library()
def most(size):
    blocks = []
    while len(blocks) < 100 and (block := library.malloc(size)):
        blocks.append(block)
    for block in blocks:
        library.free(block)
    return len(blocks)
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("exact", [True, False])
def test_small_blocks_can_be_allocated_at_the_limit_but_large_ones_cannot(exact: bool) -> None:
    code = f"""
{BLOCKS}
from contextlib import nullcontext
for _ in range(2):
    held = linux.status("VmRSS")
    with linux.data_limit(0), linux.exact_allocations() if {exact} else nullcontext():
        assert most(260 * 1024) >= linux.SPARE_BLOCKS, most(260 * 1024)
        assert most(2 * linux.SPARE_BLOCK_BYTES) == 0
        assert linux.status("VmRSS") - held < 4 * 2**20, "the blocks use memory"
assert most(2 * linux.SPARE_BLOCK_BYTES) == 100
print("right")
"""
    assert run(code) == "right"


KEPT = """
def kept():
    "Return whether memory of freed blocks stays with the process, with a used block after them."
    linux.give_back()
    before = linux.status("VmData")
    blocks = [library.malloc(8 * 2**20) for _ in range(4)]
    ends = library.malloc(24)
    for block in blocks:
        library.free(block)
    grown = linux.status("VmData") - before
    library.free(ends)
    return grown > 16 * 2**20
def touched(size):
    block = library.malloc(size)
    ctypes.memset(block, 1, size)
    library.free(block)
def stays(size):
    "Return the bytes of four blocks that stay with the process after they are freed, last one first."
    before = linux.status("VmRSS")
    blocks = [library.malloc(size) for _ in range(4)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in reversed(blocks):
        library.free(block)
    return linux.status("VmRSS") - before
def faults(size):
    "Return the page faults for a block of this size."
    touched(size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        touched(size)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10
"""


def test_nested_exact_allocations_stay_exact() -> None:
    code = f"""
{BLOCKS}{KEPT}
with linux.data_limit(10**9), linux.exact_allocations():
    assert not kept()
    with linux.data_limit(10**8), linux.exact_allocations():
        assert not kept()
    assert not kept(), "the inner context ended the outer one"
    with linux.data_limit(10**8):
        assert not kept(), "a limit without exact allocations ended it"
assert kept()
print("right")
"""
    assert run(code) == "right"


def test_kept_allocations_reuse_pages_and_return_them_at_the_end() -> None:
    code = f"""
{BLOCKS}{KEPT}
size = 24 * 2**20
before = linux.status("VmRSS")
with linux.kept_allocations():
    assert faults(size) < 10, faults(size)
    assert linux.status("VmRSS") - before > size // 2, "nothing is kept"
    assert stays(size) > 2 * size, "the end of the heap is cut"
assert linux.status("VmRSS") - before < size // 2, "it is not returned"
with linux.exact_allocations():
    assert faults(size) > 1000, "exact allocations get new pages each time"
print("right")
"""
    assert run(code) == "right"


def test_exact_allocations_reuse_no_memory_in_either_nesting() -> None:
    code = f"""
{BLOCKS}{KEPT}
size = 24 * 2**20
def is_kept():
    return faults(size) < 10
def is_exact():
    return not kept() and faults(size) > 1000
with linux.kept_allocations():
    assert is_kept()
    with linux.exact_allocations():
        assert is_exact()
        with linux.kept_allocations():
            assert is_exact()
        assert is_exact(), "the end of kept work ended exact work"
        with linux.data_limit(10**9):
            assert is_exact()
        assert is_exact()
    assert is_kept(), "the end of exact work ended kept work"
    with linux.kept_allocations():
        assert is_kept()
    assert is_kept(), "the inner context ended the outer one"
    with linux.data_limit(10**9):
        assert is_kept()
    assert is_kept(), "a limit ended it"
with linux.exact_allocations():
    with linux.kept_allocations():
        assert is_exact()
    assert is_exact()
print("right")
"""
    assert run(code) == "right"


def test_without_glibc_its_functions_are_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "c_library", lambda: None)
    with linux.kept_allocations(), linux.exact_allocations():
        assert (linux.Allocator.num_reusing, linux.Allocator.exact) == (0, 0)


@pytest.mark.long
def test_guarded_work_keeps_its_memory_unless_it_must_be_exact() -> None:
    code = f"""
{BLOCKS}{KEPT}
import torch
from partita_trainers.batch_size.device_memory import device_memory
memory = device_memory(torch.device("cpu"))
size = 24 * 2**20
with memory.guard():
    assert stays(size) > 2 * size
    with memory.measure():
        assert faults(size) > 1000, "what is measured is exact"
    assert faults(size) < 10
with memory.guard(exact=True):
    assert faults(size) > 1000
    assert stays(size) < size // 2
print("right")
"""
    assert run(code) == "right"


@pytest.mark.long
def test_the_measured_peak_is_the_memory_held_at_once() -> None:
    code = """
import torch
from partita_trainers.batch_size.device_memory import device_memory
memory = device_memory(torch.device("cpu"))
def work(megabytes):
    for _ in range(3):
        first = torch.ones(megabytes * 250_000)
        second = torch.ones(megabytes * 500_000)
        del first, second
work(1)
for megabytes in (8, 16, 64):
    with memory.measure() as peak:
        work(megabytes)
    assert abs(peak.taken_bytes / (3 * megabytes * 10**6) - 1) < 0.05, (megabytes, peak)
print("right")
"""
    assert run(code) == "right"


@pytest.mark.long
def test_a_peak_is_also_reported_for_work_that_raises() -> None:
    code = """
import torch
from partita_trainers.batch_size.device_memory import device_memory
memory = device_memory(torch.device("cpu"))
try:
    with memory.measure() as peak:
        held = torch.ones(25_000_000)
        raise KeyError("stop")
except KeyError:
    pass
assert 95_000_000 < peak.used_bytes < 110_000_000, peak
print("right")
"""
    assert run(code) == "right"


def test_a_peak_below_an_earlier_one_is_unknown_if_peaks_cannot_be_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = device_memory(torch.device("cpu"))
    known = {"VmRSS": 2 * GB, "VmHWM": 3 * GB}
    monkeypatch.setattr(linux, "reset_peak", lambda: False)
    monkeypatch.setattr(linux, "status", lambda field, **place: known.get(field))
    with memory.measure() as peak:
        pass
    assert peak.used_bytes is None
    with memory.measure() as peak:
        known["VmHWM"] = 5 * GB
    assert peak.used_bytes == 3 * GB


WORK = """
import json, torch
from transformers import LlamaConfig, LlamaForCausalLM
from partita_trainers.batch_size import linux
from partita_trainers.batch_size.device_errors import attempt
torch.set_num_threads(1)
shape = dict(vocab_size=2000, hidden_size=256, intermediate_size=704, num_hidden_layers=2, num_attention_heads=4)
config = LlamaConfig(**shape)
def forward(rows):
    with torch.no_grad():
        model(input_ids=torch.ones(rows, 128, dtype=torch.long))
def backward(rows):
    ids = torch.ones(rows, 128, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad()
def generate(rows):
    ids = torch.ones(rows, 128, dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    with torch.no_grad():
        model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=True, pad_token_id=0)
def fits(work, megabytes):
    "Raises what is not recognised; a crash ends the process."
    with linux.data_limit(megabytes * 10**6), linux.exact_allocations():
        return attempt(lambda: work(16))[1] is None
def all_limits(dtype, limits):
    global model
    model, found = LlamaForCausalLM(config).to(dtype).eval(), []
    for work in (forward, backward, generate):
        work(1)
        found.append([fits(work, megabytes) for megabytes in limits])
    print(json.dumps(found))
"""


@pytest.mark.long
def test_a_model_that_reaches_any_limit_is_out_of_memory_and_the_process_survives() -> None:
    result = json.loads(run(WORK + "all_limits(torch.float32, (0, 5, 13, 2000))"))
    assert all(not row[0] and row[-1] for row in result), result


@pytest.mark.long
def test_a_bf16_model_that_reaches_a_limit_is_out_of_memory_with_rare_crashes() -> None:
    # oneDNN refused a primitive, and then the same one again with enough memory: seen in one of twelve suites.
    for tries_left in (2, 1, 0):
        try:
            result = json.loads(run(WORK + "all_limits(torch.bfloat16, (0, 2000))"))
            break
        except AssertionError:
            if not tries_left:
                raise
    assert all(not row[0] and row[-1] for row in result), result


def test_a_control_group_without_statistics_still_limits_memory(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/\n", encoding="ascii")
    (tmp_path / "memory.max").write_text(f"{4 * GB}\n", encoding="ascii")
    (tmp_path / "memory.current").write_text(f"{GB}\n", encoding="ascii")
    assert linux.cgroup_free_bytes(proc=tmp_path, root=tmp_path) == 3 * GB


def test_a_control_group_larger_than_the_machine_does_not_increase_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "cgroup_total", lambda: 500 * GB)
    monkeypatch.setattr(linux, "meminfo", lambda field: 100 * GB)
    assert device_memory(torch.device("cpu")).identity.endswith(f", {100 * GB} bytes")


def test_a_processor_is_reported_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Xeon Gold 6130\nflags\t: fpu\n", encoding="ascii")
    assert linux.processor(proc=tmp_path) == "Xeon Gold 6130"
    assert linux.processor("flags", proc=tmp_path) == "fpu"
    assert linux.processor("vendor_id", proc=tmp_path) is None
    assert linux.processor(proc=tmp_path / "absent") is None
    assert (linux.processor() or "") in device_memory(torch.device("cpu")).identity
