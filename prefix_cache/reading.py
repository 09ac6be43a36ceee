"""Which frames a load needs, and where each comes from: host copies first, then its home, then any tier that has it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from moorage.prefix_cache.block import Bytes
from moorage.prefix_cache.errors import CacheError, StoreError, StoreTimeout
from moorage.prefix_cache.host_store import HostStore
from moorage.prefix_cache.misses import Miss, MissReason, miss_of
from moorage.prefix_cache.parked_context import FrameReference, ParkedContext
from moorage.prefix_cache.store import BlockStore, UnreadFrame

BATCH_BYTES = 16 << 20
"""Frames are asked for in batches of about this size: enough to fill a pipeline, and a bound on
memory.
"""
Stored: TypeAlias = Bytes | UnreadFrame


@dataclass(frozen=True)
class Source:
    """A needed frame and where it was found."""

    ref: FrameReference
    tier: str
    stored: Stored


class Reader:
    """Reads the frames of one manifest until a deadline (time.monotonic())."""

    def __init__(
        self,
        manifest: ParkedContext,
        stores: Mapping[str, BlockStore],
        copies: HostStore | None,
        deadline: float,
    ) -> None:
        """`copies` is asked before a frame's home is."""
        self._manifest = manifest
        self._session_id = manifest.session_id
        self._namespace = manifest.lineage.namespace
        self._stores = stores
        self._copies = copies
        self._deadline = deadline

    def batches(self, refs: Sequence[FrameReference]) -> Iterator[list[Source]]:
        """All of `refs`, in order. Raises Miss at the first that is not to be had, after the batch before it."""
        needed = list(refs)
        while needed:
            batch = _batch(needed)
            del needed[: len(batch)]
            yield from self._batch(batch)

    def home(self, ref: FrameReference) -> Source:
        """One frame from the tier that the manifest names. Raises Miss."""
        for source in self._open(ref.tier, [ref]):
            if source is not None:
                return source
        raise _not_stored(ref)

    def drop(self, source: Source) -> None:
        """Remove a bad frame, so that the next park writes it anew instead of finding that it exists."""
        left = max(0.0, self._deadline - time.monotonic())
        try:
            self._stores[source.tier].drop(
                [source.ref.key], self._session_id, self._namespace, left
            )
        except StoreError:
            return  # it stays a miss, and goes by age

    def keep(self, source: Source) -> None:
        """A copy in host memory of what was verified and came from elsewhere."""
        if self._copies is not None and source.tier != self._copies.tier:
            data = source.stored
            if not isinstance(data, bytes | bytearray | memoryview):
                whole = memoryview(bytearray(data.size_bytes))
                if not data.read([whole]):
                    return
                data = whole
            self._copies.keep([(source.ref.key, data)], self._session_id, self._namespace)

    def _batch(self, batch: Sequence[FrameReference]) -> Iterator[list[Source]]:
        copied = self._copied(batch)
        ready: list[Source] = []
        rest = [ref for ref in batch if ref not in copied]
        at_home: Iterator[Source | None] = self._open(batch[0].tier, rest) if rest else iter(())
        try:
            for ref in batch:
                source = copied.get(ref) or next(at_home) or self._elsewhere(ref)
                ready.append(source)
        except Miss:
            if ready:
                yield ready
            raise
        yield ready

    def _copied(self, batch: Sequence[FrameReference]) -> dict[FrameReference, Source]:
        if self._copies is None or batch[0].tier == self._copies.tier:
            return {}
        tier, keys = self._copies.tier, [ref.key for ref in batch]
        left = max(0.0, self._deadline - time.monotonic())
        found = self._copies.open(keys, self._session_id, self._namespace, left)
        pairs = zip(batch, found, strict=True)
        return {ref: Source(ref, tier, data) for ref, data in pairs if data is not None}

    def _open(self, tier: str, refs: Sequence[FrameReference]) -> Iterator[Source | None]:
        """In one call; where that fails, one by one, so that what stands before the fault is not lost. None for
        what the store has not. Raises Miss."""
        store = self._stores.get(tier)
        if store is None:
            raise Miss(
                MissReason.TIER_MISSING, f"the manifest names tier {tier}, not configured here"
            )
        groups = [list(refs)]
        while groups:
            group = groups.pop(0)
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise Miss(MissReason.TIMED_OUT, "the load's deadline has passed")
            keys = [ref.key for ref in group]
            try:
                found = store.open(keys, self._session_id, self._namespace, left)
            except CacheError as error:
                if len(group) > 1 and not isinstance(error, StoreTimeout):
                    groups = [[ref] for ref in group]
                    continue
                raise Miss(miss_of(error), str(error)) from error
            for ref, stored in zip(group, found, strict=True):
                yield Source(ref, tier, stored) if stored is not None else None

    def _elsewhere(self, ref: FrameReference) -> Source:
        """A run that its tier has lost, from another tier. Raises Miss."""
        if ref.key.shared:
            for tier in self._stores:
                if tier == ref.tier:
                    continue
                try:
                    source = next(self._open(tier, [ref]))
                except Miss:
                    continue  # the reason that counts is that its own tier has it no more
                if source is not None:
                    return source
        raise _not_stored(ref)


def _batch(needed: Sequence[FrameReference]) -> list[FrameReference]:
    """Leading frames of one tier, up to BATCH_BYTES; at least one."""
    batch = [needed[0]]
    total = needed[0].size_bytes
    for ref in needed[1:]:
        total += ref.size_bytes
        if ref.tier != batch[0].tier or total > BATCH_BYTES:
            break
        batch.append(ref)
    return batch


def _not_stored(ref: FrameReference) -> Miss:
    return Miss(
        MissReason.NOT_STORED,
        f"tier {ref.tier} has no {ref.key.kind} frame of block {ref.first_block}",
    )
