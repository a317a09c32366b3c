"""Tests of the check that batches give the results of single rows."""

import logging
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from partita.generation.engine import choose_engine
from partita.generation.oom_backoff import BatchBudget
from partita.generation.requests import GenerationSettings
from partita.generation.static_batches import requests_in_batches
from partita.lm.base import PADDED, BatchSupport, GenerationOptions
from partita_schema.errors import ModelError, OutOfMemory
from partita_trainers.base import Batch

from ....properties import ends

GREEDY = GenerationOptions({"do_sample": False, "num_beams": 1})
IN_BATCHES = GenerationOptions({"do_sample": False, "num_beams": 1}, slots=False)
BEAMS = GenerationOptions({"do_sample": False, "num_beams": 2})
CHOSEN = {
    "llama": ("slots", "padded"),
    "gpt2": ("slots", "padded"),
    "mixtral": ("slots", "padded"),
    "mistral": ("slots", "padded"),
    "mamba": ("padded", "padded"),
    "recurrent_gemma": ("equal lengths", "equal lengths"),
    "bart": ("equal lengths", "equal lengths"),
    "rwkv": ("one row", "one row"),
    "xlnet": ("equal lengths", "equal lengths"),
}
"""How some architectures are batched, and how they are batched when slots are disabled."""
SPREAD = (
    *("bert", "bloom", "cpmant", "cohere", "falcon", "falcon_mamba", "gemma3_text", "git", "gpt_neo", "gpt_neox"),
    *("gptj", "jamba", "mamba2", "opt", "phi3", "qwen3", "qwen3_next", "reformer", "starcoder2", "xglm", "zamba2"),
)
"""More architectures for each way of batching; benchmarks/architectures.py measures all."""


@pytest.fixture(scope="module")
def tiny(architectures: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return tiny models by architecture, each made once."""
    made: dict[str, Any] = {}

    def get(kind: str) -> Any:
        if kind not in made:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made[kind] = architectures.saved_and_loaded(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return get


def measured(architectures: ModuleType, kind: str, folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return architectures.measure(kind, folder)


# Architectures


@pytest.mark.parametrize("kind", ends(CHOSEN))
def test_answers_in_slots_and_batches_equal_those_of_single_rows(architectures, kind: str, tmp_path: Path) -> None:
    found = measured(architectures, kind, tmp_path)
    assert found.compared >= 13
    assert found.differing == []
    assert (found.way, found.batches) == CHOSEN[kind]


def test_the_page_of_architectures_lists_every_architecture_of_transformers(architectures) -> None:
    sections = architectures.PAGE.read_text("utf8").split(architectures.SECTION)
    named = [re.findall(r"^\| `([\w.-]+)` \|", section, re.MULTILINE) for section in sections]
    assert named == [architectures.kinds(), architectures.encoder_decoder_kinds()]


def without_percent(text: str) -> str:
    """Return a text without its percentages, whose last digits differ between machines."""
    return re.sub(r"[\d.]+%", "%", text)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", SPREAD)
def test_an_architecture_is_batched_as_its_page_says(architectures, kind: str, tmp_path: Path) -> None:
    found = measured(architectures, kind, tmp_path)
    assert found.differing == []
    assert without_percent(architectures.line(found)) in without_percent(architectures.PAGE.read_text("utf8"))


def test_generation_settings_of_every_second_architecture_are_applied(architectures, tmp_path: Path) -> None:
    kinds = architectures.kinds()
    shipping = [kind for kind in (*CHOSEN, *SPREAD) if kind in kinds[::2]]
    assert set(kinds) >= {*CHOSEN, *SPREAD}
    assert len(shipping) > 9
    lm = architectures.saved_and_loaded(shipping[0], tmp_path)
    assert lm.checkpoint_generation["repetition_penalty"] == 1.3
    assert lm.original_generation_config.suppress_tokens == list(range(40, 60))


# Results of the check


@pytest.mark.parametrize(
    ("kind", "rows", "reason"),
    [
        ("llama", "padded", None),
        ("mamba", "padded", None),
        ("bart", "equal lengths", r"BartForCausalLM changes its logits by \d+% beside padding"),
        ("recurrent_gemma", "equal lengths", r"RecurrentGemmaForCausalLM changes its logits by \d+% beside padding"),
        ("rwkv", "one row", r"RwkvForCausalLM changes its logits by \d+% beside another row"),
    ],
)
def test_rows_are_batched_as_far_as_logits_stay_the_same(tiny, kind: str, rows: str, reason: str | None) -> None:
    support = tiny(kind).batch_support(GREEDY, tokens=30)
    assert support.rows == rows
    assert support.reason is None if reason is None else re.fullmatch(reason, support.reason)


@pytest.mark.parametrize(
    ("kind", "how", "why"),
    [
        ("llama", "in sorted batches", ""),
        ("bart", "in batches of prompts of equal length", r"; Bart\w+ changes its logits by \d+% beside padding"),
        ("rwkv", "one row at a time", r"; Rwkv\w+ changes its logits by \d+% beside another row"),
    ],
)
def test_the_log_says_how_rows_are_batched_and_why(tiny, kind: str, how: str, why: str, caplog) -> None:
    with caplog.at_level(logging.INFO, logger="partita"):
        choose_engine(tiny(kind), np.array([3, 5], dtype=np.int32), options=IN_BATCHES, max_new_tokens=2)
    wanted = f"answers are generated {how}, not in slots: generation.slots is false{why}"
    assert re.fullmatch(wanted, caplog.messages[-1])


def test_models_with_slots_skip_the_check_of_batches(tiny) -> None:
    lm = tiny("gpt2")
    assert choose_engine(lm, np.array([3, 5], dtype=np.int32), options=GREEDY, max_new_tokens=2) == "slots"
    assert "short_batch_support" not in vars(lm)


def test_beam_search_is_refused_if_rows_influence_each_other(tiny) -> None:
    with pytest.raises(ModelError, match=r"^generation\.num_beams: beams go through the model together, and Rwkv"):
        tiny("rwkv").batch_support(BEAMS, tokens=9)
    assert tiny("llama").batch_support(BEAMS, tokens=9) == PADDED


@pytest.mark.parametrize(
    ("changes", "limit", "reason"),
    [
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            64,
            "rotary positions depend on the longest row",
        ),
        ({"index_topk": 12}, 12, "attention chooses 12 tokens, padding among them"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, None, ""),
    ],
)
def test_limits_that_only_long_rows_reach_are_known_beforehand(
    tiny, changes: dict[str, Any], limit: int | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = tiny("llama")
    for name, value in changes.items():
        monkeypatch.setattr(lm.base.config, name, value, raising=False)
    assert lm.batch_support(GREEDY, tokens=limit or 1000) == PADDED
    if limit is not None:
        message = f"beyond {limit} tokens {reason}, and there are rows of {limit + 1}"
        assert lm.batch_support(GREEDY, tokens=limit + 1) == BatchSupport("equal lengths", message)


def test_out_of_memory_in_the_check_says_nothing_about_the_model(small) -> None:
    lm = small.load(small.config())
    full = [True]

    def refuse(*given: Any) -> None:
        if full[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    lm.base.register_forward_pre_hook(refuse)
    with pytest.raises(OutOfMemory, match="4 rows of 11 tokens do not fit in memory next to the model; free some, or"):
        lm.batch_support(GREEDY, tokens=20)
    with pytest.raises(OutOfMemory, match="do not fit in memory"):
        lm.check_loss()
    full[0] = False
    assert lm.batch_support(GREEDY, tokens=20) == PADDED


def test_the_check_includes_virtual_tokens_before_the_prompts(small) -> None:
    for kind in ("prompt_tuning", "prefix_tuning"):
        lm = small.load(small.config(adapter={"type": kind, "num_virtual_tokens": 3}))
        assert lm.batch_support(GREEDY, tokens=20) == PADDED


def test_a_prompt_of_one_token_does_not_continue_the_previous_row(small, tiny) -> None:
    lm = tiny("recurrent_gemma")
    capacity = BatchBudget(1)
    one, *others = small.requests((1, 8), (9, 8), (5, 8))

    def answer(requests: list[Any]) -> Any:
        return requests_in_batches(lm, requests, GenerationSettings(GREEDY, capacity, 0))[0]

    assert answer([one, *others]) == answer([one])


# The loss


def test_rwkv_is_saved_unchanged_after_generation(architectures, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules["tiny_models"].SHAPES, "rwkv", {"num_hidden_layers": 8})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lm = architectures.saved_and_loaded("rwkv", tmp_path / "made")
    before = {name: tensor.clone() for name, tensor in lm.base.state_dict().items()}
    wanted = lm.base(torch.tensor([[5, 6, 7]]), use_cache=False).logits
    lm.save(tmp_path / "saved")
    again = type(lm.base).from_pretrained(tmp_path / "saved").eval()
    assert all(torch.equal(before[name], tensor) for name, tensor in again.state_dict().items())
    assert torch.equal(again(torch.tensor([[5, 6, 7]]), use_cache=False).logits, wanted)
    original = type(lm.base).from_pretrained(tmp_path / "made").eval()
    assert original.config.rescale_every > 0
    theirs = original(torch.tensor([[5, 6, 7]]), use_cache=False).logits
    assert torch.allclose(theirs, wanted, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "rwkv", "recurrent_gemma", "mamba", "bart"])
def test_the_loss_of_padded_rows_is_the_sum_of_their_losses_alone(small, tiny, kind: str) -> None:
    lm = tiny(kind)
    lm.check_loss()
    batch = small.batch(lengths=(24, 5, 17, 2))
    rows = [
        Batch(
            batch.input_ids_BT[row : row + 1, :length],
            batch.labels_BT[row : row + 1, :length],
            batch.lengths_B[row : row + 1],
            batch.keys[row : row + 1],
        )
        for row, length in enumerate(batch.lengths_B.tolist())
    ]
    with torch.no_grad():
        together = lm.loss(lm.module, batch).item()
        alone = sum(lm.loss(lm.module, row).item() for row in rows)
    assert together == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("kind", ["xlnet", "cpmant"])
def test_a_model_that_sees_the_tokens_it_should_predict_is_refused_for_training(tiny, kind: str) -> None:
    with pytest.raises(ModelError, match=r"ForCausalLM|LMHeadModel") as refused:
        tiny(kind).check_loss()
    assert re.fullmatch(
        r"base_model: \w+ changes its logits by \d+% where other tokens or padding follow: it would learn its answers "
        r"by reading them; choose a model that sees only the tokens before",
        str(refused.value),
    )
