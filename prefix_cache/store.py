"""What every tier below the device can do. Synchronous; called on tier workers, never on the engine
thread.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from moorage.prefix_cache.block import Bytes, Namespace
from moorage.prefix_cache.errors import InvalidSessionId
from moorage.prefix_cache.frame import Frame, FrameKey

_SESSION_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


def validate_session_id(session_id: str) -> str:
    """The id itself. Raises InvalidSessionId for anything that could reach another key, slot or
    path.

    The message shows at most 32 characters of it, escaped.
    """
    if _SESSION_ID.fullmatch(session_id) is None:
        raise InvalidSessionId(
            f"session id {session_id[:32]!r} ({len(session_id)} characters) is not allowed:"
            " 1 to 128 of A-Z a-z 0-9 _ -"
        )
    return session_id


@dataclass(frozen=True)
class StoreStatistics:
    """Counters of one store since it was opened by this process."""

    frames: int
    """Frames held now; for a store shared with other processes, frames written by this one."""
    bytes: int
    """Bytes of those frames."""
    puts: int
    """Frames written; run frames that existed already are not counted."""
    gets: int
    hits: int
    misses: int
    bytes_in: int
    bytes_out: int
    failures: int
    """Operations that raised a StoreError."""


class UnreadFrame(Protocol):
    """A stored frame whose bytes can be read straight to where they belong."""

    @property
    def size_bytes(self) -> int:
        """Of the whole frame."""
        ...

    def read(self, into: Sequence[memoryview]) -> bool:
        """Fill the buffers, one behind the other, from the frame's start; False where it is shorter.

        Thread-safe. Raises StoreError.
        """
        ...


class BlockStore(Protocol):
    """A tier. Every method is thread-safe, ends by its deadline and raises StoreError or
    InvalidSessionId only.

    `namespace` is part of every key: no call reaches a frame that was put under another one. A
    deadline is seconds from the call.
    """

    @property
    def tier(self) -> str:
        """ "host", "redis", …: the name that manifests carry."""
        ...

    def put(
        self,
        frames: Sequence[tuple[FrameKey, Frame]],
        session_id: str,
        namespace: Namespace,
        deadline_s: float,
    ) -> None:
        """Store all or raise. Run frames that exist are not sent again, their lifetime is renewed.

        After an error some frames may be there; no manifest names them and they go by age.
        """
        ...

    def get(
        self,
        keys: Sequence[FrameKey],
        session_id: str,
        namespace: Namespace,
        deadline_s: float,
    ) -> list[Bytes | None]:
        """What is stored, unverified, in the order of `keys`; None is a miss."""
        ...

    def open(
        self,
        keys: Sequence[FrameKey],
        session_id: str,
        namespace: Namespace,
        deadline_s: float,
    ) -> list[Bytes | UnreadFrame | None]:
        """Like `get`; a store whose frames need not pass through memory of their own hands them out unread."""
        ...

    def contains(
        self,
        keys: Sequence[FrameKey],
        session_id: str,
        namespace: Namespace,
        deadline_s: float,
    ) -> list[bool]:
        """Whether each frame is there now: a hint, since it may be gone at the next call."""
        ...

    def delete(
        self,
        keys: Sequence[FrameKey],
        session_id: str,
        namespace: Namespace,
        deadline_s: float,
    ) -> None:
        """Remove the session's private frames, and its claim on run frames: shared ones go by
        age.
        """
        ...

    def drop(
        self,
        keys: Sequence[FrameKey],
        session_id: str,
        namespace: Namespace,
        deadline_s: float,
    ) -> None:
        """Remove frames whoever claims them: they were found to be damaged, and the next park must
        write them.
        """
        ...

    def statistics(self) -> StoreStatistics:
        """A snapshot of the counters."""
        ...

    def close(self) -> None:
        """Let go of memory and connections. Later calls raise StoreUnavailable."""
        ...
