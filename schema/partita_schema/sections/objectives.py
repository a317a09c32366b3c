"""What trainers on preferences minimize: losses on pairs, as a union on `type`, and the names of their metrics."""

from collections.abc import Mapping
from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from partita_schema.base import ConfigModel, Direction, NonNegative, Number, Positive, is_set, rule_error

SMOOTHED = ("sigmoid", "robust")
"""Variants of DPO with label smoothing."""
VARIANTS_OF_MEANS = ("ipo", "sigmoid_norm")
"""Variants of DPO that compare means per token, and not whole answers."""
PAIR_METRICS: Mapping[str, Direction] = {
    "rewards/accuracies": "higher",
    "rewards/margins": "higher",
    "rewards/chosen": "higher",
    "logps/chosen": "higher",
    "chosen_falls": "lower",
}
"""Metrics of pairs that can rank checkpoints, with the names of TRL."""
KTO_METRICS: Mapping[str, Direction] = {"rewards/margins": "higher", "rewards/chosen": "higher"}
"""Metrics of labelled answers that can rank checkpoints."""
REWARD_METRICS: Mapping[str, Direction] = {"rewards/accuracies": "higher", "rewards/margins": "higher"}
"""Metrics of a reward model that can rank checkpoints."""
OBJECTIVE_METRICS: Mapping[str, Direction] = {**PAIR_METRICS, **KTO_METRICS, **REWARD_METRICS}
"""Metrics of all objectives that can rank checkpoints."""

DOCUMENT_METRICS: Mapping[str, Direction] = {"bits_per_byte": "lower", "perplexity": "lower"}
"""Metrics of documents, which come with the cross-entropy of files without input_features."""


class DpoLoss(ConfigModel):
    """Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290) and its variants."""

    type: Literal["dpo"]
    """Direct preference optimization: the chosen answer becomes more likely than the rejected one, compared with the
    model before training."""
    beta: Positive = 0.1
    """Strength of the tie to the model before training; with a larger beta, the model changes less."""
    variant: Literal[
        "sigmoid",
        "hinge",
        "ipo",
        "robust",
        "sppo_hard",
        "apo_zero",
        "apo_down",
        "nca_pair",
        "bco_pair",
        "sigmoid_norm",
    ] = "sigmoid"
    """Formula. sigmoid: the original one; hinge: arXiv 2309.06657; ipo: arXiv 2310.12036, on means per token; robust:
    for wrong labels, arXiv 2403.00409; sppo_hard: arXiv 2405.00675; apo_zero and apo_down: arXiv 2408.06266; nca_pair:
    arXiv 2402.05369; bco_pair: arXiv 2404.04656; sigmoid_norm: on means per token."""
    rpo_alpha: NonNegative = 0.0
    """Weight of the cross-entropy of the chosen answer, per token, which is added to the loss (arXiv 2404.19733). It
    keeps the chosen answers likely."""
    label_smoothing: Annotated[Number, Field(ge=0, lt=0.5)] = 0.0
    """Assumed share of pairs whose answers are swapped (sigmoid and robust); at least 0 and below 0.5."""

    @model_validator(mode="after")
    def smoothing_fits_the_variant(self) -> "DpoLoss":
        if is_set(self, "label_smoothing") and self.variant not in SMOOTHED:
            raise rule_error(
                f"label_smoothing has no effect on variant: {self.variant}; remove it, or write variant: "
                f"{' or '.join(SMOOTHED)}",
                at="label_smoothing",
            )
        return self


DPO_VARIANTS: tuple[str, ...] = get_args(DpoLoss.model_fields["variant"].annotation)
"""Variants of DPO, which are no types of a loss of their own."""


class OrpoLoss(ConfigModel):
    """Odds ratio preference optimization (Hong et al. 2024, arXiv 2403.07691). It needs no reference model."""

    type: Literal["orpo"]
    """Odds ratio preference optimization: fine-tuning on the chosen answer, and a penalty for the rejected one."""
    beta: Positive = 0.1
    """Weight of the odds ratio next to the cross-entropy of the chosen answer (lambda in the paper)."""


class SimpoLoss(ConfigModel):
    """Simple preference optimization (Meng et al. 2024, arXiv 2405.14734). It needs no reference model."""

    type: Literal["simpo"]
    """Simple preference optimization: on mean log-probabilities per token, with a margin."""
    beta: Positive = 2.0
    """Factor of the mean log-probabilities per token."""
    gamma: NonNegative = 1.0
    """Margin by which the reward of the chosen answer should exceed that of the rejected one."""


PairLoss = Annotated[DpoLoss | OrpoLoss | SimpoLoss, Field(discriminator="type")]
"""A loss on pairs of answers, selected by its type."""
