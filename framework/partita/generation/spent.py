"""What answers cost: tokens processed, seconds, and steps."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Spent:
    """What a part of a generation job has taken."""

    prompt_tokens: int = 0
    """Prompt tokens processed, including those of rows that were not requested."""
    padded_tokens: int = 0
    """The same including padding."""
    seconds: float = 0.0
    """All seconds, including tries that did not fit."""
    prefill_seconds: float = 0.0
    """Seconds of prefill; 0 if not measured separately."""
    decode_seconds: float = 0.0
    """Seconds of decoding steps, each of one token per row."""
    slot_steps: int = 0
    """Number of slots, summed over the decoding steps."""
    row_steps: int = 0
    """Number of slots in use, summed over the decoding steps."""
    out_of_memory: int = 0
    """How often memory ran out."""

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def with_mean_seconds(self, workers: int) -> "Spent":
        """Return the same with seconds divided by the number of workers, which ran at the same time."""
        return replace(
            self,
            seconds=self.seconds / workers,
            prefill_seconds=self.prefill_seconds / workers,
            decode_seconds=self.decode_seconds / workers,
        )
