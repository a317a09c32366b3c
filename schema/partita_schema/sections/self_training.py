"""Rounds of simulation and training: `simulation.self_training`."""

from pydantic import model_validator

from partita_schema.base import ConfigModel, Fraction, Name, Positive, PositiveFraction, PositiveInt, rule_error
from partita_schema.sections.sources import Select, Target


class RoundTasks(ConfigModel):
    """The tasks of a round."""

    count: PositiveInt | None = None
    """Number of tasks, new ones in each round; the environment creates each from its seed."""
    source: Name | None = None
    """Dataset whose rows are the tasks, the same in each round. Default for replay: the training rows of
    data.source."""

    @model_validator(mode="after")
    def count_or_source(self) -> "RoundTasks":
        if self.count is not None and self.source is not None:
            raise rule_error("count and source cannot both be set; write one of them", at="count")
        return self


class SelfTrainingConfig(ConfigModel):
    """Training on the model's own episodes. Each round runs episodes with the weights of the previous round, turns them
    into rows, and trains on these rows mixed with those of data."""

    rounds: PositiveInt = 1
    """Number of rounds."""
    tasks: RoundTasks = RoundTasks.model_construct()
    """Tasks of the episodes, which run with predicted history."""
    attempts: PositiveInt = 1
    """Episodes of each task in a round. Their environments have the same seed; the sampled answers differ."""
    select: Select = "corrected"
    """Episodes to train on: corrected, succeeded, all or best_and_worst, as for a source of type simulation."""
    target: Target = "last_agent_turn"
    """Turns with a loss: last_agent_turn or every_agent_turn, as for a source of type simulation."""
    mix: PositiveFraction = 0.4
    """Share of a round's rows that come from episodes; the others come from data. 1: only episodes."""
    keep_rounds: PositiveInt = 4
    """Number of most recent rounds whose episodes are trained on together."""
    epochs: Positive | None = None
    """Passes over the rows of a round. Default: 1, unless max_steps is set."""
    max_steps: PositiveInt | None = None
    """Optimizer steps of a round."""
    learning_rate: Positive | None = None
    """Peak learning rate of a round. Default: trainer.learning_rate."""
    guard: Fraction | None = 0.05
    """Largest allowed drop of the success rate from one round to the next. If it drops further, the previous weights
    are kept and training ends. The final weights are evaluated for this as well. null: no guard and no final
    evaluation."""

    @model_validator(mode="after")
    def pairs_need_attempts(self) -> "SelfTrainingConfig":
        if self.select == "best_and_worst" and self.attempts == 1:
            raise rule_error("best_and_worst compares attempts at a task; write 2 or more", at="attempts")
        return self

    @model_validator(mode="after")
    def epochs_or_max_steps(self) -> "SelfTrainingConfig":
        if self.epochs is not None and self.max_steps is not None:
            raise rule_error("epochs and max_steps cannot both be set; write one of them", at="max_steps")
        return self
