"""Every way in which a Redis lets its clients down: a typed error in time, no secret in it, nothing leaked, and the
store well again as soon as Redis is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from redis_frames import (
    ACME,
    BIG,
    HUGE,
    SLACK_S,
    eventually,
    num_connections,
    own,
    run,
    within,
)
from redis_server import Proxy, RedisServer, wait_until

from moorage.prefix_cache.errors import (
    StoreFull,
    StoreRefused,
    StoreTimeout,
    StoreUnavailable,
)
from moorage.prefix_cache.failpoints import Failpoint, installed
from moorage.prefix_cache.redis_keys import frame_redis_key
from moorage.prefix_cache.redis_store import RedisConfig, RedisStore


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[redis.Redis]:
    made = redis_server.client()
    yield made
    made.close()


@pytest.fixture
def proxy(redis_url: str, redis_server: RedisServer) -> Iterator[Proxy]:
    with Proxy(redis_server.port) as made:
        yield made


@pytest.fixture
def open_store() -> Iterator[Callable[..., RedisStore]]:
    """A maker of stores; whatever it made is closed at the end."""
    made: list[RedisStore] = []

    def make(where: str | int, **options: object) -> RedisStore:
        url = where if isinstance(where, str) else f"redis://127.0.0.1:{where}/0"
        made.append(RedisStore(RedisConfig(url, **options)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()


Open = Callable[..., RedisStore]


def test_down_at_start_then_up(open_store: Open) -> None:
    server = RedisServer()
    store = open_store(f"redis://user:hunter2@127.0.0.1:{server.port}/0")
    with within(1.0), pytest.raises(StoreUnavailable, match=f"127.0.0.1:{server.port}") as caught:
        store.put([run(1)], "a", ACME, 1.0)
    assert "Connection refused" in str(caught.value) and "hunter2" not in repr(caught.value)
    plain = open_store(server.port)
    with pytest.raises(StoreUnavailable):
        plain.put([run(1)], "a", ACME, 1.0)
    with server:
        plain.put([run(1)], "a", ACME, 5.0)
        assert plain.get([run(1)[0]], "a", ACME, 5.0) == [run(1)[1].join()]


def test_killed_in_the_middle_of_a_park_and_back(open_store: Open) -> None:
    with RedisServer() as server:
        store = open_store(server.port, pipeline_bytes=1)
        writes: list[Failpoint] = []

        def kill_at_the_second(point: Failpoint) -> None:
            if point is Failpoint.REDIS_BEFORE_WRITE:
                writes.append(point)
                if len(writes) == 2:
                    server.kill()

        frames = [run(1), run(2), own("a")]
        with (
            installed(kill_at_the_second),
            within(2.0),
            pytest.raises(StoreUnavailable, match=f"127.0.0.1:{server.port}"),
        ):
            store.put(frames, "a", ACME, 2.0)
        assert len(writes) == 2
        server.start()
        assert store.contains([key for key, _ in frames], "a", ACME, 5.0) == [False] * 3
        store.put(frames, "a", ACME, 5.0)
        assert store.get([frames[2][0]], "a", ACME, 5.0) == [frames[2][1].join()]
        with server.client() as client:
            assert num_connections(client) == 1


def test_restarted_empty_gives_misses_and_takes_frames_again(open_store: Open) -> None:
    with RedisServer() as server:
        store = open_store(server.port)
        store.put([run(1), own("a")], "a", ACME, 5.0)
        server.restart()
        assert store.get([run(1)[0], own("a")[0]], "a", ACME, 5.0) == [None, None]
        server.restart()
        store.put([run(1), own("a")], "a", ACME, 5.0)  # a write, on a connection that is gone
        assert store.contains([run(1)[0], own("a")[0]], "a", ACME, 5.0) == [True, True]
        assert store.statistics().failures == 0


def test_a_slow_way_costs_the_deadline_in_both_directions(
    proxy: Proxy, open_store: Open, client: redis.Redis
) -> None:
    store = open_store(proxy.port)
    large = run(1, geometry=HUGE)  # two seconds at 2 MB/s
    proxy.rate = 2e6
    started = time.monotonic()
    with pytest.raises(StoreTimeout, match="the operation's deadline passed"):
        store.put([large], "a", ACME, 0.5)
    assert 0.45 < time.monotonic() - started < 0.5 + SLACK_S
    store_directly = open_store(
        f"redis://127.0.0.1:{client.connection_pool.connection_kwargs['port']}/0"
    )
    store_directly.put([large, run(2)], "a", ACME, 10.0)
    started = time.monotonic()
    with pytest.raises(StoreTimeout, match="the operation's deadline passed"):
        store.get([large[0]], "a", ACME, 0.5)
    assert 0.45 < time.monotonic() - started < 0.5 + SLACK_S
    assert store.get([run(2)[0]], "a", ACME, 5.0) == [run(2)[1].join()]
    assert store.get([large[0]], "a", ACME, 20.0) == [large[1].join()]  # slow is not wrong
    proxy.rate = None
    assert store.get([large[0]], "a", ACME, 20.0) == [large[1].join()]


def test_silent_from_the_start_and_in_mid_reply(
    proxy: Proxy, open_store: Open, client: redis.Redis
) -> None:
    store = open_store(proxy.port, socket_timeout_s=0.2)
    store.put([run(1, geometry=BIG)], "a", ACME, 10.0)
    for passed in (0, 5, 1000, 300_000):
        proxy.pass_down = passed
        with within(0.2), pytest.raises(StoreTimeout, match="did not answer in time"):
            store.get([run(1, geometry=BIG)[0]], "a", ACME, 10.0)  # not the ten seconds
    proxy.pass_down = None
    assert store.get([run(1)[0]], "a", ACME, 5.0) == [None]
    wait_until(lambda: num_connections(client) == 1, "the silent connections' end")


def test_evicting_redis_gives_misses_and_takes_everything(open_store: Open) -> None:
    with RedisServer({"maxmemory": "6mb", "maxmemory-policy": "allkeys-lru"}) as server:
        store = open_store(server.port)
        for number in range(1, 25):  # 12 MiB
            store.put([run(number, geometry=BIG)], f"s{number}", ACME, 10.0)
        keys = [run(number, geometry=BIG)[0] for number in range(1, 25)]
        found = store.get(keys, "a", ACME, 10.0)
        assert 12 <= found.count(None) < 24  # six of twelve MiB, and some room for Redis itself
        for number, data in enumerate(found, start=1):
            assert data in (None, run(number, geometry=BIG)[1].join())
        assert store.statistics().failures == 0


def test_full_redis_says_so_until_there_is_room(open_store: Open) -> None:
    with RedisServer({"maxmemory": "4mb", "maxmemory-policy": "noeviction"}) as server:
        store = open_store(server.port)
        with pytest.raises(StoreFull, match=f"127.0.0.1:{server.port} is at its maxmemory: raise"):
            for number in range(1, 20):
                store.put([run(number, geometry=BIG), own("a", number)], "a", ACME, 5.0)
        assert store.get([run(1, geometry=BIG)[0]], "a", ACME, 5.0) != [None]  # reads go on
        with server.client() as client:
            assert all(client.ttl(key) > 0 for key in client.keys("*"))
            assert num_connections(client) == 1  # a refusal costs no connection
            client.config_set("maxmemory", "60mb")
        store.put([run(19, geometry=BIG), own("a", 19)], "a", ACME, 5.0)
        assert store.contains([own("a", 19)[0]], "a", ACME, 5.0) == [True]


def test_a_read_only_replica_is_named_as_one(open_store: Open) -> None:
    with RedisServer() as master, RedisServer() as replica, replica.client() as client:
        seed = open_store(master.port)
        seed.put([run(1), own("a")], "a", ACME, 5.0)
        client.execute_command("REPLICAOF", "127.0.0.1", master.port)
        wait_until(lambda: client.info("replication")["master_link_status"] == "up", "a replica")
        store = open_store(replica.port)
        assert store.get([run(1)[0]], "a", ACME, 5.0) == [run(1)[1].join()]
        for frames in ([run(2)], [own("b")]):
            session = "b" if not frames[0][0].shared else "a"
            with within(1.0), pytest.raises(StoreUnavailable, match=r"READONLY.*redis\+sentinel"):
                store.put(frames, session, ACME, 2.0)
        client.execute_command("REPLICAOF", "NO", "ONE")
        store.put([run(2)], "a", ACME, 5.0)


def test_a_lease_on_a_read_only_replica_is_refused_as_a_write(open_store: Open) -> None:
    with RedisServer() as master, RedisServer() as replica, replica.client() as client:
        open_store(master.port, ttl_s=10.0).put([run(1)], "a", ACME, 5.0)
        client.execute_command("REPLICAOF", "127.0.0.1", master.port)
        wait_until(lambda: client.info("replication")["master_link_status"] == "up", "a replica")
        with pytest.raises(StoreUnavailable, match="READONLY"):
            open_store(replica.port, ttl_s=1000.0).put([run(1)], "b", ACME, 5.0)


def test_credentials_missing_wrong_and_right(open_store: Open, tmp_path: Path) -> None:
    with RedisServer({"requirepass": "right"}) as server:
        here = f"127.0.0.1:{server.port}"
        for url, code in (
            (f"redis://{here}", "NOAUTH"),
            (f"redis://:hunter2@{here}", "WRONGPASS"),
            (f"redis://nobody:hunter2@{here}", "WRONGPASS"),
        ):
            refused = open_store(url)
            with (
                within(1.0),
                pytest.raises(StoreUnavailable, match=f"{here} refused.*{code}") as caught,
            ):
                refused.put([run(1)], "a", ACME, 2.0)
            refused.close()
            assert "password_file" in str(caught.value) and "hunter2" not in repr(caught.value)
        secret = tmp_path / "secret"
        store = open_store(f"redis://{here}?password_file={secret}")
        with pytest.raises(StoreUnavailable, match=f"{secret} cannot be read: No such file"):
            store.check(2.0)
        secret.write_text("hunter2\n")
        with pytest.raises(StoreUnavailable, match="WRONGPASS") as caught:
            store.check(2.0)
        assert "hunter2" not in repr(caught.value)
        secret.write_text("right\n")
        store.put([run(1)], "a", ACME, 5.0)  # read anew: no restart
        with server.client() as client:
            assert num_connections(client) == 1


def test_a_password_where_none_is_wanted(redis_url: str, open_store: Open) -> None:
    store = open_store(redis_url.replace("redis://", "redis://:hunter2@"))
    with pytest.raises(StoreUnavailable, match="refused our credentials") as caught:
        store.check(2.0)
    assert "hunter2" not in str(caught.value)


def test_a_user_without_the_permission(open_store: Open) -> None:
    with RedisServer() as server, server.client() as client:
        client.execute_command(
            "ACL", "SETUSER", "reader", "on", ">pw", "~moorage:*", "+get", "+hget"
        )
        store = open_store(f"redis://reader:pw@127.0.0.1:{server.port}/0")
        assert store.get([run(1)[0]], "a", ACME, 5.0) == [None]
        with pytest.raises(StoreRefused, match="lacks a permission .NOPERM.") as caught:
            store.put([own("secret-session")], "secret-session", ACME, 5.0)
        assert "secret-session" not in str(caught.value)


def test_loading_is_unavailable_and_ends(open_store: Open) -> None:
    with RedisServer({"rdbcompression": "no"}) as server:
        store = open_store(server.port)
        store.put([run(1)], "a", ACME, 5.0)
        with server.client() as client:
            for number in range(100):  # it hears clients every 2 MiB while it loads
                client.set(f"filler:{number}", b"x" * 100_000)
            client.persist(frame_redis_key(run(1)[0], "a", ACME))
            client.save()
        server.kill()
        server.launch({"key-load-delay": "10000"})
        heard: list[str] = []

        def loading() -> bool:
            with pytest.raises(StoreUnavailable) as caught:
                store.get([run(1)[0]], "a", ACME, 5.0)
            heard.append(str(caught.value))
            return "LOADING" in heard[-1]

        wait_until(loading, "the server's loading")
        assert heard[-1] == f"Redis at 127.0.0.1:{server.port} cannot serve now: LOADING"
        assert eventually(lambda: store.get([run(1)[0]], "a", ACME, 5.0)) == [run(1)[1].join()]
        with server.client() as client:
            assert num_connections(client) == 1


def test_too_many_clients(open_store: Open) -> None:
    with RedisServer({"maxclients": "3"}) as server:
        others = [redis.Redis(port=server.port) for _ in range(3)]
        for other in others:
            other.ping()
        store = open_store(server.port)
        for frames in ([own("a")], [run(1), own("a")], [own("a", geometry=HUGE)]):
            with within(1.0), pytest.raises(StoreUnavailable, match="raise its maxclients"):
                store.put(frames, "a", ACME, 2.0)
        others[0].close()
        eventually(lambda: store.put([own("a")], "a", ACME, 2.0))
        assert num_connections(others[1]) == 2
        for other in others:
            other.close()


def test_a_name_that_does_not_exist(open_store: Open) -> None:
    with pytest.raises(StoreUnavailable, match="redis.invalid:6379 cannot be reached"):
        open_store("redis://redis.invalid").check(5.0)


def test_nothing_listens_on_a_unix_socket(open_store: Open, tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=f"{tmp_path}/redis.sock"):
        open_store(f"unix://{tmp_path}/redis.sock").check(5.0)
