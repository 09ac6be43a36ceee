"""Routing and experts: cases I1, I2, I4, I5, I7, and rows that do not depend on the batch."""

from __future__ import annotations

import pytest
import torch

from moorage.kernels import dispatch, ops
from moorage.kernels.equivalence import check

BACKENDS = ["cpu", "reference"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest):
    with dispatch.overridden("route", request.param), dispatch.overridden("moe_experts", request.param):
        yield request.param


def rounded(tensor: torch.Tensor) -> list[list[float]]:
    return [[round(value, 4) for value in row] for row in tensor.tolist()]


def test_i1_renormalise_flag(backend: str) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    plain, ids = ops.route(logits, 2, renormalize=False)
    scaled, same = ops.route(logits, 2, renormalize=True)
    assert rounded(plain) == [[0.6439, 0.2369]]
    assert rounded(scaled) == [[0.7311, 0.2689]]
    assert ids.tolist() == same.tolist() == [[0, 1]]


def test_i2_bias_chooses_and_never_weighs(backend: str) -> None:
    scores = torch.tensor([[0.9, 0.8, 0.1]])
    weights, ids = ops.route(torch.logit(scores), 1, False, "sigmoid", torch.tensor([0.0, 0.0, 1.0]))
    assert ids.tolist() == [[2]]
    assert rounded(weights) == [[0.1]]


def test_i4_the_router_is_fp32(backend: str) -> None:
    logits = torch.tensor([[3.0, 3.001, 0.0, 0.0]])
    assert logits.bfloat16()[0, 0] == logits.bfloat16()[0, 1]  # bf16 could not tell them apart
    weights, ids = ops.route(logits, 1, False)
    assert ids.tolist() == [[1]]
    assert weights.dtype == torch.float32
    with pytest.raises(ValueError, match="logits must be one of torch.float32"):
        ops.route(logits.bfloat16(), 1, False)


def test_i5_ties_go_to_the_lowest_index_in_any_batch(backend: str) -> None:
    tied = torch.tensor([1.0, 5.0, 5.0, 5.0, 0.0, 5.0, 1.0, 1.0])
    for _ in range(20):
        _, alone = ops.route(tied[None], 3, True)
        _, batch = ops.route(tied.repeat(64, 1), 3, True)
        assert alone.tolist() == [[1, 2, 3]]
        assert batch.tolist() == [[1, 2, 3]] * 64
    # Logits too close for fp32 softmax to tell apart are still ordered by the logits.
    close = torch.tensor([[20.0, 20.000002, -30.0]])
    assert ops.route(close, 2, True)[1].tolist() == [[1, 0]]


def dense(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor):
    """Every expert over every row in fp64, masked by its weight."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(gate_up.shape[0]):
        gate, up = (x.double() @ gate_up[expert].double().T).chunk(2, -1)
        result = (torch.nn.functional.silu(gate) * up) @ down[expert].double().T
        out += result * (weights.double() * (ids == expert)).sum(-1, keepdim=True)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_i7_empty_experts_and_empty_batches(backend: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *a, **k: real(*a, **k).fill_(float("nan")) if k.get("dtype", torch.float32).is_floating_point else real(*a, **k)
    )
    x = torch.randn(9, 32).to(dtype)
    gate_up, down = torch.randn(8, 48, 32).to(dtype) * 0.3, torch.randn(8, 32, 24).to(dtype) * 0.3
    gate_up[1:], down[1:] = float("nan"), float("nan")  # experts without rows must not even be read
    ids = torch.zeros((9, 1), dtype=torch.int64)
    weights = torch.ones(9, 1)
    out = ops.moe_experts(x, weights, ids, gate_up, down)
    truth = dense(x, weights, ids, gate_up[:1], down[:1])
    # Two roundings inside (the products' results) on top of the last one.
    assert check(out, truth, torch.float32 if dtype == torch.float32 else torch.bfloat16).relative < (1e-5 if dtype == torch.float32 else 2**-6)
    assert ops.moe_experts(x[:0], weights[:0], ids[:0], gate_up, down).shape == (0, 32)


def test_experts_equal_the_dense_sum_and_rows_do_not_depend_on_the_batch() -> None:
    x = torch.randn(75, 64)
    gate_up, down = torch.randn(8, 96, 64) * 0.2, torch.randn(8, 64, 48) * 0.2
    weights, ids = ops.route(torch.randn(75, 8), 2, True)
    out = ops.moe_experts(x, weights, ids, gate_up, down)
    assert check(out, dense(x, weights, ids, gate_up, down), torch.float32).within
    for dtype in (torch.float32, torch.bfloat16):
        args = (gate_up.to(dtype), down.to(dtype))
        whole = ops.moe_experts(x.to(dtype), weights, ids, *args)
        for rows in (1, 2, 5, 17, 40):
            part = ops.moe_experts(x[7 : 7 + rows].to(dtype), weights[7 : 7 + rows], ids[7 : 7 + rows], *args)
            assert torch.equal(part, whole[7 : 7 + rows]), f"{rows} rows, {dtype}"
