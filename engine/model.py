"""The generic decoder: embeddings, layers, output head. All math goes through `kernels/ops.py`."""

from __future__ import annotations

import torch
from torch.nn import functional

from moorage.engine.attention import AttentionBatch, attend, inverse_frequencies
from moorage.engine.config import ModelConfig
from moorage.engine.moe import feed_forward
from moorage.engine.weights import Weights
from moorage.kernels import ops


class Decoder:
    """A decoder-only model over a paged KV pool. Stateless between calls: KV lives in the pool."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        parameters = weights.parameters
        self._embedding = parameters["embedding"]
        self._head = parameters["embedding" if config.tied_embeddings else "head"]
        self._final_norm = parameters["final_norm"]
        self._inv_freq = inverse_frequencies(config.attention)
        self._layers = [
            {
                name.removeprefix(f"layers.{index}."): tensor
                for name, tensor in parameters.items()
                if name.startswith(f"layers.{index}.")
            }
            for index in range(len(config.layers))
        ]
        for layer in self._layers:
            layer["router"] = layer["router"].float()  # routing is fp32 from logits to weights

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        pool: torch.Tensor,
    ) -> torch.Tensor:
        """token_ids, positions int64 [M] → hidden [M, K]; writes the rows' KV to `pool` (all layers).

        pool [num_blocks, num_layers, 2, G, B, D]. Positions are log positions.
        """
        eps = self.config.norm_eps
        hidden = functional.embedding(token_ids, self._embedding)
        for index, (spec, weights) in enumerate(zip(self.config.layers, self._layers, strict=True)):
            normed = ops.rms_norm(hidden, weights["attention_norm"], eps)
            hidden = hidden + attend(
                normed,
                positions,
                batch,
                pool[:, index],
                spec.attention,
                weights,
                eps,
                self._inv_freq,
            )
            normed = ops.rms_norm(hidden, weights["feed_forward_norm"], eps)
            hidden = hidden + feed_forward(normed, spec.feed_forward, weights)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, K] → fp32 [rows, V]; called with the rows that sample, no others."""
        normed = ops.rms_norm(hidden, self._final_norm, self.config.norm_eps)
        return ops.linear(normed, self._head).float()
