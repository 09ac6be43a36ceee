"""Elementwise ops, block moves, argument checks, dispatch."""

from __future__ import annotations

import pytest
import torch

from moorage.kernels import dispatch, ops
from moorage.kernels.equivalence import check
from moorage.kernels.errors import InvalidArgument, UnknownBackend

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (7, 33), (65, 256), (0, 16)])
def test_rms_norm(dtype: torch.dtype, rows: int, width: int) -> None:
    x, weight = torch.randn(rows, width).to(dtype) * 3, torch.rand(width).to(dtype) + 0.5
    wide = x.double()
    truth = wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()
    out = ops.rms_norm(x, weight, 1e-6)
    assert check(out, truth, dtype).within
    for row in range(0, rows, 3):
        assert torch.equal(ops.rms_norm(x[row : row + 1], weight, 1e-6), out[row : row + 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu(dtype: torch.dtype) -> None:
    gate_up = torch.randn(5, 2 * 48).to(dtype) * 2
    gate, up = gate_up.double().chunk(2, -1)
    out = ops.swiglu(gate_up)
    assert check(out, torch.nn.functional.silu(gate) * up, dtype).within
    assert torch.equal(ops.swiglu(gate_up[3:4]), out[3:4])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope_rotates_pairs_by_exact_angles_even_far_out(dtype: torch.dtype) -> None:
    inv_freq = 10000.0 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    x = torch.randn(3, 2, 16).to(dtype)
    positions = torch.tensor([0, 7, 1_000_003])
    pair = torch.view_as_complex(torch.stack(x.double().chunk(2, -1), -1))
    turned = pair * torch.polar(torch.ones(3, 1, 8, dtype=torch.float64), torch.outer(positions.double(), inv_freq)[:, None])
    truth = torch.cat((turned.real, turned.imag), -1)
    assert check(ops.apply_rope(x, positions, inv_freq), truth, dtype).within
    assert torch.equal(ops.apply_rope(x, positions, inv_freq)[0], x[0])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_block_moves_touch_what_they_name_and_nothing_else(backend: str) -> None:
    with dispatch.overridden("*", backend):
        pool = torch.arange(6 * 2 * 2 * 1 * 2 * 2, dtype=torch.float32).reshape(6, 2, 2, 1, 2, 2)
        before = pool.clone()
        staging = torch.full((2, 2, 2, 1, 2, 2), float("nan"))
        ops.gather_blocks(pool, torch.tensor([4, 1]), staging)
        assert torch.equal(staging, before[[4, 1]])
        ops.fill_blocks(pool, torch.tensor([4, 1]), float("nan"))
        assert bool(torch.isnan(pool[[1, 4]]).all()) and torch.equal(pool[[0, 2, 3, 5]], before[[0, 2, 3, 5]])
        ops.scatter_blocks(pool, torch.tensor([1, 4]), staging)
        assert torch.equal(pool[1], before[4]) and torch.equal(pool[4], before[1])
        ops.copy_blocks(pool, torch.tensor([0]), torch.tensor([5]))
        assert torch.equal(pool[5], before[0])
        key, value = torch.full((2, 1, 2), 7.0), torch.full((2, 1, 2), 9.0)
        ops.store_kv(key, value, pool[:, 1], torch.tensor([2 * 2 + 1, 3 * 2]))
        assert pool[2, 1, 0, 0, 1].tolist() == [7.0, 7.0] and pool[3, 1, 1, 0, 0].tolist() == [9.0, 9.0]
        assert torch.equal(pool[2, 0], before[2, 0]) and torch.equal(pool[2, 1, :, :, 0], before[2, 1, :, :, 0])


def test_wrong_arguments_name_op_argument_and_sizes() -> None:
    with pytest.raises(InvalidArgument, match=r"linear: x must be of shape \[·, 8\], got \[2, 9\]"):
        ops.linear(torch.zeros(2, 9), torch.zeros(3, 8))
    with pytest.raises(InvalidArgument, match=r"linear: weight must be one of torch.float32"):
        ops.linear(torch.zeros(2, 8), torch.zeros(3, 8).bfloat16())
    with pytest.raises(InvalidArgument, match=r"route: top_k must be within 1 … 4, got 5"):
        ops.route(torch.zeros(1, 4), 5, False)
    with pytest.raises(InvalidArgument, match=r"paged_attention: query heads must be a multiple of 2 KV heads, got 3"):
        ops.paged_attention(
            torch.zeros(1, 3, 4), torch.zeros(1, 2, 2, 4, 4), torch.zeros(1, 1, dtype=torch.int64), None,
            torch.ones(1, dtype=torch.int64), torch.tensor([0, 1]), torch.ones(2, dtype=torch.float64), 1.0,
        )
    with pytest.raises(InvalidArgument, match=r"rms_norm: weight must be of shape \[4\], got \[5\]"):
        ops.rms_norm(torch.zeros(2, 4), torch.ones(5), 1e-6)


def test_dispatch_counts_what_ran_and_overrides_end() -> None:
    dispatch.counts.clear()
    ops.swiglu(torch.zeros(1, 2))
    with dispatch.overridden("swiglu", "reference"):
        ops.swiglu(torch.zeros(1, 2))
        ops.swiglu(torch.zeros(1, 2))
    ops.swiglu(torch.zeros(1, 2))
    assert dict(dispatch.counts) == {("swiglu", "cpu"): 2, ("swiglu", "reference"): 2}
    with pytest.raises(UnknownBackend, match="swiglu has no backend 'gpu'"):
        dispatch.override("swiglu", "gpu")
    with pytest.raises(UnknownBackend, match="there is no op 'swigl'"):
        dispatch.override("swigl", "cpu")


def test_every_op_has_a_reference_and_a_cpu_backend() -> None:
    assert all(backends == ["cpu", "reference"] for backends in dispatch.operators().values())
    assert len(dispatch.operators()) == 13
