from __future__ import annotations

from typing import Any

from moorage.prefix_cache.eviction import Candidate, eviction_key


def test_superseded_then_oldest_then_deepest() -> None:
    young = Candidate(last_used=9, superseded=False, end_block=4, num_blocks=1)
    old = Candidate(last_used=2, superseded=False, end_block=4, num_blocks=1)
    old_deep = Candidate(last_used=2, superseded=False, end_block=40, num_blocks=1)
    rewound = Candidate(last_used=99, superseded=True, end_block=1, num_blocks=1)
    assert sorted([young, old, rewound, old_deep], key=eviction_key) == [
        rewound,
        old_deep,
        old,
        young,
    ]


def test_the_least_recently_used_context_goes_first_from_its_tail(kit: Any) -> None:
    cache = kit.cache(num_blocks=8)
    a = kit.fill(cache, kit.log(1, 1, 1, 1, 2, 2, 2, 2))
    b = kit.fill(cache, kit.log(5, 5, 5, 5, 6, 6, 6, 6))
    cache.release(a)
    cache.release(b)
    cache.release(cache.open(cache.match(kit.lineage, kit.log(1, 1, 1, 1, 2, 2, 2, 2))))
    assert cache.evict(1) == 1  # b's tail: a was used again
    assert cache.match(kit.lineage, kit.log(5, 5, 5, 5, 6, 6, 6, 6)).num_tokens == 4
    assert cache.match(kit.lineage, kit.log(1, 1, 1, 1, 2, 2, 2, 2)).num_tokens == 8
    assert cache.evict(1) == 1
    assert cache.match(kit.lineage, kit.log(5, 5, 5, 5)).num_tokens == 0
    cache.check_integrity()


def test_a_partial_use_keeps_only_its_part_young(kit: Any) -> None:
    cache = kit.cache(num_blocks=8)
    cache.release(kit.fill(cache, kit.log(1, 1, 1, 1, 2, 2, 2, 2)))
    cache.release(kit.fill(cache, kit.log(5, 5, 5, 5)))
    cache.release(cache.open(cache.match(kit.lineage, kit.log(1, 1, 1, 1))))
    # Ages now: block (2,2,2,2) oldest, (5,5,5,5) next, (1,1,1,1) youngest.
    cache.evict(1)
    assert cache.match(kit.lineage, kit.log(1, 1, 1, 1, 2, 2, 2, 2)).num_tokens == 4
    cache.evict(1)
    assert cache.match(kit.lineage, kit.log(5, 5, 5, 5)).num_tokens == 0
    assert cache.match(kit.lineage, kit.log(1, 1, 1, 1)).num_tokens == 4
    cache.check_integrity()


def test_a_rewound_tail_goes_before_older_contexts(kit: Any) -> None:
    cache = kit.cache(num_blocks=8)
    cache.release(kit.fill(cache, kit.log(5, 5, 5, 5)))
    table = kit.fill(cache, kit.log(1, 1, 1, 1, 2, 2, 2, 2))
    assert cache.truncate(table, 4) is None
    cache.evict(1)
    assert cache.match(kit.lineage, kit.log(1, 1, 1, 1, 2, 2, 2, 2)).num_tokens == 4
    assert cache.match(kit.lineage, kit.log(5, 5, 5, 5)).num_tokens == 4
    cache.check_integrity()


def test_a_new_match_clears_superseded(kit: Any) -> None:
    cache = kit.cache(num_blocks=8)
    table = kit.fill(cache, kit.log(1, 1, 1, 1, 2, 2, 2, 2))
    cache.truncate(table, 4)
    cache.release(cache.open(cache.match(kit.lineage, kit.log(1, 1, 1, 1, 2, 2, 2, 2))))
    cache.release(kit.fill(cache, kit.log(5, 5, 5, 5)))
    cache.release(table)
    cache.evict(1)  # an ordinary block now: the oldest use decides, and that is its own
    cache.check_integrity()
    assert cache.match(kit.lineage, kit.log(5, 5, 5, 5)).num_tokens == 4
