"""Tests of the worst case of generation: its passes, its side effects, and its memory against a whole generation."""

import gc
import json
import logging
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from partita.lm.base import PADDED, GenerationOptions
from partita.lm.batch_generation.worst_case import worst_requests
from partita.lm.slots import slots
from partita.lm.slots.kv_cache import SlotKVCache

from ....properties import ends

GREEDY: dict[str, Any] = {"do_sample": False, "num_beams": 1}
CONTEXT = 64
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "max_position_embeddings": CONTEXT,
}
STATE_SPACE: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
EXPERTS: dict[str, Any] = {
    **SHAPE,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
PLAIN: dict[str, dict[str, Any]] = {
    "llama": SHAPE,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": CONTEXT},
    "opt": {**SHAPE, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt_neox": SHAPE,
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 2},
    "qwen2_moe": EXPERTS,
}
"""Models with a plain growing cache."""
SLOTTED = [kind for kind in PLAIN if kind != "bloom"]
"""Those that answer in slots; bloom derives positions from the mask, which is impossible with a mask of slots."""
WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": {**SHAPE, "sliding_window": 16},
    "gemma3_text": {
        **SHAPE,
        "head_dim": 16,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
"""Models with sliding windows."""
OTHER: dict[str, dict[str, Any]] = {
    "mamba": STATE_SPACE,
    "lfm2": {**SHAPE, "layer_types": ["conv", "full_attention"]},
}
"""Models with recurrent states, also next to attention."""


@pytest.fixture(scope="module")
def models(small: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that creates a tiny model of a transformers model type."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = small.load(small.config()).tokenizer
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    known: dict[str, Any] = {}

    def model(kind: str) -> Any:
        if kind not in known:
            folder = tmp_path_factory.mktemp(kind)
            shape = (PLAIN | WINDOWED | OTHER)[kind]
            config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), **shape, **special)
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            known[kind] = small.load(small.config(base_model=str(folder)), trainable=False)
        return known[kind]

    return model


@contextmanager
def watched(lm: Any) -> Iterator[Any]:
    """Record passes (rows, input tokens, tokens in the cache after them) and the caches.

    `pools` has the slots and the tokens of a slot for each pass in slots. The one-time checks of how a model can be
    batched are not recorded.
    """

    class Passes:
        seen: list[tuple[int, int, int]] = []
        caches: list[weakref.ref[Any]] = []
        pools: list[tuple[int, int]] = []

    passes = Passes()
    passes.seen, passes.caches, passes.pools = [], [], []
    assert lm.slot_support
    assert lm.short_batch_support
    lm.why_no_slots(GenerationOptions(GREEDY), tokens=CONTEXT)

    def note(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        rows, tokens = (ids if ids is not None else kwargs["inputs_embeds"]).shape[:2]
        mask = kwargs.get("attention_mask")
        pool = kwargs.get("past_key_values")
        if isinstance(pool, SlotKVCache):
            layout = pool.layout
            passes.seen.append((rows, tokens, layout.width or layout.start + tokens))
            passes.pools.append((layout.slots, layout.tokens))
            passes.caches.append(weakref.ref(pool))
            return
        # There is no mask without padding, and in state spaces after the prefill.
        held = passes.seen[-1][2] if passes.seen else 0
        passes.seen.append((rows, tokens, mask.shape[1] if mask is not None else held + tokens))
        cache = output.get("past_key_values", output.get("cache_params"))
        passes.caches.append(weakref.ref(cache))

    hook = lm.base.register_forward_hook(note, with_kwargs=True)
    try:
        yield passes
    finally:
        hook.remove()


def worst(
    lm: Any, rows: int, options: dict[str, Any] | None = None, *, prompt: int, new: int, slots: bool = True
) -> Any:
    chosen = GenerationOptions(GREEDY | (options or {}), slots=slots)
    return lm.generate_worst_case(rows, prompt_tokens=prompt, new_tokens=new, options=chosen)


BOTH = pytest.mark.parametrize("slots", [True, False], ids=["slots", "batches"])


# Passes


@pytest.mark.parametrize("kind", PLAIN)
def test_with_a_plain_cache_prompts_are_prefilled_and_only_the_last_tokens_decoded(models: Any, kind: str) -> None:
    lm = models(kind)
    with watched(lm) as passes:
        timing = worst(lm, 3, prompt=20, new=40, slots=False)
    assert not passes.pools
    assert timing.prefill_seconds > 0
    assert timing.decode_seconds > 0
    assert passes.seen[0] == (3, 20, 20)
    assert passes.seen[-1] == (3, 1, 59), "the last token is not an input"
    assert len(passes.seen) <= 6


@pytest.mark.parametrize("kind", SLOTTED)
def test_in_slots_a_group_of_prompts_is_prefilled_and_the_last_tokens_decoded_in_full_slots(
    models: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = models(kind)
    monkeypatch.setitem(slots.PREFILL_TOKENS, "cpu", 60)
    with watched(lm) as passes:
        timing = worst(lm, 7, prompt=20, new=40)
    assert timing.prefill_seconds > 0
    assert timing.decode_seconds > 0
    assert passes.seen == [(1, 1, 1), (3, 20, 20), *((7, 1, length) for length in (57, 58, 59))]
    assert set(passes.pools) == {(7, 60)}, "all slots exist and are full during the prefill"


def test_shorter_prompts_are_tried_if_the_longest_do_not_fill_a_pass(
    models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = models("llama")
    for most, expected in ((60, [(3, 20, 20)]), (79, [(4, 19, 19), (3, 20, 20)]), (19, [(1, 20, 20)])):
        monkeypatch.setitem(slots.PREFILL_TOKENS, "cpu", most)
        with watched(lm) as passes:
            worst(lm, 5, prompt=20, new=2)
        assert [seen for seen in passes.seen if seen[1] > 1] == expected
    monkeypatch.setitem(slots.PREFILL_TOKENS, "cpu", 79)
    with watched(lm) as passes:
        worst(lm, 3, prompt=20, new=2)
    assert [seen for seen in passes.seen if seen[1] > 1] == [(3, 20, 20)], "there is no fourth row to prefill"


def test_times_in_slots_cover_all_prompts_and_one_decode_step(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = models("llama")
    seconds = 0.0

    def forward(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal seconds
        tokens = kwargs["input_ids"].shape[1]
        seconds += 1.0 if tokens > 1 else 0.25

    monkeypatch.setitem(slots.PREFILL_TOKENS, "cpu", 79)
    monkeypatch.setattr("partita.lm.slots.worst.now", lambda device: seconds)
    assert lm.slot_support
    hook = lm.base.register_forward_pre_hook(forward, with_kwargs=True)
    try:
        timing = worst(lm, 12, prompt=20, new=40)
        assert (timing.prefill_seconds, timing.decode_seconds) == (4.0, 0.25), "three prompts per pass"
        assert worst(lm, 12, prompt=20, new=1).decode_seconds == 0
        assert lm.time_decode_step(12, length=30, options=GenerationOptions(GREEDY)) == 0.25
    finally:
        hook.remove()


@pytest.mark.parametrize("kind", WINDOWED)
def test_rows_longer_than_a_sliding_window_are_probed_in_slots(models: Any, kind: str) -> None:
    lm = models(kind)
    with watched(lm) as passes:
        worst(lm, 3, prompt=20, new=7)
    assert passes.pools
    assert len(passes.seen) >= 3 + 1


@pytest.mark.parametrize("kind", OTHER)
def test_with_any_other_cache_the_whole_generation_is_run(models: Any, kind: str) -> None:
    lm = models(kind)
    with watched(lm) as passes:
        timing = worst(lm, 3, prompt=20, new=12)
    assert timing.prefill_seconds > 0
    assert timing.decode_seconds > 0
    assert passes.seen[-12:] == [(3, 20, 20), *((3, 1, place) for place in range(21, 32))]


@BOTH
@pytest.mark.parametrize("kind", ends([*PLAIN, *WINDOWED, *OTHER]))
def test_random_state_and_mode_are_restored_and_caches_are_freed(models: Any, kind: str, slots: bool) -> None:
    lm = models(kind)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    lm.module.train()
    options = GenerationOptions({"do_sample": True, "num_beams": 1, "top_k": 5}, slots=slots)
    gc.collect()
    gc.disable()
    try:
        with watched(lm) as passes:
            lm.generate_worst_case(2, prompt_tokens=9, new_tokens=11, options=options)
            lm.time_decode_step(2, length=12, options=options)
        assert passes.caches
        assert bool(passes.pools) == (slots and kind in (*SLOTTED, *WINDOWED))
        # No garbage collection runs before the next probe: memory in reference cycles would count as held.
        assert not any(cache() is not None for cache in passes.caches)
    finally:
        gc.enable()
        training = {part.training for part in lm.module.modules()}
        lm.module.eval()
    assert training == {True}
    assert torch.equal(torch.get_rng_state(), before)


OPTIONS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3, "length_penalty": 0.5, "early_stopping": True},
    "sampled beams": {"num_beams": 2, "do_sample": True, "top_k": 0},
    "sampled": {"do_sample": True, "top_k": 7, "top_p": 0.9, "min_p": 0.01, "temperature": 0.7},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "bad_words_ids": [[5, 6]]},
    "least length": {"min_new_tokens": 5, "exponential_decay_length_penalty": [2, 1.1]},
    "least tokens": {"min_new_tokens": 5},
    "suppressed": {"suppress_tokens": [5, 6], "begin_suppress_tokens": [7]},
    "guided": {"guidance_scale": 1.5},
}


@BOTH
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_runs_for_a_model_that_is_not_trained(
    models: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], slots: bool
) -> None:
    lm = models("llama")
    monkeypatch.setattr(lm, "trainable", False)
    assert worst(lm, 3, options, prompt=5, new=6, slots=slots).decode_seconds > 0
    assert lm.time_decode_step(3, length=9, options=GenerationOptions(GREEDY | options, slots=slots)) > 0


@BOTH
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("prompt", "new"), [(1, 1), (1, 2), (5, 6), (1, 7), (30, 20)])
def test_every_option_runs_with_any_lengths(
    models: Any, options: dict[str, Any], prompt: int, new: int, slots: bool
) -> None:
    lm = models("llama")
    stopped = GenerationOptions(GREEDY | options, stop=("stop",), slots=slots)
    with watched(lm) as passes:
        timing = worst(lm, 3, options, prompt=prompt, new=new, slots=slots)
        step = lm.time_decode_step(3, length=prompt + new, options=stopped)
    assert timing.prefill_seconds > 0
    assert (timing.decode_seconds > 0) == (new > 1)
    assert step > 0
    rows = 3 * options.get("num_beams", 1)
    # A single token is prefilled to allocate the pool.
    assert {seen[0] for seen in passes.seen} <= ({1, 3} if passes.pools else {3, rows})
    assert bool(passes.pools) == (slots and not {"num_beams", "guidance_scale"} & options.keys())
    assert max(seen[2] for seen in passes.seen) >= prompt + new - 1


@BOTH
@pytest.mark.parametrize("options", [{}, OPTIONS["beams"], OPTIONS["least length"]], ids=["greedy", "beams", "least"])
def test_the_worst_case_ignores_end_tokens(
    models: Any, options: dict[str, Any], slots: bool, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    lm = models("llama")
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]
    with watched(lm) as passes:
        worst(lm, 3, options, prompt=9, new=20, slots=slots)
    said = passes.seen
    end = lm.base.generation_config.eos_token_id

    def ends(module: Any, args: Any, output: Any) -> None:
        output.logits[..., end] = 1e4

    hook = lm.base.register_forward_hook(ends)
    try:
        with watched(lm) as passes:
            assert worst(lm, 3, options, prompt=9, new=20, slots=slots).decode_seconds > 0
        assert lm.time_decode_step(3, length=20, options=GenerationOptions(GREEDY | options, slots=slots)) > 0
    finally:
        hook.remove()
    assert passes.seen == said
    assert not caplog.records


def test_one_row_of_several_is_a_token_shorter_so_that_there_is_a_mask(models: Any) -> None:
    requests = worst_requests(models("llama"), 4, prompt_tokens=9, new_tokens=2, support=PADDED)
    assert [len(request.input_ids) for request in requests] == [9, 9, 9, 8]
    (alone,) = worst_requests(models("llama"), 1, prompt_tokens=9, new_tokens=2, support=PADDED)
    assert len(alone.input_ids) == 9
    shortest = worst_requests(models("llama"), 3, prompt_tokens=1, new_tokens=1, support=PADDED)
    assert {len(request.input_ids) for request in shortest} == {1}


ADAPTERS: dict[str, tuple[dict[str, Any], bool]] = {
    "lora": ({"type": "lora", "r": 4}, True),
    "prompt tuning": ({"type": "prompt_tuning", "num_virtual_tokens": 3}, False),
    "p-tuning": ({"type": "p_tuning", "num_virtual_tokens": 3}, False),
    "prefix tuning": ({"type": "prefix_tuning", "num_virtual_tokens": 3}, False),
}


@BOTH
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize(("adapter", "skips"), ADAPTERS.values(), ids=ADAPTERS)
def test_adapters_run_up_to_the_end_of_the_context(
    small: Any, architecture: str, adapter: dict[str, Any], skips: bool, slots: bool
) -> None:
    lm = small.load(small.config(architecture=architecture, adapter=adapter))
    prompt = lm.context_length - 9
    with watched(lm) as passes:
        assert worst(lm, 3, prompt=prompt, new=9, slots=slots).decode_seconds > 0
    assert bool(passes.pools) == (slots and skips), "virtual tokens before the prompt need batches"
    assert (len(passes.seen) < 9) == skips
    assert passes.seen[-1][2] == CONTEXT - 1, "virtual tokens are in the cache too"
    assert lm.time_decode_step(3, length=prompt + 8, options=GenerationOptions(GREEDY, slots=slots)) > 0


@BOTH
def test_models_in_8_bits_run_in_slots_and_batches(small: Any, base_folder: Path, slots: bool) -> None:
    config = small.config(base_model=str(base_folder), quantization={"bits": 8}, adapter={"type": "lora", "r": 4})
    lm = small.load(config)
    with watched(lm) as passes:
        assert worst(lm, 2, prompt=20, new=30, slots=slots).decode_seconds > 0
    assert passes.seen[-1] == (2, 1, 49)
    assert bool(passes.pools) == slots


# The end of learned positions


@pytest.mark.parametrize(
    ("kind", "prompt", "wanted", "reached"),
    [
        ("gpt2", 20, 30, 30),
        ("gpt2", 34, 30, 30),
        ("gpt2", 35, 30, 29),
        ("gpt2", 63, 30, 1),
        ("opt", 60, 30, 4),
        ("llama", 60, 30, 30),
        ("mamba", 600, 30, 30),
    ],
)
def test_only_learned_positions_limit_the_new_tokens(
    models: Any, kind: str, prompt: int, wanted: int, reached: int
) -> None:
    lm = models(kind)
    assert lm.reachable_tokens(prompt, wanted) == reached
    # The reported number of tokens can be run: rows with rotary positions may exceed the context.
    if prompt < CONTEXT:
        assert worst(lm, 2, prompt=prompt, new=reached).prefill_seconds > 0
        assert worst(lm, 2, prompt=prompt, new=reached, slots=False).prefill_seconds > 0


@BOTH
@pytest.mark.parametrize("kind", ["gpt2", "opt"])
@pytest.mark.parametrize("length", [1, 30, CONTEXT - 4, CONTEXT - 1, CONTEXT])
def test_a_decode_step_is_timed_near_the_end_of_learned_positions(
    models: Any, kind: str, length: int, slots: bool
) -> None:
    lm = models(kind)
    with watched(lm) as passes:
        assert lm.time_decode_step(3, length=length, options=GenerationOptions(GREEDY, slots=slots)) > 0
    assert bool(passes.pools) == slots
    last = passes.seen[-1][2]
    assert min(length, CONTEXT - 6) <= last <= CONTEXT


@BOTH
@pytest.mark.parametrize("kind", ["llama", "bloom", *WINDOWED, *OTHER])
def test_a_decode_step_is_timed_at_the_given_length(models: Any, kind: str, slots: bool) -> None:
    lm = models(kind)
    with watched(lm) as passes:
        assert lm.time_decode_step(3, length=40, options=GenerationOptions(GREEDY, slots=slots)) > 0
    timed = [held for rows, tokens, held in passes.seen if tokens == 1 and held >= 39]
    assert timed
    assert all(40 <= held <= 46 for held in timed)
    if kind in PLAIN:
        assert all(tokens <= 2 for _, tokens, _ in passes.seen), "no long prompt is prefilled for it"


@BOTH
@pytest.mark.parametrize("kind", SLOTTED)
@pytest.mark.parametrize(("length", "shared"), [(40, 0), (40, 7), (40, 8), (40, 39), (CONTEXT, CONTEXT - 1)])
def test_a_decode_step_is_timed_after_a_shared_prefix(
    models: Any, kind: str, length: int, shared: int, slots: bool
) -> None:
    lm = models(kind)
    options = GenerationOptions(GREEDY, slots=slots)
    with watched(lm) as passes:
        assert lm.time_decode_step(3, length=length, options=options, shared_tokens=shared) > 0
    assert bool(passes.pools) == slots


# Its memory

IN_BATCHES: dict[str, dict[str, Any]] = {
    "grouped queries, greedy": {"rows": 160, "prompt": 24, "new": 40, "base": {"num_key_value_heads": 2}},
    "grouped queries, beams": {
        "rows": 64,
        "prompt": 24,
        "new": 40,
        "base": {"num_key_value_heads": 2},
        "options": {"num_beams": 3},
    },
    "learned positions, up to their end": {"rows": 96, "prompt": 16, "new": 48, "base": {"architecture": "gpt2"}},
    "sampled": {
        "rows": 144,
        "prompt": 24,
        "new": 40,
        "base": {"architecture": "gpt_neox"},
        "options": {"do_sample": True, "top_k": 5},
    },
    "experts, long prompts": {"rows": 64, "prompt": 56, "new": 8, "base": {"architecture": "mixtral"}},
}
IN_SLOTS: dict[str, dict[str, Any]] = {
    "slots, grouped queries": {"rows": 600, "prompt": 40, "new": 24, "base": {"num_key_value_heads": 2}},
    "slots, learned positions, up to their end": {
        "rows": 600,
        "prompt": 48,
        "new": 16,
        "base": {"architecture": "gpt2"},
    },
    "slots, sampled": {
        "rows": 600,
        "prompt": 52,
        "new": 12,
        "base": {"architecture": "gpt_neox"},
        "options": {"do_sample": True, "top_k": 5},
    },
    "slots, experts": {"rows": 600, "prompt": 56, "new": 8, "base": {"architecture": "mixtral"}},
    "slots, common beginning": {
        "rows": 600,
        "prompt": 56,
        "new": 8,
        # As many as there are heads: the lists of the requests, 2.5 MB, are then a small part of the peak.
        "base": {"num_key_value_heads": 4},
        "prefix": 40,
    },
    "slots, penalties": {
        "rows": 600,
        "prompt": 58,
        "new": 6,
        "base": {"num_key_value_heads": 2},
        "options": {"repetition_penalty": 1.3},
    },
}
MEASURED = IN_BATCHES | IN_SLOTS
NO_PIECES = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""Return freed memory to the system at once: heap fragments of previous cases were 7 MB of 90."""
MEASURE = """
import json, os, sys
from pathlib import Path
from partita.generation.generator import generate_requests
from partita.generation.oom_backoff import BatchBudget
from partita.generation.requests import GenerationSettings
from partita.lm.base import GenerationOptions, GenerationRequest
from partita.lm.load_model import load_model
from partita.tokenizers.load import load_tokenizer
from partita.lm.batch_generation.worst_case import worst_requests
from partita_schema.config import Config
from partita_trainers.batch_size.device_memory import device_memory

def load(base, sections):
    config = Config.model_validate({
        "base_model": {"type": "scratch", "size": "tiny", "tokenizer": "byte", "context_length": 64, **base},
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "trainer": {"type": "finetune"}, **sections})
    tokenizer = load_tokenizer(config, folder=Path(), texts=list)
    return load_model(config, folder=Path(), tokenizer=tokenizer, trainable=True)

def peaks(rows, prompt, new, slots, base={}, sections={}, options={}, prefix=0):
    lm = load(base, sections)
    memory = device_memory(lm.device)
    chosen = GenerationOptions({"do_sample": False, "num_beams": 1} | options, slots=slots)
    assert (lm.why_no_slots(chosen, tokens=prompt + new) is None) == slots

    # Made before anything is measured: 700 prompts as Python's lists come to 3 MB.
    support = lm.batch_support(chosen, tokens=prompt + new)
    requests = worst_requests(lm, rows, prompt_tokens=prompt, new_tokens=new, support=support)
    begun = requests[0].input_ids[:prefix]
    # More than there are slots, so that prompts are read into slots that were full.
    longer = [GenerationRequest([*begun, *one.input_ids[prefix:]], new) for one in requests]
    shorter = [GenerationRequest(one.input_ids[:-1], new) for one in longer[:80]]

    def whole():
        if slots:
            capacity = BatchBudget(rows)
            answers = generate_requests(lm, [*longer, *shorter], GenerationSettings(chosen, capacity, 0))
        else:
            answers = lm.generate(requests, chosen, seed=0)
        assert any(answer.finish_reason == "length" for answer in answers)

    def worst():
        lm.generate_worst_case(
            rows, prompt_tokens=prompt, new_tokens=new, options=chosen, shared_tokens=prefix
        )

    # What is imported and set up once only adds to the first peak.
    found = [float("inf")] * 2
    for _ in range(2):
        for place, work in enumerate((whole, worst)):
            with memory.measure() as peak:
                work()
            found[place] = min(found[place], peak.used_bytes)
    return found

def forked(case):
    # A process whose heap no other case has used.
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, json.dumps(peaks(**case)).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as answer:
        found = json.load(answer)
    os.waitpid(child, 0)
    return found

print(json.dumps({name: forked(case) for name, case in json.loads(sys.argv[1]).items()}))
"""


@pytest.fixture(scope="module")
def peaks() -> dict[str, list[float]]:
    """Return the peaks of the whole generation and of its worst case for each measured case, in a separate process."""
    if sys.platform != "linux":
        pytest.skip("peaks are measured on Linux only")
    cases = {name: {"slots": name in IN_SLOTS, **case} for name, case in MEASURED.items()}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEASURE, json.dumps(cases)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | NO_PIECES,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("case", MEASURED)
@pytest.mark.long
def test_the_peak_of_the_worst_case_equals_that_of_the_whole_generation(
    peaks: dict[str, list[float]], case: str
) -> None:
    whole, found = peaks[case]
    assert whole > 20e6, "too small: the rounding of the allocator would dominate"
    assert found == pytest.approx(whole, rel=0.05, abs=3e6)
