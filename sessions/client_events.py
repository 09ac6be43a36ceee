"""What a client sees of a session: small frozen values, one a thing that happened.

The wire merges what one record releases into one event; here it is flat. Every value carries the
range of sequence numbers of its wire event. Token ids stand in the first value of a wire event, so
that all of them, joined, are the log.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from moorage.sessions.errors import MoorageError, from_detail
from moorage.sessions.proto import sessions_pb2 as pb


@dataclass(frozen=True)
class _Event:
    turn: int
    first_seq: int
    """The range of records that the wire event covers, both included."""
    last_seq: int
    token_ids: tuple[int, ...] = field(kw_only=True, default=())


@dataclass(frozen=True)
class TextDelta(_Event):
    """Text for the reader; may be empty where a token completed no character."""

    text: str = ""


@dataclass(frozen=True)
class ReasoningDelta(_Event):
    """The model's thinking."""

    text: str = ""


@dataclass(frozen=True)
class ToolCallDelta(_Event):
    """A piece of a call that is being written; only ToolCallReady is to be run."""

    call_id: str = ""
    index: int = 0
    name: str = ""
    """In the call's first piece."""
    arguments_delta: str = ""
    failed: bool = False
    """The call turned out malformed."""


@dataclass(frozen=True)
class ToolCallReady(_Event):
    """A complete call; run it once."""

    call_id: str = ""
    index: int = 0
    name: str = ""
    arguments: str = ""
    """JSON text as the model wrote it."""
    num_calls: int = 1
    """Calls that the turn waits for."""


@dataclass(frozen=True)
class ToolResultAccepted(_Event):
    """A result is durable."""

    call_id: str = ""
    is_error: bool = False
    cancelled: bool = False


@dataclass(frozen=True)
class Parked(_Event):
    """KV left the device."""

    tier: str = ""
    num_tokens: int = 0
    num_bytes: int = 0
    duration_s: float = 0.0
    degraded: str = ""


@dataclass(frozen=True)
class TokenSources:
    """Where each token's KV came from, in tokens."""

    device: int = 0
    host: int = 0
    disk: int = 0
    redis: int = 0
    recomputed: int = 0
    new: int = 0
    recomputed_reason: str = ""

    @classmethod
    def from_proto(cls, value: pb.TokenSources) -> TokenSources:
        """The wire's form."""
        return cls(
            value.device, value.host, value.disk, value.redis, value.recomputed, value.new,
            value.recomputed_reason,
        )  # fmt: skip


@dataclass(frozen=True)
class Resumed(_Event):
    """KV was in place again and the first token behind it was drawn."""

    sources: TokenSources = TokenSources()
    num_forwarded: int = 0
    """The runner's own count of tokens forwarded up to that token."""
    restore_s: float = 0.0
    queue_s: float = 0.0
    ttft_s: float = 0.0


@dataclass(frozen=True)
class TurnStart(_Event):
    """What is needed to repeat the turn."""

    seed: int = 0
    num_prompt: int = 0


@dataclass(frozen=True)
class InputAccepted(_Event):
    """Input became part of the log."""

    source: str = ""
    num_tokens: int = 0


@dataclass(frozen=True)
class StretchUsage:
    """The part of a turn between two inputs."""

    sources: TokenSources
    num_forwarded: int
    num_generated: int
    ttft_s: float
    decode_s: float
    restore_s: float
    queue_s: float


@dataclass(frozen=True)
class Usage:
    """What a turn cost."""

    num_input: int = 0
    num_generated: int = 0
    stretches: tuple[StretchUsage, ...] = ()

    @classmethod
    def from_proto(cls, value: pb.Usage) -> Usage:
        """The wire's form."""
        return cls(
            value.num_input,
            value.num_generated,
            tuple(
                StretchUsage(
                    TokenSources.from_proto(s.sources), s.num_forwarded, s.num_generated, s.ttft_s,
                    s.decode_s, s.restore_s, s.queue_s,
                )
                for s in value.stretches
            ),
        )  # fmt: skip


@dataclass(frozen=True)
class TurnEnd(_Event):
    """The turn is over."""

    finish_reason: str = ""
    """One of stop, length, cancelled, deadline."""
    usage: Usage = Usage()


@dataclass(frozen=True)
class Failed(_Event):
    """The turn ended with an error; the session is usable."""

    error: MoorageError = field(default_factory=lambda: MoorageError("unknown"))
    usage: Usage = Usage()


Event: TypeAlias = (
    TextDelta
    | ReasoningDelta
    | ToolCallDelta
    | ToolCallReady
    | ToolResultAccepted
    | Parked
    | Resumed
    | TurnStart
    | InputAccepted
    | TurnEnd
    | Failed
)

_FINISH_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_CANCELLED: "cancelled",
    pb.FINISH_REASON_DEADLINE: "deadline",
    pb.FINISH_REASON_ERROR: "error",
}


def flatten(event: pb.Event) -> Iterator[Event]:
    """The values of one wire event, in order. A kind that a newer server sends is passed over."""
    at = (event.turn, event.first_seq, event.last_seq)
    ids = tuple(event.token_ids)
    match event.WhichOneof("kind"):
        case "delta":
            pieces = list(_pieces(at, event.delta, ids))
            yield from pieces or [TextDelta(*at, token_ids=ids)]
        case "tool_call_ready":
            ready = event.tool_call_ready
            yield from _pieces(at, ready.tail, ())
            yield ToolCallReady(
                *at, ready.call_id, ready.index, ready.name, ready.arguments_json, ready.num_calls
            )
        case "tool_result_accepted":
            result = event.tool_result_accepted
            yield ToolResultAccepted(*at, result.call_id, result.is_error, result.cancelled)
        case "parked":
            parked = event.parked
            yield Parked(
                *at,
                parked.tier,
                parked.num_tokens,
                parked.num_bytes,
                parked.duration_s,
                parked.degraded,
            )
        case "resumed":
            resumed = event.resumed
            yield Resumed(
                *at, TokenSources.from_proto(resumed.sources), resumed.num_forwarded,
                resumed.restore_s, resumed.queue_s, resumed.ttft_s,
            )  # fmt: skip
        case "turn_start":
            yield TurnStart(*at, event.turn_start.sampling.seed, event.turn_start.num_prompt)
        case "input_accepted":
            accepted = event.input_accepted
            yield InputAccepted(*at, accepted.source, accepted.num_tokens, token_ids=ids)
        case "turn_end":
            end = event.turn_end
            yield from _pieces(at, end.tail, ())
            reason = _FINISH_REASONS.get(end.finish_reason, "unknown")
            yield TurnEnd(*at, reason, Usage.from_proto(end.usage))
        case "failed":
            failed = event.failed
            yield from _pieces(at, failed.tail, ())
            yield Failed(*at, from_detail(failed.error), Usage.from_proto(failed.usage))
        case _:
            pass


def _pieces(at: tuple[int, int, int], delta: pb.Delta, ids: tuple[int, ...]) -> Iterator[Event]:
    if delta.reasoning:
        yield ReasoningDelta(*at, delta.reasoning, token_ids=ids)
        ids = ()
    if delta.text:
        yield TextDelta(*at, delta.text, token_ids=ids)
        ids = ()
    for call in delta.tool_calls:
        yield ToolCallDelta(
            *at,
            call.call_id,
            call.index,
            call.name,
            call.arguments_delta,
            call.failed,
            token_ids=ids,
        )
        ids = ()
