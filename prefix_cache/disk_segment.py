"""Segment files of the disk tier: records appended one after another, read back by a scan of their heads.

    record    lead (32 bytes) │ meta, msgpack │ frame
    lead      magic "MRGD" · version · kind · meta length · data length · XXH3-64 over both

A frame carries its own checksum, so a scan reads the heads only: some 100 bytes a frame. What follows the first
record that is cut off or damaged is skipped; nothing behind it can be trusted to be a record.
"""

from __future__ import annotations

import errno
import io
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, cast

import msgpack  # type: ignore[import-untyped,unused-ignore]
import xxhash

from moorage.prefix_cache.block import Bytes, Namespace
from moorage.prefix_cache.errors import (
    InvalidInput,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from moorage.prefix_cache.frame import FrameKey

MAGIC = b"MRGD"
VERSION = 1
_LEAD = struct.Struct("<4sHHIxxxxQQ")
MAX_META_BYTES = 4096


class RecordKind(IntEnum):
    """What a record says; changed in place where a session lets go, so that no later record has to undo it."""

    DEAD = 0
    """Nothing any more."""
    FRAME = 1
    """A frame, claimed by the session of its meta."""
    UNCLAIMED = 2
    """A run frame whose writer let go of it."""
    CLAIM = 3
    """A further session's claim on a run frame."""


@dataclass(frozen=True)
class Meta:
    """Whose frame, and which."""

    namespace: Namespace
    session_id: str
    key: FrameKey

    def pack(self) -> bytes:
        """As msgpack."""
        key = self.key
        values = [
            self.namespace.tenant, self.namespace.name, self.session_id, key.kind, key.name,
            key.dtype, key.codec, list(key.layers), list(key.heads),
        ]  # fmt: skip
        return cast("bytes", msgpack.packb(values, use_bin_type=True))

    @classmethod
    def unpack(cls, data: bytes) -> Meta:
        """The inverse. Raises ValueError for anything else."""
        try:
            tenant, name, session_id, kind, key, dtype, codec, layers, heads = msgpack.unpackb(
                data, raw=False
            )
            frame_key = FrameKey(kind, key, dtype, codec, tuple(layers), tuple(heads))
        except (ValueError, TypeError, InvalidInput, msgpack.UnpackException) as error:
            raise ValueError(f"not the meta of a record: {type(error).__name__}") from error
        return cls(Namespace(str(tenant), str(name)), str(session_id), frame_key)


@dataclass(frozen=True)
class Record:
    """One record in its segment."""

    segment: Segment
    kind: RecordKind
    """When it was written or scanned; `Segment.mark` changes what the file says."""
    meta: Meta
    at: int
    """Of the record in the file."""
    data_at: int
    """Of the frame's bytes."""
    num_bytes: int
    """Of the frame; 0 in a claim."""

    @property
    def end(self) -> int:
        """Where the next record begins."""
        return self.data_at + self.num_bytes

    @property
    def record_bytes(self) -> int:
        """Of the whole record."""
        return self.end - self.at


class Segment:
    """One file. Readers may hold it while it is unlinked: the descriptor closes with the last of them."""

    def __init__(self, path: Path, number: int, *, create: bool) -> None:
        """Raises StoreUnavailable, StoreFull."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        flags |= os.O_CREAT | os.O_EXCL if create else 0
        self.path = path
        self.number = number
        try:
            self._file = io.FileIO(os.open(path, flags, 0o600), "r+b", closefd=True)
        except OSError as error:
            raise as_store_error(error, path.parent) from error
        self.size = 0
        """Bytes that hold records; the file may be longer where a write was cut off."""
        self.live_bytes = 0
        """Bytes of records that are still needed."""

    def scan(self) -> Iterator[Record]:
        """Records up to the first that is cut off or damaged; `size` is then where that begins."""
        end_of_file = os.fstat(self._file.fileno()).st_size
        while self.size + _LEAD.size <= end_of_file:
            record = self._record_at(self.size, end_of_file)
            if record is None:
                return
            self.size = record.end
            yield record

    def _record_at(self, at: int, end_of_file: int) -> Record | None:
        lead = os.pread(self._file.fileno(), _LEAD.size, at)
        if len(lead) < _LEAD.size:
            return None
        magic, version, kind, meta_len, data_len, check = _LEAD.unpack(lead)
        if magic != MAGIC or version != VERSION or meta_len > MAX_META_BYTES:
            return None
        start = at + _LEAD.size + meta_len
        if start + data_len > end_of_file:
            return None
        packed = os.pread(self._file.fileno(), meta_len, at + _LEAD.size)
        if xxhash.xxh3_64_intdigest(lead[:-8] + packed) != check:
            return None
        try:
            return Record(self, RecordKind(kind), Meta.unpack(packed), at, start, data_len)
        except ValueError:
            return None

    def append(self, kind: RecordKind, meta: Meta, parts: Sequence[Bytes]) -> Record:
        """Write a record behind the last one; the frame's parts go out as they lie in memory.

        Raises StoreFull, StoreUnavailable; what was written by then is written over by the next.
        """
        packed = meta.pack()
        num_bytes = sum(map(len, parts))
        lead = _lead(kind, packed, num_bytes)
        at = self.size
        try:
            self._write(at, [lead, packed, *parts])
        except OSError as error:
            raise as_store_error(error, self.path.parent) from error
        record = Record(self, kind, meta, at, at + len(lead) + len(packed), num_bytes)
        self.size = record.end
        return record

    def mark(self, record: Record, kind: RecordKind) -> None:
        """Change what a record says, in place. Raises StoreUnavailable, StoreFull."""
        packed = record.meta.pack()
        lead = _lead(kind, packed, record.num_bytes)
        try:
            self._write(record.at, [lead])
        except OSError as error:
            raise as_store_error(error, self.path.parent) from error

    def _write(self, at: int, parts: Sequence[Bytes]) -> None:
        views = [memoryview(part) for part in parts if len(part)]
        while views:
            done = write_at(self._file.fileno(), views[:MAX_PARTS], at)
            at += done
            views = _behind(views, done)

    def read(self, at: int, into: Sequence[memoryview]) -> bool:
        """Fill the buffers from `at` on; False where the file ends before. Raises StoreUnavailable."""
        views = [view for view in into if len(view)]
        try:
            while views:
                done = os.preadv(self._file.fileno(), views[:MAX_PARTS], at)
                if done == 0:
                    return False
                at += done
                views = _behind(views, done)
        except OSError as error:
            raise as_store_error(error, self.path.parent) from error
        return True

    def unlink(self) -> None:
        """Remove the file's name. Raises StoreUnavailable."""
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise as_store_error(error, self.path.parent) from error

    def sync(self) -> None:
        """Wait until what was written is on the disk. Raises StoreUnavailable, StoreFull."""
        try:
            os.fdatasync(self._file.fileno())
        except OSError as error:
            raise as_store_error(error, self.path.parent) from error


def _behind(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of the buffers behind their first `num_bytes`."""
    for index, view in enumerate(views):
        if num_bytes < len(view):
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= len(view)
    return []


def _lead(kind: RecordKind, packed: bytes, num_bytes: int) -> bytes:
    lead = _LEAD.pack(MAGIC, VERSION, kind, len(packed), num_bytes, 0)[:-8]
    return lead + xxhash.xxh3_64_intdigest(lead + packed).to_bytes(8, "little")


MAX_PARTS = 512
"""Buffers of one call; the system's bound is 1024."""


def write_at(descriptor: int, parts: Sequence[Any], at: int) -> int:
    """`os.pwritev`, under a name that a test can replace."""
    return os.pwritev(descriptor, parts, at)


def as_store_error(error: OSError, folder: Path) -> StoreError:
    """StoreFull where the disk or a quota is full, else StoreUnavailable."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return StoreFull(
            f"no room on the disk of {folder}: {reason}; free some, or lower disk_bytes"
        )
    return StoreUnavailable(f"the disk tier in {folder} cannot be used: {reason}")
