"""Tests of the work that batch sizes are probed with: the worst case, and the volume of the data."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partita.generation.static_batches import plan_batches
from partita.lm.base import PADDED, BatchSupport, GenerationOptions
from partita.pipeline.probes import MAX_ELEMENTS, EvaluationProbe, GenerationProbe, sorted_volume
from partita_trainers.base import Batch
from partita_trainers.batch_size.probe import Timing, Volume
from partita_trainers.objective import CrossEntropy, ObjectiveContext, WeightedMean

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=70).map(np.array)
ROWS = st.integers(1, 80)


@dataclass
class StubModel:
    """A language model that records its calls."""

    context_length: int | None = None
    vocabulary: int = 50
    longest_slot: int = 1000
    support: BatchSupport = PADDED
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

    def why_no_slots(self, options: GenerationOptions, *, tokens: int) -> str | None:
        if not options.slots:
            return "generation.slots is false"
        return None if tokens <= self.longest_slot else f"a sliding window of {self.longest_slot} tokens"

    def batch_support(self, options: GenerationOptions, *, tokens: int) -> BatchSupport:
        return self.support

    def generate_worst_case(
        self, rows: int, *, prompt_tokens: int, new_tokens: int, options: GenerationOptions, shared_tokens: int = 0
    ) -> Timing:
        self.seen.append((rows, prompt_tokens, new_tokens, options, shared_tokens))
        return Timing(1.0, 0.5)

    def time_decode_step(self, rows: int, *, length: int, options: GenerationOptions, shared_tokens: int = 0) -> float:
        self.seen.append((rows, length, options, shared_tokens))
        return 0.25

    def loss(self, module: Any, batch: Batch) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        assert not module.training
        self.seen.append(batch)
        return torch.zeros(())


OPTIONS = GenerationOptions({"do_sample": False, "num_beams": 1})
IN_BATCHES = replace(OPTIONS, slots=False)


def counted(batches: list[list[int]]) -> Volume:
    """Return the number of batches with rows and their padded tokens, by a plain count."""
    held = [batch for batch in batches if batch]
    return Volume(batches=len(held), tokens=sum(len(batch) * max(batch) for batch in held))


@given(LENGTHS, ROWS, st.sampled_from([BatchSupport("equal lengths"), BatchSupport("one row")]))
def test_batches_are_counted_as_they_are_planned(lengths: np.ndarray, rows: int, support: BatchSupport) -> None:
    planned = [lengths[batch].tolist() for batch in plan_batches(lengths, batch_size=rows, support=support)]
    assert sorted_volume(lengths, rows, support=support) == counted(planned)
    whole = plan_batches(lengths, batch_size=len(lengths), support=support)
    probe = GenerationProbe(StubModel(support=support), IN_BATCHES, lengths, 4)
    assert probe.max_rows == max(map(len, whole))
    assert probe.volume(rows) == counted(planned)


@given(LENGTHS, ROWS)
def test_the_volume_of_sorted_batches_equals_a_plain_count(lengths: np.ndarray, rows: int) -> None:
    ordered = sorted(lengths.tolist(), reverse=True)
    expected = counted([ordered[start : start + rows] for start in range(0, len(ordered), rows)])
    assert sorted_volume(lengths, rows) == expected
    generation = GenerationProbe(StubModel(), IN_BATCHES, lengths=lengths, wanted_tokens=5)  # type: ignore[arg-type]
    evaluation = EvaluationProbe(StubModel(), lengths=lengths, max_loss_tokens=1)  # type: ignore[arg-type]
    assert generation.volume(rows) == evaluation.volume(rows) == expected
    assert sorted_volume(lengths, 1) == Volume(batches=len(lengths), tokens=int(lengths.sum()))


@given(LENGTHS, ROWS)
def test_the_volume_in_slots_has_as_many_batches_and_no_padding(lengths: np.ndarray, rows: int) -> None:
    probe = GenerationProbe(StubModel(), OPTIONS, lengths=lengths, wanted_tokens=5)  # type: ignore[arg-type]
    batches = GenerationProbe(StubModel(), IN_BATCHES, lengths=lengths, wanted_tokens=5)  # type: ignore[arg-type]
    assert probe.volume(rows) == Volume(batches=batches.volume(rows).batches, tokens=sum(lengths.tolist()))


def test_the_longest_row_decides_the_engine() -> None:
    lengths = np.array([5, 30, 12])

    def probe(room: int, options: GenerationOptions = OPTIONS) -> GenerationProbe:
        return GenerationProbe(StubModel(longest_slot=room), options, lengths=lengths, wanted_tokens=40)  # type: ignore[arg-type]

    assert (probe(70).engine, probe(69).engine, probe(70, IN_BATCHES).engine) == ("slots", "static", "static")
    assert probe(70).volume(2) == Volume(batches=2, tokens=47)
    assert probe(69).volume(2) == Volume(batches=2, tokens=2 * 30 + 5)


def test_tokens_of_large_data_do_not_overflow_narrow_lengths() -> None:
    lengths = np.full(3_000_000, 1000, dtype=np.int32)
    assert sorted_volume(lengths, 256).tokens == 3_000_000_000


# The work


@pytest.mark.parametrize(
    ("options", "usual"),
    [(OPTIONS, 16), (IN_BATCHES, 30)],
    ids=["after a prompt of the usual length", "after a batch as wide as its longest prompt"],
)
def test_generation_is_probed_with_the_longest_prompt_and_all_new_tokens(
    options: GenerationOptions, usual: int
) -> None:
    lm = StubModel()
    probe = GenerationProbe(lm, options, lengths=np.array([5, 30, 12]), wanted_tokens=40)  # type: ignore[arg-type]
    assert (probe.purpose, probe.max_rows, probe.prompt_tokens, probe.new_tokens) == ("generation", 3, 30, 40)
    assert probe.run(2) == Timing(1.0, 0.5)
    assert lm.seen.pop() == (2, 30, 40, options, 0)
    assert probe.decode_step(3) == 0.25
    assert lm.seen.pop() == (3, usual + 20, options, 0), "in the middle of an answer"
    probe.warm_up()
    assert lm.seen.pop()[0] == 1


def test_a_shared_prefix_is_computed_once_in_slots_and_seen_by_every_step() -> None:
    lm, lengths = StubModel(), np.array([12, 30, 18])
    probe = GenerationProbe(lm, OPTIONS, lengths=lengths, wanted_tokens=40, shared_tokens=10)  # type: ignore[arg-type]
    assert probe.volume(2) == Volume(batches=2, tokens=10 + 2 + 20 + 8)
    probe.decode_step(3)
    assert lm.seen.pop() == (3, 20 + 20, OPTIONS, 10)
    probe.run(3)
    assert lm.seen.pop() == (3, 30, 40, OPTIONS, 10)
    batches = replace(probe, options=IN_BATCHES)
    assert batches.volume(2) == Volume(batches=2, tokens=2 * 30 + 12)
    # The last token of a prompt that is only the shared prefix is still an input.
    alike = replace(probe, lengths=np.full(3, 12), shared_tokens=12)
    alike.decode_step(3)
    assert lm.seen.pop() == (3, 12 + 20, OPTIONS, 11)


def test_the_context_limits_the_new_tokens() -> None:
    lm = StubModel(context_length=64)
    probe = GenerationProbe(lm, OPTIONS, lengths=np.array([5, 60]), wanted_tokens=40)  # type: ignore[arg-type]
    assert probe.new_tokens == 4


@pytest.mark.parametrize(("beams", "expected"), [(1, 10), (3, 7)])
def test_the_size_of_the_logits_tensor_limits_the_rows(beams: int, expected: int) -> None:
    def most_rows(vocabulary: int) -> tuple[int, int]:
        lm: Any = StubModel(vocabulary=vocabulary)
        generation = GenerationProbe(lm, options, lengths=lengths, wanted_tokens=5)
        return generation.max_rows, EvaluationProbe(lm, lengths=lengths, max_loss_tokens=3).max_rows

    options = GenerationOptions({"num_beams": beams})
    lengths = np.full(10, 4)
    assert most_rows(MAX_ELEMENTS // (3 * 7)) == (expected, 7)
    assert most_rows(MAX_ELEMENTS + 1) == (1, 1)


def test_the_loss_is_probed_with_the_longest_row_without_gradients() -> None:
    lm = StubModel()
    probe = EvaluationProbe(lm, lengths=np.array([5, 30, 12]), max_loss_tokens=9)  # type: ignore[arg-type]
    assert (probe.purpose, probe.max_rows, probe.prompt_tokens, probe.new_tokens) == ("evaluation", 3, 30, 0)
    timing = probe.run(3)
    batch = lm.seen.pop()
    assert batch.input_ids_BT.shape == (3, 30)
    assert batch.loss_tokens == 27
    assert timing.prefill_seconds >= 0
    assert (timing.decode_seconds, probe.decode_step(3)) == (0.0, 0.0)
    probe.warm_up()
    assert lm.seen.pop().rows == 1


def test_evaluation_is_probed_with_the_objective_of_the_trainer() -> None:
    rows: list[tuple[str, int]] = []

    class Seen(CrossEntropy):
        def prepare(self, context: ObjectiveContext, batches: Iterable[Batch]) -> None:
            rows.extend(("prepare", batch.rows) for batch in batches)

        def loss(self, context: ObjectiveContext, batch: Batch) -> tuple[torch.Tensor, Mapping[str, WeightedMean]]:
            rows.append(("loss", batch.rows))
            return super().loss(context, batch)

    lengths = np.array([5, 30, 12])
    EvaluationProbe(StubModel(), lengths=lengths, max_loss_tokens=9, objective=Seen()).run(2)  # type: ignore[arg-type]
    assert rows == [("prepare", 2), ("loss", 2)]
