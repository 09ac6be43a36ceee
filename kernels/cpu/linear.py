"""Matrix products whose rows do not depend on the batch, under the plan that `determinism` found."""

from __future__ import annotations

import torch
from torch.nn import functional

from moorage.kernels.cpu import determinism


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See `ops.linear`. The bias is added after the product is rounded: one more rounding, and the
    product keeps the form that was checked.
    """
    if not x.shape[0]:
        return x.new_zeros((0, weight.shape[0]))
    plan = determinism.find_plan(
        "linear", _product, x.dtype, weight.shape[1], weight.shape[0], torch.get_num_threads()
    )
    out = determinism.run(plan, _product, x, weight)
    return out if bias is None else out + bias


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, weight)


OPS = {"linear": linear}
