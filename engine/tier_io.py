"""What parking and restoring share: the tier workers, the geometry of frames, the counters, and letting frames go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from moorage.engine.kv_cache import block_views
from moorage.engine.loading import LoadedModel
from moorage.engine.settings import EngineConfig
from moorage.prefix_cache import tiers
from moorage.prefix_cache.errors import CacheError
from moorage.prefix_cache.evicted_run import EvictedRun
from moorage.prefix_cache.host_store import HostStore
from moorage.prefix_cache.park import run_frame
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
    runs_demoted: int = 0
    """Runs that eviction moved to host memory."""


class TierIO:
    """One engine's way to the tiers below the device."""

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        complete: Callable[[tiers.Completion], None],
    ) -> None:
        self.kv = model.kv_cache
        self.cache = model.cache
        self.geometry = model.geometry
        self.deadline_s = config.tiers.deadline_s
        self.workers = tiers.TierWorkers(
            model.stores,
            complete,
            num_workers=config.tiers.num_workers,
            queue_len=config.tiers.queue_len,
            host_copies=config.tiers.host_copies,
        )
        self.counters = TierCounters()
        self._host = next(
            (store for store in model.stores if isinstance(store, HostStore) and store.max_bytes),
            None,
        )
        if config.tiers.demote:
            self.cache.on_evict = self._demote

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.geometry.block_size

    def close(self, deadline_s: float) -> None:
        """Stop the workers; waits at most `deadline_s`."""
        self.workers.close(deadline_s)

    def _demote(self, run: EvictedRun) -> None:
        """Keep a run in host memory that eviction takes from the device: a copy and a checksum, about a
        hundredth of the time that computing it again would take. Unclaimed, so it is the first to go there."""
        if self._host is None:
            return
        in_place, ids = self.kv.in_host_memory, run.block_ids
        blocks = self.kv.views(ids) if in_place else block_views(self.kv.gather(ids))
        key, frame = run_frame(run, self.geometry, blocks)
        try:
            self.counters.runs_demoted += self._host.keep(
                [(key, frame)], "-", run.lineage.namespace
            )
        except CacheError as error:  # the codec cannot hold a value, or the store is closed
            self.counters.store_failures += 1
            _log.warning("an evicted run was not kept", reason=str(error))

    def delete(
        self, manifest: ParkedContext | None, superseded_by: ParkedContext | None = None
    ) -> None:
        """Let go of a manifest's frames, less those that a newer one still names.

        Best effort: what cannot be deleted now goes by age.
        """
        if manifest is None:
            return
        for tier, keys in manifest.keys_by_tier(without=superseded_by).items():
            job = tiers.DeleteJob(
                session_id=manifest.session_id,
                namespace=manifest.lineage.namespace,
                keys=keys,
                tier=tier,
                deadline_s=self.deadline_s,
            )
            try:
                self.workers.delete(job)
            except CacheError as error:
                _log.warning(
                    "old frames left to age", session_id=manifest.session_id, reason=str(error)
                )
