"""Block ids of one group's device pool: who owns which."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moorage.prefix_cache.block import BlockId
from moorage.prefix_cache.errors import DoubleFree, ForeignBlock, InvalidInput, OutOfBlocks

FREE = 0
IN_USE = 1
CACHED = 2
_NAMES = ("free", "in use", "cached")


class BlockPool:
    """A free list and one owner state per block.

        free ──take──▶ in use ──adopt──▶ cached
          ▲              │                 │
          └────────────give────────────────┘

    Every move checks the state it leaves, so that a double free or an id of another pool is an
    error where it happens and not a wrong token later. All costs are O(blocks moved); memory is one
    byte and one id a block.
    """

    def __init__(self, num_blocks: int, on_free: Callable[[Sequence[BlockId]], None]) -> None:
        if num_blocks < 1:
            raise InvalidInput(f"num_blocks is {num_blocks}, allowed is 1 or more")
        self.num_blocks = num_blocks
        self._on_free = on_free
        # Reversed, so that a fresh pool gives 0, 1, 2, …: last in, first out keeps warm memory
        # warm.
        self._free = [BlockId(index) for index in reversed(range(num_blocks))]
        self._state = bytearray(num_blocks)
        self._num_cached = 0

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that the tree owns."""
        return self._num_cached

    @property
    def num_in_use(self) -> int:
        """Blocks that are private to some table."""
        return self.num_blocks - len(self._free) - self._num_cached

    def free_ids(self) -> list[BlockId]:
        """A copy of the free list."""
        return list(self._free)

    def state(self, block_id: BlockId) -> int:
        """FREE, IN_USE or CACHED. Raises ForeignBlock."""
        if not 0 <= block_id < self.num_blocks:
            raise ForeignBlock(
                f"block {block_id} is not one of this pool's 0 … {self.num_blocks - 1}"
            )
        return self._state[block_id]

    def take(self, num_blocks: int) -> list[BlockId]:
        """Make blocks private. Raises OutOfBlocks and changes nothing where there are too few."""
        if num_blocks > len(self._free):
            raise OutOfBlocks(
                f"{num_blocks} blocks are needed and {len(self._free)} of {self.num_blocks} are"
                " free: release a context or raise num_blocks"
            )
        if num_blocks <= 0:
            return []
        taken = self._free[: -num_blocks - 1 : -1]
        del self._free[-num_blocks:]
        for block_id in taken:
            self._state[block_id] = IN_USE
        return taken

    def adopt(self, block_ids: Sequence[BlockId]) -> None:
        """Private blocks become the tree's. Raises ForeignBlock and changes nothing where one is
        not private.
        """
        self._check(block_ids, IN_USE)
        for block_id in block_ids:
            self._state[block_id] = CACHED
        self._num_cached += len(block_ids)

    def give(self, block_ids: Sequence[BlockId], owner: int) -> None:
        """Blocks of `owner` (IN_USE or CACHED) become free; `on_free` sees them before anyone can
        take them.

        Raises DoubleFree or ForeignBlock and changes nothing where one is not this owner's.
        """
        if not block_ids:
            return
        self._check(block_ids, owner)
        for index, block_id in enumerate(block_ids):
            if self._state[block_id] == FREE:  # the same id twice in one call
                for earlier in block_ids[:index]:
                    self._state[earlier] = owner
                raise DoubleFree(f"block {block_id} is given back twice in one call")
            self._state[block_id] = FREE
        if owner == CACHED:
            self._num_cached -= len(block_ids)
        self._free.extend(reversed(block_ids))
        self._on_free(block_ids)

    def _check(self, block_ids: Sequence[BlockId], owner: int) -> None:
        for block_id in block_ids:
            state = self.state(block_id)
            if state == FREE:
                raise DoubleFree(f"block {block_id} is free already: it cannot change hands")
            if state != owner:
                raise ForeignBlock(
                    f"block {block_id} has another owner: {_NAMES[state]}, not {_NAMES[owner]}"
                )
