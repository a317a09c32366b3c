"""Tests of the losses on pairs against values of TRL 1.16, computed by its DPO, ORPO and CPO trainers."""

import math
from typing import Any

import pytest
import torch

from partita_schema.sections.objectives import DPO_VARIANTS, DpoLoss, OrpoLoss, SimpoLoss
from partita_trainers.objectives.pair_losses import VARIANTS, Pairs, log1mexp, pair_function

SUMS = {
    "chosen_P": [-4.0, -7.5, -3.25, -9.0],
    "rejected_P": [-5.5, -6.0, -8.0, -2.5],
    "chosen_tokens_P": [5, 3, 7, 2],
    "rejected_tokens_P": [4, 6, 2, 5],
    "reference_chosen_P": [-4.5, -6.0, -5.0, -9.25],
    "reference_rejected_P": [-5.0, -7.0, -6.5, -3.0],
}
# The mean loss of the four pairs, and its gradient with respect to the sums of the chosen and the rejected answers.
OF_TRL: list[tuple[dict[str, Any], float, list[float]]] = [
    (
        {"type": "dpo"},
        0.67996347,
        [-0.01187552, -0.01405441, -0.01048644, -0.01265624, 0.01187552, 0.01405441, 0.01048644, 0.01265624],
    ),
    (
        {"type": "dpo", "beta": 0.7},
        0.79893243,
        [-0.05806714, -0.14909174, -0.01631257, -0.09513677, 0.05806714, 0.14909174, 0.01631257, 0.09513677],
    ),
    (
        {"type": "dpo", "label_smoothing": 0.2},
        0.68746352,
        [-0.00687552, -0.00905441, -0.00548644, -0.00765624, 0.00687552, 0.00905441, 0.00548644, 0.00765624],
    ),
    (
        {"type": "dpo", "variant": "hinge"},
        0.96249998,
        [-0.025, -0.025, -0.025, -0.025, 0.025, 0.025, 0.025, 0.025],
    ),
    (
        {"type": "dpo", "variant": "ipo"},
        23.91559029,
        [-0.47750002, -0.94444442, -0.2857143, -1.24374998, 0.59687501, 0.47222221, 1.0, 0.4975],
    ),
    (
        {"type": "dpo", "variant": "robust", "label_smoothing": 0.2},
        0.66746342,
        [-0.02020885, -0.02238774, -0.01881978, -0.02098958, 0.02020885, 0.02238774, 0.01881978, 0.02098958],
    ),
    (
        {"type": "dpo", "variant": "sppo_hard"},
        48.59375,
        [-2.25, -3.25, -1.62499964, -2.375, 2.25, 2.99999976, 1.75, 2.75],
    ),
    (
        {"type": "dpo", "variant": "apo_zero"},
        0.99064833,
        [-0.0062461, -0.00621497, -0.00620239, -0.00624902, 0.0062461, 0.0062344, 0.00621497, 0.0062461],
    ),
    (
        {"type": "dpo", "variant": "apo_down"},
        0.99696511,
        [1.169e-05, 6.162e-05, 0.00011457, 0.0, 0.0062344, 0.00615335, 0.00608782, 0.00624902],
    ),
    (
        {"type": "dpo", "variant": "nca_pair"},
        1.38013887,
        [-0.00578135, -0.00765362, -0.00461355, -0.00601564, 0.00609378, 0.00656224, 0.00578213, 0.00640622],
    ),
    (
        {"type": "dpo", "variant": "bco_pair"},
        1.37047148,
        [-0.01218757, -0.01343575, -0.01140903, -0.01234376, 0.01218757, 0.01312448, 0.01156425, 0.01281244],
    ),
    (
        {"type": "dpo", "variant": "sigmoid_norm"},
        0.68632275,
        [-0.00247188, -0.0043055, -0.0016965, -0.00624219, 0.00308985, 0.00215275, 0.00593776, 0.00249688],
    ),
    (
        {"type": "orpo"},
        2.24863911,
        [-0.05266173, -0.09120269, -0.03581913, -0.13754897, 0.00245219, 0.00571362, 0.00013884, 0.01261553],
    ),
    (
        {"type": "simpo"},
        3.41038370,
        [-0.04625702, -0.16366896, -0.00016447, -0.24996915, 0.05782127, 0.08183448, 0.00057564, 0.09998766],
    ),
]
SECTIONS = {"dpo": DpoLoss, "orpo": OrpoLoss, "simpo": SimpoLoss}


def pairs(**changed: list[float]) -> Pairs:
    """Return the pairs of `SUMS`; the sums of the model require gradients."""
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in (SUMS | changed).items()}
    for name in ("chosen_P", "rejected_P"):
        tensors[name].requires_grad_()
    return Pairs(**tensors)


def loss_of(**config: Any) -> Any:
    return pair_function(SECTIONS[config["type"]].model_validate(config))


@pytest.mark.parametrize(("config", "loss", "gradient"), OF_TRL, ids=lambda one: str(one)[:60])
def test_losses_and_gradients_are_those_of_trl(config: dict[str, Any], loss: float, gradient: list[float]) -> None:
    of_pairs = pairs()
    mean = loss_of(**config)(of_pairs).mean()
    mean.backward()
    assert mean.item() == pytest.approx(loss, rel=1e-6)
    computed = [*of_pairs.chosen_P.grad.tolist(), *of_pairs.rejected_P.grad.tolist()]  # type: ignore[union-attr]
    assert computed == pytest.approx(gradient, rel=1e-4, abs=1e-8)


def test_every_variant_is_compared_with_trl() -> None:
    compared = {config.get("variant", "sigmoid") for config, _, _ in OF_TRL if config["type"] == "dpo"}
    assert compared == set(VARIANTS) == set(DPO_VARIANTS)


def test_losses_of_the_starting_policy_are_known() -> None:
    same = {"reference_chosen_P": SUMS["chosen_P"], "reference_rejected_P": SUMS["rejected_P"]}
    of_pairs = pairs(**same)  # type: ignore[arg-type]
    losses = {name: function(of_pairs, beta=0.1)[0].item() for name, function in VARIANTS.items()}
    half = math.log(2)
    assert losses == pytest.approx(
        {
            **dict.fromkeys(("sigmoid", "robust", "sigmoid_norm"), half),
            **dict.fromkeys(("hinge", "apo_zero", "apo_down"), 1.0),
            **dict.fromkeys(("nca_pair", "bco_pair"), 2 * half),
            "ipo": 25.0,
            "sppo_hard": 50.0,
        }
    )


def test_the_cross_entropy_of_the_chosen_answer_is_added_per_token() -> None:
    with_it, without = loss_of(type="dpo", rpo_alpha=0.5)(pairs()), loss_of(type="dpo")(pairs())
    assert (with_it - without).tolist() == pytest.approx([0.5 * 4 / 5, 0.5 * 7.5 / 3, 0.5 * 3.25 / 7, 0.5 * 9 / 2])


def test_robust_losses_of_swapped_and_right_pairs_have_the_mean_of_the_right_loss() -> None:
    robust = loss_of(type="dpo", variant="robust", label_smoothing=0.3)
    names = ("chosen", "rejected")
    swapped = {
        f"{prefix}{one}_P": SUMS[f"{prefix}{two}_P"]
        for prefix in ("", "reference_")
        for one, two in zip(names, names[::-1], strict=True)
    }
    mean = 0.7 * robust(pairs()) + 0.3 * robust(pairs(**swapped))  # type: ignore[arg-type]
    assert mean.tolist() == pytest.approx(loss_of(type="dpo")(pairs()).tolist())


@pytest.mark.parametrize("value", [-1e-300, -1e-12, -1e-3, math.log(0.5), -2.0, -60.0, -1000.0])
def test_log1mexp_and_its_gradient_are_accurate(value: float) -> None:
    log_p = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    result = log1mexp(log_p)
    result.backward()
    used = min(value, -torch.finfo(torch.float64).eps)
    assert result.item() == pytest.approx(math.log(-math.expm1(used)) if used > -1 else math.log1p(-math.exp(used)))
    assert log_p.grad is not None
    assert log_p.grad.item() == pytest.approx(0.0 if value > used else -1 / math.expm1(-value) if value > -700 else 0.0)


def test_orpo_is_finite_for_answers_that_are_certain() -> None:
    of_pairs = pairs(chosen_P=[0.0, -1e-9, -4000.0, -1.0])
    loss_of(type="orpo")(of_pairs).sum().backward()
    assert of_pairs.chosen_P.grad is not None
    assert of_pairs.chosen_P.grad.isfinite().all()
