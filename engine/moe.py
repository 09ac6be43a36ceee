"""The routed feed-forward layer: fp32 router, top-k experts, weighted sum."""

from __future__ import annotations

import torch

from moorage.engine.config import MoeSpec
from moorage.kernels import ops


def feed_forward(
    hidden: torch.Tensor, spec: MoeSpec, weights: dict[str, torch.Tensor]
) -> torch.Tensor:
    """hidden [M, K] (normed) → [M, K]. Router logits and weights are fp32; ties go to the lowest expert."""
    logits = ops.linear(hidden.float(), weights["router"])
    chosen, expert_ids = ops.route(logits, spec.top_k, spec.renormalize)
    return ops.moe_experts(hidden, chosen, expert_ids, weights["gate_up"], weights["down"])
