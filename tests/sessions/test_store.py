"""The SQLite store: one transaction, compare-and-set, and what a crash leaves."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moorage.sessions import failpoints
from moorage.sessions.errors import (
    DataDirectoryLocked,
    SchemaVersionMismatch,
    StaleWrite,
    StoreUnavailable,
)
from moorage.sessions.sqlite_store import SqliteStore
from moorage.sessions.state import SessionState
from moorage.sessions.store import CallRow, ManifestChange, SessionRow, SessionWrite
from moorage.sessions.token_log import TokenLog

ROW = SessionRow("s-1", "acme", "sessions", b"config", "key-1", version=1)
CALL = CallRow("call_1", 1, 0, "add", "{}")


def grown(row: SessionRow, log: TokenLog, **changes: object) -> SessionRow:
    return replace(
        row,
        version=row.version + 1,
        last_seq=log.last_seq,
        num_tokens=log.num_tokens,
        **changes,  # type: ignore[arg-type]
    )


def test_what_was_committed_is_loaded(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    log = TokenLog()
    log.input(1, [1, 2, 3], "messages")
    log.token(1, 4)
    row = grown(ROW, log, state=SessionState.RUNNING, turn=1, turn_first_seq=1)
    store.commit([SessionWrite(ROW)])
    store.commit([SessionWrite(row, log.take_rows(), (CALL,), ManifestChange(b"manifest"))])
    log.token(1, 5)
    row = grown(row, log)
    store.commit([SessionWrite(row, log.take_rows(), (replace(CALL, content="5"),))])
    store.close()
    store = SqliteStore(tmp_path)
    stored = store.load("s-1")
    assert stored is not None
    assert (stored.row, stored.manifest, stored.packed_ids) == (row, b"manifest", log.packed_ids)
    assert stored.calls == (replace(CALL, content="5"),)
    assert [(r.kind, r.first_seq, r.last_seq) for r in stored.turn_rows] == [
        ("input", 1, 1), ("token", 2, 3),
    ]  # fmt: skip
    assert store.load("s-2") is None
    assert store.sessions_in(SessionState.RUNNING) == ["s-1"]
    assert store.find_by_key("acme", "key-1") == "s-1"
    assert store.find_by_key("other", "key-1") is None
    store.close()


def test_a_stale_version_is_refused_and_takes_the_whole_commit_with_it(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    other = replace(ROW, session_id="s-2", idempotency_key="")
    store.commit([SessionWrite(ROW), SessionWrite(other)])
    with pytest.raises(StaleWrite, match="version 4") as caught:
        store.commit(
            [SessionWrite(replace(other, version=2)), SessionWrite(replace(ROW, version=5))]
        )
    assert caught.value.session_id == "s-1"
    found = store.load("s-2")
    assert found is not None
    assert found.row.version == 1
    store.close()


def test_an_owner_with_an_older_fencing_token_is_refused(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    assert store.fencing_token == 1
    store.commit([SessionWrite(ROW)])
    store.close()
    store = SqliteStore(tmp_path)
    assert store.fencing_token == 2
    store.commit([SessionWrite(replace(ROW, version=2))])
    store.fencing_token = 1  # as an owner that was taken over still believes
    with pytest.raises(StaleWrite, match="fencing token above 1"):
        store.commit([SessionWrite(replace(ROW, version=3))])
    store.close()


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    with pytest.raises(DataDirectoryLocked, match="another process holds"):
        SqliteStore(tmp_path)
    store.close()
    SqliteStore(tmp_path).close()


def test_a_database_of_a_newer_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    SqliteStore(tmp_path).close()
    path = tmp_path / "sessions.sqlite3"
    with sqlite3.connect(path) as db:
        db.execute("UPDATE meta SET value = 99 WHERE key = 'schema_version'")
    with pytest.raises(SchemaVersionMismatch, match="version 99"):
        SqliteStore(tmp_path)
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone() == (99,)


def test_a_directory_that_cannot_be_used_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable, match="cannot be used"):
        SqliteStore(tmp_path / "file" / "below")
    (tmp_path / "sessions.sqlite3").write_bytes(b"not a database, certainly not" * 100)
    with pytest.raises(StoreUnavailable, match="cannot be opened"):
        SqliteStore(tmp_path)


def test_a_damaged_log_is_found_at_loading(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    log = TokenLog()
    log.input(1, [1, 2], "tokens")
    store.commit([SessionWrite(ROW)])
    row = grown(ROW, log)
    store.commit([SessionWrite(replace(row, num_tokens=3), log.take_rows())])
    with pytest.raises(StoreUnavailable, match="3 tokens, its log has 2"):
        store.load("s-1")
    store.close()


BEFORE_COMMIT = sorted(
    name
    for name in failpoints.FAILPOINT_NAMES
    if name.startswith("store.") and name != "store.after_commit"
)


@pytest.mark.parametrize("name", BEFORE_COMMIT)
def test_a_failure_inside_a_commit_changes_nothing_and_the_next_one_works(
    tmp_path: Path, name: str
) -> None:
    store = SqliteStore(tmp_path)
    store.commit([SessionWrite(ROW)])
    log = TokenLog()
    log.input(1, [7], "tokens")
    write = SessionWrite(grown(ROW, log), log.take_rows(), (CALL,), ManifestChange(b"new manifest"))
    failpoints.arm_from_environment(f"{name}:error")
    try:
        with pytest.raises(StoreUnavailable, match=name):
            store.commit([write])
    finally:
        failpoints.disarm()
    found = store.load("s-1")
    assert found is not None
    assert (found.row.version, found.manifest, found.calls, found.packed_ids) == (1, None, (), b"")
    store.commit([write])
    found = store.load("s-1")
    assert found is not None
    assert (found.row.version, found.manifest, found.calls) == (2, b"new manifest", (CALL,))
    store.close()


KILLED = """
import sys
from pathlib import Path
from dataclasses import replace
sys.path.insert(0, sys.argv[3])
from test_store import CALL, ROW, grown
from moorage.sessions import failpoints
from moorage.sessions.sqlite_store import SqliteStore
from moorage.sessions.store import ManifestChange, SessionWrite
from moorage.sessions.token_log import TokenLog
store = SqliteStore(Path(sys.argv[1]))
other = replace(ROW, session_id="s-2", idempotency_key="")
store.commit([SessionWrite(ROW), SessionWrite(other)])
logs = [TokenLog(), TokenLog()]
for log in logs:
    log.input(1, [7, 8], "tokens")
failpoints.arm_from_environment(sys.argv[2] + ":kill")
store.commit([SessionWrite(grown(row, log, parked=True, generation=1), log.take_rows(), (CALL,),
                           ManifestChange(b"m1")) for row, log in zip((ROW, other), logs)])
"""


@pytest.mark.parametrize("name", [*BEFORE_COMMIT, "store.after_commit"])
def test_d5_a_kill_leaves_the_old_version_or_the_new_one(tmp_path: Path, name: str) -> None:
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), name, str(here)],
        env={"PYTHONPATH": str(here.parent.parent / ".src"), "PATH": "/usr/bin:/bin"},
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    store = SqliteStore(tmp_path)
    expected = (
        (2, True, b"m1", (CALL,), 2) if name == "store.after_commit" else (1, False, None, (), 0)
    )
    for session_id in ("s-1", "s-2"):
        found = store.load(session_id)
        assert found is not None
        row = found.row
        assert (row.version, row.parked, found.manifest, found.calls, row.num_tokens) == expected
    store.close()


def test_an_unknown_failpoint_or_action_is_an_error() -> None:
    for text in ("store.nowhere:kill", "store.before_commit:explode", "store.before_commit:kill:x"):
        with pytest.raises(ValueError, match="failpoint"):
            failpoints.arm_from_environment(text)
