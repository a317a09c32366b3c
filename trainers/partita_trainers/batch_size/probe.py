"""Batch size probes and their results: the types shared by search, memory, trainers and framework.

A probe is work in the worst case: the longest prompts of the data, all new tokens, the exact options. It does not
measure memory, which `memory` does, and does not choose sizes, which `search` does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Protocol

Purpose = Literal["generation", "evaluation", "training"]
Verdict = Literal["fits", "too large", "out of memory"]
Origin = Literal["file", "max_tokens", "tuned", "cached", "default"]


@dataclass(frozen=True)
class Timing:
    """Seconds of a batch in the worst case."""

    prefill_seconds: float
    """Forward pass over the prompts; in evaluation the forward pass, in training the whole step."""
    decode_seconds: float = 0.0
    """One decode step at full length; 0 if nothing is generated."""


@dataclass(frozen=True)
class Volume:
    """The whole data at a batch size."""

    batches: int
    """Number of batches."""
    tokens: int
    """Tokens that pass through the model, including padding but not new tokens."""
    rows: int | None = None
    """Rows of the data, if batches of size 1 are not one per row."""


class Probe(Protocol):
    """Work in the worst case with any number of rows."""

    @property
    def purpose(self) -> Purpose:
        """What the batch size is for."""

    @property
    def max_rows(self) -> int:
        """Upper bound on the rows of a batch."""

    @property
    def prompt_tokens(self) -> int:
        """S: tokens of the longest prompt; in evaluation and training, of the longest row."""

    @property
    def new_tokens(self) -> int:
        """N: maximum new tokens of a row; 0 if nothing is generated."""

    def warm_up(self) -> None:
        """Run something small, so that memory which libraries and optimizers keep counts as held."""

    def run(self, rows: int) -> Timing:
        """Do the work once with `rows` rows of maximum length, exactly as in the run.

        Raises any error of the device. Leaves no tensors allocated.
        """

    def estimated_bytes(self, rows: int) -> int:
        """Return the memory of a batch by a formula, for devices that cannot measure it."""

    def decode_step(self, rows: int) -> float:
        """Return the seconds of a decode step at the usual length of the data; 0 if nothing is generated."""

    def volume(self, rows: int) -> Volume:
        """Return batches and tokens of the data at this size. At size 1, `batches` or `rows` is the number of rows."""


@dataclass(frozen=True)
class ProbeResult:
    """The result of probing one size in the worst case."""

    rows: int
    """Rows of the batch."""
    verdict: Verdict
    """fits; too large: it ran and took more than the budget; out of memory: the device refused."""
    used_bytes: int | None
    """Peak of the memory held at once, above what was held before; None if it did not run."""
    taken_bytes: int | None
    """Peak of the memory taken from the device: `used_bytes` plus the allocator's overhead."""
    prefill_seconds: float | None = None
    """See `Timing`; None if it was not measured."""
    decode_seconds: float | None = None
    """See `Timing`; None if it was not measured."""
    rows_per_second: float | None = None
    """Rows of the data per second at this size, predicted from the measured times."""
    seconds: float = 0.0
    """Duration of the probe, including warm-up and clean-up."""


@dataclass(frozen=True)
class BatchSize:
    """A batch size and how it was found."""

    rows: int
    """The size in use: `best`, limited by what the user allows."""
    origin: Origin
    """file: set by the user; tuned: measured now; cached: measured earlier and probed again now; max_tokens: as many of
    the longest rows as `data.batching.max_tokens` allows; default: no choice, such as for a single row.
    """
    device: str
    """The device that it was found on."""
    max_fitting: int | None = None
    """Most rows that fit the budget in the worst case."""
    best: int | None = None
    """Fewest rows within 2 % of the fastest."""
    probes: Sequence[ProbeResult] = ()
    """Results in the order of the probes."""
    throughputs: Sequence[tuple[int, float]] = ()
    """(rows, rows of the data per second) of the sizes that were considered."""
    out_of_memory: bool = False
    """Whether the device ran out of memory, in a probe or since."""
    prompt_tokens: int | None = None
    """Tokens of the longest prompt, as probed; in evaluation and training, of the longest row."""
    new_tokens: int | None = None
    """Maximum new tokens of a row, as probed."""
    budget_bytes: int | None = None
    """Memory that a batch was allowed to take."""
    seconds: float = 0.0
    """Duration of the search."""
    max_tokens: int | None = None
    """Tokens of a training batch with a token budget; of a sequence if rows are packed."""

    def record(self) -> dict[str, Any]:
        """Return the JSON record for the manifest; empty values are omitted."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values |= {
            "probes": [asdict(probe) for probe in self.probes],
            "throughputs": [list(pair) for pair in self.throughputs],
        }
        return {name: value for name, value in values.items() if value not in (None, [], 0.0, False)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "BatchSize":
        """Build from a result of `record`; keys of newer versions are ignored. Raises TypeError if a key is missing."""
        known = only_fields(cls, record)
        probes = tuple(ProbeResult(**only_fields(ProbeResult, probe)) for probe in known.pop("probes", None) or ())
        throughputs = tuple((int(rows), float(speed)) for rows, speed in known.pop("throughputs", None) or ())
        return cls(**known, probes=probes, throughputs=throughputs)


def only_fields(kind: type[Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a record that are fields of a dataclass."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in record.items() if name in names}
