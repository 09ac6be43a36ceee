"""Radix tree over logical blocks: find, insert, split, lock, evict. It knows block ids, no memory
and no tensors.

    root(tenant A) ──[ system prompt, 40 blocks ]──┬─[ session 1, 90 blocks ]
                                                   └─[ session 2, 12 blocks ]
    root(tenant B) ──[ … ]

One root per lineage. Edges hold whole runs, so one unbranched context is one node however long it
is, and appending to a leaf grows it in place. Matching compares slices of packed tokens (memcmp), a
bisection finds where two runs part: O(bytes), no Python per token, and never by hash alone. All
methods are for one thread; none waits.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from moorage.prefix_cache.block import HASH_BYTES, TOKEN_BYTES, BlockHash, BlockId, Bytes, Lineage
from moorage.prefix_cache.errors import NotLocked
from moorage.prefix_cache.eviction import eviction_key
from moorage.prefix_cache.radix_node import DevicePayload, Lock, Node

__all__ = ["Lock", "Node", "Position", "RadixTree"]


@dataclass(frozen=True)
class Position:
    """A place in the tree: after block `end` of `node`, `num_blocks` from the root; node is None in
    no tree yet.
    """

    node: Node | None
    end: int
    num_blocks: int


def _ignore_eviction(node: Node, keep: int) -> None:
    del node, keep


class RadixTree:
    """See the module. Counters (`num_locked`, `num_nodes`) are kept by increments;
    `check_integrity` recounts them.
    """

    def __init__(
        self, block_size: int, on_evict: Callable[[Node, int], None] = _ignore_eviction
    ) -> None:
        """`on_evict`: called by `evict` with a leaf and the blocks that it keeps, before the rest goes;
        not for what was superseded.
        """
        self.block_size = block_size
        self._on_evict = on_evict
        self.roots: dict[Lineage, Node] = {}
        """lineage -> root; compared field by field, so two tenants with one (forged) root hash stay
        apart.
        """
        self.num_nodes = 0
        """Nodes that hold blocks; roots are not counted."""
        self.num_splits = 0
        """Splits so far: one per divergence inside an edge."""
        self.num_locked = 0
        """Blocks that at least one lock holds."""
        self.version = 0
        """Grows whenever a Position may have become invalid."""
        self.evictable_leaves: set[Node] = set()
        """Leaves with an unprotected tail: what eviction looks at, so that it never walks the
        tree.
        """
        self._block_bytes = block_size * TOKEN_BYTES
        self._clock = 0
        self._next_number = 0

    # -- reading -----------------------------------------------------------------------------------

    def find(self, lineage: Lineage, tokens: Bytes) -> Position:
        """The longest cached prefix of `tokens` in whole blocks. Nothing is locked or counted as
        used.
        """
        node = self.roots.get(lineage)
        total = len(tokens) // self._block_bytes
        if node is None:
            return Position(None, 0, 0)
        end = done = 0
        while done < total:
            child = node.children.get(self._slice(tokens, done, done + 1))
            if child is None or not isinstance(child.payload, DevicePayload):
                break
            node = child
            end = self._common(node, 0, tokens, done, min(node.num_blocks, total - done))
            done += end
            if end < node.num_blocks:
                break
        return Position(node, end, done)

    def path(self, node: Node | None, end: int) -> list[tuple[Node, int]]:
        """(node, its used blocks) from the root's child down to `node`."""
        steps: list[tuple[Node, int]] = []
        while node is not None and not node.is_root:
            steps.append((node, end))
            node = node.parent
            end = node.num_blocks if node is not None else 0
        steps.reverse()
        return steps

    def contents(self, position: Position) -> tuple[list[BlockId], list[BlockHash]]:
        """Block ids and hashes from the root to `position`."""
        ids: list[BlockId] = []
        hashes: list[BlockHash] = []
        for node, end in self.path(position.node, position.end):
            ids.extend(node.block_ids[:end])
            hashes.extend(node.hash_at(index) for index in range(end))
        return ids, hashes

    def nodes(self) -> Iterator[Node]:
        """Every node, roots included, parents before children."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    # -- locks -------------------------------------------------------------------------------------

    def lock(self, lineage: Lineage, position: Position) -> Lock:
        """Hold every block from the root to `position`; they count as used now."""
        node = position.node
        if node is None:
            node = self.roots.get(lineage)
            if node is None:
                self._next_number += 1
                node = self.roots[lineage] = Node(lineage, None, 0, self._next_number)
        lock = Lock(node, position.end)
        self._attach(lock)
        self._touch(lock)
        return lock

    def unlock(self, lock: Lock) -> None:
        """Let go. Raises NotLocked and changes nothing where the lock was let go before."""
        node = self._holder(lock)
        self._touch(lock)
        self._detach(lock)
        lock.node = None
        self._drop_empty_root(node)

    def position_in(self, lock: Lock, num_blocks: int) -> Position:
        """The place after the first `num_blocks` blocks of a held path."""
        node = self._holder(lock)
        while not node.is_root and node.first_block >= num_blocks:
            node = self._parent(node)
        return Position(node, num_blocks - node.first_block, num_blocks)

    def rewind(self, lock: Lock, num_blocks: int) -> None:
        """Hold only the first `num_blocks` blocks of the path; what nobody else holds beyond them
        is superseded.
        """
        old_node, old_end = self._holder(lock), lock.end
        place = self.position_in(lock, num_blocks)
        node = place.node
        self._detach(lock)
        lock.node, lock.end = node, place.end
        self._attach(lock)
        if old_end < old_node.num_blocks:
            return  # behind our end stand blocks of others: a suffix mark would take them along
        step: Node = old_node
        while not step.is_root and step.first_block + step.num_blocks > num_blocks:
            step.supersede(max(step.protected, num_blocks - step.first_block))
            if step is node:
                break
            step = self._parent(step)

    def num_held_alone(self, lock: Lock, first_block: int) -> int:
        """Blocks at index `first_block` and beyond of this lock's path that no other lock holds."""
        node: Node = self._holder(lock)
        below = False
        alone = 0
        while not node.is_root and node.first_block + node.num_blocks > first_block:
            others = node.needed_blocks(without=lock, num_passing=node.num_passing - below)
            alone += max(0, node.protected - max(others, first_block - node.first_block, 0))
            node, below = self._parent(node), True
        return alone

    # -- growing -----------------------------------------------------------------------------------

    def extend(
        self, lock: Lock, tokens: bytes, hashes: bytes, block_ids: list[BlockId]
    ) -> list[BlockId]:
        """Append blocks behind the lock's end, which moves with them.

        Returns the tree's block for each. Where the tree had the same tokens already, that is its
        own block and the caller's is not taken. Costs O(bytes); a divergence inside an edge makes
        one split, a free leaf end none.
        """
        node, end = self._holder(lock), lock.end
        total, done = len(block_ids), 0
        final: list[BlockId] = []
        while done < total:
            if end < node.num_blocks:
                limit = min(node.num_blocks - end, total - done)
                same = self._common(node, end, tokens, done, limit)
                final.extend(node.block_ids[end : end + same])
                end, done = end + same, done + same
                if done == total or end == node.num_blocks:
                    continue
                self._split(node, end)
            child = node.children.get(self._slice(tokens, done, done + 1))
            if child is not None:
                node, end = child, 0
                continue
            if node.children or node.is_root:
                node = self._add_child(node, self._slice(tokens, done, done + 1))
            rest = block_ids[done:]
            node.append(self._slice(tokens, done, total), hashes[done * HASH_BYTES :], rest)
            final.extend(rest)
            end, done = node.num_blocks, total
        if lock.node is not node:
            self._detach(lock)
            lock.node, lock.end = node, end
            self._attach(lock)
        else:
            lock.end = end
            self._refresh(node)
        self._clock += 1
        node.touch(end, self._clock)
        return final

    # -- giving way --------------------------------------------------------------------------------

    def evict(self, num_blocks: int) -> list[BlockId]:
        """Take up to `num_blocks` unprotected blocks out of the tree, in `eviction_key`'s order."""
        heap = [entry for node in self.evictable_leaves if (entry := self._entry(node))]
        heapq.heapify(heap)
        freed: list[BlockId] = []
        while heap and len(freed) < num_blocks:
            _, _, run, node = heapq.heappop(heap)
            run = min(run, num_blocks - len(freed))
            if node.superseded_from is None:
                self._on_evict(node, node.num_blocks - run)
            freed.extend(self._drop_tail(node, run))
            if node.num_blocks == 0 and node.parent is not None:
                parent = node.parent
                self._remove(node)
                node = parent
            if entry := self._entry(node):
                heapq.heappush(heap, entry)
        return freed

    def evict_path(self, node: Node, end: int) -> list[BlockId]:
        """Take out what nobody holds on the path from block `end` of `node` up to the root, tail
        first.

        Superseded blocks behind it go too. It stops where another context's cached blocks stand
        behind ours: they would be lost with their prefix, and what stays is evictable anyway.
        """
        freed: list[BlockId] = []
        while not node.is_root:
            for child in list(node.children.values()):
                if not child.children and child.protected == 0 and child.superseded_from == 0:
                    freed.extend(self._drop_tail(child, child.num_blocks))
                    self._remove(child)
            others = node.num_blocks > end and (
                node.superseded_from is None or node.superseded_from > end
            )
            if node.children or others:
                break
            freed.extend(self._drop_tail(node, node.num_blocks - node.protected))
            if node.num_blocks:
                break
            parent = self._parent(node)
            self._remove(node)
            node, end = parent, parent.num_blocks
        return freed

    # -- inside ------------------------------------------------------------------------------------

    def _slice(self, tokens: Bytes, first: int, end: int) -> bytes:
        return bytes(tokens[first * self._block_bytes : end * self._block_bytes])

    def _common(self, node: Node, at: int, tokens: Bytes, first: int, limit: int) -> int:
        """How many of `limit` blocks are equal from block `at` of the node and block `first` of
        `tokens` on.
        """

        def equal(low: int, high: int) -> bool:
            return self._slice(node.tokens, at + low, at + high) == self._slice(
                tokens, first + low, first + high
            )

        if equal(0, limit):
            return limit
        low, high = 0, limit  # [0, low) is equal, [0, high) is not
        while high - low > 1:
            middle = (low + high) // 2
            if equal(low, middle):
                low = middle
            else:
                high = middle
        return low

    def _add_child(self, parent: Node, edge_key: bytes) -> Node:
        self._next_number += 1
        first_block = parent.first_block + parent.num_blocks
        child = Node(parent.lineage, parent, first_block, self._next_number, edge_key)
        parent.children[edge_key] = child
        self.num_nodes += 1
        self._refresh(parent)
        return child

    def _split(self, node: Node, at: int) -> None:
        self._next_number += 1
        lower = node.split_off(at, self._next_number, self.block_size)
        self.num_nodes += 1
        self.num_splits += 1
        self.version += 1
        self._refresh(node)
        self._refresh(lower)

    def _holder(self, lock: Lock) -> Node:
        node = lock.node
        if node is None or lock not in node.ends:
            raise NotLocked("this lock is not held: it was let go before, or another tree made it")
        return node

    @staticmethod
    def _parent(node: Node) -> Node:
        if node.parent is None:
            raise NotLocked(f"node {node.number} is a root and has no parent")
        return node.parent

    def _attach(self, lock: Lock) -> None:
        node = lock.node
        if node is None:
            raise NotLocked("a lock without a node cannot be attached")
        node.ends.add(lock)
        self._refresh(node)
        while node.parent is not None:
            node = node.parent
            node.num_passing += 1
            self._refresh(node)

    def _detach(self, lock: Lock) -> None:
        node = self._holder(lock)
        node.ends.remove(lock)
        self._refresh(node)
        while node.parent is not None:
            node = node.parent
            node.num_passing -= 1
            self._refresh(node)

    def _touch(self, lock: Lock) -> None:
        self._clock += 1
        for node, end in self.path(lock.node, lock.end):
            node.touch(end, self._clock)

    def _refresh(self, node: Node) -> None:
        """Bring the cached counts in line after a change of locks, length or children."""
        protected = node.needed_blocks()
        self.num_locked += protected - node.protected
        node.protected = protected
        if not node.is_root and not node.children and node.num_blocks > protected:
            self.evictable_leaves.add(node)
        else:
            self.evictable_leaves.discard(node)

    def _entry(self, node: Node) -> tuple[tuple[bool, int, int], int, int, Node] | None:
        candidate = node.candidate()
        if candidate is None:
            return None
        return (eviction_key(candidate), node.number, candidate.num_blocks, node)

    def _drop_tail(self, node: Node, num_blocks: int) -> list[BlockId]:
        freed = node.drop_tail(num_blocks, self.block_size) if num_blocks else []
        self.version += 1
        self._refresh(node)
        return freed

    def _remove(self, node: Node) -> None:
        """Take out a node that has no blocks left."""
        parent = self._parent(node)
        del parent.children[node.edge_key]
        self.evictable_leaves.discard(node)
        self.num_nodes -= 1
        self.version += 1
        self._refresh(parent)
        self._drop_empty_root(parent)

    def _drop_empty_root(self, node: Node) -> None:
        while node.parent is not None:
            node = node.parent
        if not node.children and not node.ends:
            self.roots.pop(node.lineage, None)
            self.version += 1
