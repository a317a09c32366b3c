"""The objectives of a configuration: what its training minimizes, and what its evaluations compute."""

from partita_schema.config import Config
from partita_schema.errors import ConfigError, Problem
from partita_schema.sections.objectives import DpoLoss
from partita_schema.sections.outputs.embedding import EmbeddingOutput
from partita_schema.sections.trainer import CustomTrainer, KtoTrainer, PreferenceTrainer
from partita_trainers.objective import CROSS_ENTROPY, Objective, objective_of
from partita_trainers.registry import build_trainer


def default_objective(config: Config) -> Objective:
    """Return the objective of a configuration's outputs.

    Contrastive for embeddings, that of pairs for a reward model, otherwise the model's loss.
    """
    output = config.head_output
    if config.scores_answers:
        from partita_trainers.objectives.reward import RewardObjective

        return RewardObjective(center=getattr(config.trainer, "center", 0.0))
    if not isinstance(output, EmbeddingOutput):
        return CROSS_ENTROPY
    from partita_trainers.objectives.contrastive import Contrastive

    return Contrastive(temperature=output.decoder.temperature, name=output.name)


def evaluation_objective(config: Config, *, undesirable_weight: float | None) -> Objective:
    """Return what an evaluation outside of training computes: the loss of training, or cross-entropy if a custom
    trainer has trained.

    Args:
        config: The configuration.
        undesirable_weight: The weight that `undesirable_weight: auto` chose in training; None if it is not recorded.

    Raises:
        ConfigError: The weight is needed, and not recorded.
    """
    default = default_objective(config)
    if isinstance(config.trainer, CustomTrainer):
        return default
    trainer = build_trainer(config.trainer, objective=default)
    if isinstance(config.trainer, KtoTrainer) and config.trainer.undesirable_weight == "auto":
        if undesirable_weight is None:
            message = "auto balances the training rows, and the result is not recorded here; write a number"
            raise ConfigError([Problem("trainer.undesirable_weight", message)])
        from partita_trainers.objectives.kto import Kto

        assert isinstance(trainer, Kto)
        trainer.objective.undesirable_weight = undesirable_weight
    return objective_of(trainer)


def compares_with_start(config: Config) -> bool:
    """Return whether the loss of a configuration compares with the model before training."""
    trainer = config.trainer
    is_dpo = isinstance(trainer, PreferenceTrainer) and isinstance(trainer.loss, DpoLoss)
    return is_dpo or isinstance(trainer, KtoTrainer)
