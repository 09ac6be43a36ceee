"""Every op on every backend against fp64, and the measure itself."""

from __future__ import annotations

import pytest
import torch

from moorage.kernels import dispatch, ops
from moorage.kernels.equivalence import Difference, OpCase, check, compare, poisoned_memory
from moorage.kernels.equivalence_cases import op_cases

NAN = float("nan")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_every_op_equals_the_reference_in_fp64(backend: str, dtype: torch.dtype, seed: int) -> None:
    worst = [
        comparison
        for case in op_cases(dtype, seed)
        if not (comparison := compare(case, backend)).within
    ]
    assert not worst, "\n".join(map(str, worst))
    assert {op for op, ran in dispatch.counts if ran == backend} == set(dispatch.operators())
    assert {ran for _, ran in dispatch.counts} == {backend}


def test_every_op_has_a_reference_and_a_cpu_backend() -> None:
    assert len(dispatch.operators()) == 13
    assert all(backends == ["cpu", "reference"] for backends in dispatch.operators().values())


def test_the_measure_is_the_largest_error_over_the_largest_value() -> None:
    truth = torch.tensor([4.0, -8.0, 0.001])
    difference = check(truth + torch.tensor([0.0, 0.0, 0.01]), truth, torch.bfloat16)
    assert difference.relative == pytest.approx(0.01 / 8)
    assert difference.within  # element by element it would be off by a factor of 11
    assert not check(truth + torch.tensor([0.0, 0.1, 0.0]), truth, torch.bfloat16).within
    assert not check(truth.flip(0), truth, torch.bfloat16).within


@pytest.mark.parametrize(
    ("result", "truth", "within"),
    [
        ([1.0, NAN], [1.0, 1.0], False),
        ([1.0, 1.0], [1.0, NAN], False),
        ([1.0, NAN], [1.0, NAN], True),
        ([1.0, -torch.inf], [1.0, -torch.inf], True),
        ([1.0, torch.inf], [1.0, -torch.inf], False),
        ([0.0, 0.0], [0.0, 0.0], True),
        ([0.0, 1e-3], [0.0, 0.0], False),
        ([], [], True),
        ([1.0, 1.0], [1.0], False),
    ],
)
def test_nan_and_infinity_must_stand_at_the_same_places(
    result: list[float], truth: list[float], within: bool
) -> None:
    assert check(torch.tensor(result), torch.tensor(truth), torch.float32).within is within


def test_a_good_cosine_is_needed_too() -> None:
    assert not Difference(relative=0.0, cosine=0.99, tolerance=1e-5).within


def test_a_wrong_backend_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(3, 5), torch.randn(4, 5)
    case = OpCase("linear", "plain", (x, weight, None))
    assert compare(case, "cpu").within

    def forgets_a_row(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        del bias
        out = x.new_empty((x.shape[0], weight.shape[0]))
        out[1:] = x[1:] @ weight.T
        return out

    monkeypatch.setitem(dispatch._registry["linear"], "cpu", forgets_a_row)
    comparison = compare(case, "cpu")
    assert not comparison.within
    assert str(comparison).startswith("linear on cpu, plain: relative error inf of 1.00e-05")


def test_uninitialised_memory_is_nan_only_inside_the_block() -> None:
    with poisoned_memory():
        assert bool(torch.isnan(torch.empty(3)).all())
        assert bool(
            torch.isnan(ops.linear(torch.randn(2, 3), torch.randn(4, 3)).new_empty(5)).all()
        )
    assert not torch.are_deterministic_algorithms_enabled()
