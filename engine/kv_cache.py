"""Device memory of one cache group: a pool of KV blocks as one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moorage.kernels import ops
from moorage.kernels.device import Device

NAN = float("nan")


class KVCache:
    """`pool[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`; axis 2 is key, value.

    Block-major: a block is one contiguous piece, so that parking copies whole blocks; head-major inside it, so
    that a head range of a frame is a slice. Who owns which block is the prefix cache's business, not ours.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        num_layers: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: Device,
        fill_freed_with_nan: bool,
    ) -> None:
        self._device = device
        self._fill_freed = fill_freed_with_nan
        self.block_shape = (num_layers, 2, num_kv_heads, block_size, head_dim)
        self.dtype = dtype
        self.pool = torch.empty(
            (num_blocks, *self.block_shape), dtype=dtype, device=device.torch_device
        )
        if fill_freed_with_nan:
            self.pool.fill_(NAN)
        self._bytes = bytes_of(self.pool) if self.in_host_memory else memoryview(b"")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.pool[0].numel() * self.pool.element_size()

    def on_free(self, block_ids: Sequence[int]) -> None:
        """Called by the prefix cache with every block that becomes free."""
        if self._fill_freed and block_ids:
            ops.fill_blocks(self.pool, torch.tensor(block_ids, dtype=torch.int64), NAN)

    @property
    def in_host_memory(self) -> bool:
        """Whether tier workers can read and write the pool's blocks where they are."""
        return self.pool.device.type == "cpu"

    def views(self, block_ids: Sequence[int]) -> list[memoryview]:
        """Writable bytes of each block, in the pool itself. Only where `in_host_memory`."""
        flat = self._bytes
        size = self.block_bytes
        return [flat[block * size : (block + 1) * size] for block in block_ids]

    def gather(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Copy blocks to a fresh host tensor `[n, *block_shape]`."""
        staging = torch.empty((len(block_ids), *self.block_shape), dtype=self.dtype)
        if block_ids:
            ops.gather_blocks(self.pool, torch.tensor(block_ids, dtype=torch.int64), staging)
        return staging

    def scatter(self, block_ids: Sequence[int], staging: torch.Tensor) -> None:
        """Copy `staging[:n]` into blocks."""
        if block_ids:
            ids = torch.tensor(block_ids, dtype=torch.int64)
            ops.scatter_blocks(self.pool, ids, staging[: len(block_ids)])

    def copy(self, source_ids: Sequence[int], destination_ids: Sequence[int]) -> None:
        """Copy whole blocks inside the pool (copy on write)."""
        if source_ids:
            ops.copy_blocks(
                self.pool,
                torch.tensor(source_ids, dtype=torch.int64),
                torch.tensor(destination_ids, dtype=torch.int64),
            )

    def count_not_nan(self, block_ids: Sequence[int]) -> int | None:
        """How many of these blocks hold anything but NaN; None where freed blocks are not NaN-filled."""
        if not self._fill_freed:
            return None
        return sum(1 for block in block_ids if not bool(torch.isnan(self.pool[block]).all()))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A writable byte view of a contiguous host tensor; the view keeps the tensor's memory alive."""
    return tensor.view(torch.uint8).reshape(-1).numpy().data


def block_views(tensor: torch.Tensor) -> list[memoryview]:
    """One such view for each row of `tensor`."""
    flat = bytes_of(tensor)
    size = len(flat) // max(1, len(tensor))
    return [flat[at : at + size] for at in range(0, len(flat), size)] if size else []
