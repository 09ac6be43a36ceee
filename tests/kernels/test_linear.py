"""Products whose rows do not depend on the batch, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from moorage.kernels import ops
from moorage.kernels.cpu import linear as cpu
from moorage.kernels.cpu.linear import Plan, cancelling_operands, plan_for
from moorage.kernels.equivalence import check

SHAPES = [(48, 64), (64, 96), (100, 37), (256, 8), (384, 256), (256, 2560), (2048, 512), (4096, 24)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "outputs"), SHAPES)
def test_rows_are_bit_equal_in_any_batch_at_any_place(
    dtype: torch.dtype, width: int, outputs: int
) -> None:
    x, weight = cancelling_operands(dtype, width, outputs)
    whole = ops.linear(x, weight)
    for rows in (1, 2, 3, 4, 9, 16, 17, 63, 65, 200, 511):
        for at in (0, 1, 5, 13):
            part = ops.linear(x[at : at + rows], weight)
            assert torch.equal(part, whole[at : at + rows]), f"{rows} rows at {at}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_plan_is_right_and_the_tiled_one_is_independent_too(dtype: torch.dtype) -> None:
    x, weight = torch.randn(37, 72).to(dtype), torch.randn(19, 72).to(dtype)
    truth = x.double() @ weight.double().T
    for plan in Plan:
        assert check(cpu._PLANS[plan](x, weight), truth, dtype).within, plan
    exact, other = cancelling_operands(dtype, 72, 19)
    whole = cpu._tiled(exact, other)
    for rows in (1, 2, 15, 17, 40):
        assert torch.equal(cpu._tiled(exact[3 : 3 + rows], other), whole[3 : 3 + rows])


def test_the_check_sees_what_plain_random_numbers_hide() -> None:
    """The library's own fp32 product of one row differs from that row in a batch: the plan must not be DIRECT."""
    x, weight = cancelling_operands(torch.float32, 256, 64)
    assert not torch.equal(functional.linear(x[5:6], weight), functional.linear(x, weight)[5:6])
    assert plan_for(torch.float32, 256, 64, torch.get_num_threads()) is not Plan.DIRECT


def test_no_rows_and_a_bias() -> None:
    weight, bias = torch.randn(5, 8), torch.randn(5)
    assert ops.linear(torch.randn(0, 8), weight).shape == (0, 5)
    x = torch.randn(3, 8)
    assert check(ops.linear(x, weight, bias), x.double() @ weight.double().T + bias, x.dtype).within
