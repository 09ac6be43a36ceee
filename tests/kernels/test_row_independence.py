"""A row's bits are its own: not its neighbours', not its place's, not the number of threads'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch

from moorage.kernels import ops

DTYPES = [torch.float32, torch.bfloat16]
ROWS = 700
INV_FREQ = 10_000.0 ** -(torch.arange(0, 10, 2, dtype=torch.float64) / 10)

RowOp = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


def op_on_rows(name: str, dtype: torch.dtype) -> tuple[RowOp, torch.Tensor]:
    """An op as a function of its rows, and rows whose width is no multiple of a vector."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 3

    if name == "rms_norm":
        weight = random(133).to(dtype)
        return lambda x: (ops.rms_norm(x, weight, 1e-6),), random(ROWS, 133).to(dtype)
    if name == "swiglu":
        return lambda x: (ops.swiglu(x),), random(ROWS, 2 * 117).to(dtype)
    if name == "apply_rope":
        positions = torch.randint(0, 100_000, (ROWS,), generator=generator)
        x = torch.cat((random(ROWS, 3 * 10), positions[:, None].float()), -1)
        return lambda x: (
            ops.apply_rope(x[:, :-1].reshape(-1, 3, 10).to(dtype), x[:, -1].long(), INV_FREQ),
        ), x
    if name == "merge_attention":
        return lambda x: ops.merge_attention(
            x[:, :-5].reshape(-1, 5, 1, 11).transpose(0, 1).contiguous().to(dtype),
            x[:, -5:].T[..., None].contiguous(),
        ), random(ROWS, 5 * 11 + 5)
    scoring: Literal["softmax", "sigmoid"] = "sigmoid" if "sigmoid" in name else "softmax"
    renormalize = name.endswith("renormalized")
    bias = random(61) if scoring == "sigmoid" else None
    return lambda x: ops.route(x, 61, renormalize, scoring, bias), random(ROWS, 61)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "rms_norm",
        "swiglu",
        "apply_rope",
        "merge_attention",
        "route softmax plain",
        "route softmax renormalized",
        "route sigmoid plain",
        "route sigmoid renormalized",
    ],
)
def test_rows_are_bit_equal_in_any_batch(name: str, dtype: torch.dtype, num_threads: int) -> None:
    del num_threads
    op, x = op_on_rows(name, dtype)
    whole = op(x)
    for count in (1, 2, 3, 7, 16, 17, 64, 333):
        for at in (0, 1, 5, 300):
            for part, expected in zip(op(x[at : at + count]), whole, strict=True):
                assert torch.equal(part, expected[at : at + count]), f"{count} rows at {at}"


def test_plain_sigmoid_would_not_do() -> None:
    """Why `swiglu` is written out of exp: torch rounds a sigmoid by its place in the range."""
    x = torch.randn(1000)
    assert any(
        not torch.equal(torch.sigmoid(x[1:count]), torch.sigmoid(x)[1:count])
        for count in range(2, 100)
    )
