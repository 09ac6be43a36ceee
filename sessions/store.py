"""The session store: what must survive, and the one transaction in which it does.

A commit carries the writes of every session that one engine step touched. It is all or nothing, and
each session's write is compare-and-set on the row's version under a fencing token, so that an owner
that was taken over can never write again. The manifest of a parked context travels in the same
transaction as the row that says "parked". The tiers never commit anything; losing all of them costs
time, losing this costs the sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from moorage.sessions.state import SessionState
from moorage.sessions.token_log import LogRow


@dataclass(frozen=True)
class SessionRow:
    """The mutable heart of a session, one row."""

    session_id: str
    tenant: str
    name: str
    """Second part of the namespace."""
    config: bytes
    """Packed `SessionConfig` (sessions/session_config.py); fixed at creation."""
    idempotency_key: str
    """Of Create; unique per tenant where not empty."""
    state: SessionState = SessionState.IDLE
    version: int = 0
    """Number of writes; the compare of compare-and-set."""
    turn: int = 0
    turn_first_seq: int = 0
    """First record of the last turn; a replay may start here."""
    last_seq: int = 0
    num_tokens: int = 0
    parked: bool = False
    """KV is in a tier, not on the device."""
    generation: int = 0
    """Of the last park that was begun and committed; the next park is numbered above it."""


@dataclass(frozen=True)
class CallRow:
    """A tool call that the session announced. Kept for the session's life, so a late duplicate is
    recognised.
    """

    call_id: str
    turn: int
    index: int
    name: str
    arguments: str
    content: str | None = None
    """The result; None while open."""
    is_error: bool = False
    cancelled: bool = False
    consumed: bool = False
    """The result is in the token log."""


@dataclass(frozen=True)
class ManifestChange:
    """The manifest that the row shall name from now on; None forgets it."""

    manifest: bytes | None


@dataclass(frozen=True)
class SessionWrite:
    """One session's share of a commit."""

    row: SessionRow
    """As it shall be; `row.version` is one above the stored one, 1 inserts."""
    log_rows: tuple[LogRow, ...] = ()
    """A row whose first_seq is stored already is replaced: it has grown."""
    calls: tuple[CallRow, ...] = ()
    manifest: ManifestChange | None = None


@dataclass(frozen=True)
class StoredSession:
    """Everything needed to go on with a session."""

    row: SessionRow
    manifest: bytes | None
    packed_ids: bytes
    calls: tuple[CallRow, ...]
    turn_rows: tuple[LogRow, ...]
    """Rows of the last turn, from `turn_first_seq` on."""


class SessionStore(Protocol):
    """Synchronous and thread-safe: commits come from one writer thread, reads from any.

    Every method may raise StoreUnavailable (nothing was changed, or, for a failed commit, either
    all or nothing: read again before going on).
    """

    @property
    def fencing_token(self) -> int:
        """This owner's token; greater than any earlier owner's."""
        ...

    def commit(self, writes: Sequence[SessionWrite]) -> None:
        """All of it in one transaction. Raises StaleWrite, naming the session, when a compare
        fails.
        """
        ...

    def load(self, session_id: str) -> StoredSession | None:
        """A session with its log, None where there is none."""
        ...

    def find_by_key(self, tenant: str, idempotency_key: str) -> str | None:
        """The session that Create made under this key."""
        ...

    def log_rows(self, session_id: str, first_seq: int, last_seq: int) -> list[LogRow]:
        """Rows that cover any of first_seq … last_seq (both included), in order."""
        ...

    def turn_start(self, session_id: str, seq: int) -> int:
        """First sequence number of the turn that holds `seq` (of the last turn, where seq is
        beyond).
        """
        ...

    def sessions_in(self, state: SessionState) -> list[str]:
        """Ids of all sessions in a state; for recovery at start."""
        ...

    def close(self) -> None:
        """Let go of the files."""
        ...
