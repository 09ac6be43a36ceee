"""Muon for the matrices inside the layers, AdamW for embeddings, router and norms.

Muon: Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024,
https://kellerjordan.github.io/posts/muon/ (the coefficients of the iteration, Nesterov momentum
and the scale by the shape of the matrix are from there). Its five small products a matrix cost
little beside a training step of 8192 tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from model import Model
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

ADAM_RATE = 0.003
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
WEIGHT_DECAY = 0.01


def orthogonalise(update: Tensor, compute: torch.dtype, steps: int = 5) -> Tensor:
    """The nearest half-orthogonal matrix, roughly: singular values end between 0.7 and 1.2.

    update [..., rows, columns]; leading axes are a batch. The iteration tolerates bf16.
    """
    a, b, c = NEWTON_SCHULZ
    x = update.to(compute)
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * (square @ square)) @ x
    return torch.transpose(x, -2, -1) if tall else x


class Muon(Optimizer):
    """Momentum, orthogonalised: each step moves all directions of a matrix by about the rate."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float = 0.02,
        momentum: float = 0.95,
        compute: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})
        self._compute = compute

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter from its gradient."""
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            for weight in group["params"]:
                state = self.state[weight]
                mean = state.setdefault("m", torch.zeros_like(weight))
                mean.lerp_(weight.grad, 1 - momentum)
                update = orthogonalise(weight.grad.lerp(mean, momentum), self._compute)
                scale = max(1.0, weight.size(-2) / weight.size(-1)) ** 0.5
                weight.mul_(1 - rate * WEIGHT_DECAY).add_(update.float(), alpha=-rate * scale)


def optimisers(model: Model, muon_rate: float) -> tuple[Muon, AdamW]:
    """The two optimisers, which together hold every parameter once."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, weight in model.named_parameters():
        inner = weight.dim() >= 2 and "embed" not in name and "router" not in name
        (matrices if inner else others).append(weight)
    adam = AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    return Muon(matrices, lr=muon_rate, compute=model.compute), adam
