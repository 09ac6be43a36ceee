"""Redis behind a real sentinel: the master dies, a replica takes over, and the store goes on by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import redis
from redis_frames import ACME, eventually, num_connections, own, run, within
from redis_server import RedisReplication, RedisServer, free_port, wait_until

from moorage.prefix_cache.errors import StoreError, StoreRefused, StoreUnavailable
from moorage.prefix_cache.redis_sentinel_link import RECHECK_S
from moorage.prefix_cache.redis_store import RedisConfig, RedisStore


@pytest.fixture
def replication() -> Iterator[RedisReplication]:
    with RedisReplication() as made:
        yield made


def replicate(replication: RedisReplication) -> None:
    """Until the replica has what the master has."""
    with replication.master.client() as client:
        client.set("mark", "1")
        wait_until(lambda: client.execute_command("WAIT", 1, 1000) == 1, "the replica")


def ordered_failover(client: redis.Redis, service: str) -> bool:
    try:
        client.execute_command("SENTINEL", "FAILOVER", service)
    except redis.ResponseError as error:
        assert "NOGOODSLAVE" in str(error)  # it does not know its replica well enough yet
        return False
    return True


def test_the_master_dies_and_the_replica_goes_on(replication: RedisReplication) -> None:
    store = RedisStore(RedisConfig(replication.url))
    store.put([run(1), own("a")], "a", ACME, 5.0)
    replicate(replication)
    replication.master.kill()
    failures: list[StoreError] = []

    def put() -> None:
        started = time.monotonic()
        try:
            store.put([run(2), own("a", 2)], "a", ACME, 1.0)
        except StoreError as error:
            assert time.monotonic() - started < 1.0 + 5.0
            failures.append(error)
            raise

    eventually(put)
    assert failures and all(isinstance(error, StoreUnavailable) for error in failures)
    keys = [run(1)[0], own("a")[0], run(2)[0], own("a", 2)[0]]
    expected = [run(1), own("a"), run(2), own("a", 2)]
    assert store.get(keys, "a", ACME, 5.0) == [frame.join() for _, frame in expected]
    with replication.replica.client() as client:
        assert client.info("replication")["role"] == "master"
        assert num_connections(client) <= 8
    replication.master.start()  # back, and not the master any more
    store.put([run(3)], "a", ACME, 5.0)
    with replication.replica.client() as client, replication.master.client() as old:
        assert (len(client.keys("moorage:{r:*")), old.dbsize()) == (3, 0)
    store.close()


def test_a_master_that_was_restarted_is_found_again_at_once() -> None:
    with RedisReplication(down_after_ms=60_000) as replication:
        store = RedisStore(RedisConfig(replication.url))
        store.put([run(1)], "a", ACME, 5.0)
        replication.master.kill()
        with pytest.raises(
            StoreUnavailable, match=f"127.0.0.1:{replication.master.port} cannot be"
        ):
            store.get([run(1)[0]], "a", ACME, 5.0)
        replication.master.start()
        assert store.get([run(1)[0]], "a", ACME, 5.0) == [None]
        store.put([run(1)], "a", ACME, 5.0)
        assert store.statistics().failures == 1
        store.close()


def test_a_master_that_was_demoted_is_asked_for_anew(replication: RedisReplication) -> None:
    store = RedisStore(RedisConfig(replication.url))
    store.put([run(1)], "a", ACME, 5.0)
    replicate(replication)
    with replication.sentinel.client() as client:
        wait_until(lambda: ordered_failover(client, replication.service), "the order to fail over")
    with replication.replica.client() as client:
        wait_until(lambda: client.info("replication")["role"] == "master", "the failover")
    with replication.replica.client() as client, within(RECHECK_S):

        def arrived() -> (
            bool
        ):  # the old master lives and takes writes until it is asked about again
            eventually(lambda: store.put([run(2)], "a", ACME, 2.0))
            return len(client.keys("moorage:{r:*")) == 2

        wait_until(arrived, "a write on the new master")
    store.close()


def test_the_sentinel_may_be_away_once_the_master_is_known(replication: RedisReplication) -> None:
    store = RedisStore(RedisConfig(replication.url))
    store.put([run(1)], "a", ACME, 5.0)
    replication.sentinel.kill()
    store.put([run(2)], "a", ACME, 5.0)
    assert store.contains([run(1)[0], run(2)[0]], "a", ACME, 5.0) == [True, True]
    fresh = RedisStore(RedisConfig(replication.url))
    where = f"127.0.0.1:{replication.sentinel.port}"
    with within(1.0), pytest.raises(StoreUnavailable, match=f"no sentinel names .*{where}"):
        fresh.check(1.0)
    store.close()
    fresh.close()


def test_the_first_sentinel_that_answers_is_taken(replication: RedisReplication) -> None:
    ports = f"127.0.0.1:{free_port()},127.0.0.1:{replication.sentinel.port}"
    store = RedisStore(RedisConfig(f"redis+sentinel://{ports}/{replication.service}"))
    store.put([run(1)], "a", ACME, 5.0)
    with replication.sentinel.client() as client:
        assert num_connections(client) >= 1
    store.close()


def test_an_unknown_service_is_refused_by_name(replication: RedisReplication) -> None:
    store = RedisStore(RedisConfig(replication.url.replace("/moorage", "/mooring")))
    with pytest.raises(StoreRefused, match="no sentinel knows mooring: check the service's name"):
        store.check(5.0)
    store.close()


def test_a_server_that_says_it_is_a_replica_is_not_believed_to_be_the_master() -> None:
    with RedisServer() as master, RedisServer() as replica, RedisServer() as sentinel:
        with replica.client() as client:
            client.execute_command("REPLICAOF", "127.0.0.1", master.port)
        sentinel.stop()
        sentinel.start_sentinel("kv", replica.port, 60_000)  # told wrongly, as in mid-failover
        store = RedisStore(RedisConfig(f"redis+sentinel://127.0.0.1:{sentinel.port}/kv"))
        with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{replica.port} was named.*a slave"):
            store.put([run(1)], "a", ACME, 2.0)
        with replica.client() as client:
            client.execute_command("REPLICAOF", "NO", "ONE")
        eventually(lambda: store.put([run(1)], "a", ACME, 2.0))
        store.close()


def test_no_secret_of_the_master_goes_to_the_sentinel(replication: RedisReplication) -> None:
    url = replication.url.replace("://", "://:hunter2@")
    store = RedisStore(RedisConfig(url))
    with pytest.raises(StoreUnavailable, match="refused our credentials") as caught:
        store.check(2.0)  # the master wants none; the sentinel was asked without
    assert f"127.0.0.1:{replication.master.port}" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    store.close()
