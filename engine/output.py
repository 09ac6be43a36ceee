"""What the engine tells sessions: one `StepOutput` a step, all frozen and of plain values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias


class FinishReason(StrEnum):
    """Why a generation ended. The engine sets all but TOOL_CALLS, which sessions derives from the text."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


class FaultCode(StrEnum):
    """Who or what is at fault; sessions maps each to one gRPC status."""

    INVALID = "invalid"
    """The request itself (caller's fault)."""
    TOO_LONG = "too_long"
    """The context does not fit the model's window or the device pool."""
    STATE = "state"
    """The session is not in a state that allows this."""
    BUSY = "busy"
    """Too much waits already: retry after a moment."""
    STORE = "store"
    """A tier could not take or give frames."""
    NUMERIC = "numeric"
    """NaN logits: this sequence cannot go on."""
    INTERNAL = "internal"


@dataclass(frozen=True)
class EngineFault:
    """A typed error as a value: it crosses the border inside an output."""

    code: FaultCode
    message: str


@dataclass(frozen=True)
class TokensBySource:
    """Where each token of the log got its KV from; the fields sum to the log's length at submission."""

    device: int = 0
    host: int = 0
    disk: int = 0
    redis: int = 0
    recomputed: int = 0
    new: int = 0
    """Tokens whose KV never existed: the new input and the pending last token."""
    recomputed_reason: str = ""


@dataclass(frozen=True)
class TokenOutput:
    """One token of one request, or its end without a token."""

    request_id: str
    session_id: str
    position: int
    """Log position of the token (of the token that would have come next, where there is none)."""
    token_id: int | None
    text: str
    """Text released by this token: complete characters, cut before a stop string."""
    finish_reason: FinishReason | None = None
    error: EngineFault | None = None
    sources: TokensBySource | None = None
    """With the request's first token only."""
    num_forwarded: int = 0
    """Tokens the runner has forwarded for this request since its submission; the runner's own count."""
    restore_s: float = 0.0
    """Seconds from the start of the tier reads to KV in place (first token only)."""
    queue_s: float = 0.0
    """Seconds from submission to the first scheduled step, restore included (first token only)."""


@dataclass(frozen=True)
class ParkPrepared:
    """Frames are stored. Commit the manifest with the session row, then send ParkCommitted (or ParkFailed)."""

    session_id: str
    generation: int
    manifest: bytes
    tier: str
    num_tokens: int
    num_bytes: int
    seconds: float
    degraded: str = ""
    """Why another tier than the asked one was taken; empty if it was not."""


@dataclass(frozen=True)
class ParkRefused:
    """Nothing was stored and the KV stays where it is."""

    session_id: str
    generation: int
    error: EngineFault


@dataclass(frozen=True)
class ParkDone:
    """Device blocks were freed (0 where the session had become active again meanwhile)."""

    session_id: str
    generation: int
    num_freed_blocks: int


@dataclass(frozen=True)
class RestoreDone:
    """KV is on the device as far as `sources` says; what is missing will be recomputed by the next turn."""

    session_id: str
    sources: TokensBySource
    num_bytes: int
    seconds: float
    error: EngineFault | None = None


@dataclass(frozen=True)
class Inspection:
    """One session's device blocks and the whole pool, counted on the engine thread after check_integrity()."""

    inspection_id: str
    session_id: str
    session_locked_blocks: int
    session_in_use_blocks: int
    free_blocks: int
    evictable_blocks: int
    locked_blocks: int
    in_use_blocks: int
    total_blocks: int
    free_blocks_not_nan: int | None
    """Free blocks that hold anything but NaN; None where freed blocks are not NaN-filled."""
    num_nodes: int
    num_splits: int
    tokens_forwarded: int
    forward_passes: int
    integrity_error: str = ""


@dataclass(frozen=True)
class EngineFailed:
    """The engine thread ended; no further output will come."""

    error: EngineFault


EngineEvent: TypeAlias = (
    ParkPrepared | ParkRefused | ParkDone | RestoreDone | Inspection | EngineFailed
)


@dataclass(frozen=True)
class StepOutput:
    """Everything one step of the engine has to say."""

    step: int
    tokens: tuple[TokenOutput, ...] = ()
    events: tuple[EngineEvent, ...] = ()


@dataclass(frozen=True)
class EngineStatistics:
    """A snapshot taken at the end of a step; readable from any thread."""

    steps: int = 0
    tokens_forwarded: int = 0
    """Rows that went through the decoder, counted by the runner."""
    forward_passes: int = 0
    tokens_sampled: int = 0
    largest_batch: int = 0
    """Most sequences in one forward pass."""
    num_running: int = 0
    num_waiting: int = 0
    num_held: int = 0
    """Idle contexts that keep device blocks."""
    num_preempted: int = 0
    free_blocks: int = 0
    evictable_blocks: int = 0
    locked_blocks: int = 0
    in_use_blocks: int = 0
    total_blocks: int = 0
    num_nodes: int = 0
    num_splits: int = 0
    bytes_parked: int = 0
    bytes_restored: int = 0
    tokens_device: int = 0
    tokens_host: int = 0
    tokens_disk: int = 0
    tokens_redis: int = 0
    tokens_recomputed: int = 0
    tokens_new: int = 0
    store_failures: int = 0
    runs_demoted: int = 0
    """Runs that eviction moved to host memory."""


@dataclass(frozen=True)
class ModelInfo:
    """What sessions must know of the loaded model."""

    name: str
    context_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    fingerprint: str
    """Hex; part of every cache key."""
    block_size: int
    dtype: str
    chat_template: str
    special_tokens: tuple[str, ...]
    deterministic: bool
