"""Loading one parked context: read frames in order, verify each, copy it into place, stop at the
first hole.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from moorage.prefix_cache import codec
from moorage.prefix_cache.block import BlockHash, Bytes, num_tokens_in
from moorage.prefix_cache.errors import (
    CacheError,
    FrameMismatch,
    InvalidInput,
    MismatchReason,
    StoreError,
    StoreTimeout,
    WorkersClosed,
)
from moorage.prefix_cache.frame import FrameExpectation, Geometry, as_bytes_view, decode_frame
from moorage.prefix_cache.host_store import HostStore
from moorage.prefix_cache.park import Chain, Piece
from moorage.prefix_cache.parked_context import FrameReference, ParkedContext
from moorage.prefix_cache.seek import with_found_runs
from moorage.prefix_cache.store import BlockStore, validate_session_id

BATCH_BYTES = 16 << 20
"""Frames are asked for in batches of about this size: enough to fill a pipeline, and a bound on
memory.
"""


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


@dataclass(frozen=True)
class LoadJob:
    """Bring back the blocks of a parked context from `first_block` on."""

    manifest: ParkedContext
    """Its lineage must be the reader's own: the caller compares it with the session's before it
    asks.
    """
    first_block: int
    """Blocks before it are on the device already."""
    token_ids: Bytes = field(repr=False)
    """The session's log from position 0; blocks beyond it are not loaded."""
    blocks: Sequence[memoryview] = field(repr=False)
    """A writable buffer for each block from `first_block` on, contiguous; bounds how much is loaded.
    Written until LoadDone, each only after its frame was verified."""
    geometry: Geometry
    """Of the reader."""
    deadline_s: float
    """Seconds from submission."""
    job_id: int = 0
    seek: bool = False
    """Look in every tier for runs behind the manifest's, whoever stored them."""

    def validate(self) -> None:
        """Raises InvalidInput naming the value and the limit."""
        validate_session_id(self.manifest.session_id)
        num_tokens_in(self.token_ids)
        if self.first_block < 0 or (self.first_block > self.manifest.num_blocks and not self.seek):
            raise InvalidInput(
                f"first_block is {self.first_block}, allowed is 0 … {self.manifest.num_blocks}"
            )
        for index, block in enumerate(self.blocks):
            view = as_bytes_view(block)
            if view.readonly or view.nbytes != self.geometry.block_bytes:
                raise InvalidInput(
                    f"block {index} has {view.nbytes} bytes"
                    f"{' and is read-only' if view.readonly else ''}: give writable blocks of"
                    f" {self.geometry.block_bytes}"
                )

    def failed(self, error: CacheError) -> LoadDone:
        """The answer where nothing was loaded."""
        return LoadDone(
            self.job_id, self.manifest.session_id, 0, {}, _miss_of(error), str(error), 0, 0.0
        )


@dataclass(frozen=True)
class LoadDone:
    """What arrived, verified and in place."""

    job_id: int
    session_id: str
    num_tokens: int
    """Tokens from `first_block` on whose KV is in the destination, up to the first hole."""
    tokens_by_tier: Mapping[str, int]
    """tier -> tokens; sums to num_tokens."""
    miss: MissReason | None
    """None where everything that was asked for arrived."""
    miss_detail: str
    num_bytes: int
    """Bytes of frames read."""
    seconds: float
    """In the worker, without the wait in the queue."""
    block_hashes: Sequence[BlockHash] = ()
    """Of the log's full blocks from 0 on, as far as frames were verified against them."""


def run_load(
    job: LoadJob,
    stores: Mapping[str, BlockStore],
    deadline: float,
    copies: HostStore | None = None,
) -> LoadDone:
    """Do a load until `deadline` (time.monotonic()). Raises nothing for whatever the stores hold or
    do.

    `copies` is asked before a frame's home is, and keeps what it did not have once it is verified.
    """
    started = time.monotonic()
    size = job.geometry.block_size
    loaded = num_bytes = 0
    by_tier: dict[str, int] = {}
    hashes: Sequence[BlockHash] = ()
    miss: MissReason | None = None
    detail = ""
    try:
        chain = _chain(job)
        if job.seek:
            manifest = with_found_runs(job.manifest, chain, job.first_block, stores, deadline)
            job = replace(job, manifest=manifest)
        for ref, found_in, found in _frames(job, stores, deadline, copies, chain):
            tier, data = found_in, found
            num_bytes += len(data)
            try:
                tokens = _place(job, ref, data, chain)
            except FrameMismatch as error:
                _drop(job, ref, stores[tier], deadline)
                if tier == ref.tier:
                    raise _miss_for(error) from None
                tier, data = ref.tier, _read_home(job, ref, stores, deadline)  # the copy was bad
                num_bytes += len(data)
                try:
                    tokens = _place(job, ref, data, chain)
                except FrameMismatch as second:
                    _drop(job, ref, stores[tier], deadline)
                    raise _miss_for(second) from None
            if copies is not None and tier != copies.tier:
                copies.keep(
                    [(ref.key, data)], job.manifest.session_id, job.manifest.lineage.namespace
                )
            loaded += tokens
            hashes = chain.hashes
            by_tier[tier] = by_tier.get(tier, 0) + tokens
    except _Miss as stop:
        miss, detail = stop.reason, stop.detail
    position = job.first_block * size + loaded
    if miss is not None:
        detail = f"at token {position}: {detail}"
    return LoadDone(
        job_id=job.job_id,
        session_id=job.manifest.session_id,
        num_tokens=loaded,
        tokens_by_tier=by_tier,
        miss=miss,
        miss_detail=detail,
        num_bytes=num_bytes,
        seconds=time.monotonic() - started,
        block_hashes=hashes[: position // size],
    )


class _Miss(Exception):
    """Ends a load at the first hole."""

    def __init__(self, reason: MissReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def _frames(
    job: LoadJob,
    stores: Mapping[str, BlockStore],
    deadline: float,
    copies: HostStore | None,
    chain: Chain,
) -> Iterator[tuple[FrameReference, str, Bytes]]:
    """The needed frames, the tier that gave them and their bytes, in order. Raises _Miss at the first
    that is not to be had.
    """
    manifest = job.manifest
    last = job.first_block + len(job.blocks)
    needed = [
        ref
        for ref in manifest.frames
        if ref.first_block + ref.num_blocks > job.first_block and ref.first_block < last
    ]
    log_len = num_tokens_in(job.token_ids)
    beyond = [
        ref for ref in needed if ref.first_block * manifest.block_size + ref.num_tokens > log_len
    ]
    needed = needed[: len(needed) - len(beyond)]
    while needed:
        if copies is not None and needed[0].tier != copies.tier:
            ref = needed[0]
            (data,) = copies.get(
                [ref.key], manifest.session_id, manifest.lineage.namespace, job.deadline_s
            )
            if data is not None:
                yield needed.pop(0), copies.tier, data
                continue
        batch = _batch(needed)
        store = stores.get(batch[0].tier)
        if store is None:
            raise _Miss(
                MissReason.TIER_MISSING,
                f"the manifest names tier {batch[0].tier}, not configured here",
            )
        del needed[: len(batch)]
        for ref, data in _read(job, store, batch, deadline):
            if data is not None:
                yield ref, ref.tier, data
            else:
                yield ref, *_read_elsewhere(job, ref, stores, deadline)
    if beyond:
        raise _Miss(
            MissReason.LOG_DIFFERS,
            f"the log has {log_len} tokens and the next frame covers"
            f" {beyond[0].num_tokens} from block {beyond[0].first_block} on",
        )


def _chain(job: LoadJob) -> Chain:
    """Hashes of what the load may cover. Raises _Miss for a manifest of another layout."""
    _check_layout(job)
    num_tokens = num_tokens_in(job.token_ids)
    if not job.seek:
        num_tokens = min(num_tokens, job.manifest.num_tokens)
    return Chain(job.manifest.lineage, job.token_ids, num_tokens, job.geometry)


def _miss_for(error: FrameMismatch) -> _Miss:
    return _Miss(_REASONS.get(error.reason, MissReason.OTHER_CONTENT), str(error))


def _read_home(
    job: LoadJob, ref: FrameReference, stores: Mapping[str, BlockStore], deadline: float
) -> Bytes:
    """One frame from the tier that the manifest names. Raises _Miss."""
    if ref.tier not in stores:
        raise _Miss(
            MissReason.TIER_MISSING, f"the manifest names tier {ref.tier}, not configured here"
        )
    for _, data in _read(job, stores[ref.tier], [ref], deadline):
        if data is not None:
            return data
    raise _not_stored(ref)


def _read_elsewhere(
    job: LoadJob, ref: FrameReference, stores: Mapping[str, BlockStore], deadline: float
) -> tuple[str, Bytes]:
    """A run that its tier has lost, from another tier, and which. Raises _Miss."""
    if ref.key.shared:
        for tier, store in stores.items():
            if tier == ref.tier:
                continue
            try:
                for _, data in _read(job, store, [ref], deadline):
                    if data is not None:
                        return tier, data
            except _Miss:
                continue  # the reason that counts is that its own tier has it no more
    raise _not_stored(ref)


def _not_stored(ref: FrameReference) -> _Miss:
    return _Miss(
        MissReason.NOT_STORED,
        f"tier {ref.tier} has no {ref.key.kind} frame of block {ref.first_block}",
    )


def _check_layout(job: LoadJob) -> None:
    ours, theirs = job.geometry, job.manifest.geometry
    for name in ("block_size", "num_layers", "num_kv_heads", "head_dim", "dtype", "codec"):
        if getattr(ours, name) != getattr(theirs, name):
            raise _Miss(
                MissReason.INCOMPATIBLE,
                f"{name} is {getattr(theirs, name)} in the manifest and {getattr(ours, name)} here",
            )


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


def _read(
    job: LoadJob, store: BlockStore, batch: Sequence[FrameReference], deadline: float
) -> Iterator[tuple[FrameReference, Bytes | None]]:
    """A batch in one call; where that fails, one by one, so that what stands before the fault is
    not lost. None for what the store has not.
    """
    session_id, namespace = job.manifest.session_id, job.manifest.lineage.namespace
    groups = [list(batch)]
    while groups:
        group = groups.pop(0)
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise _Miss(MissReason.TIMED_OUT, f"the load's {job.deadline_s} s have passed")
        try:
            found = store.get([ref.key for ref in group], session_id, namespace, remaining)
        except CacheError as error:
            if len(group) > 1 and not isinstance(error, StoreTimeout):
                groups = [[ref] for ref in group]
                continue
            raise _Miss(_miss_of(error), str(error)) from error
        yield from zip(group, found, strict=True)


def _place(job: LoadJob, ref: FrameReference, data: Bytes, chain: Chain) -> int:
    """Verify one frame and copy what is needed of it; returns the tokens that it brought.

    Raises FrameMismatch for a frame that is not what its key promises, _Miss where the log is
    another one.
    """
    manifest, geometry = job.manifest, job.geometry
    size = geometry.block_size
    piece = Piece(ref.first_block, ref.num_tokens, ref.key.shared)
    if piece.shared and ref.key.name != chain.hash_before(ref.first_block + ref.num_blocks):
        raise _Miss(
            MissReason.LOG_DIFFERS,
            f"blocks {ref.first_block} … {ref.first_block + ref.num_blocks - 1} hold other tokens",
        )
    header = chain.header(piece, ref.key, manifest.generation)
    checksum = None if piece.shared else ref.checksum
    try:
        _, payload = decode_frame(data, FrameExpectation(header, checksum))
    except FrameMismatch as error:
        ours_changed = error.reason in (MismatchReason.TOKENS, MismatchReason.LINEAGE)
        if ours_changed and not piece.shared:  # a private frame is named by session, not by content
            raise _Miss(MissReason.LOG_DIFFERS, str(error)) from error
        raise
    skipped = max(0, job.first_block - ref.first_block)
    at = ref.first_block + skipped - job.first_block
    num_blocks = min(ref.num_blocks - skipped, len(job.blocks) - at)
    into: list[memoryview | None] = [None] * ref.num_blocks
    for index in range(num_blocks):
        into[skipped + index] = as_bytes_view(job.blocks[at + index])
    codec.decode(geometry, ref.first_block, piece.shared, ref.num_blocks, payload, into)
    return min(ref.num_tokens - skipped * size, num_blocks * size)


def _drop(job: LoadJob, ref: FrameReference, store: BlockStore, deadline: float) -> None:
    """Remove a bad frame, so that the next park writes it anew instead of finding that it
    exists.
    """
    remaining = max(0.0, deadline - time.monotonic())
    manifest = job.manifest
    try:
        store.drop([ref.key], manifest.session_id, manifest.lineage.namespace, remaining)
    except StoreError:
        return  # it stays a miss, and goes by age


def _miss_of(error: CacheError) -> MissReason:
    if isinstance(error, StoreTimeout):
        return MissReason.TIMED_OUT
    if isinstance(error, WorkersClosed):
        return MissReason.CLOSED
    return MissReason.STORE_FAILED
