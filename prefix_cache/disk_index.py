"""What the disk tier holds, in memory: a frame's place, who claims it, and which segment has how much that is live."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from moorage.prefix_cache.block import Namespace
from moorage.prefix_cache.disk_segment import Meta, Record, RecordKind, Segment
from moorage.prefix_cache.frame import FrameKey

Slot: TypeAlias = tuple[Namespace, str, FrameKey]
"""(namespace, session id of a private frame or "" of a run frame, key)."""


def slot_of(meta: Meta) -> Slot:
    """Where a record's frame is looked up."""
    return (meta.namespace, "" if meta.key.shared else meta.session_id, meta.key)


@dataclass
class Entry:
    """One frame."""

    frame: Record
    writer_claims: bool
    """Whether the session that wrote it may still need it."""
    claims: dict[str, Record] = field(default_factory=dict)
    """further session id -> its claim record."""

    def claimed_by(self, session_id: str) -> bool:
        """Whether this session's parked context may need the frame."""
        return session_id in self.claims or (
            self.writer_claims and session_id == self.frame.meta.session_id
        )

    @property
    def claimed(self) -> bool:
        """Whether any session's parked context may need the frame."""
        return self.writer_claims or bool(self.claims)

    @property
    def records(self) -> list[Record]:
        """The frame's and its claims'."""
        return [self.frame, *self.claims.values()]


class DiskIndex:
    """Every change marks the file too, so that a scan after a restart finds the same."""

    def __init__(self) -> None:
        self.entries: dict[Slot, Entry] = {}
        self.unclaimed: OrderedDict[Slot, None] = OrderedDict()
        """Evictable frames, least recently used first."""
        self._early: list[Record] = []

    def replay(self, record: Record) -> None:
        """One record of a scan, oldest segment first."""
        if record.kind in (RecordKind.FRAME, RecordKind.UNCLAIMED):
            self.adopt(record, record.kind is RecordKind.FRAME)
        elif record.kind is RecordKind.CLAIM:
            self._early.append(record)  # its frame may have been moved to a later segment

    def end_replay(self) -> None:
        """Every segment was scanned. Claims on frames that are gone are dead."""
        for record in self._early:
            if slot_of(record.meta) in self.entries:
                self.claim(record)
            else:
                record.segment.mark(record, RecordKind.DEAD)
        self._early.clear()

    def adopt(self, record: Record, writer_claims: bool = True) -> None:
        """A frame was written; one of the same slot before it is dead, its claims hold on."""
        slot = slot_of(record.meta)
        previous = self.entries.get(slot)
        entry = Entry(record, writer_claims)
        if previous is not None:
            entry.claims = {s: c for s, c in previous.claims.items()}
            self._kill(previous.frame)
        record.segment.live_bytes += record.record_bytes
        self.entries[slot] = entry
        self._sort(slot, entry)

    def claim(self, record: Record) -> None:
        """A claim record was written for a frame that is there."""
        slot = slot_of(record.meta)
        entry = self.entries[slot]
        previous = entry.claims.get(record.meta.session_id)
        if previous is not None:
            self._kill(previous)
        entry.claims[record.meta.session_id] = record
        record.segment.live_bytes += record.record_bytes
        self._sort(slot, entry)

    def unclaim(self, slot: Slot, session_id: str) -> None:
        """A session lets go of a run frame; nothing where it had no claim."""
        entry = self.entries[slot]
        record = entry.claims.pop(session_id, None)
        if record is not None:
            self._kill(record)
        if entry.writer_claims and entry.frame.meta.session_id == session_id:
            entry.writer_claims = False
            entry.frame.segment.mark(entry.frame, RecordKind.UNCLAIMED)
        self._sort(slot, entry)

    def remove(self, slot: Slot) -> None:
        """The frame is gone."""
        entry = self.entries.pop(slot)
        self.unclaimed.pop(slot, None)
        for record in entry.records:
            self._kill(record)

    def used(self, slot: Slot) -> None:
        """The frame was read: it becomes the last one to be evicted."""
        if slot in self.unclaimed:
            self.unclaimed.move_to_end(slot)

    def living_in(self, segment: Segment) -> Iterator[tuple[Entry, Record]]:
        """Records of a segment that are needed, with their entries."""
        for entry in list(self.entries.values()):
            for record in entry.records:
                if record.segment is segment:
                    yield entry, record

    def moved(self, entry: Entry, old: Record, new: Record) -> None:
        """A record was written anew; the old one's segment is about to go."""
        if old.kind is RecordKind.CLAIM:
            entry.claims[old.meta.session_id] = new
        else:
            entry.frame = new
        new.segment.live_bytes += new.record_bytes
        old.segment.live_bytes -= old.record_bytes

    def clear(self) -> None:
        """Forget everything; the files stay."""
        self.entries.clear()
        self.unclaimed.clear()

    def _sort(self, slot: Slot, entry: Entry) -> None:
        if entry.claimed:
            self.unclaimed.pop(slot, None)
        elif slot not in self.unclaimed:
            self.unclaimed[slot] = None

    @staticmethod
    def _kill(record: Record) -> None:
        record.segment.live_bytes -= record.record_bytes
        record.segment.mark(record, RecordKind.DEAD)
