"""The host tier: frames in this process's memory, bounded in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from moorage.prefix_cache.block import Bytes, Namespace
from moorage.prefix_cache.buffers import BufferPool, copy_into
from moorage.prefix_cache.errors import InvalidInput, StoreFull, StoreUnavailable
from moorage.prefix_cache.failpoints import Failpoint, hit
from moorage.prefix_cache.frame import Frame, FrameKey
from moorage.prefix_cache.lanes import Lanes
from moorage.prefix_cache.store import StoreStatistics, UnreadFrame, validate_session_id

_Owner = tuple[Namespace, str]
"""(namespace, session id)."""
_Slot = tuple[Namespace, str, FrameKey]
"""(namespace, session id of a private frame or "" of a run frame, key)."""


@dataclass
class _Entry:
    data: memoryview
    """Read-only."""
    claims: set[str] = field(default_factory=set)
    """Sessions whose parked contexts may need this frame."""


_Change = tuple[_Slot, _Entry | None, bool]
"""(slot, the entry before, whether the session claimed that)."""


class HostStore:
    """Frames as bytes of our own: `put` copies each once out of the caller's staging memory.

    Policy: a frame that some session claims is never evicted, since its manifest may be all that
    session has; frames that nobody claims stay as a cache of shared prefixes and go, least recently
    used first, when room is needed. Where that is not enough, `put` refuses with StoreFull and
    changes nothing. A session's claim on a run ends with `delete`; so whoever supersedes or closes
    a parked context must delete its keys, run keys included.

    All operations are memory copies under one lock: they need no deadline to be bounded.
    """

    tier = "host"

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: sum of frame bytes; 0 makes a store that refuses everything."""
        if max_bytes < 0:
            raise InvalidInput(f"max_bytes is {max_bytes}, allowed is 0 or more")
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: dict[_Slot, _Entry] = {}
        self._unclaimed: OrderedDict[_Slot, None] = OrderedDict()
        """Evictable frames, least recently used first."""
        self._num_bytes = 0
        self._reserved = 0
        """Bytes of frames that are being copied."""
        self._closed = False
        self._buffers = BufferPool()
        self._lanes = Lanes()
        self._copies: dict[_Owner, set[_Slot]] = {}
        """Private frames whose home is another tier."""
        self._puts = self._gets = self._hits = 0
        self._bytes_in = self._bytes_out = self._failures = 0

    def warm(self, frame_bytes: int, total_bytes: int) -> None:
        """Make memory for frames of this size ready, so that the first parks are as fast as later ones."""
        total_bytes = min(total_bytes, self.max_bytes)
        self._buffers.kept_bytes = max(self._buffers.kept_bytes, total_bytes)
        self._buffers.warm(frame_bytes, total_bytes)

    def put(
        self,
        frames: Sequence[tuple[FrameKey, Frame]],
        session_id: str,
        namespace: Namespace,
        deadline_s: float,
    ) -> None:
        """All or nothing, also where a failpoint or a MemoryError cuts it off. Copies outside the lock."""
        del deadline_s
        owner = (namespace, validate_session_id(session_id))
        undo: list[_Change] = []
        reserved = 0
        try:
            with self._lock:
                self._check_open()
                reserved = self._make_room(frames, owner)
                new = self._claim_existing(frames, owner, undo)
            copies = self._copy_all([frame for _, frame in new])
            with self._lock:
                self._check_open()
                for (key, _), data in zip(new, copies, strict=True):
                    hit(Failpoint.HOST_BEFORE_FRAME)
                    self._put_one(_slot(key, owner), data, session_id, undo)
                    hit(Failpoint.HOST_AFTER_FRAME)
                self._reserved -= reserved
        except BaseException:
            with self._lock:
                self._failures += 1
                self._reserved -= reserved
                for slot, previous, claimed in reversed(undo):
                    self._undo_one(slot, previous, session_id, claimed)
            raise

    def get(
        self,
        keys: Sequence[FrameKey],
        session_id: str,
        namespace: Namespace,
        deadline_s: float,
    ) -> list[Bytes | None]:
        """The stored bytes themselves, not copies: they are immutable."""
        del deadline_s
        owner = (namespace, validate_session_id(session_id))
        found: list[Bytes | None] = []
        with self._lock:
            self._check_open()
            for key in keys:
                slot = _slot(key, owner)
                entry = self._entries.get(slot)
                self._gets += 1
                if entry is None:
                    found.append(None)
                    continue
                if slot in self._unclaimed:
                    self._unclaimed.move_to_end(slot)
                self._hits += 1
                self._bytes_out += len(entry.data)
                found.append(entry.data)
        return found

    def keep(
        self,
        frames: Sequence[tuple[FrameKey, Frame | Bytes]],
        session_id: str,
        namespace: Namespace,
    ) -> int:
        """Copies of frames whose home is another tier, as far as there is room beside what sessions
        claim; the number that is here now. They are unclaimed: the first to go.

        Bytes must have been verified: whoever reads them here believes that nobody changed them.
        """
        owner = (namespace, validate_session_id(session_id))
        with self._lock:
            self._check_open()
            self._drop_old_copies(owner, {_slot(key, owner) for key, _ in frames})
        for kept, (key, frame) in enumerate(frames):
            size = frame.size_bytes if isinstance(frame, Frame) else len(frame)
            with self._lock:
                slot = _slot(key, owner)
                if slot in self._entries:
                    if slot in self._unclaimed:
                        self._unclaimed.move_to_end(slot)
                    continue
                if not self._evict_for(size):
                    return kept
                self._reserved += size
            try:
                data = self._copy(frame)
            except BaseException:
                with self._lock:
                    self._reserved -= size
                raise
            with self._lock:
                self._reserved -= size
                if slot in self._entries or self._closed:
                    continue
                self._entries[slot] = _Entry(data)
                self._num_bytes += size
                self._unclaimed[slot] = None
                if not key.shared:
                    self._copies.setdefault(owner, set()).add(slot)
        return len(frames)

    def open(
        self,
        keys: Sequence[FrameKey],
        session_id: str,
        namespace: Namespace,
        deadline_s: float,
    ) -> list[Bytes | UnreadFrame | None]:
        """See BlockStore."""
        return [*self.get(keys, session_id, namespace, deadline_s)]

    def contains(
        self,
        keys: Sequence[FrameKey],
        session_id: str,
        namespace: Namespace,
        deadline_s: float,
    ) -> list[bool]:
        """See BlockStore."""
        del deadline_s
        owner = (namespace, validate_session_id(session_id))
        with self._lock:
            self._check_open()
            return [_slot(key, owner) in self._entries for key in keys]

    def delete(
        self,
        keys: Sequence[FrameKey],
        session_id: str,
        namespace: Namespace,
        deadline_s: float,
    ) -> None:
        """Private frames go at once; a run loses this session's claim and stays until room is
        needed.
        """
        del deadline_s
        owner = (namespace, validate_session_id(session_id))
        with self._lock:
            self._check_open()
            for key in keys:
                hit(Failpoint.HOST_BEFORE_DELETE)
                slot = _slot(key, owner)
                entry = self._entries.get(slot)
                if entry is not None and key.shared:
                    self._unclaim(slot, entry, session_id)
                elif entry is not None:
                    self._remove(slot)
                hit(Failpoint.HOST_AFTER_DELETE)

    def drop(
        self,
        keys: Sequence[FrameKey],
        session_id: str,
        namespace: Namespace,
        deadline_s: float,
    ) -> None:
        """See BlockStore."""
        del deadline_s
        owner = (namespace, validate_session_id(session_id))
        with self._lock:
            self._check_open()
            for key in keys:
                if _slot(key, owner) in self._entries:
                    self._remove(_slot(key, owner))

    def statistics(self) -> StoreStatistics:
        """See BlockStore."""
        with self._lock:
            return StoreStatistics(
                frames=len(self._entries),
                bytes=self._num_bytes,
                puts=self._puts,
                gets=self._gets,
                hits=self._hits,
                misses=self._gets - self._hits,
                bytes_in=self._bytes_in,
                bytes_out=self._bytes_out,
                failures=self._failures,
            )

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._closed = True
            self._entries.clear()
            self._unclaimed.clear()
            self._num_bytes = 0
        self._lanes.close()

    # -- outside the lock --------------------------------------------------------------------------

    def _copy(self, frame: Frame | Bytes) -> memoryview:
        """The one copy of a frame."""
        if isinstance(frame, Frame):
            data = self._buffers.take(frame.size_bytes)
            frame.write_into(data)
        else:
            data = copy_into(self._buffers.take(len(frame)), (memoryview(frame),))
        return data.toreadonly()

    def _copy_all(self, frames: Sequence[Frame]) -> list[memoryview]:
        num_bytes = sum(frame.size_bytes for frame in frames)
        copies: list[memoryview] = []
        for result in self._lanes.run([partial(self._copy, frame) for frame in frames], num_bytes):
            if isinstance(result, Exception):
                raise result
            copies.append(result)
        return copies

    # -- under the lock ----------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable("the host store is closed")

    def _make_room(self, frames: Sequence[tuple[FrameKey, Frame]], owner: _Owner) -> int:
        """Evict unclaimed frames, but none that this very put brings or needs; returns the bytes that are reserved
        for it."""
        slots = {_slot(key, owner): (key, frame) for key, frame in frames}
        needed = 0
        for slot, (key, frame) in slots.items():
            entry = self._entries.get(slot)
            if entry is None:
                needed += frame.size_bytes
            elif not key.shared:
                needed += frame.size_bytes - len(entry.data)
        victims: list[_Slot] = []
        short = self._num_bytes + self._reserved + needed - self.max_bytes
        for slot in self._unclaimed:
            if short <= 0:
                break
            if slot not in slots:
                victims.append(slot)
                short -= len(self._entries[slot].data)
        if short > 0:
            raise StoreFull(
                f"the host store is {short} bytes short of {needed} for this context; its bound is"
                f" {self.max_bytes}: raise host_bytes, close sessions, or park to another tier"
            )
        for slot in victims:
            self._remove(slot)
        needed = max(needed, 0)
        self._reserved += needed
        return needed

    def _claim_existing(
        self, frames: Sequence[tuple[FrameKey, Frame]], owner: _Owner, undo: list[_Change]
    ) -> list[tuple[FrameKey, Frame]]:
        """Claim the runs that are here, so that nobody evicts them; returns what has to be copied."""
        new: list[tuple[FrameKey, Frame]] = []
        for key, frame in frames:
            slot = _slot(key, owner)
            entry = self._entries.get(slot) if key.shared else None
            if entry is None:
                new.append((key, frame))
            else:
                self._claim(slot, entry, owner[1], undo)
        return new

    def _claim(self, slot: _Slot, entry: _Entry, session_id: str, undo: list[_Change]) -> None:
        undo.append((slot, entry, session_id in entry.claims))
        entry.claims.add(session_id)
        self._unclaimed.pop(slot, None)

    def _drop_old_copies(self, owner: _Owner, wanted: set[_Slot]) -> None:
        """A session's private frames of another generation: nobody will ask for them."""
        names = {slot[2].parts[1] for slot in wanted if not slot[2].shared}
        if not names:
            return
        for slot in list(self._copies.get(owner, ())):
            if slot[2].parts[1] not in names and slot in self._unclaimed:
                self._remove(slot)

    def _evict_for(self, num_bytes: int) -> bool:
        """Room for so many bytes at the cost of unclaimed frames; False, with nothing changed, where
        that is not enough.
        """
        short = self._num_bytes + self._reserved + num_bytes - self.max_bytes
        victims: list[_Slot] = []
        for slot in self._unclaimed:
            if short <= 0:
                break
            victims.append(slot)
            short -= len(self._entries[slot].data)
        if short > 0:
            return False
        for slot in victims:
            self._remove(slot)
        return True

    def _put_one(self, slot: _Slot, data: memoryview, session_id: str, undo: list[_Change]) -> None:
        previous = self._entries.get(slot)
        if previous is not None and slot[2].shared:  # another put was faster
            self._claim(slot, previous, session_id, undo)
            return
        undo.append((slot, previous, False))
        self._num_bytes += len(data) - (len(previous.data) if previous is not None else 0)
        self._entries[slot] = _Entry(data, {session_id})
        self._puts += 1
        self._bytes_in += len(data)

    def _undo_one(
        self, slot: _Slot, previous: _Entry | None, session_id: str, claimed: bool
    ) -> None:
        current = self._entries.get(slot)
        if previous is None:
            self._remove(slot)
        elif current is previous:
            if not claimed:
                self._unclaim(slot, previous, session_id)
        elif current is not None:
            self._num_bytes += len(previous.data) - len(current.data)
            self._entries[slot] = previous

    def _unclaim(self, slot: _Slot, entry: _Entry, session_id: str) -> None:
        entry.claims.discard(session_id)
        if not entry.claims:
            self._unclaimed[slot] = None
            self._unclaimed.move_to_end(slot)

    def _remove(self, slot: _Slot) -> None:
        self._num_bytes -= len(self._entries.pop(slot).data)
        self._unclaimed.pop(slot, None)
        copies = self._copies.get((slot[0], slot[1]))
        if copies is not None:
            copies.discard(slot)
            if not copies:
                del self._copies[slot[0], slot[1]]


def _slot(key: FrameKey, owner: _Owner) -> _Slot:
    return (owner[0], "" if key.shared else owner[1], key)
