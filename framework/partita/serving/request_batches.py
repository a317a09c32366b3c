"""Answers requests in static batches, for models and settings without continuous batching."""

from collections import deque
from collections.abc import Callable

from partita.generation.requests import GenerationSettings
from partita.generation.static_batches import requests_or_errors
from partita.lm.base import Generated, GenerationRequest, GenerativeModel
from partita.serving.request_queue import PendingAnswer

Finish = Callable[[PendingAnswer, Generated | None, str | None], None]
"""Ends a request with its answer or its error."""


class RequestBatches:
    """Answers requests batch by batch: those with the same settings as the oldest one together."""

    def __init__(self, lm: GenerativeModel, settings: GenerationSettings, *, finish: Finish) -> None:
        """Answer with a model.

        Args:
            lm: The model.
            settings: The budget and the seed of the batches; requests have their own options.
            finish: Ends a request.
        """
        self.lm, self.settings, self.finish = lm, settings, finish
        self.running: list[PendingAnswer] = []
        """Requests of the batch that is being answered."""

    def take(self, waiting: deque[PendingAnswer]) -> None:
        """Take the oldest request that waits, and those with the same settings, as the next batch."""
        for pending in [pending for pending in waiting if pending.cancelled]:
            waiting.remove(pending)
        same = [pending for pending in waiting if pending.request.options == waiting[0].request.options]
        self.running = same[: self.settings.budget.batch_size]
        for pending in self.running:
            waiting.remove(pending)

    def answer(self) -> None:
        """Answer the batch. Raise JobError if the device has failed."""
        batch = list(self.running)
        if not batch:
            return
        settings = GenerationSettings(batch[0].request.options, self.settings.budget, self.settings.seed)
        requests = [
            GenerationRequest(list(one.request.input_ids), one.request.max_new_tokens, key=one.request.key)
            for one in batch
        ]
        for pending, result in zip(batch, requests_or_errors(self.lm, requests, settings), strict=True):
            self.finish(pending, result.generated, result.error)
            self.running.remove(pending)
