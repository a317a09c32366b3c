"""Which blocks of the paged KV cache are free, and how many rows use each of the others.

Rows share blocks that hold the same tokens. Blocks in use never move, so a row that ends only gives its blocks back.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

SCRAP = 0
"""Block that rows without a request write to; it is never attended to."""
EMPTY = 1
"""Block after the last one of a row in the block table: always zeros. It is attended to with a mask, and a mask does
not remove NaN."""
RESERVED = 2


def blocks_for(tokens: int, *, block_tokens: int) -> int:
    """Return the number of blocks of this many tokens."""
    return -(-tokens // block_tokens)


class Copy(NamedTuple):
    """A block to copy before the row of the copy is written to."""

    source: int
    target: int


class BlockPool:
    """Counts the rows that use each block."""

    def __init__(self, blocks: int, *, block_tokens: int) -> None:
        """Set up the pool.

        Args:
            blocks: Number of blocks, without the reserved ones.
            block_tokens: Tokens of a block.
        """
        self.block_tokens = block_tokens
        self.total = RESERVED + blocks
        """Number of blocks, with the reserved ones."""
        self.free = list(range(self.total - 1, RESERVED - 1, -1))
        self.users: dict[int, int] = {}
        """Number of rows by block in use."""
        self.broken: set[int] = set()
        """Blocks that may hold NaN, and are cleared before another row uses them."""

    def allocate(self, count: int) -> list[int]:
        """Return blocks that no row uses. Raise MemoryError if there are not enough."""
        if count > len(self.free):
            raise MemoryError(f"{count:,} blocks of the KV cache are needed, and {len(self.free):,} are free")
        blocks = [self.free.pop() for _ in range(count)]
        self.users.update(dict.fromkeys(blocks, 1))
        return blocks

    def fork(self, blocks: Sequence[int], *, shared: int, tokens: int) -> tuple[list[int], list[Copy]]:
        """Return the blocks of a row that begins like another one, and those to copy. Raise MemoryError.

        Full blocks of the common tokens are shared. The block after them is copied, as both rows write to it.

        Args:
            blocks: Blocks of the other row.
            shared: Number of common tokens.
            tokens: Number of tokens of the new row.
        """
        full, rest = divmod(shared, self.block_tokens)
        own = self.allocate(blocks_for(tokens, block_tokens=self.block_tokens) - full)
        for block in blocks[:full]:
            self.users[block] += 1
        return [*blocks[:full], *own], [Copy(blocks[full], own[0])] if rest else []

    def release(self, blocks: Iterable[int], *, broken: bool = False) -> list[int]:
        """Give back the blocks of a row; return the ones to clear, because a row without scores used them.

        Args:
            blocks: Blocks of the row.
            broken: Whether the scores of the row were NaN.
        """
        unclean = []
        for block in blocks:
            if broken:
                self.broken.add(block)
            self.users[block] -= 1
            if self.users[block]:
                continue
            del self.users[block]
            self.free.append(block)
            if block in self.broken:
                self.broken.remove(block)
                unclean.append(block)
        return unclean
