"""Which form of a matrix product gives a row the same bits in every batch, on this machine.

A library GEMM picks its kernel by the number of rows, and with the kernel the order in which a
row's products are added, so the same row gives other bits in another batch. No library promises
otherwise, therefore each (dtype, K, N, form, threads) is measured once a process, before its first
use, and the cheapest plan that holds is kept:

    min_rows 1          one call, whatever the number of rows
    min_rows 2 … 16     the same, padded with zero rows where there are fewer
    tiled 16            calls of exactly TILE_ROWS rows: one shape, one order
    tiled 1             a call per row: exact by construction, so there is always a plan

The operands are made to cancel: products that sum to exactly 0 leave nothing but rounding, so
another order shows at once. On plain random numbers bf16 rounding hides it (one element in some
10⁵ differs). Measured on a Zen 4 core with torch 2.13, K up to 4096: with one thread fp32 needs 4
rows at nearly every shape, with two 16; bf16 needs 2 or 4 at some shapes (K 48, K ≥ 2048, N 8) and
1 at the others, with either; only odd shapes (K 31, N 7) need tiles. A search costs 1 to 120 ms at
K ≤ 512 or N ≤ 512. Tried and dropped: padding every product to 64 rows, which is exact too, but a
decode of one row then costs 5 to 20 times as much.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.nn import functional

TILE_ROWS = 16
"""Rows of a tile, and the most that padding may ask for: few, for a decode step pays for all."""
_MIN_ROWS = (1, 2, 4, 8, TILE_ROWS)
_CHECKED_ROWS = (*range(1, 19), 23, 30, 31, 33, 44, 64, 65, 77, 129, 200, 257)
_OFFSETS = (0, 1, 6)
"""Where in the batch the checked rows begin: also other alignments in memory."""
_MOST_BATCHED_ROWS = 2 * TILE_ROWS + 1
_BUDGET_FLOP = 2e10
"""Of one candidate's check (about half a second); the longest batches are left out beyond it."""
_BUDGET_ELEMENTS = 1 << 25
"""Of a checked weight (64 MiB in bf16). Beyond it fewer outputs stand for all, with the same remainder by 256: the
one assumption here is that beyond thousands of outputs a library changes a row's order of summation no more.
"""

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(x [M, K], weight [N, K]) → [M, N]."""


@dataclass(frozen=True)
class RowPlan:
    """How rows are kept independent of the batch."""

    min_rows: int
    """Rows, to which fewer are padded; 1 pads nothing."""
    tiled: bool = False
    """Whether the product runs in calls of exactly `min_rows` rows."""


@dataclass(frozen=True)
class CheckedPlan:
    """One line of what was found on this machine."""

    form: str
    dtype: str
    width: int
    num_outputs: int
    num_threads: int
    plan: RowPlan
    seconds: float
    """What finding the plan cost, once a process."""


_checked: list[CheckedPlan] = []


def checked_plans() -> tuple[CheckedPlan, ...]:
    """Every plan found so far in this process, in the order of first use."""
    return tuple(_checked)


def pad_rows(x: torch.Tensor, num_rows: int) -> torch.Tensor:
    """x [..., M, K] with zero rows up to `num_rows`; x itself where it has as many."""
    missing = num_rows - x.shape[-2]
    return functional.pad(x, (0, 0, 0, missing)) if missing > 0 else x


def run(plan: RowPlan, product: Product, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`product` under a plan: x [M, K] · weight [N, K]ᵀ → [M, N]."""
    num_rows = x.shape[-2]
    if not plan.tiled:
        if num_rows >= plan.min_rows:
            return product(x, weight)
        return product(pad_rows(x, plan.min_rows), weight)[..., :num_rows, :]
    tile = plan.min_rows
    x = pad_rows(x, num_rows + -num_rows % tile)
    parts = [product(part, weight) for part in torch.split(x, tile, dim=-2)]
    return torch.cat(parts, dim=-2)[..., :num_rows, :]


@lru_cache(maxsize=4096)
def find_plan(
    form: str,
    product: Product,
    dtype: torch.dtype,
    width: int,
    num_outputs: int,
    num_threads: int,
    batches: tuple[int, ...] = (),
) -> RowPlan:
    """The cheapest plan under which `product` gives bit-equal rows in any batch.

    `num_threads` is part of the key, for the library splits work by it; `form` only names the
    product in `checked_plans`; `batches` are the sizes of a leading axis to try, for products that
    have one. Costs about 4,000 rows a candidate, seldom more than two candidates.
    Runs on the calling thread and cannot be cancelled.
    """
    begin = time.perf_counter()
    plan = _search(product, dtype, width, num_outputs, batches)
    seconds = time.perf_counter() - begin
    _checked.append(
        CheckedPlan(
            form,
            str(dtype).removeprefix("torch."),
            width,
            num_outputs,
            num_threads,
            plan,
            seconds,
        )
    )
    return plan


def _search(
    product: Product,
    dtype: torch.dtype,
    width: int,
    num_outputs: int,
    batches: tuple[int, ...],
) -> RowPlan:
    most = max(256, _BUDGET_ELEMENTS // max(width, 1) // 256 * 256)
    if num_outputs > most:
        num_outputs = most + num_outputs % 256
    affordable = _BUDGET_FLOP / (2 * max(width, 1) * max(num_outputs, 1))
    counts = [
        rows
        for index, rows in enumerate(_CHECKED_ROWS)
        if rows <= _MOST_BATCHED_ROWS
        or len(_OFFSETS) * sum(_CHECKED_ROWS[: index + 1]) < affordable
    ]
    x, weight = cancelling_operands(dtype, width, num_outputs, max(counts) + max(_OFFSETS))
    for plan in (*map(RowPlan, _MIN_ROWS), RowPlan(TILE_ROWS, tiled=True)):
        whole = run(plan, product, x, weight)

        def holds(at: int, rows: int, plan: RowPlan = plan, whole: torch.Tensor = whole) -> bool:
            part, expected = x[at : at + rows], whole[at : at + rows]
            if not torch.equal(run(plan, product, part, weight), expected):
                return False
            for size in batches if rows <= _MOST_BATCHED_ROWS else ():
                stacked = part.expand(size, -1, -1).contiguous()
                weights = weight.expand(size, -1, -1).contiguous()
                if not bool((run(plan, product, stacked, weights) == expected).all()):
                    return False
            return True

        if all(holds(at, rows) for rows in counts for at in _OFFSETS):
            return plan
    return RowPlan(1, tiled=True)


def cancelling_operands(
    dtype: torch.dtype, width: int, num_outputs: int, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [num_rows, K], weight [N, K]: their products sum to exactly 0 in real arithmetic."""
    generator = torch.Generator().manual_seed(width * 1_000_003 + num_outputs)
    half = width // 2
    x = torch.randn((num_rows, half), generator=generator)
    weight = torch.randn((min(num_outputs, 1024), half), generator=generator)
    order = torch.randperm(2 * half, generator=generator)
    x = functional.pad(torch.cat((x, x), 1)[:, order], (0, width - 2 * half))
    weight = functional.pad(torch.cat((weight, -weight), 1)[:, order], (0, width - 2 * half)).to(
        dtype
    )
    if num_outputs > len(weight):  # drawing millions of numbers would cost more than the products
        weight = weight.repeat(-(-num_outputs // len(weight)), 1)[:num_outputs]
    return x.to(dtype), weight
