"""How close is close: the one measure by which a backend is judged against the reference.

Relative error is max|a − b| / max|ref| over a whole tensor, never element by element (an element near 0 says
nothing), with the cosine of the flattened tensors beside it. The reference runs in fp64 on upcast inputs. What only
moves values is compared bit for bit. While a backend runs, memory that torch hands out uninitialised holds NaN, so
that whatever it forgets to write shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from moorage.kernels import dispatch, ops, reference

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 1e-3,
    torch.bfloat16: 2.0**-7,
}
"""Per result dtype; bf16 keeps 8 bits, so its last rounding alone is up to 2⁻⁹ of an element."""
MIN_COSINE = 0.999
EXACT = 0.0
"""Tolerance of what only moves or chooses: ids, stored keys, copied blocks."""


@dataclass(frozen=True)
class Difference:
    """How far a result is from its reference."""

    relative: float
    """max|a − b| / max|ref|; infinite where shapes differ or one holds NaN or infinity that the other lacks."""
    cosine: float
    tolerance: float

    @property
    def within(self) -> bool:
        """Whether both measures are in bounds."""
        return self.relative <= self.tolerance and self.cosine > MIN_COSINE


@dataclass(frozen=True)
class OpCase:
    """One call of an op on fresh inputs."""

    op: str
    name: str
    """What is odd about it."""
    arguments: tuple[Any, ...]
    writes: int | None = None
    """Index of the argument that the op writes, where it returns nothing."""
    keeps_rounding: bool = False
    """Whether the reference keeps the inputs' dtype: values are moved, not computed."""
    slack: float = 1.0
    """Factor on the tolerance below fp32, for an op whose contract rounds inner results to the dtype too."""


@dataclass(frozen=True)
class Comparison:
    """One case on one backend."""

    case: OpCase
    backend: str
    differences: tuple[Difference, ...]
    """One per result."""

    @property
    def within(self) -> bool:
        """Whether every result is in bounds."""
        return all(difference.within for difference in self.differences)

    def __str__(self) -> str:
        worst = max(self.differences, key=lambda difference: difference.relative)
        return (
            f"{self.case.op} on {self.backend}, {self.case.name}: relative error {worst.relative:.2e} of"
            f" {worst.tolerance:.2e}, cosine {worst.cosine:.6f}"
        )


def check(result: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype) -> Difference:
    """Compare; `dtype` says which tolerance applies (that of the op's own results)."""
    return _difference(result, truth, TOLERANCE[dtype])


def compare(case: OpCase, backend: str) -> Comparison:
    """Run a case through `ops` on a backend and through the reference.

    Raises what the op raises. Changes no argument of the case.
    """
    ours = [_clone(argument) for argument in case.arguments]
    wide = [
        _clone(argument) if case.keeps_rounding else _upcast(argument)
        for argument in case.arguments
    ]
    with dispatch.overridden(case.op, backend), poisoned_memory():
        results = _results(getattr(ops, case.op)(*ours), ours, case)
    truths = _results(getattr(reference, case.op)(*wide), wide, case)
    differences = []
    for result, truth in zip(results, truths, strict=True):
        exact = case.keeps_rounding or not result.is_floating_point()
        tolerance = EXACT if exact else TOLERANCE[result.dtype]
        if result.dtype in {torch.float16, torch.bfloat16}:
            tolerance *= case.slack
        differences.append(_difference(result, truth, tolerance))
    return Comparison(case, backend, tuple(differences))


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Uninitialised floats are NaN for a block of code, in C++ as in Python.

    torch does this itself in its deterministic mode (`torch.utils.deterministic.fill_uninitialized_memory`, on by
    default).
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled)


def _results(returned: Any, arguments: list[Any], case: OpCase) -> list[torch.Tensor]:
    if case.writes is not None:
        return [arguments[case.writes]]
    return list(returned) if isinstance(returned, tuple) else [returned]


def _clone(argument: Any) -> Any:
    return argument.clone() if isinstance(argument, torch.Tensor) else argument


def _upcast(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor) and argument.is_floating_point():
        return argument.double()
    return _clone(argument)


def _difference(result: torch.Tensor, truth: torch.Tensor, tolerance: float) -> Difference:
    if result.shape != truth.shape:
        return Difference(float("inf"), 0.0, tolerance)
    ours, expected = result.double().flatten(), truth.double().flatten()
    strange = ~torch.isfinite(expected)
    if not torch.equal(
        ours[strange].nan_to_num(0.5), expected[strange].nan_to_num(0.5)
    ) or not bool(torch.isfinite(ours[~strange]).all()):
        return Difference(float("inf"), 0.0, tolerance)
    ours, expected = ours[~strange], expected[~strange]
    if not expected.numel():
        return Difference(0.0, 1.0, tolerance)
    largest, difference = float(expected.abs().max()), float((ours - expected).abs().max())
    if largest == 0.0:
        return Difference(difference, 1.0 if difference == 0.0 else 0.0, tolerance)
    cosine = float(torch.nn.functional.cosine_similarity(ours, expected, dim=0))
    return Difference(difference / largest, cosine, tolerance)
