"""The feed-forward layer: routed (fp32 router, top-k experts, weighted sum) or dense."""

from __future__ import annotations

import torch

from moorage.engine.config import DenseSpec, MoeSpec
from moorage.kernels import ops


def feed_forward(
    hidden: torch.Tensor, spec: MoeSpec | DenseSpec, weights: dict[str, torch.Tensor]
) -> torch.Tensor:
    """hidden [M, K] (normed) → [M, K] in hidden's dtype.

    Router logits, softmax and weights are fp32 and ties go to the lowest expert (cases I4, I5): in
    bf16 two experts a thousandth apart are one number, and the choice would be the library's.
    `weights["router"]` is fp32 already; the decoder casts it once.
    """
    if isinstance(spec, DenseSpec):
        return ops.linear(ops.swiglu(ops.linear(hidden, weights["gate_up"])), weights["down"])
    logits = ops.linear(hidden.float(), weights["router"])
    chosen, expert_ids = ops.route(logits, spec.top_k, spec.renormalize)
    return ops.moe_experts(hidden, chosen, expert_ids, weights["gate_up"], weights["down"])
