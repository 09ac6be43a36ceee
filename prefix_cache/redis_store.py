"""The Redis tier: frames that outlive this process and that other replicas can load."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moorage.prefix_cache.block import Bytes, Namespace
from moorage.prefix_cache.errors import (
    FrameTooLarge,
    InvalidInput,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from moorage.prefix_cache.failpoints import Failpoint, hit
from moorage.prefix_cache.frame import MAX_FRAME_BYTES, Frame, FrameKey
from moorage.prefix_cache.redis_keys import frame_redis_key
from moorage.prefix_cache.redis_link import Command, RedisLink, Reply
from moorage.prefix_cache.store import StoreStatistics, validate_session_id


@dataclass(frozen=True)
class RedisConfig:
    """One Redis. `url` may hold credentials: it is never logged or shown in an error."""

    url: str
    """`redis://[user:password@]host[:port][/db]`, `rediss://…` or `unix://path`."""
    ttl_s: float = 7 * 24 * 3600.0
    """Seconds until a frame that nobody parks again expires."""
    socket_timeout_s: float = 2.0
    """Longest silence inside one reply, and longest time to hand one frame to the socket."""
    connect_timeout_s: float = 1.0
    """Seconds for a connection to open."""
    health_check_s: float = 15.0
    """A connection that was idle for longer is pinged before use."""
    max_connections: int = 8
    """Open connections at most; a caller beyond waits within its deadline."""
    max_value_bytes: int = MAX_FRAME_BYTES
    """Largest frame; a larger one is refused with FrameTooLarge."""
    pipeline_bytes: int = 8 << 20
    """Frames are written in pipelines of about this size."""
    max_retries: int = 2
    """Further attempts of a read after a broken connection."""
    retry_base_s: float = 0.02
    """First pause between attempts; doubles each time, with jitter."""

    def validate(self) -> None:
        """Raises InvalidInput naming the field, the value and the limit."""
        for name in ("ttl_s", "socket_timeout_s", "connect_timeout_s", "retry_base_s"):
            if not getattr(self, name) > 0:
                raise InvalidInput(f"{name} is {getattr(self, name)}, allowed is above 0")
        for name in ("max_connections", "max_value_bytes", "pipeline_bytes"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} is {getattr(self, name)}, allowed is 1 or more")
        if self.max_retries < 0:
            raise InvalidInput(f"max_retries is {self.max_retries}, allowed is 0 or more")


class RedisStore:
    """Frames in one Redis, pipelined, each call bounded by its deadline plus one
    `socket_timeout_s`.

    A frame goes out as it lies in staging memory: its parts are handed to the socket one after
    another, no copy is made in this process. A frame comes in as one `bytes` made by hiredis, which
    is the one copy on that way.

    Nothing here is the truth: `maxmemory` eviction, expiry and FLUSHALL are misses. Run frames get
    their lifetime renewed by every park that uses them, private ones by being written anew.
    """

    tier = "redis"

    def __init__(self, config: RedisConfig) -> None:
        """Connects at first use. Raises InvalidInput for a malformed URL or setting."""
        config.validate()
        self.config = config
        self._link = RedisLink(
            config.url,
            socket_timeout_s=config.socket_timeout_s,
            connect_timeout_s=config.connect_timeout_s,
            health_check_s=config.health_check_s,
            max_connections=config.max_connections,
            max_retries=config.max_retries,
            retry_base_s=config.retry_base_s,
        )
        self.address = self._link.address
        """host:port, without credentials."""
        self._ttl_ms = str(max(1, round(config.ttl_s * 1000))).encode()
        self._lock = threading.Lock()
        self._closed = False
        self._frames = self._bytes = self._puts = self._gets = self._hits = 0
        self._bytes_in = self._bytes_out = self._failures = 0

    def check(self, deadline_s: float) -> None:
        """Raises StoreUnavailable or StoreTimeout where Redis does not answer a ping."""
        self._guard(lambda: self._read([(b"PING",)], time.monotonic() + deadline_s))

    def put(
        self,
        frames: Sequence[tuple[FrameKey, Frame]],
        session_id: str,
        namespace: Namespace,
        deadline_s: float,
    ) -> None:
        """See BlockStore. After StoreFull the private frames of this call are removed again, best
        effort.
        """
        self._guard(lambda: self._put(frames, session_id, namespace, time.monotonic() + deadline_s))

    def get(
        self,
        keys: Sequence[FrameKey],
        session_id: str,
        namespace: Namespace,
        deadline_s: float,
    ) -> list[Bytes | None]:
        """See BlockStore. One round trip."""
        names = _names(keys, session_id, namespace)
        commands: list[Command] = [
            (b"HGET", name, key.field.encode()) if key.shared else (b"GET", name)
            for key, name in zip(keys, names, strict=True)
        ]
        replies = self._guard(lambda: self._read(commands, time.monotonic() + deadline_s))
        found: list[Bytes | None] = [r if isinstance(r, bytes) else None for r in replies]
        with self._lock:
            self._gets += len(keys)
            self._hits += sum(1 for data in found if data is not None)
            self._bytes_out += sum(len(data) for data in found if data is not None)
        return found

    def contains(
        self,
        keys: Sequence[FrameKey],
        session_id: str,
        namespace: Namespace,
        deadline_s: float,
    ) -> list[bool]:
        """See BlockStore. One round trip."""
        names = _names(keys, session_id, namespace)
        commands: list[Command] = [
            (b"HEXISTS", name, key.field.encode()) if key.shared else (b"EXISTS", name)
            for key, name in zip(keys, names, strict=True)
        ]
        replies = self._guard(lambda: self._read(commands, time.monotonic() + deadline_s))
        return [reply == 1 for reply in replies]

    def delete(
        self,
        keys: Sequence[FrameKey],
        session_id: str,
        namespace: Namespace,
        deadline_s: float,
    ) -> None:
        """See BlockStore. Run frames are left to their lifetime: other sessions may use them."""
        private = [key for key in keys if not key.shared]
        self._remove(private, session_id, namespace, deadline_s)

    def drop(
        self,
        keys: Sequence[FrameKey],
        session_id: str,
        namespace: Namespace,
        deadline_s: float,
    ) -> None:
        """See BlockStore."""
        self._remove(keys, session_id, namespace, deadline_s)

    def statistics(self) -> StoreStatistics:
        """See BlockStore; `frames` and `bytes` are what this process has written."""
        with self._lock:
            return StoreStatistics(
                frames=self._frames,
                bytes=self._bytes,
                puts=self._puts,
                gets=self._gets,
                hits=self._hits,
                misses=self._gets - self._hits,
                bytes_in=self._bytes_in,
                bytes_out=self._bytes_out,
                failures=self._failures,
            )

    def close(self) -> None:
        """Drop every connection, busy ones too: what waits on them ends with StoreUnavailable."""
        self._closed = True
        self._link.close()

    # -- inside ------------------------------------------------------------------------------------

    def _guard(self, operation: Callable[[], list[Reply]]) -> list[Reply]:
        if self._closed:
            raise StoreUnavailable("the Redis store is closed")
        try:
            return operation()
        except StoreError:
            with self._lock:
                self._failures += 1
            raise

    def _read(self, commands: Sequence[Command], deadline: float) -> list[Reply]:
        return self._link.execute(commands, deadline, idempotent=True)

    def _put(
        self,
        frames: Sequence[tuple[FrameKey, Frame]],
        session_id: str,
        namespace: Namespace,
        deadline: float,
    ) -> list[Reply]:
        for key, frame in frames:
            if frame.size_bytes > self.config.max_value_bytes:
                raise FrameTooLarge(
                    f"a {key.kind} frame has {frame.size_bytes} bytes, {self.address} takes up"
                    f" to {self.config.max_value_bytes}: lower run_blocks"
                )
        names = _names([key for key, _ in frames], session_id, namespace)
        missing = self._missing(frames, names, deadline)
        try:
            batch: list[tuple[FrameKey, str, Frame]] = []
            num_bytes = 0
            for key, name, frame in missing:
                if batch and num_bytes + frame.size_bytes > self.config.pipeline_bytes:
                    self._write(batch, deadline)
                    batch, num_bytes = [], 0
                batch.append((key, name, frame))
                num_bytes += frame.size_bytes
            if batch:
                self._write(batch, deadline)
        except StoreFull:
            self._clean_up([name for key, name, _ in missing if not key.shared], deadline)
            raise
        return []

    def _missing(
        self, frames: Sequence[tuple[FrameKey, Frame]], names: Sequence[str], deadline: float
    ) -> list[tuple[FrameKey, str, Frame]]:
        """Frames to send: all private ones, and the runs that are not there. The others' lifetime
        is renewed.
        """
        runs = [index for index, (key, _) in enumerate(frames) if key.shared]
        commands: list[Command] = []
        for index in runs:
            commands.append((b"HEXISTS", names[index], frames[index][0].field.encode()))
            commands.append((b"PEXPIRE", names[index], self._ttl_ms))
        replies = self._read(commands, deadline) if commands else []
        present = {
            index for n, index in enumerate(runs) if replies[2 * n] == 1 and replies[2 * n + 1] == 1
        }
        return [
            (key, names[index], frame)
            for index, (key, frame) in enumerate(frames)
            if index not in present
        ]

    def _write(self, batch: Sequence[tuple[FrameKey, str, Frame]], deadline: float) -> None:
        commands: list[Command] = []
        for key, name, frame in batch:
            if key.shared:
                commands.append((b"HSET", name, key.field.encode(), frame))
                commands.append((b"PEXPIRE", name, self._ttl_ms))
            else:
                commands.append((b"SET", name, frame, b"PX", self._ttl_ms))
        hit(Failpoint.REDIS_BEFORE_WRITE)
        self._link.execute(commands, deadline, idempotent=False)
        hit(Failpoint.REDIS_AFTER_WRITE)
        with self._lock:
            self._puts += len(batch)
            self._frames += len(batch)
            for _, _, frame in batch:
                self._bytes += frame.size_bytes
                self._bytes_in += frame.size_bytes

    def _clean_up(self, names: Sequence[str], deadline: float) -> None:
        commands: list[Command] = [(b"UNLINK", name) for name in names]
        if not commands:
            return
        try:
            self._link.execute(commands, deadline, idempotent=True)
        except StoreError:
            return  # the first error is the one to report; these expire

    def _remove(
        self, keys: Sequence[FrameKey], session_id: str, namespace: Namespace, deadline_s: float
    ) -> None:
        names = _names(keys, session_id, namespace)
        commands: list[Command] = [
            (b"HDEL", name, key.field.encode()) if key.shared else (b"UNLINK", name)
            for key, name in zip(keys, names, strict=True)
        ]
        if not commands:
            return
        hit(Failpoint.REDIS_BEFORE_DELETE)
        self._guard(
            lambda: self._link.execute(commands, time.monotonic() + deadline_s, idempotent=True)
        )
        hit(Failpoint.REDIS_AFTER_DELETE)


def _names(keys: Sequence[FrameKey], session_id: str, namespace: Namespace) -> list[str]:
    validate_session_id(session_id)
    return [frame_redis_key(key, session_id, namespace) for key in keys]
