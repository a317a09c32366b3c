"""The decode step of constant shapes, and its CUDA graphs.

A step reads and writes buffers whose addresses do not change, and its shapes do not depend on data: the number of rows
is rounded up to one of a few sizes, and the same operations run on the same shapes for each token. So on a GPU it is
captured once for each size, and replayed without Python. On a CPU it is called.

Shapes: N rows, rounded up, V vocabulary.
"""

from typing import Any

import torch

from partita.lm.paged.attention import PagedAttention, attending
from partita.lm.paged.cache import PagedKVCache, PagedPass, written_at
from partita.lm.paged.next_token import DeviceChoice
from partita.lm.paged.row_state import RowState
from partita_trainers.libraries.torch_internals import leave_failed_capture

SMALLEST = 4
"""Smallest number of rows of a step."""
WARM_UPS = 2
"""Steps before a capture, in which libraries choose kernels and allocate memory."""


def padded_rows(rows: int, *, most: int) -> int:
    """Return the number of rows of a step for at least this many: a power of two, at most `most`."""
    return min(most, max(SMALLEST, 1 << (rows - 1).bit_length()))


class DecodeStep:
    """Decodes one token of each of the first rows."""

    def __init__(
        self,
        base: Any,
        cache: PagedKVCache,
        state: RowState,
        *,
        attention: PagedAttention,
        choice: DeviceChoice,
    ) -> None:
        """Set up the step.

        Args:
            base: The model.
            cache: Its cache.
            state: The state of all rows.
            attention: How the model attends to the cache.
            choice: How tokens are chosen.
        """
        self.base, self.cache, self.state = base, cache, state
        self.attention, self.choice = attention, choice
        self.starts = torch.arange(len(state.ids) + 1, dtype=torch.int32, device=state.ids.device)

    def __call__(self, rows: int) -> torch.Tensor:
        """Decode a token of each of the first `rows` rows; return the tokens [N], which the next step continues."""
        state = self.state.first(rows)
        tokens_N = self.choice(self.logits(state), state)
        state.advance(tokens_N)
        return tokens_N

    def logits(self, state: RowState) -> torch.Tensor:
        """Write the last tokens of rows to the cache; return the logits of the next ones [N, V]."""
        written_N = written_at(state.tables, state.positions, block_tokens=self.attention.block_tokens)
        lengths_N = (state.positions + 1).int()
        now = PagedPass(state.tables, lengths_N, self.starts[: len(lengths_N) + 1], written_N)
        with attending(self.base, self.cache, self.attention, now):
            logits: torch.Tensor = self.base(
                input_ids=state.ids[:, None],
                position_ids=state.positions[:, None],
                past_key_values=self.cache,
                use_cache=True,
            ).logits
        return logits[:, -1]


class StepRunner:
    """Runs decode steps: replays a CUDA graph for each number of rows on a GPU, calls the step elsewhere."""

    def __init__(self, step: DecodeStep) -> None:
        self.step = step
        self.graphs: dict[int, tuple[Any, torch.Tensor]] = {}
        """The graph and its output, by the number of rows."""
        self.pool: Any = None
        """Memory that all graphs share: only one of them runs at a time."""
        self.stream: Any = None
        """The CUDA stream of all captures, which torch demands of graphs that share memory."""

    @torch.no_grad()
    def __call__(self, rows: int) -> torch.Tensor:
        """Decode a token of each of the first `rows` rows; return the tokens [N], until the next call."""
        if self.step.state.ids.device.type != "cuda":
            return self.step(rows)
        if rows not in self.graphs:
            with torch.cuda.device(self.step.state.ids.device):
                self.graphs[rows] = self.capture(rows)
        graph, tokens_N = self.graphs[rows]
        graph.replay()
        return tokens_N

    def capture(self, rows: int) -> tuple[Any, torch.Tensor]:
        """Return the graph of a step and its output.

        The steps before the capture write the same keys and values as the first replay, and the state is restored.
        """
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
            self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        before, outside = self.step.state.copied(), torch.cuda.current_stream()
        self.stream.wait_stream(outside)
        with torch.cuda.stream(self.stream):
            for _ in range(WARM_UPS):
                self.step(rows)
                self.step.state.restore(before)
        outside.wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads, such as those of a server, may use CUDA meanwhile.
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                tokens_N = self.step(rows)
        except BaseException:
            leave_failed_capture(outside, self.pool)
            raise
        return graph, tokens_N
