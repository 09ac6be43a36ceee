"""The attention layer: project, normalise heads, rotate and store keys, attend over blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moorage.engine.config import AttentionSpec
from moorage.kernels import ops


@dataclass(frozen=True)
class AttentionBatch:
    """A step's index tensors, made once and shared by all layers. `M` rows, `S` sequences."""

    block_tables: torch.Tensor
    """int64 [S, max_blocks], padded with 0."""
    block_deltas: torch.Tensor | None
    """int64 [S, max_blocks], visible − log position per block; None where all are 0."""
    context_lens: torch.Tensor
    """int64 [S], visible tokens with this step's rows."""
    cu_seqlens: torch.Tensor
    """int64 [S + 1], rows of sequence i are [cu[i], cu[i + 1])."""
    slot_mapping: torch.Tensor
    """int64 [M], the pool slot of each row: block · block size + offset."""


def inverse_frequencies(spec: AttentionSpec) -> torch.Tensor:
    """fp64 [head_dim / 2]: theta^(−2i / head_dim) (Su et al. 2021, RoFormer)."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float64) / spec.head_dim
    return spec.rope_theta**-exponents


def attend(
    hidden: torch.Tensor,
    positions: torch.Tensor,
    batch: AttentionBatch,
    layer_kv: torch.Tensor,
    weights: dict[str, torch.Tensor],
    *,
    spec: AttentionSpec,
    eps: float,
    inv_freq: torch.Tensor,
) -> torch.Tensor:
    """hidden [M, K] (normed), log positions int64 [M] → [M, K]; writes the rows' KV to `layer_kv`.

    layer_kv [num_blocks, 2, G, B, D] in hidden's dtype. Keys are stored rotated at their log
    position and never rewritten; the query is rotated inside the op, once per distinct delta.
    """
    rows = hidden.shape[0]
    qkv = ops.linear(hidden, weights["qkv"])
    query_width = spec.num_heads * spec.head_dim
    value_at = query_width + spec.num_kv_heads * spec.head_dim
    query = qkv[:, :query_width].reshape(rows, spec.num_heads, spec.head_dim)
    key = qkv[:, query_width:value_at].reshape(rows, spec.num_kv_heads, spec.head_dim)
    value = qkv[:, value_at:].reshape(rows, spec.num_kv_heads, spec.head_dim)
    if spec.qk_norm:
        query = ops.rms_norm(query, weights["query_norm"], eps)
        key = ops.rms_norm(key, weights["key_norm"], eps)
    key = ops.apply_rope(key, positions, inv_freq)
    ops.store_kv(key, value, layer_kv, batch.slot_mapping)
    out, _ = ops.paged_attention(
        query,
        layer_kv,
        batch.block_tables,
        batch.block_deltas,
        batch.context_lens,
        batch.cu_seqlens,
        inv_freq,
        spec.head_dim**-0.5,
    )
    return ops.linear(out.reshape(rows, query_width), weights["output"])
