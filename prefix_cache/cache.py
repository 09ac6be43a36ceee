"""The facade: who owns which block. One thread (the engine's) calls it; nothing here waits or
computes KV.

    match ─▶ open ─▶ grow ─▶ (the runner writes KV) ─▶ commit ─▶ … ─▶ release │ discard
                      ▲                                  │  └──▶ fork ─▶ another table
                      └──────── truncate (rewind) ◀──────┘

After every call: free + evictable + locked + in use = total.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moorage.prefix_cache.block import (
    TOKEN_BYTES,
    BlockHash,
    BlockId,
    BlockTable,
    Bytes,
    Lineage,
    hash_block,
    num_tokens_in,
)
from moorage.prefix_cache.block_pool import CACHED, IN_USE, BlockPool
from moorage.prefix_cache.cache_config import CacheConfig, CacheStatistics, GroupConfig
from moorage.prefix_cache.errors import CommitMismatch, InvalidInput, OutOfBlocks, TableReleased
from moorage.prefix_cache.evicted_run import EvictedRun, run_before
from moorage.prefix_cache.integrity import check_books
from moorage.prefix_cache.radix_tree import Lock, Node, Position, RadixTree

__all__ = [
    "BlockTable",
    "CacheConfig",
    "CacheStatistics",
    "EvictedRun",
    "GroupConfig",
    "PrefixCache",
    "PrefixMatch",
]


@dataclass(frozen=True)
class PrefixMatch:
    """A promise of nothing: what `match` saw. `open` looks again where the tree has changed
    since.
    """

    lineage: Lineage
    num_tokens: int
    """Matched tokens, whole blocks."""
    num_blocks: int
    token_ids: Bytes
    """What was asked for; the caller keeps it unchanged until `open`."""
    position: Position
    version: int


def _ignore(block_ids: Sequence[BlockId]) -> None:
    del block_ids


def _let_go(run: EvictedRun) -> None:
    del run


class PrefixCache:
    """See the module. `on_free` is called with every block that becomes free, before anyone can
    take it again; `on_evict` with every whole run that eviction (not `discard`) breaks up, before that.
    """

    def __init__(
        self,
        config: CacheConfig,
        on_free: Callable[[Sequence[BlockId]], None] = _ignore,
        on_evict: Callable[[EvictedRun], None] = _let_go,
        *,
        hasher: Callable[[BlockHash, Bytes], BlockHash] = hash_block,
    ) -> None:
        """`hasher` exists for tests: with a constant one the cache must still never mix two prompts
        up.
        """
        config.validate()
        self.config = config
        self.pool = BlockPool(config.groups[0].num_blocks, on_free)
        self.tree = RadixTree(config.block_size, self._before_eviction)
        self.tables: set[BlockTable] = set()
        """Every table that is open."""
        self._hasher = hasher
        self.on_evict = on_evict
        self._hit_tokens = 0
        self._miss_tokens = 0
        self._num_evicted = 0

    # -- life of a table ---------------------------------------------------------------------------

    def match(self, lineage: Lineage, token_ids: Bytes) -> PrefixMatch:
        """Longest prefix in whole blocks that is on the device. Locks nothing and makes nothing
        younger.

        Raises InvalidInput where `token_ids` is not whole tokens. About 0.1 ms per 100K tokens.
        """
        num_tokens_in(token_ids)
        position = self.tree.find(lineage, token_ids)
        return PrefixMatch(
            lineage=lineage,
            num_tokens=position.num_blocks * self.config.block_size,
            num_blocks=position.num_blocks,
            token_ids=token_ids,
            position=position,
            version=self.tree.version,
        )

    def open(self, match_or_lineage: PrefixMatch | Lineage) -> BlockTable:
        """A table that holds (locks) the match; for a lineage or an empty match an empty one.

        Where blocks were evicted since `match`, the table is shorter: its `num_committed` is what
        counts.
        """
        match = match_or_lineage
        if isinstance(match, Lineage):
            match = self.match(match, b"")
        if match.version != self.tree.version:
            match = self.match(match.lineage, match.token_ids)
        table = BlockTable(match.lineage, self.tree.lock(match.lineage, match.position))
        table.block_ids, table.block_hashes = self.tree.contents(match.position)
        table.block_deltas = [0] * len(table.block_ids)
        self.tables.add(table)
        self._hit_tokens += match.num_tokens
        self._miss_tokens += num_tokens_in(match.token_ids) - match.num_tokens
        return table

    def grow(self, table: BlockTable, num_tokens: int) -> None:
        """Private blocks so that `num_tokens` slots exist; evicts unlocked blocks where none is
        free.

        Raises OutOfBlocks and changes nothing where free and evictable blocks do not suffice.
        """
        self._lock_of(table)
        missing = -(-num_tokens // self.config.block_size) - table.num_blocks
        if missing <= 0:
            return
        self._make_free(missing)
        table.block_ids.extend(self.pool.take(missing))
        table.block_deltas.extend([0] * missing)

    def commit(
        self,
        table: BlockTable,
        token_ids: Bytes,
        num_computed: int,
        known: Sequence[BlockHash] = (),
    ) -> None:
        """Full blocks below `num_computed` tokens become findable and locked.

        `known`: hashes of the log's leading blocks, as a load has computed them; the rest is hashed
        here.

        A block that the tree has already (another context was faster) replaces ours, which is
        freed: later readers must take `table.block_ids` anew. `token_ids` is the log from its
        start. Raises InvalidInput or CommitMismatch and changes nothing.
        """
        lock = self._lock_of(table)
        size = self.config.block_size
        done, full = table.num_committed, num_computed // size
        if full <= done:
            return
        block_bytes = size * TOKEN_BYTES
        view = memoryview(token_ids)
        if len(view) < full * block_bytes or full > table.num_blocks:
            raise InvalidInput(
                f"num_computed is {num_computed}, but the log has {len(view) // TOKEN_BYTES} tokens"
                f" and the table {table.num_blocks * size} slots"
            )
        if (
            done
            and self._last_committed(lock) != view[(done - 1) * block_bytes : done * block_bytes]
        ):
            raise CommitMismatch(
                f"the log differs from the table's committed block {done - 1}: truncate it first"
            )
        hashes = list(known[done:full])
        parent = hashes[-1] if hashes else self._parent_hash(table)
        for index in range(done + len(hashes), full):
            parent = self._hasher(parent, view[index * block_bytes : (index + 1) * block_bytes])
            hashes.append(parent)
        ours = table.block_ids[done:full]
        tokens = bytes(view[done * block_bytes : full * block_bytes])
        final = self.tree.extend(lock, tokens, b"".join(hashes), ours)
        self.pool.adopt([mine for mine, kept in zip(ours, final, strict=True) if mine == kept])
        self.pool.give(
            [mine for mine, kept in zip(ours, final, strict=True) if mine != kept], IN_USE
        )
        table.block_ids[done:full] = final
        table.block_hashes.extend(hashes)

    def truncate(self, table: BlockTable, num_tokens: int) -> tuple[BlockId, BlockId] | None:
        """Rewind to `num_tokens`: drop the blocks beyond.

        Where the new end lies inside a committed block, that block is shared and immutable: the
        table gets a private block in its place, and (source, destination) is returned for the
        caller to copy before the next `grow`. Raises OutOfBlocks and changes nothing where no block
        can be had for it.
        """
        lock = self._lock_of(table)
        size = self.config.block_size
        keep, whole = -(-num_tokens // size), num_tokens // size
        if num_tokens < 0 or keep > table.num_blocks:
            raise InvalidInput(
                f"num_tokens is {num_tokens}, allowed is 0 … {table.num_blocks * size} (its slots)"
            )
        copies = whole < table.num_committed and keep > whole
        if copies:
            obtainable = self.pool.num_free + self._num_evictable()
            obtainable += table.num_blocks - max(keep, table.num_committed)
            if obtainable + self.tree.num_held_alone(lock, keep) < 1:
                raise OutOfBlocks(
                    "a rewind into a shared block needs 1 block for a copy and none can be had:"
                    " release a context or raise num_blocks"
                )
        private_from = max(keep, table.num_committed)
        if keep < table.num_committed:
            self.tree.rewind(lock, keep)
            del table.block_hashes[keep:]
        self.pool.give(table.block_ids[private_from:], IN_USE)
        del table.block_ids[keep:]
        del table.block_deltas[keep:]
        if not copies:
            return None
        self._make_free(1)  # while the source is still held, so that it cannot be the victim
        source, (destination,) = table.block_ids[whole], self.pool.take(1)
        self.tree.rewind(lock, whole)
        del table.block_hashes[whole:]
        table.block_ids[whole] = destination
        return source, destination

    def fork(
        self, table: BlockTable, num_tokens: int
    ) -> tuple[BlockTable, list[tuple[BlockId, BlockId]]]:
        """Another table on the first `num_tokens` tokens; the parent is not touched.

        Committed blocks are shared. What is private of the parent, or cut in its middle, is not: the
        fork gets blocks of its own in their place, and (source, destination) of each is returned for
        the caller to copy before either table grows. Raises OutOfBlocks or InvalidInput and changes
        nothing. O(blocks of the path).
        """
        lock = self._lock_of(table)
        size = self.config.block_size
        if not 0 <= num_tokens <= table.num_blocks * size:
            raise InvalidInput(
                f"num_tokens is {num_tokens}, allowed is 0 … {table.num_blocks * size} (its slots)"
            )
        keep, whole = -(-num_tokens // size), min(num_tokens // size, table.num_committed)
        self._make_free(keep - whole)
        place = self.tree.position_in(lock, whole)
        child = BlockTable(table.lineage, self.tree.lock(table.lineage, place))
        child.block_hashes = table.block_hashes[:whole]
        own = self.pool.take(keep - whole)
        child.block_ids = table.block_ids[:whole] + own
        child.block_deltas = table.block_deltas[:keep]
        self.tables.add(child)
        return child, list(zip(table.block_ids[whole:keep], own, strict=True))

    def release(self, table: BlockTable) -> None:
        """Let the committed blocks go (they stay findable until evicted) and free the private ones.

        Raises TableReleased and changes nothing for a dead table or another cache's.
        """
        lock = self._lock_of(table)
        self.tree.unlock(lock)
        self._bury(table)

    def discard(self, table: BlockTable) -> int:
        """Release, and evict at once what no other table holds on this path. Returns the number of
        freed blocks.
        """
        lock = self._lock_of(table)
        node, end = lock.node, lock.end
        before = self.pool.num_free
        self.tree.unlock(lock)
        if node is not None:
            self._free_evicted(self.tree.evict_path(node, end))
        self._bury(table)
        return self.pool.num_free - before

    # -- pool --------------------------------------------------------------------------------------

    def evict(self, num_blocks: int) -> int:
        """Free up to `num_blocks` unlocked blocks; returns how many it were."""
        return self._free_evicted(self.tree.evict(num_blocks))

    def free_block_ids(self) -> list[BlockId]:
        """Blocks that nobody owns."""
        return self.pool.free_ids()

    def check_integrity(self) -> None:
        """Recount everything from scratch. O(blocks). Raises IntegrityError with what is wrong."""
        check_books(self.tree, self.pool, self.tables, self._hasher)

    def statistics(self) -> CacheStatistics:
        """A snapshot, O(1)."""
        return CacheStatistics(
            free=self.pool.num_free,
            evictable=self._num_evictable(),
            locked=self.tree.num_locked,
            in_use=self.pool.num_in_use,
            total=self.pool.num_blocks,
            num_nodes=self.tree.num_nodes,
            num_splits=self.tree.num_splits,
            hit_tokens=self._hit_tokens,
            miss_tokens=self._miss_tokens,
            num_evicted=self._num_evicted,
        )

    # -- inside ------------------------------------------------------------------------------------

    def _num_evictable(self) -> int:
        return self.pool.num_cached - self.tree.num_locked

    def _make_free(self, num_blocks: int) -> None:
        short = num_blocks - self.pool.num_free
        if short <= 0:
            return
        if short > self._num_evictable():
            raise OutOfBlocks(
                f"{num_blocks} blocks are needed; {self.pool.num_free} are free and"
                f" {self._num_evictable()} evictable of {self.pool.num_blocks}: release a context"
                " or raise num_blocks"
            )
        self._free_evicted(self.tree.evict(short))

    def _before_eviction(self, node: Node, keep: int) -> None:
        """Blocks [keep, …) of a leaf are about to go: hand out the whole runs among them."""
        run = self.config.run_blocks
        end = node.first_block + node.num_blocks
        first_end = -(-(node.first_block + keep + 1) // run) * run
        for run_end in range(first_end, end // run * run + 1, run):
            self.on_evict(run_before(node, run_end, run, self.config.block_size))

    def _free_evicted(self, block_ids: list[BlockId]) -> int:
        self._num_evicted += len(block_ids)
        self.pool.give(block_ids, CACHED)
        return len(block_ids)

    def _last_committed(self, lock: Lock) -> bytes:
        if lock.node is None:
            return b""
        size = self.config.block_size * TOKEN_BYTES
        return bytes(lock.node.tokens[(lock.end - 1) * size : lock.end * size])

    @staticmethod
    def _parent_hash(table: BlockTable) -> BlockHash:
        return table.block_hashes[-1] if table.block_hashes else table.lineage.root

    def _lock_of(self, table: BlockTable) -> Lock:
        if table.lock is None:
            raise TableReleased("this block table was released already; open a new one")
        if table not in self.tables:
            raise TableReleased("this block table belongs to another cache")
        return table.lock

    def _bury(self, table: BlockTable) -> None:
        self.tables.discard(table)
        private = table.block_ids[table.num_committed :]
        table.lock = None
        table.block_ids = []
        table.block_hashes = []
        table.block_deltas = []
        self.pool.give(private, IN_USE)
