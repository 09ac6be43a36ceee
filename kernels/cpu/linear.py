"""Matrix products whose rows do not depend on the batch.

A library GEMM picks its blocking by the number of rows, and with it the order in which a row's products are added: the
same row gives other bits in another batch. Two plans make rows independent:

    direct   one call over all rows, taken where a check on this machine's own library finds rows bit-equal
    tiled    calls of exactly TILE_ROWS rows, the last one padded with zeros: one shape, one order

The check runs once per (dtype, K, N) and process, on random numbers. Measured on a Zen 4 core with torch 2.13: bf16 rows
were equal for every size tried but (K 2048, N 512); fp32 rows never were.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.nn import functional

TILE_ROWS = 16
"""Rows of one product in the tiled plan. Small, because a decode step has few rows and pays for the whole tile."""
_CHECKED_ROWS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 65, 129, 257, 513)
_CHECKED_OFFSETS = (0, 1, 6)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See `ops.linear`."""
    if not x.shape[0]:
        return x.new_zeros((0, weight.shape[0]))
    if direct_is_exact(x.dtype, weight.shape[1], weight.shape[0], torch.get_num_threads()):
        out = functional.linear(x, weight)
    else:
        out = tiled(x, weight)
    return out if bias is None else out + bias


def tiled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [M, K] · weightᵀ in products of TILE_ROWS rows."""
    rows = x.shape[0]
    padding = -rows % TILE_ROWS
    if padding:
        x = torch.cat((x, x.new_zeros((padding, x.shape[1]))))
    out = x.new_empty((x.shape[0], weight.shape[0]))
    for start in range(0, x.shape[0], TILE_ROWS):
        torch.mm(x[start : start + TILE_ROWS], weight.T, out=out[start : start + TILE_ROWS])
    return out[:rows]


@lru_cache(maxsize=4096)
def direct_is_exact(dtype: torch.dtype, width: int, num_outputs: int, num_threads: int) -> bool:
    """Whether this machine's `linear` gives bit-equal rows for any number of rows and any place in the batch.

    `num_threads` is part of the key: the library splits work by it. Costs some 20 products of up to 513 rows.
    """
    del num_threads
    if dtype != torch.bfloat16:
        return False
    generator = torch.Generator().manual_seed(width * 1_000_003 + num_outputs)
    longest = max(_CHECKED_ROWS) + max(_CHECKED_OFFSETS)
    x = torch.randn((longest, width), generator=generator).to(dtype)
    weight = torch.randn((num_outputs, width), generator=generator).to(dtype)
    whole = functional.linear(x, weight)
    return all(
        torch.equal(functional.linear(x[at : at + rows], weight), whole[at : at + rows])
        for rows in _CHECKED_ROWS
        for at in _CHECKED_OFFSETS
    )


OPS = {"linear": linear}
