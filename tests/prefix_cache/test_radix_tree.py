"""Cases C1, C2, C5, C6 on the tree itself, and the shape of compressed edges."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.prefix_cache.block import HASH_BYTES, BlockId, pack_tokens
from moorage.prefix_cache.errors import NotLocked
from moorage.prefix_cache.radix_tree import Lock, RadixTree


def insert(tree: RadixTree, lineage: Any, token_ids: list[int], first_id: int) -> Lock:
    """Lock what is there and append the rest, under ids from `first_id` on."""
    tokens = pack_tokens(token_ids)
    position = tree.find(lineage, tokens)
    lock = tree.lock(lineage, position)
    done, total = position.num_blocks, len(token_ids) // tree.block_size
    ids = [BlockId(first_id + n) for n in range(total - done)]
    rest = tokens[done * tree.block_size * 4 : total * tree.block_size * 4]
    tree.extend(lock, rest, b"\1" * HASH_BYTES * len(ids), ids)
    return lock


def test_c1_a_lock_protects_its_whole_path(kit: Any) -> None:
    tree = RadixTree(4)
    # root -> A(1-4) -> B(5-8) and a sibling, so that A and B are two nodes
    other = insert(tree, kit.lineage, [1, 2, 3, 4, 9, 9, 9, 9], 50)
    tree.unlock(insert(tree, kit.lineage, [1, 2, 3, 4, 5, 6, 7, 8], 10))
    tree.unlock(other)
    lock = tree.lock(kit.lineage, tree.find(kit.lineage, pack_tokens([1, 2, 3, 4, 5, 6, 7, 8])))
    assert tree.num_locked == 2
    assert tree.evict(99) == [51]  # the sibling; nothing of the locked path
    assert tree.evict(99) == []
    tree.unlock(lock)
    assert tree.num_locked == 0
    assert len(tree.evict(99)) == 2
    assert tree.num_nodes == 0 and not tree.roots


def test_c2_a_partial_match_protects_its_part_without_a_split(kit: Any) -> None:
    tree = RadixTree(1)
    tree.unlock(insert(tree, kit.lineage, [1, 2, 3, 4, 5, 6, 7, 8], 0))
    position = tree.find(kit.lineage, pack_tokens([1, 2, 3, 4, 9]))
    assert position.num_blocks == 4
    lock = tree.lock(kit.lineage, position)
    assert tree.num_locked == 4 and tree.num_nodes == 1 and tree.num_splits == 0
    tree.extend(lock, pack_tokens([9, 10]), b"\1" * 2 * HASH_BYTES, [BlockId(20), BlockId(21)])
    assert tree.num_splits == 1 and tree.num_nodes == 3
    assert tree.num_locked == 6
    tree.unlock(lock)
    assert len(tree.evict(99)) == 10
    assert tree.num_locked == 0 and tree.num_nodes == 0 and not tree.roots


def test_c2_eviction_under_a_partial_lock_takes_only_the_tail(kit: Any) -> None:
    tree = RadixTree(1)
    tree.unlock(insert(tree, kit.lineage, [1, 2, 3, 4, 5, 6, 7, 8], 0))
    lock = tree.lock(kit.lineage, tree.find(kit.lineage, pack_tokens([1, 2, 3, 4, 9])))
    assert tree.evict(3) == [7, 6, 5]  # tail first, the node shrinks
    assert tree.evict(99) == [4]
    tree.unlock(lock)
    assert tree.evict(99) == [3, 2, 1, 0]


@pytest.mark.parametrize(
    ("num_inserted", "num_asked", "num_matched"),
    [(0, 0, 0), (1, 1, 0), (15, 15, 0), (16, 16, 16), (17, 17, 16), (17, 15, 0), (33, 40, 32)],
)
def test_c5_lengths_around_a_block(
    kit: Any, num_inserted: int, num_asked: int, num_matched: int
) -> None:
    tree = RadixTree(16)
    lock = insert(tree, kit.lineage, list(range(num_inserted)), 0)
    found = tree.find(kit.lineage, pack_tokens(range(num_asked)))
    assert found.num_blocks * 16 == num_matched
    assert all(node.num_blocks > 0 for node in tree.nodes() if not node.is_root)
    tree.unlock(lock)


def test_c5_a_child_longer_than_the_key_is_no_match(kit: Any) -> None:
    tree = RadixTree(32)
    tree.unlock(insert(tree, kit.lineage, list(range(32)), 0))
    assert tree.find(kit.lineage, pack_tokens(range(31))).num_blocks == 0


def test_c6_an_unlock_without_a_lock_raises_and_changes_nothing(kit: Any) -> None:
    tree = RadixTree(4)
    lock = insert(tree, kit.lineage, [1, 2, 3, 4], 0)
    tree.unlock(lock)
    before = (tree.num_locked, tree.num_nodes)
    with pytest.raises(NotLocked):
        tree.unlock(lock)
    assert (tree.num_locked, tree.num_nodes) == before
    again = tree.lock(kit.lineage, tree.find(kit.lineage, pack_tokens([1, 2, 3, 4])))
    assert tree.num_locked == 1
    tree.unlock(again)
    assert tree.num_locked == 0


def test_a_long_context_is_one_node_however_it_grew(kit: Any) -> None:
    tree = RadixTree(16)
    lock = insert(tree, kit.lineage, list(range(1024)), 0)
    for block in range(64, 128):  # decoding: one block at a time
        tokens = pack_tokens(range(block * 16, block * 16 + 16))
        tree.extend(lock, tokens, b"\1" * HASH_BYTES, [BlockId(block)])
    assert tree.num_nodes == 1 and tree.num_splits == 0 and tree.num_locked == 128
    assert tree.find(kit.lineage, pack_tokens(range(2048))).num_blocks == 128


def test_a_divergence_inside_an_edge_makes_exactly_one_split(kit: Any) -> None:
    tree = RadixTree(4)
    first = insert(tree, kit.lineage, list(range(400)), 0)
    second = insert(tree, kit.lineage, [*range(200), *range(1000, 1100)], 200)
    assert tree.num_splits == 1 and tree.num_nodes == 3
    third = insert(tree, kit.lineage, [*range(200), *range(2000, 2100)], 300)
    assert tree.num_splits == 1 and tree.num_nodes == 4
    assert tree.num_locked == 100 + 25 + 25
    for lock in (first, second, third):
        tree.unlock(lock)
    assert tree.num_locked == 0 and len(tree.evict(999)) == 150


def test_a_split_moves_locks_with_their_blocks(kit: Any) -> None:
    tree = RadixTree(1)
    long = insert(tree, kit.lineage, [1, 2, 3, 4, 5, 6], 0)
    short = tree.lock(kit.lineage, tree.find(kit.lineage, pack_tokens([1, 2])))
    other = insert(tree, kit.lineage, [1, 2, 3, 7], 10)  # splits at 3
    assert tree.num_splits == 1 and tree.num_locked == 7
    tree.unlock(long)
    assert tree.num_locked == 4 and tree.evict(99) == [5, 4, 3]
    tree.unlock(other)
    assert tree.num_locked == 2 and tree.evict(99) == [10, 2]
    tree.unlock(short)
    assert tree.evict(99) == [1, 0]


def test_lineages_never_meet(kit: Any) -> None:
    from moorage.prefix_cache.block import Lineage, Namespace

    tree = RadixTree(4)
    other = Lineage(Namespace("rival", "prod"), kit.lineage.fingerprint)
    insert(tree, kit.lineage, [1, 2, 3, 4], 0)
    assert tree.find(other, pack_tokens([1, 2, 3, 4])).num_blocks == 0
