"""Generation at its worst: the passes that are run, what they leave behind, and the memory of the whole generation."""

import gc
import json
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

from partita.lm.base import GenerationOptions
from partita.lm.worst_case import worst_requests

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
"""Models whose cache simply grows."""
OTHER: dict[str, dict[str, Any]] = {
    "mistral": {**SHAPE, "sliding_window": 16},
    "gemma3_text": {
        **SHAPE,
        "head_dim": 16,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mamba": STATE_SPACE,
    "lfm2": {**SHAPE, "layer_types": ["conv", "full_attention"]},
}
"""Models with windows, states, or both kinds of layers."""


@pytest.fixture(scope="module")
def models(small: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from a transformers model type to a tiny model of it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = small.load(small.config()).tokenizer
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    known: dict[str, Any] = {}

    def model(kind: str) -> Any:
        if kind not in known:
            folder = tmp_path_factory.mktemp(kind)
            shape = (PLAIN | OTHER)[kind]
            config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), **shape, **special)
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            known[kind] = small.load(small.config(base_model=str(folder)), trainable=False)
        return known[kind]

    return model


@contextmanager
def watched(lm: Any) -> Iterator[Any]:
    """Inside, passes are taken down: rows, tokens that are read, tokens in the cache after them; and the caches."""

    class Passes:
        seen: list[tuple[int, int, int]] = []
        caches: list[weakref.ref[Any]] = []

    passes = Passes()
    passes.seen, passes.caches = [], []

    def note(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        rows, tokens = (ids if ids is not None else kwargs["inputs_embeds"]).shape[:2]
        mask = kwargs.get("attention_mask")
        # Where nothing is padded, and in state spaces once the prompts are read, there is no mask.
        held = passes.seen[-1][2] if passes.seen else 0
        passes.seen.append((rows, tokens, mask.shape[1] if mask is not None else held + tokens))
        cache = output.get("past_key_values", output.get("cache_params"))
        passes.caches.append(weakref.ref(cache))

    hook = lm.base.register_forward_hook(note, with_kwargs=True)
    try:
        yield passes
    finally:
        hook.remove()


def worst(lm: Any, rows: int, options: dict[str, Any] | None = None, *, prompt: int, new: int) -> Any:
    return lm.generate_worst_case(
        rows, prompt_tokens=prompt, new_tokens=new, options=GenerationOptions(GREEDY | (options or {}))
    )


# What is run


@pytest.mark.parametrize("kind", PLAIN)
def test_of_a_plain_cache_the_prompts_are_read_and_the_last_tokens_decoded(models: Any, kind: str) -> None:
    lm = models(kind)
    with watched(lm) as passes:
        timing = worst(lm, 3, prompt=20, new=40)
    assert timing.prefill_seconds > 0
    assert timing.decode_seconds > 0
    assert passes.seen[0] == (3, 20, 20)
    assert passes.seen[-1] == (3, 1, 59), "the last token is not read any more"
    assert len(passes.seen) <= 6


@pytest.mark.parametrize("kind", OTHER)
def test_of_any_other_cache_the_whole_generation_is_run(models: Any, kind: str) -> None:
    lm = models(kind)
    with watched(lm) as passes:
        timing = worst(lm, 3, prompt=20, new=12)
    assert timing.prefill_seconds > 0
    assert timing.decode_seconds > 0
    assert passes.seen[-12:] == [(3, 20, 20), *((3, 1, place) for place in range(21, 32))]


@pytest.mark.parametrize("kind", [*PLAIN, *OTHER])
def test_random_state_and_mode_are_as_before_and_no_cache_is_held(models: Any, kind: str) -> None:
    lm = models(kind)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    lm.module.train()
    options = GenerationOptions({"do_sample": True, "num_beams": 1, "top_k": 5})
    gc.collect()
    gc.disable()
    try:
        with watched(lm) as passes:
            lm.generate_worst_case(2, prompt_tokens=9, new_tokens=11, options=options)
            lm.time_decode_step(2, length=12, options=options)
        assert passes.caches
        # Before the next probe nobody looks for garbage: what is held only by itself would count as held.
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
    "suppressed": {"suppress_tokens": [5, 6], "begin_suppress_tokens": [7]},
    "guided": {"guidance_scale": 1.5},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("prompt", "new"), [(1, 1), (1, 2), (5, 6), (1, 7), (30, 20)])
def test_every_option_runs_with_any_lengths(models: Any, options: dict[str, Any], prompt: int, new: int) -> None:
    lm = models("llama")
    with watched(lm) as passes:
        timing = worst(lm, 3, options, prompt=prompt, new=new)
        step = lm.time_decode_step(3, length=prompt + new, options=GenerationOptions(GREEDY | options, stop=("stop",)))
    assert timing.prefill_seconds > 0
    assert (timing.decode_seconds > 0) == (new > 1)
    assert step > 0
    rows = 3 * options.get("num_beams", 1)
    assert {seen[0] for seen in passes.seen} <= {3, rows}
    assert max(seen[2] for seen in passes.seen) >= prompt + new - 1


def test_one_row_of_several_is_a_token_shorter_so_that_there_is_a_mask(models: Any) -> None:
    requests = worst_requests(models("llama"), 4, prompt_tokens=9, new_tokens=2)
    assert [len(request.input_ids) for request in requests] == [9, 9, 9, 8]
    assert [
        len(request.input_ids) for request in worst_requests(models("llama"), 1, prompt_tokens=9, new_tokens=2)
    ] == [9]
    assert {
        len(request.input_ids) for request in worst_requests(models("llama"), 3, prompt_tokens=1, new_tokens=1)
    } == {1}


ADAPTERS: dict[str, tuple[dict[str, Any], bool]] = {
    "lora": ({"type": "lora", "r": 4}, True),
    "prompt tuning": ({"type": "prompt_tuning", "num_virtual_tokens": 3}, False),
    "p-tuning": ({"type": "p_tuning", "num_virtual_tokens": 3}, False),
    "prefix tuning": ({"type": "prefix_tuning", "num_virtual_tokens": 3}, False),
}


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize(("adapter", "skips"), ADAPTERS.values(), ids=ADAPTERS)
def test_adapters_run_up_to_the_end_of_the_context(
    small: Any, architecture: str, adapter: dict[str, Any], skips: bool
) -> None:
    lm = small.load(small.config(architecture=architecture, adapter=adapter))
    prompt = lm.context_length - 9
    with watched(lm) as passes:
        assert worst(lm, 3, prompt=prompt, new=9).decode_seconds > 0
    assert (len(passes.seen) < 9) == skips
    assert passes.seen[-1][2] == CONTEXT - 1, "virtual tokens lie in the cache as well"
    assert lm.time_decode_step(3, length=prompt + 8, options=GenerationOptions(GREEDY)) > 0


def test_eight_bits_run_as_they_are_used(small: Any, base_folder: Path) -> None:
    config = small.config(base_model=str(base_folder), quantization={"bits": 8}, adapter={"type": "lora", "r": 4})
    lm = small.load(config)
    with watched(lm) as passes:
        assert worst(lm, 2, prompt=20, new=30).decode_seconds > 0
    assert passes.seen[-1] == (2, 1, 49)


# Where positions end


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
def test_new_tokens_end_with_learned_positions_only(
    models: Any, kind: str, prompt: int, wanted: int, reached: int
) -> None:
    lm = models(kind)
    assert lm.reachable_tokens(prompt, wanted) == reached
    # What is said to be reached can be run: rotary rows may go on beyond the context beside others.
    if prompt < CONTEXT:
        assert worst(lm, 2, prompt=prompt, new=reached).prefill_seconds > 0


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
@pytest.mark.parametrize("length", [1, 30, CONTEXT - 4, CONTEXT - 1, CONTEXT])
def test_a_decode_step_is_timed_near_the_end_of_learned_positions(models: Any, kind: str, length: int) -> None:
    lm = models(kind)
    with watched(lm) as passes:
        assert lm.time_decode_step(3, length=length, options=GenerationOptions(GREEDY)) > 0
    last = passes.seen[-1][2]
    assert min(length, CONTEXT - 6) <= last <= CONTEXT


@pytest.mark.parametrize("kind", ["llama", "bloom", *OTHER])
def test_a_decode_step_is_timed_at_the_length_that_is_asked_for(models: Any, kind: str) -> None:
    lm = models(kind)
    with watched(lm) as passes:
        assert lm.time_decode_step(3, length=40, options=GenerationOptions(GREEDY)) > 0
    timed = [held for rows, tokens, held in passes.seen if tokens == 1 and held >= 39]
    assert timed
    assert all(40 <= held <= 46 for held in timed)
    if kind in PLAIN:
        assert all(tokens <= 2 for _, tokens, _ in passes.seen), "no long prompt is read for it"


# Its memory

MEASURED: dict[str, dict[str, Any]] = {
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
MEASURE = """
import json, sys
from pathlib import Path
from partita.lm.base import GenerationOptions
from partita.lm.huggingface import load_model
from partita.lm.tokenizers import load_tokenizer
from partita.lm.worst_case import worst_requests
from partita_schema.config import Config
from partita_trainers.batch_size.memory import device_memory

def load(base, sections):
    config = Config.model_validate({
        "base_model": {"type": "scratch", "size": "tiny", "tokenizer": "byte", "context_length": 64, **base},
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "trainer": {"type": "finetune"}, **sections})
    tokenizer = load_tokenizer(config, folder=Path(), texts=list)
    return load_model(config, folder=Path(), tokenizer=tokenizer, trainable=True)

def peaks(rows, prompt, new, base={}, sections={}, options={}):
    lm = load(base, sections)
    memory = device_memory(lm.device)
    chosen = GenerationOptions({"do_sample": False, "num_beams": 1} | options)

    def whole():
        requests = worst_requests(lm, rows, prompt_tokens=prompt, new_tokens=new)
        answers = lm.generate(requests, chosen, seed=0)
        assert any(answer.finish_reason == "length" for answer in answers)

    def worst():
        lm.generate_worst_case(rows, prompt_tokens=prompt, new_tokens=new, options=chosen)

    # What the heap happens to hold in pieces only ever adds to a peak.
    found = [float("inf")] * 2
    for _ in range(3):
        for place, work in enumerate((whole, worst)):
            with memory.measure() as peak:
                work()
            found[place] = min(found[place], peak.used_bytes)
    return found

print(json.dumps({name: peaks(**case) for name, case in json.loads(sys.argv[1]).items()}))
"""


@pytest.fixture(scope="module")
def peaks() -> dict[str, list[float]]:
    """Peaks of the whole generation and of the worst case of each measured case, in a process of its own."""
    if sys.platform != "linux":
        pytest.skip("peaks are measured on Linux only")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEASURE, json.dumps(MEASURED)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("case", MEASURED)
def test_its_peak_is_that_of_the_whole_generation(peaks: dict[str, list[float]], case: str) -> None:
    whole, found = peaks[case]
    assert whole > 20e6, "small enough, and what the allocator rounds would decide"
    assert found == pytest.approx(whole, rel=0.05, abs=3e6)
