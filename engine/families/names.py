"""How checkpoint tensors become parameters."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class WeightSource:
    """The checkpoint tensors of one parameter, in order."""

    tensors: tuple[str, ...]
    shape: tuple[int, ...]
    """Shape of the parameter."""
    stack: int = 0
    """0: the tensors are joined along axis 0. n: the parameter is a stack of n slices of shape
    `shape[1:]`, and each slice is joined from `len(tensors) / n` tensors in order."""


@dataclass(frozen=True)
class WeightTable:
    """Everything that a checkpoint holds, and what becomes of it."""

    parameters: dict[str, WeightSource] = field(default_factory=dict)
    """Our parameter -> the tensors that fill it. A tensor stands here once."""
    copies: dict[str, str] = field(default_factory=dict)
    """Tensor that a checkpoint may store although it is redundant -> the tensor it must equal."""
