"""Park, restore, restart, damage: KV is exact or it is a counted miss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engine_harness import EIGHT, TENANT, EngineHarness, first_turn, prompt
from redis_server import RedisServer

from moorage.engine import (
    FaultCode,
    Namespace,
    ParkCommitted,
    ParkDone,
    ParkFailed,
    ParkPrepared,
    ParkRefused,
    Release,
    Restore,
    RestoreDone,
    SamplingParams,
    TierConfig,
    pack_tokens,
)

Start = Callable[..., EngineHarness]


@pytest.fixture
def undisturbed(start_engine: Start) -> Callable[[list[int]], list[int]]:
    """What a fresh engine generates from a log."""
    return lambda log: start_engine().run("s", log, sampling=EIGHT).token_ids


def test_a_parked_session_holds_nothing_and_comes_back_exactly(
    start_engine: Start, undisturbed: Callable[[list[int]], list[int]]
) -> None:
    engine = start_engine()
    log = first_turn(engine, 700, 1)
    parked = engine.park("s")
    assert (parked.tier, parked.num_tokens) == ("host", 707)
    seen = engine.inspect("s")
    assert (seen.session_locked_blocks, seen.session_in_use_blocks) == (0, 0)
    assert seen.free_blocks == seen.total_blocks and seen.free_blocks_not_nan == 0
    log += [11, 12, 13]
    back = engine.run("s", log, num_known=707, manifest=parked.manifest, sampling=EIGHT)
    assert back.sources is not None
    assert (back.sources.host, back.sources.recomputed, back.sources.new) == (707, 0, 4)
    assert back.forwarded_to_first == 3 + 1
    assert back.token_ids == undisturbed(log)


def test_d18_the_length_is_the_tokens_not_the_slots(start_engine: Start) -> None:
    engine = start_engine()
    log = first_turn(engine, 26, 2)  # 33 tokens with KV: two blocks and one slot of a third
    parked = engine.park("s")
    assert parked.num_tokens == 33
    back = engine.run("s", log, num_known=33, manifest=parked.manifest, sampling=EIGHT)
    assert back.sources is not None and (back.sources.host, back.sources.new) == (33, 1)
    assert back.forwarded_to_first == 1


@pytest.mark.parametrize("length", [1300, 255, 257, 20])
def test_d1_a_restarted_engine_resumes_from_redis(
    start_engine: Start, redis_url: str, length: int, undisturbed: Callable[[list[int]], list[int]]
) -> None:
    tiers = TierConfig(redis_url=redis_url)
    first = start_engine(tiers=tiers)
    log = first_turn(first, length, 3)
    parked = first.park("s")
    assert parked.tier == "redis"
    log += prompt(8, 4)
    second = start_engine(
        tiers=tiers
    )  # another engine, as after a restart: nothing but the manifest
    back = second.run("s", log, num_known=length + 7, manifest=parked.manifest, sampling=EIGHT)
    assert back.sources is not None
    assert (back.sources.redis, back.sources.recomputed) == (length + 7, 0)
    assert back.forwarded_to_first == 8 + 1
    assert back.token_ids == undisturbed(log)


def test_parking_a_second_session_on_the_same_prefix_adds_its_suffix_and_at_most_one_run(
    start_engine: Start, redis_server: RedisServer, redis_url: str
) -> None:
    import redis

    engine = start_engine(tiers=TierConfig(redis_url=redis_url))
    shared = prompt(640, 5)  # two whole runs of 256 tokens and half of a third
    client = redis.Redis.from_url(redis_url)

    def stored() -> set[bytes]:
        return set(client.keys("moorage:*"))

    engine.run("s1", shared + prompt(20, 6), sampling=EIGHT)
    engine.park("s1")
    before = stored()
    assert len(before) == 3  # two runs and one private frame
    engine.run("s2", shared + prompt(30, 7), sampling=EIGHT)
    engine.park("s2")
    added = stored() - before
    assert len(added) == 1  # its own partial run; both shared runs are there already
    assert before <= stored()


def test_kv_that_the_tier_lost_is_recomputed_and_said_so(
    start_engine: Start,
    redis_server: RedisServer,
    redis_url: str,
    undisturbed: Callable[[list[int]], list[int]],
) -> None:
    import redis

    engine = start_engine(tiers=TierConfig(redis_url=redis_url, host_copies=False))
    log = first_turn(engine, 600, 8)
    parked = engine.park("s")
    client = redis.Redis.from_url(redis_url)
    private = [key for key in client.keys("moorage:*") if b":frame:" in key]
    client.delete(*private)
    back = engine.run("s", [*log, 9], num_known=607, manifest=parked.manifest, sampling=EIGHT)
    assert back.sources is not None
    assert (back.sources.redis, back.sources.recomputed, back.sources.new) == (512, 95, 2)
    assert "not_stored" in back.sources.recomputed_reason
    assert back.forwarded_to_first == 95 + 2
    assert back.token_ids == undisturbed([*log, 9])
    client.close()


def test_damaged_frames_and_manifests_are_misses(
    start_engine: Start,
    redis_server: RedisServer,
    redis_url: str,
    undisturbed: Callable[[list[int]], list[int]],
) -> None:
    import redis

    tiers = TierConfig(redis_url=redis_url)
    engine = start_engine(tiers=tiers)
    log = first_turn(engine, 300, 9)
    parked = engine.park("s")
    client = redis.Redis.from_url(redis_url)
    run_key = next(key for key in client.keys("moorage:*") if b":frame:" not in key)
    field, value = next(iter(client.hgetall(run_key).items()))
    client.hset(run_key, field, value[:-1] + bytes([value[-1] ^ 1]))
    back = start_engine(tiers=tiers).run(
        "s", log, num_known=307, manifest=parked.manifest, sampling=EIGHT
    )
    assert back.sources is not None
    assert (back.sources.redis, back.sources.recomputed) == (0, 307)
    assert "damaged" in back.sources.recomputed_reason
    assert back.token_ids == undisturbed(log)
    broken = parked.manifest[:-1] + bytes([parked.manifest[-1] ^ 1])
    back = start_engine(tiers=tiers).run("s", log, num_known=307, manifest=broken, sampling=EIGHT)
    assert back.sources is not None and back.sources.recomputed == 307
    assert "manifest" in back.sources.recomputed_reason
    client.close()


def test_d10_another_models_manifest_is_refused_and_recomputed(start_engine: Start) -> None:
    engine = start_engine()
    log = first_turn(engine, 100, 10)
    parked = engine.park("s")
    for changes in ({"block_size": 32}, {"dtype": "bfloat16"}):
        other = start_engine(**changes)
        back = other.run("s", log, num_known=107, manifest=parked.manifest, sampling=EIGHT)
        assert back.sources is not None and (back.sources.host, back.sources.recomputed) == (0, 107)
        assert "another model" in back.sources.recomputed_reason
    walled = engine.run(
        "s2",
        log,
        num_known=107,
        manifest=parked.manifest,
        namespace=Namespace("tenant-b", "default"),
    )
    assert walled.sources is not None and walled.sources.host == 0
    assert "namespace" in walled.sources.recomputed_reason


def test_an_unreachable_redis_degrades_to_host_and_disturbs_nobody(start_engine: Start) -> None:
    engine = start_engine(tiers=TierConfig(redis_url="redis://127.0.0.1:1/0", deadline_s=5.0))
    log = first_turn(engine, 40, 11)
    parked = engine.park("s")
    assert parked.tier == "host" and parked.degraded
    refused = engine.prepare_park("s", 2, "redis")
    assert isinstance(refused, ParkRefused)
    back = engine.run("s", log, num_known=47, manifest=parked.manifest, sampling=EIGHT)
    assert back.sources is not None and back.sources.host == 47
    strict = engine.prepare_park("s", 3, "redis")
    assert isinstance(strict, ParkRefused) and strict.error.code is FaultCode.STORE
    assert "127.0.0.1:1" in strict.error.message
    assert engine.engine.statistics().store_failures >= 1


def test_blocks_stay_until_the_manifest_is_durable(start_engine: Start) -> None:
    engine = start_engine()
    log = first_turn(engine, 40, 12)
    prepared = engine.prepare_park("s", 1)
    assert isinstance(prepared, ParkPrepared)
    held = engine.inspect("s")
    assert held.session_locked_blocks + held.session_in_use_blocks == 3
    engine.engine.send(ParkFailed("s", 1))  # the session store could not commit
    again = engine.run("s", log, num_known=47, sampling=EIGHT)
    assert again.sources is not None and again.sources.device == 47
    stale = prepared.manifest  # its frames are gone: a miss at worst
    assert stale


def test_a_session_that_comes_back_before_the_commit_keeps_its_blocks(start_engine: Start) -> None:
    engine = start_engine()
    log = first_turn(engine, 40, 13)
    prepared = engine.prepare_park("s", 1)
    assert isinstance(prepared, ParkPrepared)
    request = engine.submit(
        "s", log, num_known=47, sampling=SamplingParams(max_tokens=100, ignore_eos=True)
    )
    engine.until_tokens(request, 1)
    engine.engine.send(ParkCommitted("s", 1))
    done = engine.event(ParkDone)
    assert isinstance(done, ParkDone) and done.num_freed_blocks == 0
    assert len(engine.finish(request).token_ids) == 100


def test_a_shared_prefix_stays_on_the_device_while_another_session_holds_it(
    start_engine: Start,
) -> None:
    engine = start_engine()
    shared = prompt(160, 14)
    engine.run("s1", shared + prompt(20, 15), sampling=EIGHT)
    engine.run("s2", shared + prompt(20, 16), sampling=EIGHT)
    engine.park("s1")
    assert engine.inspect("s1").session_locked_blocks == 0
    seen = engine.inspect("s2")
    assert seen.session_locked_blocks >= 10 and seen.locked_blocks == seen.session_locked_blocks


def test_a_restore_ahead_of_the_turn_leaves_only_new_tokens_to_it(start_engine: Start) -> None:
    engine = start_engine()
    log = first_turn(engine, 300, 17)
    parked = engine.park("s")
    engine.engine.send(Restore("s", TENANT, pack_tokens(log), parked.manifest))
    restored = engine.event(RestoreDone)
    assert isinstance(restored, RestoreDone) and restored.error is None
    assert (restored.sources.host, restored.sources.recomputed) == (307, 0)
    back = engine.run("s", [*log, 5], num_known=307, manifest=parked.manifest, sampling=EIGHT)
    assert back.sources is not None and (back.sources.device, back.sources.new) == (307, 2)


def test_parking_what_runs_or_holds_nothing_is_refused_with_a_reason(start_engine: Start) -> None:
    engine = start_engine()
    nothing = engine.prepare_park("unknown", 1)
    assert isinstance(nothing, ParkRefused) and nothing.error.code is FaultCode.STATE
    busy = engine.submit(
        "s", prompt(20, 18), sampling=SamplingParams(max_tokens=300, ignore_eos=True)
    )
    engine.until_tokens(busy, 1)
    running = engine.prepare_park("s", 1)
    assert isinstance(running, ParkRefused) and "generates" in running.error.message
    engine.abort(busy)
    no_redis = engine.prepare_park("s", 2, "redis")
    assert isinstance(no_redis, ParkRefused) and "--redis" in no_redis.error.message


def test_close_lets_go_of_blocks_and_frames(
    start_engine: Start, redis_server: RedisServer, redis_url: str
) -> None:
    import redis

    engine = start_engine(tiers=TierConfig(redis_url=redis_url))
    first_turn(engine, 40, 19)
    parked = engine.park("s")
    client = redis.Redis.from_url(redis_url)
    assert len(client.keys("moorage:*")) == 1
    engine.engine.send(Release("s", TENANT, parked.manifest))
    engine.close()  # waits for the workers, which were handed the delete job before
    assert client.keys("moorage:*") == []
    client.close()


def test_park_and_resume_many_times_leaks_nothing(start_engine: Start) -> None:
    engine = start_engine(num_blocks=24, context_len=256)
    logs = {f"s{i}": prompt(60 + i, 100 + i) for i in range(6)}
    manifests: dict[str, bytes] = {}
    known = dict.fromkeys(logs, 0)
    expected = {name: list(log) for name, log in logs.items()}
    reference = start_engine(num_blocks=256)
    for round_ in range(1, 6):
        for name, log in logs.items():
            back = engine.run(
                name, log, num_known=known[name], manifest=manifests.get(name), sampling=EIGHT
            )
            assert back.sources is not None and back.sources.recomputed == 0
            log.extend(back.token_ids)
            past = expected[name]
            past += reference.run(
                name, past, num_known=max(0, len(past) - 1), sampling=EIGHT
            ).token_ids
            assert log == past
            known[name] = len(log) - 1
            manifests[name] = engine.park(name, round_).manifest
    seen = engine.inspect()
    assert seen.free_blocks == seen.total_blocks == 24


def test_d15_sessions_parked_on_disk_come_back_after_a_restart(
    start_engine: Start, tmp_path: Path, undisturbed: Callable[[list[int]], list[int]]
) -> None:
    tiers = TierConfig(disk_dir=tmp_path / "kv")
    first = start_engine(tiers=tiers)
    logs = [first_turn(first, 300 + 17 * n, 40 + n, f"s{n}") for n in range(3)]
    parked = [first.park(f"s{n}") for n in range(3)]
    assert {one.tier for one in parked} == {"disk"}
    near = first.run("s0", logs[0], num_known=307, manifest=parked[0].manifest, sampling=EIGHT)
    assert near.sources is not None
    assert (near.sources.host, near.sources.disk) == (307, 0)  # the copy in host memory
    first.close()
    second = start_engine(tiers=tiers)
    for n, log in enumerate(logs):
        known = len(log) - 1
        back = second.run(
            f"s{n}", log, num_known=known, manifest=parked[n].manifest, sampling=EIGHT
        )
        assert back.sources is not None
        assert (back.sources.disk, back.sources.recomputed) == (known, 0)
        assert back.forwarded_to_first == 1
        assert back.token_ids == undisturbed(log)


def test_a_disk_that_is_full_gives_way_to_host_memory_and_says_so(
    start_engine: Start, tmp_path: Path
) -> None:
    engine = start_engine(tiers=TierConfig(disk_dir=tmp_path / "kv", disk_bytes=1000))
    first_turn(engine, 300, 50)
    parked = engine.park("s")
    assert parked.tier == "host"
    assert "disk_bytes" in parked.degraded
    first_turn(engine, 300, 51)
    refused = engine.prepare_park("s", 2, "disk")
    assert isinstance(refused, ParkRefused) and "disk_bytes" in refused.error.message


def test_int8_frames_take_half_the_room_and_are_no_longer_called_exact(start_engine: Start) -> None:
    exact, coded = start_engine(), start_engine(tiers=TierConfig(codec="int8"))
    assert exact.engine.model_info.deterministic
    assert not coded.engine.model_info.deterministic
    log = first_turn(exact, 700, 60)
    assert first_turn(coded, 700, 60) == log
    whole, half = exact.park("s"), coded.park("s")
    assert half.num_bytes < 0.45 * whole.num_bytes  # fp32 KV: a quarter, and the raw sinks and tail
    back = coded.run("s", log, num_known=707, manifest=half.manifest, sampling=EIGHT)
    assert back.sources is not None
    assert (back.sources.host, back.sources.recomputed) == (707, 0)
    refused = exact.run("t", log, num_known=707, manifest=half.manifest, sampling=EIGHT)
    assert refused.sources is not None
    assert "codec is int8" in refused.sources.recomputed_reason
