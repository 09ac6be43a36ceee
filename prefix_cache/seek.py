"""Finding what nobody told us of: runs that some tier holds under the hash of the tokens we need.

A manifest names what its own session parked. A run frame is named by its content, so that whatever another session
parked, or eviction demoted, serves this one too: a system prompt after a restart, a context that was dropped while
memory was short.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from moorage.prefix_cache.errors import StoreError
from moorage.prefix_cache.frame import FrameKey, Geometry, run_key
from moorage.prefix_cache.park import NO_CHECKSUM, Chain
from moorage.prefix_cache.parked_context import FrameReference, ParkedContext
from moorage.prefix_cache.store import BlockStore

SEEK_DEADLINE_S = 0.25
"""For asking one tier whether it has runs: a silent store must not hold up a context that is merely new."""


def with_found_runs(
    manifest: ParkedContext,
    chain: Chain,
    first_block: int,
    stores: Mapping[str, BlockStore],
    deadline: float,
) -> ParkedContext:
    """The manifest, extended by the runs behind it that some tier has, contiguous, up to the chain's end.

    `first_block`: what lies before is not needed. Tiers are asked in order, the fastest first, each for what those
    before it lack; one that fails or is slow has nothing. A private frame whose tokens a found run covers is left out.
    """
    geometry = chain.geometry
    own = [ref for ref in manifest.frames if ref.key.shared]
    own_end = max((ref.first_block + ref.num_blocks for ref in own), default=0)
    start = max(own_end, first_block // geometry.run_blocks * geometry.run_blocks)
    ends = range(start + geometry.run_blocks, len(chain.hashes) + 1, geometry.run_blocks)
    keys = [run_key(chain.hashes[end - 1], geometry) for end in ends]
    tiers = _ask(keys, manifest, stores, deadline)
    found: list[FrameReference] = []
    for end, key in zip(ends, keys, strict=True):
        if key not in tiers:
            break
        found.append(_reference(key, tiers[key], end - geometry.run_blocks, geometry))
    if not found:
        return manifest
    end = found[-1].first_block + geometry.run_blocks
    tail = [ref for ref in manifest.frames if not ref.key.shared and ref.first_block >= end]
    num_tokens = max(end * geometry.block_size, manifest.num_tokens if tail else 0)
    return replace(manifest, frames=(*own, *found, *tail), num_tokens=num_tokens)


def _ask(
    keys: Sequence[FrameKey],
    manifest: ParkedContext,
    stores: Mapping[str, BlockStore],
    deadline: float,
) -> dict[FrameKey, str]:
    """key -> the first tier that says it has it."""
    found: dict[FrameKey, str] = {}
    for tier, store in stores.items():
        asked = [key for key in keys if key not in found]
        left = min(SEEK_DEADLINE_S, deadline - time.monotonic())
        if not asked or left <= 0:
            break
        try:
            there = store.contains(asked, manifest.session_id, manifest.lineage.namespace, left)
        except StoreError:
            continue  # the store counts it; what it may hold is computed
        found.update((key, tier) for key, yes in zip(asked, there, strict=True) if yes)
    return found


def _reference(key: FrameKey, tier: str, first_block: int, geometry: Geometry) -> FrameReference:
    num_tokens = geometry.run_blocks * geometry.block_size
    size_bytes = geometry.run_blocks * geometry.block_bytes
    return FrameReference(
        key, tier, first_block, geometry.run_blocks, num_tokens, size_bytes, NO_CHECKSUM
    )
