"""Matrix products whose rows do not depend on the batch.

A library GEMM picks its kernel by the number of rows, and with it the order in which a row's products are added: the same
row gives other bits in another batch. Three plans make rows independent, the cheapest that holds is taken:

    DIRECT   one call over all rows
    PADDED   the same, with zero rows up to TILE_ROWS where there are fewer (few rows take a matrix-vector kernel)
    TILED    calls of exactly TILE_ROWS rows: one shape, one order

Which holds is checked once per (dtype, K, N) and process on this machine's own library, on numbers made to cancel: a sum
that is exactly 0 leaves nothing but its rounding, so another order shows at once. On plain random numbers bf16 rounding
hides it (one element in some 10⁵ differs). Measured on a Zen 4 core with torch 2.13: bf16 needs PADDED for one or two rows at
some shapes (K 48, K ≥ 2048, N 8), fp32 for fewer than four rows at all shapes; nothing needed TILED.
"""

from __future__ import annotations

from enum import Enum, auto
from functools import lru_cache

import torch
from torch.nn import functional

TILE_ROWS = 16
"""Rows of the padded product: few, because a decode step has few rows and pays for all of them."""
_CHECKED_ROWS = (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 33, 48, 64, 65, 129, 257, 513)
_CHECKED_OFFSETS = (0, 1, 6, 11)


class Plan(Enum):
    """How rows are kept independent of the batch; in order of cost."""

    DIRECT = auto()
    PADDED = auto()
    TILED = auto()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See `ops.linear`."""
    rows = x.shape[0]
    if not rows:
        return x.new_zeros((0, weight.shape[0]))
    plan = plan_for(x.dtype, weight.shape[1], weight.shape[0], torch.get_num_threads())
    out = _PLANS[plan](x, weight)
    return out if bias is None else out + bias


def _direct(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, weight)


def _padded(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows = x.shape[0]
    if rows >= TILE_ROWS:
        return functional.linear(x, weight)
    return functional.linear(_pad_rows(x, TILE_ROWS - rows), weight)[:rows]


def _tiled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows = x.shape[0]
    x = _pad_rows(x, -rows % TILE_ROWS)
    out = x.new_empty((x.shape[0], weight.shape[0]))
    for start in range(0, x.shape[0], TILE_ROWS):
        torch.mm(x[start : start + TILE_ROWS], weight.T, out=out[start : start + TILE_ROWS])
    return out[:rows]


def _pad_rows(x: torch.Tensor, count: int) -> torch.Tensor:
    return torch.cat((x, x.new_zeros((count, x.shape[1])))) if count else x


_PLANS = {Plan.DIRECT: _direct, Plan.PADDED: _padded, Plan.TILED: _tiled}


@lru_cache(maxsize=4096)
def plan_for(dtype: torch.dtype, width: int, num_outputs: int, num_threads: int) -> Plan:
    """The cheapest plan under which this machine's products give bit-equal rows in any batch.

    `num_threads` is part of the key: the library splits work by it. Costs some 100 products of up to 524 rows.
    """
    del num_threads
    x, weight = cancelling_operands(dtype, width, num_outputs)
    for plan in (Plan.DIRECT, Plan.PADDED):
        product = _PLANS[plan]
        whole = product(x, weight)
        if all(
            torch.equal(product(x[at : at + rows], weight), whole[at : at + rows])
            for rows in _CHECKED_ROWS
            for at in _CHECKED_OFFSETS
        ):
            return plan
    return Plan.TILED


def cancelling_operands(
    dtype: torch.dtype, width: int, num_outputs: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [524, K] and weight [N, K] whose products sum to exactly 0 in real arithmetic, in shuffled order."""
    generator = torch.Generator().manual_seed(width * 1_000_003 + num_outputs)
    rows = max(_CHECKED_ROWS) + max(_CHECKED_OFFSETS)
    half = width // 2
    x = torch.randn((rows, half), generator=generator)
    weight = torch.randn((num_outputs, half), generator=generator)
    order = torch.randperm(2 * half, generator=generator)
    x = functional.pad(torch.cat((x, x), 1)[:, order], (0, width - 2 * half))
    weight = functional.pad(torch.cat((weight, -weight), 1)[:, order], (0, width - 2 * half))
    return x.to(dtype), weight.to(dtype)


OPS = {"linear": linear}
