"""The worst-case training batch: rows as long as the longest, with as many loss tokens as any."""

from collections.abc import Sequence

import torch

from partita_trainers.base import Batch

SEED = 0


def worst_batch(rows: int, *, tokens: int, loss_tokens: int, token_ids: Sequence[int], packed: bool = False) -> Batch:
    """Build a batch of random rows.

    The last of several rows is one token shorter, because real batches contain rows of different lengths. There are at
    least two tokens, one of them a loss token: the first token of a row has no loss.

    Args:
        rows: Number of rows; of lines with `packed`.
        tokens: Tokens of each row.
        loss_tokens: Loss tokens at the end of each row.
        token_ids: Ids to draw from.
        packed: Put two rows into each line, the first of one token, so that the model has to keep rows apart. Lines
            have at
            least three tokens.
    """
    free = 2 if packed else 1
    tokens = max(free + 1, tokens)
    loss_tokens = min(max(1, loss_tokens), tokens - free)
    allowed = torch.tensor(token_ids)
    chosen = torch.randint(len(allowed), (rows, tokens), generator=torch.Generator().manual_seed(SEED))
    ids_BT = allowed[chosen]
    labels_BT = ids_BT.clone()
    labels_BT[:, : tokens - loss_tokens] = -100
    lengths_B = torch.full((rows,), tokens)
    if rows > 1:
        lengths_B[-1] = tokens - 1
        labels_BT[-1, -1] = -100
        if loss_tokens < tokens - free:
            labels_BT[-1, tokens - loss_tokens - 1] = ids_BT[-1, tokens - loss_tokens - 1]
    keys = tuple(f"probe:{row}" for row in range(rows * free))
    return Batch(ids_BT, labels_BT, lengths_B, keys, two_rows_a_line(rows, tokens) if packed else None)


def two_rows_a_line(lines: int, tokens: int) -> torch.Tensor:
    """Return position ids [lines, tokens] of lines with a one-token row and a row of the rest.

    The last line ends with padding.
    """
    positions_BT = (torch.arange(tokens) - 1).clamp(min=0).repeat(lines, 1)
    if lines > 1:
        positions_BT[-1, -1] = 0
    return positions_BT
