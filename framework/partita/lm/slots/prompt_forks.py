"""Prompts that several requests share: computed once, then copied to the slot of each request.

The keys and values of a prompt depend on its tokens alone, and an active row does not change those of its prompt. So
another sample of the prompt starts with a copy of them and with the same logits, as if its prompt had been computed.

Shapes: N rows, V vocabulary.
"""

from collections.abc import Sequence

import torch

from partita.lm.base import SlotRequest
from partita.lm.decoding.row import Row
from partita.lm.slots.kv_cache import SlotKVCache


class PromptForks:
    """The shared prompts of active rows, with the logits after each."""

    def __init__(self) -> None:
        self.logits: dict[int, torch.Tensor] = {}
        """Logits [V] after a prompt, by the prompt's name."""

    def split(
        self, requests: Sequence[SlotRequest], rows: Sequence[Row]
    ) -> tuple[list[SlotRequest], list[SlotRequest]]:
        """Return the requests to compute, and those whose prompt another request or an active row has.

        Args:
            requests: Requests without cached tokens.
            rows: The active rows.
        """
        known = {row.request.shared for row in rows if row.request.shared is not None}
        self.logits = {name: logits_V for name, logits_V in self.logits.items() if name in known}
        computed, forked = [], []
        for request in requests:
            if request.shared is not None and request.shared in known:
                forked.append(request)
                continue
            computed.append(request)
            if request.shared is not None:
                known.add(request.shared)
        forked.sort(key=lambda request: request.shared or 0)
        return computed, forked

    def remember(self, requests: Sequence[SlotRequest], logits_NV: torch.Tensor) -> None:
        """Keep the logits after the prompts that are shared.

        Args:
            requests: The requests that were computed.
            logits_NV: Logits after their prompts.
        """
        for request, logits_V in zip(requests, logits_NV, strict=True):
            if request.shared is not None:
                self.logits[request.shared] = logits_V.clone()

    def copy(
        self, pool: SlotKVCache, requests: Sequence[SlotRequest], sources: Sequence[SlotRequest], *, first: int
    ) -> torch.Tensor:
        """Copy shared prompts to the slots from `first` on; return the logits after them [N, V].

        Args:
            pool: The KV cache.
            requests: The requests to fork, those with the same prompt next to each other.
            sources: The request in each slot before `first`.
            first: Slot of the first of `requests`.
        """
        slots = {source.shared: slot for slot, source in enumerate(sources)}
        start = 0
        while start < len(requests):
            name = requests[start].shared
            end = next((i for i in range(start, len(requests)) if requests[i].shared != name), len(requests))
            pool.fork(
                slots[name],
                targets=range(first + start, first + end),
                start=pool.layout.prefix,
                end=len(requests[start].input_ids),
            )
            start = end
        return torch.stack([self.logits[request.shared] for request in requests if request.shared is not None])
