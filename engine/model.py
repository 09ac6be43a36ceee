"""The generic decoder: embedding, layers, output head. All math goes through `kernels/ops.py`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from moorage.engine.attention import AttentionBatch, attend, inverse_frequencies
from moorage.engine.config import ModelConfig
from moorage.engine.moe import feed_forward
from moorage.engine.weights import Weights
from moorage.kernels import ops


class Decoder:
    """A decoder-only model over a paged KV pool. Stateless between calls: KV lives in the pool.

    Row results depend on a row's own sequence alone: in deterministic mode (CPU) they are bit-equal
    whatever else is in the batch and however the prefill was cut, because every op's are.
    """

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        """Takes the tensors as they are; only routers are copied, to fp32."""
        self.config = config
        parameters = weights.parameters
        self._embedding = parameters["embedding"]
        self._head = parameters["embedding" if config.tied_embeddings else "head"]
        self._final_norm = parameters["final_norm"]
        self._inv_freq = inverse_frequencies(config.attention)
        self._layers: list[dict[str, torch.Tensor]] = [{} for _ in config.layers]
        for name, tensor in parameters.items():
            if name.startswith("layers."):
                _, index, ours = name.split(".")
                # Routing is fp32 from logits to weights; cast once and not per step.
                self._layers[int(index)][ours] = tensor.float() if ours == "router" else tensor

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        pool: torch.Tensor,
    ) -> torch.Tensor:
        """token_ids, positions int64 [M] → hidden [M, K] before the final norm.

        Writes the rows' KV of all layers to pool [num_blocks, num_layers, 2, G, B, D], whose dtype
        is the weights'. Positions are log positions. Raises IndexError for an id outside the
        vocabulary, before any KV is written.
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
                weights,
                spec=spec.attention,
                eps=eps,
                inv_freq=self._inv_freq,
            )
            normed = ops.rms_norm(hidden, weights["feed_forward_norm"], eps)
            hidden = hidden + feed_forward(normed, spec.feed_forward, weights)
        return hidden

    def warm_up(self) -> None:
        """Run every product once, so that the kernels' search for a deterministic form (once per shape and process) is
        over before the first request."""
        for matrix in self._matrices():
            ops.linear(torch.zeros((1, matrix.shape[1]), dtype=matrix.dtype), matrix)

    def _matrices(self) -> Iterator[torch.Tensor]:
        yield self._head
        for layer in self._layers:
            for tensor in layer.values():
                if tensor.dim() == 2:
                    yield tensor
                elif tensor.dim() == 3:  # one expert stands for all: they share a shape
                    yield tensor[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, K] → fp32 [rows, V]; for the rows that sample and no others.

        The head is the widest matrix of a small model: over a whole prefill it would cost more than
        a layer.
        """
        normed = ops.rms_norm(hidden, self._final_norm, self.config.norm_eps)
        return ops.linear(normed, self._head).float()
