"""Routing and experts: cases I1, I2, I4, I5, I7."""

from __future__ import annotations

import pytest
import torch

from moorage.kernels import ops
from moorage.kernels.cpu import experts as cpu_experts
from moorage.kernels.equivalence import check, poisoned_memory

NAN = float("nan")
DTYPES = [torch.float32, torch.bfloat16]


def rounded(tensor: torch.Tensor) -> list[list[float]]:
    return [[round(value, 4) for value in row] for row in tensor.tolist()]


def dense(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Every expert over every row in fp64, masked by its weight."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(gate_up.shape[0]):
        gate, up = (x.double() @ gate_up[expert].double().T).chunk(2, -1)
        result = (torch.nn.functional.silu(gate) * up) @ down[expert].double().T
        out += result * (weights.double() * (ids == expert)).sum(-1, keepdim=True)
    return out


def test_i1_renormalise_flag(backend: str) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    plain, ids = ops.route(logits, 2, renormalize=False)
    scaled, same = ops.route(logits, 2, renormalize=True)
    assert rounded(plain) == [[0.6439, 0.2369]]
    assert rounded(scaled) == [[0.7311, 0.2689]]
    assert ids.tolist() == same.tolist() == [[0, 1]]


def test_i2_bias_chooses_and_never_weighs(backend: str) -> None:
    scores = torch.tensor([[0.9, 0.8, 0.1]])
    bias = torch.tensor([0.0, 0.0, 1.0])
    weights, ids = ops.route(torch.logit(scores), 1, False, "sigmoid", bias)
    assert ids.tolist() == [[2]]
    assert rounded(weights) == [[0.1]]


def test_i4_the_router_is_fp32(backend: str) -> None:
    logits = torch.tensor([[3.0, 3.001, 0.0, 0.0]])
    assert logits.bfloat16()[0, 0] == logits.bfloat16()[0, 1]  # bf16 could not tell them apart
    weights, ids = ops.route(logits, 1, False)
    assert ids.tolist() == [[1]]
    assert weights.dtype == torch.float32
    with pytest.raises(
        ValueError, match=r"route: logits must be one of torch.float32, got torch.bfloat16"
    ):
        ops.route(logits.bfloat16(), 1, False)


def test_i4_weights_stay_fp32_until_the_combine(backend: str) -> None:
    """Two weights that bf16 would round to 0.5 each; identity-like experts show the difference."""
    weights = torch.tensor([[0.501, 0.499]])
    gate_up = torch.zeros(2, 2, 1)
    gate_up[:, 0], gate_up[:, 1] = 30.0, 1.0
    down = torch.tensor([[[1.0]], [[-1.0]]])
    x = torch.ones(1, 1).bfloat16()
    out = ops.moe_experts(x, weights, torch.tensor([[0, 1]]), gate_up.bfloat16(), down.bfloat16())
    assert out.item() == pytest.approx(30 * 0.002, rel=0.01)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_i5_ties_go_to_the_lowest_index_in_any_batch(backend: str, scoring: str) -> None:
    tied = torch.tensor([1.0, 5.0, 5.0, 5.0, 0.0, 5.0, 1.0, 1.0])
    first: torch.Tensor | None = None
    for _ in range(20):
        alone, ids = ops.route(tied[None], 3, True, scoring)  # type: ignore[arg-type]
        weights, batch = ops.route(tied.repeat(64, 1), 3, True, scoring)  # type: ignore[arg-type]
        first = alone if first is None else first
        assert ids.tolist() == [[1, 2, 3]]
        assert batch.tolist() == [[1, 2, 3]] * 64
        assert torch.equal(weights, first.expand(64, -1))
    # The tie at the edge of k = 5 lies between experts 0, 6 and 7.
    assert ops.route(tied[None], 5, True, scoring)[1].tolist() == [[1, 2, 3, 5, 0]]  # type: ignore[arg-type]


def test_i5_ids_stand_in_descending_score_order(backend: str) -> None:
    logits = torch.tensor([[0.5, 3.0, -1.0, 2.0]])
    weights, ids = ops.route(logits, 4, False)
    assert ids.tolist() == [[1, 3, 0, 2]]
    assert weights[0].tolist() == sorted(weights[0].tolist(), reverse=True)


def test_logits_too_close_for_softmax_keep_their_order(backend: str) -> None:
    assert ops.route(torch.tensor([[20.0, 20.000002, -30.0]]), 2, True)[1].tolist() == [[1, 0]]
    assert ops.route(torch.tensor([[20.0, 21.0]]), 1, False, "sigmoid")[1].tolist() == [[1]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_i7_empty_experts_and_empty_batches(backend: str, dtype: torch.dtype) -> None:
    x = torch.randn(9, 32).to(dtype)
    gate_up, down = torch.randn(8, 48, 32).to(dtype) * 0.3, torch.randn(8, 32, 24).to(dtype) * 0.3
    gate_up[1:], down[1:] = NAN, NAN  # experts without rows must not even be read
    ids, weights = torch.zeros((9, 1), dtype=torch.int64), torch.ones(9, 1)
    with poisoned_memory():
        out = ops.moe_experts(x, weights, ids, gate_up, down)
        empty = ops.moe_experts(x[:0], weights[:0], ids[:0], gate_up, down)
    truth = dense(x, weights, ids, gate_up[:1], down[:1])
    difference = check(out, truth, dtype)
    # Three inner results are rounded to bf16 on top of the last one.
    assert difference.relative < (1e-5 if dtype == torch.float32 else 2.0**-6), difference
    assert empty.shape == (0, 32) and empty.dtype == dtype


def test_an_expert_without_rows_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    gate_up, down = torch.randn(8, 6, 4), torch.randn(8, 4, 3)

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        assert bias is None
        read.extend(
            e for e in range(8) if weight.data_ptr() in {gate_up[e].data_ptr(), down[e].data_ptr()}
        )
        return x @ weight.T

    monkeypatch.setattr(cpu_experts, "linear", linear)
    ops.moe_experts(
        torch.randn(3, 4), torch.ones(3, 2), torch.tensor([[5, 2], [2, 5], [7, 2]]), gate_up, down
    )
    assert read == [2, 2, 5, 5, 7, 7]


def test_experts_equal_the_dense_sum(backend: str) -> None:
    x = torch.randn(75, 64)
    gate_up, down = torch.randn(8, 96, 64) * 0.2, torch.randn(8, 64, 48) * 0.2
    weights, ids = ops.route(torch.randn(75, 8), 2, True)
    out = ops.moe_experts(x, weights, ids, gate_up, down)
    assert check(out, dense(x, weights, ids, gate_up, down), torch.float32).within


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_experts_row_has_the_same_bits_in_any_batch_and_chunk(
    dtype: torch.dtype, num_threads: int
) -> None:
    del num_threads
    x = torch.randn(300, 64).to(dtype)
    gate_up, down = (
        (torch.randn(8, 96, 64) * 0.2).to(dtype),
        (torch.randn(8, 64, 48) * 0.2).to(dtype),
    )
    weights, ids = ops.route(torch.randn(300, 8), 2, True)

    def run(rows: torch.Tensor) -> torch.Tensor:
        return ops.moe_experts(x[rows], weights[rows], ids[rows], gate_up, down)

    whole = run(torch.arange(300))
    for chunk in (1, 7, 16, 64):
        parts = [run(torch.arange(at, min(at + chunk, 300))) for at in range(0, 300, chunk)]
        assert torch.equal(torch.cat(parts), whole), f"chunk {chunk}"
    shuffled = torch.randperm(300)
    assert torch.equal(run(shuffled), whole[shuffled])
