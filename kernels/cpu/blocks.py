"""Moving KV blocks: plain indexed copies, each KV byte touched once."""

from __future__ import annotations

import torch


def store_kv(
    key: torch.Tensor, value: torch.Tensor, layer_kv: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """See `ops.store_kv`."""
    size = layer_kv.shape[3]
    blocks = torch.div(slot_mapping, size, rounding_mode="floor")
    offsets = slot_mapping - blocks * size
    layer_kv[blocks, 0, :, offsets] = key
    layer_kv[blocks, 1, :, offsets] = value


def gather_blocks(pool: torch.Tensor, block_ids: torch.Tensor, out: torch.Tensor) -> None:
    """See `ops.gather_blocks`."""
    torch.index_select(pool, 0, block_ids, out=out)


def scatter_blocks(pool: torch.Tensor, block_ids: torch.Tensor, source: torch.Tensor) -> None:
    """See `ops.scatter_blocks`."""
    pool.index_copy_(0, block_ids, source)


def copy_blocks(
    pool: torch.Tensor, source_ids: torch.Tensor, destination_ids: torch.Tensor
) -> None:
    """See `ops.copy_blocks`."""
    pool.index_copy_(0, destination_ids, pool.index_select(0, source_ids))


def fill_blocks(pool: torch.Tensor, block_ids: torch.Tensor, value: float) -> None:
    """See `ops.fill_blocks`."""
    pool.index_fill_(0, block_ids, value)


OPS = {
    "store_kv": store_kv,
    "gather_blocks": gather_blocks,
    "scatter_blocks": scatter_blocks,
    "copy_blocks": copy_blocks,
    "fill_blocks": fill_blocks,
}
