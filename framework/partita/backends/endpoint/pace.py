"""Rate limiting: requests are spaced evenly, and paused while the server asks to wait."""

import asyncio
import time
from collections.abc import Callable

MINUTE = 60.0


class RateLimiter:
    """Spaces requests so that no minute exceeds the limits. Used by the tasks of one event loop.

    The length of an answer is unknown before it arrives: a request reserves the most tokens that it may use, and
    releases the rest.
    """

    def __init__(
        self,
        *,
        requests_per_minute: int | None,
        tokens_per_minute: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds_per_request = MINUTE / requests_per_minute if requests_per_minute else 0.0
        self.seconds_per_token = MINUTE / tokens_per_minute if tokens_per_minute else 0.0
        self.clock = clock
        self.turns = asyncio.Lock()
        self.next_by_requests = self.next_by_tokens = self.held_until = clock()

    async def turn(self, tokens: int) -> None:
        """Wait until a request of at most `tokens` tokens may be sent."""
        async with self.turns:
            while (seconds := self.seconds_to_wait()) > 0:
                await asyncio.sleep(seconds)
            now = self.clock()
            self.next_by_requests = now + self.seconds_per_request
            self.next_by_tokens = max(self.next_by_tokens, now) + tokens * self.seconds_per_token

    def seconds_to_wait(self) -> float:
        """Return the seconds until a request may be sent."""
        return max(self.next_by_requests, self.next_by_tokens, self.held_until) - self.clock()

    def give_back(self, tokens: int) -> None:
        """Release reserved tokens that a request did not use; a negative number reserves more."""
        self.next_by_tokens -= tokens * self.seconds_per_token

    def hold(self, seconds: float) -> None:
        """Send no request for this many seconds."""
        self.held_until = max(self.held_until, self.clock() + seconds)
