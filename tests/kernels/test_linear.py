"""Products whose rows do not depend on the batch, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from moorage.kernels import dispatch, ops
from moorage.kernels.cpu import determinism
from moorage.kernels.cpu.determinism import RowPlan, cancelling_operands, find_plan
from moorage.kernels.equivalence import check

SHAPES = [
    (31, 7),
    (48, 64),
    (64, 96),
    (100, 37),
    (256, 8),
    (384, 256),
    (256, 2560),
    (2048, 512),
    (4096, 24),
]
DTYPES = [torch.float32, torch.bfloat16]
PLANS = [
    RowPlan(1),
    RowPlan(4),
    RowPlan(16),
    RowPlan(16, tiled=True),
    RowPlan(1, tiled=True),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "outputs"), SHAPES)
def test_rows_are_bit_equal_in_any_batch_at_any_place(
    dtype: torch.dtype, width: int, outputs: int, num_threads: int
) -> None:
    del num_threads
    x, weight = cancelling_operands(dtype, width, outputs, 600)
    whole = ops.linear(x, weight)
    for rows in (1, 2, 3, 4, 6, 9, 14, 16, 19, 63, 65, 200, 587):
        for at in (0, 1, 5, 13):
            part = ops.linear(x[at : at + rows], weight)
            assert torch.equal(part, whole[at : at + rows]), f"{rows} rows at {at}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_plan_is_right(plan: RowPlan, dtype: torch.dtype) -> None:
    x, weight = torch.randn(37, 72).to(dtype), torch.randn(19, 72).to(dtype)
    for rows in (1, 3, 16, 37):
        out = determinism.run(plan, functional.linear, x[:rows], weight)
        assert check(out, x[:rows].double() @ weight.double().T, dtype).within


def test_the_search_takes_the_cheapest_plan_that_holds() -> None:
    """Products that spoil small batches, some sizes, or all but single rows: even the last has a plan."""

    def spoiled(below: int = 0, multiple: int = 1) -> determinism.Product:
        def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            out = functional.linear(x, weight) * 0
            return out + 1 if x.shape[0] < below or x.shape[0] % multiple else out

        return product

    for product, expected in (
        (spoiled(), RowPlan(1)),
        (spoiled(below=3), RowPlan(4)),
        (spoiled(multiple=16), RowPlan(16, tiled=True)),
    ):
        assert find_plan("spoiled", product, torch.float32, 8, 3, 1) == expected

    def by_place(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, weight) * 0 + torch.arange(x.shape[0])[:, None]

    assert find_plan("by place", by_place, torch.float32, 8, 3, 1) == RowPlan(1, tiled=True)
    last = determinism.checked_plans()[-1]
    assert (last.form, last.dtype, last.width, last.num_outputs) == ("by place", "float32", 8, 3)
    assert 0 < last.seconds < 10


def test_the_check_sees_what_plain_random_numbers_hide() -> None:
    """Two orders of summation, after rounding to bf16: alike on random numbers almost everywhere,
    unlike on numbers that cancel.
    """

    def differing(x: torch.Tensor, weight: torch.Tensor) -> int:
        forward = functional.linear(x.float(), weight.float()).bfloat16()
        backward = functional.linear(x.float().flip(1), weight.float().flip(1)).bfloat16()
        return int((forward != backward).sum())

    generator = torch.Generator().manual_seed(1)
    x = torch.randn((64, 256), generator=generator).bfloat16()
    weight = torch.randn((64, 256), generator=generator).bfloat16()
    assert differing(x, weight) < 40
    assert differing(*cancelling_operands(torch.bfloat16, 256, 64, 64)) > 2000


def test_one_plan_per_shape_is_found_once() -> None:
    x, weight = torch.randn(3, 24), torch.randn(5, 24)
    ops.linear(x, weight)
    found = len(determinism.checked_plans())
    dispatch.counts.clear()
    ops.linear(x, weight)
    ops.linear(x[:1], weight)
    assert len(determinism.checked_plans()) == found
    assert dispatch.counts["linear", "cpu"] == 2


def test_a_huge_product_is_checked_within_a_budget() -> None:
    """4096 × 150,001: fewer outputs stand for all, and the longest batches are left out; those of a decode never."""
    shapes: list[tuple[int, int]] = []

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        shapes.append((x.shape[0], weight.shape[0]))
        return x.new_zeros((x.shape[0], 1))

    determinism._search(product, torch.bfloat16, 4096, 150_001, ())
    rows = {count for count, _ in shapes}
    assert {outputs for _, outputs in shapes} == {8192 + 150_001 % 256}
    assert max(rows) < 100 and {1, 2, 3, 16, 17, 33} <= rows


def test_no_rows_and_a_bias() -> None:
    weight, bias = torch.randn(5, 8), torch.randn(5)
    assert ops.linear(torch.randn(0, 8), weight).shape == (0, 5)
    x = torch.randn(3, 8)
    assert check(ops.linear(x, weight, bias), x.double() @ weight.double().T + bias, x.dtype).within
