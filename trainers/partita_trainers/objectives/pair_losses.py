"""Losses on pairs of a chosen and a rejected answer to one prompt, as functions of their log-probabilities.

d = (Lc - Rc) - (Lr - Rr), with the log-probabilities L of the model and R of the reference of the chosen (c) and the
rejected (r) answer, each summed over the tokens of the answer with its end token. Every loss is one of a pair: the
batch, the step and the ranks do not matter.

Shapes: P pairs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import logsigmoid

from partita_schema.sections.objectives import VARIANTS_OF_MEANS, DpoLoss, OrpoLoss, SimpoLoss

LOG_HALF = -0.6931471805599453
"""Below it `log1p(-exp(x))` is accurate, above it `log(-expm1(x))` (Maechler 2012)."""


@dataclass(frozen=True)
class Pairs:
    """Log-probabilities of pairs, summed over the tokens of each answer, and the numbers of these tokens."""

    chosen_P: torch.Tensor
    rejected_P: torch.Tensor
    chosen_tokens_P: torch.Tensor
    rejected_tokens_P: torch.Tensor
    reference_chosen_P: torch.Tensor
    """Log-probability of the reference; zeros for a loss without a reference."""
    reference_rejected_P: torch.Tensor

    @property
    def chosen_ratio_P(self) -> torch.Tensor:
        """Lc - Rc."""
        return self.chosen_P - self.reference_chosen_P

    @property
    def rejected_ratio_P(self) -> torch.Tensor:
        """Lr - Rr."""
        return self.rejected_P - self.reference_rejected_P

    @property
    def delta_P(self) -> torch.Tensor:
        """The difference d."""
        return self.chosen_ratio_P - self.rejected_ratio_P

    @property
    def mean_chosen_ratio_P(self) -> torch.Tensor:
        """Lc - Rc per token."""
        return self.chosen_ratio_P / self.chosen_tokens_P

    @property
    def mean_rejected_ratio_P(self) -> torch.Tensor:
        """Lr - Rr per token."""
        return self.rejected_ratio_P / self.rejected_tokens_P

    @property
    def mean_delta_P(self) -> torch.Tensor:
        """The difference d of means per token."""
        return self.mean_chosen_ratio_P - self.mean_rejected_ratio_P

    @property
    def mean_chosen_P(self) -> torch.Tensor:
        """Mean log-probability of a token of the chosen answer."""
        return self.chosen_P / self.chosen_tokens_P

    @property
    def mean_rejected_P(self) -> torch.Tensor:
        """Mean log-probability of a token of the rejected answer."""
        return self.rejected_P / self.rejected_tokens_P


PairFunction = Callable[[Pairs], torch.Tensor]
"""Returns the loss of each pair [P]."""


def sigmoid(pairs: Pairs, *, beta: float, label_smoothing: float = 0.0) -> torch.Tensor:
    """Return -logsigmoid(beta d) (Rafailov et al. 2023, arXiv 2305.18290, equation 7).

    With label smoothing e, the loss of the swapped pair has the weight e, and that of the pair 1 - e (conservative DPO,
    equation 3 of the note by Mitchell 2023).
    """
    logits_P = beta * pairs.delta_P
    return -(1 - label_smoothing) * logsigmoid(logits_P) - label_smoothing * logsigmoid(-logits_P)


def robust(pairs: Pairs, *, beta: float, label_smoothing: float = 0.0) -> torch.Tensor:
    """Return a loss that is unbiased if a share e of the pairs is swapped (Chowdhury et al. 2024, arXiv 2403.00409).

    (-(1 - e) logsigmoid(beta d) + e logsigmoid(-beta d)) / (1 - 2 e), with e = `label_smoothing` below 0.5.
    """
    logits_P = beta * pairs.delta_P
    loss_P = -(1 - label_smoothing) * logsigmoid(logits_P) + label_smoothing * logsigmoid(-logits_P)
    return loss_P / (1 - 2 * label_smoothing)


def sigmoid_norm(pairs: Pairs, *, beta: float) -> torch.Tensor:
    """Return the loss of `sigmoid` on means per token (Tülu 3, Lambert et al. 2024, arXiv 2411.15124, equation 6)."""
    return -logsigmoid(beta * pairs.mean_delta_P)


def hinge(pairs: Pairs, *, beta: float) -> torch.Tensor:
    """Return relu(1 - beta d) (SLiC and RSO, Liu et al. 2023, arXiv 2309.06657)."""
    return torch.relu(1 - beta * pairs.delta_P)


def ipo(pairs: Pairs, *, beta: float) -> torch.Tensor:
    """Return (d - 1 / (2 beta))^2 (Azar et al. 2023, arXiv 2310.12036, equation 17), with d of means per token."""
    return (pairs.mean_delta_P - 1 / (2 * beta)).square()


def sppo_hard(pairs: Pairs, *, beta: float) -> torch.Tensor:
    """Return the loss of SPPO with probabilities 1 and 0 of winning (Wu et al. 2024, arXiv 2405.00675, eq. 4.7)."""
    wanted = 0.5 / beta
    return (pairs.chosen_ratio_P - wanted).square() + (pairs.rejected_ratio_P + wanted).square()


def apo_zero(pairs: Pairs, *, beta: float) -> torch.Tensor:
    """Return a loss for chosen answers better than the model's (D'Oosterlinck et al. 2024, arXiv 2408.06266, eq. 7)."""
    return 1 - torch.sigmoid(beta * pairs.chosen_ratio_P) + torch.sigmoid(beta * pairs.rejected_ratio_P)


def apo_down(pairs: Pairs, *, beta: float) -> torch.Tensor:
    """Return a loss for chosen answers worse than the model's (D'Oosterlinck et al. 2024, arXiv 2408.06266, eq. 8)."""
    return torch.sigmoid(beta * pairs.chosen_ratio_P) + 1 - torch.sigmoid(beta * pairs.delta_P)


def nca_pair(pairs: Pairs, *, beta: float) -> torch.Tensor:
    """Return the loss of noise contrastive alignment on a pair (Chen et al. 2024, arXiv 2402.05369)."""
    chosen_P, rejected_P = beta * pairs.chosen_ratio_P, beta * pairs.rejected_ratio_P
    return -logsigmoid(chosen_P) - 0.5 * logsigmoid(-chosen_P) - 0.5 * logsigmoid(-rejected_P)


def bco_pair(pairs: Pairs, *, beta: float) -> torch.Tensor:
    """Return the loss of binary classifier optimization on a pair (Jung et al. 2024, arXiv 2404.04656), no baseline."""
    return -logsigmoid(beta * pairs.chosen_ratio_P) - logsigmoid(-beta * pairs.rejected_ratio_P)


VARIANTS: dict[str, Callable[..., torch.Tensor]] = {
    "sigmoid": sigmoid,
    "hinge": hinge,
    "ipo": ipo,
    "robust": robust,
    "sppo_hard": sppo_hard,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "nca_pair": nca_pair,
    "bco_pair": bco_pair,
    "sigmoid_norm": sigmoid_norm,
}
"""The functions of `DpoLoss.variant`."""


def dpo(pairs: Pairs, *, config: DpoLoss) -> torch.Tensor:
    """Return a variant of DPO; `rpo_alpha` adds the cross-entropy of the chosen answer per token (arXiv 2404.19733)."""
    smoothing = {"label_smoothing": config.label_smoothing} if config.label_smoothing else {}
    loss_P = VARIANTS[config.variant](pairs, beta=config.beta, **smoothing)
    return loss_P - config.rpo_alpha * pairs.mean_chosen_P if config.rpo_alpha else loss_P


def orpo(pairs: Pairs, *, beta: float) -> torch.Tensor:
    """Return the loss of ORPO (Hong et al. 2024, arXiv 2403.07691, equations 4 to 7).

    The cross-entropy of the chosen answer per token, minus beta times the log-sigmoid of the log odds ratio. The odds
    are those of the mean log-probability of a token.
    """
    chosen_P, rejected_P = pairs.mean_chosen_P, pairs.mean_rejected_P
    log_odds_P = chosen_P - rejected_P - (log1mexp(chosen_P) - log1mexp(rejected_P))
    return -chosen_P - beta * logsigmoid(log_odds_P)


def simpo(pairs: Pairs, *, beta: float, gamma: float) -> torch.Tensor:
    """Return -logsigmoid(beta (Lc/nc - Lr/nr) - gamma) (Meng et al. 2024, arXiv 2405.14734, equation 6)."""
    return -logsigmoid(beta * (pairs.mean_chosen_P - pairs.mean_rejected_P) - gamma)


def compares_means(config: DpoLoss | OrpoLoss | SimpoLoss) -> bool:
    """Return whether a loss compares means per token, and not whole answers."""
    return not isinstance(config, DpoLoss) or config.variant in VARIANTS_OF_MEANS


def log1mexp(log_p: torch.Tensor) -> torch.Tensor:
    """Return log(1 - exp(x)) for x < 0 without cancellation.

    A probability that rounds to 1 counts as the largest one below, so that the result and its gradient are finite.
    """
    log_p = log_p.clamp(max=-torch.finfo(log_p.dtype).eps)
    # Each branch gets values that it can compute: the gradient of the other one would be NaN, also times zero.
    low, high = log_p.clamp(max=LOG_HALF), log_p.clamp(min=LOG_HALF)
    return torch.where(log_p < LOG_HALF, torch.log1p(-torch.exp(low)), torch.log(-torch.expm1(high)))


def pair_function(config: DpoLoss | OrpoLoss | SimpoLoss) -> PairFunction:
    """Return the function of a loss section."""
    if isinstance(config, DpoLoss):
        return partial(dpo, config=config)
    if isinstance(config, OrpoLoss):
        return partial(orpo, beta=config.beta)
    return partial(simpo, beta=config.beta, gamma=config.gamma)
