"""The training engine: accelerate, the wrapped module and its optimizers. A run has one, and a dry run has one.

Gradients, clipping and the weight update are separate methods, so that the caller can check values in between.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator

from partita_schema.errors import ConfigError, Problem, TrainingError, shortened
from partita_schema.sections.trainer import FinetuneTrainer
from partita_trainers.base import Batch, LanguageModel
from partita_trainers.batch_size.device_errors import attempt
from partita_trainers.checkpoints.preserved_state import clear_gradients
from partita_trainers.device_copies import PrefetchingModel
from partita_trainers.libraries.accelerate_internals import PREPARED, reset_precision
from partita_trainers.libraries.torch_internals import compilation_error
from partita_trainers.objective import (
    CROSS_ENTROPY,
    Objective,
    ObjectiveContext,
    WeightedMean,
    denominator_of,
    loss_of,
    prepare,
)
from partita_trainers.optimizers import build_optimizers, embedding_names, set_learning_rate
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup
from partita_trainers.sharding import Shards, communication_errors, full_params, full_state, full_tensor

PLANNED_STEPS = 1000
"""Total steps that a dry run prepares for."""
IDLE = Batch(
    input_ids_BT=torch.zeros(1, 2, dtype=torch.int64),
    labels_BT=torch.tensor([[-100, 0]]),
    lengths_B=torch.tensor([2]),
    keys=(),
)
"""A batch for a rank that has no work left. Its result is multiplied by zero."""
MAX_SKIPPED = 32
"""Steps that the loss scale of fp16 may skip until it is small enough."""

MicroBatchLoss = tuple[torch.Tensor, Mapping[str, WeightedMean]]
"""Sum and metrics of the objective for a micro-batch, without their graph."""


class TrainEngine:
    """A model that is ready to take steps. It holds the memory of the optimizers until `release`."""

    def __init__(
        self,
        config: FinetuneTrainer,
        lm: LanguageModel,
        *,
        device: torch.device,
        process_group: ProcessGroup = SINGLE_PROCESS,
        sharded: bool = False,
        objective: Objective = CROSS_ENTROPY,
    ) -> None:
        """Prepare the module and build the optimizers.

        Args:
            config: Trainer section of the configuration.
            lm: Model to train; `lm.prepare_training` has been called.
            device: Device of the model.
            process_group: All processes of the run.
            sharded: Whether the ranks shard the weights (FSDP).
            objective: What is minimized.

        Raises:
            ConfigError: The device does not support the precision.
        """
        self.config, self.lm, self.device, self.process_group = config, lm, device, process_group
        self.objective = objective
        self.accelerator = build_accelerator(config, device)
        self.shards = (
            Shards(lm.module, device=device, ranks=process_group.world_size)
            if sharded and process_group.world_size > 1
            else None
        )
        self.optimizers: list[torch.optim.Optimizer] = []
        self.trained: Sequence[torch.nn.Parameter] = ()
        """The trained parameters, in the order of the module."""
        self.had_gradients: Sequence[bool] = ()
        """For each trained parameter, whether it had a gradient in the last step of a dry run; () before the first."""
        self.before = {name: vars(lm.module)[name] for name in PREPARED if name in vars(lm.module)}
        module = torch.compile(lm.module) if config.compile else lm.module
        # Evaluation mode only omits accelerate's DDP wrapper, because gradients are summed after all passes of a step.
        self.module: torch.nn.Module = self.accelerator.prepare_model(
            module, device_placement=False, evaluation_mode=True
        )
        self.build_optimizers()

    def build_optimizers(self) -> None:
        """Replace the optimizers with new ones without state."""
        if self.optimizers:
            self.optimizers.clear()
            self.accelerator.free_memory()  # its list would keep them alive, and unscale their gradients too
        parameters = {name: p for name, p in self.lm.module.named_parameters() if p.requires_grad}
        self.trained = list(parameters.values())
        built = build_optimizers(
            self.config.optimizer,
            parameters,
            learning_rate=1e-4,
            device=self.device,
            embeddings=embedding_names(self.lm.module),
        )
        self.optimizers.extend(self.accelerator.prepare_optimizer(one, device_placement=False) for one in built)

    @property
    def raw_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers without accelerate's wrapper; their state is saved."""
        return [getattr(optimizer, "optimizer", optimizer) for optimizer in self.optimizers]

    @property
    def uses_half_precision(self) -> bool:
        """Whether weights or computations use 16 bits."""
        dtypes = {parameter.dtype for parameter in self.lm.module.parameters()}
        return self.accelerator.mixed_precision != "no" or bool(dtypes & {torch.float16, torch.bfloat16})

    @property
    def mixed_precision(self) -> str:
        """The precision of accelerate's autocast: bf16 or fp16, or no without it."""
        return str(self.accelerator.mixed_precision)

    @property
    def context(self) -> ObjectiveContext:
        """What the objective computes with."""
        return ObjectiveContext(self.lm, self.module, self.process_group, full_weights=self.summon_full_params)

    def forward_backward(self, batch: Batch, *, denominator: float, loss_tokens: int) -> MicroBatchLoss:
        """Run forward and backward for a micro-batch, and return the objective's sum and its metrics.

        Args:
            batch: A micro-batch.
            denominator: Denominator of the whole step: the gradients are those of the sum divided by it.
            loss_tokens: Loss tokens of the whole step. An adapter's auxiliary loss is divided among micro-batches by
                their loss tokens.

        Raises:
            TrainingError: The module cannot be compiled, or the objective has returned something unusable.
        """
        with clear_compilation_errors() if self.config.compile else nullcontext():
            total, metrics = loss_of(self.objective, self.context, batch)
            mean = total / denominator
            extra = self.lm.auxiliary_loss()
            if extra is not None:
                mean = mean + extra * (batch.loss_tokens / loss_tokens)
            if not mean.requires_grad:
                called = f"{type(self.objective).__name__}.loss"
                raise TrainingError(f"{called} returned a sum that does not depend on the weights of the model")
            self.accelerator.backward(mean)
        return total.detach(), {name: one.detach() for name, one in metrics.items()}

    def prefetch(self, batch: Batch | None) -> None:
        """Begin to copy a micro-batch to the device, which still computes with another one; None is no batch."""
        if batch is not None and self.device.type != "cpu" and isinstance(self.lm, PrefetchingModel):
            self.lm.prefetch(batch)

    def forward_backward_idle(self) -> None:
        """Run a pass that changes no gradient, for ranks that have fewer micro-batches than others under FSDP."""
        self.accelerator.backward(self.context.token_log_probs(IDLE).sum() * 0.0)

    def has_gradients(self) -> list[bool]:
        """Return for each trained parameter whether it has a gradient."""
        return [parameter.grad is not None for parameter in self.trained]

    def all_reduce_gradients(self, there_are: Sequence[Sequence[bool]]) -> None:
        """Sum the gradients over the ranks, given the result of `has_gradients` of each rank.

        A parameter without a gradient on all ranks keeps none. Sharded gradients are summed by the backward pass.
        """
        if self.process_group.world_size == 1 or self.shards is not None:
            return
        for parameter, somewhere in zip(self.trained, map(any, zip(*there_are, strict=True)), strict=True):
            if somewhere and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.process_group.all_reduce_sum_([parameter.grad for parameter in self.trained if parameter.grad is not None])

    def clip(self) -> torch.Tensor:
        """Clip the gradients and return their norm before clipping, a scalar on the device."""
        clipping = self.config.gradient_clipping
        limit = math.inf if clipping.clipglobalnorm is None else clipping.clipglobalnorm
        norm: torch.Tensor = full_tensor(self.accelerator.clip_grad_norm_(self.trained, limit))
        if clipping.clipvalue is not None:
            self.accelerator.clip_grad_value_(self.trained, clipping.clipvalue)
        return norm

    def optimizer_step(self, number: int) -> None:
        """Update the weights in step `number`; gradients are None afterwards."""
        for optimizer in self.optimizers:
            optimizer.step()
        self.lm.after_step(number)
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def dry_run_step(self, batches: Sequence[Batch], *, accumulates: bool = False) -> None:
        """Take a step with learning rate 0; with fp16, as many as the loss scale needs to become small enough.

        The weights stay finite for any loss. Gradients are None afterwards, even if memory runs out.

        Args:
            batches: The micro-batches.
            accumulates: Whether the step begins with gradients, as after earlier micro-batches. They are zero, and the
                first step of a dry run has none, because the trained parameters without a gradient are not known yet.
        """
        set_learning_rate(self.raw_optimizers, 0.0)
        loss_tokens = sum(batch.loss_tokens for batch in batches)
        denominator = sum(denominator_of(self.objective, batch) for batch in batches)
        try:
            # A rank that runs out of memory would leave the others waiting in an exchange: there is none in a dry run.
            prepare(self.objective, ObjectiveContext(self.lm, self.module), batches)
            with self.lm.training():
                for _ in range(MAX_SKIPPED):
                    if accumulates:
                        self.allocate_gradients()
                    for batch in batches:
                        self.forward_backward(batch, denominator=denominator, loss_tokens=loss_tokens)
                    self.had_gradients = self.has_gradients()
                    if not math.isfinite(float(self.clip())) and self.accelerator.scaler is None:
                        clear_gradients(self.lm.module, to_zero=True)
                    self.optimizer_step(1)
                    if not any(getattr(optimizer, "step_was_skipped", False) for optimizer in self.optimizers):
                        break
        finally:
            clear_gradients(self.lm.module)
            if self.accelerator.scaler is not None:
                begin_scaler_step(self.accelerator.scaler, device=self.device)

    def allocate_gradients(self) -> None:
        """Create zero gradients of the parameters that had one in the last step of a dry run."""
        for parameter, had_one in zip(self.trained, self.had_gradients, strict=False):
            if had_one:
                parameter.grad = torch.zeros_like(parameter)

    def summon_full_params(self) -> AbstractContextManager[None]:
        """Unshard all weights on this rank inside the context, to use or write them. All ranks enter together."""
        return full_params(self.shards)

    @contextmanager
    def without_autocast(self) -> Iterator[None]:
        """Compute without accelerate's autocast in this context; `release` removes it for good."""
        own = vars(self.lm.module)
        prepared = {name: own[name] for name in PREPARED if name in own}
        self.remove_autocast()
        try:
            yield
        finally:
            own.update(prepared)

    def remove_autocast(self) -> None:
        """Restore the module as it was before accelerate wrapped its `forward` in autocast."""
        own = vars(self.lm.module)
        for name in PREPARED:
            own.pop(name, None)
        own.update(self.before)

    def optimizer_states(self) -> list[Any]:
        """Return the optimizer states for a checkpoint. All ranks call this; under FSDP only rank 0 gets tensors."""
        states = [optimizer.state_dict() for optimizer in self.raw_optimizers]
        if self.shards is None:
            return states
        with communication_errors("the state of the optimizers"):
            return [full_state(state, keep=self.process_group.rank == 0) for state in states]

    def release(self, *, failed: bool = False) -> None:
        """Restore the module without accelerate's autocast, and free the memory of the optimizers.

        Under FSDP all ranks call this, and the module is unsharded afterwards. That is skipped if the run has `failed`:
        other ranks may be gone, and the module is not used any more.
        """
        self.remove_autocast()
        self.module, self.trained = self.lm.module, ()
        if self.optimizers:
            self.optimizers.clear()
            self.accelerator.free_memory()
        if self.shards is not None and not failed:
            self.shards.unwrap()
            self.shards = None


@contextmanager
def dry_run(
    config: FinetuneTrainer,
    lm: LanguageModel,
    *,
    device: torch.device,
    process_group: ProcessGroup = SINGLE_PROCESS,
    sharded: bool = False,
    objective: Objective = CROSS_ENTROPY,
    accumulates: bool = False,
) -> Iterator[Callable[[Sequence[Batch]], None]]:
    """Yield a function that takes a step as `finetune` does; optimizer state stays allocated until exit.

    Under FSDP the ranks take the step together, and each has all weights after it, as in evaluations.

    Args:
        config: Trainer section of the configuration.
        lm: Model to train.
        device: Device of the model.
        process_group: All processes of the run.
        sharded: Whether the ranks shard the weights (FSDP).
        objective: What is minimized.
        accumulates: Whether steps after the first begin with gradients, as after earlier micro-batches.

    Raises:
        TrainingError: A first step on a short row runs out of memory under FSDP.
    """
    lm.prepare_training(PLANNED_STEPS)
    engine = TrainEngine(config, lm, device=device, process_group=process_group, sharded=sharded, objective=objective)
    take_step = partial(engine.dry_run_step, accumulates=accumulates)
    shards, failed = engine.shards, True
    if shards is not None:
        shards.unshard()

    def dry_run_together(batches: Sequence[Batch]) -> None:
        assert shards is not None
        shards.reshard()
        _, full = attempt(lambda: take_step(batches))
        if full is not None:
            raise TrainingError(
                f"rank {process_group.rank} ran out of memory in a first step on a short row, with the weights shared "
                f"by {process_group.world_size} processes; take more processes, an adapter, or a smaller base_model"
            ) from full
        shards.unshard()

    try:
        yield take_step if shards is None else dry_run_together
        failed = False
    finally:
        if shards is not None and not failed:
            shards.reshard()
        engine.release(failed=failed)
        if config.compile:
            torch.compiler.reset()  # shapes seen in the probes would change the kernels of the run


@contextmanager
def clear_compilation_errors() -> Iterator[None]:
    """Raise TrainingError, with torch's reason, if a module cannot be compiled."""
    try:
        yield
    except compilation_error() as error:
        said = str(error).partition("\n\n")[0]  # what follows is for developers of torch
        reason = shortened(" ".join(said.split()), 300)
        advice = "remove trainer.compile, or install what it needs: on a CPU a C++ compiler"
        raise TrainingError(f"torch.compile failed: {reason}", advice) from error


def begin_scaler_step(scaler: Any, *, device: torch.device) -> None:
    """Let a loss scaler accept the next step; the scale stays the same.

    If the optimizer ran out of memory, the scaler still waits for its update and refuses the next step.
    """
    scaler.scale(torch.zeros((), device=device))  # creates the scale, if memory ran out before the first loss
    scaler.update(scaler.get_scale())


def build_accelerator(config: FinetuneTrainer, device: torch.device) -> Accelerator:
    """Build the Accelerator for a device and precision. Raises ConfigError if the device does not support it."""
    precision = config.mixed_precision
    if precision == "auto":
        precision = (
            "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else "no"
        )
    if precision == "fp16" and device.type == "cpu":
        raise ConfigError([Problem("trainer.mixed_precision", "fp16 needs a GPU; on a CPU write bf16 or no")])
    reset_precision()
    return Accelerator(mixed_precision=precision, cpu=device.type == "cpu", device_placement=False)
