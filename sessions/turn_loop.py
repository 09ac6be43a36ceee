"""The turn loop of one session: from durable input to the turn's end.

    input durable → Submit → token … token → tool calls durable → park
                               each step: commit, then publish       │
    turn end ◀── token … ◀── Submit ◀── results durable ◀── tools run ┘

Every change is one synchronous stretch of code on the event loop; what must wait (a commit, the
engine, a park) continues in a callback. Exactly one request is with the engine at a time, and
exactly one terminal record ends a turn, whatever races: outputs of a request that is over carry its
id and are dropped.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import replace

import structlog

from moorage.engine import Abort, FinishReason, Request, Submit, TokenOutput
from moorage.sessions.errors import InternalError, MoorageError, from_fault, to_detail
from moorage.sessions.failpoints import hit
from moorage.sessions.ledger import Ledger
from moorage.sessions.open_calls import TOO_LONG_CONTENT
from moorage.sessions.parking import Parking
from moorage.sessions.proto import sessions_pb2 as pb
from moorage.sessions.services import SessionServices
from moorage.sessions.session_config import SessionConfig, sampling_params
from moorage.sessions.state import SessionEvent, SessionState
from moorage.sessions.store import CallRow
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


class TurnLoop:
    """Event loop only; one per session. Nothing here awaits but `_continue_turn`."""

    def __init__(
        self,
        services: SessionServices,
        config: SessionConfig,
        ledger: Ledger,
        parking: Parking,
        encoder: InputEncoder,
    ) -> None:
        self._services = services
        self._config = config
        self._ledger = ledger
        self._parking = parking
        self._encoder = encoder
        parking.on_settled = self.submit_when_ready
        self.turn = Turn.from_records(ledger.turn_records)
        """The open turn, or the last one."""
        self.request: ActiveRequest | None = None
        """What the engine works on."""
        self.epoch = 0
        """Grows with every change of turn, so that a coroutine that waited sees that it was
        overtaken.
        """
        self.suspended = False
        """The turn is open and nobody computes it: its last stream dropped, or the server stops."""
        self.ended_waiters: list[asyncio.Future[None]] = []
        """Resolved when the open turn's end is durable."""

    # -- a turn begins -------------------------------------------------------------------------

    def open_turn(
        self, turn_input: TurnInput, sampling: dict[str, object], ids: Sequence[int]
    ) -> list[pb.Event]:
        ledger = self._ledger
        start = ledger.log.num_tokens
        turn = Turn(
            ledger.row.turn + 1, sampling, turn_input.deadline_s, turn_input.idempotency_key
        )
        turn.begin_stretch(start=start + len(ids), input_position=start)
        self.turn = turn
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

    def submit_when_ready(self) -> None:
        """Submit the open turn; a park in flight calls again when it is settled."""
        turn, ledger = self.turn, self._ledger
        if (
            ledger.lost is not None
            or ledger.state is not SessionState.RUNNING
            or self.request is not None
            or self.suspended
            or self._parking.blocks_submit
            or turn is None
            or turn.stretch is None
        ):
            return
        if turn.tokens_left < 0:
            self.end_turn(FinishReason.LENGTH)
            return
        stretch = turn.stretch
        length = ledger.log.num_tokens
        generated = length - stretch.start
        request = Request(
            request_id=f"{self._ledger.session_id}:{turn.number}:{next(_attempts)}",
            session_id=self._ledger.session_id,
            namespace=self._ledger.namespace,
            token_ids=ledger.log.packed_ids,
            num_prompt=stretch.start,
            num_known=length - 1 if generated else max(0, stretch.input_position - 1),
            sampling=sampling_params(turn.sampling, max_tokens=turn.tokens_left),
            deadline_s=turn.seconds_left(),
            manifest=self._parking.manifest,
        )
        announce = ledger.row.parked or bool(turn.done) or generated > 0
        self.request = ActiveRequest(request.request_id, Submit(request), announce)
        ledger.row = replace(ledger.row, parked=False)
        hit("engine.before_submit")
        try:
            self._services.link.send(
                self.request.command,
                wait_s=self._services.limits.submit_wait_s,
                on_refused=self._submit_refused,
            )
        except MoorageError as error:
            self._submit_refused(error)

    def _submit_refused(self, error: MoorageError) -> None:
        if self._ledger.state is SessionState.RUNNING and self._ledger.lost is None:
            self.end_turn(FinishReason.ERROR, error)

    # -- a turn runs ---------------------------------------------------------------------------

    def on_output(self, output: TokenOutput) -> None:
        """One session's share of a step. Outputs of requests that are over are dropped."""
        request, turn, ledger = self.request, self.turn, self._ledger
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
                self.abort(request)
                self.end_turn(FinishReason.ERROR, fault, events)
                return
            events += ledger.project([ledger.log.token(turn.number, output.token_id)])
            ledger.ends_generated = True
            stretch.num_generated += 1
            stretch.last_token_s = now
        if ledger.projector.fault is not None:
            self.abort(request)
            self.end_turn(FinishReason.ERROR, ledger.projector.fault, events)
        elif output.finish_reason is None:
            ledger.commit(events)
        elif request.suspending and output.finish_reason is FinishReason.CANCELLED:
            self._suspension_done(events)
        else:
            fault_of = output.error
            error = from_fault(fault_of.code.value, fault_of.message) if fault_of else None
            self._end_stretch(output.finish_reason, error, events)

    def _resumed(self, output: TokenOutput, ttft_s: float) -> list[pb.Event]:
        ledger = self._ledger
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
        ledger = self._ledger
        if reason is not FinishReason.STOP:  # a truncated call is never run (case A12)
            self.end_turn(reason, error, events)
            return
        calls = ledger.projector.close_stretch(truncated=False)
        if ledger.projector.fault is not None:
            self.end_turn(FinishReason.ERROR, ledger.projector.fault, events)
            return
        if not calls:
            self.end_turn(reason, error, events)
            return
        self.request = None
        for call in calls:
            record = ToolCallRecord(
                ledger.log.take_seq(), ledger.row.turn, call.call_id, call.index, call.name,
                call.arguments, len(calls),
            )  # fmt: skip
            ledger.log.add(record)
            events += ledger.project([record])
        ledger.advance(SessionEvent.TOOL_CALLS_EMITTED)
        rows = ledger.calls.open(ledger.row.turn, calls)
        ledger.commit(events, rows, then=self._parking.after_tool_calls)

    def end_turn(
        self,
        reason: FinishReason,
        error: MoorageError | None = None,
        events: Sequence[pb.Event] = (),
        calls: Sequence[CallRow] = (),
    ) -> None:
        """Exactly one terminal record a turn; the session is idle afterwards."""
        ledger = self._ledger
        usage = (self.turn.usage() if self.turn is not None else pb.Usage()).SerializeToString()
        self.request = None
        self.suspended = False
        seq = ledger.log.take_seq()
        end: Record
        if reason is FinishReason.ERROR:
            known = error or InternalError("the engine ended the turn without saying why")
            end = FailedRecord(seq, ledger.row.turn, to_detail(known).SerializeToString(), usage)
            ledger.advance(SessionEvent.FAILED)
            _log.warning("turn failed", session_id=self._ledger.session_id, code=known.code)
        else:
            end = TurnEndRecord(seq, ledger.row.turn, reason.value, usage)
            cancelled = reason is FinishReason.CANCELLED
            ledger.advance(SessionEvent.CANCELLED if cancelled else SessionEvent.TURN_ENDED)
        ledger.log.add(end)
        ended, self.ended_waiters = self.ended_waiters, []

        def then() -> None:
            resolve(ended)
            self._parking.after_turn()

        ledger.commit([*events, *ledger.project([end])], calls, then=then)

    def abort(self, request: ActiveRequest) -> None:
        """Tell the engine once. Where it no longer runs, there is nothing to abort."""
        if request.aborting:
            return
        request.aborting = True
        try:
            self._services.link.send(Abort(request.request_id))
        except MoorageError as error:
            _log.warning("abort not sent", session_id=self._ledger.session_id, code=error.code)

    def drop_request(self) -> None:
        """Let go of the request, if there is one; what the engine still says of it is not heard."""
        request, self.request = self.request, None
        if request is not None and not self._services.link.withdraw(request.command):
            self.abort(request)

    # -- tool results --------------------------------------------------------------------------

    def accepted(self, rows: Sequence[CallRow]) -> list[pb.Event]:
        ledger = self._ledger
        events: list[pb.Event] = []
        for row in rows:
            record = ToolResultRecord(
                ledger.log.take_seq(), ledger.row.turn, row.call_id, row.content or "",
                row.is_error, row.cancelled,
            )  # fmt: skip
            ledger.log.add(record)
            events += ledger.project([record])
        return events

    def continue_if_complete(self) -> None:
        if self._ledger.state is SessionState.WAITING_TOOLS and not self._ledger.calls.pending():
            self._services.spawn(self._continue_turn())

    async def _continue_turn(self) -> None:
        """All results are in: append them as the template writes them, and decode on."""
        ledger, turn, epoch = self._ledger, self.turn, self.epoch
        unsent = ledger.calls.unsent()
        if turn is None or not unsent:
            return
        error: MoorageError | None = None
        ids: list[int] = []
        try:
            ids = await self._encoder.results(unsent)
        except MoorageError as caught:
            error = caught
        if epoch != self.epoch or ledger.lost or ledger.state is not SessionState.WAITING_TOOLS:
            return
        self.epoch += 1
        if error is None:
            try:
                ids = self._encoder.fit(ids)
            except MoorageError as caught:
                error = caught
        if error is not None:  # the next turn tells the model that its results did not fit
            rows = ledger.calls.replace_unsent(TOO_LONG_CONTENT)
            self.end_turn(FinishReason.ERROR, error, (), rows)
            return
        start = ledger.log.num_tokens
        turn.begin_stretch(start=start + len(ids), input_position=start)
        ledger.advance(SessionEvent.ALL_RESULTS_IN)
        events = ledger.project([ledger.log.input(turn.number, ids, "tool_results")])
        ledger.ends_generated = False
        ledger.commit(events, ledger.calls.consume(), then=self.submit_when_ready)

    # -- cancel and suspend --------------------------------------------------------------------

    def begin_cancel(self) -> None:
        """Abort the running request, or end the turn at once where the engine has none."""
        request = self.request
        self.suspended = False
        if request is None or self._services.link.withdraw(request.command):
            self.end_turn(FinishReason.CANCELLED)
        else:
            request.suspending = False
            self.abort(request)

    def suspend(self) -> None:
        """Stop decoding and park. The turn stays open and goes on with the next stream or the next
        process.
        """
        if self._ledger.state is not SessionState.RUNNING or self.suspended:
            return
        if self.ended_waiters:
            return  # a cancel is under way: the abort in flight ends the turn, it does not pause it
        self.suspended = True
        request = self.request
        if request is not None and self._services.link.withdraw(request.command):
            self.request = None
        elif request is not None:
            request.suspending = True
            self.abort(request)

    def _suspension_done(self, events: list[pb.Event]) -> None:
        """The engine let go of a request that was suspended, not cancelled."""
        self.request = None
        if events:
            self._ledger.commit(events)
        if self.suspended:
            self._parking.begin(self._config.park_tier)
        else:  # somebody attached meanwhile
            self.submit_when_ready()


def resolve(waiters: Sequence[asyncio.Future[None]]) -> None:
    """Wake those who wait for a turn's end."""
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
