"""Pairs and labelled answers from the results of rows, as trainers on preferences record them, and their metrics.

A row of a pair has the rewards and log-probabilities of both answers, a row of a labelled answer its own. The rewards
of a reward model are its scores, and there are no log-probabilities. See `preference`, `kto` and `reward` in
`partita_trainers`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from partita.report.evaluation import Evaluation
from partita.report.resampling import Blocks, Estimates, ratio
from partita_schema.sections.objectives import VARIANTS_OF_MEANS

REWARDS, LOG_PROBS = ("rewards/chosen", "rewards/rejected"), ("logps/chosen", "logps/rejected")
MARGINS = "rewards/margins"
SHARES = ("rewards/accuracies", "chosen_falls")
LABELLED = ("reward", "logp", "is_good")


@dataclass(frozen=True)
class PairRows:
    """Pairs of answers. N pairs."""

    rewards_N2: np.ndarray
    """Reward of the chosen and of the rejected answer."""
    log_probs_N2: np.ndarray | None
    """None of a reward model."""

    @property
    def margins_N(self) -> np.ndarray:
        """Reward of the chosen answer minus that of the rejected one."""
        return np.asarray(self.rewards_N2[:, 0] - self.rewards_N2[:, 1])


@dataclass(frozen=True)
class LabelledRows:
    """Answers that are labelled good or bad. N answers."""

    rewards_N: np.ndarray
    log_probs_N: np.ndarray
    is_good_N: np.ndarray


def pairs_of(evaluation: Evaluation) -> PairRows | None:
    """Return the pairs of an evaluation; None unless all rows are pairs with rewards."""
    values = evaluation.numbers_of((*REWARDS, *LOG_PROBS))
    if values is not None:
        return PairRows(values[:, :2], values[:, 2:])
    scores = evaluation.numbers_of(REWARDS)
    return None if scores is None else PairRows(scores, None)


def labelled_of(evaluation: Evaluation) -> LabelledRows | None:
    """Return the labelled answers of an evaluation; None unless all rows are such answers with rewards."""
    values = evaluation.numbers_of(LABELLED)
    return None if values is None else LabelledRows(values[:, 0], values[:, 1], values[:, 2] > 0)


def preference_shares(evaluation: Evaluation) -> dict[str, np.ndarray]:
    """Return which pairs count, 1 or 0, by the name of the metric that is their share, each [N].

    Nothing for the model before training if rewards are relative to itself.
    """
    pairs = pairs_of(evaluation)
    if pairs is None or not pairs.rewards_N2.any():
        return {}
    shares = {"rewards/accuracies": (pairs.margins_N > 0).astype(np.float64)}
    if "chosen_falls" in evaluation.header.metrics:
        shares["chosen_falls"] = (pairs.rewards_N2[:, 0] < 0).astype(np.float64)
    return shares


def preference_estimates(evaluation: Evaluation, blocks: Blocks) -> Estimates:
    """Return the metrics of pairs or labelled answers that are means, without rewards of the model before training.

    Args:
        evaluation: The results.
        blocks: Resamples of its rows.
    """
    pairs, labelled = pairs_of(evaluation), labelled_of(evaluation)
    if pairs is not None:
        means = dict(zip(REWARDS, pairs.rewards_N2.T, strict=True))
        if pairs.log_probs_N2 is not None:
            means |= zip(LOG_PROBS, pairs.log_probs_N2.T, strict=True)
        means[MARGINS] = pairs.margins_N
        estimates = {name: blocks.means(values_N) for name, values_N in means.items()}
        has_rewards = bool(pairs.rewards_N2.any())
    elif labelled is not None:
        estimates = labelled_estimates(labelled, blocks)
        has_rewards = bool(labelled.rewards_N.any())
    else:
        return {}
    return {name: values for name, values in estimates.items() if has_rewards or name in LOG_PROBS}


def labelled_estimates(labelled: LabelledRows, blocks: Blocks) -> Estimates:
    """Return the means over good answers (`chosen`) and over bad ones (`rejected`); see `objectives.kto`."""
    estimates: Estimates = {}
    for good, kind in ((True, "chosen"), (False, "rejected")):
        is_kind_N = (labelled.is_good_N == good).astype(np.float64)
        sums_R3 = blocks.sums(is_kind_N, is_kind_N * labelled.rewards_N, is_kind_N * labelled.log_probs_N)
        if sums_R3[0, 0]:
            estimates[f"rewards/{kind}"] = ratio(sums_R3[:, 1], sums_R3[:, 0])
            estimates[f"logps/{kind}"] = ratio(sums_R3[:, 2], sums_R3[:, 0])
    if all(name in estimates for name in REWARDS):
        estimates[MARGINS] = estimates["rewards/chosen"] - estimates["rewards/rejected"]
    return estimates


def has_preferences(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration trains on preferences."""
    return (config.get("trainer") or {}).get("type") in ("preference", "kto", "reward")


def has_reference(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration trains on preferences with a loss that compares with the model before training."""
    if not has_preferences(config) or config["trainer"]["type"] == "reward":
        return False
    trainer = config["trainer"]
    loss = "dpo" if trainer["type"] == "kto" else (trainer.get("loss") or {}).get("type", "dpo")
    return bool(loss == "dpo")


def compares_means(config: Mapping[str, Any]) -> bool:
    """Return whether rewards of a configuration with a reference are those of means per token."""
    loss = config["trainer"].get("loss") or {}
    return loss.get("variant") in VARIANTS_OF_MEANS
