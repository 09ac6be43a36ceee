"""One session: what callers can ask of it.

A session is an actor whose mailbox is the event loop: every change of state is one synchronous
stretch of code, and what must wait (a commit, the engine, a park) continues in a callback. So a
caller that is cancelled only stops waiting; it never leaves a half-made change.

    Session ── calls ──▶ TurnLoop ── stages ──▶ Ledger ── durable ──▶ Streams
                            │                     ▲
                            └── Parking ──────────┘
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence

import structlog

from moorage.engine import FinishReason, Release
from moorage.sessions.errors import MoorageError, SessionBusy, StateError, ToolsPending
from moorage.sessions.ledger import Ledger, bounded
from moorage.sessions.open_calls import ResultInput
from moorage.sessions.parking import Parking
from moorage.sessions.proto import sessions_pb2 as pb
from moorage.sessions.services import SessionServices
from moorage.sessions.session_config import SessionConfig, resolve_sampling
from moorage.sessions.state import SessionEvent, SessionState
from moorage.sessions.store import CallRow, StoredSession
from moorage.sessions.streams import Streams
from moorage.sessions.subscription import Subscription
from moorage.sessions.token_log import TurnEndRecord
from moorage.sessions.turn_input import InputEncoder, TurnInput
from moorage.sessions.turn_loop import TurnLoop, resolve

_log = structlog.get_logger("moorage.sessions")


class Session:
    """Event loop only. Public coroutines are cancel-safe and bounded by `Limits`."""

    def __init__(
        self, services: SessionServices, stored: StoredSession, on_lost: Callable[[Session], None]
    ) -> None:
        self._services = services
        self.config = SessionConfig.from_bytes(stored.row.config)
        self.ledger = Ledger(services, stored)
        self.ledger.on_lost = self._lose
        self.streams = Streams(services, self.ledger)
        self.parking = Parking(services, self.config, self.ledger, stored.manifest)
        self._encoder = InputEncoder(services, self.config, self.ledger)
        self.loop = TurnLoop(services, self.config, self.ledger, self.parking, self._encoder)
        self._on_lost = on_lost

    @property
    def session_id(self) -> str:
        """The session's id."""
        return self.ledger.session_id

    @property
    def in_turn(self) -> bool:
        """A turn is open."""
        return self.ledger.state in (SessionState.RUNNING, SessionState.WAITING_TOOLS)

    @property
    def evictable(self) -> bool:
        """Nothing would be missed if it were dropped from memory: the store has it all."""
        return not (
            len(self.streams)
            or self.ledger.num_staged
            or self.parking.busy
            or self.loop.request is not None
            or self.ledger.state is SessionState.RUNNING
        )

    async def start_turn(self, turn_input: TurnInput) -> Subscription:
        """Make the input durable, submit it, and give the stream of the turn.

        Raises SessionBusy, ToolsPending, SessionClosed (nothing changed), InvalidArgument,
        TemplateError, ContextTooLong, StoreUnavailable, DeadlineExceeded. A repeat of the last
        turn's idempotency key attaches to that turn. Cancelled: the turn goes on or not as if its
        stream had been dropped.
        """
        ledger, key = self.ledger, turn_input.idempotency_key
        ledger.check_usable()
        if key and self.loop.turn is not None and self.loop.turn.idempotency_key == key:
            return self._attach(ledger.row.turn_first_seq - 1, end_turn=self.loop.turn.number)
        if turn_input.cancel_pending_calls and ledger.state is SessionState.WAITING_TOOLS:
            await self.cancel()
        self._check_startable()
        sampling = resolve_sampling(
            self.config.sampling, turn_input.sampling or {}, secrets.randbits(63)
        )
        epoch = self.loop.epoch
        ids = await self._encoder.turn(turn_input, ledger.calls.unsent())
        self._check_startable()
        if epoch != self.loop.epoch:
            raise SessionBusy(
                f"session {self.session_id}: another turn was started at the same moment; send"
                " this one again"
            )
        ids = self._encoder.fit(ids)
        subscription = self.streams.attach(ledger.log.last_seq, end_turn=ledger.row.turn + 1)
        self.loop.epoch += 1
        events = self.loop.open_turn(turn_input, sampling, ids)
        try:
            await ledger.durable(events, ledger.calls.consume(), then=self.loop.submit_when_ready)
        except BaseException:
            self.detach(subscription, dropped=True)
            raise
        return subscription

    def _check_startable(self) -> None:
        self.ledger.check_usable()
        if self.ledger.state is SessionState.RUNNING:
            raise SessionBusy(
                f"session {self.session_id} generates turn {self.ledger.row.turn} already: wait"
                " for its end,"
                " attach to it, or cancel it"
            )
        if self.ledger.state is SessionState.WAITING_TOOLS:
            waiting = (
                ", ".join(self.ledger.calls.pending_ids()) or "calls that are all answered now"
            )
            raise ToolsPending(
                f"session {self.session_id} waits for the results of {waiting}: submit them,"
                " cancel the turn,"
                " or set cancel_pending_calls"
            )

    def recover(self) -> None:
        """After loading: go on where the log says that a turn was under way."""
        if self.ledger.state is SessionState.RUNNING:
            _log.info("turn continues from its log", session_id=self.session_id)
            self.loop.submit_when_ready()
        else:
            self.loop.continue_if_complete()

    async def submit_results(self, results: Sequence[ResultInput]) -> tuple[int, int]:
        """(accepted, duplicates). All or nothing; durable when it returns.

        Raises CallNotFound, ToolResultConflict (the first result stands), SessionClosed,
        StoreUnavailable.
        """
        ledger = self.ledger
        ledger.check_usable()
        new, num_duplicates = ledger.calls.check(results)
        if new:
            if ledger.state is not SessionState.WAITING_TOOLS:
                raise StateError(
                    f"session {self.session_id} is {ledger.state.value}: no call waits for a result"
                )
            rows = ledger.calls.answer(new)
            await ledger.durable(
                self.loop.accepted(rows), rows, then=self.loop.continue_if_complete
            )
        return len(new), num_duplicates

    async def cancel(self) -> tuple[bool, list[str]]:
        """(there was a turn, calls answered as cancelled). Durable when it returns; idle is a
        no-op.

        A running request ends within one engine step. Raises DeadlineExceeded when the engine does
        not acknowledge within `cancel_wait_s`: the abort stays under way.
        """
        ledger, limits = self.ledger, self._services.limits
        ledger.check_usable()
        if not self.in_turn:
            return False, []
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.loop.ended_waiters.append(ended)
        rows: list[CallRow] = []
        if ledger.state is SessionState.WAITING_TOOLS:
            self.loop.epoch += 1
            rows = ledger.calls.cancel_pending()
            self.loop.end_turn(FinishReason.CANCELLED, None, self.loop.accepted(rows), rows)
        else:
            self.loop.begin_cancel()
        await bounded(ended, limits.cancel_wait_s, "the cancellation was not acknowledged")
        return True, [row.call_id for row in rows]

    async def close(self) -> None:
        """End the session for good. Idempotent; durable when it returns."""
        ledger = self.ledger
        if ledger.state is SessionState.CLOSED:
            return
        ledger.check_usable()
        self.loop.epoch += 1
        events: list[pb.Event] = []
        rows = ledger.calls.cancel_pending()
        if self.in_turn and self.loop.turn is not None:
            usage = self.loop.turn.usage().SerializeToString()
            reason = FinishReason.CANCELLED.value
            end = TurnEndRecord(ledger.log.take_seq(), ledger.row.turn, reason, usage)
            ledger.log.add(end)
            events += ledger.project([end])
        if self.loop.request is not None and not self._services.link.withdraw(
            self.loop.request.command
        ):
            self.loop.abort(self.loop.request)
        self.loop.request = None
        self.loop.suspended = False
        ledger.advance(SessionEvent.CLOSED)
        ended, self.loop.ended_waiters = self.loop.ended_waiters, []

        def then() -> None:
            resolve(ended)
            self.streams.end()
            self._services.link.send(
                Release(self.session_id, self.ledger.namespace, self.parking.manifest)
            )

        await ledger.durable(events, rows, then=then)

    def attach(self, after_seq: int, *, until_turn_end: bool) -> Subscription:
        """A stream of the events behind `after_seq`; with `until_turn_end` it ends with the open
        turn, or, where none is open, once everything was sent. A suspended turn goes on with it.

        Raises SequenceOutOfRange, StateError at the bound of streams.
        """
        if self.ledger.lost is not None:
            raise self.ledger.lost
        if not until_turn_end:
            return self._attach(after_seq)
        if self.in_turn:
            return self._attach(after_seq, end_turn=self.ledger.row.turn)
        return self._attach(after_seq, end_seq=self.ledger.log.last_seq)

    def _attach(
        self, after_seq: int, *, end_turn: int | None = None, end_seq: int | None = None
    ) -> Subscription:
        subscription = self.streams.attach(after_seq, end_turn=end_turn, end_seq=end_seq)
        if self.ledger.state is SessionState.CLOSED:
            subscription.end()
        if self.loop.suspended:
            self.loop.suspended = False
            self.loop.submit_when_ready()
        return subscription

    def detach(self, subscription: Subscription, *, dropped: bool) -> None:
        """Forget a stream. `dropped`: the client left before its end; the last one's loss follows
        the policy.
        """
        self.streams.detach(subscription)
        if not dropped or len(self.streams) or not self.in_turn or self.ledger.lost is not None:
            return
        running = self.ledger.state is SessionState.RUNNING
        match self.config.disconnect_policy:
            case "cancel" if running:
                self.loop.begin_cancel()
            case "cancel":
                self._services.spawn(self.cancel())
            case "park" if running:
                self.loop.suspend()
            case "park":
                self.parking.begin(self.config.park_tier)
            case "continue":
                pass

    def _lose(self, error: MoorageError) -> None:
        """Memory is ahead of the store: let go of everything; the next caller loads the session
        again.
        """
        if self.loop.request is not None and not self._services.link.withdraw(
            self.loop.request.command
        ):
            self.loop.abort(self.loop.request)
        self.loop.request = None
        self.streams.end(error)
        for waiter in self.loop.ended_waiters:
            if not waiter.done():
                waiter.set_exception(error)
        self.parking.lose(error)
        self._on_lost(self)
