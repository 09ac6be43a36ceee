"""Ops that look at one row at a time, in forms whose bits do not depend on where a value stands.

torch runs an elementwise op in vectors and the rest of the range in scalars, and for a few
functions (sigmoid, silu) the two round differently: a value's bits then depend on its place in the
batch. exp, cosine and sine take one path for both (measured, and asserted by the tests); sums,
products and quotients are exact either way. So sigmoid is written out of exp.
"""

from __future__ import annotations

import torch

from moorage.kernels import reference


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `ops.rms_norm`. The reference's own form: its sum runs over one row at a time."""
    return reference.rms_norm(x, weight, eps)


def apply_rope(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """See `ops.apply_rope`."""
    return reference.apply_rope(x, positions, inv_freq)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """See `ops.swiglu`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    # exp overflows to infinity below −88, where gate / ∞ = 0 is right.
    return (gate / (1.0 + torch.exp(-gate)) * up).to(gate_up.dtype)


def route(
    logits: torch.Tensor, top_k: int, renormalize: bool, scoring: str, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.route`."""
    softmax = scoring == "softmax"
    scores = torch.softmax(logits, dim=-1) if softmax else 1.0 / (1.0 + torch.exp(-logits))
    # Softmax and sigmoid round near logits to one score: without a bias the logits decide.
    ranking = logits if bias is None else scores + bias
    ids = torch.sort(ranking, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(-1, ids)
    if renormalize:
        total = weights[:, :1].clone()
        for slot in range(1, top_k):
            total += weights[:, slot : slot + 1]
        weights = weights / total
    return weights, ids


OPS = {"rms_norm": rms_norm, "swiglu": swiglu, "apply_rope": apply_rope, "route": route}
