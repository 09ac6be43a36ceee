"""A session's books: its row, its log, its calls, and the one way in which any of them changes.

A change is staged with `commit` and is visible to clients only once durable: then its events are
published and its continuation runs. Where a commit fails, memory is ahead of the store: the session
is *lost*, dropped from memory, and the next caller loads it again. That is the path after a crash,
so there is one path.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from moorage.engine import Namespace
from moorage.sessions.errors import DeadlineExceeded, MoorageError, SessionClosed, StoreUnavailable
from moorage.sessions.event_projector import EventProjector
from moorage.sessions.open_calls import OpenCalls
from moorage.sessions.proto import sessions_pb2 as pb
from moorage.sessions.services import SessionServices
from moorage.sessions.state import SessionEvent, SessionState, advance
from moorage.sessions.store import CallRow, ManifestChange, SessionWrite, StoredSession
from moorage.sessions.token_log import Record, TokenLog, from_row

_log = structlog.get_logger("moorage.sessions")


class Ledger:
    """Event loop only."""

    def __init__(self, services: SessionServices, stored: StoredSession) -> None:
        self._services = services
        self.row = stored.row
        self.log = TokenLog(stored.packed_ids, stored.row.last_seq + 1)
        self.calls = OpenCalls(stored.calls)
        self.turn_records: list[Record] = [r for row in stored.turn_rows for r in from_row(row)]
        """Of the last turn, as loaded."""
        self.projector = self.new_projector()
        for record in self.turn_records:
            self.projector.project(record)
        kinds = [r.kind for r in self.turn_records if r.kind in ("token", "input")]
        self.ends_generated = bool(kinds) and kinds[-1] == "token"
        """The log's last token was generated."""
        self.published_seq = stored.row.last_seq
        """Last event that is durable and handed to streams."""
        self.num_staged = 0
        """Writes that are not durable yet."""
        self.lost: MoorageError | None = None
        self.last_used_s = time.monotonic()
        self.publish: Callable[[pb.Event], None] = lambda event: None
        self.on_lost: Callable[[MoorageError], None] = lambda error: None

    @property
    def session_id(self) -> str:
        """The session's id."""
        return self.row.session_id

    @property
    def namespace(self) -> Namespace:
        """Whose it is."""
        return Namespace(self.row.tenant, self.row.name)

    @property
    def state(self) -> SessionState:
        """As staged; the store may be one commit behind."""
        return self.row.state

    def new_projector(self) -> EventProjector:
        """A projector that stands at the start of a turn."""
        return EventProjector(
            self.session_id,
            self._services.engine.decode_stream,
            self._services.parsers(self.session_id),
        )

    def check_usable(self) -> None:
        """Raises what lost the session, or SessionClosed."""
        if self.lost is not None:
            raise self.lost
        if self.state is SessionState.CLOSED:
            raise SessionClosed(f"session {self.session_id} is closed: create another")

    def advance(self, event: SessionEvent) -> None:
        """Move the state. Raises IllegalTransition and changes nothing where the table has no
        entry.
        """
        self.row = replace(self.row, state=advance(self.row.state, event))

    def project(self, records: Sequence[Record]) -> list[pb.Event]:
        """The events of new records, in order."""
        return [self.projector.project(record) for record in records]

    def commit(
        self,
        events: Sequence[pb.Event],
        calls: Sequence[CallRow] = (),
        *,
        manifest: ManifestChange | None = None,
        then: Callable[[], None] | None = None,
        future: asyncio.Future[None] | None = None,
    ) -> None:
        """Stage one write. Durable: publish `events`, resolve `future`, run `then`. Failed: lose
        the session.
        """
        self.row = replace(
            self.row,
            version=self.row.version + 1,
            last_seq=self.log.last_seq,
            num_tokens=self.log.num_tokens,
        )
        self.last_used_s = time.monotonic()
        self.num_staged += 1

        def committed(error: MoorageError | None) -> None:
            self.num_staged -= 1
            if error is not None and self.lost is None:
                self._lose(error)
            if self.lost is not None:
                if future is not None and not future.done():
                    future.set_exception(self.lost)
                return
            for event in events:
                self.published_seq = event.last_seq
                self.publish(event)
            if future is not None and not future.done():
                future.set_result(None)
            if then is not None:
                then()

        write = SessionWrite(self.row, self.log.take_rows(), tuple(calls), manifest)
        self._services.committer.submit(write, committed)

    async def durable(
        self,
        events: Sequence[pb.Event],
        calls: Sequence[CallRow] = (),
        *,
        then: Callable[[], None] | None = None,
    ) -> None:
        """`commit` and wait. Cancelled or timed out (DeadlineExceeded), the change
        still happens.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.commit(events, calls, then=then, future=future)
        seconds = self._services.limits.commit_wait_s
        await bounded(future, seconds, "the session store did not answer")

    def _lose(self, error: MoorageError) -> None:
        self.lost = StoreUnavailable(
            f"session {self.session_id} could not be made durable and is read again from the store:"
            f" {error.message}",
            retry_after_s=1.0,
        )
        _log.error("session lost", session_id=self.session_id, code=error.code)
        self.on_lost(self.lost)


async def bounded(future: asyncio.Future[None], seconds: float, what: str) -> None:
    """Wait for `future` at most `seconds`. Raises DeadlineExceeded that begins with `what`.
    Cancel-safe.
    """
    try:
        async with asyncio.timeout(seconds):
            await future
    except TimeoutError:
        raise DeadlineExceeded(f"{what} within {seconds} s") from None
