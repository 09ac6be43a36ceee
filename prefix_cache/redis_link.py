"""Pipelines to one Redis with a deadline each; every foreign error becomes one of ours here and
nowhere else.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from redis.backoff import NoBackoff
from redis.connection import BlockingConnectionPool
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,
    RedisError,
    ResponseError,
    TimeoutError,
)
from redis.retry import Retry

from moorage.prefix_cache.errors import (
    InvalidInput,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreTimeout,
    StoreUnavailable,
)
from moorage.prefix_cache.frame import Frame

if TYPE_CHECKING:
    from redis.connection import Connection

Argument: TypeAlias = bytes | str | Frame
Command: TypeAlias = tuple[Argument, ...]
Reply: TypeAlias = bytes | int | list[Any] | None

_CRLF = b"\r\n"


class RedisLink:
    """A bounded pool of connections and one operation. Thread-safe.

    redis-py's own pipeline has no deadline over its replies and joins each command into one buffer;
    its connections are used directly instead. A connection on which anything went wrong is dropped,
    so that a late reply can never be taken for the answer to another question.
    """

    def __init__(
        self,
        url: str,
        *,
        socket_timeout_s: float,
        connect_timeout_s: float,
        health_check_s: float,
        max_connections: int,
        max_retries: int,
        retry_base_s: float,
    ) -> None:
        self._max_retries = max_retries
        self._retry_base_s = retry_base_s
        try:
            self._pool = BlockingConnectionPool.from_url(
                url,
                max_connections=max_connections,
                timeout=connect_timeout_s,
                socket_timeout=socket_timeout_s,
                socket_connect_timeout=connect_timeout_s,
                health_check_interval=health_check_s,
                retry=Retry(NoBackoff(), 0),  # retries are ours: they must know the deadline
                protocol=2,
                socket_read_size=1 << 18,  # 32 KiB reads make a 4 MiB reply twice as slow
            )
        except (ValueError, TypeError):
            raise InvalidInput(
                "the Redis URL is malformed (not shown: it may hold a password); expected"
                " redis://[user:password@]host[:port][/db]"
            ) from None
        where = self._pool.connection_kwargs
        self.address = str(
            where.get("path") or f"{where.get('host', 'localhost')}:{where.get('port', 6379)}"
        )

    def execute(
        self, commands: Sequence[Command], deadline: float, *, idempotent: bool
    ) -> list[Reply]:
        """Send all, read all. Ends at `deadline` (time.monotonic()) plus one socket timeout at the
        latest.

        Raises StoreTimeout, StoreUnavailable, StoreFull or StoreRefused; where one command of
        several failed the others have taken effect. A broken connection is retried where that is
        harmless.
        """
        attempt = 0
        while True:
            try:
                return self._attempt(commands, deadline)
            except StoreUnavailable:
                pause = self._retry_base_s * 2**attempt * random.uniform(0.5, 1.5)
                attempt += 1
                if (
                    not idempotent
                    or attempt > self._max_retries
                    or time.monotonic() + pause >= deadline
                ):
                    raise
            time.sleep(pause)

    def close(self) -> None:
        """Drop all connections, busy ones too."""
        self._pool.disconnect(inuse_connections=True)

    def _attempt(self, commands: Sequence[Command], deadline: float) -> list[Reply]:
        self._check_time(deadline)
        try:
            connection = self._connection()
        except RedisError as error:
            raise self._mapped(error) from error
        try:
            return self._talk(connection, commands, deadline)
        except StoreError:
            raise  # every reply was read: the connection is in step
        except RedisError as error:
            connection.disconnect()  # type: ignore[no-untyped-call]
            raise self._mapped(error) from error
        except BaseException:
            connection.disconnect()  # type: ignore[no-untyped-call]
            raise
        finally:
            self._pool.release(connection)  # type: ignore[no-untyped-call]

    def _connection(self) -> Connection:
        found: Any = self._pool.get_connection()  # type: ignore[no-untyped-call]
        return cast("Connection", found)

    def _talk(
        self, connection: Connection, commands: Sequence[Command], deadline: float
    ) -> list[Reply]:
        chunks: list[bytes | memoryview] = []
        for command in commands:
            chunks.extend(pack_command(command))
        connection.send_packed_command(_merged(chunks))  # type: ignore[no-untyped-call]
        replies: list[Reply] = []
        refused: ResponseError | None = None
        for _ in commands:
            if not connection.can_read(timeout=max(0.0, deadline - time.monotonic())):
                raise TimeoutError("the operation's deadline passed")
            try:
                replies.append(connection.read_response())
            except ResponseError as error:
                refused = refused or error
                replies.append(None)
        if refused is not None:
            raise self._mapped(refused)
        return replies

    def _check_time(self, deadline: float) -> None:
        if time.monotonic() >= deadline:
            raise StoreTimeout(
                f"Redis at {self.address}: the operation's deadline passed before it was sent"
            )

    def _mapped(self, error: RedisError) -> StoreError:
        where = f"Redis at {self.address}"
        if isinstance(error, TimeoutError):
            return StoreTimeout(f"{where} did not answer in time")
        if isinstance(error, ResponseError):
            text = str(error)
            if text.startswith("OOM") or "maxmemory" in text:
                return StoreFull(
                    f"{where} is at its maxmemory: raise it, or allow eviction of frames"
                )
            if isinstance(error, BusyLoadingError) or text.startswith(
                ("LOADING", "READONLY", "MASTERDOWN")
            ):
                return StoreUnavailable(f"{where} cannot serve now: {text.split(maxsplit=1)[0]}")
            return StoreRefused(f"{where} refused a command: {text[:200]}")
        if isinstance(error, AuthenticationError):
            return StoreUnavailable(f"{where} refused our credentials")
        if isinstance(error, ConnectionError):
            return StoreUnavailable(f"{where} cannot be reached: {type(error).__name__}")
        return StoreUnavailable(f"{where}: {type(error).__name__}")


def pack_command(command: Command) -> list[bytes | memoryview]:
    """A command in RESP, with a frame's parts as chunks of their own instead of copies."""
    chunks: list[bytes | memoryview] = [b"*%d\r\n" % len(command)]
    for argument in command:
        if isinstance(argument, Frame):
            chunks.append(b"$%d\r\n" % argument.size_bytes)
            chunks.extend(argument.parts)
            chunks.append(_CRLF)
        else:
            data = argument.encode() if isinstance(argument, str) else argument
            chunks.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return chunks


def _merged(chunks: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Join neighbouring small chunks: one system call for many short commands, none of the payloads
    copied.
    """
    merged: list[bytes | memoryview] = []
    small: list[bytes | memoryview] = []
    for chunk in chunks:
        if len(chunk) <= 4096:
            small.append(chunk)
            continue
        if small:
            merged.append(b"".join(small))
            small = []
        merged.append(chunk)
    if small:
        merged.append(b"".join(small))
    return merged
