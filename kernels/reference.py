"""The truth: every op in plain torch, as its definition reads.

Accumulates in fp32, in fp64 for fp64 inputs. Slow on purpose, and never rewritten for speed: what a
backend computes is judged against this. Contracts are in `ops`.
"""

from __future__ import annotations

import torch


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [M, K] · weightᵀ [K, N] + bias [N]."""
    out = _wide(x) @ _wide(weight).T
    return (out if bias is None else out + _wide(bias)).to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last axis (Zhang, Sennrich 2019)."""
    wide = _wide(x)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed.to(x.dtype) * weight).to(x.dtype)


def rotate(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Rotate-half RoPE (Su et al. 2021) of x [M, heads, D]: fp64 angles, result in x's wide dtype.

    Also what attention turns its queries with, which are not rounded to x's dtype on the way.
    """
    angles = torch.outer(positions.double(), inv_freq.double())
    wide = _wide(x)
    cos = angles.cos().to(wide.dtype)[:, None]
    sin = angles.sin().to(wide.dtype)[:, None]
    first, second = wide.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def apply_rope(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """`rotate`, rounded once to x's dtype."""
    return rotate(x, positions, inv_freq).to(x.dtype)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up; gate_up [M, 2 I] (Shazeer 2020)."""
    gate, up = _wide(gate_up).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def store_kv(
    key: torch.Tensor, value: torch.Tensor, layer_kv: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """key, value [M, G, D] → slots of layer_kv [num_blocks, 2, G, B, D]."""
    size = layer_kv.shape[3]
    for row, slot in enumerate(slot_mapping.tolist()):
        layer_kv[slot // size, 0, :, slot % size] = key[row]
        layer_kv[slot // size, 1, :, slot % size] = value[row]


def paged_attention(
    query: torch.Tensor,
    layer_kv: torch.Tensor,
    block_tables: torch.Tensor,
    block_deltas: torch.Tensor | None,
    context_lens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    inv_freq: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of each row over its sequence's block table; see `ops.paged_attention`."""
    rows, num_heads, _ = query.shape
    num_kv_heads, size = layer_kv.shape[2], layer_kv.shape[3]
    out = torch.zeros_like(query)
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    lse = torch.full((rows, num_heads), float("-inf"), dtype=wide)
    for sequence in range(len(context_lens)):
        first, end = int(cu_seqlens[sequence]), int(cu_seqlens[sequence + 1])
        context_len = int(context_lens[sequence])
        for row in range(first, end):
            visible = context_len - (end - row) + 1
            num_blocks = -(-visible // size)
            blocks = block_tables[sequence, :num_blocks]
            keys = layer_kv[blocks, 0].transpose(1, 2).reshape(-1, num_kv_heads, layer_kv.shape[4])
            values = layer_kv[blocks, 1].transpose(1, 2).reshape(keys.shape)
            keys, values = _wide(keys[:visible]), _wide(values[:visible])
            deltas = (
                torch.zeros(num_blocks, dtype=torch.int64)
                if block_deltas is None
                else block_deltas[sequence, :num_blocks]
            )
            scores = torch.empty((visible, num_heads), dtype=wide)
            for delta in torch.unique(deltas).tolist():
                angle = torch.tensor([visible - 1 - delta])
                turned = rotate(query[row : row + 1], angle, inv_freq)[0]
                grouped = turned.reshape(num_kv_heads, -1, turned.shape[-1])
                part = torch.einsum("tgd,gqd->tgq", keys, grouped).reshape(visible, num_heads)
                chosen = (deltas == delta).repeat_interleave(size)[:visible]
                scores[chosen] = part[chosen] * scale
            lse[row] = torch.logsumexp(scores, dim=0)
            weights = torch.exp(scores - lse[row]).reshape(visible, num_kv_heads, -1)
            out[row] = torch.einsum("tgq,tgd->gqd", weights, values).reshape(num_heads, -1)
    return out, lse


def merge_attention(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Parts over disjoint keys → the whole, by weights exp(lse_p − lse)."""
    lse = torch.logsumexp(lses, dim=0)
    safe = torch.where(torch.isinf(lse), torch.zeros_like(lse), lse)
    weights = torch.exp(lses - safe)[..., None]
    # A part that saw no key has weight 0; what it holds must not leak (0 · NaN).
    parts = torch.where(weights > 0, _wide(outs), torch.zeros((), dtype=_wide(outs).dtype))
    return (weights * parts).sum(0).to(outs.dtype), lse


def route(
    logits: torch.Tensor, top_k: int, renormalize: bool, scoring: str, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores, top-k by descending score with ties to the lowest index, weights of the chosen."""
    wide = _wide(logits)
    scores = torch.softmax(wide, dim=-1) if scoring == "softmax" else torch.sigmoid(wide)
    # Scoring may round two different logits to one score: without a bias the order is the logits'.
    ranking = wide if bias is None else scores + bias
    ids = torch.sort(ranking, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids


def moe_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Σ_k weights[:, k] · expert_{ids[:, k]}(x); each expert is SwiGLU. x [M, K]."""
    out = torch.zeros(x.shape, dtype=_wide(x).dtype)
    for row in range(x.shape[0]):
        for weight, expert in zip(weights[row], expert_ids[row].tolist(), strict=True):
            inner = swiglu(linear(x[row : row + 1], gate_up[expert], None))
            out[row] += weight * _wide(linear(inner, down[expert], None))[0]
    return out.to(x.dtype)


def gather_blocks(pool: torch.Tensor, block_ids: torch.Tensor, out: torch.Tensor) -> None:
    """out[i] = pool[block_ids[i]]."""
    for index, block in enumerate(block_ids.tolist()):
        out[index] = pool[block]


def scatter_blocks(pool: torch.Tensor, block_ids: torch.Tensor, source: torch.Tensor) -> None:
    """pool[block_ids[i]] = source[i]."""
    for index, block in enumerate(block_ids.tolist()):
        pool[block] = source[index]


def copy_blocks(
    pool: torch.Tensor, source_ids: torch.Tensor, destination_ids: torch.Tensor
) -> None:
    """pool[destination_ids[i]] = pool[source_ids[i]]; the two sets are disjoint."""
    for source, destination in zip(source_ids.tolist(), destination_ids.tolist(), strict=True):
        pool[destination] = pool[source]


def fill_blocks(pool: torch.Tensor, block_ids: torch.Tensor, value: float) -> None:
    """pool[block_ids] = value."""
    for block in block_ids.tolist():
        pool[block] = value
