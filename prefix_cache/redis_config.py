"""Where Redis is and how to talk to it: one URL for a single server, Sentinel or Cluster, and the limits.

    redis://[user:password@]host[:6379][/db]                       one server
    unix://[user:password@]/path/of/socket[?db=N]                  one server on this machine
    redis+sentinel://[user:password@]host[:26379],…/service[/db]   the master that the sentinels name
    redis+cluster://[user:password@]host[:6379],…                  all masters of a cluster

`rediss` in place of `redis` is TLS, with certificate and host name verified. Options, after `?`: `password_file`,
`sentinel_password_file`, `ca_file`, `cert_file`, `key_file`, `verify=yes│no`. A password in a file is read at every
new connection, so it stands on no command line and may be changed while this process runs.
"""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from moorage.prefix_cache.errors import InvalidInput

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:,@/?#\s]+)(?::([0-9]{1,5}))?")
_FORMS = (
    "redis://[user:password@]host[:port][/db], rediss://… for TLS, unix://path,"
    " redis+sentinel://host[:port],…/service[/db] or redis+cluster://host[:port],…"
)
_OPTIONS = ("password_file", "sentinel_password_file", "ca_file", "cert_file", "key_file")


class Topology(StrEnum):
    """Who decides which server holds a key."""

    SINGLE = "single"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, order=True)
class Endpoint:
    """One listening server: host and port, or the path of a Unix socket."""

    host: str
    """Name, address without brackets, or path."""
    port: int
    """0 for a Unix socket."""

    def __str__(self) -> str:
        if self.port == 0:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class ConnectionOptions:
    """What every connection to one kind of server needs."""

    username: str = ""
    password: str = field(default="", repr=False)
    password_file: Path | None = None
    """Holds the password instead, alone or with a newline at its end."""
    db: int = 0
    tls: ssl.SSLContext | None = None
    connect_timeout_s: float = 1.0
    socket_timeout_s: float = 2.0
    health_check_s: float = 15.0
    max_connections: int = 8
    max_reply_bytes: int = 64 << 20
    max_retries: int = 2
    retry_base_s: float = 0.02


@dataclass(frozen=True)
class RedisTarget:
    """What a URL says."""

    topology: Topology
    endpoints: tuple[Endpoint, ...]
    """The server; the sentinels; some nodes of the cluster."""
    service: str
    """The sentinels' name for the master; empty elsewhere."""
    node: ConnectionOptions
    """For servers that hold frames."""
    sentinel: ConnectionOptions
    """For sentinels, which have a password of their own or none."""


@dataclass(frozen=True)
class RedisConfig:
    """Redis as a tier. `url` may hold credentials: it is never logged or shown in an error."""

    url: str = field(repr=False)
    """See the module."""
    ttl_s: float = 7 * 24 * 3600.0
    """Seconds until the frames of a context that nobody parks again expire."""
    socket_timeout_s: float = 2.0
    """Longest silence while a request is sent or its reply awaited."""
    connect_timeout_s: float = 1.0
    """Seconds for a connection to open, TLS included; the look-up of a host's name is the system's."""
    health_check_s: float = 15.0
    """A connection that was idle for longer is pinged before use."""
    max_connections: int = 8
    """Open connections to one server at most; a caller beyond waits within its deadline."""
    max_value_bytes: int = 64 << 20
    """Largest frame; a larger one is refused with FrameTooLarge. Frames have 4 MiB or less except where
    one block alone has more; Redis itself takes up to 512 MB.
    """
    pipeline_bytes: int = 8 << 20
    """Frames are written in pipelines of about this size."""
    max_retries: int = 2
    """Further attempts after a broken connection; every request may be repeated harmlessly."""
    retry_base_s: float = 0.02
    """First pause between attempts; doubles each time, with jitter."""
    password_file: Path | None = None
    """As the URL's option, for those who configure in Python; the same for the next five."""
    sentinel_password_file: Path | None = None
    ca_file: Path | None = None
    """PEM; in place of the system's authorities."""
    cert_file: Path | None = None
    """PEM; our certificate, where the server asks for one."""
    key_file: Path | None = None
    verify: bool = True
    """Whether the server's certificate and name are checked. False gives the frames to anyone in between."""

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

    def target(self) -> RedisTarget:
        """The URL read and its files opened. Raises InvalidInput; the URL is not shown."""
        self.validate()
        scheme, user_info, netloc, path, options = _split(self.url)
        merged = self._merged(options)
        username, _, password = user_info.partition(":")
        node = ConnectionOptions(
            username=unquote(username),
            password=unquote(password),
            password_file=merged.password_file,
            tls=merged._tls_context() if scheme.startswith("rediss") else None,
            connect_timeout_s=self.connect_timeout_s,
            socket_timeout_s=self.socket_timeout_s,
            health_check_s=self.health_check_s,
            max_connections=self.max_connections,
            max_reply_bytes=self.max_value_bytes,
            max_retries=self.max_retries,
            retry_base_s=self.retry_base_s,
        )
        if node.password and node.password_file is not None:
            raise InvalidInput("a password in the URL and a password_file: give one of them")
        sentinel = replace(
            node,
            username="",
            password="",
            password_file=merged.sentinel_password_file,
            max_connections=1,
            max_retries=0,
        )
        kind = scheme.partition("+")[2]
        if scheme == "unix":
            if netloc or not path:
                raise _malformed()
            db = _db(options.get("db", ""))
            return RedisTarget(
                Topology.SINGLE, (Endpoint(path, 0),), "", replace(node, db=db), sentinel
            )
        parts = [part for part in path.split("/") if part]
        service = ""
        if kind == "sentinel":
            if not parts:
                raise _malformed()
            service = unquote(parts.pop(0))
        if len(parts) > 1 or (kind == "cluster" and parts):
            raise _malformed()
        endpoints = tuple(
            _endpoint(text, 26379 if kind == "sentinel" else 6379) for text in netloc.split(",")
        )
        if not kind and len(endpoints) > 1:
            raise _malformed()
        node = replace(node, db=_db(parts[0] if parts else ""))
        return RedisTarget(Topology(kind or "single"), endpoints, service, node, sentinel)

    def _merged(self, options: dict[str, str]) -> RedisConfig:
        files = {name: Path(options[name]) for name in _OPTIONS if name in options}
        if "verify" not in options:
            return replace(self, **files)  # type: ignore[arg-type]  # values are the fields' own
        if options["verify"] not in ("yes", "no"):
            raise InvalidInput("the option verify in the Redis URL is neither yes nor no")
        return replace(self, **files, verify=options["verify"] == "yes")  # type: ignore[arg-type]

    def _tls_context(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.cert_file is not None:
                context.load_cert_chain(self.cert_file, self.key_file)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise InvalidInput(
                f"TLS for Redis: ca_file {self.ca_file}, cert_file {self.cert_file} or key_file {self.key_file}"
                f" cannot be used: {getattr(error, 'strerror', None) or type(error).__name__}"
            ) from None
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


def _split(url: str) -> tuple[str, str, str, str, dict[str, str]]:
    """(scheme, user info, hosts, path, options)"""
    try:
        whole = urlsplit(url)
        options = (
            dict(parse_qsl(whole.query, keep_blank_values=True, strict_parsing=True))
            if whole.query
            else {}
        )
    except ValueError:
        raise _malformed() from None
    user_info, _, netloc = whole.netloc.rpartition("@")
    base, _, kind = whole.scheme.partition("+")
    known = whole.scheme == "unix" or (
        base in ("redis", "rediss") and (kind in ("sentinel", "cluster") or whole.scheme == base)
    )
    allowed = {*_OPTIONS, "verify"} | ({"db"} if whole.scheme == "unix" else set())
    if not known or whole.fragment or not options.keys() <= allowed:
        raise _malformed()
    return whole.scheme, user_info, netloc, whole.path, options


def _endpoint(text: str, default_port: int) -> Endpoint:
    found = _HOST.fullmatch(text)
    if found is None or not 0 < int(found[2] or default_port) < 1 << 16:
        raise _malformed()
    return Endpoint(found[1].strip("[]"), int(found[2] or default_port))


def _db(text: str) -> int:
    if not re.fullmatch(r"[0-9]{0,6}", text):
        raise _malformed()
    return int(text or 0)


def _malformed() -> InvalidInput:
    return InvalidInput(
        f"the Redis URL is malformed (not shown: it may hold a password); expected {_FORMS}"
    )
