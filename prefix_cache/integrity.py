"""`check_integrity`: every count and link of tree, pool and tables recomputed from scratch and
compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from moorage.prefix_cache.block import (
    HASH_BYTES,
    TOKEN_BYTES,
    BlockHash,
    BlockId,
    BlockTable,
    Bytes,
)
from moorage.prefix_cache.block_pool import CACHED, FREE, IN_USE, BlockPool
from moorage.prefix_cache.errors import IntegrityError
from moorage.prefix_cache.radix_node import Lock, Node
from moorage.prefix_cache.radix_tree import RadixTree

Hasher = Callable[[BlockHash, Bytes], BlockHash]


def check_books(
    tree: RadixTree, pool: BlockPool, tables: Iterable[BlockTable], hasher: Hasher
) -> None:
    """Raises IntegrityError for the first thing that is wrong; O(blocks), one hash per cached
    block.
    """
    tables = list(tables)
    nodes = list(tree.nodes())
    _check_shape(tree, nodes, hasher)
    _check_locks(tree, nodes, [table.lock for table in tables if table.lock is not None])
    for table in tables:
        _check_table(tree, table)
    _check_owners(pool, nodes, tables)
    locked = sum(node.protected for node in nodes)
    evictable = sum(node.num_blocks - node.protected for node in nodes)
    _equal("locked", tree.num_locked, locked)
    _equal("cached", pool.num_cached, locked + evictable)
    _equal(
        "free + evictable + locked + in use",
        pool.num_free + evictable + locked + pool.num_in_use,
        pool.num_blocks,
    )


def _equal(what: str, kept: object, counted: object) -> None:
    if kept != counted:
        raise IntegrityError(f"{what}: the books say {kept}, the recount says {counted}")


def _check_shape(tree: RadixTree, nodes: list[Node], hasher: Hasher) -> None:
    block_bytes = tree.block_size * TOKEN_BYTES
    for node in nodes:
        name = f"node {node.number}"
        _equal(f"{name}: token bytes", len(node.tokens), node.num_blocks * block_bytes)
        _equal(f"{name}: hash bytes", len(node.hashes), node.num_blocks * HASH_BYTES)
        _equal(f"{name}: block ids", len(node.block_ids), node.num_blocks)
        if node.parent is None:
            _equal(f"{name}: blocks of a root", node.num_blocks, 0)
            _equal(f"{name}: root of its lineage", tree.roots.get(node.lineage), node)
            if not node.children and not node.ends:
                raise IntegrityError(f"{name} is a root that nothing needs")
            continue
        parent = node.parent
        if node.num_blocks == 0:
            raise IntegrityError(f"{name} holds no block and is no root")
        _equal(f"{name}: key", node.edge_key, bytes(node.tokens[:block_bytes]))
        _equal(f"{name}: parent's child", parent.children.get(node.edge_key), node)
        _equal(f"{name}: lineage", node.lineage, parent.lineage)
        _equal(f"{name}: first block", node.first_block, parent.first_block + parent.num_blocks)
        above = node.lineage.root if parent.is_root else parent.hash_at(parent.num_blocks - 1)
        for index in range(node.num_blocks):
            above = hasher(
                above, bytes(node.tokens[index * block_bytes : (index + 1) * block_bytes])
            )
            _equal(f"{name}: hash of block {index}", node.hash_at(index), above)
        ends = [end for end, _ in node.uses]
        clocks = [clock for _, clock in node.uses]
        _equal(f"{name}: ends of uses", ends, sorted(set(ends), reverse=True))
        _equal(f"{name}: clocks of uses", clocks, sorted(clocks))
        _equal(f"{name}: uses cover", ends[:1], [node.num_blocks])
        if node.superseded_from is not None and not 0 <= node.superseded_from < node.num_blocks:
            raise IntegrityError(f"{name}: superseded from {node.superseded_from}, beyond its end")
    _equal("num_nodes", tree.num_nodes, sum(1 for node in nodes if not node.is_root))
    leaves = {
        node.number
        for node in nodes
        if not node.is_root and not node.children and node.num_blocks > node.protected
    }
    _equal("evictable leaves", {node.number for node in tree.evictable_leaves}, leaves)


def _check_locks(tree: RadixTree, nodes: list[Node], locks: list[Lock]) -> None:
    ends: dict[int, set[Lock]] = {node.number: set() for node in nodes}
    passing: dict[int, int] = {node.number: 0 for node in nodes}
    for lock in locks:
        node = lock.node
        if node is None or node.number not in ends:
            raise IntegrityError("an open table's lock ends in no node of the tree")
        if not (lock.end == 0 if node.is_root else 0 < lock.end <= node.num_blocks):
            raise IntegrityError(f"a lock ends at block {lock.end} of node {node.number}")
        ends[node.number].add(lock)
        while node.parent is not None:
            node = node.parent
            passing[node.number] += 1
    for node in nodes:
        _equal(f"node {node.number}: locks that end here", node.ends, ends[node.number])
        _equal(f"node {node.number}: locks that pass", node.num_passing, passing[node.number])
        _equal(f"node {node.number}: protected", node.protected, node.needed_blocks())


def _check_table(tree: RadixTree, table: BlockTable) -> None:
    lock = table.lock
    if lock is None or lock.node is None:
        raise IntegrityError("an open table has no lock")
    ids: list[BlockId] = []
    hashes: list[BlockHash] = []
    for node, end in tree.path(lock.node, lock.end):
        ids.extend(node.block_ids[:end])
        hashes.extend(node.hash_at(index) for index in range(end))
    _equal("a table's lineage", table.lineage, lock.node.lineage)
    _equal("a table's committed hashes", table.block_hashes, hashes)
    _equal("a table's committed blocks", table.block_ids[: table.num_committed], ids)
    _equal("a table's deltas", len(table.block_deltas), len(table.block_ids))


def _check_owners(pool: BlockPool, nodes: list[Node], tables: list[BlockTable]) -> None:
    owners: dict[BlockId, str] = {}
    owned: list[tuple[str, int, list[BlockId]]] = [("the free list", FREE, pool.free_ids())]
    owned += [(f"node {node.number}", CACHED, node.block_ids) for node in nodes]
    owned += [("a table", IN_USE, table.block_ids[table.num_committed :]) for table in tables]
    for owner, state, block_ids in owned:
        for block_id in block_ids:
            if block_id in owners:
                raise IntegrityError(
                    f"block {block_id} has two owners: {owners[block_id]} and {owner}"
                )
            owners[block_id] = owner
            _equal(f"block {block_id}: state", pool.state(block_id), state)
    _equal("blocks with an owner", len(owners), pool.num_blocks)
