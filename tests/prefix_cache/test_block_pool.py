from __future__ import annotations

import pytest

from moorage.prefix_cache.block import BlockId
from moorage.prefix_cache.block_pool import CACHED, IN_USE, BlockPool
from moorage.prefix_cache.errors import DoubleFree, ForeignBlock, InvalidInput, OutOfBlocks


def make_pool(num_blocks: int = 4) -> tuple[BlockPool, list[list[int]]]:
    freed: list[list[int]] = []
    return BlockPool(num_blocks, lambda ids: freed.append(list(ids))), freed


def counts(pool: BlockPool) -> tuple[int, int, int]:
    return pool.num_free, pool.num_in_use, pool.num_cached


def test_blocks_move_from_free_to_in_use_to_cached_and_back() -> None:
    pool, freed = make_pool()
    assert pool.take(3) == [0, 1, 2]
    pool.adopt([BlockId(1)])
    assert counts(pool) == (1, 2, 1)
    pool.give([BlockId(0), BlockId(2)], IN_USE)
    pool.give([BlockId(1)], CACHED)
    assert counts(pool) == (4, 0, 0)
    assert freed == [[0, 2], [1]]


def test_too_many_changes_nothing() -> None:
    pool, _ = make_pool()
    pool.take(2)
    with pytest.raises(OutOfBlocks, match="3 blocks are needed and 2 of 4"):
        pool.take(3)
    assert counts(pool) == (2, 2, 0)


def test_c19_a_double_free_is_an_error_and_changes_nothing() -> None:
    pool, freed = make_pool()
    a, b = pool.take(2)
    pool.give([a], IN_USE)
    with pytest.raises(DoubleFree):
        pool.give([b, a], IN_USE)
    with pytest.raises(DoubleFree):
        pool.give([b, b], IN_USE)
    assert counts(pool) == (3, 1, 0)
    pool.give([b], IN_USE)
    assert sorted(pool.free_ids()) == [0, 1, 2, 3]
    assert freed == [[0], [1]]


@pytest.mark.parametrize("block_id", [-1, 4, 99])
def test_an_id_of_another_pool_is_an_error(block_id: int) -> None:
    pool, _ = make_pool()
    with pytest.raises(ForeignBlock):
        pool.give([BlockId(block_id)], IN_USE)


def test_a_block_of_another_owner_is_an_error() -> None:
    pool, _ = make_pool()
    (a,) = pool.take(1)
    with pytest.raises(ForeignBlock, match="in use"):
        pool.give([a], CACHED)
    pool.adopt([a])
    with pytest.raises(ForeignBlock, match="cached"):
        pool.give([a], IN_USE)
    with pytest.raises(ForeignBlock):
        pool.adopt([a])
    assert counts(pool) == (3, 0, 1)


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(InvalidInput):
        make_pool(0)
