"""What a batch size is tried with, and what came out: the words that search, memory, trainers and framework share.

A trial is work at its worst: prompts as long as the longest of the data, all new tokens, the exact options. It says
nothing about memory, which is the device's to tell, and nothing about which size to try, which is the search's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Protocol

Purpose = Literal["generation", "evaluation", "training"]
Verdict = Literal["fits", "too large", "out of memory"]
Origin = Literal["file", "tuned", "cached", "default"]


@dataclass(frozen=True)
class Timing:
    """Seconds of a batch at its worst."""

    prefill_seconds: float
    """The forward pass over the prompts; in evaluation the forward pass, in training the whole step."""
    decode_seconds: float = 0.0
    """One decode step at full length; 0 where nothing is generated."""


@dataclass(frozen=True)
class Volume:
    """The whole data at a batch size."""

    batches: int
    """Batches that it makes."""
    tokens: int
    """Tokens that go through the model in them, padding included, new tokens not."""
    rows: int | None = None
    """Rows of the data, where batches of size 1 are not one for each."""


class Probe(Protocol):
    """Work at its worst, with any number of rows."""

    @property
    def purpose(self) -> Purpose:
        """What the size is for."""

    @property
    def max_rows(self) -> int:
        """No batch of the work can hold more rows."""

    @property
    def prompt_tokens(self) -> int:
        """S: tokens of the longest prompt; in evaluation and training of the longest row."""

    @property
    def new_tokens(self) -> int:
        """N: tokens that are generated for a row at most; 0 where nothing is."""

    def warm_up(self) -> None:
        """Run something small, so that what libraries and optimizers keep from then on counts as held."""

    def run(self, rows: int) -> Timing:
        """Do the work once with this many rows of the greatest length, exactly as it will be done.

        Raises whatever the device raises. Leaves no tensor behind.
        """

    def estimated_bytes(self, rows: int) -> int:
        """What a batch should take by a formula, for devices that cannot measure it."""

    def decode_step(self, rows: int) -> float:
        """Seconds of one decode step at the usual length of the data; 0 where nothing is generated."""

    def volume(self, rows: int) -> Volume:
        """What the data comes to in batches of this size; of size 1, `batches` is the number of rows, or `rows` is."""


@dataclass(frozen=True)
class ProbeResult:
    """One size that was tried at the worst case."""

    rows: int
    """Rows of the batch."""
    verdict: Verdict
    """fits; too large: it ran, and took more than the budget; out of memory: the device refused."""
    used_bytes: int | None
    """Peak of what the batch held at once, on top of what was held before; None where it did not run."""
    taken_bytes: int | None
    """Peak of what the process took from the device for it: `used_bytes` and what the allocator could not fill."""
    prefill_seconds: float | None = None
    decode_seconds: float | None = None
    rows_per_second: float | None = None
    """Rows of the data a second at this size, foretold from the measured times."""
    seconds: float = 0.0
    """Time that the probe took, warming up and cleaning up included."""


@dataclass(frozen=True)
class BatchSize:
    """A batch size, and how it was found."""

    rows: int
    """The size that is used: `best`, within what the user allows."""
    origin: Origin
    """file: the user wrote it; tuned: measured now; cached: measured earlier and tried again now; default: there was
    nothing to choose, such as for a single row."""
    device: str
    max_fitting: int | None = None
    """Most rows that fit the budget at the worst case."""
    best: int | None = None
    """Fewest rows that come within 2 % of the fastest."""
    probes: Sequence[ProbeResult] = ()
    """In the order they were made."""
    throughputs: Sequence[tuple[int, float]] = ()
    """(rows, rows of the data a second) of the sizes whose speed was looked at."""
    out_of_memory: bool = False
    """Whether the device ran out of memory, in a probe or since."""
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    budget_bytes: int | None = None
    """What a batch was allowed to take."""
    seconds: float = 0.0
    """Time that finding it took."""
    max_tokens: int | None = None
    """Tokens of a batch in training with a token budget, of a line where rows are packed."""

    def record(self) -> dict[str, Any]:
        """As JSON, for the manifest; what was not looked for is left out."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        found |= {
            "probes": [asdict(probe) for probe in self.probes],
            "throughputs": [list(pair) for pair in self.throughputs],
        }
        return {name: value for name, value in found.items() if value not in (None, [], 0.0, False)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "BatchSize":
        """What `record` gave; keys of a newer version are left out. Raises TypeError where one is missing."""
        known = only_fields(cls, record)
        probes = tuple(ProbeResult(**only_fields(ProbeResult, probe)) for probe in known.pop("probes", None) or ())
        throughputs = tuple((int(rows), float(speed)) for rows, speed in known.pop("throughputs", None) or ())
        return cls(**known, probes=probes, throughputs=throughputs)


def only_fields(kind: type[Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Of a record, what a dataclass has fields for."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in record.items() if name in names}
