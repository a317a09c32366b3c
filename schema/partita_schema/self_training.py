"""Rounds of dialogues and training: `simulation.self_training`."""

from typing import Annotated

from pydantic import Field, model_validator

from partita_schema.base import Base, Count, Name, Positive, Share, broken
from partita_schema.sources import Select, Target


class RoundTasks(Base):
    """What the dialogues of a round are about."""

    count: Count | None = None
    """So many tasks, new ones in each round: the environment makes of each what its seed says."""
    source: Name | None = None
    """Rows of a data set, each a task, the same in each round. Default for replay: the training rows of data.source."""

    @model_validator(mode="after")
    def tasks_are_said_once(self) -> "RoundTasks":
        if self.count is not None and self.source is not None:
            raise broken("count and source say the same; keep one", at="count")
        return self


class SelfTrainingConfig(Base):
    """Training on dialogues that the model has had itself: a round has dialogues with the weights of the round before,
    makes rows of them, and trains on these rows mixed with those of data."""

    rounds: Count = 1
    """How often."""
    tasks: RoundTasks = RoundTasks.model_construct()
    """What the dialogues are about. They are had with predicted history."""
    select: Select = "corrected"
    """Dialogues to learn from: corrected, succeeded or all, as of a source of type simulation."""
    target: Target = "last_agent_turn"
    """Answers to learn: last_agent_turn or every_agent_turn, as of a source of type simulation."""
    mix: Annotated[Share, Field(gt=0)] = 0.4
    """Share of the rows of a round that are made of dialogues; the others are those of data. 1: nothing else."""
    keep_rounds: Count = 4
    """Dialogues of so many rounds, the newest, are learned from together."""
    epochs: Positive | None = None
    """Passes over the rows of a round. Default: 1, or what max_steps says."""
    max_steps: Count | None = None
    """Optimizer steps of a round."""
    learning_rate: Positive | None = None
    """Of a round. Default: trainer.learning_rate."""
    guard: Share | None = 0.05
    """How far the share of successes may fall from the dialogues of one round to those of the next. Where it falls
    further, the weights of before are kept and training ends. Dialogues with the last weights are had for this as well.
    null: no guard, and no such dialogues."""

    @model_validator(mode="after")
    def length_is_said_once(self) -> "SelfTrainingConfig":
        if self.epochs is not None and self.max_steps is not None:
            raise broken("epochs and max_steps both say how long a round is; keep one", at="max_steps")
        return self
