"""The disk tier: frames in segment files of one directory, bounded in bytes, found again after a restart."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from moorage.prefix_cache.block import Bytes, Namespace
from moorage.prefix_cache.buffers import BufferPool
from moorage.prefix_cache.disk_index import DiskIndex, Slot
from moorage.prefix_cache.disk_segment import Meta, Record, RecordKind, Segment, as_store_error
from moorage.prefix_cache.errors import (
    InvalidInput,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
)
from moorage.prefix_cache.failpoints import Failpoint, hit
from moorage.prefix_cache.frame import Frame, FrameKey
from moorage.prefix_cache.store import StoreStatistics, UnreadFrame, validate_session_id

_log = structlog.get_logger("moorage.prefix_cache")
_NAME = re.compile(r"segment-([0-9]{8})\.kv")
RECORD_ROOM_BYTES = 512
"""Allowed for a record's lead and meta when room is planned."""
WORTH_MOVING = 0.5
"""A segment is rewritten where at most this share of it is live: a byte gained costs at most a byte moved."""
LAST_RESORT = 0.9
"""The same where no frame can be evicted any more."""


@dataclass(frozen=True)
class DiskConfig:
    """One directory, used by one process at a time."""

    directory: Path
    max_bytes: int = 16 << 30
    """Bytes of all segment files; while one is rewritten, up to half a segment more."""
    segment_bytes: int = 64 << 20
    """A segment that is longer than this is sealed."""
    sync: bool = False
    """Wait for the disk at the end of each put. Without it a power cut may lose frames, which are then misses."""

    def validate(self) -> None:
        """Raises InvalidInput naming the field, the value and the limit."""
        for name in ("max_bytes", "segment_bytes"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} is {getattr(self, name)}, allowed is 1 or more")


@dataclass(frozen=True)
class DiskFrame:
    """A frame in its file. See UnreadFrame."""

    record: Record

    @property
    def size_bytes(self) -> int:
        """See UnreadFrame."""
        return self.record.num_bytes

    def read(self, into: Sequence[memoryview]) -> bool:
        """See UnreadFrame."""
        return self.record.segment.read(self.record.data_at, into)


class DiskStore:
    """Frames in segments, an index of them in memory.

        put     append ─▶ active segment ── long enough ─▶ sealed
        room    1. a segment that is half garbage is rewritten at the end and unlinked
                2. frames that no session claims go, least recently used first: more garbage
                3. segments with less garbage are rewritten too
                4. StoreFull, and nothing was changed

    Who lets go of a frame marks its record in place, so a restart finds what stood: by a scan of record heads. A
    record that is cut off ends its segment's scan. KV is a cache: nothing has to reach the disk before a call
    returns, and a lost or torn frame is a miss by its own checksum.
    """

    tier = "disk"

    def __init__(self, config: DiskConfig) -> None:
        """Scans the directory. Raises InvalidInput, StoreUnavailable (also where another process holds it)."""
        config.validate()
        self.config = config
        self._lock = threading.Lock()
        """Over index and active segment. Frames are read outside it."""
        self._index = DiskIndex()
        self._segments: dict[int, Segment] = {}
        self._active: Segment | None = None
        self._closed = False
        self._buffers = BufferPool()
        self._puts = self._gets = self._hits = 0
        self._bytes_in = self._bytes_out = self._failures = 0
        self.num_evicted = 0
        self.num_moved_bytes = 0
        """Bytes that were rewritten to make room."""
        self._lock_file = self._open_directory()
        try:
            self._scan()
        except BaseException:
            os.close(self._lock_file)
            raise

    # -- BlockStore --------------------------------------------------------------------------------

    def put(
        self,
        frames: Sequence[tuple[FrameKey, Frame]],
        session_id: str,
        namespace: Namespace,
        deadline_s: float,
    ) -> None:
        """All or nothing, but for a private frame that is written over: both versions are gone then."""
        deadline = time.monotonic() + deadline_s
        validate_session_id(session_id)
        added: list[Slot] = []
        claimed: list[Slot] = []
        with self._guarded():
            try:
                new: list[tuple[FrameKey, Frame]] = []
                for key, frame in frames:  # claimed first, so that making room takes none of them
                    slot = _slot(key, session_id, namespace)
                    entry = self._index.entries.get(slot) if key.shared else None
                    if entry is None:
                        new.append((key, frame))
                    elif not entry.claimed_by(session_id):
                        meta = Meta(namespace, session_id, key)
                        self._index.claim(self._append(RecordKind.CLAIM, meta, ()))
                        claimed.append(slot)
                self._make_room(sum(f.size_bytes + RECORD_ROOM_BYTES for _, f in new), deadline)
                for key, frame in new:
                    self._check(deadline)
                    hit(Failpoint.DISK_BEFORE_FRAME)
                    meta = Meta(namespace, session_id, key)
                    self._index.adopt(self._append(RecordKind.FRAME, meta, frame.parts))
                    added.append(_slot(key, session_id, namespace))
                    hit(Failpoint.DISK_AFTER_FRAME)
                if self.config.sync and self._active is not None:
                    self._active.sync()
            except BaseException:
                for slot in added:
                    self._index.remove(slot)
                for slot in claimed:
                    self._index.unclaim(slot, session_id)
                raise
            self._puts += len(new)
            self._bytes_in += sum(frame.size_bytes for _, frame in new)

    def get(
        self,
        keys: Sequence[FrameKey],
        session_id: str,
        namespace: Namespace,
        deadline_s: float,
    ) -> list[Bytes | None]:
        """Each frame in a buffer of its own. A file that is shorter than it was is a miss."""
        deadline = time.monotonic() + deadline_s
        found: list[Bytes | None] = []
        for frame in self._find(keys, session_id, namespace):
            self._check(deadline)
            found.append(self._read(frame.record) if frame is not None else None)
        return found

    def open(
        self,
        keys: Sequence[FrameKey],
        session_id: str,
        namespace: Namespace,
        deadline_s: float,
    ) -> list[Bytes | UnreadFrame | None]:
        """Frames unread: their files stay readable while someone holds them."""
        del deadline_s
        return [*self._find(keys, session_id, namespace)]

    def contains(
        self,
        keys: Sequence[FrameKey],
        session_id: str,
        namespace: Namespace,
        deadline_s: float,
    ) -> list[bool]:
        """See BlockStore."""
        del deadline_s
        validate_session_id(session_id)
        with self._guarded():
            return [_slot(key, session_id, namespace) in self._index.entries for key in keys]

    def delete(
        self,
        keys: Sequence[FrameKey],
        session_id: str,
        namespace: Namespace,
        deadline_s: float,
    ) -> None:
        """Private frames go at once; a run loses this session's claim and stays until room is needed."""
        for slot in self._each(keys, session_id, namespace, deadline_s):
            if slot[2].shared:
                self._index.unclaim(slot, session_id)
            else:
                self._index.remove(slot)

    def drop(
        self,
        keys: Sequence[FrameKey],
        session_id: str,
        namespace: Namespace,
        deadline_s: float,
    ) -> None:
        """See BlockStore."""
        for slot in self._each(keys, session_id, namespace, deadline_s):
            self._index.remove(slot)

    def statistics(self) -> StoreStatistics:
        """See BlockStore."""
        with self._lock:
            entries = self._index.entries
            return StoreStatistics(
                frames=len(entries),
                bytes=sum(entry.frame.num_bytes for entry in entries.values()),
                puts=self._puts,
                gets=self._gets,
                hits=self._hits,
                misses=self._gets - self._hits,
                bytes_in=self._bytes_in,
                bytes_out=self._bytes_out,
                failures=self._failures,
            )

    @property
    def file_bytes(self) -> int:
        """Of all segments, garbage included: what `max_bytes` bounds."""
        return sum(segment.size for segment in list(self._segments.values()))

    def close(self) -> None:
        """Let the directory go; the frames stay."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._index.clear()
                self._segments.clear()
                self._active = None
                os.close(self._lock_file)

    # -- start -------------------------------------------------------------------------------------

    def _open_directory(self) -> int:
        directory = self.config.directory
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(directory / "lock", flags, 0o600)
        except OSError as error:
            raise as_store_error(error, directory) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise StoreUnavailable(
                f"another process holds the disk tier in {directory}: stop it, or take another"
                " directory"
            ) from error
        return descriptor

    def _scan(self) -> None:
        """Index everything that can be read; a file that is no segment of ours is left alone."""
        for path in sorted(self.config.directory.iterdir()):
            found = _NAME.fullmatch(path.name)
            if found is None or path.is_symlink() or not path.is_file():
                continue
            segment = Segment(path, int(found[1]), create=False)
            self._segments[segment.number] = segment
            for record in segment.scan():
                self._index.replay(record)
            unread = path.stat().st_size - segment.size
            if unread > 0:
                _log.warning("a segment's end is unreadable", file=path.name, num_bytes=unread)
        self._index.end_replay()

    # -- under the lock ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise StoreUnavailable("the disk store is closed")
            try:
                yield
            except StoreError:
                self._failures += 1
                raise

    def _each(
        self,
        keys: Sequence[FrameKey],
        session_id: str,
        namespace: Namespace,
        deadline_s: float,
    ) -> Iterator[Slot]:
        deadline = time.monotonic() + deadline_s
        validate_session_id(session_id)
        with self._guarded():
            for key in keys:
                slot = _slot(key, session_id, namespace)
                if slot in self._index.entries:
                    self._check(deadline)
                    hit(Failpoint.DISK_BEFORE_DELETE)
                    yield slot
                    hit(Failpoint.DISK_AFTER_DELETE)

    def _check(self, deadline: float) -> None:
        if time.monotonic() >= deadline:
            raise StoreTimeout(
                f"the disk tier in {self.config.directory} did not end by its deadline"
            )

    def _find(
        self, keys: Sequence[FrameKey], session_id: str, namespace: Namespace
    ) -> list[DiskFrame | None]:
        validate_session_id(session_id)
        found: list[DiskFrame | None] = []
        with self._guarded():
            for key in keys:
                slot = _slot(key, session_id, namespace)
                entry = self._index.entries.get(slot)
                self._index.used(slot)
                found.append(DiskFrame(entry.frame) if entry is not None else None)
            self._gets += len(keys)
            self._hits += sum(frame is not None for frame in found)
            self._bytes_out += sum(frame.size_bytes for frame in found if frame is not None)
        return found

    def _read(self, record: Record) -> memoryview | None:
        data = self._buffers.take(record.num_bytes)
        return data if record.segment.read(record.data_at, [data]) else None

    def _append(self, kind: RecordKind, meta: Meta, parts: Sequence[Bytes]) -> Record:
        active = self._active
        if active is None or active.size >= self.config.segment_bytes:
            number = max(self._segments, default=0) + 1
            path = self.config.directory / f"segment-{number:08d}.kv"
            active = self._active = Segment(path, number, create=True)
            self._segments[number] = active
        return active.append(kind, meta, parts)

    def _make_room(self, needed: int, deadline: float) -> None:
        while self.file_bytes + needed > self.config.max_bytes:
            self._check(deadline)
            if self._rewrite_one(WORTH_MOVING, deadline):
                continue
            if self._index.unclaimed:
                self._index.remove(next(iter(self._index.unclaimed)))
                self.num_evicted += 1
            elif not self._rewrite_one(LAST_RESORT, deadline):
                raise StoreFull(
                    f"the disk tier holds {self.file_bytes} bytes that sessions need, {needed} more"
                    f" exceed its bound of {self.config.max_bytes}: raise disk_bytes, close"
                    " sessions, or park to another tier"
                )

    def _rewrite_one(self, most_live: float, deadline: float) -> bool:
        """Move what is live in the emptiest segment to the end and unlink it; False where none is
        that empty.
        """
        emptiest = min(
            (segment for segment in self._segments.values() if segment.size),
            key=lambda segment: segment.live_bytes / segment.size,
            default=None,
        )
        if emptiest is None or emptiest.live_bytes > most_live * emptiest.size:
            return False
        if emptiest is self._active:
            self._active = None
        for entry, record in self._index.living_in(emptiest):
            self._check(deadline)
            data = self._read(record)
            if data is None:  # the file was cut under us
                continue
            kind = record.kind
            if kind is not RecordKind.CLAIM:
                kind = RecordKind.FRAME if entry.writer_claims else RecordKind.UNCLAIMED
            self._index.moved(entry, record, self._append(kind, record.meta, [data]))
            self.num_moved_bytes += record.num_bytes
        for slot in [s for s, e in self._index.entries.items() if e.frame.segment is emptiest]:
            self._index.remove(slot)
        del self._segments[emptiest.number]
        emptiest.unlink()
        hit(Failpoint.DISK_AFTER_UNLINK)
        return True


def _slot(key: FrameKey, session_id: str, namespace: Namespace) -> Slot:
    return (namespace, "" if key.shared else session_id, key)
