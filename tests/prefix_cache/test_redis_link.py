"""The wire under the Redis tier: replies out of step, replies that are none, connections that break, and the pool."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from redis_frames import ACME, BIG, SLACK_S, num_connections, own, run
from redis_server import Proxy, RedisServer, wait_until

from moorage.prefix_cache.errors import StoreRefused, StoreTimeout, StoreUnavailable
from moorage.prefix_cache.redis_store import RedisConfig, RedisStore


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


@contextmanager
def scripted(*answers: bytes) -> Iterator[int]:
    """The port of a server that gives each connection the next answer to its first request, whatever
    it is; after an empty one it hangs up.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(4)

        def serve() -> None:
            for answer in answers:
                peer, _ = listener.accept()
                peers.append(peer)
                peer.recv(1 << 16)
                if answer:
                    peer.sendall(answer)
                else:
                    peer.close()

        peers: list[socket.socket] = []
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(10.0)
        for peer in peers:
            peer.close()


def test_what_is_not_redis_is_refused(open_store: Open) -> None:
    with (
        scripted(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port,
        pytest.raises(StoreRefused, match="is this Redis"),
    ):
        open_store(port).get([run(1)[0]], "a", ACME, 5.0)


@pytest.mark.parametrize(
    "answer",
    [
        b"$3\r\nabcd\r\n",
        b"$-2\r\n",
        b"$x\r\n",
        b":1.5\r\n",
        b"*9999999\r\n",
        b"*1\r\n" * 9,
        b"?\r\n",
    ],
)
def test_replies_that_break_the_protocol_are_refused(open_store: Open, answer: bytes) -> None:
    with scripted(answer) as port, pytest.raises(StoreRefused, match=f"127.0.0.1:{port} sent"):
        open_store(port).get([run(1)[0]], "a", ACME, 5.0)


def test_a_line_without_an_end_is_not_collected_for_ever(open_store: Open) -> None:
    with (
        scripted(b"+" + b"x" * 100_000) as port,
        pytest.raises(StoreRefused, match="a line of more than 65536 bytes"),
    ):
        open_store(port).get([run(1)[0]], "a", ACME, 5.0)


def test_g1_a_reply_too_many_is_never_the_answer_to_the_next_question(open_store: Open) -> None:
    with scripted(b"$3\r\none\r\n$5\r\nstale\r\n", b"$3\r\ntwo\r\n") as port:
        store = open_store(port)
        assert store.get([run(1)[0]], "a", ACME, 5.0) == [b"one"]
        assert store.get([run(2)[0]], "a", ACME, 5.0) == [b"two"]


def test_g13_a_request_whose_connection_broke_is_repeated_and_no_more_than_told(
    open_store: Open,
) -> None:
    with scripted(b"", b"", b"$3\r\nyes\r\n") as port:
        store = open_store(port, max_retries=2)
        assert store.get([run(1)[0]], "a", ACME, 5.0) == [b"yes"]
        assert store.statistics().failures == 0
    with (
        scripted(b"", b"") as port,
        pytest.raises(
            StoreUnavailable, match=f"127.0.0.1:{port} cannot be reached: the server hung up"
        ),
    ):
        open_store(port, max_retries=1).get([run(1)[0]], "a", ACME, 5.0)


def test_what_redis_quotes_of_a_command_is_not_shown(open_store: Open) -> None:
    quoted = (
        b"-ERR unknown command 'GET', with args beginning with: 'moorage:{s:x:secret}:frame'\r\n"
    )
    with scripted(quoted) as port, pytest.raises(StoreRefused, match="unknown command") as caught:
        open_store(port).get([own("secret")[0]], "secret", ACME, 5.0)
    assert "secret" not in str(caught.value)


def test_a_server_that_trickles_is_held_to_the_deadline(open_store: Open) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(4)
        stop = threading.Event()

        def trickle() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(1 << 16)
                peer.sendall(b"$100000\r\n")
                while not stop.wait(0.02):  # never silent for as long as socket_timeout_s
                    peer.sendall(b"x")

        thread = threading.Thread(target=trickle, daemon=True)
        thread.start()
        store = open_store(listener.getsockname()[1], socket_timeout_s=0.2)
        started = time.monotonic()
        with pytest.raises(StoreTimeout):
            store.get([run(1)[0]], "a", ACME, 0.6)
        assert 0.5 < time.monotonic() - started < 0.6 + SLACK_S
        stop.set()
        thread.join(10.0)


def test_more_callers_than_connections_wait_and_end_by_their_deadline(
    proxy: Proxy, open_store: Open
) -> None:
    store = open_store(proxy.port, max_connections=1, socket_timeout_s=30.0)
    store.check(5.0)
    proxy.pass_down = 0

    def hold() -> None:
        with pytest.raises(StoreTimeout):
            store.check(1.0)

    first = threading.Thread(target=hold)
    first.start()
    wait_until(lambda: len(store._link._busy) == 1, "the first caller")  # type: ignore[attr-defined]
    started = time.monotonic()
    with pytest.raises(StoreTimeout, match="all 1 connections stayed busy"):
        store.check(0.3)
    assert 0.25 < time.monotonic() - started < 0.3 + SLACK_S
    first.join(10.0)


def test_closing_wakes_whoever_waits(proxy: Proxy, open_store: Open) -> None:
    store = open_store(proxy.port, socket_timeout_s=30.0)
    proxy.pass_down = 0
    failures: list[Exception] = []

    def wait() -> None:
        try:
            store.check(30.0)
        except StoreUnavailable as error:
            failures.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: len(store._link._busy) == 1, "the caller")  # type: ignore[attr-defined]
    store.close()
    thread.join(10.0)
    assert len(failures) == 1


def test_f8_eight_callers_on_a_way_that_breaks_at_random_leak_nothing(
    proxy: Proxy, open_store: Open, redis_server: RedisServer
) -> None:
    store = open_store(proxy.port, max_connections=3, max_retries=0, socket_timeout_s=0.05)
    frames = {name: run(name, geometry=BIG) for name in range(1, 9)}
    direct = open_store(redis_server.port)
    direct.put(list(frames.values()), "a", ACME, 10.0)
    wrong: list[object] = []
    num_failed = [0] * 8

    def use(caller: int) -> None:
        draw = random.Random(caller)
        for _ in range(25):
            name = draw.randrange(1, 9)
            proxy.pass_down = draw.choice((None, None, 0, 1000, 400_000))
            proxy.cut_up = draw.choice((None, None, 3, 100, 300_000))
            try:
                found = store.get([frames[name][0]], "a", ACME, draw.uniform(0.005, 0.2))
                if found != [frames[name][1].join()]:
                    wrong.append(found)
                store.put([own(f"s{caller}", 1, geometry=BIG)], f"s{caller}", ACME, 0.1)
            except (StoreTimeout, StoreUnavailable):
                num_failed[caller] += 1

    threads = [threading.Thread(target=use, args=(caller,)) for caller in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    proxy.pass_down = proxy.cut_up = None
    assert wrong == [] and sum(num_failed) > 8
    link: Any = store._link
    assert link._busy == set() and link._free._value == 3 and len(link._idle) <= 3
    keys = [key for key, _ in frames.values()]
    found = store.get(keys, "a", ACME, 10.0)
    assert found == [frame.join() for _, frame in frames.values()]
    with redis_server.client() as client:
        wait_until(lambda: num_connections(client) <= 3 + 1, "the broken connections' end")
