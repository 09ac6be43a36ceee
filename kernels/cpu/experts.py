"""Routed experts: rows sorted by expert, two products per expert on its rows alone, one ordered sum."""

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
    """See `ops.moe_experts`. Row results do not depend on how many rows an expert got: `linear` sees to it."""
    rows, top_k = expert_ids.shape
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
    by_row = torch.empty_like(results)
    by_row[order] = results
    by_row = by_row.reshape(rows, top_k, -1)
    out = torch.zeros(x.shape, dtype=torch.float32)
    for slot in range(top_k):
        out += by_row[:, slot].float() * weights[:, slot, None]
    return out.to(x.dtype)


OPS = {"moe_experts": moe_experts}
