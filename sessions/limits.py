"""Every bound of the service, with its unit, its default and the reason. Fixed when the server
starts.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds on what a caller may send, on what is buffered, and on how long anything waits."""

    max_message_bytes: int = 4 << 20
    """Bytes of one gRPC message, either way. gRPC's own default: a client with default settings can
    read everything we send, and an oversized one fails before it is parsed."""
    max_tools: int = 128
    """Tool schemas of one session."""
    max_messages: int = 1024
    """Messages of one Generate call."""
    max_rendered_chars: int = 8 << 20
    """Characters that a chat template may write: twice the largest message, so only a runaway loop
    meets it.
    """
    max_idempotency_key_len: int = 128
    """Characters of an idempotency key."""
    subscriber_events: int = 256
    """Events buffered for one stream before its deltas are merged; after as many unmergeable ones
    the reader is served from the log instead."""
    merge_tokens: int = 64
    """Tokens that one merged delta covers at most: keeps an event far below max_message_bytes."""
    max_streams_per_session: int = 16
    """Attached streams; one more is refused."""
    engine_outbox: int = 4096
    """Commands kept while the engine's mailbox is full; one more is refused with EngineBusy."""
    submit_wait_s: float = 5.0
    """Seconds that an accepted turn waits for a place in the engine's mailbox before it fails as
    EngineBusy.
    """
    park_wait_s: float = 15.0
    """Seconds that a turn waits for a park in flight: above the engine's tier deadline of 10 s, so
    the park settles first; then the turn goes on without it."""
    cancel_wait_s: float = 5.0
    """Seconds that Cancel waits for the engine's acknowledgement (one step)."""
    command_wait_s: float = 20.0
    """Seconds that Park, Resume and inspection wait for the engine."""
    commit_wait_s: float = 10.0
    """Seconds that a call waits for its records to be durable."""
    drain_s: float = 20.0
    """Grace of a shutdown: running turns may end; what still runs then is resumable from its log.
    """
    idle_sessions: int = 4096
    """Sessions without work kept in memory; the least recently used ones are dropped and loaded
    when needed.
    """
    pending_commits: int = 65536
    """Writes that may wait for the committer: about a thousand steps of 64 sessions. Beyond, the
    store counts as away and the sessions at fault are reloaded from it."""
