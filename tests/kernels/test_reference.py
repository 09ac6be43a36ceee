"""The truth against formulas written another way: what every backend is judged by must itself be right."""

from __future__ import annotations

import pytest
import torch

from moorage.kernels import ops
from moorage.kernels.equivalence import check
from moorage.kernels.equivalence_cases import inverse_frequencies

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope_turns_pairs_by_exact_angles_even_far_out(backend: str, dtype: torch.dtype) -> None:
    """As complex numbers; at position 10⁶ an angle in fp32 would be off by hundredths."""
    inv_freq = inverse_frequencies(16)
    x = torch.randn(3, 2, 16).to(dtype)
    positions = torch.tensor([0, 7, 1_000_003])
    angles = torch.outer(positions.double(), inv_freq)[:, None]
    turned = torch.complex(*x.double().chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
    out = ops.apply_rope(x, positions, inv_freq)
    assert check(out, torch.cat((turned.real, turned.imag), -1), dtype).within
    assert torch.equal(out[0], x[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm(backend: str, dtype: torch.dtype) -> None:
    x, weight = torch.randn(7, 33).to(dtype) * 3, torch.rand(33).to(dtype) + 0.5
    expected = torch.nn.functional.rms_norm(x.double(), (33,), weight.double(), 1e-6)
    assert check(ops.rms_norm(x, weight, 1e-6), expected, dtype).within
    assert ops.rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), 0.0)[
        0
    ].tolist() == pytest.approx([3 / 12.5**0.5, 4 / 12.5**0.5])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu(backend: str, dtype: torch.dtype) -> None:
    gate_up = torch.randn(5, 2 * 48).to(dtype) * 2
    gate, up = gate_up.double().chunk(2, -1)
    assert check(ops.swiglu(gate_up), torch.nn.functional.silu(gate) * up, dtype).within
    assert ops.swiglu(torch.tensor([[0.0, 100.0, 5.0, 2.0]])).tolist() == [[0.0, 200.0]]


def test_lse_is_the_log_of_the_sum_of_exponentials(backend: str) -> None:
    """Two keys, one head, no rotation: scores 0.5 and −1."""
    kv = torch.zeros(1, 2, 1, 2, 2)
    kv[0, 0, 0] = torch.tensor([[1.0, 0.0], [-2.0, 0.0]])
    kv[0, 1, 0] = torch.tensor([[1.0, 10.0], [3.0, 20.0]])
    out, lse = ops.paged_attention(
        torch.tensor([[[1.0, 0.0]]]),
        kv,
        torch.zeros(1, 1, dtype=torch.int64),
        None,
        torch.tensor([2]),
        torch.tensor([0, 1]),
        torch.zeros(1, dtype=torch.float64),
        0.5,
    )
    scores = torch.tensor([0.5, -1.0])
    assert lse.item() == pytest.approx(scores.exp().sum().log().item())
    weight = scores.softmax(0)[1].item()
    assert out[0, 0].tolist() == pytest.approx([1 + 2 * weight, 10 + 10 * weight])
