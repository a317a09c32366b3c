"""The rows that a batch has to bear: as long as the longest, with as many learned tokens as any."""

from collections.abc import Sequence

import torch

from partita_trainers.base import Batch

SEED = 0


def worst_batch(rows: int, *, tokens: int, learned: int, token_ids: Sequence[int], packed: bool = False) -> Batch:
    """`rows` random rows of `tokens` tokens, the last `learned` of which have a loss.

    Of several rows the last is a token shorter: rows of different lengths are what a batch of real ones holds. There
    are two tokens at least, and one learned: the first token of a row has no loss. With `packed` they are lines, of
    three tokens at least, whose first token is a row of its own, so that the model has rows to keep apart.
    """
    free = 2 if packed else 1
    tokens = max(free + 1, tokens)
    learned = min(max(1, learned), tokens - free)
    allowed = torch.tensor(token_ids)
    chosen = torch.randint(len(allowed), (rows, tokens), generator=torch.Generator().manual_seed(SEED))
    ids_BT = allowed[chosen]
    labels_BT = ids_BT.clone()
    labels_BT[:, : tokens - learned] = -100
    lengths_B = torch.full((rows,), tokens)
    if rows > 1:
        lengths_B[-1] = tokens - 1
        labels_BT[-1, -1] = -100
        if learned < tokens - free:
            labels_BT[-1, tokens - learned - 1] = ids_BT[-1, tokens - learned - 1]
    keys = tuple(f"trial:{row}" for row in range(rows * free))
    return Batch(ids_BT, labels_BT, lengths_B, keys, two_rows_a_line(rows, tokens) if packed else None)


def two_rows_a_line(lines: int, tokens: int) -> torch.Tensor:
    """Positions of lines that hold a row of one token and a row of the others; the last line ends with padding."""
    positions_BT = (torch.arange(tokens) - 1).clamp(min=0).repeat(lines, 1)
    if lines > 1:
        positions_BT[-1, -1] = 0
    return positions_BT
