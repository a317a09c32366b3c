"""When requests may begin: evenly apart within what a minute allows, and none while a server asks to wait."""

import asyncio
import time
from collections.abc import Callable

MINUTE = 60.0


class RateLimiter:
    """Requests begin one after the other; used by the tasks of one event loop.

    They are as far apart as the limits say, so that in no minute there are more. The tokens of an answer are not known
    before it comes: a request takes as many as it may have, and gives back what it did not need.
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
        """Wait until a request of at most so many tokens may begin."""
        async with self.turns:
            while (seconds := self.seconds_to_wait()) > 0:
                await asyncio.sleep(seconds)
            now = self.clock()
            self.next_by_requests = now + self.seconds_per_request
            self.next_by_tokens = max(self.next_by_tokens, now) + tokens * self.seconds_per_token

    def seconds_to_wait(self) -> float:
        """Time until a request may begin."""
        return max(self.next_by_requests, self.next_by_tokens, self.held_until) - self.clock()

    def give_back(self, tokens: int) -> None:
        """Let the next request begin earlier by the tokens that one did not need; later where they are negative."""
        self.next_by_tokens -= tokens * self.seconds_per_token

    def hold(self, seconds: float) -> None:
        """Let no request begin for so long."""
        self.held_until = max(self.held_until, self.clock() + seconds)
