"""Eviction hands out every whole run once, at the moment it breaks it up, wherever the tree's nodes begin and end."""

from __future__ import annotations

from moorage.prefix_cache.block import Lineage, Namespace, hash_chain, pack_tokens, unpack_tokens
from moorage.prefix_cache.cache import BlockTable, CacheConfig, EvictedRun, GroupConfig, PrefixCache

LINEAGE = Lineage(Namespace("acme", "prod"), b"model-1")
RUN = 4


def cache_of(num_blocks: int) -> tuple[PrefixCache, list[EvictedRun]]:
    """Blocks of one token, runs of four."""
    runs: list[EvictedRun] = []
    config = CacheConfig(1, (GroupConfig("full", num_blocks),), RUN)
    return PrefixCache(config, on_evict=runs.append), runs


def computed(cache: PrefixCache, tokens: list[int]) -> BlockTable:
    table = cache.open(cache.match(LINEAGE, pack_tokens(tokens)))
    cache.grow(table, len(tokens))
    cache.commit(table, pack_tokens(tokens), len(tokens))
    return table


def check(run: EvictedRun, tokens: list[int], block_ids: list[int]) -> None:
    """`tokens` is the whole context up to the run's end, `block_ids` its blocks."""
    hashes = [LINEAGE.root, *hash_chain(LINEAGE.root, pack_tokens(tokens), 1)]
    assert run.lineage == LINEAGE
    assert run.first_block == len(tokens) - RUN
    assert unpack_tokens(run.token_ids) == tokens[-RUN:]
    assert run.block_ids == block_ids[len(tokens) - RUN : len(tokens)]
    assert (run.parent_hash, run.last_hash) == (hashes[-1 - RUN], hashes[-1])


def test_runs_come_out_whole_though_eviction_takes_single_blocks() -> None:
    cache, runs = cache_of(16)
    table = computed(cache, list(range(10)))
    ids = list(table.block_ids)
    cache.release(table)
    for _ in range(10):
        assert cache.evict(1) == 1
    first, second = runs
    check(first, list(range(8)), ids)
    check(second, list(range(4)), ids)
    cache.check_integrity()


def test_a_run_that_spans_three_nodes_is_put_together() -> None:
    cache, runs = cache_of(16)
    long = computed(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    ids = list(long.block_ids)
    others = [computed(cache, tokens) for tokens in ([1, 2, 3, 4, 5, 60], [1, 2, 3, 4, 5, 6, 70])]
    assert cache.statistics().num_splits == 2  # [1 … 5], [6], [7 8]
    for table in (long, *others):
        cache.release(table)
    cache.evict(16)
    assert sorted(run.first_block for run in runs) == [0, 4]
    check(next(run for run in runs if run.first_block == 4), [1, 2, 3, 4, 5, 6, 7, 8], ids)
    check(next(run for run in runs if run.first_block == 0), [1, 2, 3, 4], ids)


def test_what_was_superseded_or_is_held_or_discarded_is_not_handed_out() -> None:
    cache, runs = cache_of(16)
    table = computed(cache, list(range(8)))
    assert cache.truncate(table, 4) is None
    assert cache.evict(16) == 4  # rewound away: nobody will ask for it
    assert runs == []
    cache.discard(table)  # parked: its frames are stored
    assert cache.statistics().free == 16
    assert runs == []


def test_growing_evicts_through_the_same_door() -> None:
    cache, runs = cache_of(8)
    cache.release(computed(cache, list(range(8))))
    cache.release(computed(cache, [20, 21]))
    assert [run.first_block for run in runs] == [4]
