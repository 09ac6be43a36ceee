"""Routed experts: rows sorted by expert, two products per expert on its rows alone, one ordered
sum.

    rows ── sort by expert (stable) ──▶ [expert 0's rows | expert 3's | …]   empty ones: nothing
      ▲                                    └─ linear → swiglu → linear, each on its own rows
      └── Σ over the k slots of a row, fp32, slot 0 first ◀── back to (row, slot) order
"""

from __future__ import annotations

import torch

from moorage.kernels.cpu.elementwise import swiglu
from moorage.kernels.cpu.linear import linear


def moe_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """See `ops.moe_experts`. How many rows an expert gets changes no row's bits: `linear` sees to
    that.
    """
    num_rows, top_k = expert_ids.shape
    flat = expert_ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    loads = torch.bincount(flat, minlength=gate_up.shape[0]).tolist()
    sorted_rows = x.index_select(0, torch.div(order, top_k, rounding_mode="floor"))
    results = torch.empty_like(sorted_rows)
    start = 0
    for expert, load in enumerate(loads):
        if load:
            part = sorted_rows[start : start + load]
            inner = swiglu(linear(part, gate_up[expert], None))
            results[start : start + load] = linear(inner, down[expert], None)
            start += load
    by_slot = torch.empty_like(results)
    by_slot[order] = results
    by_slot = by_slot.view(num_rows, top_k, x.shape[1])
    out = torch.zeros(x.shape, dtype=torch.float32)
    for slot in range(top_k):
        out += by_slot[:, slot].float() * weights[:, slot, None]
    return out.to(x.dtype)


OPS = {"moe_experts": moe_experts}
