"""A node of the radix tree: a run of blocks, what they hold, and who protects them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from moorage.prefix_cache.block import HASH_BYTES, TOKEN_BYTES, BlockHash, BlockId, Lineage
from moorage.prefix_cache.errors import IntegrityError
from moorage.prefix_cache.eviction import Candidate


@dataclass
class DevicePayload:
    """The node's KV is on the device: one block id per block, in order. One payload per group."""

    block_ids: list[BlockId] = field(default_factory=list)


@dataclass(frozen=True)
class HollowPayload:
    """The node keeps its place (tokens, hashes, children), its KV is elsewhere. No code makes these
    yet.
    """

    tier: str | None
    """Where a copy is; None where it was dropped or lies outside a window."""


Payload: TypeAlias = DevicePayload | HollowPayload


class Lock:
    """One reader's hold on the blocks from the root to block `end` (exclusive) of `node`. Made by
    `RadixTree.lock`.
    """

    __slots__ = ("end", "node")

    def __init__(self, node: Node, end: int) -> None:
        self.node: Node | None = node
        """Where the held path ends; None once unlocked."""
        self.end = end
        """Blocks of `node` that are held, 1 … node.num_blocks; 0 only in a root."""


class Node:
    """A compressed edge and the node at its end.

        tokens   |t t t t|t t t t|t t t t|     whole blocks, packed
        hashes   |   h   |   h   |   h   |
        payload  |   7   |   3   |   9   |     device block ids
                 └─ protected ──┘└ evictable   a lock may end inside: protecting needs no split

    `uses` is a stack of (end, clock): blocks below `end` were used at `clock`; ends fall and clocks
    rise, so the tail `[uses[1].end, uses[0].end)` was last used at `uses[0].clock`. A partial match
    thus keeps only its part young.
    """

    __slots__ = (
        "children",
        "edge_key",
        "ends",
        "first_block",
        "hashes",
        "lineage",
        "num_passing",
        "number",
        "parent",
        "payload",
        "protected",
        "superseded_from",
        "tokens",
        "uses",
    )

    def __init__(
        self,
        lineage: Lineage,
        parent: Node | None,
        first_block: int,
        number: int,
        edge_key: bytes = b"",
    ) -> None:
        self.lineage = lineage
        self.edge_key = edge_key
        """Tokens of the first block: what the parent finds this node by; empty in a root."""
        self.parent = parent
        """None in a root, which holds no blocks."""
        self.children: dict[bytes, Node] = {}
        """tokens of the child's first block -> child; the tokens themselves, so a weak hash cannot
        mislead.
        """
        self.first_block = first_block
        """Blocks from the lineage root to this node's start."""
        self.number = number
        """Creation number: ties between equal candidates are broken the same way in every run."""
        self.tokens = bytearray()
        self.hashes = bytearray()
        self.payload: Payload = DevicePayload()
        self.ends: set[Lock] = set()
        """Locks that end in this node."""
        self.num_passing = 0
        """Locks that end below this node: they protect all of it."""
        self.protected = 0
        """Leading blocks that some lock holds."""
        self.uses: list[tuple[int, int]] = []
        self.superseded_from: int | None = None
        """Blocks from here on were rewound away."""

    @property
    def num_blocks(self) -> int:
        """Blocks of this edge; 0 only in a root."""
        return len(self.hashes) // HASH_BYTES

    @property
    def is_root(self) -> bool:
        """Whether this is a lineage's root."""
        return self.parent is None

    @property
    def block_ids(self) -> list[BlockId]:
        """Device blocks. Raises IntegrityError in a hollow node."""
        if isinstance(self.payload, DevicePayload):
            return self.payload.block_ids
        raise IntegrityError(f"node {self.number} is hollow: its blocks are not on the device")

    def hash_at(self, index: int) -> BlockHash:
        """Hash of block `index` of this node."""
        return BlockHash(bytes(self.hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]))

    def needed_blocks(self, without: Lock | None = None, num_passing: int | None = None) -> int:
        """Leading blocks that locks hold: the definition that `protected` caches.

        To ask what would be held without one lock, name it, and give the number of locks that would
        still pass.
        """
        if (self.num_passing if num_passing is None else num_passing) > 0:
            return self.num_blocks
        return max((lock.end for lock in self.ends if lock is not without), default=0)

    def touch(self, end: int, clock: int) -> None:
        """Blocks below `end` are used now."""
        while self.uses and self.uses[-1][0] <= end:
            self.uses.pop()
        if end > 0:
            self.uses.append((end, clock))
        if self.superseded_from is not None and self.superseded_from < end:
            self.superseded_from = end if end < self.num_blocks else None

    def supersede(self, start: int) -> None:
        """Blocks from `start` on were rewound away."""
        if start < self.num_blocks:
            current = self.num_blocks if self.superseded_from is None else self.superseded_from
            self.superseded_from = min(start, current)

    def candidate(self) -> Candidate | None:
        """The evictable run at this leaf's end; None where there is none."""
        end = self.num_blocks
        if self.children or self.is_root or end <= self.protected:
            return None
        start = max(self.protected, self.uses[1][0] if len(self.uses) > 1 else 0)
        superseded = self.superseded_from is not None
        if self.superseded_from is not None:
            start = max(start, self.superseded_from)
        last_used = self.uses[0][1] if self.uses else 0
        return Candidate(last_used, superseded, self.first_block + end, end - start)

    def append(self, tokens: bytes, hashes: bytes, block_ids: list[BlockId]) -> None:
        """Grow the edge at its end."""
        self.tokens += tokens
        self.hashes += hashes
        self.block_ids.extend(block_ids)

    def drop_tail(self, num_blocks: int, block_size: int) -> list[BlockId]:
        """Shrink the edge by unprotected blocks and return their ids, deepest first."""
        keep = self.num_blocks - num_blocks
        if keep < self.protected or self.children:
            raise IntegrityError(
                f"node {self.number}: {num_blocks} blocks at its end are not evictable"
            )
        dropped = self.block_ids[keep:]
        del self.block_ids[keep:]
        del self.hashes[keep * HASH_BYTES :]
        del self.tokens[keep * block_size * TOKEN_BYTES :]
        # Of the entries that cover what is left, the shallowest cut one becomes the new end.
        while len(self.uses) > 1 and self.uses[1][0] >= keep:
            self.uses.pop(0)
        if self.uses:
            self.uses[0] = (min(self.uses[0][0], keep), self.uses[0][1])
        if self.superseded_from is not None and self.superseded_from >= keep:
            self.superseded_from = None
        dropped.reverse()
        return dropped

    def split_off(self, at: int, number: int, block_size: int) -> Node:
        """Cut the edge: this node keeps `[0, at)`, the returned child takes the rest, the children
        and its locks.

            [ a b c d e ] ─ children          [ a b ] ─ [ c d e ] ─ children

        A lock that ended beyond `at` moves down and now passes through here, so every block keeps
        its protection.
        """
        cut = at * block_size * TOKEN_BYTES
        edge_key = bytes(self.tokens[cut : cut + block_size * TOKEN_BYTES])
        lower = Node(self.lineage, self, self.first_block + at, number, edge_key)
        lower.tokens = self.tokens[cut:]
        lower.hashes = self.hashes[at * HASH_BYTES :]
        lower.payload = DevicePayload(self.block_ids[at:])
        lower.children = self.children
        for child in lower.children.values():
            child.parent = lower
        lower.ends = {lock for lock in self.ends if lock.end > at}
        for lock in lower.ends:
            lock.node = lower
            lock.end -= at
        lower.num_passing = self.num_passing
        lower.uses = [(end - at, clock) for end, clock in self.uses if end > at]
        if self.superseded_from is not None:
            lower.superseded_from = max(0, self.superseded_from - at)

        del self.tokens[cut:]
        del self.hashes[at * HASH_BYTES :]
        del self.block_ids[at:]
        self.children = {edge_key: lower}
        self.ends -= lower.ends
        self.num_passing += len(lower.ends)
        beyond = [clock for end, clock in self.uses if end >= at]
        below = [(end, clock) for end, clock in self.uses if end < at]
        self.uses = [(at, beyond[-1]), *below] if beyond else below
        if self.superseded_from is not None and self.superseded_from >= at:
            self.superseded_from = None
        self.protected = self.needed_blocks()
        lower.protected = lower.needed_blocks()
        return lower
