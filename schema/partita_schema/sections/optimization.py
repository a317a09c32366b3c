"""Optimizers, learning rate schedules and gradient clipping."""

from typing import Literal

from pydantic import model_validator

from partita_schema.base import (
    BelowOne,
    ConfigModel,
    Fraction,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveFraction,
    PositiveInt,
    StrictBool,
    is_set,
    rule_error,
)


class Optimizer(ConfigModel):
    """The optimizer."""

    type: Literal[
        "adamw",
        "adam",
        "adamw_8bit",
        "paged_adamw",
        "paged_adamw_8bit",
        "adafactor",
        "lion",
        "lion_8bit",
        "muon",
        "schedule_free_adamw",
        "sgd",
    ] = "adamw"
    """Optimizer algorithm. The 8-bit and paged optimizers and lion come from bitsandbytes. schedule_free_adamw needs no
    learning rate schedule; its default decay is constant. adafactor keeps a row and a column of averages for each
    matrix; its steps are as large as those of adamw."""
    betas: tuple[BelowOne, BelowOne] | None = None
    """Decay rates of the moving averages (adam family and lion). Default: the algorithm's own."""
    eps: Positive | None = None
    """Small constant added to denominators for numerical stability. Default: the algorithm's own."""
    weight_decay: NonNegative = 0.0
    """Weight decay coefficient (decoupled, as in AdamW)."""
    momentum: Fraction | None = None
    """Momentum factor (sgd and muon). Default: 0 for sgd, 0.95 for muon."""
    nesterov: StrictBool | None = None
    """Use Nesterov momentum (sgd and muon). Default: the algorithm's own."""
    fused: StrictBool = True
    """Use torch's fused implementation (adamw, adam and sgd)."""

    @model_validator(mode="after")
    def nesterov_has_momentum(self) -> "Optimizer":
        if self.type == "sgd" and self.nesterov and not self.momentum:
            raise rule_error("nesterov needs momentum; add momentum: 0.9", at="nesterov")
        return self

    @model_validator(mode="after")
    def keys_fit_the_algorithm(self) -> "Optimizer":
        owners = {
            "betas": {
                "adamw",
                "adam",
                "adamw_8bit",
                "paged_adamw",
                "paged_adamw_8bit",
                "lion",
                "lion_8bit",
                "schedule_free_adamw",
            },
            "eps": {
                "adamw",
                "adam",
                "adamw_8bit",
                "paged_adamw",
                "paged_adamw_8bit",
                "muon",
                "schedule_free_adamw",
            },
            "momentum": {"sgd", "muon"},
            "nesterov": {"sgd", "muon"},
            "fused": {"adamw", "adam", "sgd"},
        }
        for key, types in owners.items():
            if is_set(self, key) and self.type not in types:
                raise rule_error(f"{key} has no effect on {self.type}; remove it", at=key)
        return self


class LearningRateScheduler(ConfigModel):
    """How the learning rate changes during training."""

    decay: Literal["none", "constant", "linear", "cosine", "exponential", "inverse_sqrt", "wsd"] = "cosine"
    """Shape of the schedule after warmup. wsd (warmup-stable-decay): constant, then decay over the last tenth of the
    steps after warmup. none and constant are the same, and the default for schedule_free_adamw."""
    warmup_fraction: Fraction | None = None
    """Fraction of all optimizer steps used for linear warmup from 0. Default: 0.03, and at least 5 steps in runs of 50
    steps or more."""
    warmup_steps: NonNegativeInt | None = None
    """Number of optimizer steps used for linear warmup, instead of warmup_fraction."""
    min_ratio: Fraction | None = None
    """Final learning rate as a fraction of learning_rate, which the last step has; the lower limit for exponential and
    inverse_sqrt. Default: 0.1 for cosine, otherwise 0, which linear and wsd reach after the last step."""
    decay_rate: PositiveFraction | None = None
    """Factor applied to the learning rate every decay_steps (exponential). Default: 0.96."""
    decay_steps: PositiveInt | None = None
    """Optimizer steps per application of decay_rate (exponential). Default: a hundredth of all steps."""

    @model_validator(mode="after")
    def warmup_and_decay_keys_fit(self) -> "LearningRateScheduler":
        if self.warmup_fraction is not None and self.warmup_steps is not None:
            raise rule_error(
                "warmup_fraction and warmup_steps cannot both be set; write one of them", at="warmup_steps"
            )
        for key in ("decay_rate", "decay_steps"):
            if getattr(self, key) is not None and self.decay != "exponential":
                raise rule_error(f"{key} has no effect without decay: exponential; remove it", at=key)
        if self.min_ratio is not None and self.decay in ("none", "constant"):
            raise rule_error(f"min_ratio has no effect with decay: {self.decay}; remove it", at="min_ratio")
        return self


class GradientClipping(ConfigModel):
    """Gradient clipping before each optimizer step."""

    clipglobalnorm: Positive | None = 1.0
    """Maximum norm of all gradients together; null disables it."""
    clipvalue: Positive | None = None
    """Maximum absolute value of a gradient element. Default: no limit."""


class SparseOptimizer(ConfigModel):
    """The optimizer for sparse gradients."""

    type: Literal["adagrad", "sgd"] = "adagrad"
    """Optimizer algorithm. adagrad: a learning rate per weight that decreases with its gradients (Duchi et al. 2011).
    sgd: learning_rate for all weights."""
