"""Answers of the engine for asynchronous callers, with a limit on their time."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial

from partita.generation.predictions import Answer
from partita.generation.prompts import PromptRows
from partita.lm.base import Generated
from partita.serving.engine import STOPPING, EngineStoppedError, ServingEngine, Ticket, TooManyWaitingError
from partita.serving.errors import ApiError
from partita.serving.request_queue import AnswerEnd, AnswerPiece, AnswerRequest
from partita.serving.row_jobs import RowJob


def submit_error(error: Exception) -> ApiError:
    """Return the response to a request that the engine does not accept."""
    return ApiError(429 if isinstance(error, TooManyWaitingError) else 503, str(error))


class AsyncEngine:
    """The engine for coroutines."""

    def __init__(self, engine: ServingEngine, *, max_seconds: float) -> None:
        """Wrap an engine; an answer that takes longer than `max_seconds` is cancelled."""
        self.engine, self.max_seconds = engine, max_seconds

    async def events(self, requests: Sequence[AnswerRequest]) -> AsyncGenerator[tuple[int, AnswerPiece | AnswerEnd]]:
        """Yield the events of answers, each with the index of its request.

        If the caller stops early, the answers are cancelled.

        Raises:
            ApiError: The engine does not accept the requests, or the answers take too long.
        """
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[tuple[int, AnswerPiece | AnswerEnd]]()
        end = loop.time() + self.max_seconds
        waiting, tickets, left = deque(enumerate(requests)), list[Ticket](), len(requests)

        def put(index: int, event: AnswerPiece | AnswerEnd) -> None:
            call(loop, queue.put_nowait, (index, event))

        try:
            while left:
                try:
                    while waiting:
                        index, request = waiting[0]
                        tickets.append(self.engine.submit(request, partial(put, index)))
                        waiting.popleft()
                except TooManyWaitingError:
                    if len(tickets) == len(requests) - left:
                        raise
                    # The others are submitted as these end.
                # The tasks of a response may take turns here, so no timeout spans a yield.
                index, event = await asyncio.wait_for(queue.get(), end - loop.time())
                left -= isinstance(event, AnswerEnd)
                yield index, event
        except (TooManyWaitingError, EngineStoppedError) as error:
            raise submit_error(error) from None
        except TimeoutError:
            raise self.too_slow() from None
        finally:
            if left:
                for ticket in tickets:
                    ticket.cancel()

    async def answers(self, requests: Sequence[AnswerRequest]) -> list[Generated]:
        """Return whole answers. Raise ApiError if one is missing."""
        return [answer_of(end) for end in await self.ends(requests)]

    async def ends(self, requests: Sequence[AnswerRequest]) -> list[AnswerEnd]:
        """Return whole answers, or why there is none. Raise ApiError if the engine has stopped."""
        found: dict[int, AnswerEnd] = {}
        async with aclosing(self.events(requests)) as events:
            async for index, event in events:
                if isinstance(event, AnswerEnd):
                    if event.error is not None and event.error in (STOPPING, self.engine.failure):
                        answer_of(event)
                    found[index] = event
        return [found[index] for index in range(len(requests))]

    async def rows(self, rows: PromptRows) -> Sequence[Answer]:
        """Return the answers to rows, in their order.

        Raises:
            ApiError: The engine does not accept the rows, or they take too long.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Sequence[Answer]] = loop.create_future()

        def done(answers: Sequence[Answer], error: Exception | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(answers)
            else:
                future.set_exception(error)

        job = RowJob(rows, lambda answers, error: call(loop, done, answers, error))
        try:
            self.engine.submit_job(job)
        except (TooManyWaitingError, EngineStoppedError) as error:
            raise submit_error(error) from None
        try:
            async with asyncio.timeout(self.max_seconds):
                return await future
        except TimeoutError:
            raise self.too_slow() from None
        except EngineStoppedError as error:
            raise submit_error(error) from None
        finally:
            job.cancelled = not future.done() or future.cancelled()

    def too_slow(self) -> ApiError:
        """Return the response to a request that took too long."""
        return ApiError(504, f"no answer within {self.max_seconds:g} s; ask for fewer tokens, or try again later")


def call(loop: asyncio.AbstractEventLoop, function: object, *arguments: object) -> None:
    """Call a function in a loop, from another thread; nothing happens if the loop has ended."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, *arguments)  # type: ignore[arg-type]


def answer_of(event: AnswerEnd) -> Generated:
    """Return the answer in an end event. Raise ApiError if there is none."""
    if event.generated is None:
        status = 503 if event.error == STOPPING else 500
        raise ApiError(status, event.error or "no answer")
    return event.generated
