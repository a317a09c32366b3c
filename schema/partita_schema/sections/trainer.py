"""How the model is trained, if at all; a union on `type`."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from partita_schema.base import (
    ConfigModel,
    Direction,
    Name,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    StrictBool,
    check_regex,
    check_target,
    is_set,
    rule_error,
)
from partita_schema.sections.memory_size import Memory
from partita_schema.sections.objectives import KTO_METRICS, PAIR_METRICS, REWARD_METRICS, DpoLoss, PairLoss
from partita_schema.sections.optimization import GradientClipping, LearningRateScheduler, Optimizer, SparseOptimizer

DEFAULT_STEP_ROWS = 16
SplitName = Literal["training", "validation", "test"]


class TrainerBase(ConfigModel):
    """Options of all trainers."""

    batch_size: PositiveInt | Literal["auto"] = "auto"
    """Rows per process in one forward pass (the micro-batch size). auto: the largest that fits in memory, measured on
    the device with the longest rows of the data."""
    eval_batch_size: PositiveInt | Literal["auto"] | None = None
    """Batch size for evaluation and prediction. auto: measured separately for each. Default: batch_size if it is a
    number, otherwise auto."""
    max_batch_size: PositiveInt | None = None
    """Upper limit for a batch size chosen by auto. Default: limited only by memory and the number of rows."""
    memory_budget: Memory | None = None
    """Maximum device memory of the run, including the model: bytes, a size such as 12GB, 500MB or 1.5GiB, or a fraction
    of the device's memory (above 0, at most 1). Default: the free memory, less a safety margin."""

    @model_validator(mode="after")
    def limit_has_something_to_limit(self) -> "TrainerBase":
        if self.max_batch_size is not None and "auto" not in (self.batch_size, self.eval_batch_size):
            raise rule_error(
                f"max_batch_size has no effect with batch_size: {self.batch_size}; "
                "remove it, or write auto for batch_size or eval_batch_size",
                at="max_batch_size",
            )
        return self


class NoTrainer(TrainerBase):
    """No training: the model is used as it is (zero-shot)."""

    type: Literal["none"]
    """No training."""
    evaluate: tuple[SplitName, ...] = ("validation", "test")
    """Splits that `train` evaluates on, if they have rows."""

    @model_validator(mode="after")
    def one_batch_size_is_used(self) -> "NoTrainer":
        if is_set(self, "batch_size") and self.eval_batch_size is not None:
            raise rule_error(
                "batch_size has no effect beside eval_batch_size without training; remove one of them", at="batch_size"
            )
        return self


def false_is_no(value: object) -> object:
    """Return "no" for False, because YAML reads an unquoted `no` as false."""
    return "no" if value is False else value


class FinetuneTrainer(TrainerBase):
    """Supervised fine-tuning of all weights or of an adapter."""

    type: Literal["finetune"]
    """Supervised fine-tuning."""
    epochs: Positive | None = None
    """Passes over the training rows; may be fractional (0.5 is half a pass). Default: 3, or as many as max_steps
    needs."""
    max_steps: PositiveInt | None = None
    """Maximum number of optimizer steps. With epochs, training stops at whichever limit is reached first. Default:
    determined by epochs."""
    learning_rate: Positive | Literal["auto"] | None = None
    """Peak learning rate. auto: chosen by a learning rate range test before training. Default: 2e-4 with an adapter,
    1e-3 for a new model, 2e-5 for a pretrained model."""
    learning_rate_scheduler: LearningRateScheduler = LearningRateScheduler.model_construct()
    """How the learning rate changes during training."""
    optimizer: Optimizer = Optimizer.model_construct()
    """The optimizer and its options."""
    gradient_accumulation_steps: PositiveInt | None = None
    """Micro-batches per process and optimizer step. Default: as many as effective_batch_size needs."""
    effective_batch_size: PositiveInt | None = None
    """Rows per optimizer step, over all processes; must be a multiple of batch_size. Default: 16, or batch_size if that
    is larger."""
    gradient_clipping: GradientClipping = GradientClipping.model_construct()
    """Gradient clipping before each optimizer step."""
    mixed_precision: Annotated[Literal["no", "bf16", "fp16", "auto"], BeforeValidator(false_is_no)] = "auto"
    """Data type of the forward pass (autocast). auto: bf16 on a GPU that supports it, otherwise no."""
    gradient_checkpointing: StrictBool = False
    """Recompute activations in the backward pass instead of storing them: less memory, about a third more time."""
    compile: StrictBool = False
    """Compile the model with torch.compile."""
    completion_only_loss: StrictBool = True
    """Compute the loss on the answers only. false: on the prompts too."""
    early_stop: NonNegativeInt = 0
    """Stop after this many evaluations in a row without a better validation_metric; 0 disables early stopping."""
    validation_metric: Name = "loss"
    """Metric that selects the best checkpoint: loss, a metric of the first output, or `OUTPUT.METRIC`; of documents
    also bits_per_byte and perplexity."""
    evaluate_generated: StrictBool | Literal["auto"] = "auto"
    """Generate answers during evaluation and score them. auto: only if validation_metric needs generated answers, and
    at the end of training."""
    max_generated_rows: PositiveInt = 256
    """Maximum number of validation rows to generate answers for in each evaluation during training. Has no effect
    with a head, which answers all of them."""
    evaluations_per_epoch: Positive = 1.0
    """Evaluations per epoch; 0.5 evaluates every two epochs."""
    steps_per_evaluation: PositiveInt | None = None
    """Optimizer steps between evaluations; overrides evaluations_per_epoch."""
    skip_all_evaluation: StrictBool = False
    """Train without any evaluation."""
    checkpoints_per_epoch: NonNegative = 1.0
    """Checkpoints per epoch; 0 saves one at the end only."""
    steps_per_checkpoint: PositiveInt | None = None
    """Optimizer steps between checkpoints; overrides checkpoints_per_epoch."""
    minutes_per_checkpoint: Positive | None = 30.0
    """Also save a checkpoint when the last one is this many minutes old. The next checkpoint replaces it. null: save
    only those that are due by steps or epochs."""
    keep_checkpoints: PositiveInt = 2
    """Number of most recent checkpoints to keep, in addition to the best one and to one of minutes_per_checkpoint."""
    restore_best: StrictBool = True
    """Use the checkpoint with the best validation_metric as the trained model. false: the last checkpoint."""
    layers_to_freeze_regex: Name | None = None
    """Regular expression for parameter names; parameters that it matches anywhere in the name are frozen. Default:
    none."""
    evaluate_test: StrictBool = True
    """Evaluate the trained model on the test rows, if there are any."""
    evaluate_base: StrictBool | Literal["auto"] = "auto"
    """Also evaluate the model before the first step, on the rows of the final evaluation. auto: if that is estimated to
    cost less than a tenth of the training, and the model is not new."""

    METRICS: ClassVar[Mapping[str, Direction]] = {}
    """Metrics of the objective that can rank checkpoints, besides the loss."""

    @model_validator(mode="after")
    def accumulation_or_effective_batch_size(self) -> "FinetuneTrainer":
        if self.gradient_accumulation_steps is not None and self.effective_batch_size is not None:
            raise rule_error(
                "gradient_accumulation_steps and effective_batch_size cannot both be set; write one of them",
                at="gradient_accumulation_steps",
            )
        if self.effective_batch_size is None or self.batch_size == "auto":
            return self
        if self.effective_batch_size % self.batch_size:
            near = max(1, round(self.effective_batch_size / self.batch_size)) * self.batch_size
            raise rule_error(
                f"effective_batch_size {self.effective_batch_size} is not a multiple of batch_size {self.batch_size}; "
                f"write {near}",
                at="effective_batch_size",
            )
        return self

    @model_validator(mode="after")
    def keys_of_evaluations_have_evaluations(self) -> "FinetuneTrainer":
        for key in ("early_stop", "validation_metric", "steps_per_evaluation", "evaluations_per_epoch"):
            if self.skip_all_evaluation and is_set(self, key):
                raise rule_error(f"{key} needs evaluations; remove it or skip_all_evaluation", at=key)
        return self

    @model_validator(mode="after")
    def schedule_free_optimizers_keep_their_rate(self) -> "FinetuneTrainer":
        scheduler = self.learning_rate_scheduler
        if self.optimizer.type == "schedule_free_adamw" and "decay" not in scheduler.model_fields_set:
            if scheduler.min_ratio is not None:
                message = "min_ratio has no effect with schedule_free_adamw unless decay is set; remove it"
                raise rule_error(message, at="learning_rate_scheduler.min_ratio")
            # Not by assignment, since the model is frozen.
            self.__dict__["learning_rate_scheduler"] = scheduler.model_copy(update={"decay": "constant"})
        return self

    @model_validator(mode="after")
    def base_is_evaluated_with_the_result(self) -> "FinetuneTrainer":
        if self.evaluate_base is True and self.skip_all_evaluation:
            raise rule_error("evaluate_base needs evaluations; remove it or skip_all_evaluation", at="evaluate_base")
        return self

    @model_validator(mode="after")
    def freeze_pattern_compiles(self) -> "FinetuneTrainer":
        if self.layers_to_freeze_regex is not None:
            check_regex(self.layers_to_freeze_regex, at="layers_to_freeze_regex")
        return self

    def accumulation(self, batch_size: int) -> int:
        """Return the number of micro-batches of this size per optimizer step; at least 1."""
        if self.gradient_accumulation_steps is not None:
            return self.gradient_accumulation_steps
        rows = self.effective_batch_size or max(DEFAULT_STEP_ROWS, batch_size)
        return max(1, rows // batch_size)

    @property
    def step_rows(self) -> int | None:
        """Rows per optimizer step, or None if the file sets the number of micro-batches instead."""
        if self.gradient_accumulation_steps is not None:
            return None
        if self.effective_batch_size is not None:
            return self.effective_batch_size
        if self.batch_size == "auto":
            return DEFAULT_STEP_ROWS
        return self.batch_size * self.accumulation(self.batch_size)


class ReferencedTrainer(FinetuneTrainer):
    """Options of trainers that compare the model with itself before training."""

    references: Literal["auto", "before", "in_step"] = "auto"
    """When the log-probabilities of the model before training are computed. before: once for all rows, before the
    first step; in_step: in each step; auto: before, and in_step for streams."""


class PreferenceTrainer(ReferencedTrainer):
    """Training on pairs of a chosen and a rejected answer."""

    type: Literal["preference"]  # type: ignore[assignment]  # another section of the union
    """Training on pairs of a chosen and a rejected answer; the output has the type preference."""
    loss: PairLoss = DpoLoss.model_construct(type="dpo")
    """The loss, with its options. dpo and its variants compare the model with itself before training; orpo and simpo do
    not."""
    learning_rate: Positive | Literal["auto"] | None = None
    """Peak learning rate. auto: chosen by a learning rate range test before training. Default: 1e-5 with an adapter,
    1e-4 for a new model, 1e-6 for a pretrained model."""

    METRICS: ClassVar = PAIR_METRICS

    @model_validator(mode="after")
    def references_are_compared(self) -> "PreferenceTrainer":
        if is_set(self, "references") and not isinstance(self.loss, DpoLoss):
            raise rule_error(
                f"references has no effect on loss: {{type: {self.loss.type}}}, which compares with no other model; "
                "remove it",
                at="references",
            )
        return self


class KtoTrainer(ReferencedTrainer):
    """Training on single answers that are labelled good or bad (Ethayarajh et al. 2024, arXiv 2402.01306)."""

    type: Literal["kto"]  # type: ignore[assignment]  # another section of the union
    """Training on single answers that are labelled good or bad (KTO); the text output has a label."""
    beta: Positive = 0.1
    """Strength of the tie to the model before training; with a larger beta, the model changes less."""
    desirable_weight: Positive = 1.0
    """Weight of the loss of good answers."""
    undesirable_weight: Positive | Literal["auto"] = 1.0
    """Weight of the loss of bad answers. auto: such that all bad answers together weigh as much as all good ones."""
    learning_rate: Positive | Literal["auto"] | None = None
    """Peak learning rate. auto: chosen by a learning rate range test before training. Default: 1e-5 with an adapter,
    1e-4 for a new model, 1e-6 for a pretrained model."""

    METRICS: ClassVar = KTO_METRICS


class RewardTrainer(FinetuneTrainer):
    """Training of a reward model on pairs (Ouyang et al. 2022, arXiv 2203.02155)."""

    type: Literal["reward"]  # type: ignore[assignment]  # another section of the union
    """Training of a reward model, which predicts a score of an answer, on pairs of a chosen and a rejected answer; the
    output has the type preference."""
    center: NonNegative = 0.0
    """Weight of the squared sum of both scores, which keeps the scores near 0 (arXiv 2312.09244)."""
    learning_rate: Positive | Literal["auto"] | None = None
    """Peak learning rate. auto: chosen by a learning rate range test before training. Default: 1e-4 with an adapter,
    1e-3 for a new model, 1e-5 for a pretrained model."""

    METRICS: ClassVar = REWARD_METRICS


UNSUPPORTED_BY_HOGWILD = {
    "gradient_clipping": "the norm of all gradients would need every worker to wait; remove it, or write a lower "
    "learning_rate",
    "deterministic": "workers write over each other, and no two runs of several are the same; remove it, and write "
    "workers: 1 for the same weights each time",
    "mixed_precision": "sparse gradients are float32; remove it",
    "gradient_accumulation_steps": "each batch of a worker is an update; remove it, and write batch_size",
    "effective_batch_size": "each batch of a worker is an update; remove it, and write batch_size",
    "device": "workers share the memory of the processor; remove it",
}
"""Keys of other trainers that hogwild does not support, with the reason and what to write instead."""


class HogwildTrainer(TrainerBase):
    """Lock-free training of a sparse model by processes that share its weights (Hogwild, Recht et al. 2011)."""

    type: Literal["hogwild"]
    """Lock-free training of `base_model: {type: embedding_bag}` on a CPU."""
    workers: PositiveInt = 2
    """Number of training processes, each with one thread. Results are reproducible bit for bit with 1 worker, and
    differ from run to run with more."""
    epochs: PositiveInt = 5
    """Passes over the training rows."""
    batch_size: PositiveInt = 16
    """Rows per update of a worker."""
    eval_batch_size: PositiveInt = 1024
    """Batch size for evaluation and prediction, in rows."""
    learning_rate: Positive | None = None
    """Learning rate. Default: 0.1 for adagrad, 1 for sgd."""
    optimizer: SparseOptimizer = SparseOptimizer.model_construct()
    """The optimizer and its options."""
    evaluate_test: StrictBool = True
    """Evaluate the trained model on the test rows, if there are any."""

    @model_validator(mode="after")
    def limit_has_something_to_limit(self) -> "HogwildTrainer":
        for key in ("max_batch_size", "memory_budget"):
            if is_set(self, key):
                raise rule_error(f"{key} has no effect on hogwild, whose sizes are numbers; remove it", at=key)
        return self


def final_splits(trainer: FinetuneTrainer | HogwildTrainer) -> list[str]:
    """Return the splits that the trained model is evaluated on, if they have rows."""
    return ["validation", *(["test"] if trainer.evaluate_test else [])]


class CustomTrainer(TrainerBase):
    """A trainer class outside partita."""

    type: Literal["custom"]
    """Your own trainer class."""
    target: Annotated[str, AfterValidator(check_target)]
    """The class, as `module:Class`."""
    options: dict[str, object] = {}
    """Options passed to the class."""


Trainer = Annotated[
    NoTrainer | FinetuneTrainer | PreferenceTrainer | KtoTrainer | RewardTrainer | HogwildTrainer | CustomTrainer,
    Field(discriminator="type"),
]
