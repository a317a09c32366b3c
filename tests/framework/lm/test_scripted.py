from pathlib import Path

import pytest
import torch

from partita.lm.base import GenerationOptions, GenerationRequest, GenerativeModel
from partita.lm.scripted import ScriptedModel
from partita_schema.errors import ResumeError

GREEDY = GenerationOptions({})


def ask(lm: ScriptedModel, prompt: str, *, limit: int = 100, stop: tuple[str, ...] = ()) -> tuple[str, str]:
    request = GenerationRequest(lm.tokenizer.encode(prompt), limit)
    (answer,) = lm.generate([request], GenerationOptions({}, stop=stop), seed=0)
    return answer.text, answer.finish_reason


def test_a_scripted_model_implements_the_interface_of_a_generative_model() -> None:
    lm: GenerativeModel = ScriptedModel(str.upper)
    assert lm.generate([GenerationRequest([40], 5)], GREEDY, seed=0)[0].finish_reason == "stop"


def test_answers_come_from_a_function_or_a_table() -> None:
    assert ask(ScriptedModel(str.upper), "né") == ("NÉ", "stop")
    assert ask(ScriptedModel({"a": "b"}), "a") == ("b", "stop")


def test_answers_are_cut_at_the_limit_and_at_stop_texts() -> None:
    lm = ScriptedModel(lambda prompt: "one two three")
    assert ask(lm, "x", limit=5) == ("one t", "length")
    assert ask(lm, "x", limit=13) == ("one two three", "length")
    assert ask(lm, "x", limit=14) == ("one two three", "stop")
    assert ask(lm, "x", stop=("three", " two")) == ("one", "stop")


def test_scripted_errors_are_raised_and_unknown_prompts_are_errors() -> None:
    lm = ScriptedModel({"bad": ValueError("as scripted")})
    with pytest.raises(ValueError, match="as scripted"):
        ask(lm, "bad")
    with pytest.raises(LookupError, match="no answer is scripted for the prompt 'other'"):
        ask(lm, "other")


def test_a_prompt_that_does_not_fit_the_context_is_an_error() -> None:
    with pytest.raises(ValueError, match="12 tokens do not fit the context of 10"):
        ask(ScriptedModel(str.upper, context_length=10), "ab", limit=10)


def test_it_counts_calls_and_rows() -> None:
    lm = ScriptedModel(str.upper)
    lm.generate([GenerationRequest([40], 5)] * 3, GREEDY, seed=0)
    assert (lm.calls, lm.rows) == (1, 3)


def test_training_lowers_its_loss_and_changes_its_fingerprint(small, tmp_path: Path) -> None:
    lm, before = ScriptedModel(str.upper), ScriptedModel(str.upper).fingerprint
    batch = small.batch()
    start = lm.loss(lm.module, batch)
    assert start.item() == pytest.approx(batch.loss_tokens * torch.tensor(258.0).log().item(), rel=1e-5)
    with lm.training():
        start.backward()
        torch.optim.SGD(lm.module.parameters(), lr=0.1).step()
    assert lm.loss(lm.module, batch) < start
    lm.save_checkpoint(tmp_path)
    other = ScriptedModel(str.upper)
    other.load_checkpoint(tmp_path)
    assert lm.fingerprint == other.fingerprint != before


def test_its_loss_is_the_negative_sum_of_its_token_log_probs(small) -> None:
    lm, batch = ScriptedModel(str.upper), small.batch()
    log_probs = lm.token_log_probs(lm.module, batch)
    assert log_probs.shape == (batch.loss_tokens,)
    torch.testing.assert_close(-log_probs.sum(), lm.loss(lm.module, batch))


def test_a_missing_checkpoint_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match=r"model\.safetensors is missing; the checkpoint is not complete"):
        ScriptedModel(str.upper).load_checkpoint(tmp_path)
