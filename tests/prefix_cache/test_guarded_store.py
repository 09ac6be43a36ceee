"""The circuit breaker: when it opens, how it probes, and that a session goes on meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from redis_server import RedisServer

from moorage.prefix_cache.block import Namespace, pack_tokens
from moorage.prefix_cache.errors import InvalidInput, StoreFull, StoreTimeout, StoreUnavailable
from moorage.prefix_cache.guarded_store import BreakerConfig, BreakerState, GuardedStore
from moorage.prefix_cache.host_store import HostStore
from moorage.prefix_cache.load import MissReason
from moorage.prefix_cache.redis_store import RedisConfig, RedisStore

ACME = Namespace("acme", "prod")
LOG = pack_tokens(range(100, 122))


class Shaky(HostStore):
    """Answers, or raises what it is told to."""

    error: Exception | None = None
    calls = 0

    def contains(self, *arguments: Any) -> list[bool]:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return []


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def ask(store: GuardedStore) -> None:
    store.contains([], "s1", ACME, 1.0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def guarded(clock: Clock) -> GuardedStore:
    return GuardedStore(Shaky(100), BreakerConfig(jitter=0.2), clock=clock, draw=lambda: 0.5)


def fail(guarded: GuardedStore, times: int) -> None:
    for _ in range(times):
        with pytest.raises((StoreUnavailable, StoreTimeout)):
            ask(guarded)


def test_three_failures_in_a_row_open_it_and_an_answer_between_starts_anew(
    guarded: GuardedStore,
) -> None:
    shaky: Any = guarded.store
    shaky.error = StoreUnavailable("away")
    fail(guarded, 2)
    shaky.error = None
    ask(guarded)
    shaky.error = StoreTimeout("silent")
    fail(guarded, 3)
    assert (guarded.state, shaky.calls) == (BreakerState.OPEN, 6)
    with pytest.raises(StoreUnavailable, match=r"failed 3 times in a row .* in 1\.0 s"):
        ask(guarded)
    assert (shaky.calls, guarded.counters.rejected, guarded.counters.opened) == (6, 1, 1)


def test_probes_come_at_doubling_pauses_up_to_the_longest_and_one_that_works_closes_it(
    guarded: GuardedStore, clock: Clock
) -> None:
    shaky: Any = guarded.store
    shaky.error = StoreUnavailable("away")
    fail(guarded, 3)
    pauses = []
    for _ in range(7):
        before = clock.now
        while guarded.state is not BreakerState.HALF_OPEN:
            clock.now += 0.5
        pauses.append(clock.now - before)
        fail(guarded, 1)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert (guarded.counters.probes, shaky.calls) == (7, 10)
    clock.now += 30.0
    shaky.error = None
    ask(guarded)
    assert guarded.state is BreakerState.CLOSED
    shaky.error = StoreUnavailable("away")
    fail(guarded, 3)
    clock.now += 1.0  # the pause is short again
    assert guarded.state is BreakerState.HALF_OPEN


def test_what_is_not_absence_does_not_open_it(guarded: GuardedStore) -> None:
    shaky: Any = guarded.store
    shaky.error = StoreFull("full")
    for _ in range(5):
        with pytest.raises(StoreFull):
            ask(guarded)
    assert guarded.state is BreakerState.CLOSED


def test_one_probe_at_a_time(clock: Clock) -> None:
    entered, go = threading.Event(), threading.Event()

    class Slow(Shaky):
        def contains(self, *arguments: Any) -> list[bool]:
            if self.error is None:
                entered.set()
                assert go.wait(10.0)
            return super().contains(*arguments)

    slow = Slow(100)
    guarded = GuardedStore(slow, clock=clock, draw=lambda: 0.5)
    slow.error = StoreUnavailable("away")
    fail(guarded, 3)
    clock.now += 1.0
    slow.error = None
    probe = threading.Thread(target=ask, args=(guarded,))
    probe.start()
    assert entered.wait(10.0)
    with pytest.raises(StoreUnavailable, match="under way"):
        ask(guarded)
    go.set()
    probe.join(10.0)
    assert guarded.state is BreakerState.CLOSED
    assert guarded.counters.probes == 1


def test_jitter_moves_a_pause_by_its_share(clock: Clock) -> None:
    for drawn, pause in ((0.0, 0.8), (0.999999, 1.2)):
        guarded = GuardedStore(Shaky(100), clock=clock, draw=lambda drawn=drawn: drawn)
        guarded.store.error = StoreUnavailable("away")  # type: ignore[attr-defined]
        fail(guarded, 3)
        start = clock.now
        clock.now = start + pause - 0.01
        assert guarded.state is BreakerState.OPEN
        clock.now = start + pause + 0.01
        assert guarded.state is BreakerState.HALF_OPEN


@pytest.mark.parametrize("bad", [{"failures": 0}, {"first_pause_s": 0.0}, {"jitter": 1.0}])
def test_settings_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(bad))):
        GuardedStore(HostStore(1), BreakerConfig(**bad))


def test_parks_and_loads_go_on_around_a_redis_that_died_and_return_to_it(
    tiers: Callable[..., Any], kit: Any
) -> None:
    with RedisServer() as server:
        clock = Clock()
        redis = GuardedStore(
            RedisStore(RedisConfig(server.url, max_retries=0)), clock=clock, draw=lambda: 0.5
        )
        one = tiers(HostStore(1 << 20), redis)
        manifest = one.park("s1", 1, LOG, "redis").manifest
        server.kill()
        for _ in range(3):
            assert one.load(manifest, LOG)[0].miss is MissReason.STORE_FAILED
        assert redis.state is BreakerState.OPEN
        done = one.park("s2", 1, LOG, "redis", fall_back=True)
        assert (done.tier, "left alone" in done.degraded) == ("host", True)
        assert one.load(done.manifest, LOG)[1] == kit.used(kit.kv(LOG, 22), 22)
        server.start()
        clock.now += 1.0
        again = one.park("s1", 2, LOG, "redis").manifest
        assert again.tiers == ("redis",)
        assert redis.state is BreakerState.CLOSED
        assert one.load(again, LOG)[1] == kit.used(kit.kv(LOG, 22), 22)
