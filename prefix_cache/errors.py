"""Typed errors of the prefix cache. Who is at fault is in the type.

CacheError
├── InvalidInput           the caller's value breaks a stated rule
│   ├── InvalidSessionId
│   ├── TableReleased      a table that was released already, or that another cache made
│   └── CommitMismatch     the log does not continue what the table holds
├── OutOfBlocks            the device pool cannot give the blocks; nothing was changed
├── IntegrityError         our own books are wrong: a defect, never a caller's mistake
│   └── DoubleFree · ForeignBlock · NotLocked
├── FrameMismatch          stored KV is not what was asked for: a miss, never fatal
├── ManifestMismatch       the same for a manifest
└── StoreError             a tier is at fault
    ├── StoreUnavailable · StoreTimeout · StoreFull · StoreRefused · FrameTooLarge
    └── QueueFull · WorkersClosed
"""

from __future__ import annotations

from enum import StrEnum


class CacheError(Exception):
    """Root of everything the prefix cache raises on purpose."""


class InvalidInput(CacheError, ValueError):
    """A value that the caller gave breaks a stated rule; the message names value and limit."""


class InvalidSessionId(InvalidInput):
    """A session id that may not stand in a key or path."""


class TableReleased(InvalidInput):
    """A block table that was released before, or that another cache opened."""


class CommitMismatch(InvalidInput):
    """The token log does not continue the blocks that the table has committed."""


class OutOfBlocks(CacheError):
    """Free and evictable blocks together do not cover a request. Nothing was changed."""


class IntegrityError(CacheError):
    """The cache's own books disagree: a defect here, not a caller's mistake."""


class DoubleFree(IntegrityError):
    """A block was given back that is free already."""


class ForeignBlock(IntegrityError):
    """A block id that this pool never had, or that stands in another owner's name."""


class NotLocked(IntegrityError):
    """An unlock without a lock. Counters are unchanged."""


class MismatchReason(StrEnum):
    """What was wrong with stored bytes; each is a miss."""

    TRUNCATED = "truncated"
    MAGIC = "magic"
    VERSION = "version"
    CHECKSUM = "checksum"
    HEADER = "header"
    """The header is not a well-formed one although its checksum fits."""
    FINGERPRINT = "fingerprint"
    """Another model, config, numerics profile or run size."""
    NAMESPACE = "namespace"
    LINEAGE = "lineage"
    """Another chain: its root, parent hash or last hash differ."""
    TOKENS = "tokens"
    """The chain fits but the covered token ids do not."""
    POSITION = "position"
    """Other blocks or another number of tokens than asked."""
    GEOMETRY = "geometry"
    """Other block size, layers, heads or head dim."""
    DTYPE = "dtype"
    CODEC = "codec"
    GENERATION = "generation"
    KEY = "key"
    """The frame was written under another key."""
    SESSION = "session"
    INCONSISTENT = "inconsistent"
    """A manifest whose frames do not join up."""


class FrameMismatch(CacheError):
    """Stored KV that is not what was asked for. It is a miss: recompute, never use, never fail."""

    def __init__(self, reason: MismatchReason, detail: str) -> None:
        super().__init__(f"frame refused ({reason}): {detail}")
        self.reason = reason


class ManifestMismatch(CacheError):
    """A manifest that cannot be read or belongs to something else. It is a miss of the whole
    context.
    """

    def __init__(self, reason: MismatchReason, detail: str) -> None:
        super().__init__(f"manifest refused ({reason}): {detail}")
        self.reason = reason


class StoreError(CacheError):
    """A tier could not do its work; names the store, never its credentials."""


class StoreUnavailable(StoreError):
    """Nothing answers, the connection broke, or the store refuses this client. Retryable."""


class StoreTimeout(StoreError):
    """The operation's deadline passed. Retryable; whether it took effect is unknown."""


class StoreFull(StoreError):
    """The store is at its memory bound. Free space or raise the bound."""


class StoreRefused(StoreError):
    """The store answered with an error that is neither of the above."""


class FrameTooLarge(StoreError):
    """A frame over the store's value bound: lower `run_blocks`."""


class QueueFull(StoreError):
    """A tier's job queue is at its bound. Nothing was accepted; retry after a moment."""


class WorkersClosed(StoreError):
    """The tier workers are closed; the job was not done."""
