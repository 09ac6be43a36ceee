"""The trace replay: the oracle is optimal, the simulator counts what the real cache counts, our order learns."""

from __future__ import annotations

import random
import sys
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "benchmarks")]

import numpy as np  # noqa: E402
from belady import Belady  # noqa: E402
from trace_policies import ExpectedWait, LeastRecentlyUsed  # noqa: E402
from trace_sim import TraceRequest, live_blocks, replay  # noqa: E402

from moorage.prefix_cache.block import Lineage, Namespace, pack_tokens  # noqa: E402
from moorage.prefix_cache.cache import CacheConfig, GroupConfig, PrefixCache  # noqa: E402
from moorage.prefix_cache.errors import OutOfBlocks  # noqa: E402


def random_trace(seed: int, num_requests: int, num_sessions: int) -> tuple[list[TraceRequest], int]:
    """Sessions that share a first block, grow, and now and then go back."""
    draw = random.Random(seed)
    paths = [[0] for _ in range(num_sessions)]
    num_blocks = 1
    found = []
    for index in range(num_requests):
        session = draw.randrange(num_sessions)
        path = paths[session]
        if draw.random() < 0.2:
            del path[draw.randint(1, len(path)) :]
        if len(path) < 5:
            path.append(num_blocks)
            num_blocks += 1
        found.append(TraceRequest(float(index), session, tuple(path), "tool_use"))
    return found, num_blocks


def least_computed(requests: list[TraceRequest], capacity: int) -> int:
    """By trying every set of blocks with closed prefixes that could be kept."""
    parents = {
        block: request.path[:index]
        for request in requests
        for index, block in enumerate(request.path)
    }

    @cache
    def best(index: int, kept: frozenset[int]) -> int:
        if index == len(requests):
            return 0
        path = requests[index].path
        missing = [block for block in path if block not in kept]
        everything = kept | set(path)
        return len(missing) + min(
            best(index + 1, choice) for choice in closed_subsets(everything, frozenset(path))
        )

    def closed_subsets(blocks: frozenset[int], needed: frozenset[int]) -> set[frozenset[int]]:
        """Subsets that hold the request just served, no longer than the capacity, whole prefixes only."""
        found: set[frozenset[int]] = set()
        stack = [blocks]
        seen = {blocks}
        while stack:
            current = stack.pop()
            if len(current) <= capacity:
                found.add(current)
                continue  # a smaller one is never better
            for block in current - needed:
                if not any(block in parents[other] for other in current):
                    smaller = current - {block}
                    if smaller not in seen:
                        seen.add(smaller)
                        stack.append(smaller)
        return found

    return best(0, frozenset())


def test_belady_computes_as_little_as_any_order_can() -> None:
    for seed in range(12):
        requests, num_blocks = random_trace(seed, 14, 3)
        for capacity in (5, 6, 8):
            ours = replay(requests, num_blocks, capacity, Belady()).computed
            assert ours == least_computed(requests, capacity), (seed, capacity)


def test_the_simulator_under_lru_computes_what_the_real_cache_does() -> None:
    requests, num_blocks = random_trace(5, 400, 9)
    capacity = 14
    lineage = Lineage(Namespace("acme", "prod"), b"model")
    cache = PrefixCache(CacheConfig(1, (GroupConfig("full", capacity),), 1))
    computed = 0
    for request in requests:
        log = pack_tokens(request.path)
        table = cache.open(cache.match(lineage, log))
        computed += len(request.path) - table.num_committed
        try:
            cache.grow(table, len(request.path))
        except OutOfBlocks as error:
            raise AssertionError("the pool holds one request") from error
        cache.commit(table, log, len(request.path))
        cache.release(table)
    assert computed == replay(requests, num_blocks, capacity, LeastRecentlyUsed()).computed


def test_the_working_set_is_what_will_be_used_again() -> None:
    paths = [(0, 1), (0, 2), (0, 1), (0, 3), (0, 3)]
    requests = [TraceRequest(float(i), -1, path, "end_turn") for i, path in enumerate(paths)]
    assert live_blocks(requests) == 2  # 0 and 1, later 0 and 3; 2 is never used again


def test_expected_wait_tells_quick_returners_from_slow_ones_and_drops_what_was_left_behind() -> (
    None
):
    requests: list[TraceRequest] = []
    for number in range(400):  # one session comes back after 10 s, the other after 500 s
        requests.append(TraceRequest(10.0 * number, 0, (0, 1, 2), "tool_use"))
        if number % 50 == 25:
            requests.append(TraceRequest(10.0 * number + 1, 1, (3, 4, 5), "end_turn"))
    requests.append(TraceRequest(4000.0, 0, (0, 1, 6), "tool_use"))  # went back: 2 is left behind
    policy = ExpectedWait()
    replay(requests, 7, 7, policy)
    left, quick, slow = policy.order(np.array([2, 6, 5]), 4004.0)
    assert left == -np.inf
    assert slow < quick < 0
