"""Block counts of the device pool and of one session, with every count recomputed."""

from __future__ import annotations

from moorage.engine.context import Context
from moorage.engine.model_runner import ModelRunner
from moorage.engine.output import Inspection
from moorage.engine.tier_io import TierIO
from moorage.prefix_cache.errors import CacheError


def inspect(
    io: TierIO,
    runner: ModelRunner,
    inspection_id: str,
    session_id: str,
    context: Context | None,
) -> Inspection:
    """O(blocks): for tests, demonstrations and a person who looks, not for every step."""
    error = ""
    try:
        io.cache.check_integrity()
    except CacheError as found:
        error = str(found)
    blocks = io.cache.statistics()
    table = context.table if context is not None else None
    committed = table.num_committed if table is not None else 0
    held = table.num_blocks if table is not None else 0
    return Inspection(
        inspection_id=inspection_id,
        session_id=session_id,
        session_locked_blocks=committed,
        session_in_use_blocks=held - committed,
        free_blocks=blocks.free,
        evictable_blocks=blocks.evictable,
        locked_blocks=blocks.locked,
        in_use_blocks=blocks.in_use,
        total_blocks=blocks.total,
        free_blocks_not_nan=io.kv.count_not_nan(io.cache.free_block_ids()),
        num_nodes=blocks.num_nodes,
        num_splits=blocks.num_splits,
        tokens_forwarded=runner.tokens_forwarded,
        forward_passes=runner.forward_passes,
        integrity_error=error,
    )
