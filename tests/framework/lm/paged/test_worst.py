"""Tests of the worst case of a paged cache: what a search for batch sizes measures."""

from typing import Any

import pytest
import torch

from partita.lm.base import GenerationOptions
from partita.lm.batch_generation.worst_case import STEPS, TIMED_STEPS

PAGED = GenerationOptions({"do_sample": False, "repetition_penalty": 1.2}, kv_cache="paged")


@pytest.fixture(scope="module")
def llama(small: Any) -> Any:
    lm = small.load(small.config())
    assert lm.why_no_slots(PAGED, tokens=8) is None
    return lm


@pytest.fixture
def passes(llama: Any) -> Any:
    """Record the tokens and the last position of each forward pass, and the bytes of the cache."""
    seen: list[tuple[int, int, int]] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        held = sum(tensor.nbytes for tensor in kwargs["past_key_values"].held)
        seen.append((kwargs["input_ids"].numel(), int(kwargs["position_ids"].max()), held))

    hook = llama.base.register_forward_hook(note, with_kwargs=True)
    yield seen
    hook.remove()


@pytest.mark.parametrize(("shared", "computed"), [(0, 33), (20, 13)])
def test_a_group_is_prefilled_next_to_a_full_cache_and_the_last_tokens_are_decoded(
    llama: Any, passes: Any, shared: int, computed: int
) -> None:
    timing = llama.generate_worst_case(6, prompt_tokens=33, new_tokens=10, options=PAGED, shared_tokens=shared)
    assert timing.prefill_seconds > 0
    assert timing.decode_seconds > 0
    assert passes[0][:2] == ((20, 19) if shared else (1, 0)), "the prefix, or a token to allocate the cache"
    assert passes[1][:2] == (6 * computed, 32)
    assert [one[:2] for one in passes[2:]] == [(6, 43 - STEPS - 1 + step) for step in range(STEPS)]
    # 43 tokens of a row are 3 blocks of 16; two blocks are reserved, and two hold the prefix.
    text, blocks = llama.base.config, 6 * 3 + 2 + (2 if shared else 0)
    size = text.num_hidden_layers * 2 * text.num_key_value_heads * text.head_dim * 4
    assert {held for _, _, held in passes} == {blocks * 16 * size}


def test_a_decode_step_is_timed_at_the_given_length(llama: Any, passes: Any) -> None:
    before = torch.get_rng_state()
    assert llama.time_decode_step(3, length=40, options=PAGED) > 0
    assert len(passes) > 1
    assert [one[:2] for one in passes[1:]] == [(3, 39 + step) for step in range(TIMED_STEPS)][: len(passes) - 1]
    assert torch.equal(torch.get_rng_state(), before)
