"""Counts and times of an engine, for metrics."""

import time
from dataclasses import dataclass, field

from partita.serving.request_queue import PendingAnswer

MAX_TIMES = 100_000
"""Maximum number of times that are kept until `take_times` is called."""


@dataclass
class EngineCounts:
    """Counts and times since an engine was created."""

    requests: int = 0
    """Requests that were accepted."""
    cancelled: int = 0
    """Requests that were cancelled before their end."""
    errors: int = 0
    """Requests that ended without an answer."""
    prompt_tokens: int = 0
    """Tokens of the prompts of accepted requests."""
    generated_tokens: int = 0
    """Tokens of the answers that have ended."""
    steps: int = 0
    """Decoding steps, each of one token for every active request."""
    first_token_seconds: list[float] = field(default_factory=list)
    """Times from a request to its first token, since `take_times` was called."""
    answer_seconds: list[float] = field(default_factory=list)
    """Times from a request to the end of its answer, since `take_times` was called."""

    def add(self, pending: PendingAnswer, *, failed: bool) -> None:
        """Count a request that has ended now."""
        self.errors += failed
        self.generated_tokens += pending.num_tokens
        if pending.first_token is not None and len(self.answer_seconds) < MAX_TIMES:
            self.first_token_seconds.append(pending.first_token - pending.submitted)
            self.answer_seconds.append(time.perf_counter() - pending.submitted)

    def take_times(self) -> tuple[list[float], list[float]]:
        """Return the times to first tokens and to the ends of answers since the last call."""
        firsts, ends = self.first_token_seconds, self.answer_seconds
        self.first_token_seconds, self.answer_seconds = [], []
        return firsts, ends
