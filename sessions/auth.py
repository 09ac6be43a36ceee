"""Who is calling: the only place that builds a `Namespace`.

Without a token file the server is open and everyone is tenant "default". With one, every call must
carry `authorization: Bearer TOKEN`; the file maps tokens to tenants, one `TOKEN TENANT` a line (`#`
begins a comment). Tokens are kept as digests and compared in constant time; they never reach a log
or a message.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from moorage.engine import Namespace
from moorage.sessions.errors import InvalidArgument, Unauthenticated

DEFAULT_TENANT = "default"
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
MIN_TOKEN_LEN = 16
"""Characters of a bearer token at least; shorter ones can be guessed."""


class Authenticator:
    """Metadata of a call → namespace. Immutable after construction."""

    def __init__(self, tenants: Mapping[bytes, str] | None = None) -> None:
        """`tenants`: sha256 of a token -> tenant; None is open to all."""
        self._tenants = dict(tenants) if tenants is not None else None

    @classmethod
    def from_file(cls, path: Path) -> Authenticator:
        """Raises InvalidArgument naming the line at fault (never its token)."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"the token file {path} cannot be read: {error}") from error
        tenants: dict[bytes, str] = {}
        for number, line in enumerate(lines, start=1):
            parts = line.partition("#")[0].split()
            if not parts:
                continue
            if len(parts) != 2 or len(parts[0]) < MIN_TOKEN_LEN or not _TENANT.match(parts[1]):
                raise InvalidArgument(
                    f"{path}:{number}: expected TOKEN TENANT, a token of at least {MIN_TOKEN_LEN}"
                    " characters"
                    " and a tenant of letters, digits, '.', '_' and '-'"
                )
            tenants[_digest(parts[0])] = parts[1]
        return cls(tenants)

    def namespace(self, metadata: Iterable[tuple[str, str | bytes]]) -> Namespace:
        """The caller's namespace. Raises Unauthenticated."""
        if self._tenants is None:
            return Namespace(DEFAULT_TENANT, "sessions")
        for key, value in metadata:
            if key == "authorization" and isinstance(value, str):
                kind, _, token = value.partition(" ")
                found = None
                digest = _digest(token.strip())
                for known, tenant in self._tenants.items():
                    if hmac.compare_digest(known, digest):
                        found = tenant
                if kind.lower() == "bearer" and found is not None:
                    return Namespace(found, "sessions")
                raise Unauthenticated("the bearer token is not known to this server")
        raise Unauthenticated(
            "this server needs a bearer token: send the metadata 'authorization: Bearer TOKEN'"
        )


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
