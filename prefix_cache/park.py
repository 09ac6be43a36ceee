"""Parking one context: cut it into frames, checksum them, put them, write the manifest."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from moorage.prefix_cache import codec
from moorage.prefix_cache.block import (
    TOKEN_BYTES,
    BlockHash,
    Bytes,
    Lineage,
    digest_tokens,
    hash_chain,
    num_tokens_in,
)
from moorage.prefix_cache.errors import CacheError, InvalidInput, StoreError
from moorage.prefix_cache.evicted_run import EvictedRun
from moorage.prefix_cache.failpoints import Failpoint, hit
from moorage.prefix_cache.frame import (
    Frame,
    FrameHeader,
    FrameKey,
    Geometry,
    as_bytes_view,
    frame_header,
    private_key,
    run_key,
)
from moorage.prefix_cache.host_store import HostStore
from moorage.prefix_cache.parked_context import FrameReference, ParkedContext
from moorage.prefix_cache.store import BlockStore, validate_session_id

NO_CHECKSUM = bytes(16)
"""In a reference to a run frame: whoever wrote it first, it is found by its content's hash."""


@dataclass(frozen=True)
class ParkJob:
    """Store `num_tokens` of KV. The blocks are read until ParkDone: nobody may write them before."""

    session_id: str
    generation: int
    """Of the session; a new park takes a new one, so that private frames are never written over."""
    lineage: Lineage
    token_ids: Bytes = field(repr=False)
    """The covered tokens, `num_tokens` or more."""
    block_hashes: Sequence[BlockHash]
    """Of the leading full blocks as far as known (`BlockTable.block_hashes`); the rest is computed
    here.
    """
    blocks: Sequence[Bytes] = field(repr=False)
    """A buffer of [layers, 2, kv heads, block_size, head_dim] for each block from 0 on, contiguous.
    Slots of the last block beyond `num_tokens` are set to zero here (in a copy where the buffer is
    read-only): they may hold another tenant's KV."""
    num_tokens: int
    geometry: Geometry
    tier: str
    fall_back_to: tuple[str, ...]
    """Tiers that may take it where `tier` fails, in order; the manifest names the one that did."""
    deadline_s: float
    """Seconds from submission."""
    job_id: int = 0

    @property
    def num_blocks(self) -> int:
        """Blocks that `num_tokens` cover."""
        return -(-self.num_tokens // self.geometry.block_size)

    def validate(self) -> None:
        """Raises InvalidInput naming the value and the limit."""
        validate_session_id(self.session_id)
        if self.num_tokens < 1 or num_tokens_in(self.token_ids) < self.num_tokens:
            raise InvalidInput(
                f"num_tokens is {self.num_tokens}, the log has {num_tokens_in(self.token_ids)}:"
                " allowed is 1 … the log's length"
            )
        if len(self.blocks) < self.num_blocks:
            raise InvalidInput(
                f"{len(self.blocks)} blocks are given, {self.num_tokens} tokens need"
                f" {self.num_blocks}"
            )
        for index, block in enumerate(self.blocks[: self.num_blocks]):
            if as_bytes_view(block).nbytes != self.geometry.block_bytes:
                raise InvalidInput(
                    f"block {index} has {as_bytes_view(block).nbytes} bytes, one of this geometry"
                    f" has {self.geometry.block_bytes}"
                )

    def failed(self, error: CacheError) -> ParkDone:
        """The answer where nothing was stored."""
        return ParkDone(
            self.session_id, self.generation, None, error, self.tier, 0, 0.0, "", self.job_id
        )


@dataclass(frozen=True)
class ParkDone:
    """Either a manifest, and every frame in it is stored, or an error and no manifest."""

    session_id: str
    generation: int
    manifest: ParkedContext | None
    error: CacheError | None
    tier: str
    """Where the frames are (or should have gone)."""
    num_bytes: int
    """Bytes of all frames of the manifest, those included that were there before."""
    seconds: float
    """In the worker, without the wait in the queue."""
    degraded: str = ""
    """Why the asked tier was not taken; empty if it was."""
    job_id: int = 0


@dataclass(frozen=True)
class Piece:
    """A stretch of a context that becomes one frame: blocks [first_block, first_block + …) of
    `num_tokens`.
    """

    first_block: int
    num_tokens: int
    shared: bool


def cut(num_tokens: int, geometry: Geometry) -> list[Piece]:
    """Aligned whole runs, then what is left as one private piece."""
    run_tokens = geometry.run_blocks * geometry.block_size
    num_runs = num_tokens // run_tokens
    pieces = [Piece(index * geometry.run_blocks, run_tokens, True) for index in range(num_runs)]
    if left := num_tokens - num_runs * run_tokens:
        pieces.append(Piece(num_runs * geometry.run_blocks, left, False))
    return pieces


class Chain:
    """Block hashes of a log under a lineage, and the header that each stretch of it must have.

    Writer and reader both make their headers here, each from its own token log, so that a frame is
    accepted only where the reader would have written the same header.
    """

    def __init__(
        self,
        lineage: Lineage,
        token_ids: Bytes,
        num_tokens: int,
        geometry: Geometry,
        known: Sequence[BlockHash] = (),
    ) -> None:
        """`known` leading hashes are taken as they are; the rest costs about 1.5 µs a block."""
        size = geometry.block_size
        self.lineage = lineage
        self.geometry = geometry
        self.tokens = memoryview(token_ids)[: num_tokens * TOKEN_BYTES]
        self.hashes = list(known[: num_tokens // size])
        start = len(self.hashes) * size * TOKEN_BYTES
        self.hashes.extend(
            hash_chain(self.hash_before(len(self.hashes)), self.tokens[start:], size)
        )

    def hash_before(self, block: int) -> BlockHash:
        """Hash of the block before `block`; the lineage root before block 0."""
        return self.hashes[block - 1] if block else self.lineage.root

    def covered(self, first_block: int, num_tokens: int) -> memoryview:
        """Packed tokens of a stretch."""
        start = first_block * self.geometry.block_size * TOKEN_BYTES
        return self.tokens[start : start + num_tokens * TOKEN_BYTES]

    def key(self, piece: Piece, session_id: str, generation: int, index: int) -> FrameKey:
        """Key of a piece's frame."""
        if piece.shared:
            return run_key(
                self.hashes[piece.first_block + self.geometry.run_blocks - 1], self.geometry
            )
        return private_key(session_id, generation, index, self.geometry)

    def header(self, piece: Piece, key: FrameKey, generation: int) -> FrameHeader:
        """The only header that a frame of this piece may have."""
        full_end = piece.first_block + piece.num_tokens // self.geometry.block_size
        return frame_header(
            key=key,
            geometry=self.geometry,
            namespace=self.lineage.namespace,
            fingerprint=self.lineage.fingerprint,
            lineage_root=self.lineage.root,
            parent_hash=self.hash_before(piece.first_block),
            last_hash=self.hash_before(full_end),
            token_digest=digest_tokens(self.covered(piece.first_block, piece.num_tokens)),
            first_block=piece.first_block,
            num_tokens=piece.num_tokens,
            generation=generation,
            payload_bytes=codec.coded_bytes(
                self.geometry,
                piece.first_block,
                -(-piece.num_tokens // self.geometry.block_size),
                piece.shared,
            ),
        )


def run_frame(
    run: EvictedRun, geometry: Geometry, blocks: Sequence[Bytes]
) -> tuple[FrameKey, Frame]:
    """The frame that a park would write for the same run. `blocks` stay unchanged while it is written."""
    key = run_key(run.last_hash, geometry)
    header = frame_header(
        key=key,
        geometry=geometry,
        namespace=run.lineage.namespace,
        fingerprint=run.lineage.fingerprint,
        lineage_root=run.lineage.root,
        parent_hash=run.parent_hash,
        last_hash=run.last_hash,
        token_digest=digest_tokens(run.token_ids),
        first_block=run.first_block,
        num_tokens=geometry.run_blocks * geometry.block_size,
        generation=0,
        payload_bytes=codec.coded_bytes(geometry, run.first_block, geometry.run_blocks, True),
    )
    views = [as_bytes_view(block) for block in blocks]
    return key, Frame(header, partial(codec.encode, geometry, run.first_block, True, views))


def run_park(
    job: ParkJob,
    stores: Mapping[str, BlockStore],
    deadline: float,
    copies: HostStore | None = None,
) -> ParkDone:
    """Do a park, to the end of which `deadline` (time.monotonic()) applies. `copies` keeps the frames
    too, where another tier is their home.

    Frames go first, the manifest is made only once `put` has returned. A failed put may leave
    frames behind; nothing names them, they go by age, and a later park of the same prefix uses
    them.
    """
    started = time.monotonic()
    frames = make_frames(job)
    tier, degraded = job.tier, ""
    failures: list[StoreError] = []
    for tier in (job.tier, *(other for other in job.fall_back_to if other != job.tier)):
        try:
            _put(job, stores[tier], frames, deadline)
            break
        except StoreError as error:
            failures.append(error)
            degraded = degraded or str(error)
        except InvalidInput as error:  # the codec cannot hold a value
            return job.failed(error)
    else:
        for earlier in failures[:-1]:
            failures[-1].add_note(f"before that: {earlier}")
        return job.failed(failures[-1])
    if copies is not None and tier != copies.tier:
        copies.keep(frames, job.session_id, job.lineage.namespace)
    manifest = ParkedContext(
        lineage=job.lineage,
        session_id=job.session_id,
        generation=job.generation,
        geometry=job.geometry,
        num_tokens=job.num_tokens,
        token_digest=digest_tokens(memoryview(job.token_ids)[: job.num_tokens * TOKEN_BYTES]),
        frames=tuple(
            FrameReference(
                key,
                tier,
                frame.header.first_block,
                frame.header.num_blocks,
                frame.header.num_tokens,
                frame.size_bytes,
                NO_CHECKSUM if key.shared else frame.checksum,
            )
            for key, frame in frames
        ),
    )
    return ParkDone(
        session_id=job.session_id,
        generation=job.generation,
        manifest=manifest,
        error=None,
        tier=tier,
        num_bytes=manifest.size_bytes,
        seconds=time.monotonic() - started,
        degraded=degraded,
        job_id=job.job_id,
    )


def make_frames(job: ParkJob) -> list[tuple[FrameKey, Frame]]:
    """The job's frames, in order; payloads are views of the job's blocks."""
    geometry = job.geometry
    chain = Chain(job.lineage, job.token_ids, job.num_tokens, geometry, job.block_hashes)
    blocks = _clear_unused(job)
    frames: list[tuple[FrameKey, Frame]] = []
    for index, piece in enumerate(cut(job.num_tokens, geometry)):
        key = chain.key(piece, job.session_id, job.generation, index)
        header = chain.header(piece, key, job.generation)
        own = blocks[piece.first_block : piece.first_block + header.num_blocks]
        make = partial(codec.encode, geometry, piece.first_block, piece.shared, own)
        frames.append((key, Frame(header, make)))
    return frames


def _put(
    job: ParkJob, store: BlockStore, frames: Sequence[tuple[FrameKey, Frame]], deadline: float
) -> None:
    hit(Failpoint.PARK_BEFORE_PUT)
    remaining = max(0.0, deadline - time.monotonic())
    store.put(frames, job.session_id, job.lineage.namespace, remaining)
    hit(Failpoint.PARK_AFTER_PUT)


def _clear_unused(job: ParkJob) -> list[memoryview]:
    """The blocks with the last one's unused slots at zero; in place where the memory allows it."""
    views = [as_bytes_view(block) for block in job.blocks[: job.num_blocks]]
    used = job.num_tokens % job.geometry.block_size
    if used == 0:
        return views
    if views[-1].readonly:
        views[-1] = memoryview(bytearray(views[-1]))
    last = np.frombuffer(views[-1], dtype=np.uint8)
    slots = last.reshape(-1, job.geometry.block_size, job.geometry.token_head_bytes)
    slots[:, used:, :] = 0
    return views
