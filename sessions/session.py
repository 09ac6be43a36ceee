"""One session: the turn loop.

A session is an actor whose mailbox is the event loop: every change of state is one synchronous
stretch of code here, and what must wait (a commit, the engine, a park) continues in a callback. So
a caller that is cancelled only stops waiting; it never leaves a half-made change.

    input durable → Submit → token … token → tool calls durable → park → results durable → Submit →
    … → turn end
                              each step: commit, then publish
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from moorage.engine import Abort, FinishReason, Namespace, Release, Request, Submit, TokenOutput
from moorage.sessions.errors import (
    InternalError,
    MoorageError,
    SessionBusy,
    StateError,
    ToolsPending,
    from_fault,
    to_detail,
)
from moorage.sessions.failpoints import hit
from moorage.sessions.ledger import Ledger, bounded
from moorage.sessions.open_calls import TOO_LONG_CONTENT, ResultInput
from moorage.sessions.parking import Parking
from moorage.sessions.proto import sessions_pb2 as pb
from moorage.sessions.services import SessionServices
from moorage.sessions.session_config import SessionConfig, resolve_sampling, sampling_params
from moorage.sessions.state import SessionEvent, SessionState
from moorage.sessions.store import CallRow, StoredSession
from moorage.sessions.streams import Streams
from moorage.sessions.subscription import Subscription
from moorage.sessions.token_log import (
    FailedRecord,
    Record,
    ResumedRecord,
    ToolCallRecord,
    ToolResultRecord,
    TurnEndRecord,
    TurnStartRecord,
)
from moorage.sessions.turn import ActiveRequest, Turn, sources_of
from moorage.sessions.turn_input import InputEncoder, TurnInput

_log = structlog.get_logger("moorage.sessions")
_attempts = itertools.count(1)


class Session:
    """Event loop only. Public coroutines are cancel-safe and bounded by `Limits`."""

    def __init__(
        self, services: SessionServices, stored: StoredSession, on_lost: Callable[[Session], None]
    ) -> None:
        self._services = services
        self.config = SessionConfig.from_bytes(stored.row.config)
        self.namespace = Namespace(stored.row.tenant, stored.row.name)
        self.ledger = Ledger(services, stored)
        self.ledger.on_lost = self._lose
        self.streams = Streams(services, self.ledger)
        self.parking = Parking(self, services, stored.manifest, self._submit_when_ready)
        self._input = InputEncoder(services, self.config, self.ledger)
        self._on_lost = on_lost
        self._turn = Turn.from_records(self.ledger.turn_records)
        self._request: ActiveRequest | None = None
        self._epoch = 0
        """Grows with every change of turn, so that a coroutine that waited sees that it was
        overtaken.
        """
        self._suspended = False
        """The turn is open and nobody computes it: its last stream dropped, or the server stops."""
        self._ended_waiters: list[asyncio.Future[None]] = []

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
            or self._request is not None
            or self.ledger.state is SessionState.RUNNING
        )

    # -- a turn begins
    # -------------------------------------------------------------------------------------

    async def start_turn(self, turn_input: TurnInput) -> Subscription:
        """Make the input durable, submit it, and give the stream of the turn.

        Raises SessionBusy, ToolsPending, SessionClosed (nothing changed), InvalidArgument,
        TemplateError, ContextTooLong, StoreUnavailable, DeadlineExceeded. A repeat of the last
        turn's idempotency key attaches to that turn. Cancelled: the turn goes on or not as if its
        stream had been dropped.
        """
        ledger, key = self.ledger, turn_input.idempotency_key
        ledger.check_usable()
        if key and self._turn is not None and self._turn.idempotency_key == key:
            return self._attach(ledger.row.turn_first_seq - 1, end_turn=self._turn.number)
        if turn_input.cancel_pending_calls and ledger.state is SessionState.WAITING_TOOLS:
            await self.cancel()
        self._check_startable()
        sampling = resolve_sampling(
            self.config.sampling, turn_input.sampling or {}, secrets.randbits(63)
        )
        epoch = self._epoch
        ids = await self._input.turn(turn_input, ledger.calls.unsent())
        self._check_startable()
        if epoch != self._epoch:
            raise SessionBusy(
                f"session {self.session_id}: another turn was started at the same moment; send"
                " this one again"
            )
        ids = self._input.fit(ids)
        subscription = self.streams.attach(ledger.log.last_seq, end_turn=ledger.row.turn + 1)
        self._epoch += 1
        events = self._open_turn(turn_input, sampling, ids)
        try:
            await ledger.durable(events, ledger.calls.consume(), then=self._submit_when_ready)
        except BaseException:
            self.detach(subscription, dropped=True)
            raise
        return subscription

    def _open_turn(
        self, turn_input: TurnInput, sampling: dict[str, object], ids: Sequence[int]
    ) -> list[pb.Event]:
        ledger = self.ledger
        start = ledger.log.num_tokens
        turn = Turn(
            ledger.row.turn + 1, sampling, turn_input.deadline_s, turn_input.idempotency_key
        )
        turn.begin_stretch(start=start + len(ids), input_position=start)
        self._turn = turn
        ledger.advance(SessionEvent.TURN_STARTED)
        opened = TurnStartRecord(
            ledger.log.take_seq(), turn.number, sampling, start + len(ids), len(ids),
            turn_input.deadline_s, turn_input.idempotency_key,
        )  # fmt: skip
        ledger.row = replace(ledger.row, turn=turn.number, turn_first_seq=opened.seq)
        ledger.log.add(opened)
        accepted = ledger.log.input(turn.number, ids, turn_input.source)
        ledger.ends_generated = False
        return ledger.project([opened, accepted])

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
            self._submit_when_ready()
        else:
            self._continue_if_complete()

    def _submit_when_ready(self) -> None:
        """Submit the open turn; a park in flight calls again when it is settled."""
        turn, ledger = self._turn, self.ledger
        if (
            ledger.lost is not None
            or ledger.state is not SessionState.RUNNING
            or self._request is not None
            or self._suspended
            or self.parking.blocks_submit
            or turn is None
            or turn.stretch is None
        ):
            return
        if turn.tokens_left < 0:
            self._end_turn(FinishReason.LENGTH)
            return
        stretch = turn.stretch
        length = ledger.log.num_tokens
        generated = length - stretch.start
        request = Request(
            request_id=f"{self.session_id}:{turn.number}:{next(_attempts)}",
            session_id=self.session_id,
            namespace=self.namespace,
            token_ids=ledger.log.packed_ids,
            num_prompt=stretch.start,
            num_known=length - 1 if generated else max(0, stretch.input_position - 1),
            sampling=sampling_params(turn.sampling, max_tokens=turn.tokens_left),
            deadline_s=turn.seconds_left(),
            manifest=self.parking.manifest,
        )
        announce = ledger.row.parked or bool(turn.done) or generated > 0
        self._request = ActiveRequest(request.request_id, Submit(request), announce)
        ledger.row = replace(ledger.row, parked=False)
        hit("engine.before_submit")
        try:
            self._services.link.send(
                self._request.command,
                wait_s=self._services.limits.submit_wait_s,
                on_refused=self._submit_refused,
            )
        except MoorageError as error:
            self._submit_refused(error)

    def _submit_refused(self, error: MoorageError) -> None:
        if self.ledger.state is SessionState.RUNNING and self.ledger.lost is None:
            self._end_turn(FinishReason.ERROR, error)

    # -- a turn runs
    # ---------------------------------------------------------------------------------------

    def on_output(self, output: TokenOutput) -> None:
        """One session's share of a step. Outputs of requests that are over are dropped."""
        request, turn, ledger = self._request, self._turn, self.ledger
        if ledger.lost is not None or request is None or turn is None or turn.stretch is None:
            return
        if output.request_id != request.request_id:
            return
        stretch = turn.stretch
        now = time.monotonic()
        events: list[pb.Event] = []
        if output.sources is not None:
            stretch.first_output = output
            stretch.first_token_s = stretch.first_token_s or now
            if request.announce:
                events += self._resumed(output, now - stretch.began_s)
        if output.token_id is not None:
            if output.position != ledger.log.num_tokens:
                fault = InternalError(
                    f"the engine gave position {output.position}, the log is at"
                    f" {ledger.log.num_tokens}"
                )
                self._abort(request)
                self._end_turn(FinishReason.ERROR, fault, events)
                return
            events += ledger.project([ledger.log.token(turn.number, output.token_id)])
            ledger.ends_generated = True
            stretch.num_generated += 1
            stretch.last_token_s = now
        if ledger.projector.fault is not None:
            self._abort(request)
            self._end_turn(FinishReason.ERROR, ledger.projector.fault, events)
        elif output.finish_reason is None:
            ledger.commit(events)
        elif request.suspending and output.finish_reason is FinishReason.CANCELLED:
            self._suspension_done(events)
        else:
            error = output.error and from_fault(output.error.code.value, output.error.message)
            self._end_stretch(output.finish_reason, error, events)

    def _resumed(self, output: TokenOutput, ttft_s: float) -> list[pb.Event]:
        ledger = self.ledger
        record = ResumedRecord(
            ledger.log.take_seq(), ledger.row.turn, sources_of(output), output.num_forwarded,
            output.restore_s, output.queue_s, ttft_s,
        )  # fmt: skip
        ledger.log.add(record)
        return ledger.project([record])

    def _end_stretch(
        self, reason: FinishReason, error: MoorageError | None, events: list[pb.Event]
    ) -> None:
        """The engine is done with the request: tool calls to wait for, or the turn's end."""
        ledger = self.ledger
        if reason is not FinishReason.STOP:  # a truncated call is never run (case A12)
            self._end_turn(reason, error, events)
            return
        calls = ledger.projector.close_stretch(truncated=False)
        if ledger.projector.fault is not None:
            self._end_turn(FinishReason.ERROR, ledger.projector.fault, events)
            return
        if not calls:
            self._end_turn(reason, error, events)
            return
        self._request = None
        for call in calls:
            record = ToolCallRecord(
                ledger.log.take_seq(), ledger.row.turn, call.call_id, call.index, call.name,
                call.arguments, len(calls),
            )  # fmt: skip
            ledger.log.add(record)
            events += ledger.project([record])
        ledger.advance(SessionEvent.TOOL_CALLS_EMITTED)
        rows = ledger.calls.open(ledger.row.turn, calls)
        ledger.commit(events, rows, then=self.parking.after_tool_calls)

    def _end_turn(
        self,
        reason: FinishReason,
        error: MoorageError | None = None,
        events: Sequence[pb.Event] = (),
        calls: Sequence[CallRow] = (),
    ) -> None:
        """Exactly one terminal record a turn; the session is idle afterwards."""
        ledger = self.ledger
        usage = (self._turn.usage() if self._turn is not None else pb.Usage()).SerializeToString()
        self._request = None
        self._suspended = False
        seq = ledger.log.take_seq()
        end: Record
        if reason is FinishReason.ERROR:
            known = error or InternalError("the engine ended the turn without saying why")
            end = FailedRecord(seq, ledger.row.turn, to_detail(known).SerializeToString(), usage)
            ledger.advance(SessionEvent.FAILED)
            _log.warning("turn failed", session_id=self.session_id, code=known.code)
        else:
            end = TurnEndRecord(seq, ledger.row.turn, reason.value, usage)
            cancelled = reason is FinishReason.CANCELLED
            ledger.advance(SessionEvent.CANCELLED if cancelled else SessionEvent.TURN_ENDED)
        ledger.log.add(end)
        ended, self._ended_waiters = self._ended_waiters, []

        def then() -> None:
            _resolve(ended)
            self.parking.after_turn()

        ledger.commit([*events, *ledger.project([end])], calls, then=then)

    def _abort(self, request: ActiveRequest) -> None:
        """Tell the engine once. Where it no longer runs, there is nothing to abort."""
        if request.aborting:
            return
        request.aborting = True
        try:
            self._services.link.send(Abort(request.request_id))
        except MoorageError as error:
            _log.warning("abort not sent", session_id=self.session_id, code=error.code)

    # -- tool results
    # --------------------------------------------------------------------------------------

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
            await ledger.durable(self._accepted(rows), rows, then=self._continue_if_complete)
        return len(new), num_duplicates

    def _accepted(self, rows: Sequence[CallRow]) -> list[pb.Event]:
        ledger = self.ledger
        events: list[pb.Event] = []
        for row in rows:
            record = ToolResultRecord(
                ledger.log.take_seq(), ledger.row.turn, row.call_id, row.content or "", row.is_error,
                row.cancelled,
            )  # fmt: skip
            ledger.log.add(record)
            events += ledger.project([record])
        return events

    def _continue_if_complete(self) -> None:
        if self.ledger.state is SessionState.WAITING_TOOLS and not self.ledger.calls.pending():
            self._services.spawn(self._continue_turn())

    async def _continue_turn(self) -> None:
        """All results are in: append them as the template writes them, and decode on."""
        ledger, turn, epoch = self.ledger, self._turn, self._epoch
        unsent = ledger.calls.unsent()
        if turn is None or not unsent:
            return
        error: MoorageError | None = None
        ids: list[int] = []
        try:
            ids = await self._input.results(unsent)
        except MoorageError as caught:
            error = caught
        if epoch != self._epoch or ledger.lost or ledger.state is not SessionState.WAITING_TOOLS:
            return
        self._epoch += 1
        if error is None:
            try:
                ids = self._input.fit(ids)
            except MoorageError as caught:
                error = caught
        if error is not None:  # the next turn tells the model that its results did not fit
            rows = ledger.calls.replace_unsent(TOO_LONG_CONTENT)
            self._end_turn(FinishReason.ERROR, error, (), rows)
            return
        start = ledger.log.num_tokens
        turn.begin_stretch(start=start + len(ids), input_position=start)
        ledger.advance(SessionEvent.ALL_RESULTS_IN)
        events = ledger.project([ledger.log.input(turn.number, ids, "tool_results")])
        ledger.ends_generated = False
        ledger.commit(events, ledger.calls.consume(), then=self._submit_when_ready)

    # -- cancel, close, disconnect
    # -------------------------------------------------------------------------

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
        self._ended_waiters.append(ended)
        rows: list[CallRow] = []
        if ledger.state is SessionState.WAITING_TOOLS:
            self._epoch += 1
            rows = ledger.calls.cancel_pending()
            self._end_turn(FinishReason.CANCELLED, None, self._accepted(rows), rows)
        else:
            self._begin_cancel()
        await bounded(ended, limits.cancel_wait_s, "the cancellation was not acknowledged")
        return True, [row.call_id for row in rows]

    def _begin_cancel(self) -> None:
        """Abort the running request, or end the turn at once where the engine has none."""
        request = self._request
        self._suspended = False
        if request is None or self._services.link.withdraw(request.command):
            self._end_turn(FinishReason.CANCELLED)
        else:
            request.suspending = False
            self._abort(request)

    async def close(self) -> None:
        """End the session for good. Idempotent; durable when it returns."""
        ledger = self.ledger
        if ledger.state is SessionState.CLOSED:
            return
        ledger.check_usable()
        self._epoch += 1
        events: list[pb.Event] = []
        rows = ledger.calls.cancel_pending()
        if self.in_turn and self._turn is not None:
            usage = self._turn.usage().SerializeToString()
            reason = FinishReason.CANCELLED.value
            end = TurnEndRecord(ledger.log.take_seq(), ledger.row.turn, reason, usage)
            ledger.log.add(end)
            events += ledger.project([end])
        if self._request is not None and not self._services.link.withdraw(self._request.command):
            self._abort(self._request)
        self._request = None
        self._suspended = False
        ledger.advance(SessionEvent.CLOSED)
        ended, self._ended_waiters = self._ended_waiters, []

        def then() -> None:
            _resolve(ended)
            self.streams.end()
            self._services.link.send(
                Release(self.session_id, self.namespace, self.parking.manifest)
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
        if self._suspended:
            self._suspended = False
            self._submit_when_ready()
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
                self._begin_cancel()
            case "cancel":
                self._services.spawn(self.cancel())
            case "park" if running:
                self.suspend()
            case "park":
                self.parking.begin(self.config.park_tier)
            case "continue":
                pass

    def suspend(self) -> None:
        """Stop decoding and park. The turn stays open and goes on with the next stream or the next
        process.
        """
        if self.ledger.state is not SessionState.RUNNING or self._suspended:
            return
        self._suspended = True
        request = self._request
        if request is not None and self._services.link.withdraw(request.command):
            self._request = None
        elif request is not None:
            request.suspending = True
            self._abort(request)

    def _suspension_done(self, events: list[pb.Event]) -> None:
        """The engine let go of a request that was suspended, not cancelled."""
        self._request = None
        if events:
            self.ledger.commit(events)
        if self._suspended:
            self.parking.begin(self.config.park_tier)
        else:  # somebody attached meanwhile
            self._submit_when_ready()

    def _lose(self, error: MoorageError) -> None:
        """Memory is ahead of the store: let go of everything; the next caller loads the session
        again.
        """
        if self._request is not None and not self._services.link.withdraw(self._request.command):
            self._abort(self._request)
        self._request = None
        self.streams.end(error)
        for waiter in self._ended_waiters:
            if not waiter.done():
                waiter.set_exception(error)
        self.parking.lose(error)
        self._on_lost(self)


def _resolve(waiters: Sequence[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
