"""Why KV that was stored cannot be used. None of it is an error: the rest is computed."""

from __future__ import annotations

from enum import StrEnum

from moorage.prefix_cache.errors import (
    CacheError,
    FrameMismatch,
    MismatchReason,
    StoreTimeout,
    WorkersClosed,
)


class MissReason(StrEnum):
    """Why a load stopped before the manifest's end. None of them is an error: the rest is
    recomputed.
    """

    NOT_STORED = "not_stored"
    """The frame is gone: evicted, expired, or the store was restarted."""
    DAMAGED = "damaged"
    """Truncated, changed, or not a frame at all."""
    INCOMPATIBLE = "incompatible"
    """Another model, layout, dtype, codec or format version."""
    OTHER_CONTENT = "other_content"
    """A sound frame of other tokens, another session, generation or namespace."""
    LOG_DIFFERS = "log_differs"
    """The token log no longer continues what was parked."""
    STORE_FAILED = "store_failed"
    """The store could not be reached or answered with an error."""
    TIMED_OUT = "timed_out"
    TIER_MISSING = "tier_missing"
    """The manifest names a tier that this process has not."""
    CLOSED = "closed"
    """The workers closed before the load's turn."""


_REASONS = {
    MismatchReason.TRUNCATED: MissReason.DAMAGED,
    MismatchReason.MAGIC: MissReason.DAMAGED,
    MismatchReason.CHECKSUM: MissReason.DAMAGED,
    MismatchReason.HEADER: MissReason.DAMAGED,
    MismatchReason.VERSION: MissReason.INCOMPATIBLE,
    MismatchReason.FINGERPRINT: MissReason.INCOMPATIBLE,
    MismatchReason.GEOMETRY: MissReason.INCOMPATIBLE,
    MismatchReason.DTYPE: MissReason.INCOMPATIBLE,
    MismatchReason.CODEC: MissReason.INCOMPATIBLE,
}


class Miss(Exception):
    """Ends a load at the first hole."""

    def __init__(self, reason: MissReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def miss_for(error: FrameMismatch) -> Miss:
    """Of a frame that is not what was promised."""
    return Miss(_REASONS.get(error.reason, MissReason.OTHER_CONTENT), str(error))


def miss_of(error: CacheError) -> MissReason:
    """Of a store that did not answer."""
    if isinstance(error, StoreTimeout):
        return MissReason.TIMED_OUT
    if isinstance(error, WorkersClosed):
        return MissReason.CLOSED
    return MissReason.STORE_FAILED
