"""The Redis tier: frames that outlive this process and that other replicas can load."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from moorage.prefix_cache.block import Bytes, Namespace
from moorage.prefix_cache.errors import (
    FrameTooLarge,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from moorage.prefix_cache.failpoints import Failpoint, hit
from moorage.prefix_cache.frame import Frame, FrameKey
from moorage.prefix_cache.redis_cluster_link import ClusterLink
from moorage.prefix_cache.redis_config import RedisConfig, Topology
from moorage.prefix_cache.redis_connection import Reply
from moorage.prefix_cache.redis_keys import frame_redis_key
from moorage.prefix_cache.redis_link import Command, Link, Operation, RedisLink
from moorage.prefix_cache.redis_sentinel_link import SentinelLink
from moorage.prefix_cache.store import StoreStatistics, UnreadFrame, validate_session_id

__all__ = ["LEASE_SCRIPT", "RedisConfig", "RedisStore"]

LEASE_SCRIPT = b"""\
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return 1"""
"""Whether a run frame is there, and a lifetime of at least so many milliseconds if it is.

EXPIRE … GT would not do: Redis 6 has none, and it leaves a key without a lifetime as it is. A script is
one step: a replica whose settings have a shorter lifetime cannot cut down what another has promised.
"""


class RedisStore:
    """Frames in Redis: one server, the master behind Sentinel, or a cluster. Pipelined, each call
    bounded by its deadline.

    A frame goes out as it lies in the device pool or in staging: its parts are handed to the socket
    where they are, no copy is made in this process. It comes in as one read-only buffer into which
    the kernel has written it: no copy is made in this process either.

    Nothing here is the truth: `maxmemory` eviction, expiry and FLUSHALL are misses. A context's
    frames expire together: every park writes its private ones with a lifetime of `ttl_s` and gives
    the runs that it names, sent or found, at least `ttl_s` and the time that the park itself may
    take, so that no run goes before the youngest context that names it. No lifetime is ever made
    shorter.
    """

    tier = "redis"

    def __init__(self, config: RedisConfig) -> None:
        """Connects at first use. Raises InvalidInput for a malformed URL or setting, or a TLS file
        that cannot be read.
        """
        target = config.target()
        self.config = config
        self._link: Link
        if target.topology is Topology.SENTINEL:
            self._link = SentinelLink(target)
        elif target.topology is Topology.CLUSTER:
            self._link = ClusterLink(target)
        else:
            self._link = RedisLink(target.endpoints[0], target.node)
        self.address = self._link.address
        """Without credentials."""
        self._lock = threading.Lock()
        self._closed = False
        self._frames = self._bytes = self._puts = self._gets = self._hits = 0
        self._bytes_in = self._bytes_out = self._failures = 0

    def check(self, deadline_s: float) -> None:
        """Raises StoreUnavailable or StoreTimeout where Redis does not answer a ping; of a cluster one
        node.
        """
        self._guard(lambda: self._link.execute([_PING], time.monotonic() + deadline_s))

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
        """See BlockStore. One round trip; in a cluster one to each node."""
        names = _names(keys, session_id, namespace)
        operations = [
            _on(name, (b"HGET", name, key.field.encode()) if key.shared else (b"GET", name))
            for key, name in zip(keys, names, strict=True)
        ]
        replies = self._execute(operations, deadline_s)
        found: list[Bytes | None] = [
            reply if isinstance(reply, bytes | memoryview) else None for reply in replies
        ]
        with self._lock:
            self._gets += len(keys)
            self._hits += sum(1 for data in found if data is not None)
            self._bytes_out += sum(len(data) for data in found if data is not None)
        return found

    def open(
        self,
        keys: Sequence[FrameKey],
        session_id: str,
        namespace: Namespace,
        deadline_s: float,
    ) -> list[Bytes | UnreadFrame | None]:
        """See BlockStore."""
        return [*self.get(keys, session_id, namespace, deadline_s)]

    def contains(
        self,
        keys: Sequence[FrameKey],
        session_id: str,
        namespace: Namespace,
        deadline_s: float,
    ) -> list[bool]:
        """See BlockStore. One round trip; in a cluster one to each node."""
        names = _names(keys, session_id, namespace)
        operations = [
            _on(name, (b"HEXISTS", name, key.field.encode()) if key.shared else (b"EXISTS", name))
            for key, name in zip(keys, names, strict=True)
        ]
        return [reply == 1 for reply in self._execute(operations, deadline_s)]

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

    def _execute(self, operations: Sequence[Operation], deadline_s: float) -> list[Reply]:
        if not operations:
            return []
        return self._guard(lambda: self._link.execute(operations, time.monotonic() + deadline_s))

    def _guard(self, operation: Callable[[], list[Reply]]) -> list[Reply]:
        if self._closed:
            raise StoreUnavailable("the Redis store is closed")
        try:
            return operation()
        except StoreError:
            with self._lock:
                self._failures += 1
            raise

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
        # What is leased first must outlive what is written last.
        lease_s = self.config.ttl_s + max(0.0, deadline - time.monotonic())
        missing = self._missing(frames, names, lease_s, deadline)
        try:
            batch: list[tuple[FrameKey, str, Frame]] = []
            num_bytes = 0
            for key, name, frame in missing:
                if batch and num_bytes + frame.size_bytes > self.config.pipeline_bytes:
                    self._write(batch, lease_s, deadline)
                    batch, num_bytes = [], 0
                batch.append((key, name, frame))
                num_bytes += frame.size_bytes
            if batch:
                self._write(batch, lease_s, deadline)
        except StoreFull:
            self._clean_up([name for key, name, _ in missing if not key.shared], deadline)
            raise
        return []

    def _missing(
        self,
        frames: Sequence[tuple[FrameKey, Frame]],
        names: Sequence[str],
        lease_s: float,
        deadline: float,
    ) -> list[tuple[FrameKey, str, Frame]]:
        """Frames to send: all private ones, and the runs that are not there. The others' lifetime
        is renewed.
        """
        runs = [index for index, (key, _) in enumerate(frames) if key.shared]
        leases = [_on(names[i], _lease(names[i], frames[i][0], lease_s)) for i in runs]
        replies = self._link.execute(leases, deadline) if leases else []
        present = {index for index, reply in zip(runs, replies, strict=True) if reply == 1}
        return [
            (key, names[index], frame)
            for index, (key, frame) in enumerate(frames)
            if index not in present
        ]

    def _write(
        self, batch: Sequence[tuple[FrameKey, str, Frame]], lease_s: float, deadline: float
    ) -> None:
        operations: list[Operation] = []
        for key, name, frame in batch:
            if key.shared:  # in one step: cut off in between, the run would stay for ever
                write = (b"HSET", name, key.field.encode(), frame)
                operations.append(_on(name, write, _lease(name, key, lease_s)))
            else:
                operations.append(_on(name, (b"SET", name, frame, b"PX", _ms(self.config.ttl_s))))
        hit(Failpoint.REDIS_BEFORE_WRITE)
        self._link.execute(operations, deadline)
        hit(Failpoint.REDIS_AFTER_WRITE)
        with self._lock:
            self._puts += len(batch)
            self._frames += len(batch)
            for _, _, frame in batch:
                self._bytes += frame.size_bytes
                self._bytes_in += frame.size_bytes

    def _clean_up(self, names: Sequence[str], deadline: float) -> None:
        operations = [_on(name, (b"UNLINK", name)) for name in names]
        if not operations:
            return
        try:
            self._link.execute(operations, deadline)
        except StoreError:
            return  # the first error is the one to report; these expire

    def _remove(
        self, keys: Sequence[FrameKey], session_id: str, namespace: Namespace, deadline_s: float
    ) -> None:
        names = _names(keys, session_id, namespace)
        operations = [
            _on(name, (b"HDEL", name, key.field.encode()) if key.shared else (b"UNLINK", name))
            for key, name in zip(keys, names, strict=True)
        ]
        if not operations:
            return
        hit(Failpoint.REDIS_BEFORE_DELETE)
        self._execute(operations, deadline_s)
        hit(Failpoint.REDIS_AFTER_DELETE)


def _names(keys: Sequence[FrameKey], session_id: str, namespace: Namespace) -> list[str]:
    validate_session_id(session_id)
    return [frame_redis_key(key, session_id, namespace) for key in keys]


def _on(name: str, *commands: Command) -> Operation:
    return Operation(name, commands)


def _lease(name: str, key: FrameKey, lease_s: float) -> Command:
    return (b"EVAL", LEASE_SCRIPT, b"1", name, key.field.encode(), _ms(lease_s))


def _ms(seconds: float) -> bytes:
    return b"%d" % max(1, round(seconds * 1000))


_PING = _on("", (b"PING",))
