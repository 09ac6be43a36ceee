"""Frames in a real cluster of three masters: placement, moved slots, half-moved slots, and a node that goes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from redis_frames import ACME, BIG, eventually, num_connections, own, run, within
from redis_server import RedisCluster, RedisServer

from moorage.prefix_cache.block import pack_tokens
from moorage.prefix_cache.errors import StoreRefused, StoreUnavailable
from moorage.prefix_cache.redis_keys import frame_redis_key, slot_of
from moorage.prefix_cache.redis_store import RedisConfig, RedisStore


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with RedisCluster() as made:
        yield made


@pytest.fixture
def nodes(cluster: RedisCluster) -> Iterator[list[Any]]:
    made = [node.client() for node in cluster.nodes]
    for one in made:
        one.flushall()
    yield made
    for one in made:
        one.close()


@pytest.fixture
def store(cluster: RedisCluster, nodes: list[Any]) -> Iterator[RedisStore]:
    made = RedisStore(RedisConfig(cluster.url))
    yield made
    made.close()


def owner_of(slot: int) -> int:
    return next(i for i in range(3) if slot < 16384 * (i + 1) // 3)


class Slot:
    """A slot on its way from one node to another, and back at the end."""

    def __init__(self, cluster: RedisCluster, nodes: list[Any], slot: int) -> None:
        self.slot = slot
        self.source = owner_of(slot)
        self.target = (self.source + 1) % 3
        self._cluster = cluster
        self._nodes = nodes

    def _set(self, node: int, *words: str) -> None:
        self._nodes[node].execute_command("CLUSTER", "SETSLOT", self.slot, *words)

    def open(self) -> None:
        self._set(self.target, "IMPORTING", self._cluster.node_id(self.source))
        self._set(self.source, "MIGRATING", self._cluster.node_id(self.target))

    def move_keys(self) -> int:
        keys = self._nodes[self.source].execute_command("CLUSTER", "GETKEYSINSLOT", self.slot, 100)
        port = self._cluster.nodes[self.target].port
        for key in keys:
            self._nodes[self.source].execute_command("MIGRATE", "127.0.0.1", port, key, 0, 5000)
        return len(keys)

    def finish(self) -> None:
        for node in (self.target, self.source, 3 - self.source - self.target):
            self._set(node, "NODE", self._cluster.node_id(self.target))

    def undo(self) -> None:
        for node in range(3):
            self._nodes[node].flushall()
        for node in (self.source, self.target, 3 - self.source - self.target):
            self._set(node, "NODE", self._cluster.node_id(self.source))


@pytest.fixture
def slot_of_run(cluster: RedisCluster, nodes: list[Any]) -> Iterator[Callable[[int], Slot]]:
    made: list[Slot] = []

    def make(name: int) -> Slot:
        made.append(Slot(cluster, nodes, slot_of(frame_redis_key(run(name)[0], "a", ACME))))
        return made[-1]

    yield make
    for one in made:
        one.undo()


def test_frames_lie_on_all_nodes_and_come_back_in_order(
    store: RedisStore, nodes: list[Any]
) -> None:
    frames = [run(name, geometry=BIG) for name in range(1, 25)] + [own("a", 1), own("a", 2)]
    keys = [key for key, _ in frames]
    store.put(frames, "a", ACME, 20.0)
    assert store.get(keys, "a", ACME, 10.0) == [frame.join() for _, frame in frames]
    assert store.contains([*keys, run(99)[0]], "a", ACME, 5.0) == [True] * 26 + [False]
    sizes = [node.dbsize() for node in nodes]
    assert sum(sizes) == 26 and min(sizes) > 0
    for node in nodes:
        assert all(node.ttl(key) > 0 for key in node.keys("*"))
    store.delete(keys, "a", ACME, 5.0)
    assert sum(node.dbsize() for node in nodes) == 24
    store.drop(keys, "a", ACME, 5.0)
    assert sum(node.dbsize() for node in nodes) == 0
    assert all(num_connections(node) <= 4 for node in nodes)  # the other nodes' links counted too


def test_g8_the_cluster_agrees_on_the_slots(store: RedisStore, nodes: list[Any]) -> None:
    for pair, session_id in ((run(1), "a"), (own("a", 7), "a"), (own("b-2", 0), "b-2")):
        name = frame_redis_key(pair[0], session_id, ACME)
        assert nodes[0].execute_command("CLUSTER", "KEYSLOT", name) == slot_of(name)


def test_a_context_is_parked_and_loaded(
    cluster: RedisCluster, nodes: list[Any], tiers: Callable[..., Any], kit: Any
) -> None:
    one = tiers(RedisStore(RedisConfig(cluster.url)))
    log = pack_tokens(range(100, 190))  # eleven runs and a tail
    manifest = one.park("s1", 1, log, "redis").manifest
    done, kv = one.load(manifest, log)
    assert (done.miss, kv) == (None, kit.used(kit.kv(log, 90), 90))


def test_a_slot_that_moved_is_followed_and_learnt(
    store: RedisStore, nodes: list[Any], slot_of_run: Callable[[int], Slot]
) -> None:
    store.put([run(1), run(2)], "a", ACME, 5.0)
    slot = slot_of_run(1)
    slot.open()
    assert slot.move_keys() == 1
    slot.finish()
    source, target = nodes[slot.source], nodes[slot.target]
    source.config_resetstat()
    expected = [run(1)[1].join(), run(2)[1].join()]
    assert store.get([run(1)[0], run(2)[0]], "a", ACME, 5.0) == expected  # MOVED
    store.put([run(1), own("a")], "a", ACME, 5.0)
    store.drop([run(1)[0]], "a", ACME, 5.0)
    store.put([run(1, 9)], "a", ACME, 5.0)
    assert store.get([run(1)[0]], "a", ACME, 5.0) == [run(1, 9)[1].join()]
    assert target.execute_command("CLUSTER", "COUNTKEYSINSLOT", slot.slot) == 1
    assert source.execute_command("CLUSTER", "COUNTKEYSINSLOT", slot.slot) == 0
    assert source.info("errorstats")["errorstat_MOVED"]["count"] == 1  # once, then known
    assert store.statistics().failures == 0


def test_a_slot_on_its_way_is_asked_for_on_both_sides(
    store: RedisStore, nodes: list[Any], slot_of_run: Callable[[int], Slot]
) -> None:
    slot = slot_of_run(3)
    source, target = nodes[slot.source], nodes[slot.target]
    slot.open()
    store.put(
        [run(3), run(2)], "a", ACME, 5.0
    )  # not at the source: ASK, for the lease and the write
    assert target.execute_command("CLUSTER", "COUNTKEYSINSLOT", slot.slot) == 1
    assert source.execute_command("CLUSTER", "COUNTKEYSINSLOT", slot.slot) == 0
    name = frame_redis_key(run(3)[0], "a", ACME)
    target.execute_command("ASKING")
    assert target.execute_command("TTL", name) > 0
    assert store.get([run(2)[0], run(3)[0]], "a", ACME, 5.0) == [run(2)[1].join(), run(3)[1].join()]
    assert store.contains([run(3)[0]], "a", ACME, 5.0) == [True]
    for node in nodes:
        node.config_resetstat()
    store.get([run(3)[0]], "a", ACME, 5.0)
    store.get([run(3)[0]], "a", ACME, 5.0)
    assert source.info("errorstats")["errorstat_ASK"]["count"] == 2  # asked each time: not learnt,
    for node in nodes:
        assert "cmdstat_cluster" not in node.info("commandstats")  # and no reason to read the table
    slot.finish()
    assert store.get([run(3)[0]], "a", ACME, 5.0) == [run(3)[1].join()]


def test_keys_that_have_not_moved_yet_are_read_and_written_at_the_source(
    store: RedisStore, nodes: list[Any], slot_of_run: Callable[[int], Slot]
) -> None:
    store.put([run(4)], "a", ACME, 5.0)
    slot = slot_of_run(4)
    slot.open()
    assert store.get([run(4)[0]], "a", ACME, 5.0) == [run(4)[1].join()]
    store.put([run(4), own("a")], "a", ACME, 5.0)
    assert nodes[slot.source].execute_command("CLUSTER", "COUNTKEYSINSLOT", slot.slot) == 1


def test_slots_move_while_sessions_park(
    cluster: RedisCluster, nodes: list[Any], slot_of_run: Callable[[int], Slot]
) -> None:
    store = RedisStore(RedisConfig(cluster.url))
    names = range(1, 9)
    store.put([run(name) for name in names], "a", ACME, 5.0)
    stop = threading.Event()
    wrong: list[object] = []
    rounds = [0]

    def use() -> None:
        expected = [run(name)[1].join() for name in names]
        while not stop.is_set():
            try:
                found = store.get([run(name)[0] for name in names], "a", ACME, 5.0)
                store.put([run(name) for name in names], "a", ACME, 5.0)
                if found != expected:
                    wrong.append(found)
            except Exception as error:
                wrong.append(error)
            rounds[0] += 1

    thread = threading.Thread(target=use)
    thread.start()
    for name in names:
        slot = slot_of_run(name)
        slot.open()
        slot.move_keys()
        slot.finish()
    stop.set()
    thread.join(20.0)
    assert rounds[0] > 0 and wrong == []
    store.close()


def test_a_node_that_goes_costs_its_own_frames_only_until_it_is_back() -> None:
    with RedisCluster() as cluster:
        store = RedisStore(RedisConfig(cluster.url))
        by_node: dict[int, int] = {}
        for name in range(1, 40):
            by_node.setdefault(owner_of(slot_of(frame_redis_key(run(name)[0], "a", ACME))), name)
        store.put([run(name) for name in by_node.values()], "a", ACME, 5.0)
        gone = cluster.nodes[0]  # the one that the URL names, too
        gone.kill()
        with within(2.0), pytest.raises(StoreUnavailable, match=f"127.0.0.1:{gone.port}"):
            store.get([run(by_node[0])[0]], "a", ACME, 2.0)
        for node in (1, 2):
            name = by_node[node]
            assert store.get([run(name)[0]], "a", ACME, 5.0) == [run(name)[1].join()]
            store.put([run(name)], "a", ACME, 5.0)
        gone.start()
        assert eventually(lambda: store.get([run(by_node[0])[0]], "a", ACME, 2.0)) == [None]
        eventually(lambda: store.put([run(by_node[0])], "a", ACME, 2.0))
        store.close()


def test_an_owner_that_is_gone_is_looked_for_at_the_others() -> None:
    with RedisCluster() as cluster:
        clients = [node.client() for node in cluster.nodes]
        store = RedisStore(RedisConfig(cluster.url))
        store.put([run(1)], "a", ACME, 5.0)
        slot = Slot(cluster, clients, slot_of(frame_redis_key(run(1)[0], "a", ACME)))
        slot.open()
        assert slot.move_keys() == 1
        slot.finish()
        cluster.nodes[slot.source].kill()  # before the store has heard of it
        assert store.get([run(1)[0]], "a", ACME, 5.0) == [run(1)[1].join()]
        assert store.statistics().failures == 0
        store.close()
        for one in clients:
            one.close()


def test_a_plain_url_on_a_node_says_what_to_write(cluster: RedisCluster, nodes: list[Any]) -> None:
    for node in cluster.nodes:
        store = RedisStore(RedisConfig(node.url))
        names = [run(name)[0] for name in range(1, 20)]
        with pytest.raises(StoreRefused, match=r"node of a cluster: write redis\+cluster://"):
            store.get(names, "a", ACME, 5.0)
        store.close()


def test_a_cluster_url_on_a_plain_server_says_so(redis_server: RedisServer) -> None:
    store = RedisStore(RedisConfig(f"redis+cluster://127.0.0.1:{redis_server.port}"))
    with pytest.raises(StoreRefused, match="is no cluster: write redis://"):
        store.check(5.0)
    store.close()


def test_no_node_answers() -> None:
    store = RedisStore(RedisConfig("redis+cluster://user:hunter2@127.0.0.1:1,127.0.0.1:2"))
    with (
        within(1.0),
        pytest.raises(StoreUnavailable, match=r"127.0.0.1:1 .*127.0.0.1:2 ") as caught,
    ):
        store.check(1.0)
    assert "hunter2" not in str(caught.value)
    store.close()


def test_a_closed_store_holds_no_connection(cluster: RedisCluster, nodes: list[Any]) -> None:
    before = [num_connections(node) for node in nodes]
    store = RedisStore(RedisConfig(cluster.url))
    store.put([run(name) for name in range(1, 20)], "a", ACME, 5.0)
    assert sum(num_connections(node) for node in nodes) == sum(before) + 3
    store.close()
    store = RedisStore(RedisConfig(cluster.url))  # a round trip after the close
    store.check(5.0)
    store.close()
    assert sum(num_connections(node) for node in nodes) <= sum(before) + 2
