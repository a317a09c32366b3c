"""How weights change, or do not: a union on `type`."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from partita_schema.base import Base, Count, Flag, Name, NonNegative, NonNegativeCount, Positive, Share, broken, changed
from partita_schema.features import check_regex
from partita_schema.memory_size import Memory
from partita_schema.target import check_target

DEFAULT_STEP_ROWS = 16
SplitName = Literal["training", "validation", "test"]


class TrainerBase(Base):
    """What all trainers share."""

    batch_size: Count | Literal["auto"] = "auto"
    """Rows that go through the model at once. auto: measured on the device, at the longest rows of the data."""
    eval_batch_size: Count | Literal["auto"] | None = None
    """The same where nothing is learned: in evaluation and prediction. auto: measured for each. Default: batch_size
    where that is a number, else auto."""
    max_batch_size: Count | None = None
    """Largest size that auto may choose. Default: no limit but memory and the number of rows."""
    memory_budget: Memory | None = None
    """What the run may hold on its device in all, the model included: bytes, a text such as 12GB, 500MB or 1.5GiB, or
    a share of the device's memory, above 0 and at most 1. Default: what is free, less a margin."""

    @model_validator(mode="after")
    def limit_has_something_to_limit(self) -> "TrainerBase":
        if self.max_batch_size is not None and "auto" not in (self.batch_size, self.eval_batch_size):
            raise broken(
                f"max_batch_size has no effect with batch_size: {self.batch_size}; "
                "remove it, or write auto for batch_size or eval_batch_size",
                at="max_batch_size",
            )
        return self


class NoTrainer(TrainerBase):
    """Zero-shot: the model is used as it is."""

    type: Literal["none"]
    """Nothing is trained."""
    evaluate: tuple[SplitName, ...] = ("validation", "test")
    """Splits that `train` evaluates on, those that there are."""


class Optimizer(Base):
    """The rule that turns gradients into changes."""

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
    """Algorithm. The 8-bit and paged ones, and lion, are those of bitsandbytes; schedule_free_adamw needs no learning
    rate schedule."""
    betas: tuple[Share, Share] | None = None
    """Decay of the averages (adam family, lion). Default: the algorithm's."""
    eps: Positive | None = None
    """Added to denominators. Default: the algorithm's."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    momentum: Share | None = None
    """Momentum (sgd, muon). Default: 0 for sgd, 0.95 for muon."""
    nesterov: Flag | None = None
    """Nesterov momentum (sgd, muon)."""
    fused: Flag | Literal["auto"] = "auto"
    """One kernel for all parameters (adamw, adam, sgd). auto: on an accelerator."""

    @model_validator(mode="after")
    def nesterov_has_momentum(self) -> "Optimizer":
        if self.type == "sgd" and self.nesterov and not self.momentum:
            raise broken("nesterov needs momentum; write momentum: 0.9 beside it", at="nesterov")
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
                "adafactor",
                "muon",
                "schedule_free_adamw",
            },
            "momentum": {"sgd", "muon"},
            "nesterov": {"sgd", "muon"},
            "fused": {"adamw", "adam", "sgd"},
        }
        for key, types in owners.items():
            if changed(self, key) and self.type not in types:
                raise broken(f"{key} has no effect on {self.type}; remove it", at=key)
        return self


class LearningRateScheduler(Base):
    """How the learning rate changes over the steps."""

    decay: Literal["none", "constant", "linear", "cosine", "exponential", "inverse_sqrt", "wsd"] = "cosine"
    """Shape after the warm-up. wsd: constant, then down in the last tenth. none and constant are the same."""
    warmup_fraction: Share | None = None
    """Share of all steps in which the rate rises from 0. Default: 0.03, and at least 5 steps where there are 50."""
    warmup_steps: NonNegativeCount | None = None
    """The same as a number of steps."""
    min_ratio: Share | None = None
    """Rate at the end, as a share of learning_rate. Default: 0.1 for cosine, 0 otherwise."""
    decay_rate: Positive | None = None
    """Factor per decay_steps (exponential). Default: 0.96."""
    decay_steps: Count | None = None
    """Steps for one decay_rate (exponential). Default: a hundredth of all steps."""

    @model_validator(mode="after")
    def warmup_is_said_once(self) -> "LearningRateScheduler":
        if self.warmup_fraction is not None and self.warmup_steps is not None:
            raise broken("warmup_fraction and warmup_steps say the same; keep one", at="warmup_steps")
        for key in ("decay_rate", "decay_steps"):
            if getattr(self, key) is not None and self.decay != "exponential":
                raise broken(f"{key} has no effect without decay: exponential; remove it", at=key)
        if self.min_ratio is not None and self.decay in ("none", "constant"):
            raise broken(f"min_ratio has no effect with decay: {self.decay}; remove it", at="min_ratio")
        return self


class GradientClipping(Base):
    """Limits on gradients."""

    clipglobalnorm: Positive | None = 1.0
    """Largest norm over all gradients; null for no limit."""
    clipvalue: Positive | None = None
    """Largest size of one gradient value."""


def false_is_no(value: object) -> object:
    """YAML reads an unquoted `no` as false."""
    return "no" if value is False else value


class FinetuneTrainer(TrainerBase):
    """Supervised fine-tuning, of all weights or of an adapter."""

    type: Literal["finetune"]
    """Supervised fine-tuning."""
    epochs: Positive | None = None
    """Passes over the training rows; 0.5 is half a pass. Default: 3, or what max_steps needs."""
    max_steps: Count | None = None
    """Optimizer steps; with epochs as well, what comes first. Default: what epochs gives."""
    learning_rate: Positive | Literal["auto"] | None = None
    """Peak learning rate. auto: found by a range test before training. Default: 2e-4 with an adapter, 1e-3 for a new
    model, 2e-5 for a pretrained one."""
    learning_rate_scheduler: LearningRateScheduler = LearningRateScheduler.model_construct()
    """How the learning rate changes."""
    optimizer: Optimizer = Optimizer.model_construct()
    """How gradients become changes."""
    gradient_accumulation_steps: Count | None = None
    """Batches that each process takes in a step. Default: what effective_batch_size needs."""
    effective_batch_size: Count | None = None
    """Rows a step; a multiple of batch_size, which auto keeps to. Default: 16, or batch_size where that is a larger
    number."""
    gradient_clipping: GradientClipping = GradientClipping.model_construct()
    """Limits on gradients."""
    mixed_precision: Annotated[Literal["no", "bf16", "fp16", "auto"], BeforeValidator(false_is_no)] = "auto"
    """Type of the forward pass's arithmetic. auto: bf16 on a GPU that has it, else no."""
    gradient_checkpointing: Flag = False
    """Compute activations twice instead of keeping them: less memory, about a third more time."""
    compile: Flag = False
    """Compile the model with torch.compile."""
    completion_only_loss: Flag = True
    """Learn the answers only, not the prompts."""
    early_stop: NonNegativeCount = 0
    """Evaluations without a better validation_metric after which training stops; 0 for never."""
    validation_metric: Name = "loss"
    """What decides the best checkpoint: loss, a metric of the first output, or output.metric."""
    evaluate_generated: Flag | Literal["auto"] = "auto"
    """Generate answers in evaluations and score them. auto: when validation_metric needs it, and at the end."""
    max_generated_rows: Count = 256
    """Validation rows that are generated in an evaluation during training."""
    evaluations_per_epoch: Positive = 1.0
    """Evaluations an epoch; 0.5 is one every two epochs."""
    steps_per_evaluation: Count | None = None
    """Steps between evaluations, over evaluations_per_epoch."""
    skip_all_evaluation: Flag = False
    """Train without evaluations."""
    checkpoints_per_epoch: NonNegative = 1.0
    """Checkpoints an epoch; 0 for one at the end only."""
    steps_per_checkpoint: Count | None = None
    """Steps between checkpoints, over checkpoints_per_epoch."""
    keep_checkpoints: Count = 2
    """Newest checkpoints that are kept; the best one is kept as well."""
    restore_best: Flag = True
    """Take the checkpoint with the best validation_metric as the result, not the last one."""
    layers_to_freeze_regex: Name | None = None
    """Parameters whose names match are not trained."""
    evaluate_test: Flag = True
    """Evaluate the result on the test rows, where there are any."""

    @model_validator(mode="after")
    def accumulation_is_said_once(self) -> "FinetuneTrainer":
        if self.gradient_accumulation_steps is not None and self.effective_batch_size is not None:
            raise broken(
                "gradient_accumulation_steps and effective_batch_size say the same; keep one",
                at="gradient_accumulation_steps",
            )
        if self.effective_batch_size is None or self.batch_size == "auto":
            return self
        if self.effective_batch_size % self.batch_size:
            near = max(1, round(self.effective_batch_size / self.batch_size)) * self.batch_size
            raise broken(
                f"effective_batch_size {self.effective_batch_size} is no multiple of batch_size {self.batch_size}; "
                f"write {near}",
                at="effective_batch_size",
            )
        return self

    @model_validator(mode="after")
    def early_stopping_evaluates(self) -> "FinetuneTrainer":
        if self.early_stop and self.skip_all_evaluation:
            raise broken("early_stop needs evaluations; remove it or skip_all_evaluation", at="early_stop")
        return self

    @model_validator(mode="after")
    def freeze_pattern_compiles(self) -> "FinetuneTrainer":
        if self.layers_to_freeze_regex is not None:
            check_regex(self.layers_to_freeze_regex, at="layers_to_freeze_regex")
        return self

    def accumulation(self, batch_size: int) -> int:
        """Batches of this size a step; at least 1."""
        if self.gradient_accumulation_steps is not None:
            return self.gradient_accumulation_steps
        rows = self.effective_batch_size or max(DEFAULT_STEP_ROWS, batch_size)
        return max(1, rows // batch_size)

    @property
    def step_rows(self) -> int | None:
        """Rows of a step that the file fixes; None where it fixes the batches of a step instead."""
        if self.gradient_accumulation_steps is not None:
            return None
        if self.effective_batch_size is not None:
            return self.effective_batch_size
        if self.batch_size == "auto":
            return DEFAULT_STEP_ROWS
        return self.batch_size * self.accumulation(self.batch_size)


NOT_WITHOUT_LOCKS = {
    "gradient_clipping": "the norm of all gradients would need every worker to wait; remove it, or write a lower "
    "learning_rate",
    "deterministic": "workers write over each other, and no two runs of several are the same; remove it, and write "
    "workers: 1 for the same weights each time",
    "mixed_precision": "sparse gradients are float32; remove it",
    "gradient_accumulation_steps": "each batch of a worker is an update; remove it, and write batch_size",
    "effective_batch_size": "each batch of a worker is an update; remove it, and write batch_size",
    "device": "workers share the memory of the processor; remove it",
}
"""Keys of other trainers that lock-free training cannot keep: why, and what to write instead."""


class SparseOptimizer(Base):
    """The rule that turns sparse gradients into changes."""

    type: Literal["adagrad", "sgd"] = "adagrad"
    """adagrad: each number has a rate of its own, which falls with its gradients (Duchi et al. 2011); sgd: all have
    learning_rate."""


class HogwildTrainer(TrainerBase):
    """Training of a sparse model by processes that share its weights and wait for nobody (Recht et al. 2011)."""

    type: Literal["hogwild"]
    """Lock-free training of `base_model: {type: embedding_bag}` on a CPU."""
    workers: Count = 2
    """Processes that train, each with one thread. With 1 the same file gives the same weights, bit for bit; with more,
    no two runs are the same."""
    epochs: Count = 5
    """Passes over the training rows."""
    batch_size: Count = 16
    """Rows of an update; each worker takes its own."""
    eval_batch_size: Count = 1024
    """Rows that are evaluated or answered at a time."""
    learning_rate: Positive | None = None
    """The rate of all updates. Default: 0.1 for adagrad, 1 for sgd."""
    optimizer: SparseOptimizer = SparseOptimizer.model_construct()
    """How gradients become changes."""
    evaluate_test: Flag = True
    """Evaluate the result on the test rows, where there are any."""

    @model_validator(mode="after")
    def limit_has_something_to_limit(self) -> "HogwildTrainer":
        for key in ("max_batch_size", "memory_budget"):
            if changed(self, key):
                raise broken(f"{key} has no effect on hogwild, whose sizes are numbers; remove it", at=key)
        return self


class CustomTrainer(TrainerBase):
    """A trainer from outside, by its place."""

    type: Literal["custom"]
    """A class of yours."""
    target: Annotated[str, AfterValidator(check_target)]
    """`module:Class`."""
    options: dict[str, object] = {}
    """What the class is given as options."""


Trainer = Annotated[NoTrainer | FinetuneTrainer | HogwildTrainer | CustomTrainer, Field(discriminator="type")]
