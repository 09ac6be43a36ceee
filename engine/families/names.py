"""How checkpoint tensors become one parameter."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WeightSource:
    """The checkpoint tensors of one parameter, in order."""

    tensors: tuple[str, ...]
    shape: tuple[int, ...]
    """Shape of the parameter."""
    stack: int = 0
    """0: the tensors are joined along axis 0. n: the parameter is a stack of n slices `[shape[1:]]`, and each slice is
    joined from `len(tensors) / n` tensors in order."""
