"""Tests of a Hogwild worker: updates equal those of torch's optimizers, and each batch is claimed once."""

import threading

import pytest
import torch

from partita.lm.heads.embedding_bag import EmbeddingBagClassifier
from partita_trainers.hogwild.bags import Bags, chosen, joined
from partita_trainers.hogwild.worker import FIRST_SUM, SharedCounters, SharedState, first_sums, learn, train_epoch


def make_rows(count: int, *, seed: int = 3) -> Bags:
    """Return bags of 1 to 9 ids below 40, some of them twice in a bag."""
    rng = torch.Generator().manual_seed(seed)
    lengths_N = torch.randint(1, 10, (count,), generator=rng)
    ids_K = torch.randint(0, 40, (int(lengths_N.sum()),), generator=rng)
    starts_Nplus1 = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_N.cumsum(0)])
    return Bags(ids_K, starts_Nplus1, torch.randint(0, 3, (count,), generator=rng))


def make_shared(rows: Bags, *, adagrad: bool, batch_size: int = 4) -> SharedState:
    torch.manual_seed(0)
    module = EmbeddingBagClassifier(embeddings=40, dim=8, labels=3)
    return SharedState(
        module=module,
        sums=first_sums(module) if adagrad else (),
        rows=rows,
        seed=1,
        batch_size=batch_size,
        learning_rate=0.3,
        counts=SharedCounters(),
    )


@pytest.mark.parametrize("adagrad", [True, False])
def test_updates_equal_those_of_torch(adagrad: bool) -> None:
    rows = make_rows(40)
    shared = make_shared(rows, adagrad=adagrad)
    torch.manual_seed(0)
    other = EmbeddingBagClassifier(embeddings=40, dim=8, labels=3)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(other.parameters(), lr=0.3)
    if adagrad:
        optimizer = torch.optim.Adagrad(other.parameters(), lr=0.3, initial_accumulator_value=FIRST_SUM, eps=0)
    with torch.sparse.check_sparse_tensor_invariants(False):
        for first in range(0, 40, 4):
            batch = chosen(rows, torch.arange(first, first + 4))
            loss = torch.nn.functional.cross_entropy(other(batch.ids_K, batch.starts_Nplus1[:-1]), batch.labels_N)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert learn(shared, batch) == pytest.approx(4 * float(loss.detach()), rel=1e-5)
    for ours, theirs in zip(shared.module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_an_epoch_trains_and_counts_each_row_once() -> None:
    rows = make_rows(41)
    shared = make_shared(rows, adagrad=True, batch_size=4)
    assert shared.steps_per_epoch == 11
    assert sorted(shared.order(0).tolist()) == list(range(41))
    assert shared.order(0).tolist() != shared.order(1).tolist()
    assert shared.order(1).tolist() == shared.order(1).tolist()
    with torch.sparse.check_sparse_tensor_invariants(False):
        train_epoch(shared, until=11)
    assert shared.counts.claimed == 11
    assert list(shared.counts.sums)[1] == 41
    assert all(parameter.grad is None for parameter in shared.module.parameters())


def test_a_nan_loss_ends_the_epoch() -> None:
    shared = make_shared(make_rows(12), adagrad=False)
    with torch.no_grad():
        shared.module.output.bias.fill_(torch.nan)  # type: ignore[operator, union-attr]
    with pytest.raises(FloatingPointError, match="the loss of step 1 is not a number"):
        train_epoch(shared, until=3)


def test_no_two_workers_claim_the_same_batch() -> None:
    counts, result = SharedCounters(), list[int]()

    def claim() -> None:
        while (number := counts.claim(300)) is not None:
            result.append(number)
            counts.add(0.5, 2)

    threads = [threading.Thread(target=claim) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(result) == list(range(300))
    assert list(counts.sums) == [150.0, 600.0]


def test_no_batch_is_claimed_after_a_stop() -> None:
    counts = SharedCounters()
    counts.stop.value = 1
    assert counts.claim(5) is None


def test_joined_rows_equal_those_of_the_parts() -> None:
    rows = make_rows(20)
    parts = [chosen(rows, torch.arange(0, 7)), chosen(rows, torch.arange(7, 8)), chosen(rows, torch.arange(8, 20))]
    whole = joined(parts)
    assert all(torch.equal(one, other) for one, other in zip(whole.tensors, rows.tensors, strict=True))
    turned = chosen(rows, torch.tensor([5, 2]))
    expected = [rows.ids_K[rows.starts_Nplus1[row] : rows.starts_Nplus1[row + 1]] for row in (5, 2)]
    assert torch.equal(turned.ids_K, torch.cat(expected))
    assert turned.starts_Nplus1.tolist() == [0, len(expected[0]), len(turned.ids_K)]
