"""Parking contexts: the engine thread's side.

Snapshot the block list, let a worker frame, checksum and store the blocks, hand the manifest out, and free device
blocks only once sessions says that the manifest is durable.

Where the pool lies in host memory the worker reads the blocks in place: full ones are immutable, and a lock of the
park's own keeps them until the worker is done, whatever becomes of the session meanwhile. Only the tail is copied.
From other devices the blocks are copied to staging memory first.
"""

from __future__ import annotations

import structlog

from moorage.engine.context import Context
from moorage.engine.kv_cache import block_views
from moorage.engine.output import (
    EngineEvent,
    EngineFault,
    FaultCode,
    ParkDone,
    ParkPrepared,
    ParkRefused,
)
from moorage.engine.request import ParkTier
from moorage.engine.tier_io import TierIO
from moorage.prefix_cache import tiers
from moorage.prefix_cache.block import BlockTable, Namespace
from moorage.prefix_cache.errors import CacheError, ManifestMismatch
from moorage.prefix_cache.parked_context import ParkedContext

_log = structlog.get_logger("moorage.engine")


PREFERENCE = ("redis", "disk", "host")
"""What "auto" takes, the most durable first; the next one where that fails."""


class Parking:
    """Starts and ends parks for the step loop."""

    def __init__(self, io: TierIO) -> None:
        self._io = io
        self._tiers = [name for name in PREFERENCE if name in io.workers.stores]
        self._prepared: dict[tuple[str, int], ParkedContext] = {}
        self._pins: dict[int, BlockTable | None] = {}
        self._next_job = 0

    def begin(
        self, context: Context | None, session_id: str, generation: int, tier: ParkTier
    ) -> list[EngineEvent]:
        """Snapshot the context's blocks and hand them to a worker. Device blocks stay where they are."""
        if context is not None and not context.idle:
            return [
                _refused(
                    session_id,
                    generation,
                    FaultCode.STATE,
                    f"session {session_id} generates, loads or parks: park it when its turn has ended",
                )
            ]
        if tier != "auto" and tier not in self._tiers:
            return [
                _refused(
                    session_id,
                    generation,
                    FaultCode.STORE,
                    f"no {tier} tier is configured, there are {', '.join(self._tiers)}: start the server with"
                    " --redis URL or --disk-gib N, or park to host",
                )
            ]
        if context is None or context.table is None or context.num_computed == 0:
            return [
                _refused(
                    session_id,
                    generation,
                    FaultCode.STATE,
                    f"session {session_id} holds no KV on the device: there is nothing to park",
                )
            ]
        blocks, pin = self._snapshot(context, context.table)
        job = tiers.ParkJob(
            session_id=session_id,
            generation=generation,
            lineage=context.lineage,
            token_ids=context.tokens(0, context.num_computed),
            block_hashes=tuple(context.table.block_hashes),
            blocks=blocks,
            num_tokens=context.num_computed,
            geometry=self._io.geometry,
            tier=self._tiers[0] if tier == "auto" else tier,
            fall_back_to=tuple(self._tiers) if tier == "auto" else (),
            deadline_s=self._io.deadline_s,
            job_id=self._next_job,
        )
        try:
            self._io.workers.park(job)
        except CacheError as error:
            self._unpin(pin)
            return [_refused(session_id, generation, FaultCode.STORE, str(error))]
        self._pins[self._next_job] = pin
        self._next_job += 1
        context.parking = generation
        return []

    def _snapshot(
        self, context: Context, table: BlockTable
    ) -> tuple[list[memoryview], BlockTable | None]:
        """The bytes of the context's blocks, and a lock on those that are read in place."""
        kv, cache, size = self._io.kv, self._io.cache, self._io.block_size
        block_ids = table.block_ids[: -(-context.num_computed // size)]
        if not kv.in_host_memory:
            return block_views(kv.gather(block_ids)), None
        num_full = context.num_computed // size
        pin = cache.open(cache.match(context.lineage, context.tokens(0, num_full * size)))
        held = pin.block_ids
        if held != block_ids[: len(held)]:  # the tree has another copy of these tokens
            self._unpin(pin)
            return block_views(kv.gather(block_ids)), None
        tail = kv.gather(block_ids[len(held) :])
        return [*kv.views(held), *block_views(tail)], pin

    def _unpin(self, pin: BlockTable | None) -> None:
        if pin is not None:
            self._io.cache.release(pin)

    def committed(
        self, context: Context | None, session_id: str, generation: int
    ) -> list[EngineEvent]:
        """The manifest is durable: free the blocks, forget the frames that it supersedes."""
        manifest = self._prepared.pop((session_id, generation), None)
        if context is None or context.parking != generation or manifest is None:
            return [ParkDone(session_id, generation, 0)]
        context.parking = None
        self._io.delete(context.manifest, superseded_by=manifest)
        context.manifest = manifest
        freed = 0
        if context.generation is None and context.table is not None:
            freed = self._io.cache.discard(context.table)
            context.table = None
            context.num_computed = 0
            context.lost_reason = ""
        return [ParkDone(session_id, generation, freed)]

    def failed(self, context: Context | None, session_id: str, generation: int) -> None:
        """The manifest is not durable: drop the new frames, keep the blocks."""
        manifest = self._prepared.pop((session_id, generation), None)
        if context is not None and context.parking == generation:
            context.parking = None
        self._io.delete(manifest)

    def forget(
        self,
        namespace: Namespace,
        manifest_bytes: bytes | None,
        context: Context | None,
    ) -> None:
        """The session is closed: let go of its frames (shared runs live on for others)."""
        manifests = [context.manifest] if context is not None else []
        if manifest_bytes is not None:
            try:
                manifests.append(ParkedContext.from_bytes(manifest_bytes))
            except ManifestMismatch as error:
                _log.warning("closing a session whose manifest cannot be read", reason=str(error))
        for manifest in manifests:
            if manifest is not None and manifest.lineage.namespace == namespace:
                self._io.delete(manifest)

    def finished(self, done: tiers.ParkDone, context: Context | None) -> list[EngineEvent]:
        """A worker stored the frames, or could not. What comes too late is deleted again."""
        self._unpin(self._pins.pop(done.job_id))
        manifest = done.manifest
        self._io.counters.store_failures += done.error is not None
        if context is None or context.parking != done.generation:
            self._io.delete(manifest)
            return []
        if manifest is None:
            context.parking = None
            return [_refused(done.session_id, done.generation, FaultCode.STORE, str(done.error))]
        self._prepared[(done.session_id, done.generation)] = manifest
        if done.degraded:
            _log.warning(
                "parked to another tier than asked",
                session_id=done.session_id,
                tier=done.tier,
                reason=done.degraded,
            )
        self._io.counters.bytes_parked += done.num_bytes
        return [
            ParkPrepared(
                session_id=done.session_id,
                generation=done.generation,
                manifest=manifest.to_bytes(),
                tier=done.tier,
                num_tokens=manifest.num_tokens,
                num_bytes=done.num_bytes,
                seconds=done.seconds,
                degraded=done.degraded,
            )
        ]


def _refused(session_id: str, generation: int, code: FaultCode, message: str) -> ParkRefused:
    return ParkRefused(session_id, generation, EngineFault(code, message))
