"""The session store in SQLite: write-ahead log, one writer, a file lock against a second process.

`durability="process"` (default) syncs at checkpoints only: a commit survives `kill -9` of any
process, not a power cut. `durability="power"` syncs every commit: about one disk flush a step.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgpack

from moorage.engine import unpack_tokens
from moorage.sessions.errors import (
    DataDirectoryLocked,
    SchemaVersionMismatch,
    StaleWrite,
    StoreUnavailable,
)
from moorage.sessions.failpoints import FailpointError, hit
from moorage.sessions.state import SessionState
from moorage.sessions.store import CallRow, SessionRow, SessionWrite, StoredSession
from moorage.sessions.token_log import LogRow

SCHEMA_VERSION = 1

BUSY_TIMEOUT_S = 5.0
"""Seconds a connection waits for another one's lock (a checkpoint) before the store counts as away.
"""

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE sessions (
    session_id TEXT PRIMARY KEY, tenant TEXT NOT NULL, name TEXT NOT NULL, config BLOB NOT NULL,
    idempotency_key TEXT NOT NULL, state TEXT NOT NULL, version INTEGER NOT NULL,
    fencing_token INTEGER NOT NULL, turn INTEGER NOT NULL, turn_first_seq INTEGER NOT NULL,
    last_seq INTEGER NOT NULL, num_tokens INTEGER NOT NULL, parked INTEGER NOT NULL,
    generation INTEGER NOT NULL, manifest BLOB);
CREATE UNIQUE INDEX sessions_by_key ON sessions (tenant, idempotency_key)
    WHERE idempotency_key != '';
CREATE INDEX sessions_by_state ON sessions (state) WHERE state IN ('running', 'waiting_tools');
CREATE TABLE records (
    session_id TEXT NOT NULL REFERENCES sessions (session_id) ON DELETE CASCADE,
    first_seq INTEGER NOT NULL, last_seq INTEGER NOT NULL, turn INTEGER NOT NULL,
    kind TEXT NOT NULL, position INTEGER NOT NULL, payload BLOB NOT NULL,
    PRIMARY KEY (session_id, first_seq));
CREATE INDEX records_by_turn ON records (session_id, turn, first_seq);
CREATE TABLE calls (
    session_id TEXT NOT NULL REFERENCES sessions (session_id) ON DELETE CASCADE,
    call_id TEXT NOT NULL, turn INTEGER NOT NULL, call_index INTEGER NOT NULL, name TEXT NOT NULL,
    arguments TEXT NOT NULL, content TEXT, is_error INTEGER NOT NULL, cancelled INTEGER NOT NULL,
    consumed INTEGER NOT NULL, PRIMARY KEY (session_id, call_id));
"""

_ROW = (
    "session_id, tenant, name, config, idempotency_key, state, version, turn, turn_first_seq,"
    " last_seq,"
    " num_tokens, parked, generation"
)


class SqliteStore:
    """`SessionStore` in one file, `sessions.sqlite3` of the data directory."""

    def __init__(
        self, data_dir: Path, *, durability: Literal["process", "power"] = "process"
    ) -> None:
        """Raises DataDirectoryLocked, SchemaVersionMismatch, StoreUnavailable."""
        try:
            data_dir.mkdir(parents=True, exist_ok=True)
            self._lock_file = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StoreUnavailable(
                f"the data directory {data_dir} cannot be used: {error.strerror}"
            ) from error
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock_file)
            raise DataDirectoryLocked(
                f"another process holds the data directory {data_dir}: stop it, or take another"
                " --data-dir"
            ) from error
        self._path = data_dir / "sessions.sqlite3"
        self._write_lock = threading.Lock()
        self._read_lock = threading.Lock()
        try:
            self._writer = self._connect(durability)
            self._migrate()
            self._reader = self._connect(durability)
            self.fencing_token = self._next_token()
        except sqlite3.Error as error:
            os.close(self._lock_file)
            raise StoreUnavailable(f"{self._path} cannot be opened: {error}") from error
        except SchemaVersionMismatch:
            os.close(self._lock_file)
            raise

    def _connect(self, durability: str) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={'FULL' if durability == 'power' else 'NORMAL'}")
        connection.execute("PRAGMA foreign_keys=ON")
        return connection

    def _migrate(self) -> None:
        tables = {
            name
            for (name,) in self._writer.execute("SELECT name FROM sqlite_master WHERE type='table'")
        }
        if "meta" not in tables:
            self._writer.executescript(
                f"BEGIN IMMEDIATE;{_SCHEMA}"
                f"INSERT INTO meta VALUES ('schema_version', {SCHEMA_VERSION}), ('fencing_token',"
                " 0);COMMIT;"
            )
            return
        (version,) = self._writer.execute(
            "SELECT value FROM meta WHERE key = 'schema_version'"
        ).fetchone()
        if version != SCHEMA_VERSION:
            self._writer.close()
            raise SchemaVersionMismatch(
                f"{self._path} has schema version {version}, this program reads {SCHEMA_VERSION}:"
                " use the"
                " program that wrote it, or another --data-dir"
            )

    def _next_token(self) -> int:
        self._writer.execute("UPDATE meta SET value = value + 1 WHERE key = 'fencing_token'")
        (token,) = self._writer.execute(
            "SELECT value FROM meta WHERE key = 'fencing_token'"
        ).fetchone()
        return int(token)

    def commit(self, writes: Sequence[SessionWrite]) -> None:
        """One transaction for all; see `SessionStore.commit`."""
        with self._write_lock:
            try:
                hit("store.before_begin")
                self._writer.execute("BEGIN IMMEDIATE")
                hit("store.after_begin")
                for write in writes:
                    self._write(write)
                hit("store.before_commit")
                self._writer.execute("COMMIT")
                hit("store.after_commit")
            except (sqlite3.Error, FailpointError) as error:
                self._rollback()
                raise StoreUnavailable(
                    f"the session store refused a commit: {error}", retry_after_s=1.0
                ) from error
            except StaleWrite:
                self._rollback()
                raise

    def _rollback(self) -> None:
        with contextlib.suppress(sqlite3.Error):  # the first error is the one to report
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")

    def _write(self, write: SessionWrite) -> None:
        row = write.row
        if row.version == 1:
            try:
                self._insert(row)
            except sqlite3.IntegrityError as error:
                raise StaleWrite(
                    f"session {row.session_id} exists already", session_id=row.session_id
                ) from error
        else:
            self._update(row)
        hit("store.after_row")
        if write.manifest is not None:
            self._writer.execute(
                "UPDATE sessions SET manifest = ? WHERE session_id = ?",
                (write.manifest.manifest, row.session_id),
            )
        self._writer.executemany(
            "INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (session_id, first_seq)"
            " DO UPDATE SET last_seq = excluded.last_seq, payload = excluded.payload",
            [
                (row.session_id, r.first_seq, r.last_seq, r.turn, r.kind, r.position, r.payload)
                for r in write.log_rows
            ],
        )
        hit("store.after_records")
        self._writer.executemany(
            "INSERT INTO calls VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (session_id,"
            " call_id)"
            " DO UPDATE SET content = excluded.content, is_error = excluded.is_error,"
            " cancelled = excluded.cancelled, consumed = excluded.consumed",
            [
                (
                    row.session_id, c.call_id, c.turn, c.index, c.name, c.arguments, c.content,
                    c.is_error, c.cancelled, c.consumed,
                )
                for c in write.calls
            ],
        )  # fmt: skip
        hit("store.after_calls")

    def _insert(self, row: SessionRow) -> None:
        self._writer.execute(
            f"INSERT INTO sessions ({_ROW}, fencing_token) VALUES ({', '.join('?' * 14)})",
            (
                row.session_id, row.tenant, row.name, row.config, row.idempotency_key,
                row.state.value, row.version, row.turn, row.turn_first_seq, row.last_seq,
                row.num_tokens, row.parked, row.generation, self.fencing_token,
            ),
        )  # fmt: skip

    def _update(self, row: SessionRow) -> None:
        done = self._writer.execute(
            "UPDATE sessions SET state = ?, version = ?, fencing_token = ?, turn = ?,"
            " turn_first_seq = ?,"
            " last_seq = ?, num_tokens = ?, parked = ?, generation = ?"
            " WHERE session_id = ? AND version = ? AND fencing_token <= ?",
            (
                row.state.value, row.version, self.fencing_token, row.turn, row.turn_first_seq,
                row.last_seq, row.num_tokens, row.parked, row.generation,
                row.session_id, row.version - 1, self.fencing_token,
            ),
        )  # fmt: skip
        if done.rowcount != 1:
            raise StaleWrite(
                f"session {row.session_id} is no longer at version {row.version - 1}, or its owner"
                " has a"
                f" fencing token above {self.fencing_token}",
                session_id=row.session_id,
            )

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._read_lock:
            try:
                yield self._reader
            except sqlite3.Error as error:
                raise StoreUnavailable(
                    f"the session store cannot be read: {error}", retry_after_s=1.0
                ) from error

    def load(self, session_id: str) -> StoredSession | None:
        """See `SessionStore.load`; one consistent snapshot."""
        with self._reading() as reader:
            reader.execute("BEGIN")
            try:
                found = reader.execute(
                    f"SELECT {_ROW}, manifest FROM sessions WHERE session_id = ?", (session_id,)
                ).fetchone()
                if found is None:
                    return None
                row = _session_row(found[:-1])
                rows = _rows(reader, session_id, 1, row.last_seq)
                calls = tuple(
                    CallRow(c[0], c[1], c[2], c[3], c[4], c[5], bool(c[6]), bool(c[7]), bool(c[8]))
                    for c in reader.execute(
                        "SELECT call_id, turn, call_index, name, arguments, content, is_error,"
                        " cancelled,"
                        " consumed FROM calls WHERE session_id = ? ORDER BY turn, call_index",
                        (session_id,),
                    )
                )
            finally:
                reader.execute("COMMIT")
        packed = b"".join(
            r.payload if r.kind == "token" else msgpack.unpackb(r.payload)[1]
            for r in rows
            if r.kind in ("token", "input")
        )
        if len(unpack_tokens(packed)) != row.num_tokens:
            raise StoreUnavailable(
                f"session {session_id}: the row says {row.num_tokens} tokens, its log has"
                f" {len(unpack_tokens(packed))}: the database file is damaged, restore it from a"
                " backup"
            )
        turn_rows = tuple(r for r in rows if r.first_seq >= row.turn_first_seq)
        return StoredSession(row, found[-1], packed, calls, turn_rows)

    def find_by_key(self, tenant: str, idempotency_key: str) -> str | None:
        """See `SessionStore.find_by_key`."""
        with self._reading() as reader:
            found = reader.execute(
                "SELECT session_id FROM sessions WHERE tenant = ? AND idempotency_key = ?",
                (tenant, idempotency_key),
            ).fetchone()
        return found[0] if found else None

    def log_rows(self, session_id: str, first_seq: int, last_seq: int) -> list[LogRow]:
        """See `SessionStore.log_rows`."""
        with self._reading() as reader:
            return _rows(reader, session_id, first_seq, last_seq)

    def turn_start(self, session_id: str, seq: int) -> int:
        """See `SessionStore.turn_start`."""
        with self._reading() as reader:
            found = reader.execute(
                "SELECT turn FROM records WHERE session_id = ? AND first_seq <= ?"
                " ORDER BY first_seq DESC LIMIT 1",
                (session_id, seq),
            ).fetchone()
            if found is None:
                return 1
            (first,) = reader.execute(
                "SELECT min(first_seq) FROM records WHERE session_id = ? AND turn = ?",
                (session_id, found[0]),
            ).fetchone()
        return int(first)

    def sessions_in(self, state: SessionState) -> list[str]:
        """See `SessionStore.sessions_in`."""
        with self._reading() as reader:
            return [
                found
                for (found,) in reader.execute(
                    "SELECT session_id FROM sessions WHERE state = ? ORDER BY session_id",
                    (state.value,),
                )
            ]

    def close(self) -> None:
        """Close both connections and give the directory free."""
        with self._write_lock, self._read_lock:
            self._reader.close()
            self._writer.close()
            os.close(self._lock_file)


def _rows(
    reader: sqlite3.Connection, session_id: str, first_seq: int, last_seq: int
) -> list[LogRow]:
    return [
        LogRow(*found)
        for found in reader.execute(
            "SELECT first_seq, last_seq, turn, kind, position, payload FROM records"
            " WHERE session_id = ? AND last_seq >= ? AND first_seq <= ? ORDER BY first_seq",
            (session_id, first_seq, last_seq),
        )
    ]


def _session_row(found: Sequence[Any]) -> SessionRow:
    return SessionRow(
        session_id=found[0], tenant=found[1], name=found[2], config=found[3],
        idempotency_key=found[4], state=SessionState(found[5]), version=found[6], turn=found[7],
        turn_first_seq=found[8], last_seq=found[9], num_tokens=found[10], parked=bool(found[11]),
        generation=found[12],
    )  # fmt: skip
