"""What a trainer is, and what it is handed: a language model, batches, an evaluation and a place to write.

Trainers never import the framework. What they need stands here as small protocols, so that a trainer from outside is
a class with a method, or two where its batch size is to be found.

Shapes: B lines of a batch, T tokens of its longest line. A line is a row, or several where rows are packed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup

if TYPE_CHECKING:
    import torch

    from partita_schema.config import Config
    from partita_trainers.batch_size.probe import Probe, Volume

Metrics = dict[str, float]
"""Numbers by name: `loss`, and `<output>.<metric>` for generated answers."""


@dataclass(frozen=True)
class Batch:
    """Rows as tensors on the CPU, padded on the right; a batch without rows has B = 0 and weight 0.

    Packed rows stand one behind the other in a line and do not see each other. The first token of each has no label.
    """

    input_ids_BT: "torch.Tensor"
    """Token ids, int64."""
    labels_BT: "torch.Tensor"
    """Token ids where a token is learned, -100 elsewhere, not shifted."""
    lengths_B: "torch.Tensor"
    """Real tokens of each line, int64."""
    keys: tuple[str, ...]
    """Key of each row, line by line: stable under shuffling, and across runs on the same data."""
    position_ids_BT: "torch.Tensor | None" = None
    """Where rows are packed: place of each token in its row, int64, 0 at the first; padding has 0 everywhere. None
    where every row has a line of its own."""

    @property
    def rows(self) -> int:
        """Number of rows; packed ones count each."""
        return len(self.keys)

    @property
    def lines(self) -> int:
        """B: rows of the tensors."""
        return len(self.lengths_B)

    @property
    def tokens(self) -> int:
        """Real tokens, without padding."""
        return int(self.lengths_B.sum())

    @property
    def loss_tokens(self) -> int:
        """Tokens with a loss. The first token of a row has none, packed or not: nothing stands before it."""
        return int((self.labels_BT[:, 1:] != -100).sum())


@dataclass(frozen=True)
class GlobalBatch:
    """The batches of one optimizer step, and where the data stands once they are used."""

    micro_batches: tuple[Batch, ...]
    state_dict: Mapping[str, Any]
    """JSON; `Batches.load_state_dict` of it continues with the step after this one."""
    epoch: float
    """Passes over the data once this step is used."""


class Batches(Protocol):
    """Training data as optimizer steps, the same for any number of workers."""

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps in the first pass over the data; None where the data's length is not known."""

    @property
    def num_rows(self) -> int | None:
        """Rows in a pass over the data; None where that is not known."""

    def total_steps(self, epochs: float) -> int:
        """Steps of so many passes, at least 1. Raises DataError where the data's length is not known."""

    def load_state_dict(self, cursor: Mapping[str, Any]) -> None:
        """Continue after that step. Raises ResumeError when the data or the plan are not the same."""

    def steps(self) -> Iterator[GlobalBatch]:
        """Steps from the cursor on, epoch after epoch, without end: of each the batches of this rank."""

    def merge_state_dicts(self, cursors: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """One cursor of the run out of those that the ranks have behind the same step."""


class LanguageModel(Protocol):
    """A model that can learn: what a trainer may do with it."""

    @property
    def module(self) -> "torch.nn.Module":
        """What is trained. Frozen parameters do not require gradients."""

    def loss(self, module: "torch.nn.Module", batch: Batch) -> "torch.Tensor":
        """Sum (not mean) of the cross-entropy over the batch's loss tokens, in float32, a scalar on the device.

        `module` is `self.module`, or a wrapper of it that accelerate or torch.compile made.
        """

    def prepare_training(self, total_steps: int) -> None:
        """Called once before the first forward pass, resumed or not (AdaLoRA plans its budget over the steps)."""

    def auxiliary_loss(self) -> "torch.Tensor | None":
        """What an adapter adds to the loss of the last forward pass, such as AdaLoRA's orthogonality penalty."""

    def after_step(self, step: int) -> None:
        """Called after each optimizer step, before gradients are cleared (AdaLoRA moves its budget here)."""

    def training(self) -> AbstractContextManager[None]:
        """In this context the module is in training mode, with NEFTune noise when it is on."""

    def save_checkpoint(self, folder: Path) -> None:
        """Write what training changes, exactly (safetensors, JSON)."""

    def load_checkpoint(self, folder: Path) -> None:
        """Read it back, bit for bit. Raises ResumeError when it does not fit."""

    def save(self, folder: Path) -> None:
        """Write the result in the standard Hugging Face or peft layout, with the tokenizer."""


class Run(Protocol):
    """Where a trainer writes what happened."""

    @property
    def folder(self) -> Path:
        """The run directory."""

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""

    def log_step(self, record: Mapping[str, Any]) -> None:
        """Append a line to log.jsonl."""

    def truncate_log(self, step: int) -> None:
        """Forget logged steps after `step`: they are run again after a resume."""

    def report(self, metrics: Metrics, *, step: int, split: str) -> None:
        """Keep metrics of a split in the manifest, and pass them to the trackers."""

    def note(self, **values: Any) -> None:
        """Keep values in the manifest."""

    def progress(self, total: int, description: str, *, completed: int = 0) -> AbstractContextManager["Progress"]:
        """A progress bar, or plain lines where there is no terminal."""


class Progress(Protocol):
    """A progress bar."""

    def advance(self, amount: int = 1, **shown: Any) -> None:
        """Move on, and show values such as loss=0.31."""


Evaluate = Callable[[str, bool, "int | None"], Metrics]
"""evaluate(split, generated, max_rows): metrics of a split, {} for an empty one.

With `generated`, answers are generated and scored too.
"""


@dataclass(frozen=True)
class TrainerContext:
    """All that a trainer is handed."""

    config: "Config"
    lm: LanguageModel
    batches: Batches | None
    """None where the run has no training rows."""
    evaluate: Evaluate
    splits: Sequence[str]
    """Splits that have rows."""
    run: Run
    """Where rank 0 writes; of other ranks nothing is written there."""
    device: "torch.device"
    process_group: ProcessGroup = SINGLE_PROCESS
    """The processes of the run."""


@dataclass(frozen=True)
class TrainResult:
    """What came out of a run."""

    run: Path
    """The run directory."""
    metrics: Mapping[str, Metrics]
    """Metrics by split."""
    steps: int
    """Optimizer steps taken in all, those before a resume included."""
    resumed_from: int | None = None
    """Step that this call continued from."""
    stopped_early: bool = False
    """No better validation metric for `early_stop` evaluations."""
    batch_sizes: Mapping[str, Any] = field(default_factory=dict)
    """Sizes that were used: training and evaluation."""
    dialogues: Sequence[Mapping[str, float]] = ()
    """Where the file asks for rounds, what the dialogues of each came to, had with the weights of before it; last those
    with the result, where the file has a guard."""


@dataclass(frozen=True)
class ProbeContext:
    """All that a trainer is handed to try batch sizes with."""

    config: "Config"
    lm: LanguageModel
    device: "torch.device"
    max_row_tokens: int
    """Tokens of the longest training row."""
    max_loss_tokens: int
    """Most learned tokens of a row."""
    token_ids: Sequence[int]
    """Ordinary tokens: in the vocabulary, and none of the special ones."""
    max_rows: int
    """No batch of the data can hold more rows."""
    volume: "Callable[[int], Volume]"
    """volume(rows): batches and tokens of an epoch in batches of that many rows."""
    estimated_bytes: Callable[[int], int]
    """estimated_bytes(rows): what a batch should take by a formula, for devices that cannot measure it."""
    packed: bool = False
    """Rows are packed: what is said of rows here holds for the lines that they fill."""
    process_group: ProcessGroup = SINGLE_PROCESS
    """All processes of the run, this one among them."""


class Trainer(Protocol):
    """Made from the run's configuration and used once."""

    def train(self, context: TrainerContext) -> TrainResult:
        """Run to the end, continuing from the newest checkpoint in the run."""

    def probe(self, context: ProbeContext) -> "AbstractContextManager[Probe] | None":
        """What to try batch sizes with, where the file says `batch_size: auto`; None where nothing is trained.

        The trial runs inside the context only; when that ends, the model and the random generators are what they were.
        A class of the user's may lack this method; its files then need a number.
        """
