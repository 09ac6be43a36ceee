"""How close is close: the one measure by which a backend is judged against the reference.

Relative error is max|a − b| / max|ref| over a whole tensor, never element by element (an element near 0 says nothing), and
the cosine of the flattened tensors. The reference is computed in fp64 on upcast inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 2.0**-7}
"""Per result dtype; bf16 keeps 8 bits, so its last rounding alone is up to 2⁻⁸ of an element."""
MIN_COSINE = 0.999


@dataclass(frozen=True)
class Difference:
    """How far a result is from its reference."""

    relative: float
    """max|a − b| / max|ref|; infinite where either holds NaN or the other an infinity."""
    cosine: float
    tolerance: float

    @property
    def within(self) -> bool:
        """Whether both measures are in bounds."""
        return self.relative <= self.tolerance and self.cosine > MIN_COSINE


def check(result: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype) -> Difference:
    """Compare; `dtype` says which tolerance applies (that of the op's own results)."""
    tolerance = TOLERANCE[dtype]
    ours, truth = result.double().flatten(), reference.double().flatten()
    if ours.shape != truth.shape or not bool(torch.isfinite(ours).all()):
        return Difference(float("inf"), 0.0, tolerance)
    if truth.numel() == 0:
        return Difference(0.0, 1.0, tolerance)
    largest = float(truth.abs().max())
    difference = float((ours - truth).abs().max())
    if largest == 0.0:
        return Difference(difference, 1.0 if difference == 0.0 else 0.0, tolerance)
    cosine = float(torch.nn.functional.cosine_similarity(ours, truth, dim=0))
    return Difference(difference / largest, cosine, tolerance)
