"""How long frames live in Redis: a run as long as the youngest context that names it, a private frame as long as its
own, and nothing for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from redis_frames import ACME, BIG, HUGE, own, run
from redis_server import Proxy, RedisServer, wait_until

from moorage.prefix_cache.block import pack_tokens
from moorage.prefix_cache.errors import StoreError
from moorage.prefix_cache.redis_keys import frame_redis_key
from moorage.prefix_cache.redis_store import RedisConfig, RedisStore

PREFIX = list(range(1000, 1064))
"""64 tokens: eight runs of the kit's geometry."""


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Any]:
    made = redis_server.client()
    yield made
    made.close()


def key_of(pair: Any, session_id: str = "a") -> str:
    return frame_redis_key(pair[0], session_id, ACME)


def test_a_prefix_of_a_thousand_sessions_is_stored_once(
    redis_url: str, tiers: Callable[..., Any], client: Any
) -> None:
    store = RedisStore(RedisConfig(redis_url))
    one = tiers(store)

    def park(number: int) -> Any:
        done = one.park(f"s{number}", 1, pack_tokens([*PREFIX, 5000 + number]), "redis")
        assert done.error is None
        return done.manifest

    manifests = [park(0)]
    runs = sorted(client.keys("moorage:{r:*"))
    memory_of_one = sum(client.memory_usage(key) for key in runs)
    before = client.info("memory")["used_memory"]
    manifests += [park(number) for number in range(1, 1000)]
    assert sorted(client.keys("moorage:{r:*")) == runs and len(runs) == 8
    assert client.dbsize() == 8 + 1000
    assert sum(client.memory_usage(key) for key in runs) == memory_of_one
    assert all(client.hlen(key) == 1 for key in runs)
    private = client.memory_usage(client.keys("moorage:{s:*")[0])
    grown = client.info("memory")["used_memory"] - before
    assert grown < 999 * (private + 200)  # 200: a share of the two tables of keys and lifetimes
    assert store.statistics().puts == 8 + 1000
    shared = {ref.key.name for ref in manifests[0].frames if ref.key.shared}
    assert all({ref.key.name for ref in m.frames if ref.key.shared} == shared for m in manifests)


def test_every_park_renews_the_runs_that_it_names_and_no_others(
    redis_url: str, client: Any
) -> None:
    store = RedisStore(RedisConfig(redis_url, ttl_s=1000.0))
    store.put([run(1), run(2), own("a")], "a", ACME, 5.0)
    for pair in (run(1), run(2)):
        client.expire(key_of(pair), 100)
    client.expire(key_of(own("a")), 100)
    store.put([run(1), own("b")], "b", ACME, 5.0)
    assert 990 < client.ttl(key_of(run(1))) <= 1005
    assert 90 < client.ttl(key_of(run(2))) <= 100
    assert 90 < client.ttl(key_of(own("a"))) <= 100  # expires with its own manifest
    assert 990 < client.ttl(key_of(own("b"), "b")) <= 1000
    store.close()


def test_a_run_outlives_the_private_frame_that_was_written_after_it(
    redis_url: str, redis_server: RedisServer, client: Any
) -> None:
    direct = RedisStore(RedisConfig(redis_url, ttl_s=100.0))
    direct.put([run(1)], "z", ACME, 5.0)
    client.expire(key_of(run(1)), 1)
    with Proxy(redis_server.port) as proxy:
        proxy.rate = 8e6
        store = RedisStore(RedisConfig(f"redis://127.0.0.1:{proxy.port}/0", ttl_s=100.0))
        # The lease is first; half a second later the last private frame is in.
        store.put([run(1), own("a", 1, geometry=HUGE)], "a", ACME, 10.0)
        store.close()
    left = client.pttl(key_of(own("a", 1, geometry=HUGE)))
    assert 0 < left <= client.pttl(key_of(run(1)))
    direct.close()


def test_a_shorter_lifetime_elsewhere_takes_nothing_away(redis_url: str, client: Any) -> None:
    patient = RedisStore(RedisConfig(redis_url, ttl_s=1000.0))
    hasty = RedisStore(RedisConfig(redis_url, ttl_s=10.0))
    patient.put([run(1)], "a", ACME, 5.0)
    hasty.put([run(1)], "b", ACME, 5.0)
    assert 990 < client.ttl(key_of(run(1))) <= 1005
    hasty.put([run(2)], "b", ACME, 5.0)
    assert 5 < client.ttl(key_of(run(2))) <= 15
    patient.put([run(2)], "a", ACME, 5.0)
    assert 990 < client.ttl(key_of(run(2))) <= 1005
    client.persist(key_of(run(2)))
    hasty.put([run(2)], "b", ACME, 5.0)  # whatever made it immortal, it is ours to let go
    assert 5 < client.ttl(key_of(run(2))) <= 15
    patient.close()
    hasty.close()


def test_two_layer_ranges_of_a_run_share_its_key_and_the_longer_lifetime(
    redis_url: str, client: Any
) -> None:
    store = RedisStore(RedisConfig(redis_url, ttl_s=1000.0))
    store.put([run(1)], "a", ACME, 5.0)
    client.expire(key_of(run(1)), 100)
    store.put([run(1, geometry=BIG)], "a", ACME, 5.0)  # other layers and heads: another field
    assert key_of(run(1)) == key_of(run(1, geometry=BIG)) and client.hlen(key_of(run(1))) == 2
    assert 990 < client.ttl(key_of(run(1))) <= 1005
    store.close()


def test_a_write_that_is_cut_off_anywhere_leaves_no_run_without_a_lifetime(
    redis_url: str, redis_server: RedisServer, client: Any
) -> None:
    frames = [run(1, geometry=BIG), run(2, geometry=BIG)]
    whole = sum(frame.size_bytes for _, frame in frames)
    ends: set[int] = set()
    for cut in (*range(whole, whole + 2400, 60), 300_000, 530_000, 525_500):
        client.flushall()
        with Proxy(redis_server.port) as proxy:
            proxy.cut_up = cut
            store = RedisStore(RedisConfig(f"redis://127.0.0.1:{proxy.port}/0", max_retries=0))
            try:
                store.put(frames, "a", ACME, 5.0)
            except StoreError:
                ends.add(cut)
            store.close()
        wait_until(
            lambda: len(client.client_list(_type="normal")) == 1, "the end of its connection"
        )
        found = client.keys("*")
        assert all(client.ttl(key) > 0 for key in found), cut
    assert len(ends) > 10


def test_private_frames_expire_with_their_manifest(redis_url: str, client: Any) -> None:
    store = RedisStore(RedisConfig(redis_url, ttl_s=0.05))
    store.put([own("a"), run(1)], "a", ACME, 0.05 + 5.0)
    deadline = time.monotonic() + 10
    while store.get([own("a")[0]], "a", ACME, 5.0) != [None]:
        assert time.monotonic() < deadline
    assert store.get([run(1)[0]], "a", ACME, 5.0) != [None]  # it holds for the park's deadline more
    store.close()
