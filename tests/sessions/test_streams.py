"""Which events a stream carries, and the order in which the committer answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

from fake_engine import FakeEngine
from session_harness import eventually, harbour, run

from moorage.sessions.committer import Committer
from moorage.sessions.errors import MoorageError, StaleWrite
from moorage.sessions.proto import sessions_pb2 as pb
from moorage.sessions.sqlite_store import SqliteStore
from moorage.sessions.state import SessionState
from moorage.sessions.store import SessionRow, SessionWrite


def test_a_turn_that_begins_before_the_last_one_is_durable_has_a_stream_of_its_own_events(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        engine = FakeEngine(lambda prompt: "First." if "Two" not in prompt else "Second.")
        async with harbour(tmp_path, engine) as h:
            session = await h.client.create(park_policy="never")
            held, release = threading.Event(), threading.Event()
            commit = h.store.commit

            def slow_commit(writes: Sequence[SessionWrite]) -> None:
                if writes[-1].row.state is SessionState.IDLE and writes[-1].row.turn == 1:
                    held.set()
                    assert release.wait(10.0)
                commit(writes)

            h.store.commit = slow_commit  # type: ignore[method-assign]
            first = asyncio.create_task(session.run("One"))
            await eventually(held.is_set)  # the turn's end is known, and not yet on the disk
            second = asyncio.create_task(h.client.session(session.session_id).run("Two"))
            running = h.manager._sessions[session.session_id]
            await eventually(lambda: running.ledger.row.turn == 2)
            release.set()
            assert ((await first).text, (await second).text) == ("First.", "Second.")
            info = await session.get()
            assert (info.state, info.turn) == ("idle", 2)

    run(scenario())


def test_a_repeated_create_in_one_transaction_is_told_after_the_first_is_durable(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        store = SqliteStore(tmp_path)
        committer = Committer(store, max_pending=8)
        answers: list[tuple[str, bool, str | None]] = []

        def answer(name: str, error: MoorageError | None) -> None:
            answers.append((name, isinstance(error, StaleWrite), store.find_by_key("acme", "key")))

        for name in ("s-1", "s-2", "s-3"):
            row = SessionRow(name, "acme", "sessions", b"", "key", version=1)
            committer.submit(SessionWrite(row), lambda error, name=name: answer(name, error))
        task = asyncio.create_task(committer.run())
        await committer.flush(5.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        committer.close()
        store.close()
        assert answers == [("s-1", False, "s-1"), ("s-2", True, "s-1"), ("s-3", True, "s-1")]

    run(scenario())


def test_five_creates_at_once_with_one_key_make_one_session(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harbour(tmp_path, FakeEngine(lambda prompt: "Yes.")) as h:
            for number in range(20):
                request = pb.CreateRequest(idempotency_key=f"key-{number}")
                made = await asyncio.gather(
                    *(h.client.call("Create", request, 5.0) for _ in "12345")
                )
                assert len({response.session_id for response in made}) == 1
                assert sorted(response.existed for response in made) == [False] + [True] * 4

    run(scenario())
