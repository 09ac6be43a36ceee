"""The Redis tier against a real Redis: cases D16, G6, G8, and a Redis that is away, silent or
full.
"""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from redis_frames import ACME, BIG, RIVAL, SLACK_S, frame
from redis_server import RedisServer, free_port

from moorage.prefix_cache.block import BlockHash
from moorage.prefix_cache.errors import (
    FrameTooLarge,
    InvalidInput,
    InvalidSessionId,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreTimeout,
    StoreUnavailable,
)
from moorage.prefix_cache.frame import (
    Frame,
    FrameKey,
    Geometry,
    private_key,
    run_key,
)
from moorage.prefix_cache.redis_keys import frame_redis_key, session_key, slot_of
from moorage.prefix_cache.redis_link import Operation, pack_command
from moorage.prefix_cache.redis_store import RedisConfig, RedisStore


def run(geometry: Geometry, name: int, fill: int = 0) -> tuple[FrameKey, Frame]:
    return frame(run_key(BlockHash(bytes([name]) * 16), geometry), geometry, fill)


def own(geometry: Geometry, session: str, generation: int, fill: int = 0) -> tuple[FrameKey, Frame]:
    return frame(private_key(session, generation, 0, geometry), geometry, fill)


@pytest.fixture
def store(redis_url: str) -> Iterator[RedisStore]:
    made = RedisStore(RedisConfig(redis_url))
    yield made
    made.close()


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[redis.Redis]:
    made = redis_server.client()
    yield made
    made.close()


def test_frames_come_back_as_they_were(store: RedisStore, kit: Any) -> None:
    frames = [run(kit.geometry, 1), run(kit.geometry, 2, 9), own(kit.geometry, "a", 1, 7)]
    keys = [key for key, _ in frames]
    store.put(frames, "a", ACME, 5.0)
    assert store.get(keys, "a", ACME, 5.0) == [f.join() for _, f in frames]
    assert store.contains(keys, "a", ACME, 5.0) == [True, True, True]
    missing = run(kit.geometry, 3)[0]
    assert store.get([missing, keys[0]], "a", ACME, 5.0) == [None, frames[0][1].join()]
    s = store.statistics()
    assert (s.puts, s.gets, s.hits, s.misses, s.failures) == (3, 5, 4, 1, 0)


def test_large_frames_pass_whole(store: RedisStore) -> None:
    frames = [run(BIG, name, name) for name in range(1, 25)]  # 12 MiB: two pipelines
    store.put(frames, "a", ACME, 20.0)
    for key, one in frames:
        assert store.get([key], "a", ACME, 5.0) == [one.join()]


def test_a_run_that_exists_is_not_sent_again(
    store: RedisStore, client: redis.Redis, kit: Any
) -> None:
    store.put([run(kit.geometry, 1, 1), own(kit.geometry, "a", 1)], "a", ACME, 5.0)
    store.put([run(kit.geometry, 1, 2), run(kit.geometry, 2)], "b", ACME, 5.0)
    assert client.info("commandstats")["cmdstat_hset"]["calls"] >= 2
    first = store.get([run(kit.geometry, 1)[0]], "b", ACME, 5.0)
    assert first == [run(kit.geometry, 1, 1)[1].join()]  # the first writer's
    assert store.statistics().puts == 3
    assert client.dbsize() == 3


def test_every_frame_has_a_lifetime_and_a_put_renews_it(
    redis_url: str, client: redis.Redis, kit: Any
) -> None:
    store = RedisStore(RedisConfig(redis_url, ttl_s=100.0))
    frames = [run(kit.geometry, 1), own(kit.geometry, "a", 1)]
    store.put(frames, "a", ACME, 5.0)
    keys = client.keys("*")
    assert len(keys) == 2
    for key in keys:
        assert 90 < client.ttl(key) <= 105  # a run's holds for the five seconds of the park too
        client.expire(key, 10)
    store.put(frames, "a", ACME, 5.0)
    assert all(90 < client.ttl(key) <= 105 for key in keys)
    store.close()


def test_the_default_lifetime_is_seven_days(
    store: RedisStore, client: redis.Redis, kit: Any
) -> None:
    store.put([run(kit.geometry, 1)], "a", ACME, 5.0)
    assert 7 * 86_400 - 60 < client.ttl(client.keys("*")[0]) <= 7 * 86_400 + 5


def test_delete_takes_private_frames_and_leaves_shared_ones(store: RedisStore, kit: Any) -> None:
    frames = [run(kit.geometry, 1), own(kit.geometry, "a", 1), own(kit.geometry, "a", 2)]
    keys = [key for key, _ in frames]
    store.put(frames, "a", ACME, 5.0)
    store.delete(keys[:2], "a", ACME, 5.0)
    assert store.contains(keys, "a", ACME, 5.0) == [True, False, True]
    store.drop(keys, "a", ACME, 5.0)
    assert store.contains(keys, "a", ACME, 5.0) == [False, False, False]


def test_namespaces_are_walls_for_private_frames(store: RedisStore, kit: Any) -> None:
    private = own(kit.geometry, "a", 1)
    store.put([private], "a", ACME, 5.0)
    assert store.get([private[0]], "a", RIVAL, 5.0) == [None]
    store.delete([private[0]], "a", RIVAL, 5.0)
    assert store.contains([private[0]], "a", ACME, 5.0) == [True]
    with pytest.raises(InvalidInput, match="another session"):
        store.get([private[0]], "b", ACME, 5.0)


def test_g8_private_keys_share_a_slot_and_shared_ones_lie_by_their_own_hash(
    client: redis.Redis, kit: Any
) -> None:
    names = [session_key(ACME, "s1", part) for part in ("row", "log", "manifest", "lease")]
    for generation in range(3):
        key = private_key("s1", generation, 4, kit.geometry)
        names.append(frame_redis_key(key, "s1", ACME))
    assert names[4] == f"moorage:{{s:{ACME.digest}:s1}}:frame:0:4"
    assert len({slot_of(name) for name in names}) == 1
    assert slot_of(names[0]) != slot_of(session_key(ACME, "s2", "row"))
    assert session_key(ACME, "s1", "row") != session_key(RIVAL, "s1", "row")
    shared = frame_redis_key(run_key(BlockHash(b"\xab" * 16), kit.geometry), "s1", ACME)
    assert shared == f"moorage:{{r:{'ab' * 16}}}:float32:raw"
    assert run_key(BlockHash(b"\xab" * 16), kit.geometry).field == "L0-2:H0-1"
    assert slot_of("123456789") == 0x31C3  # the cluster specification's own check value


def test_g8_no_command_names_two_keys(store: RedisStore, kit: Any) -> None:
    sent: list[tuple[Any, ...]] = []
    execute = store._link.execute

    def record(operations: Any, deadline: float) -> Any:
        for operation in operations:
            sent.extend(operation.commands)
            keys = {
                part for command in operation.commands for part in command if isinstance(part, str)
            }
            assert keys == {operation.key}
        return execute(operations, deadline)

    store._link.execute = record  # type: ignore[method-assign]
    frames = [run(kit.geometry, n) for n in (1, 2, 3)] + [own(kit.geometry, "a", 1)]
    keys = [key for key, _ in frames]
    store.put(frames, "a", ACME, 5.0)
    store.get(keys, "a", ACME, 5.0)
    store.contains(keys, "a", ACME, 5.0)
    store.delete(keys, "a", ACME, 5.0)
    store.drop(keys, "a", ACME, 5.0)
    assert len(sent) > 20
    for command in sent:
        assert sum(1 for part in command if isinstance(part, str)) == 1


@pytest.mark.parametrize("session_id", ["", "../../etc/x", "a/b", "x" * 10_000, "a\n", "{slot}"])
def test_d16_session_ids_that_could_reach_elsewhere_are_refused(
    store: RedisStore, client: redis.Redis, kit: Any, session_id: str
) -> None:
    with pytest.raises(InvalidSessionId):
        store.put([run(kit.geometry, 1)], session_id, ACME, 5.0)
    with pytest.raises(InvalidSessionId):
        store.get([run(kit.geometry, 1)[0]], session_id, ACME, 5.0)
    with pytest.raises(InvalidSessionId):
        session_key(ACME, session_id, "row")
    assert client.dbsize() == 0


def test_a_frame_over_the_bound_is_refused_before_it_is_sent(
    redis_url: str, client: redis.Redis
) -> None:
    store = RedisStore(RedisConfig(redis_url, max_value_bytes=1000))
    with pytest.raises(FrameTooLarge, match="takes up to 1000: lower run_blocks"):
        store.put([run(BIG, 1)], "a", ACME, 5.0)
    assert client.dbsize() == 0
    store.close()


def test_another_kind_of_value_under_our_key_is_a_typed_error(
    store: RedisStore, client: redis.Redis, kit: Any
) -> None:
    key = run(kit.geometry, 1)[0]
    client.set(frame_redis_key(key, "a", ACME), "not a hash")
    with pytest.raises(StoreRefused, match="WRONGTYPE"):
        store.get([key], "a", ACME, 5.0)
    other = run(kit.geometry, 2)
    opened = client.info("stats")["total_connections_received"]
    store.put([other], "a", ACME, 5.0)  # on the same connection, which is still in step
    assert client.info("stats")["total_connections_received"] == opened
    assert store.get([other[0]], "a", ACME, 5.0) == [other[1].join()]


def test_an_error_inside_a_transaction_is_that_of_its_operation(
    store: RedisStore, client: redis.Redis, kit: Any
) -> None:
    wrong = Operation("k", ((b"SET", "k", b"v"), (b"HSET", "k", b"f", b"v")))
    right = Operation("h", ((b"HSET", "h", b"f", b"v"), (b"HGET", "h", b"f")))
    with pytest.raises(StoreRefused, match="WRONGTYPE"):
        store._link.execute([wrong, right], time.monotonic() + 5.0)
    client.delete("k")
    assert store._link.execute([right], time.monotonic() + 5.0) == [b"v"]  # and in step


def test_nothing_listens_is_unavailable_without_credentials(kit: Any) -> None:
    port = free_port()
    store = RedisStore(RedisConfig(f"redis://user:hunter2@127.0.0.1:{port}/0"))
    started = time.monotonic()
    for call in (
        lambda: store.check(2.0),
        lambda: store.put([run(kit.geometry, 1)], "a", ACME, 2.0),
        lambda: store.get([run(kit.geometry, 1)[0]], "a", ACME, 2.0),
    ):
        with pytest.raises(StoreUnavailable) as caught:
            call()
        assert f"127.0.0.1:{port}" in str(caught.value)
        assert "hunter2" not in str(caught.value) and "hunter2" not in repr(caught.value)
    assert time.monotonic() - started < 3.0 + SLACK_S
    assert store.statistics().failures == 3
    store.close()


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A socket that accepts (the kernel does) and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        yield listener.getsockname()[1]


@pytest.mark.parametrize("deadline_s", [0.1, 0.4])
def test_a_silent_redis_costs_the_deadline_and_no_more(
    silent_port: int, kit: Any, deadline_s: float
) -> None:
    store = RedisStore(
        RedisConfig(f"redis://127.0.0.1:{silent_port}/0", socket_timeout_s=0.2, max_retries=5)
    )
    for call in (
        lambda: store.get([run(kit.geometry, 1)[0]], "a", ACME, deadline_s),
        lambda: store.put([run(BIG, 1)], "a", ACME, deadline_s),
    ):
        started = time.monotonic()
        with pytest.raises(StoreTimeout, match="did not answer in time"):
            call()
        assert time.monotonic() - started < deadline_s + 0.2 + SLACK_S
    store.close()


def test_a_redis_that_falls_silent_on_an_open_connection_costs_the_deadline(kit: Any) -> None:
    with RedisServer() as server:
        store = RedisStore(RedisConfig(server.url, socket_timeout_s=30.0))
        frames = [run(kit.geometry, 1)]
        store.put(frames, "a", ACME, 5.0)
        client = server.client()
        client.client_pause(60_000)
        started = time.monotonic()
        with pytest.raises(StoreTimeout):
            store.get([frames[0][0]], "a", ACME, 0.3)
        assert 0.25 < time.monotonic() - started < 0.3 + SLACK_S
        client.close()
        store.close()


def test_a_redis_that_stops_in_mid_reply_costs_one_socket_timeout(kit: Any) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(4)

        def half_answer() -> None:
            peer, _ = listener.accept()
            peer.recv(1 << 16)
            peer.recv(1 << 16)
            peer.sendall(b"$1000\r\nabc")
            peer.recv(1 << 16)
            peer.close()

        thread = threading.Thread(target=half_answer, daemon=True)
        thread.start()
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
        store = RedisStore(RedisConfig(url, socket_timeout_s=0.2))
        started = time.monotonic()
        with pytest.raises(StoreError):
            store.get([run(kit.geometry, 1)[0]], "a", ACME, 0.5)
        assert time.monotonic() - started < 0.7 + SLACK_S
        store.close()


def test_reads_are_tried_again_after_a_restart_and_frames_lost_are_misses(kit: Any) -> None:
    with RedisServer() as server:
        store = RedisStore(RedisConfig(server.url))
        frames = [run(kit.geometry, 1)]
        store.put(frames, "a", ACME, 5.0)
        server.restart()
        assert store.get([frames[0][0]], "a", ACME, 5.0) == [None]
        server.kill()
        with pytest.raises(StoreUnavailable):
            store.get([frames[0][0]], "a", ACME, 1.0)
        server.start()
        store.put(frames, "a", ACME, 5.0)
        assert store.contains([frames[0][0]], "a", ACME, 5.0) == [True]
        store.close()


def test_wrong_credentials_are_unavailable(kit: Any) -> None:
    with RedisServer({"requirepass": "right"}) as server:
        store = RedisStore(RedisConfig(f"redis://:wrong@127.0.0.1:{server.port}/0"))
        with pytest.raises(StoreUnavailable) as caught:
            store.check(2.0)
        assert "wrong" not in str(caught.value)
        store.close()
        good = RedisStore(RedisConfig(f"redis://:right@127.0.0.1:{server.port}/0"))
        good.check(2.0)
        good.close()


def test_g6_a_full_redis_is_typed_and_leaves_no_private_frame_of_the_call() -> None:
    with RedisServer({"maxmemory": "5mb", "maxmemory-policy": "noeviction"}) as server:
        store = RedisStore(RedisConfig(server.url, pipeline_bytes=1))
        stored = 0
        with pytest.raises(StoreFull, match="maxmemory"):
            for number in range(1, 40):
                session = f"s{number}"
                store.put([own(BIG, session, 1), run(BIG, number)], session, ACME, 5.0)
                stored += 1
        assert stored >= 2
        client = server.client()
        private = client.keys("moorage:{s:*")
        assert len(private) == stored
        for number in range(1, stored + 1):
            assert store.get([own(BIG, f"s{number}", 1)[0]], f"s{number}", ACME, 5.0) != [None]
        client.config_set("maxmemory", "50mb")
        store.put([own(BIG, "again", 1)], "again", ACME, 5.0)
        client.close()
        store.close()


def test_a_closed_store_is_unavailable(store: RedisStore, kit: Any) -> None:
    store.check(2.0)
    store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        store.get([run(kit.geometry, 1)[0]], "a", ACME, 1.0)


@pytest.mark.parametrize("url", ["", "http://x", "redis://h:notaport/0", "127.0.0.1:6379"])
def test_a_malformed_url_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(InvalidInput, match="the Redis URL is malformed"):
        RedisStore(RedisConfig(url))


@pytest.mark.parametrize(
    "bad", [{"ttl_s": 0}, {"max_connections": 0}, {"socket_timeout_s": -1}, {"max_retries": -1}]
)
def test_bad_settings_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(bad))):
        RedisStore(dataclasses.replace(RedisConfig("redis://127.0.0.1/0"), **bad))


def test_a_frame_is_packed_without_a_copy(kit: Any) -> None:
    _, one = run(kit.geometry, 1)
    chunks = pack_command((b"SET", "name", one, b"PX", b"10"))
    assert any(chunk is one.pieces[0] for chunk in chunks)
    size = one.size_bytes
    assert b"".join(chunks) == (
        b"*5\r\n$3\r\nSET\r\n$4\r\nname\r\n$%d\r\n%b\r\n$2\r\nPX\r\n$2\r\n10\r\n"
        % (size, one.join())
    )
