"""Records → events, as pure code: the one path by which live streams and replays learn what tokens
mean.

The projector is sans-IO. Fed the records of a session from the start of a turn, it gives one event
per record. Its state is that of the current *stretch* (the tokens between two inputs): an
incremental detokeniser and a tool-call parser, both pure functions of what they are fed. So the
events behind any sequence number are the same whether they were projected live, after a reconnect,
or by another process.

What the end of a stretch releases (a held-back possible marker, a truncated character) belongs to
no token. It travels as `tail` of the record that ends the stretch: the first tool call, TurnEnd or
Failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from moorage.engine import unpack_tokens
from moorage.sessions.errors import InternalError, MoorageError
from moorage.sessions.proto import sessions_pb2 as pb
from moorage.sessions.token_log import (
    FailedRecord,
    InputRecord,
    ParkedRecord,
    Record,
    ResumedRecord,
    TokenRecord,
    ToolCallRecord,
    ToolResultRecord,
    TurnEndRecord,
    TurnStartRecord,
)
from moorage.tools_bridge.call import ToolCall
from moorage.tools_bridge.parsers.base import ParseDelta, ToolCallParser

CONTEXT_IDS = 64
"""Ids of the last input that the detokeniser sees before the first token: a character is at most 4
tokens, the spacing rule looks at one. Taken from that input alone, so a replay from the turn's
start sees the same ones."""

FINISH_REASONS: dict[str, pb.FinishReason] = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "cancelled": pb.FINISH_REASON_CANCELLED,
    "deadline": pb.FINISH_REASON_DEADLINE,
    "error": pb.FINISH_REASON_ERROR,
}


class Decoded(Protocol):
    """What the detokeniser released."""

    @property
    def text(self) -> str: ...
    @property
    def stopped(self) -> bool: ...


class Decoder(Protocol):
    """The engine's incremental detokeniser."""

    def feed(self, token_id: int, /) -> Decoded: ...
    def finish(self) -> str: ...


DecodeStream = Callable[[Sequence[int], tuple[str, ...]], Decoder]
"""(ids before, stop strings) -> decoder: `Engine.decode_stream`."""

NewParser = Callable[[int, int], ToolCallParser]
"""(turn, calls of this turn so far) -> parser whose call ids follow from (session, turn, index)
alone.
"""


class EventProjector:
    """One pass over a session's records. `project` never raises for what a model wrote: see
    `fault`.
    """

    def __init__(self, session_id: str, decode_stream: DecodeStream, new_parser: NewParser) -> None:
        self._session_id = session_id
        self._decode_stream = decode_stream
        self._new_parser = new_parser
        self._stop: tuple[str, ...] = ()
        self._ids_before: list[int] = []
        self._calls_in_turn = 0
        self._decoder: Decoder | None = None
        self._parser: ToolCallParser | None = None
        self._stopped = False
        self._closed = True
        self._tail = pb.Delta()
        self._completed: list[ToolCall] = []
        self.fault: MoorageError | None = None
        """Set when detokeniser or parser raised in this stretch: its later tokens carry ids and no
        text.
        """

    def project(self, record: Record) -> pb.Event:
        """The one event of `record`. Records must come in order, from the start of a turn on."""
        event = pb.Event(
            session_id=self._session_id,
            turn=record.turn,
            first_seq=record.seq,
            last_seq=record.seq,
        )
        match record:
            case InputRecord():
                self._begin_input(record, event)
            case TokenRecord():
                event.token_ids.append(record.token_id)
                event.delta.CopyFrom(self._token(record))
            case TurnStartRecord():
                self._stop = tuple(record.sampling.get("stop", ()))
                self._calls_in_turn = 0
                self._completed = []
                event.turn_start.CopyFrom(
                    pb.TurnStart(
                        sampling=sampling_to_proto(record.sampling), num_prompt=record.num_prompt
                    )
                )
            case ToolCallRecord():
                self.close_stretch(truncated=False)
                self._calls_in_turn += 1
                event.tool_call_ready.CopyFrom(
                    pb.ToolCallReady(
                        call_id=record.call_id,
                        index=record.index,
                        name=record.name,
                        arguments_json=record.arguments,
                        num_calls=record.num_calls,
                        tail=self._take_tail(),
                    )
                )
            case ToolResultRecord():
                event.tool_result_accepted.CopyFrom(
                    pb.ToolResultAccepted(
                        call_id=record.call_id,
                        is_error=record.is_error,
                        cancelled=record.cancelled,
                    )
                )
            case ParkedRecord():
                event.parked.CopyFrom(
                    pb.Parked(
                        tier=record.tier,
                        num_tokens=record.num_tokens,
                        num_bytes=record.num_bytes,
                        duration_s=record.duration_s,
                        degraded=record.degraded,
                    )
                )
            case ResumedRecord():
                event.resumed.CopyFrom(
                    pb.Resumed(
                        sources=pb.TokenSources(**record.sources),
                        num_forwarded=record.num_forwarded,
                        restore_s=record.restore_s,
                        queue_s=record.queue_s,
                        ttft_s=record.ttft_s,
                    )
                )
            case TurnEndRecord():
                self.close_stretch(truncated=record.finish_reason != "stop")
                event.turn_end.CopyFrom(
                    pb.TurnEnd(
                        finish_reason=FINISH_REASONS.get(
                            record.finish_reason, pb.FINISH_REASON_UNSPECIFIED
                        ),
                        usage=pb.Usage.FromString(record.usage),
                        tail=self._take_tail(),
                    )
                )
            case FailedRecord():
                self.close_stretch(truncated=True)
                event.failed.CopyFrom(
                    pb.Failed(
                        error=pb.ErrorDetail.FromString(record.error),
                        usage=pb.Usage.FromString(record.usage),
                        tail=self._take_tail(),
                    )
                )
        return event

    def close_stretch(self, *, truncated: bool) -> tuple[ToolCall, ...]:
        """End the stretch: flush detokeniser and parser into the tail; the complete calls of the
        stretch.

        Idempotent. A truncated stretch completes no call (case A12).
        """
        if not self._closed:
            self._closed = True
            try:
                if self._decoder is not None and self._parser is not None and self.fault is None:
                    rest = "" if self._stopped else self._decoder.finish()
                    self._absorb(self._tail, self._parser.feed(rest))
                    self._absorb(self._tail, self._parser.finish(truncated))
            except Exception as error:
                self._break(error)
            self._decoder = self._parser = None
        return tuple(self._completed) if self.fault is None else ()

    def _begin_input(self, record: InputRecord, event: pb.Event) -> None:
        ids = unpack_tokens(record.packed_ids)
        self._ids_before = ids[-CONTEXT_IDS:]
        self._decoder = self._parser = None
        self._closed, self._stopped = True, False
        self._completed = []
        self._tail = pb.Delta()
        self.fault = None
        event.token_ids.extend(ids)
        event.input_accepted.CopyFrom(pb.InputAccepted(source=record.source, num_tokens=len(ids)))

    def _token(self, record: TokenRecord) -> pb.Delta:
        delta = pb.Delta()
        if self.fault is not None:
            return delta
        try:
            if self._decoder is None or self._parser is None:
                self._decoder = self._decode_stream(self._ids_before, self._stop)
                self._parser = self._new_parser(record.turn, self._calls_in_turn)
                self._closed = False
            decoded = self._decoder.feed(record.token_id)
            self._stopped = self._stopped or decoded.stopped
            self._absorb(delta, self._parser.feed(decoded.text))
        except Exception as error:  # one bad stream must not take the service down (cases B8, F9)
            self._break(error)
        return delta

    def _break(self, error: Exception) -> None:
        self.fault = InternalError(
            f"the reply could not be read ({type(error).__name__}): its token ids are in the log"
        )

    def _absorb(self, delta: pb.Delta, parsed: ParseDelta) -> None:
        delta.text += parsed.text
        delta.reasoning += parsed.reasoning
        for call in parsed.tool_calls:
            delta.tool_calls.add(
                call_id=call.call_id,
                index=call.index,
                name=call.name or "",
                arguments_delta=call.arguments_delta,
                failed=call.failed,
            )
        self._completed.extend(parsed.completed)

    def _take_tail(self) -> pb.Delta:
        tail, self._tail = self._tail, pb.Delta()
        return tail


def sampling_to_proto(values: dict[str, object]) -> pb.SamplingParams:
    """The complete sampling of a turn, as logged."""
    known = {f.name for f in pb.SamplingParams.DESCRIPTOR.fields}
    return pb.SamplingParams(**{k: v for k, v in values.items() if k in known})  # type: ignore[arg-type]


def merge_deltas(first: pb.Event, second: pb.Event, max_tokens: int) -> bool:
    """Append `second` to `first` where both are deltas of one turn and consecutive; whether it was
    done.

    A merged event covers at most `max_tokens` tokens. Consecutive pieces of one call become one
    piece.
    """
    if (
        first.WhichOneof("kind") != "delta"
        or second.WhichOneof("kind") != "delta"
        or first.turn != second.turn
        or first.last_seq + 1 != second.first_seq
        or len(first.token_ids) + len(second.token_ids) > max_tokens
    ):
        return False
    first.last_seq = second.last_seq
    first.token_ids.extend(second.token_ids)
    first.delta.text += second.delta.text
    first.delta.reasoning += second.delta.reasoning
    for piece in second.delta.tool_calls:
        last = first.delta.tool_calls[-1] if first.delta.tool_calls else None
        if last is not None and last.call_id == piece.call_id and not last.failed:
            last.name = last.name or piece.name
            last.arguments_delta += piece.arguments_delta
            last.failed = piece.failed
        else:
            first.delta.tool_calls.append(piece)
    return True
