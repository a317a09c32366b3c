"""The processes of a configuration and the rows of a step, computed without starting anything."""

from dataclasses import asdict, dataclass
from typing import Any

from partita_schema.common.text import counted
from partita_schema.config import Config
from partita_schema.sections.backend import RayBackendConfig, TorchrunBackendConfig
from partita_schema.sections.batching import PackBatching, TokenBudgetBatching
from partita_schema.sections.trainer import FinetuneTrainer


@dataclass(frozen=True)
class ProcessLayout:
    """Processes and rows of a step; None if it depends on the machine or the data."""

    nodes: int | None
    """Number of machines; None if Ray chooses them."""
    processes: int | None
    """Processes per machine, or in total if Ray chooses the machines; None for one per GPU."""
    step_rows: int | None
    """Rows of a step over all processes."""
    batch_size: int | None
    """Rows of a micro-batch."""
    accumulation: int | None
    """Micro-batches per process and step."""
    sharded: bool = False
    """Whether the processes shard the weights of the trained model."""

    @property
    def ranks(self) -> int | None:
        """World size."""
        return None if self.processes is None else (self.nodes or 1) * self.processes

    def record(self) -> dict[str, Any]:
        """Return the layout as JSON."""
        return {**asdict(self), "ranks": self.ranks}

    def lines(self) -> list[str]:
        """Return a description for the user."""
        lines = [self.processes_line]
        if self.step_rows is not None and self.ranks is not None and self.step_rows % self.ranks:
            lines.append(
                f"a step: {counted(self.step_rows, 'row')}, which {self.ranks} processes cannot share evenly; write "
                "another trainer.effective_batch_size"
            )
        elif self.step_rows is not None:
            parts = [counted(self.ranks, "process", "processes") if self.ranks is not None else "the processes"]
            parts += [counted(self.accumulation, "batch", "batches")] if self.accumulation is not None else []
            parts += [counted(self.batch_size, "row")] if self.batch_size is not None else []
            lines.append(f"a step: {counted(self.step_rows, 'row')} = {' x '.join(parts)}" + self.size_note)
        elif self.accumulation is not None:
            lines.append(f"a step: {counted(self.accumulation, 'batch', 'batches')} for each process")
        if self.sharded:
            part = "its part" if self.ranks is None else f"1/{self.ranks}"
            lines.append(f"weights, gradients and optimizer state: each process holds {part} of them")
        return lines

    @property
    def processes_line(self) -> str:
        """Which processes are started, and where."""
        if self.nodes is None:
            if self.processes is None:
                return "one worker for each GPU of the Ray cluster, else one"
            return f"{counted(self.processes, 'worker')}, on machines that Ray finds"
        each = "one process for each GPU" if self.processes is None else counted(self.processes, "process", "processes")
        machines = counted(self.nodes, "machine")
        whole = f", {self.ranks} in all" if self.ranks is not None and self.nodes > 1 else ""
        return f"{machines}, {each} on each{whole}"

    @property
    def size_note(self) -> str:
        """A note if the batch size is still to be tuned."""
        return "" if self.batch_size is not None else "; batch_size is auto and found when the run begins"


def process_layout(config: Config) -> ProcessLayout | None:
    """Return the layout of a configuration that asks for several processes; None for any other."""
    backend, trainer = config.backend, config.trainer
    if isinstance(backend, TorchrunBackendConfig):
        nodes, configured = backend.nodes, backend.processes
    elif isinstance(backend, RayBackendConfig):
        nodes, configured = None, backend.workers
    else:
        return None
    processes = configured if isinstance(configured, int) else None
    if config.run_backend != backend or not isinstance(trainer, FinetuneTrainer):
        return ProcessLayout(nodes, processes, None, None, None)
    ranks = None if processes is None else (nodes or 1) * processes
    by_tokens = isinstance(config.data.batching, TokenBudgetBatching | PackBatching)
    sharded = backend.sharding == "full"
    return ProcessLayout(nodes, processes, *step_sizes(trainer, ranks, by_tokens=by_tokens), sharded=sharded)


def step_sizes(
    trainer: FinetuneTrainer, ranks: int | None, *, by_tokens: bool
) -> tuple[int | None, int | None, int | None]:
    """Return rows per step, rows per micro-batch and micro-batches per process, each None if unknown."""
    size = trainer.batch_size if isinstance(trainer.batch_size, int) else None
    each = trainer.gradient_accumulation_steps
    if each is not None:
        known = size is not None and ranks is not None and not by_tokens
        return (ranks or 0) * each * (size or 0) if known else None, size, each
    if by_tokens:
        return None, None, None
    rows = trainer.step_rows
    if size is None or ranks is None or rows is None:
        return rows, size, None
    if trainer.effective_batch_size is None:
        rows = max(rows, size * ranks)
    return rows, size, rows // (size * ranks) if rows % (size * ranks) == 0 else None
