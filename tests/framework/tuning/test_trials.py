"""What sizes are tried with: the work at its worst, and what the data comes to, against a plain count."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partita.lm.base import GenerationOptions
from partita.tuning import trials
from partita.tuning.trials import EvaluationTrial, GenerationTrial, sorted_volume
from partita_trainers.base import Batch
from partita_trainers.batch_size.trial import Timing, Volume

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=70).map(np.array)
ROWS = st.integers(1, 80)


@dataclass
class Asked:
    """A language model that takes down what it is asked to do."""

    context_length: int | None = None
    vocabulary: int = 50
    seen: list[Any] = field(default_factory=list)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    module: Any = field(default_factory=lambda: torch.nn.Linear(1, 1))

    @property
    def token_ids(self) -> range:
        return range(self.vocabulary)

    @property
    def vocabulary_size(self) -> int:
        return self.vocabulary

    def reachable_tokens(self, prompt_tokens: int, new_tokens: int) -> int:
        return new_tokens if self.context_length is None else min(new_tokens, self.context_length - prompt_tokens)

    def generate_worst_case(
        self, rows: int, *, prompt_tokens: int, new_tokens: int, options: GenerationOptions
    ) -> Timing:
        self.seen.append((rows, prompt_tokens, new_tokens, options))
        return Timing(1.0, 0.5)

    def time_decode_step(self, rows: int, *, length: int, options: GenerationOptions) -> float:
        self.seen.append((rows, length, options))
        return 0.25

    def loss(self, module: Any, batch: Batch) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        assert not module.training
        self.seen.append(batch)
        return torch.zeros(())


OPTIONS = GenerationOptions({"do_sample": False, "num_beams": 1})


def counted(batches: list[list[int]]) -> Volume:
    """Batches that hold rows, and their padded tokens, one after another."""
    held = [batch for batch in batches if batch]
    return Volume(batches=len(held), tokens=sum(len(batch) * max(batch) for batch in held))


@given(LENGTHS, ROWS)
def test_sorted_batches_hold_what_a_plain_count_finds(lengths: np.ndarray, rows: int) -> None:
    ordered = sorted(lengths.tolist(), reverse=True)
    expected = counted([ordered[start : start + rows] for start in range(0, len(ordered), rows)])
    assert sorted_volume(lengths, rows) == expected
    generation = GenerationTrial(Asked(), OPTIONS, lengths=lengths, wanted_tokens=5)  # type: ignore[arg-type]
    evaluation = EvaluationTrial(Asked(), lengths=lengths, most_learned=1)  # type: ignore[arg-type]
    assert generation.volume(rows) == evaluation.volume(rows) == expected
    assert sorted_volume(lengths, 1) == Volume(batches=len(lengths), tokens=int(lengths.sum()))


def test_tokens_of_large_data_do_not_overflow_narrow_lengths() -> None:
    lengths = np.full(3_000_000, 1000, dtype=np.int32)
    assert sorted_volume(lengths, 256).tokens == 3_000_000_000


# The work


def test_answers_are_tried_with_the_longest_prompt_and_all_new_tokens() -> None:
    lm = Asked()
    trial = GenerationTrial(lm, OPTIONS, lengths=np.array([5, 30, 12]), wanted_tokens=40)  # type: ignore[arg-type]
    assert (trial.purpose, trial.max_rows, trial.prompt_tokens, trial.new_tokens) == ("generation", 3, 30, 40)
    assert trial.run(2) == Timing(1.0, 0.5)
    assert lm.seen.pop() == (2, 30, 40, OPTIONS)
    assert trial.decode_step(3) == 0.25
    rows, length, options = lm.seen.pop()
    assert (rows, options) == (3, OPTIONS)
    assert length == 30 + 20, "in the middle of an answer, behind a batch as wide as its longest prompt"
    trial.warm_up()
    assert lm.seen.pop()[0] == 1


def test_new_tokens_are_those_that_the_context_leaves() -> None:
    lm = Asked(context_length=64)
    trial = GenerationTrial(lm, OPTIONS, lengths=np.array([5, 60]), wanted_tokens=40)  # type: ignore[arg-type]
    assert trial.new_tokens == 4


@pytest.mark.parametrize(("beams", "expected"), [(1, 10), (3, 7)])
def test_no_more_rows_are_tried_than_one_tensor_of_logits_can_hold(
    monkeypatch: pytest.MonkeyPatch, beams: int, expected: int
) -> None:
    monkeypatch.setattr(trials, "MOST_ELEMENTS", 50 * 3 * 7 + 10)
    options = GenerationOptions({"num_beams": beams})
    lengths = np.full(10, 4)
    generation = GenerationTrial(Asked(), options, lengths=lengths, wanted_tokens=5)  # type: ignore[arg-type]
    assert generation.max_rows == expected
    evaluation = EvaluationTrial(Asked(), lengths=lengths, most_learned=3)  # type: ignore[arg-type]
    assert evaluation.max_rows == 7
    monkeypatch.setattr(trials, "MOST_ELEMENTS", 1)
    assert generation.max_rows == evaluation.max_rows == 1


def test_a_loss_is_tried_with_the_longest_row_without_gradients() -> None:
    lm = Asked()
    trial = EvaluationTrial(lm, lengths=np.array([5, 30, 12]), most_learned=9)  # type: ignore[arg-type]
    assert (trial.purpose, trial.max_rows, trial.prompt_tokens, trial.new_tokens) == ("evaluation", 3, 30, 0)
    timing = trial.run(3)
    batch = lm.seen.pop()
    assert batch.input_ids_BT.shape == (3, 30)
    assert batch.loss_tokens == 27
    assert timing.prefill_seconds >= 0
    assert (timing.decode_seconds, trial.decode_step(3)) == (0.0, 0.0)
    trial.warm_up()
    assert lm.seen.pop().rows == 1
