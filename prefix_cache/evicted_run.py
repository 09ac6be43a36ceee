"""A whole run whose last blocks are about to leave the device: the moment to keep it elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moorage.prefix_cache.block import TOKEN_BYTES, BlockHash, BlockId, Lineage
from moorage.prefix_cache.radix_node import Node


@dataclass(frozen=True)
class EvictedRun:
    """What a frame of the run needs to know."""

    lineage: Lineage
    first_block: int
    """From the lineage root; a multiple of `run_blocks`."""
    parent_hash: BlockHash
    last_hash: BlockHash
    token_ids: bytes
    """Of the run alone."""
    block_ids: Sequence[BlockId]
    """Still whole, until the callback returns."""


def run_before(node: Node, run_end: int, run_blocks: int, block_size: int) -> EvictedRun:
    """The run that ends with block `run_end` (exclusive, from the lineage root), a block of `node`."""
    start = run_end - run_blocks
    block_bytes = block_size * TOKEN_BYTES
    tokens: list[bytes] = []
    ids: list[list[BlockId]] = []
    step: Node | None = node
    while step is not None and step.first_block + step.num_blocks > start:
        first = max(start - step.first_block, 0)
        last = min(run_end - step.first_block, step.num_blocks)
        tokens.append(bytes(step.tokens[first * block_bytes : last * block_bytes]))
        ids.append(step.block_ids[first:last])
        if step.first_block < start:
            break
        step = step.parent
    parent_hash = node.lineage.root
    if start and step is not None:
        parent_hash = step.hash_at(start - step.first_block - 1)
    return EvictedRun(
        lineage=node.lineage,
        first_block=start,
        parent_hash=parent_hash,
        last_hash=node.hash_at(run_end - node.first_block - 1),
        token_ids=b"".join(reversed(tokens)),
        block_ids=[block_id for part in reversed(ids) for block_id in part],
    )
