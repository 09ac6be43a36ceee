"""Park and load through the workers: cases D6, D9, D10, D14, and every way a frame can be
missing.
"""

from __future__ import annotations

import dataclasses
import queue
import random
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import redis
from redis_server import RedisServer, free_port

from moorage.prefix_cache.block import Lineage, Namespace, pack_tokens
from moorage.prefix_cache.errors import (
    InvalidInput,
    InvalidSessionId,
    QueueFull,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
    WorkersClosed,
)
from moorage.prefix_cache.frame import split_blocks
from moorage.prefix_cache.host_store import HostStore
from moorage.prefix_cache.load import LoadJob, MissReason
from moorage.prefix_cache.park import ParkJob, cut
from moorage.prefix_cache.parked_context import ParkedContext
from moorage.prefix_cache.redis_store import RedisConfig, RedisStore
from moorage.prefix_cache.tiers import DeleteJob, TierWorkers

LOG = pack_tokens(range(100, 122))  # 22 tokens: runs of 8, 8, a private piece of 6


@pytest.fixture(params=["host", "redis"])
def one_tier(request: Any, tiers: Callable[..., Any]) -> Any:
    """(tiers over one store, its name), for both stores."""
    if request.param == "host":
        return tiers(HostStore(1 << 20)), "host"
    url = request.getfixturevalue("redis_url")
    return tiers(RedisStore(RedisConfig(url, pipeline_bytes=1))), "redis"


def test_a_context_is_cut_into_aligned_runs_and_one_private_piece(kit: Any) -> None:
    def pieces(num_tokens: int) -> list[tuple[int, int, bool]]:
        return [(p.first_block, p.num_tokens, p.shared) for p in cut(num_tokens, kit.geometry)]

    assert pieces(22) == [(0, 8, True), (2, 8, True), (4, 6, False)]
    assert pieces(16) == [(0, 8, True), (2, 8, True)]
    assert pieces(7) == [(0, 7, False)]
    assert pieces(1) == [(0, 1, False)]


def test_park_and_load(one_tier: Any, kit: Any) -> None:
    tiers, tier = one_tier
    done = tiers.park("s1", 1, LOG, tier)
    assert done.error is None and done.degraded == "" and done.tier == tier
    manifest = ParkedContext.from_bytes(done.manifest.to_bytes())
    assert [(f.key.kind, f.first_block, f.num_tokens) for f in manifest.frames] == [
        ("run", 0, 8),
        ("run", 2, 8),
        ("private", 4, 6),
    ]
    assert manifest.num_tokens == 22 and done.num_bytes == manifest.size_bytes
    loaded, kv = tiers.load(manifest, LOG)
    assert (loaded.num_tokens, loaded.miss) == (22, None)
    assert loaded.tokens_by_tier == {tier: 22}
    assert kv == kit.used(kit.kv(LOG, 22), 22)
    assert (
        b"\xee" not in kv[-128:]
    )  # unused slots may hold another tenant's KV: they are not stored


def test_load_starts_anywhere_and_ends_where_the_destination_does(one_tier: Any, kit: Any) -> None:
    tiers, tier = one_tier
    manifest = tiers.park("s1", 1, LOG, tier).manifest
    whole = kit.used(kit.kv(LOG, 22), 22)
    for first_block in range(6):
        loaded, kv = tiers.load(manifest, LOG, first_block=first_block)
        assert (loaded.num_tokens, loaded.miss) == (22 - 4 * first_block, None)
        assert kv == whole[128 * first_block :]
    for num_blocks in range(6):
        loaded, kv = tiers.load(manifest, LOG, num_blocks=num_blocks)
        assert (loaded.num_tokens, loaded.miss) == (4 * num_blocks, None)
        assert kv == whole[: 128 * num_blocks]
    loaded, kv = tiers.load(manifest, LOG, first_block=6, num_blocks=1)
    assert (loaded.num_tokens, loaded.miss) == (0, None)


def test_a_longer_log_loads_what_was_parked_and_another_log_only_what_agrees(
    one_tier: Any, kit: Any
) -> None:
    tiers, tier = one_tier
    manifest = tiers.park("s1", 1, LOG, tier).manifest
    loaded, _ = tiers.load(manifest, LOG + pack_tokens([1, 2, 3]))
    assert (loaded.num_tokens, loaded.miss) == (22, None)
    for changed, tokens in ((0, 0), (7, 0), (8, 8), (15, 8), (16, 16), (21, 16)):
        log = bytearray(LOG)
        log[changed * 4] ^= 0xFF
        loaded, kv = tiers.load(manifest, bytes(log))
        assert loaded.num_tokens == tokens
        assert loaded.miss is MissReason.LOG_DIFFERS
        assert f"at token {tokens}: " in loaded.miss_detail
        assert kv[tokens * 32 :] == bytes(len(kv) - tokens * 32)
    for length, tokens in ((21, 16), (16, 16), (15, 8), (1, 0)):
        loaded, _ = tiers.load(manifest, LOG[: length * 4])
        assert loaded.num_tokens == tokens
        assert loaded.miss is MissReason.LOG_DIFFERS
    loaded, _ = tiers.load(manifest, LOG)
    assert loaded.miss is None  # none of that damaged anything


def test_a_shared_prefix_is_stored_once(redis_url: str, tiers: Callable[..., Any]) -> None:
    store = RedisStore(RedisConfig(redis_url))
    two = tiers(store)
    two.park("s1", 1, LOG, "redis")
    assert store.statistics().puts == 3
    other = LOG[: 16 * 4] + pack_tokens([7, 8, 9])
    assert two.park("s2", 1, other, "redis").error is None
    assert store.statistics().puts == 4  # its own suffix only
    longer = LOG + pack_tokens([1, 2, 3])
    manifest = two.park("s1", 2, longer, "redis").manifest
    assert store.statistics().puts == 6  # one new run, one new tail
    loaded, _ = two.load(manifest, longer)
    assert (loaded.num_tokens, loaded.miss) == (25, None)


def test_d10_only_an_equal_fingerprint_and_layout_are_loaded(one_tier: Any, kit: Any) -> None:
    tiers, tier = one_tier
    manifest = tiers.park("s1", 1, LOG, tier).manifest
    for change in (
        {"block_size": 32},
        {"dtype": "float16"},
        {"num_layers": 3},
        {"num_kv_heads": 2},
        {"head_dim": 4},
    ):
        geometry = dataclasses.replace(kit.geometry, **change)
        loaded, kv = tiers.load(manifest, LOG, geometry=geometry)
        assert (loaded.num_tokens, loaded.miss) == (0, MissReason.INCOMPATIBLE)
        assert next(iter(change)) in loaded.miss_detail
        assert kv == bytes(len(kv))
    rope = Lineage(kit.lineage.namespace, b"model-1 with another rope base")
    loaded, kv = tiers.load(dataclasses.replace(manifest, lineage=rope), LOG)
    assert (loaded.num_tokens, loaded.miss) == (0, MissReason.LOG_DIFFERS)
    assert kv == bytes(len(kv))
    loaded, _ = tiers.load(manifest, LOG)
    assert loaded.num_tokens == 22


def test_another_tenants_manifest_loads_nothing(one_tier: Any, kit: Any) -> None:
    tiers, tier = one_tier
    manifest = tiers.park("s1", 1, LOG, tier).manifest
    rival = dataclasses.replace(
        manifest, lineage=Lineage(Namespace("rival", "prod"), kit.lineage.fingerprint)
    )
    loaded, kv = tiers.load(rival, LOG)
    assert loaded.num_tokens == 0 and loaded.miss is not None
    assert kv == bytes(len(kv))
    tail = dataclasses.replace(
        rival, frames=(dataclasses.replace(manifest.frames[2], first_block=0),), num_tokens=6
    )
    assert tiers.load(tail, LOG)[0].num_tokens == 0


def test_a_damaged_frame_is_a_miss_and_the_next_park_heals_it(
    redis_url: str, redis_server: RedisServer, tiers: Callable[..., Any]
) -> None:
    from moorage.prefix_cache.redis_keys import frame_redis_key

    one = tiers(RedisStore(RedisConfig(redis_url)))
    manifest = one.park("s1", 1, LOG, "redis").manifest
    run = manifest.frames[1].key
    client = redis_server.client()
    name = frame_redis_key(run, "s1", one.lineage.namespace)
    data = bytearray(client.hget(name, run.field) or b"")
    data[-5] ^= 1
    client.hset(name, run.field, bytes(data))
    loaded, _ = one.load(manifest, LOG)
    assert (loaded.num_tokens, loaded.miss) == (8, MissReason.DAMAGED)
    assert "checksum" in loaded.miss_detail
    manifest = one.park("s1", 2, LOG, "redis").manifest
    loaded, _ = one.load(manifest, LOG)
    assert (loaded.num_tokens, loaded.miss) == (22, None)
    client.close()


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_lost_frame_is_a_miss_from_there_on(
    redis_url: str, redis_server: RedisServer, tiers: Callable[..., Any], lost: int
) -> None:
    from moorage.prefix_cache.redis_keys import frame_redis_key

    one = tiers(RedisStore(RedisConfig(redis_url)))
    manifest = one.park("s1", 1, LOG, "redis").manifest
    client: redis.Redis = redis_server.client()
    client.delete(frame_redis_key(manifest.frames[lost].key, "s1", one.lineage.namespace))
    client.close()
    loaded, _ = one.load(manifest, LOG)
    assert (loaded.num_tokens, loaded.miss) == (8 * lost, MissReason.NOT_STORED)


class Faulty(HostStore):
    """A host store whose calls can be made to fail."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.fail_put_at: int | None = None
        self.fail_get_of: Any = None
        self.gate: threading.Event | None = None
        self.entered = threading.Event()

    def put(self, frames: Sequence[Any], *rest: Any) -> None:
        if self.fail_put_at is not None:
            super().put(frames[: self.fail_put_at], *rest)
            raise StoreUnavailable("backend lost")
        super().put(frames, *rest)

    def get(self, keys: Sequence[Any], *rest: Any) -> Any:
        self.entered.set()
        if self.gate is not None:
            assert self.gate.wait(20)
        if self.fail_get_of in keys:
            raise StoreUnavailable("backend lost")
        return super().get(keys, *rest)


def test_d6_a_park_that_failed_half_way_lists_nothing(tiers: Callable[..., Any], kit: Any) -> None:
    store = Faulty()
    one = tiers(store)
    log = pack_tokens(range(40))  # 5 runs
    whole = one.park("s1", 1, log, "host").manifest
    keys = [ref.key for ref in whole.frames]
    store.drop(keys, "s1", kit.lineage.namespace, 1.0)
    store.fail_put_at = 2
    done = one.park("s1", 2, log, "host")
    assert done.manifest is None and isinstance(done.error, StoreUnavailable)
    assert done.num_bytes == 0
    store.fail_put_at = None
    assert store.contains(keys, "s1", kit.lineage.namespace, 1.0) == [
        True,
        True,
        False,
        False,
        False,
    ]
    loaded, _ = one.load(whole, log)
    assert (loaded.num_tokens, loaded.miss) == (16, MissReason.NOT_STORED)


def test_d14_a_store_that_promises_and_fails_gives_what_stands_before(
    tiers: Callable[..., Any], kit: Any
) -> None:
    store = Faulty()
    one = tiers(store)
    log = pack_tokens(range(40))
    manifest = one.park("s1", 1, log, "host").manifest
    keys = [ref.key for ref in manifest.frames]
    assert all(store.contains(keys, "s1", kit.lineage.namespace, 1.0))
    store.fail_get_of = keys[2]
    loaded, kv = one.load(manifest, log)
    assert (loaded.num_tokens, loaded.miss) == (16, MissReason.STORE_FAILED)
    assert loaded.miss_detail == "at token 16: backend lost"
    assert kv == bytes(kit.kv(log, 16)) + bytes(3 * 256)


def test_d9_twenty_sessions_over_small_tiers_keep_their_own_kv(
    tiers: Callable[..., Any], kit: Any
) -> None:
    rng = random.Random(9)
    size = 3000
    store = HostStore(8 * size)
    one = tiers(store)
    logs = {f"s{n}": pack_tokens([n] * 9 + list(range(12)) + [n]) for n in range(20)}
    kv_of = {session: bytes(kit.used(kit.kv(log, 22), 22)) for session, log in logs.items()}
    parked: dict[str, Any] = {}
    restored = 0
    for step in range(200):
        session = rng.choice(sorted(logs))
        log = logs[session]
        manifest = parked.pop(session, None)
        if manifest is not None:
            loaded, kv = one.load(manifest, log)
            assert (
                kv[: loaded.num_tokens * 32 // 128 * 128]
                == kv_of[session][: loaded.num_tokens * 32 // 128 * 128]
            )
            if loaded.miss is None:
                assert kv == kv_of[session]
                restored += 1
        done = one.park(session, step, log, "host")
        while isinstance(done.error, StoreFull):  # a bounded tier: the longest parked gives way
            victim = next(iter(parked))
            old = parked.pop(victim)
            one.workers.delete(
                DeleteJob(victim, old.lineage.namespace, old.keys_by_tier()["host"], "host", 5.0)
            )
            assert one.next().error is None
            done = one.park(session, step, log, "host")
        assert done.error is None
        if manifest is not None:
            keys = manifest.keys_by_tier(without=done.manifest)["host"]
            one.workers.delete(DeleteJob(session, manifest.lineage.namespace, keys, "host", 5.0))
            assert one.next().error is None
        parked[session] = done.manifest
        assert store.statistics().bytes <= 8 * size
    assert restored > 40
    for session, manifest in parked.items():
        keys = manifest.keys_by_tier()["host"]
        one.workers.delete(DeleteJob(session, manifest.lineage.namespace, keys, "host", 5.0))
        assert one.next().error is None
    assert all(slot[2].kind != "private" for slot in store._entries)


def test_redis_down_falls_back_to_host_where_the_job_allows_it(tiers: Callable[..., Any]) -> None:
    away = RedisStore(RedisConfig(f"redis://127.0.0.1:{free_port()}/0"))
    both = tiers(HostStore(1 << 20), away)
    done = both.park("s1", 1, LOG, "redis", fall_back=True)
    assert done.error is None and done.tier == "host"
    assert "cannot be reached" in done.degraded
    assert done.manifest.tiers == ("host",)
    loaded, _ = both.load(done.manifest, LOG)
    assert loaded.tokens_by_tier == {"host": 22}
    done = both.park("s1", 2, LOG, "redis", fall_back=False)
    assert done.manifest is None and isinstance(done.error, StoreUnavailable)


def test_where_the_fallback_fails_too_both_errors_are_told(tiers: Callable[..., Any]) -> None:
    away = RedisStore(RedisConfig(f"redis://127.0.0.1:{free_port()}/0"))
    both = tiers(HostStore(100), away)
    done = both.park("s1", 1, LOG, "redis", fall_back=True)
    assert done.manifest is None and isinstance(done.error, StoreFull)
    assert "before that: Redis at" in done.error.__notes__[0]


def test_a_load_from_a_redis_that_is_down_or_silent_is_a_typed_miss(
    redis_url: str, tiers: Callable[..., Any]
) -> None:
    manifest = tiers(RedisStore(RedisConfig(redis_url))).park("s1", 1, LOG, "redis").manifest
    down = tiers(RedisStore(RedisConfig(f"redis://127.0.0.1:{free_port()}/0")))
    assert down.load(manifest, LOG)[0].miss is MissReason.STORE_FAILED
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(4)
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
        silent = tiers(RedisStore(RedisConfig(url, socket_timeout_s=0.2)))
        loaded, _ = silent.load(manifest, LOG, deadline_s=0.3)
        assert loaded.miss is MissReason.TIMED_OUT
        assert loaded.seconds < 5.0  # bounded; the machine may be busy
    nowhere = tiers(HostStore(1 << 20))
    loaded, _ = nowhere.load(manifest, LOG)
    assert loaded.miss is MissReason.TIER_MISSING and "redis" in loaded.miss_detail


def test_queues_are_bounded_and_a_silent_tier_delays_no_other(
    tiers: Callable[..., Any], kit: Any
) -> None:
    stuck, host = Faulty(), HostStore(1 << 20)
    stuck.tier = "redis"  # type: ignore[misc]
    one = tiers(stuck, host)
    manifest = one.park("s1", 1, LOG, "redis").manifest
    stuck.gate = threading.Event()

    def job(number: int) -> LoadJob:
        memory = kit.blocks(LOG, 22)
        return LoadJob(manifest, 0, LOG, memory, kit.geometry, 10.0, job_id=number)

    one.workers.load(job(0))
    assert stuck.entered.wait(20)
    for number in range(1, 9):
        one.workers.load(job(number))
    with pytest.raises(QueueFull, match="8 jobs wait at a worker of tier redis"):
        one.workers.load(job(9))
    assert one.park("s2", 1, LOG, "host").error is None  # while nine jobs hang in the other tier
    stuck.gate.set()
    assert [one.next().job_id for _ in range(9)] == list(range(9))  # in order


def test_a_job_that_waited_its_deadline_away_is_not_started(
    tiers: Callable[..., Any], kit: Any
) -> None:
    store = Faulty()
    one = tiers(store)
    manifest = one.park("s1", 1, LOG, "host").manifest
    store.gate = threading.Event()
    memory = kit.blocks(LOG, 22)
    one.workers.load(LoadJob(manifest, 0, LOG, memory, kit.geometry, 10.0, job_id=1))
    assert store.entered.wait(20)
    one.workers.load(LoadJob(manifest, 0, LOG, memory, kit.geometry, 0.0, job_id=2))
    store.gate.set()
    assert one.next().miss is None
    late = one.next()
    assert (late.job_id, late.miss) == (2, MissReason.TIMED_OUT)
    done = one.park("s1", 2, LOG, "host", deadline_s=0.0)
    assert isinstance(done.error, StoreTimeout) and done.manifest is None


def test_close_answers_every_job_that_was_accepted(kit: Any) -> None:
    store = Faulty()
    done: queue.Queue[Any] = queue.Queue()
    workers = TierWorkers([store], done.put, num_workers=1, queue_len=3)
    store.gate = threading.Event()
    park = ParkJob(
        "s1", 1, kit.lineage, LOG, (), kit.blocks(LOG, 22), 22, kit.geometry, "host", (), 10.0
    )
    workers.park(park)
    manifest = done.get(timeout=20).manifest
    memory = kit.blocks(LOG, 22)
    workers.load(LoadJob(manifest, 0, LOG, memory, kit.geometry, 10.0))
    assert store.entered.wait(20)
    workers.load(LoadJob(manifest, 0, LOG, memory, kit.geometry, 10.0))
    workers.park(park)
    workers.delete(DeleteJob("s1", kit.lineage.namespace, (), "host", 10.0))
    closer = threading.Thread(target=workers.close, args=(20.0,))
    closer.start()
    while True:  # the closer sets its flag at once; what waits must then be refused
        try:
            workers.park(park)
        except WorkersClosed:
            break
        except QueueFull:
            continue
    store.gate.set()
    closer.join(20)
    assert not closer.is_alive()
    first, second, third, fourth = (done.get_nowait() for _ in range(4))
    assert first.miss is None and first.num_tokens == 22
    assert second.miss is MissReason.CLOSED
    assert third.manifest is None and isinstance(third.error, WorkersClosed)
    assert isinstance(fourth.error, WorkersClosed)
    assert done.empty()


def test_a_defect_in_a_store_is_still_an_answer(tiers: Callable[..., Any], kit: Any) -> None:
    class Broken(HostStore):
        def get(self, *args: Any) -> Any:
            raise ZeroDivisionError("a defect")

        def put(self, *args: Any) -> None:
            raise ZeroDivisionError("a defect")

    one = tiers(Broken(1 << 20))
    done = one.park("s1", 1, LOG, "host")
    assert isinstance(done.error, StoreError) and "ZeroDivisionError" in str(done.error)
    good = tiers(HostStore(1 << 20)).park("s1", 1, LOG, "host").manifest
    assert one.load(good, LOG)[0].miss is MissReason.STORE_FAILED


def test_bad_jobs_are_refused_before_they_are_queued(tiers: Callable[..., Any], kit: Any) -> None:
    one = tiers(HostStore(1 << 20))
    good = ParkJob(
        "s1", 1, kit.lineage, LOG, (), kit.blocks(LOG, 22), 22, kit.geometry, "host", (), 10.0
    )
    for changes, error in (
        ({"session_id": "../x"}, InvalidSessionId),
        ({"num_tokens": 0}, InvalidInput),
        ({"num_tokens": 23}, InvalidInput),
        ({"blocks": good.blocks[:-1]}, InvalidInput),
        ({"blocks": [bytes(100)] * len(good.blocks)}, InvalidInput),
        ({"tier": "tape"}, InvalidInput),
    ):
        with pytest.raises(error):
            one.workers.park(dataclasses.replace(good, **changes))
    manifest = one.park("s1", 1, LOG, "host").manifest
    load = LoadJob(manifest, 0, LOG, kit.blocks(LOG, 22), kit.geometry, 1.0)
    for changes in (
        {"first_block": 7},
        {"first_block": -1},
        {"blocks": [memoryview(bytes(kit.geometry.block_bytes))]},
        {"blocks": [memoryview(bytearray(100))]},
        {"token_ids": b"123"},
    ):
        with pytest.raises(InvalidInput):
            one.workers.load(dataclasses.replace(load, **changes))


def test_a_read_only_payload_is_parked_without_its_unused_slots_too(
    tiers: Callable[..., Any], kit: Any
) -> None:
    one = tiers(HostStore(1 << 20))
    kv = bytes(kit.kv(LOG, 22))
    blocks = split_blocks(kv, kit.geometry.block_bytes)
    one.workers.park(
        ParkJob("s1", 1, kit.lineage, LOG, (), blocks, 22, kit.geometry, "host", (), 10.0)
    )
    loaded, back = one.load(one.next().manifest, LOG)
    assert loaded.miss is None and back == kit.used(kv, 22) != kv
