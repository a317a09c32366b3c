"""The trainer interface: a language model, training batches, an evaluation function and a run to write to.

Trainers never import the framework. The protocols they need are defined here, so that a third-party trainer is a class
with a `train` method, and a `probe` method if its batch size can be tuned.

Shapes: B sequences of a batch, T tokens of the longest sequence, N loss tokens, K targets of a loss token. A sequence
holds one row, or several if rows are packed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from partita_schema.common.files import replacing_folder
from partita_schema.common.text import counted
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup
from partita_trainers.sides import split_sides

if TYPE_CHECKING:
    import torch

    from partita_schema.config import Config
    from partita_trainers.batch_size.probe import Probe, Volume

Metrics = dict[str, float]
"""Metric values by name: `loss`, and `<output>.<metric>` for generated answers."""


@dataclass(frozen=True)
class Batch:
    """Rows as right-padded CPU tensors. A batch without rows has B = 0 and weight 0.

    Packed rows follow each other in a sequence and do not attend to each other. The first token of each has no label.

    A row of preferences is a prompt followed by several answers, its branches, which do not attend to each other.

    For a model with a head, a loss token is a token at which the head is compared with targets, one token per row in
    classification. Any token can be one, also the first of a row.
    """

    input_ids_BT: "torch.Tensor"
    """Token ids, int64."""
    labels_BT: "torch.Tensor"
    """Token ids of the loss tokens and -100 elsewhere, not shifted."""
    lengths_B: "torch.Tensor"
    """Number of tokens in each sequence without padding, int64."""
    keys: tuple[str, ...]
    """Key of each row, sequence by sequence. Stable under shuffling, and across runs on the same data."""
    position_ids_BT: "torch.Tensor | None" = None
    """For packed rows and branches, the position of each token in its row, int64, 0 in padding; branches continue at
    the position after the prompt. None if each sequence is one row without branches."""
    targets_NK: "torch.Tensor | None" = None
    """For a model with a head, the targets of the loss tokens, sequence by sequence, float32. None for a model that
    learns tokens."""
    two_sided: bool = False
    """Whether the rows are those of an encoder-decoder: the encoder reads what precedes a row's first loss token."""
    row_values_NK: "torch.Tensor | None" = None
    """Numbers of each row that the objective uses in addition to the tokens, float32, in the order of `keys`. None if
    rows have none."""

    @property
    def rows(self) -> int:
        """Number of rows. Packed rows count individually."""
        return len(self.keys)

    @property
    def sequences(self) -> int:
        """B, the number of sequences in the tensors."""
        return len(self.lengths_B)

    @property
    def tokens(self) -> int:
        """Number of tokens without padding."""
        return int(self.lengths_B.sum())

    @property
    def loss_tokens(self) -> int:
        """Number of loss tokens. Without a head, the first token of a row has no loss because it has no context."""
        return int(self._is_loss().sum())

    @property
    def loss_token_rows(self) -> "torch.Tensor":
        """Index in `keys` of the row of each loss token [N], int64, in the order of `LanguageModel.token_log_probs`."""
        is_loss = self._is_loss()
        if self.position_ids_BT is None:
            return is_loss.nonzero()[:, 0]
        row_BT = self.row_starts().flatten().cumsum(0).view_as(self.labels_BT) - 1
        return row_BT[:, 1:][is_loss]

    @property
    def has_branches(self) -> bool:
        """Whether a row has branches."""
        return self.position_ids_BT is not None and bool(self.branch_starts().any())

    @property
    def loss_token_branches(self) -> "torch.Tensor":
        """Number of the branch of each loss token in its row [N], int64, from 0; order as in `loss_token_rows`."""
        import torch

        if self.position_ids_BT is None:
            return torch.zeros(self.loss_tokens, dtype=torch.int64)
        branches_BT = self.branch_starts().cumsum(1)
        first_BT = torch.where(self.row_starts(), branches_BT, 0).cummax(1).values
        return (branches_BT - first_BT)[:, 1:][self._is_loss()]

    def _is_loss(self) -> "torch.Tensor":
        """Return which tokens are loss tokens [B, T]; without the first column if there are no targets."""
        return (self.labels_BT if self.targets_NK is not None else self.labels_BT[:, 1:]) != -100

    def attention_mask(self) -> "torch.Tensor":
        """Return an int64 tensor [B, T]: 1 for tokens and 0 for padding."""
        import torch

        return (torch.arange(self.input_ids_BT.shape[1]) < self.lengths_B[:, None]).long()

    def model_inputs(self, device: "torch.device | str | None" = None) -> dict[str, Any]:
        """Return keyword arguments for a model of transformers: `model(**batch.model_inputs(device))`.

        They are `input_ids`, `labels` and `attention_mask`, int64 [B, T]. For packed rows, `position_ids` and
        `use_cache=False` replace the mask: transformers separates rows by positions that restart, but only without a
        mask and a cache. The model shifts the labels itself. For an encoder-decoder, `input_ids` and `attention_mask`
        [B, S] hold the prompts, and `labels` [B, T] the answers.

        A batch without rows gives one token without a label, so that every rank can run the model. The mean loss of
        that token is NaN; its sum, which transformers computes if `num_items_in_batch` is passed, is 0.

        Args:
            device: Device of the tensors. Default: the CPU.
        """
        import torch

        if not self.sequences:
            token = torch.zeros(1, 1, dtype=torch.int64, device=device)
            return {"input_ids": token, "labels": token - 100, "attention_mask": token + 1}
        if self.two_sided:
            sides = split_sides(self).to(device)
            return {
                "input_ids": sides.input_ids_BS,
                "attention_mask": sides.attention_mask_BS,
                "labels": sides.labels_BT,
            }
        inputs = {"input_ids": self.input_ids_BT.to(device), "labels": self.labels_BT.to(device)}
        if self.position_ids_BT is not None:
            return {**inputs, "position_ids": self.position_ids_BT.to(device), "use_cache": False}
        return {**inputs, "attention_mask": self.attention_mask().to(device)}

    def row_starts(self) -> "torch.Tensor":
        """Return a bool tensor [B, T] that marks the first token of each packed row; False in padding."""
        import torch

        if self.position_ids_BT is None:
            raise AssertionError("only packed rows have positions")
        columns_T = torch.arange(self.position_ids_BT.shape[1])
        return (self.position_ids_BT == 0) & (columns_T < self.lengths_B[:, None])

    def branch_starts(self) -> "torch.Tensor":
        """Return a bool tensor [B, T] that marks the first token of each branch of a row except its first branch."""
        import torch

        if self.position_ids_BT is None:
            raise AssertionError("only packed rows and branches have positions")
        steps_BT = self.position_ids_BT.diff(dim=1, prepend=torch.full((self.sequences, 1), -1))
        return (steps_BT != 1) & (self.position_ids_BT != 0)


@dataclass(frozen=True)
class GlobalBatch:
    """The micro-batches of one optimizer step, and the data position after it."""

    micro_batches: tuple[Batch, ...]
    """This rank's micro-batches."""
    data_position: Mapping[str, Any]
    """JSON; `Batches.load_data_position` resumes at the step after this one."""
    epoch: float
    """Passes over the data completed after this step, as a fraction."""


class Batches(Protocol):
    """Training data as optimizer steps, the same for any number of data workers."""

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps in the first epoch; None if the length of the data is unknown."""

    @property
    def num_rows(self) -> int | None:
        """Rows in an epoch; None if unknown."""

    def total_steps(self, epochs: float) -> int:
        """Return the steps in `epochs` epochs, at least 1. Raises DataError if the length of the data is unknown."""

    def load_data_position(self, data_position: Mapping[str, Any]) -> None:
        """Resume after the step of `data_position`. Raises ResumeError if the data or the batch plan has changed."""

    def steps(self) -> Iterator[GlobalBatch]:
        """Yield this rank's part of each step from the current position, epoch after epoch, without end."""

    def merge_data_positions(self, data_positions: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Merge the positions of all ranks after the same step into one for the run."""


class IndexedBatches(Batches, Protocol):
    """Training data of a known size, which can be read before training."""

    def from_start(self) -> Batches:
        """Return the same batches from the first step on. Reading them changes neither counts nor the position."""


class LanguageModel(Protocol):
    """A trainable language model."""

    @property
    def module(self) -> "torch.nn.Module":
        """The module to train. Frozen parameters do not require gradients."""

    def loss(self, module: "torch.nn.Module", batch: Batch) -> "torch.Tensor":
        """Return the sum (not mean) of the cross-entropy over the loss tokens: a float32 scalar on the device.

        `module` is `self.module`, or a wrapper of it made by accelerate or torch.compile.
        """

    def token_log_probs(self, module: "torch.nn.Module", batch: Batch) -> "torch.Tensor":
        """Return the log-probability of each loss token given the tokens before it [N]: float32, on the device.

        Loss tokens are in the order of the batch, sequence by sequence. The negative sum is `loss` up to rounding, with
        the same gradients.
        """

    def prepare_training(self, total_steps: int) -> None:
        """Prepare for `total_steps` steps; AdaLoRA plans its rank budget here.

        Called once before the first forward pass, for new and resumed runs.
        """

    def auxiliary_loss(self) -> "torch.Tensor | None":
        """Return an adapter's extra loss of the last forward pass, e.g. AdaLoRA's orthogonality penalty, or None."""

    def after_step(self, step: int) -> None:
        """Update after an optimizer step, before gradients are cleared; AdaLoRA reallocates its rank budget here."""

    def training(self) -> AbstractContextManager[None]:
        """Put the module in training mode inside the context, with NEFTune noise if it is enabled."""

    def save_checkpoint(self, folder: Path) -> None:
        """Write everything that training changes, without loss of precision (safetensors, JSON)."""

    def load_checkpoint(self, folder: Path) -> None:
        """Restore a checkpoint bit for bit. Raises ResumeError if it does not match the model."""

    def save(self, folder: Path) -> None:
        """Write the model and tokenizer in the standard Hugging Face or peft layout."""


class Run(Protocol):
    """The run directory, log and manifest that a trainer writes to."""

    @property
    def folder(self) -> Path:
        """The run directory."""

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""

    def log_step(self, record: Mapping[str, Any]) -> None:
        """Append a line to log.jsonl."""

    def truncate_log(self, step: int) -> None:
        """Drop logged steps after `step`; they are taken again after a resume."""

    def report(self, metrics: Metrics, *, step: int, split: str) -> None:
        """Record the metrics of a split in the manifest and send them to the trackers."""

    def note(self, **values: Any) -> None:
        """Record values in the manifest."""

    def progress(self, total: int, description: str, *, completed: int = 0) -> AbstractContextManager["Progress"]:
        """Show a progress bar, or plain lines if there is no terminal."""


class Progress(Protocol):
    """A progress bar."""

    def advance(self, amount: int = 1, **shown: Any) -> None:
        """Advance the bar and show values such as loss=0.31."""


class Evaluate(Protocol):
    """Evaluates a split."""

    def __call__(
        self, split: str, *, generated: bool = True, max_rows: int | None = None, step: int | None = None
    ) -> Metrics:
        """Return the metrics of a split, validation or test; {} for one that is empty or not evaluated.

        The results of the rows are recorded in the run directory if answers are generated, or if `max_rows` is None.

        Args:
            split: Name of the split.
            generated: Whether answers are generated and scored.
            max_rows: Number of rows for which answers are generated, evenly spaced; None for all.
            step: Training step of the weights, which is recorded.
        """


@dataclass(frozen=True)
class TrainerContext:
    """Everything that a trainer needs."""

    config: "Config"
    """The validated configuration."""
    lm: LanguageModel
    """The model to train."""
    batches: Batches | None
    """None if the run has no training rows."""
    evaluate: Evaluate
    """Computes the metrics of a split: `evaluate(split, generated=..., max_rows=...)`."""
    splits: Sequence[str]
    """Splits that have rows."""
    run: Run
    """Where rank 0 writes. Other ranks write nothing to it."""
    device: "torch.device"
    """Device of the model."""
    process_group: ProcessGroup = SINGLE_PROCESS
    """All processes of the run."""
    callbacks: Sequence[object] = ()
    """Callbacks of the user, on rank 0; see `partita_trainers.Callbacks`."""
    validation_rows: str = ""
    """Hash of the validation rows; empty if there are none."""


@dataclass(frozen=True)
class TrainResult:
    """The result of a training run."""

    run: Path
    """The run directory."""
    metrics: Mapping[str, Metrics]
    """Metrics by split."""
    steps: int
    """Total optimizer steps, including those before a resume."""
    resumed_from: int | None = None
    """Step that this call resumed from."""
    stopped_early: bool = False
    """Whether the run ended before its last step: no better validation metric in `early_stop` evaluations, or a
    callback asked to stop."""
    batch_sizes: Mapping[str, Any] = field(default_factory=dict)
    """Batch sizes used for training and evaluation."""
    folds: Sequence[Mapping[str, Metrics]] = ()
    """With cross-validation, the metrics of each fold; `metrics` has their means."""
    intervals: Mapping[str, Mapping[str, tuple[float, float]]] = field(default_factory=dict)
    """With cross-validation, 95 % confidence intervals of the means by split and metric."""
    dialogues: Sequence[Mapping[str, float]] = ()
    """With self-training, the metrics of the episodes of each round, rolled out with the weights before that round.

    If a guard is configured, the last entry is for the final weights.
    """

    def __str__(self) -> str:
        """Return the steps, the run directory, and a table of the metrics by split."""
        names = list(dict.fromkeys(name for values in self.metrics.values() for name in values))
        width = max(map(len, names), default=0)
        heads = [f"{split:>12}" for split in self.metrics]
        cells = [
            [f"{values[name]:>12.4g}" if name in values else " " * 12 for values in self.metrics.values()]
            for name in names
        ]
        rows = [f"{name:<{width}}{''.join(row)}" for name, row in zip(["", *names], [heads, *cells], strict=True)]
        early = ", stopped early" if self.stopped_early else ""
        return "\n".join([f"{counted(self.steps, 'step')}{early}; the run is in {self.run}", *(rows if names else [])])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the result as IPython and notebooks show it."""
        printer.text(str(self))


@dataclass(frozen=True)
class ProbeContext:
    """Everything that a trainer needs to probe batch sizes."""

    config: "Config"
    """The validated configuration."""
    lm: LanguageModel
    """The model to train."""
    device: "torch.device"
    """Device of the model."""
    max_row_tokens: int
    """Tokens of the longest training row."""
    max_loss_tokens: int
    """Largest number of loss tokens in a row."""
    token_ids: Sequence[int]
    """Ids of ordinary tokens: in the vocabulary, and not special."""
    max_rows: int
    """Upper bound on the rows of a batch of this data."""
    volume: "Callable[[int], Volume]"
    """volume(rows): batches and tokens of an epoch at that batch size."""
    estimated_bytes: Callable[[int], int]
    """estimated_bytes(rows): memory of a batch by a formula, for devices that cannot measure it."""
    packed: bool = False
    """Whether rows are packed. Then every count of rows in this class is a count of sequences."""
    streamed: bool = False
    """Whether rows are read during training, so that their number is not known."""
    accumulates: bool = False
    """Whether steps have several micro-batches at some batch size; all but the first of a step begin with gradients."""
    process_group: ProcessGroup = SINGLE_PROCESS
    """All processes of the run."""


class Trainer(Protocol):
    """Built from the run's configuration and used once.

    Attributes of the class say what it can do:

    - `objective` (`partita_trainers.Objective`): what evaluations during training compute; otherwise cross-entropy
    - `calls_callbacks = True`: it calls the callbacks of the configuration (`partita_trainers.Callbacks`)
    - `sums_gradients = True`: it sums gradients over all processes before each step
      (`context.process_group.all_reduce_sum_`); without it, several processes are refused
    """

    def train(self, context: TrainerContext) -> TrainResult:
        """Train to the end, resuming from the newest checkpoint of the run."""

    def probe(self, context: ProbeContext) -> "AbstractContextManager[Probe] | None":
        """Return a probe of training batch sizes for `batch_size: auto`; None if nothing is trained.

        The probe runs only inside its context. On exit, the model and the random generators are restored. A custom
        class may omit this method; its configurations then need a number.
        """


def save_result(lm: LanguageModel, folder: Path) -> None:
    """Replace `model/` in the run folder as a whole, so that no files of an older model remain."""
    with replacing_folder(folder / "model") as temporary:
        lm.save(temporary)
