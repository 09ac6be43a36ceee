"""Ops that look at one row at a time: independent of the batch by construction."""

from __future__ import annotations

import torch

from moorage.kernels import reference



def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `ops.rms_norm`. The reference is one pass per operation and good enough on a CPU."""
    return reference.rms_norm(x, weight, eps)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """See `ops.swiglu`."""
    return reference.swiglu(gate_up)


def apply_rope(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """See `ops.apply_rope`."""
    return reference.apply_rope(x, positions, inv_freq)


OPS = {"rms_norm": rms_norm, "swiglu": swiglu, "apply_rope": apply_rope, "route": reference.route}
