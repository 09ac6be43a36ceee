"""Restoring contexts: the engine thread's side.

Match the device tree first, read what is missing from the tiers, verify, put it in place, and leave everything
behind the first hole to be recomputed. Lost frames are misses, never errors.

Where the pool lies in host memory the context grows by the blocks that it will need and the worker copies verified
frames straight into them; a context that is dropped meanwhile leaves them to the load, which gives them back when the
worker is done. From other devices, or where there is no room yet, the frames go to staging memory first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from moorage.engine.context import Context, Generation, Phase
from moorage.engine.kv_cache import block_views
from moorage.engine.output import EngineEvent, EngineFault, RestoreDone, TokensBySource
from moorage.engine.scheduler import Scheduler
from moorage.engine.tier_io import TierIO
from moorage.prefix_cache import tiers
from moorage.prefix_cache.block import BlockTable, digest_tokens
from moorage.prefix_cache.errors import CacheError, ManifestMismatch
from moorage.prefix_cache.parked_context import ParkedContext


@dataclass
class _LoadInFlight:
    context: Context
    staging: torch.Tensor | None
    """None where the worker writes into the context's own blocks."""
    first_block: int
    started_s: float
    name: bytes | None
    """Of the first run that it brings."""
    orphan: BlockTable | None = None
    """Blocks that the worker may still write, of a context that was dropped."""


Grow = Callable[[Context, int], bool]
"""Blocks for so many tokens of the context, without taking any from what runs; False where there are too few."""


class Restoring:
    """Starts and ends loads for the step loop."""

    def __init__(self, io: TierIO) -> None:
        self._io = io
        self._loads: dict[int, _LoadInFlight] = {}
        self._under_way: dict[bytes, int] = {}
        """first run of a load in flight -> its job"""
        self._next_job = 0

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

    def open(self, context: Context, generation: Generation, grow: Grow) -> Phase:
        """Give the context a table and start whatever load it needs; the phase it is then in.

        Where another context loads the same blocks, this one waits for them: one read serves both.
        """
        if context.table is None:
            table = self._open_from_tree(context)
            if generation.sources is None:
                if self._comes_with_another_load(context):
                    self._io.cache.release(table)
                    context.table, context.num_computed = None, 0
                    return Phase.WAITING
                if self._start_load(context, grow):
                    generation.load_started_s = time.monotonic()
                    return Phase.LOADING
        if generation.sources is None:
            self.settle(context, generation, {}, context.lost_reason)
        return Phase.RUNNING

    def begin_restore(self, context: Context, grow: Grow) -> RestoreDone | None:
        """Bring KV back without a generation. None where a load was started."""
        if context.table is None:
            self._open_from_tree(context)
            if self._start_load(context, grow):
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

    def _open_from_tree(self, context: Context) -> BlockTable:
        """The longest prefix on the device; at most all but the last token, whose logits are needed."""
        tokens = context.tokens(0, context.num_tokens - 1)
        match = self._io.cache.match(context.lineage, tokens)
        context.table = table = self._io.cache.open(match)
        context.num_computed = match.num_tokens
        return table

    def _wanted(self, context: Context) -> tuple[ParkedContext, int, bool]:
        """What to load from, up to which token, and whether to seek runs that the manifest does not name:
        where at least one whole run is missing behind it."""
        manifest = context.manifest or ParkedContext.empty(
            context.lineage, context.session_id, self._io.geometry
        )
        last = context.num_tokens - 1  # the last token's logits are needed
        covered = max(min(manifest.num_tokens, last), context.num_computed)
        run = self._io.geometry.run_blocks * self._io.block_size
        whole = last // run * run
        if whole - covered >= run:
            return manifest, whole, True
        return manifest, min(manifest.num_tokens, last), False

    def _first_missing_run(self, context: Context) -> bytes | None:
        """Names the run in which the device's prefix of the log ends; None where the log ends in it too."""
        size = self._io.block_size
        run = self._io.geometry.run_blocks * size
        end = context.num_computed // run * run + run
        if end >= context.num_tokens:
            return None
        return context.lineage.root + digest_tokens(context.tokens(0, end))

    def _comes_with_another_load(self, context: Context) -> bool:
        _, end, _ = self._wanted(context)
        name = self._first_missing_run(context)
        return end > context.num_computed and name is not None and name in self._under_way

    def _start_load(self, context: Context, grow: Grow) -> bool:
        manifest, end, seek = self._wanted(context)
        first_block = context.num_computed // self._io.block_size
        num_blocks = -(-end // self._io.block_size) - first_block
        if num_blocks <= 0:
            return False
        name = self._first_missing_run(context)
        staging: torch.Tensor | None = None
        if self._io.kv.in_host_memory and grow(context, end):
            assert context.table is not None
            blocks = self._io.kv.views(
                context.table.block_ids[first_block : first_block + num_blocks]
            )
        else:
            staging = torch.empty((num_blocks, *self._io.kv.block_shape), dtype=self._io.kv.dtype)
            blocks = block_views(staging)
        job = tiers.LoadJob(
            job_id=self._next_job,
            manifest=manifest,
            first_block=first_block,
            token_ids=context.tokens(0, end),
            blocks=blocks,
            geometry=self._io.geometry,
            deadline_s=self._io.deadline_s,
            seek=seek,
        )
        try:
            self._io.workers.load(job)
        except CacheError as error:
            context.lost_reason = f"not loaded: {error}"
            return False
        self._loads[self._next_job] = _LoadInFlight(
            context, staging, first_block, time.monotonic(), name
        )
        if name is not None:
            self._under_way[name] = self._next_job
        context.loading = self._next_job
        self._next_job += 1
        return True

    def abandon(self, context: Context) -> None:
        """The context is dropped, or its generation ended, while a load is under way: its blocks stay with the load
        until the worker is done with them."""
        load = self._loads.get(context.loading) if context.loading is not None else None
        context.loading = None
        if load is not None and load.staging is None:
            load.orphan, context.table = context.table, None
            context.num_computed = 0

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
        counters = self._io.counters
        counters.tokens_device += sources.device
        counters.tokens_host += sources.host
        counters.tokens_disk += sources.disk
        counters.tokens_redis += sources.redis
        counters.tokens_recomputed += sources.recomputed
        counters.tokens_new += sources.new

    def finished(self, done: tiers.LoadDone, scheduler: Scheduler) -> list[EngineEvent]:
        """A worker is done. A load whose context was dropped meanwhile only gives its blocks back."""
        load = self._loads.pop(done.job_id)
        if load.name is not None and self._under_way.get(load.name) == done.job_id:
            del self._under_way[load.name]
        if load.orphan is not None:
            self._io.cache.release(load.orphan)
        context = load.context
        reason = load.context.lost_reason
        if done.miss is not None:
            reason = f"{done.miss}: {done.miss_detail}"
        by_tier: Mapping[str, int] = done.tokens_by_tier
        if context.loading != done.job_id:
            return []  # aborted, released or closed while the read was under way
        context.loading = None
        self._io.counters.store_failures += done.miss in _STORE_FAULTS
        if not self._place(load, done, scheduler):
            by_tier, reason = {}, "device memory was short for the restored blocks"
        self._io.counters.bytes_restored += done.num_bytes
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

    def _place(self, load: _LoadInFlight, done: tiers.LoadDone, scheduler: Scheduler) -> bool:
        """Verified KV into device blocks, and full blocks into the tree; what nothing came for goes back."""
        context = load.context
        if context.table is None:
            return True
        if done.num_tokens == 0:
            self._io.cache.truncate(context.table, context.num_computed)
            return True
        end = load.first_block * self._io.block_size + done.num_tokens
        if load.staging is not None:
            if not scheduler.make_room(context, end, set()):
                return False
            last_block = -(-end // self._io.block_size)
            block_ids = context.table.block_ids[load.first_block : last_block]
            self._io.kv.scatter(block_ids, load.staging)
        context.num_computed = end
        self._io.cache.commit(context.table, context.token_ids, end, done.block_hashes)
        self._io.cache.truncate(context.table, end)
        return True


_STORE_FAULTS = (tiers.MissReason.STORE_FAILED, tiers.MissReason.TIMED_OUT)


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
