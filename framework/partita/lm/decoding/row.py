"""The generation state of a row, which grammars, samplers and slots share."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from partita.lm.base import SlotRequest, TokenLogprob

NOT_NUMBERS = "the model's scores are NaN"


@dataclass(slots=True)
class Row:
    """The generation state of a row."""

    request: SlotRequest
    settings: Any = None
    """Its `RowSettings`, in slots."""
    new: list[int] = field(default_factory=list)
    """New tokens so far."""
    logprob: float = 0.0
    """Log probability of the new tokens so far."""
    token_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Log probability of each new token, if they are reported."""
    uniforms: Sequence[float] = ()
    """One random number in [0, 1) per token."""
    processors: Any = None
    """Logits processors of the row."""
    matcher: Any = None
    """Grammar matcher."""
    matched: int = 0
    """Number of new tokens that the matcher has consumed."""
    broken: bool = False
    """Whether no token could be chosen."""
    reason: str = NOT_NUMBERS
    """The reason, if the row is broken."""

    @property
    def length(self) -> int:
        """Number of tokens of the prompt and the completion so far."""
        return len(self.request.input_ids) + len(self.new)
