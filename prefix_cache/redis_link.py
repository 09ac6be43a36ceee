"""Pipelines to one Redis server with a deadline each; every foreign error becomes one of ours here and nowhere else."""

from __future__ import annotations

import random
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from moorage.prefix_cache.errors import (
    StoreError,
    StoreFull,
    StoreRefused,
    StoreTimeout,
    StoreUnavailable,
)
from moorage.prefix_cache.frame import Frame
from moorage.prefix_cache.redis_config import ConnectionOptions, Endpoint
from moorage.prefix_cache.redis_connection import (
    Connection,
    ErrorReply,
    ProtocolError,
    Refused,
    Reply,
)

Argument: TypeAlias = bytes | str | Frame
Command: TypeAlias = tuple[Argument, ...]

_CRLF = b"\r\n"
_NOT_NOW = frozenset(
    ("LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "BUSY", "MISCONF", "NOREPLICAS")
)
"""Codes that go away by themselves or by an operator's hand, without a change here."""


@dataclass(frozen=True)
class Operation:
    """Commands on one key, all or none of which take effect (MULTI … EXEC where there are several).

    Each may be repeated harmlessly: frames are named by content or by generation, so that a write
    done twice writes the same.
    """

    key: str
    """Decides the node of a cluster; empty for commands without a key."""
    commands: tuple[Command, ...]


class Link(Protocol):
    """Redis as the store sees it, whatever stands behind it. Thread-safe."""

    @property
    def address(self) -> str:
        """For messages; without credentials."""
        ...

    def execute(self, operations: Sequence[Operation], deadline: float) -> list[Reply]:
        """The reply to the last command of each operation. Ends at `deadline` (time.monotonic()).

        Raises StoreTimeout, StoreUnavailable, StoreFull or StoreRefused; where one operation of
        several failed the others may have taken effect. Broken connections are tried again.
        """
        ...

    def close(self) -> None:
        """Drop all connections, busy ones too."""
        ...


class RedisLink:
    """A bounded pool of connections to one server.

    A connection on which anything went wrong is dropped, so that a late reply can never be taken
    for the answer to another question.
    """

    def __init__(self, endpoint: Endpoint, options: ConnectionOptions) -> None:
        """Connects at first use."""
        self.endpoint = endpoint
        self.address = str(endpoint)
        self._options = options
        self._free = threading.Semaphore(options.max_connections)
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._closed = False

    def execute(self, operations: Sequence[Operation], deadline: float) -> list[Reply]:
        """See Link."""
        return retrying(
            self.address,
            lambda: self.checked(self.exchange(operations, deadline)),
            deadline,
            self._options,
        )

    def exchange(
        self, operations: Sequence[Operation], deadline: float, *, asking: bool = False
    ) -> list[Reply]:
        """One attempt; errors of single operations are among the replies. `asking` is for a slot
        that this node of a cluster is being given: ASKING counts for one command, so that the
        commands of an operation go one by one.

        Raises StoreTimeout, StoreUnavailable or StoreRefused.
        """
        chunks: list[bytes | memoryview] = []
        lengths = [_pack(operation, chunks, asking=asking) for operation in operations]
        try:
            connection = self._take(deadline)
            done = False
            try:
                replies = connection.exchange(_merged(chunks), sum(lengths), deadline)
                done = True
            finally:
                self._give_back(connection, in_step=done)
        except (OSError, ProtocolError, Refused) as error:
            raise self._mapped(error, deadline) from error
        found: list[Reply] = []
        at = 0
        for operation, length in zip(operations, lengths, strict=True):
            transaction = len(operation.commands) > 1 and not asking
            found.append(_outcome(replies[at : at + length], transaction=transaction))
            at += length
        return found

    def checked(self, replies: list[Reply]) -> list[Reply]:
        """The replies, if none is an error; else the first as one of ours."""
        for reply in replies:
            if isinstance(reply, ErrorReply):
                raise refusal(self.address, reply)
        return replies

    def close(self) -> None:
        """See Link."""
        self.retire()
        with self._lock:
            for connection in self._busy:
                connection.shut()

    def retire(self) -> None:
        """Take no more requests; those under way end by themselves."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    # -- inside ------------------------------------------------------------------------------------

    def _take(self, deadline: float) -> Connection:
        if not self._free.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise StoreTimeout(
                f"Redis at {self.address}: all {self._options.max_connections} connections stayed busy"
                " until the deadline: raise max_connections"
            )
        try:
            connection = self._sound_idle(deadline) or Connection(
                self.endpoint, self._options, deadline
            )
            with self._lock:
                self._busy.add(connection)
                closed = self._closed
            if closed:
                self._give_back(connection, in_step=False, free=False)
                raise StoreUnavailable(f"Redis at {self.address}: the link is closed")
        except BaseException:
            self._free.release()
            raise
        return connection

    def _sound_idle(self, deadline: float) -> Connection | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            sound = False
            try:
                sound = connection.in_step and self._alive(connection, deadline)
            finally:
                if not sound:
                    connection.close()
            if sound:
                return connection

    def _alive(self, connection: Connection, deadline: float) -> bool:
        if time.monotonic() - connection.used_at < self._options.health_check_s:
            return True
        try:
            return connection.exchange([b"*1\r\n$4\r\nPING\r\n"], 1, deadline) == [b"PONG"]
        except (OSError, ProtocolError, Refused):
            return False

    def _give_back(self, connection: Connection, *, in_step: bool, free: bool = True) -> None:
        with self._lock:
            self._busy.discard(connection)
            keep = in_step and not self._closed
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.close()
        if free:
            self._free.release()

    def _mapped(self, error: OSError | ProtocolError | Refused, deadline: float) -> StoreError:
        where = f"Redis at {self.address}"
        if isinstance(error, Refused):
            return refusal(self.address, error.reply)
        if isinstance(error, ProtocolError):
            return StoreRefused(f"{where} sent {error}: is this Redis, with our frames?")
        if isinstance(error, TimeoutError):
            kind = "" if time.monotonic() < deadline else "; the operation's deadline passed"
            return StoreTimeout(f"{where} did not answer in time{kind}")
        if isinstance(error, ssl.SSLCertVerificationError):
            return StoreUnavailable(
                f"{where} has a certificate that is not accepted ({error.verify_message}): give its"
                " authority as ca_file, and the name that is on it as the host"
            )
        if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
            return StoreUnavailable(
                f"{where}: TLS failed ({error.reason or type(error).__name__}): is this a TLS port, and"
                " does it want a client certificate (cert_file, key_file)?"
            )
        if error.filename is not None:
            return StoreUnavailable(f"{where}: {error.filename} cannot be read: {error.strerror}")
        return StoreUnavailable(f"{where} cannot be reached: {error.strerror or error}")


def retrying(
    address: str,
    attempt: Callable[[], list[Reply]],
    deadline: float,
    options: ConnectionOptions,
) -> list[Reply]:
    """What `attempt` gives, again after StoreUnavailable, with pauses that double, up to
    `max_retries` times and never past the deadline.
    """
    num_failed = 0
    while True:
        if time.monotonic() >= deadline:
            raise StoreTimeout(
                f"Redis at {address}: the operation's deadline passed before it was sent"
            )
        try:
            return attempt()
        except StoreUnavailable:
            pause_s = options.retry_base_s * 2**num_failed * random.uniform(0.5, 1.5)
            num_failed += 1
            if num_failed > options.max_retries or time.monotonic() + pause_s >= deadline:
                raise
        time.sleep(pause_s)


def refusal(address: str, reply: ErrorReply) -> StoreError:
    """An error reply as one of ours. Never holds a key: Redis quotes what it was sent only after
    "with args".
    """
    where, code = f"Redis at {address}", reply.code
    if code == "OOM":
        return StoreFull(f"{where} is at its maxmemory: raise it, or allow eviction of frames")
    if "READONLY" in reply.text:
        return StoreUnavailable(
            f"{where} is a read-only replica (READONLY): name the master, or let sentinels name it"
            " (redis+sentinel://)"
        )
    if code in ("WRONGPASS", "NOAUTH") or "AUTH" in reply.text.split():
        return StoreUnavailable(
            f"{where} refused our credentials ({code}): check user and password in the URL or in"
            " password_file"
        )
    if code == "NOPERM":
        return StoreRefused(
            f"{where}: our user lacks a permission (NOPERM): allow the commands of README.md on"
            " moorage:*"
        )
    if code in ("MOVED", "ASK", "CROSSSLOT"):
        return StoreRefused(f"{where} is a node of a cluster: write redis+cluster:// in the URL")
    if "max number of clients" in reply.text:
        return StoreUnavailable(
            f"{where} has as many clients as it takes: raise its maxclients or lower max_connections"
        )
    if code in _NOT_NOW:
        return StoreUnavailable(f"{where} cannot serve now: {code}")
    return StoreRefused(
        f"{where} refused a command: {reply.text.partition(', with args')[0][:200]}"
    )


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


def _pack(operation: Operation, chunks: list[bytes | memoryview], *, asking: bool) -> int:
    """Append an operation; returns the number of replies that it will have."""
    commands: list[Command] = []
    for command in operation.commands:
        commands.extend([(b"ASKING",), command] if asking else [command])
    if len(operation.commands) > 1 and not asking:
        commands = [(b"MULTI",), *commands, (b"EXEC",)]
    for command in commands:
        chunks.extend(pack_command(command))
    return len(commands)


def _outcome(replies: list[Reply], *, transaction: bool) -> Reply:
    """Of one operation: its first error, else its last reply; EXEC's is the last of its list."""
    last = replies[-1]
    nested = last if isinstance(last, list) and transaction else []
    for reply in (*replies, *nested):
        if isinstance(reply, ErrorReply):
            return reply
    return nested[-1] if nested else last


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
