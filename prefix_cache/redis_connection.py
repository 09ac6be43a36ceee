"""One connection to one Redis server: RESP2, with a deadline over every byte.

redis-py's connections bound one system call, so that a server that trickles holds a reply for ever, and they copy a
reply twice on its way into a bytes object (socket buffer, hiredis, object). Here the kernel writes a large reply into
the memory that the caller gets, and gathers a pipeline from where its parts lie, each in one system call. A frame of
4 MiB costs this process 0.6 to 0.7 ms out and 0.8 to 0.9 ms in; 0.9 and 1.5 to 2.0 ms by redis-py with 256 KiB reads.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

import numpy as np

from moorage.prefix_cache.redis_config import ConnectionOptions, Endpoint

IOV_MAX = 1024
"""Buffers of one sendmsg on Linux (UIO_MAXIOV) and macOS."""
_BUFFER_BYTES = 1 << 16
_DIRECT_BYTES = 1 << 14
"""Replies from here on are received in place; smaller ones come as bytes."""
_MAX_DEPTH = 4
_MAX_ITEMS = 1 << 20


@dataclass(frozen=True)
class ErrorReply:
    """What Redis answers to a request that it refuses."""

    text: str

    @property
    def code(self) -> str:
        """The first word: OOM, MOVED, ERR, …"""
        return self.text.partition(" ")[0]


Reply: TypeAlias = "bytes | memoryview | int | ErrorReply | list[Reply] | None"


class ProtocolError(Exception):
    """Bytes that are not RESP2, or a reply over `max_reply_bytes`: the connection is of no more use."""


class Refused(Exception):
    """The server refused this client and hung up, or will not let it in."""

    def __init__(self, reply: ErrorReply) -> None:
        super().__init__(reply.code)
        self.reply = reply


class Connection:
    """Opened, authenticated and on its database. For one thread at a time, `shut` excepted.

    After any exception out of `exchange` it is out of step and must be closed, never used again.
    """

    def __init__(self, endpoint: Endpoint, options: ConnectionOptions, deadline: float) -> None:
        """Raises OSError (TimeoutError where connect_timeout_s or the deadline passed), Refused or
        ProtocolError. `deadline` is of time.monotonic(), here and below.
        """
        self._silence_s = options.socket_timeout_s
        self._max_reply_bytes = options.max_reply_bytes
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        limit = min(deadline, time.monotonic() + options.connect_timeout_s)
        self._tls: ssl.SSLSocket | None = None
        self._socket: socket.socket = _connect(endpoint, limit)
        try:
            if options.tls is not None:
                self._socket.settimeout(_left(limit))
                self._tls = options.tls.wrap_socket(self._socket, server_hostname=endpoint.host)
                self._socket = self._tls
            else:
                self._socket.setblocking(True)  # the kernel's own timeouts are used instead
            self._introduce(options, deadline)
        except BaseException:
            self.close()
            raise
        self.used_at = time.monotonic()

    def exchange(
        self, chunks: Sequence[bytes | memoryview], num_replies: int, deadline: float
    ) -> list[Reply]:
        """Send all, read all; errors of single requests are among the replies.

        Raises TimeoutError once the deadline has passed or the server was silent for
        `socket_timeout_s`, OSError where the connection broke, Refused where the server said why
        before it hung up, ProtocolError.
        """
        replies: list[Reply] = []
        try:
            try:
                self._send(chunks, deadline)
            except (BrokenPipeError, ConnectionResetError):
                replies.append(self._reply(deadline))  # it may have said why
                raise
            while len(replies) < num_replies:
                replies.append(self._reply(deadline))
        except TimeoutError:
            raise
        except OSError:
            if replies and isinstance(replies[-1], ErrorReply):
                raise Refused(replies[-1]) from None
            raise
        self.used_at = time.monotonic()
        return replies

    @property
    def in_step(self) -> bool:
        """Whether an idle connection may be used: the peer has neither hung up nor sent anything."""
        if self._end > self._start or (self._tls is not None and self._tls.pending()):
            return False
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return not poller.poll(0)

    def shut(self) -> None:
        """Wake whoever waits on it, from another thread; its owner closes it."""
        try:
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # without a word of TLS
        except OSError:
            return  # not connected any more

    def close(self) -> None:
        """Let go of the socket."""
        self._socket.close()

    # -- inside ------------------------------------------------------------------------------------

    def _introduce(self, options: ConnectionOptions, deadline: float) -> None:
        password = options.password.encode()
        if options.password_file is not None:
            password = options.password_file.read_bytes().rstrip(b"\r\n")
        requests: list[tuple[bytes, ...]] = []
        if password:
            user = (options.username.encode(),) if options.username else ()
            requests.append((b"AUTH", *user, password))
        if options.db:
            requests.append((b"SELECT", b"%d" % options.db))
        if not requests:
            return
        chunks = [b"".join(pack_request(request)) for request in requests]
        for reply in self.exchange(chunks, len(requests), deadline):
            if isinstance(reply, ErrorReply):
                raise Refused(reply)

    def _send(self, chunks: Sequence[bytes | memoryview], deadline: float) -> None:
        if self._tls is not None:
            for chunk in chunks:
                at, view = 0, memoryview(chunk)
                while at < len(view):
                    self._tls.settimeout(self._wait_s(deadline))
                    at += self._tls.send(view[at:])
            return
        pending = [memoryview(chunk) for chunk in chunks if len(chunk)]
        first = 0
        while first < len(pending):
            self._set_timeout(socket.SO_SNDTIMEO, self._wait_s(deadline))
            try:
                sent = self._socket.sendmsg(islice(pending, first, first + IOV_MAX))
            except BlockingIOError:
                raise TimeoutError("nothing was taken in time") from None
            while first < len(pending) and sent >= len(pending[first]):
                sent -= len(pending[first])
                first += 1
            if sent:
                pending[first] = pending[first][sent:]

    def _reply(self, deadline: float, depth: int = 0) -> Reply:
        line = self._line(deadline)
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return ErrorReply(rest.decode(errors="replace"))
        try:
            number = int(rest)
        except ValueError:
            raise ProtocolError(f"a line that starts with {line[:1]!r}") from None
        if kind == b":":
            return number
        if kind == b"$":
            return None if number == -1 else self._bulk(number, deadline)
        if kind == b"*" and depth < _MAX_DEPTH and number <= _MAX_ITEMS:
            return (
                None if number == -1 else [self._reply(deadline, depth + 1) for _ in range(number)]
            )
        raise ProtocolError(f"a line that starts with {line[:1]!r}")

    def _bulk(self, num_bytes: int, deadline: float) -> bytes | memoryview:
        if not 0 <= num_bytes <= self._max_reply_bytes:
            raise ProtocolError(
                f"a value of {num_bytes} bytes, max_value_bytes is {self._max_reply_bytes}"
            )
        if num_bytes < _DIRECT_BYTES:
            while self._end - self._start < num_bytes + 2:
                self._fill(deadline)
            data = bytes(self._view[self._start : self._start + num_bytes])
            self._start += num_bytes
            self._expect_end(deadline)
            return data
        into = np.empty(num_bytes, np.uint8).data  # not zeroed, unlike a bytearray
        at = min(self._end - self._start, num_bytes)
        into[:at] = self._view[self._start : self._start + at]
        self._start += at
        while at < num_bytes:
            at += self._receive(into[at:], deadline, whole=True)
        self._expect_end(deadline)
        return into.toreadonly()

    def _expect_end(self, deadline: float) -> None:
        if self._line(deadline):
            raise ProtocolError("a value that is longer than it said")

    def _line(self, deadline: float) -> bytes:
        while (at := self._buffer.find(b"\r\n", self._start, self._end)) < 0:
            self._fill(deadline)
        line = bytes(self._view[self._start : at])
        self._start = at + 2
        return line

    def _fill(self, deadline: float) -> None:
        """More bytes into the buffer, whatever has come."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == _BUFFER_BYTES:
            kept = self._end - self._start
            if kept == _BUFFER_BYTES:
                raise ProtocolError(f"a line of more than {_BUFFER_BYTES} bytes")
            self._view[:kept] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, kept
        self._end += self._receive(self._view[self._end :], deadline, whole=False)

    def _receive(self, into: memoryview, deadline: float, *, whole: bool) -> int:
        """Bytes received; with `whole` all of `into`, or what came within one silence."""
        wait_s = self._wait_s(deadline)
        if self._tls is not None:
            self._tls.settimeout(wait_s)
            received = self._tls.recv_into(into)
        else:
            self._set_timeout(socket.SO_RCVTIMEO, wait_s)
            try:
                received = self._socket.recv_into(into, 0, socket.MSG_WAITALL if whole else 0)
            except BlockingIOError:
                raise TimeoutError("nothing came in time") from None
        if received == 0:
            raise ConnectionResetError("the server hung up")
        return received

    def _wait_s(self, deadline: float) -> float:
        return min(self._silence_s, _left(deadline))

    def _set_timeout(self, option: int, seconds: float) -> None:
        # Of the kernel, over a whole call: Python's own would be one poll and one turn of the
        # interpreter lock for every piece that arrives. Zero would mean none.
        micros = max(1, round(seconds * 1e6))
        value = struct.pack("ll", micros // 1_000_000, micros % 1_000_000)
        self._socket.setsockopt(socket.SOL_SOCKET, option, value)


def pack_request(request: Sequence[bytes]) -> list[bytes]:
    """A request of small arguments in RESP."""
    return [b"*%d\r\n" % len(request)] + [b"$%d\r\n%b\r\n" % (len(part), part) for part in request]


def _connect(endpoint: Endpoint, limit: float) -> socket.socket:
    if endpoint.port == 0:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            made.settimeout(_left(limit))
            made.connect(endpoint.host)
        except BaseException:
            made.close()
            raise
        return made
    failed: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(
        endpoint.host, endpoint.port, type=socket.SOCK_STREAM
    ):
        made = socket.socket(family, kind, protocol)
        try:
            made.settimeout(_left(limit))
            made.connect(address)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        except OSError as error:
            made.close()
            failed = error
        except BaseException:
            made.close()
            raise
        else:
            return made
    raise failed or OSError("the host has no address")


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline passed")
    return left
