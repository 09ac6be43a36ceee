"""Parking and restoring contexts: the engine thread's side of tier I/O.

Park: snapshot the block list, copy device → staging on the engine thread, let a worker frame, checksum and store
it, hand the manifest out, and free device blocks only once sessions says that the manifest is durable. Restore:
match the device tree first, read what is missing from the tiers, verify, put it in place, and leave everything
behind the first hole to be recomputed. Lost frames are misses, never errors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog
import torch

from moorage.engine.context import Context, Generation, Phase
from moorage.engine.loading import LoadedModel
from moorage.engine.output import (
    EngineEvent,
    EngineFault,
    FaultCode,
    ParkDone,
    ParkPrepared,
    ParkRefused,
    RestoreDone,
    TokensBySource,
)
from moorage.engine.request import ParkTier
from moorage.engine.scheduler import Scheduler
from moorage.engine.settings import EngineConfig
from moorage.prefix_cache import tiers
from moorage.prefix_cache.block import Namespace
from moorage.prefix_cache.errors import CacheError, ManifestMismatch
from moorage.prefix_cache.parked_context import ParkedContext

_log = structlog.get_logger("moorage.engine")


@dataclass
class TierCounters:
    """What the tiers gave and took since the engine started; tokens are counted after verification."""

    bytes_parked: int = 0
    bytes_restored: int = 0
    tokens_device: int = 0
    tokens_host: int = 0
    tokens_disk: int = 0
    tokens_redis: int = 0
    tokens_recomputed: int = 0
    tokens_new: int = 0
    store_failures: int = 0


@dataclass(frozen=True)
class _LoadInFlight:
    context: Context
    staging: torch.Tensor
    first_block: int
    started_s: float


class Parking:
    """Starts and ends tier jobs for the step loop; owns the workers, the stores behind them, and the counters."""

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        complete: Callable[[tiers.Completion], None],
    ) -> None:
        self._deadline_s = config.tiers.deadline_s
        self._has_redis = config.tiers.redis_url is not None
        self._block_size = config.block_size
        self._kv = model.kv_cache
        self._cache = model.cache
        self._geometry = model.geometry
        self._workers = tiers.TierWorkers(
            model.stores,
            complete,
            num_workers=config.tiers.num_workers,
            queue_len=config.tiers.queue_len,
        )
        self._loads: dict[int, _LoadInFlight] = {}
        self._prepared: dict[tuple[str, int], ParkedContext] = {}
        self._next_job = 0
        self.counters = TierCounters()

    def close(self, deadline_s: float) -> None:
        """Stop the workers; waits at most `deadline_s`."""
        self._workers.close(deadline_s)

    # -- park ----------------------------------------------------------------------------------------------

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
        if tier == "redis" and not self._has_redis:
            return [
                _refused(
                    session_id,
                    generation,
                    FaultCode.STORE,
                    "no Redis is configured: start the server with --redis URL or park to host",
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
        num_blocks = -(-context.num_computed // self._block_size)
        staging = self._kv.gather(context.table.block_ids[:num_blocks])
        job = tiers.ParkJob(
            session_id=session_id,
            generation=generation,
            lineage=context.lineage,
            token_ids=context.tokens(0, context.num_computed),
            block_hashes=tuple(context.table.block_hashes),
            payload=_bytes_of(staging),
            num_tokens=context.num_computed,
            geometry=self._geometry,
            tier=("redis" if self._has_redis else "host") if tier == "auto" else tier,
            fall_back_to_host=tier == "auto",
            deadline_s=self._deadline_s,
        )
        try:
            self._workers.park(job)
        except CacheError as error:
            return [_refused(session_id, generation, FaultCode.STORE, str(error))]
        context.parking = generation
        return []

    def committed(
        self, context: Context | None, session_id: str, generation: int
    ) -> list[EngineEvent]:
        """The manifest is durable: free the blocks, forget the frames that it supersedes."""
        manifest = self._prepared.pop((session_id, generation), None)
        if context is None or context.parking != generation or manifest is None:
            return [ParkDone(session_id, generation, 0)]
        context.parking = None
        self._delete(context.manifest, superseded_by=manifest)
        context.manifest = manifest
        freed = 0
        if context.generation is None and context.table is not None:
            freed = self._cache.discard(context.table)
            context.table = None
            context.num_computed = 0
            context.lost_reason = ""
        return [ParkDone(session_id, generation, freed)]

    def failed(self, context: Context | None, session_id: str, generation: int) -> None:
        """The manifest is not durable: drop the new frames, keep the blocks."""
        manifest = self._prepared.pop((session_id, generation), None)
        if context is not None and context.parking == generation:
            context.parking = None
        self._delete(manifest)

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
                self._delete(manifest)

    def _delete(
        self, manifest: ParkedContext | None, superseded_by: ParkedContext | None = None
    ) -> None:
        """Let go of a manifest's frames, less those that a newer one still names. Best effort: what cannot be deleted
        now goes by age."""
        if manifest is None:
            return
        for tier, keys in manifest.keys_by_tier(without=superseded_by).items():
            job = tiers.DeleteJob(
                session_id=manifest.session_id,
                namespace=manifest.lineage.namespace,
                keys=keys,
                tier=tier,
                deadline_s=self._deadline_s,
            )
            try:
                self._workers.delete(job)
            except CacheError as error:
                _log.warning(
                    "old frames left to age", session_id=manifest.session_id, reason=str(error)
                )

    # -- restore -------------------------------------------------------------------------------------------

    def adopt_manifest(self, context: Context, manifest_bytes: bytes | None) -> None:
        """Read the manifest that sessions handed in; one that cannot be used is a miss, with its reason."""
        if manifest_bytes is None:
            return
        try:
            manifest = ParkedContext.from_bytes(manifest_bytes)
        except ManifestMismatch as error:
            context.manifest = None
            context.lost_reason = f"manifest: {error.reason}"
            return
        if manifest.lineage != context.lineage:
            context.manifest = None
            context.lost_reason = f"manifest: {_lineage_difference(manifest, context)}"
            return
        context.manifest = manifest

    def open(self, context: Context, generation: Generation) -> Phase:
        """Give the context a table and start whatever load it needs; the phase it is then in."""
        if context.table is None:
            self._open_from_tree(context)
            if generation.sources is None and self._start_load(context):
                generation.load_started_s = time.monotonic()
                return Phase.LOADING
        if generation.sources is None:
            self.settle(context, generation, {}, context.lost_reason)
        return Phase.RUNNING

    def begin_restore(self, context: Context) -> RestoreDone | None:
        """Bring KV back without a generation. None where a load was started."""
        if context.table is None:
            self._open_from_tree(context)
            if self._start_load(context):
                context.restoring = True
                return None
        return RestoreDone(
            context.session_id,
            _sources(context, context.num_computed, {}, context.num_computed, context.lost_reason),
            0,
            0.0,
        )

    @staticmethod
    def restore_refused(session_id: str, fault: EngineFault) -> RestoreDone:
        """The answer to a `Restore` that cannot be done now."""
        return RestoreDone(session_id, TokensBySource(), 0, 0.0, fault)

    def _open_from_tree(self, context: Context) -> None:
        """The longest prefix on the device; at most all but the last token, whose logits are needed."""
        tokens = context.tokens(0, context.num_tokens - 1)
        match = self._cache.match(context.lineage, tokens)
        context.table = self._cache.open(match)
        context.num_computed = match.num_tokens

    def _start_load(self, context: Context) -> bool:
        manifest = context.manifest
        if manifest is None or manifest.num_tokens <= context.num_computed:
            return False
        first_block = context.num_computed // self._block_size
        end = min(manifest.num_tokens, context.num_tokens - 1)
        num_blocks = -(-end // self._block_size) - first_block
        if num_blocks <= 0:
            return False
        staging = torch.empty((num_blocks, *self._kv.block_shape), dtype=self._kv.dtype)
        job = tiers.LoadJob(
            job_id=self._next_job,
            manifest=manifest,
            first_block=first_block,
            token_ids=context.tokens(0, end),
            destination=_bytes_of(staging),
            geometry=self._geometry,
            deadline_s=self._deadline_s,
        )
        try:
            self._workers.load(job)
        except CacheError as error:
            context.lost_reason = f"not loaded: {error}"
            return False
        self._loads[self._next_job] = _LoadInFlight(context, staging, first_block, time.monotonic())
        context.loading = self._next_job
        self._next_job += 1
        return True

    def settle(
        self,
        context: Context,
        generation: Generation,
        by_tier: Mapping[str, int],
        reason: str,
    ) -> None:
        """Account for every token of the log: where its KV came from."""
        loaded = sum(by_tier.values())
        sources = _sources(
            context, context.num_computed - loaded, by_tier, generation.request.num_known, reason
        )
        generation.sources = sources
        generation.admitted_s = time.monotonic()
        counters = self.counters
        counters.tokens_device += sources.device
        counters.tokens_host += sources.host
        counters.tokens_disk += sources.disk
        counters.tokens_redis += sources.redis
        counters.tokens_recomputed += sources.recomputed
        counters.tokens_new += sources.new

    # -- completions ---------------------------------------------------------------------------------------

    def complete(
        self, done: tiers.Completion, contexts: dict[str, Context], scheduler: Scheduler
    ) -> list[EngineEvent]:
        """A worker finished. Late completions of something that ended meanwhile are dropped."""
        if isinstance(done, tiers.ParkDone):
            return self._park_finished(done, contexts.get(done.session_id))
        if isinstance(done, tiers.LoadDone):
            return self._load_finished(done, scheduler)
        self.counters.store_failures += done.error is not None
        return []

    def _park_finished(self, done: tiers.ParkDone, context: Context | None) -> list[EngineEvent]:
        manifest = done.manifest
        self.counters.store_failures += done.error is not None
        if context is None or context.parking != done.generation:
            self._delete(manifest)
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
        self.counters.bytes_parked += done.num_bytes
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

    def _load_finished(self, done: tiers.LoadDone, scheduler: Scheduler) -> list[EngineEvent]:
        load = self._loads.pop(done.job_id)
        context = load.context
        reason = f"{done.miss}: {done.miss_detail}" if done.miss is not None else ""
        by_tier: Mapping[str, int] = done.tokens_by_tier
        if context.loading != done.job_id:
            return []  # aborted, released or closed while the read was under way
        context.loading = None
        self.counters.store_failures += done.miss in _STORE_FAULTS
        if not self._place(load, done.num_tokens, scheduler):
            by_tier, reason = {}, "device memory was short for the restored blocks"
        self.counters.bytes_restored += done.num_bytes
        seconds = time.monotonic() - load.started_s
        if context.restoring:
            context.restoring = False
            known = context.manifest.num_tokens if context.manifest else 0
            loaded = sum(by_tier.values())
            sources = _sources(context, context.num_computed - loaded, by_tier, known, reason)
            return [RestoreDone(context.session_id, sources, done.num_bytes, seconds)]
        generation = context.generation
        if generation is not None:
            generation.restore_s = seconds
            generation.phase = Phase.RUNNING
            self.settle(context, generation, by_tier, reason)
        return []

    def _place(self, load: _LoadInFlight, num_tokens: int, scheduler: Scheduler) -> bool:
        """Verified KV into device blocks, and full blocks into the tree."""
        context = load.context
        if num_tokens == 0 or context.table is None:
            return True
        end = load.first_block * self._block_size + num_tokens
        if not scheduler.make_room(context, end, set()):
            return False
        last_block = -(-end // self._block_size)
        self._kv.scatter(context.table.block_ids[load.first_block : last_block], load.staging)
        context.num_computed = end
        self._cache.commit(context.table, context.token_ids, end)
        return True


_STORE_FAULTS = (tiers.MissReason.STORE_FAILED, tiers.MissReason.TIMED_OUT)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """A writable byte view of a contiguous host tensor; the view keeps the tensor's memory alive."""
    return tensor.view(torch.uint8).reshape(-1).numpy().data


def _refused(session_id: str, generation: int, code: FaultCode, message: str) -> ParkRefused:
    return ParkRefused(session_id, generation, EngineFault(code, message))


def _lineage_difference(manifest: ParkedContext, context: Context) -> str:
    if manifest.lineage.namespace != context.lineage.namespace:
        return "another namespace"
    if manifest.lineage.fingerprint != context.lineage.fingerprint:
        return "another model, config, numerics profile or run size"
    return "another extra key"


def _sources(
    context: Context, device: int, by_tier: Mapping[str, int], num_known: int, reason: str
) -> TokensBySource:
    """Every token of the log by where its KV came from; sums to the log's length."""
    covered = device + sum(by_tier.values())
    recomputed = max(0, num_known - covered)
    return TokensBySource(
        device=device,
        host=by_tier.get("host", 0),
        disk=by_tier.get("disk", 0),
        redis=by_tier.get("redis", 0),
        recomputed=recomputed,
        new=context.num_tokens - max(covered, num_known),
        recomputed_reason=(reason or "not on the device and not parked") if recomputed else "",
    )
