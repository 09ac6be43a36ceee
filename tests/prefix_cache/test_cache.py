"""The facade: cases C4, C6, C8, C12, C19, and the rules of commit, truncate and discard."""

from __future__ import annotations

import random
from typing import Any

import pytest

from moorage.prefix_cache.block import BlockHash, Bytes, Lineage, Namespace, pack_tokens
from moorage.prefix_cache.cache import CacheConfig, GroupConfig, PrefixCache
from moorage.prefix_cache.errors import (
    CommitMismatch,
    IntegrityError,
    InvalidInput,
    OutOfBlocks,
    TableReleased,
)


def books(cache: PrefixCache) -> tuple[int, int, int, int]:
    """(free, evictable, locked, in use)"""
    s = cache.statistics()
    assert s.free + s.evictable + s.locked + s.in_use == s.total
    return s.free, s.evictable, s.locked, s.in_use


def test_the_life_of_a_context(kit: Any) -> None:
    freed: list[int] = []
    cache = kit.cache(num_blocks=8, on_free=freed.extend)
    log = kit.log(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    table = cache.open(kit.lineage)
    cache.grow(table, 10)
    assert table.block_ids == [0, 1, 2] and table.block_deltas == [0, 0, 0]
    assert books(cache) == (5, 0, 0, 3)
    cache.commit(table, log, 10)
    assert (table.num_committed, table.num_blocks) == (2, 3)
    assert books(cache) == (5, 0, 2, 1)
    cache.release(table)
    assert freed == [2]
    assert books(cache) == (6, 2, 0, 0)

    again = cache.open(cache.match(kit.lineage, log))
    assert again.block_ids == [0, 1] and again.num_committed == 2
    assert books(cache) == (6, 0, 2, 0)
    assert cache.discard(again) == 2
    assert sorted(freed) == [0, 1, 2]
    assert books(cache) == (8, 0, 0, 0)
    s = cache.statistics()
    assert (s.hit_tokens, s.miss_tokens) == (8, 2)
    cache.check_integrity()


def test_one_2k_context_is_one_node(kit: Any) -> None:
    cache = kit.cache(num_blocks=200, block_size=16)
    log = pack_tokens(range(2048))
    table = cache.open(kit.lineage)
    for end in range(512, 2048, 512):  # chunked prefill
        cache.grow(table, end)
        cache.commit(table, log, end)
    for end in range(1537, 2049):  # decode, token by token
        cache.grow(table, end)
        cache.commit(table, log, end)
    assert cache.statistics().num_nodes == 1
    assert table.num_committed == 128
    fork = kit.fill(cache, log[: 1000 * 4] + pack_tokens(range(5000, 5100)))
    assert (cache.statistics().num_nodes, cache.statistics().num_splits) == (3, 1)
    assert fork.block_ids[:62] == table.block_ids[:62]
    cache.check_integrity()


def test_a_block_that_the_tree_has_replaces_ours(kit: Any) -> None:
    freed: list[int] = []
    cache = kit.cache(num_blocks=8, on_free=freed.extend)
    log = kit.log(1, 2, 3, 4, 5, 6, 7, 8)
    slow = cache.open(kit.lineage)
    cache.grow(slow, 8)
    fast = kit.fill(cache, log)
    cache.commit(slow, log, 8)
    assert slow.block_ids == fast.block_ids == [2, 3]
    assert freed == [0, 1]
    assert books(cache) == (6, 0, 2, 0)
    cache.release(fast)
    assert books(cache) == (6, 0, 2, 0)
    cache.release(slow)
    assert books(cache) == (6, 2, 0, 0)
    cache.check_integrity()


def test_out_of_blocks_changes_nothing(kit: Any) -> None:
    cache = kit.cache(num_blocks=4)
    held = kit.fill(cache, kit.log(*range(8)))
    cache.release(kit.fill(cache, kit.log(*range(50, 54))))
    table = cache.open(kit.lineage)
    before = books(cache)
    with pytest.raises(OutOfBlocks, match="3 blocks are needed; 1 are free and 1 evictable of 4"):
        cache.grow(table, 12)
    assert books(cache) == before and table.block_ids == []
    cache.grow(table, 8)  # evicts the one that nobody holds
    assert books(cache) == (0, 0, 2, 2)
    cache.release(held)
    cache.release(table)
    cache.check_integrity()


def test_open_looks_again_where_the_match_was_evicted(kit: Any) -> None:
    cache = kit.cache(num_blocks=8)
    log = kit.log(*range(12))
    cache.release(kit.fill(cache, log))
    match = cache.match(kit.lineage, log)
    assert match.num_tokens == 12
    cache.evict(2)
    table = cache.open(match)
    assert table.num_committed == 1
    cache.check_integrity()


def test_truncate_inside_a_shared_block_copies_it(kit: Any) -> None:
    cache = kit.cache(num_blocks=8)
    log = kit.log(*range(12))
    table = kit.fill(cache, log)
    other = cache.open(cache.match(kit.lineage, log))
    moved = cache.truncate(table, 6)
    assert moved == (1, 3)
    assert table.block_ids == [0, 3] and table.num_committed == 1
    assert other.block_ids == [0, 1, 2]
    assert books(cache) == (4, 0, 3, 1)
    cache.commit(table, kit.log(0, 1, 2, 3, 4, 5, 99, 99), 8)
    assert cache.statistics().num_splits == 1
    cache.check_integrity()


def test_truncate_to_whole_blocks_copies_nothing(kit: Any) -> None:
    cache = kit.cache(num_blocks=8)
    table = kit.fill(cache, kit.log(*range(12)))
    cache.grow(table, 14)
    assert cache.truncate(table, 13) is None and table.num_blocks == 4
    assert cache.truncate(table, 12) is None and table.num_blocks == 3
    assert cache.truncate(table, 4) is None and table.num_committed == 1
    assert cache.truncate(table, 0) is None and table.block_ids == []
    assert books(cache) == (5, 3, 0, 0)
    with pytest.raises(InvalidInput, match="num_tokens is 1"):
        cache.truncate(table, 1)
    cache.check_integrity()


def test_truncate_takes_its_copy_from_what_it_lets_go(kit: Any) -> None:
    cache = kit.cache(num_blocks=3)
    table = kit.fill(cache, kit.log(*range(12)))  # the whole pool
    assert cache.truncate(table, 5) == (1, 2)
    assert table.block_ids == [0, 2]
    cache.check_integrity()


def test_the_block_that_is_to_be_copied_is_never_the_one_evicted_for_the_copy(kit: Any) -> None:
    cache = kit.cache(num_blocks=3)
    cache.release(kit.fill(cache, kit.log(90, 91, 92, 93)))  # block 0: cached, older
    table = kit.fill(cache, kit.log(*range(8)))
    assert cache.statistics().free == 0
    assert cache.truncate(table, 5) == (2, 0)
    cache.check_integrity()


def test_truncate_without_a_block_for_the_copy_changes_nothing(kit: Any) -> None:
    cache = kit.cache(num_blocks=3)
    log = kit.log(*range(12))
    table = kit.fill(cache, log)
    holder = cache.open(cache.match(kit.lineage, log))
    before = (books(cache), list(table.block_ids), table.num_committed)
    with pytest.raises(OutOfBlocks, match="needs 1 block for a copy"):
        cache.truncate(table, 5)
    assert (books(cache), table.block_ids, table.num_committed) == before
    cache.release(holder)
    cache.check_integrity()


def test_discard_leaves_what_others_hold_or_cached_behind_us(kit: Any) -> None:
    cache = kit.cache(num_blocks=16)
    shared = kit.fill(cache, kit.log(*range(8)))
    ours = kit.fill(cache, kit.log(*range(8), 50, 51, 52, 53))
    assert cache.discard(ours) == 1  # the shared prefix is held
    assert cache.match(kit.lineage, kit.log(*range(8))).num_tokens == 8
    tail = kit.fill(cache, kit.log(*range(8), 60, 61, 62, 63))
    cache.release(tail)
    assert cache.discard(shared) == 0  # another context's cached block stands behind it
    assert books(cache) == (13, 3, 0, 0)
    cache.check_integrity()


def test_discard_takes_its_own_rewound_tail_along(kit: Any) -> None:
    cache = kit.cache(num_blocks=16)
    table = kit.fill(cache, kit.log(*range(12)))
    cache.truncate(table, 4)
    cache.commit(table, kit.log(*range(4)), 4)
    cache.grow(table, 8)
    cache.commit(table, kit.log(*range(4), 70, 71, 72, 73), 8)
    assert books(cache) == (12, 2, 2, 0)
    assert cache.discard(table) == 4
    assert books(cache) == (16, 0, 0, 0)
    cache.check_integrity()


def test_commit_refuses_another_log(kit: Any) -> None:
    cache = kit.cache()
    table = kit.fill(cache, kit.log(*range(4)))
    cache.grow(table, 8)
    before = books(cache)
    with pytest.raises(CommitMismatch, match="block 0"):
        cache.commit(table, kit.log(9, 9, 9, 9, 4, 5, 6, 7), 8)
    with pytest.raises(InvalidInput, match="num_computed is 12"):
        cache.commit(table, kit.log(*range(12)), 12)
    assert books(cache) == before
    cache.commit(table, kit.log(*range(8)), 7)  # not a full block: nothing to do
    assert table.num_committed == 1
    cache.check_integrity()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((0, (GroupConfig("full", 1),), 1), "block_size is 0"),
        ((16, (GroupConfig("full", 1),), 3), "run_blocks is 3"),
        ((16, (), 1), "0 groups"),
        ((16, (GroupConfig("full", 0),), 1), "num_blocks is 0"),
    ],
)
def test_bad_sizes_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        PrefixCache(CacheConfig(*settings))


def test_c6_a_second_release_raises_and_changes_nothing(kit: Any) -> None:
    cache = kit.cache()
    table = kit.fill(cache, kit.log(*range(6)))
    cache.release(table)
    before = books(cache)
    for call in (cache.release, cache.discard):
        with pytest.raises(TableReleased):
            call(table)
    with pytest.raises(TableReleased):
        cache.grow(table, 4)
    with pytest.raises(TableReleased, match="another cache"):
        kit.cache().release(kit.fill(cache, kit.log(1)))
    cache.release(next(iter(cache.tables)))
    assert books(cache) == before
    again = cache.open(cache.match(kit.lineage, kit.log(*range(6))))
    assert books(cache)[2] == 1
    cache.release(again)
    assert books(cache) == before
    cache.check_integrity()


def test_c8_adapters_and_tenants_share_nothing(kit: Any) -> None:
    cache = kit.cache(num_blocks=64)
    prompt = pack_tokens(range(64))
    space = Namespace("acme", "prod")
    adapter_a = Lineage(space, b"model-1", b"adapter-a")
    cache.release(kit.fill(cache, prompt, adapter_a))
    for other in (
        Lineage(space, b"model-1", b"adapter-b"),
        Lineage(space, b"model-1"),
        Lineage(space, b"model-2", b"adapter-a"),
        Lineage(Namespace("acme", "test"), b"model-1", b"adapter-a"),
        Lineage(Namespace("rival", "prod"), b"model-1", b"adapter-a"),
    ):
        assert cache.match(other, prompt).num_tokens == 0
    assert cache.match(adapter_a, prompt).num_tokens == 64
    cache.check_integrity()


def test_c12_a_constant_hash_never_mixes_prompts_up(kit: Any) -> None:
    def constant(parent: BlockHash, token_ids: Bytes) -> BlockHash:
        return BlockHash(b"\7" * 16)

    cache = kit.cache(num_blocks=16, hasher=constant)
    first = kit.fill(cache, kit.log(1, 2, 3, 4, 5, 6, 7, 8))
    assert cache.match(kit.lineage, kit.log(8, 7, 6, 5, 4, 3, 2, 1)).num_tokens == 0
    assert cache.match(kit.lineage, kit.log(1, 2, 3, 4, 9, 9, 9, 9)).num_tokens == 4
    second = kit.fill(cache, kit.log(1, 2, 3, 4, 9, 9, 9, 9))
    assert first.block_ids[0] == second.block_ids[0]
    assert first.block_ids[1] != second.block_ids[1]
    cache.check_integrity()


def test_c19_an_abort_at_any_step_leaves_every_block_free(kit: Any) -> None:
    for abort_after in range(5):
        cache = kit.cache(num_blocks=8, block_size=1)
        log = kit.log(1, 2, 3)
        table = cache.open(cache.match(kit.lineage, log))
        for step in range(4):
            if step == abort_after:
                break
            cache.grow(table, 3 + step)
            cache.commit(table, log, 3 + step)
            log += kit.log(10 + step)
        cache.release(table)
        cache.evict(99)
        assert sorted(cache.free_block_ids()) == list(range(8))
        cache.check_integrity()


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_c4_books_balance_over_5000_random_steps(kit: Any, block_size: int) -> None:
    rng = random.Random(block_size)
    cache = kit.cache(num_blocks=40, block_size=block_size)
    lineages = [kit.lineage, Lineage(Namespace("rival", "prod"), b"model-1")]

    def more(num_blocks: int, extra: int) -> bytes:
        """Whole blocks of two kinds, so that prefixes are shared and diverge often, and some loose
        tokens.
        """
        blocks = (pack_tokens([rng.randrange(2)] * block_size) for _ in range(num_blocks))
        return b"".join(blocks) + pack_tokens([7] * extra)

    live: list[tuple[Any, bytes, int]] = []  # table, log, computed
    for _ in range(5000):
        action = rng.random()
        if not live or (action < 0.25 and len(live) < 12):
            log = more(rng.randrange(8), rng.randrange(block_size))
            match = cache.match(rng.choice(lineages), log)
            if rng.random() < 0.2:
                cache.evict(rng.randrange(4))
            table = cache.open(match)
            live.append((table, log, table.num_committed * block_size))
        elif action < 0.6:
            n = rng.randrange(len(live))
            table, log, computed = live[n]
            whole = len(log) // 4 - len(log) // 4 % block_size
            log = log[: max(whole, computed) * 4]
            log += more(rng.randrange(3), 0) if len(log) // 4 % block_size == 0 else b""
            target = rng.randint(computed, len(log) // 4)
            try:
                cache.grow(table, target)
                cache.commit(table, log, target)
            except OutOfBlocks:
                target = computed
            live[n] = (table, log, target)
        elif action < 0.75:
            n = rng.randrange(len(live))
            table, log, computed = live[n]
            target = rng.randint(0, computed)
            try:
                cache.truncate(table, target)
                live[n] = (table, log[: target * 4], target)
            except OutOfBlocks:
                pass
        elif action < 0.95:
            table, _, _ = live.pop(rng.randrange(len(live)))
            (cache.release if rng.random() < 0.6 else cache.discard)(table)
        else:
            cache.evict(rng.randrange(6))
        books(cache)
        cache.check_integrity()
    for table, _, _ in live:
        cache.release(table)
    cache.evict(99)
    assert books(cache) == (40, 0, 0, 0)
    assert cache.statistics().num_splits > 50  # the walk was no walk in the park
    cache.check_integrity()


def test_check_integrity_sees_what_is_wrong(kit: Any) -> None:
    def broken(damage: Any) -> str:
        cache = kit.cache(num_blocks=8)
        table = kit.fill(cache, kit.log(*range(8)))
        cache.grow(table, 10)
        cache.check_integrity()
        node = next(n for n in cache.tree.nodes() if not n.is_root)
        damage(cache, table, node)
        with pytest.raises(IntegrityError) as caught:
            cache.check_integrity()
        return str(caught.value)

    def owner(cache: Any, table: Any, node: Any) -> None:
        node.block_ids[0] = table.block_ids[2]

    def lost(cache: Any, table: Any, node: Any) -> None:
        table.block_ids.pop()
        table.block_deltas.pop()

    def locks(cache: Any, table: Any, node: Any) -> None:
        node.ends.clear()

    def counter(cache: Any, table: Any, node: Any) -> None:
        cache.tree.num_locked += 1

    def chain(cache: Any, table: Any, node: Any) -> None:
        node.hashes[3] ^= 1

    def key(cache: Any, table: Any, node: Any) -> None:
        node.parent.children[b"other"] = node.parent.children.pop(node.edge_key)

    assert "committed blocks" in broken(owner)
    assert "blocks with an owner" in broken(lost)
    assert "locks that end here" in broken(locks)
    assert "locked: the books say" in broken(counter)
    assert "hash of block 0" in broken(chain)
    assert "parent's child" in broken(key)


def test_c18_what_is_similar_is_reused_only_as_far_as_it_is_equal(kit: Any) -> None:
    shared = list(range(1000, 1900))
    marker = 7
    first = kit.log(*shared, marker, *range(99))
    second = kit.log(*shared, *range(200, 300))
    cache = PrefixCache(CacheConfig(16, (GroupConfig("full", 3 * 64),), 4))
    for number in range(25):
        other = kit.fill(cache, kit.log(*range(5000 + number, 6000 + number)))
        held = kit.fill(cache, first)
        match = cache.match(kit.lineage, second)
        assert match.num_tokens == 896  # 900, in whole blocks
        table = cache.open(match)
        assert table.block_ids == held.block_ids[:56]
        for one in (other, held, table):
            cache.release(one)
        cache.evict(40)
        cache.check_integrity()


def test_c20_an_abort_after_each_step_of_admission_leaves_every_count_as_it_was(kit: Any) -> None:
    log = kit.log(*range(70))
    cache = PrefixCache(CacheConfig(16, (GroupConfig("full", 8),), 4))
    cache.release(kit.fill(cache, kit.log(*range(40))))
    start = cache.statistics()
    counts = (start.free, start.evictable, start.locked, start.in_use)
    for last in range(4):
        match = cache.match(kit.lineage, log)
        table = cache.open(match) if last >= 1 else None
        if table is not None and last >= 2:
            cache.grow(table, 70)
        if table is not None and last >= 3:
            fork, _ = cache.fork(table, 33)
            cache.release(fork)
        if table is not None:
            cache.release(table)
        now = cache.statistics()
        assert (now.free, now.evictable, now.locked, now.in_use) == counts, last
        cache.check_integrity()
