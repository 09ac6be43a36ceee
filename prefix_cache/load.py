"""Loading one parked context: read frames in order, verify each, copy it into place, stop at the
first hole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from moorage.prefix_cache.block import BlockHash, Bytes, num_tokens_in
from moorage.prefix_cache.errors import (
    CacheError,
    FrameMismatch,
    InvalidInput,
    MismatchReason,
    StoreError,
)
from moorage.prefix_cache.frame import Geometry
from moorage.prefix_cache.frame_check import FrameExpectation
from moorage.prefix_cache.host_store import HostStore
from moorage.prefix_cache.lanes import Lanes
from moorage.prefix_cache.misses import Miss, MissReason, miss_for, miss_of
from moorage.prefix_cache.park import Chain, Piece
from moorage.prefix_cache.parked_context import FrameReference, ParkedContext
from moorage.prefix_cache.placing import FrameGone, place_frame
from moorage.prefix_cache.reading import Reader, Source
from moorage.prefix_cache.seek import with_found_runs
from moorage.prefix_cache.store import BlockStore, validate_session_id


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
    Written until LoadDone, the reader's alone until then: a frame is checked as it is put in place, and wiped out
    where it is not what was promised."""
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
        size = self.geometry.block_bytes
        for index, block in enumerate(self.blocks):
            if block.readonly or block.nbytes != size or not block.c_contiguous:
                raise InvalidInput(
                    f"block {index} has {block.nbytes} bytes"
                    f"{' and is read-only' if block.readonly else ''}: give writable, contiguous blocks of {size}"
                )

    def failed(self, error: CacheError) -> LoadDone:
        """The answer where nothing was loaded."""
        return LoadDone(
            self.job_id, self.manifest.session_id, 0, {}, miss_of(error), str(error), 0, 0.0
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
    *,
    lanes: Lanes | None = None,
    later: list[Callable[[], None]] | None = None,
) -> LoadDone:
    """Do a load until `deadline` (time.monotonic()). Raises nothing for whatever the stores hold or
    do.

    `copies` is asked before a frame's home is, and keeps what it did not have once it is verified: by tasks
    that are added to `later`, for after the answer, or before the return. `lanes` share the copying and checking.
    """
    load = _Load(job, started_s=time.monotonic())
    miss: MissReason | None = None
    detail = ""
    try:
        load.run(stores, deadline, copies, lanes or _ONE_LANE)
    except Miss as stop:
        miss = stop.reason
        detail = f"at token {load.position}: {stop.detail}"
    if later is not None:
        later.extend(load.later)
    else:
        for task in load.later:
            task()
    return load.done(miss, detail)


_ONE_LANE = Lanes(1)


@dataclass
class _Load:
    """A load under way."""

    job: LoadJob
    started_s: float
    num_tokens: int = 0
    num_bytes: int = 0
    by_tier: dict[str, int] = field(default_factory=dict)
    hashes: Sequence[BlockHash] = ()
    later: list[Callable[[], None]] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Tokens of the log whose KV is in place."""
        return self.job.first_block * self.job.geometry.block_size + self.num_tokens

    def done(self, miss: MissReason | None, detail: str) -> LoadDone:
        size = self.job.geometry.block_size
        return LoadDone(
            job_id=self.job.job_id,
            session_id=self.job.manifest.session_id,
            num_tokens=self.num_tokens,
            tokens_by_tier=self.by_tier,
            miss=miss,
            miss_detail=detail,
            num_bytes=self.num_bytes,
            seconds=time.monotonic() - self.started_s,
            block_hashes=self.hashes[: self.position // size],
        )

    def run(
        self,
        stores: Mapping[str, BlockStore],
        deadline: float,
        copies: HostStore | None,
        lanes: Lanes,
    ) -> None:
        """Frame after frame, a batch of them at once. Raises Miss at the first hole."""
        job = self.job
        chain = _chain(job)
        if job.seek:
            manifest = with_found_runs(job.manifest, chain, job.first_block, stores, deadline)
            job = replace(job, manifest=manifest)
        needed, beyond = _needed(job)
        reader = Reader(job.manifest, stores, copies, deadline)
        for batch in reader.batches(needed):
            rest = batch
            while rest:
                num_bytes = sum(source.ref.size_bytes for source in rest)
                results = lanes.run(
                    [partial(_place, job, source, chain) for source in rest], num_bytes
                )
                for source, result in zip(rest, results, strict=False):  # up to the first fault
                    self._take(job, reader, chain, source, result)
                rest = rest[len(results) :]
        if beyond:
            raise Miss(
                MissReason.LOG_DIFFERS,
                f"the log has {num_tokens_in(job.token_ids)} tokens and the next frame covers"
                f" {beyond[0].num_tokens} from block {beyond[0].first_block} on",
            )

    def _take(
        self,
        job: LoadJob,
        reader: Reader,
        chain: Chain,
        source: Source,
        result: int | Exception,
    ) -> None:
        """Count a frame that is in place; a bad copy is read again from its home. Raises Miss."""
        self.num_bytes += source.ref.size_bytes
        if isinstance(result, FrameMismatch):
            reader.drop(source)
            if source.tier == source.ref.tier:
                raise miss_for(result)
            source = reader.home(source.ref)
            self.num_bytes += source.ref.size_bytes
            try:
                result = _place(job, source, chain)
            except FrameMismatch as error:
                reader.drop(source)
                raise miss_for(error) from None
        if isinstance(result, StoreError):
            raise Miss(miss_of(result), str(result))
        if isinstance(result, Exception):
            raise result
        self.later.append(partial(reader.keep, source))
        self.num_tokens += result
        self.hashes = chain.hashes
        self.by_tier[source.tier] = self.by_tier.get(source.tier, 0) + result


def _needed(job: LoadJob) -> tuple[list[FrameReference], list[FrameReference]]:
    """The frames that the load needs, and of those the ones that reach beyond the log, in order."""
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
    return needed[: len(needed) - len(beyond)], beyond


def _chain(job: LoadJob) -> Chain:
    """Hashes of what the load may cover. Raises Miss for a manifest of another layout."""
    _check_layout(job)
    num_tokens = num_tokens_in(job.token_ids)
    if not job.seek:
        num_tokens = min(num_tokens, job.manifest.num_tokens)
    return Chain(job.manifest.lineage, job.token_ids, num_tokens, job.geometry)


def _check_layout(job: LoadJob) -> None:
    ours, theirs = job.geometry, job.manifest.geometry
    for name in ("block_size", "num_layers", "num_kv_heads", "head_dim", "dtype", "codec"):
        if getattr(ours, name) != getattr(theirs, name):
            raise Miss(
                MissReason.INCOMPATIBLE,
                f"{name} is {getattr(theirs, name)} in the manifest and {getattr(ours, name)} here",
            )


def _place(job: LoadJob, source: Source, chain: Chain) -> int:
    """Verify one frame and put what is needed of it in place; returns the tokens that it brought.

    Raises FrameMismatch for a frame that is not what its key promises, Miss where the log is
    another one or the frame is gone, StoreError.
    """
    ref, geometry = source.ref, job.geometry
    size = geometry.block_size
    piece = Piece(ref.first_block, ref.num_tokens, ref.key.shared)
    if piece.shared and ref.key.name != chain.hash_before(ref.first_block + ref.num_blocks):
        raise Miss(
            MissReason.LOG_DIFFERS,
            f"blocks {ref.first_block} … {ref.first_block + ref.num_blocks - 1} hold other tokens",
        )
    header = chain.header(piece, ref.key, job.manifest.generation)
    checksum = None if piece.shared else ref.checksum
    skipped = max(0, job.first_block - ref.first_block)
    at = ref.first_block + skipped - job.first_block
    num_blocks = min(ref.num_blocks - skipped, len(job.blocks) - at)
    into: list[memoryview | None] = [None] * ref.num_blocks
    into[skipped : skipped + num_blocks] = job.blocks[at : at + num_blocks]
    try:
        place_frame(geometry, FrameExpectation(header, checksum), source.stored, into)
    except FrameGone:
        raise Miss(MissReason.NOT_STORED, f"tier {source.tier} has lost a frame") from None
    except FrameMismatch as error:
        ours_changed = error.reason in (MismatchReason.TOKENS, MismatchReason.LINEAGE)
        if ours_changed and not piece.shared:  # a private frame is named by session, not by content
            raise Miss(MissReason.LOG_DIFFERS, str(error)) from error
        raise
    return min(ref.num_tokens - skipped * size, num_blocks * size)
