"""Every error a session can give, and the one table from error to gRPC status.

The tree is by who is at fault: `CallerError` (repeat it and it fails again), `StateError` (the
session is not where the call needs it), `UnavailableError` (repeat it later), `InternalError`
(ours). Server and client share these classes: the server packs an error into the trailing metadata,
the client raises the same class again. No torch and no engine here: the client imports this module.
"""

from __future__ import annotations

from typing import Any, ClassVar

import grpc

from moorage.sessions.proto import sessions_pb2 as pb

ERROR_METADATA_KEY = "moorage-error-bin"
"""Trailing metadata that carries a packed `ErrorDetail`; `-bin` lets gRPC carry bytes."""

MAX_ERROR_MESSAGE_LEN = 1000
"""Characters of a message that travel: gRPC's default limit for all metadata is 8 KiB."""


class MoorageError(Exception):
    """Root of the tree. `code` is stable and machine-readable; `field` is a path into
    the request.
    """

    code: ClassVar[str] = "internal"

    def __init__(self, message: str, *, field: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s


class CallerError(MoorageError):
    """The call itself is at fault; repeating it gives the same answer."""

    code = "invalid_argument"


class InvalidArgument(CallerError):
    """A malformed field; `field` is its path."""


class SessionNotFound(CallerError):
    """No such session for this tenant. Never raised for lost KV: that is recomputed."""

    code = "session_not_found"


class CallNotFound(CallerError):
    """A tool result for a call id that the session never announced."""

    code = "tool_call_not_found"


class ToolResultConflict(CallerError):
    """The call was answered already, with another result; the first one stands."""

    code = "tool_result_conflict"


class ContextTooLong(CallerError):
    """The log would not fit the model's window. Rule: INVALID_ARGUMENT, for no retry can help."""

    code = "context_too_long"


class MessageTooLarge(CallerError):
    """A message above the size limit. Rule: RESOURCE_EXHAUSTED, as gRPC itself answers an oversized
    frame.
    """

    code = "message_too_large"


class SequenceOutOfRange(CallerError):
    """Attach after a sequence number that the session has not reached."""

    code = "sequence_out_of_range"


class Unauthenticated(CallerError):
    """The bearer token is missing or unknown."""

    code = "unauthenticated"


class TemplateError(CallerError):
    """The chat template refused the messages, or cannot extend a log."""

    code = "template_error"


class StateError(MoorageError):
    """The session is not in a state that allows the call; nothing changed."""

    code = "wrong_state"


class SessionBusy(StateError):
    """A turn runs already: one turn at a time in a session."""

    code = "session_busy"


class ToolsPending(StateError):
    """The turn waits for tool results: submit or cancel them."""

    code = "tools_pending"


class SessionClosed(StateError):
    """Close was called; the log stays readable, nothing else is possible."""

    code = "session_closed"


class UnavailableError(MoorageError):
    """Nothing is wrong with the call; repeat it after `retry_after_s`."""

    code = "unavailable"


class ServerDraining(UnavailableError):
    """The server is shutting down and takes no new work."""

    code = "draining"


class StoreUnavailable(UnavailableError):
    """The session store could not be read or written: nothing was accepted."""

    code = "store_unavailable"


class EngineBusy(UnavailableError):
    """The engine's queue is at its bound: RESOURCE_EXHAUSTED with a retry time."""

    code = "engine_busy"


class TierUnavailable(UnavailableError):
    """KV frames could not be stored; the KV stays on the device and the session is usable."""

    code = "tier_unavailable"


class EngineStopped(UnavailableError):
    """The engine thread ended; running sessions go on after a restart of the server."""

    code = "engine_stopped"


class DeadlineExceeded(MoorageError):
    """The call's deadline passed."""

    code = "deadline_exceeded"


class Cancelled(MoorageError):
    """The call was cancelled."""

    code = "cancelled"


class InternalError(MoorageError):
    """Our fault. The message names no secret and no prompt text."""

    code = "internal"


class TurnFailed(InternalError):
    """A turn ended with an error; the session is idle and usable."""

    code = "turn_failed"


class DataDirectoryLocked(MoorageError):
    """Another process holds the data directory."""

    code = "data_directory_locked"


class SchemaVersionMismatch(MoorageError):
    """The database was written by another version that this one cannot read."""

    code = "schema_version"


class StaleWrite(MoorageError):
    """Compare-and-set failed: another owner wrote the session, or our fencing token is old."""

    code = "stale_write"

    def __init__(self, message: str, *, session_id: str) -> None:
        super().__init__(message)
        self.session_id = session_id


class IllegalTransition(MoorageError):
    """A state event that the table does not have: a bug, not a caller's mistake."""

    code = "illegal_transition"


_STATUS: tuple[tuple[type[MoorageError], grpc.StatusCode], ...] = (
    (SessionNotFound, grpc.StatusCode.NOT_FOUND),
    (CallNotFound, grpc.StatusCode.NOT_FOUND),
    (ToolResultConflict, grpc.StatusCode.ALREADY_EXISTS),
    (ContextTooLong, grpc.StatusCode.INVALID_ARGUMENT),
    (MessageTooLarge, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (SequenceOutOfRange, grpc.StatusCode.OUT_OF_RANGE),
    (Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (CallerError, grpc.StatusCode.INVALID_ARGUMENT),
    (StateError, grpc.StatusCode.FAILED_PRECONDITION),
    (EngineBusy, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (StaleWrite, grpc.StatusCode.ABORTED),
    (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (Cancelled, grpc.StatusCode.CANCELLED),
    (MoorageError, grpc.StatusCode.INTERNAL),
)
"""The table. First match wins, so a subclass stands above its parent."""

_FAULTS: dict[str, type[MoorageError]] = {
    "invalid": InvalidArgument,
    "too_long": ContextTooLong,
    "state": SessionBusy,
    "busy": EngineBusy,
    "store": TierUnavailable,
    "numeric": TurnFailed,
    "internal": InternalError,
}
"""The engine's fault codes (`engine/output.py`) by value, so that this module needs no engine."""


def status_of(error: BaseException) -> grpc.StatusCode:
    """The gRPC status of any exception; what the table does not know is INTERNAL."""
    for cls, status in _STATUS:
        if isinstance(error, cls):
            return status
    return (
        grpc.StatusCode.DEADLINE_EXCEEDED
        if isinstance(error, TimeoutError)
        else (grpc.StatusCode.INTERNAL)
    )


def as_moorage_error(error: BaseException) -> MoorageError:
    """Foreign exceptions mapped once, at the border. The text of an unexpected one stays on the
    server.
    """
    if isinstance(error, MoorageError):
        return error
    if isinstance(error, TimeoutError):
        return DeadlineExceeded(str(error) or "the call's deadline passed: allow a longer timeout")
    return InternalError(f"unexpected {type(error).__name__}; the server's log has the details")


def from_fault(code: str, message: str) -> MoorageError:
    """An engine fault (`EngineFault.code`, `.message`) as an exception."""
    return _FAULTS.get(code, InternalError)(message)


def to_detail(error: BaseException) -> pb.ErrorDetail:
    """What travels in `Failed` and in the trailing metadata."""
    known = as_moorage_error(error)
    return pb.ErrorDetail(
        code=known.code,
        message=known.message[:MAX_ERROR_MESSAGE_LEN],
        field=known.field,
        retry_after_s=known.retry_after_s,
    )


def _classes(root: type[MoorageError]) -> dict[str, type[MoorageError]]:
    found: dict[str, type[MoorageError]] = {}
    for cls in root.__subclasses__():
        found |= _classes(cls)
    # A class that only inherits its parent's code (InvalidArgument) is the one that is raised for
    # it.
    return found if root.code in found else found | {root.code: root}


def from_detail(detail: pb.ErrorDetail) -> MoorageError:
    """The exception that `to_detail` packed; an unknown code (a newer server) becomes
    InternalError.
    """
    cls = _classes(MoorageError).get(detail.code, InternalError)
    if cls is StaleWrite:
        return InternalError(detail.message)
    return cls(detail.message, field=detail.field, retry_after_s=detail.retry_after_s)


def from_rpc_error(error: grpc.RpcError) -> MoorageError:
    """The typed exception behind a failed call: from our metadata, or else from the bare status."""
    known: Any = error  # grpc and grpc.aio errors share these methods, not a typed base
    trailing = known.trailing_metadata() if hasattr(known, "trailing_metadata") else None
    for key, value in trailing or ():
        if key == ERROR_METADATA_KEY:
            return from_detail(pb.ErrorDetail.FromString(bytes(value)))
    status: grpc.StatusCode = known.code() if hasattr(known, "code") else grpc.StatusCode.UNKNOWN
    text = str(known.details() if hasattr(known, "details") else "") or status.name
    match status:
        case grpc.StatusCode.UNAVAILABLE:
            return UnavailableError(
                f"the server cannot be reached (does `moorage serve` run there?): {text}"
            )
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(f"the call's deadline passed: {text}")
        case grpc.StatusCode.CANCELLED:
            return Cancelled(text)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return MessageTooLarge(text)
        case grpc.StatusCode.UNAUTHENTICATED:
            return Unauthenticated(text)
        case _:
            return InternalError(f"{status.name}: {text}")
