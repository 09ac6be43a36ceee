"""Every op: its contract, its argument checks, its public function.

Letters: `M` rows of a step (the query tokens of all sequences one after another), `H` query heads,
`G` KV heads, `D` head dim, `B` block size, `S` sequences, `E` experts, `K`, `N`, `I` widths. Floats
are fp32, bf16 or fp16, indices int64.

A KV pool is `[num_blocks, num_layers, 2, G, B, D]` (2 = key, value): block-major, so that one block
is one contiguous piece, head-major inside. A layer's view is `pool[:, layer]`:
`[num_blocks, 2, G, B, D]`.

Tolerance of every op, as max|a − b| / max|ref| against the reference in fp64 on upcast inputs: fp32
1e-5, fp16 1e-3, bf16 2⁻⁷ after its rounding, cosine above 0.999 (`equivalence`). On the CPU every
op is deterministic: the result of a row is bit-equal whatever the rest of the batch, wherever it
stands there and however a prefill was cut into chunks, in one process at one number of threads.

Every op raises InvalidArgument before it computes or writes, from shapes and dtypes alone
(`contracts` says when values are checked too), and UnknownBackend where the device has none. None
waits for anything but its own work, or can be cancelled.
"""

from __future__ import annotations

from typing import Literal

import torch

from moorage.kernels import contracts, dispatch, reference
from moorage.kernels.cpu import attention as cpu_attention
from moorage.kernels.cpu import blocks as cpu_blocks
from moorage.kernels.cpu import elementwise as cpu_elementwise
from moorage.kernels.cpu import experts as cpu_experts
from moorage.kernels.cpu import linear as cpu_linear
from moorage.kernels.errors import InvalidArgument

_SCORINGS = ("softmax", "sigmoid")


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, K] · weight [N, K]ᵀ (+ bias [N]) → [M, N] in x's dtype; accumulates in fp32.

    One dtype throughout. The first call of a (dtype, K, N) in a process also finds the plan that
    makes its rows deterministic: 20 to 100 ms at K ≤ 512, about a second at most.
    """
    contracts.shape("linear", "weight", weight, None, None)
    contracts.shape("linear", "x", x, None, weight.shape[1])
    contracts.dtype("linear", "x", x)
    contracts.dtype("linear", "weight", weight, (x.dtype,))
    if bias is not None:
        contracts.shape("linear", "bias", bias, weight.shape[0])
        contracts.dtype("linear", "bias", bias, (x.dtype,))
    out: torch.Tensor = dispatch.call("linear", x.device.type, x, weight, bias)
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., K] → x / sqrt(mean(x²) + eps) rounded to x's dtype, times weight [K]. fp32 inside."""
    contracts.shape("rms_norm", "weight", weight, x.shape[-1] if x.dim() else None)
    contracts.dtype("rms_norm", "x", x)
    contracts.dtype("rms_norm", "weight", weight, (x.dtype,))
    out: torch.Tensor = dispatch.call("rms_norm", x.device.type, x, weight, eps)
    return out


def apply_rope(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """x [M, heads, D] turned by the angles positions [M] · inv_freq [D / 2] (fp64).

    Rotate-half: element i pairs with i + D / 2. Angles, sine and cosine are fp64, the product is
    rounded to x's dtype once.
    """
    contracts.shape("apply_rope", "inv_freq", inv_freq, None)
    contracts.dtype("apply_rope", "inv_freq", inv_freq, (torch.float64,))
    contracts.shape("apply_rope", "x", x, None, None, 2 * inv_freq.shape[0])
    contracts.dtype("apply_rope", "x", x)
    contracts.indices("apply_rope", "positions", positions, x.shape[0])
    out: torch.Tensor = dispatch.call("apply_rope", x.device.type, x, positions, inv_freq)
    return out


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [M, 2 I] → silu(gate) · up [M, I]; gate is the first half; fp32 inside."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise InvalidArgument("swiglu", "gate_up", "of shape [M, 2 · I]", list(gate_up.shape))
    contracts.dtype("swiglu", "gate_up", gate_up)
    out: torch.Tensor = dispatch.call("swiglu", gate_up.device.type, gate_up)
    return out


def store_kv(
    key: torch.Tensor, value: torch.Tensor, layer_kv: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """key (rotated), value [M, G, D] → slots of layer_kv [num_blocks, 2, G, B, D].

    slot_mapping [M]: block · B + offset, distinct. Writes layer_kv in place, and nothing else in it
    but those slots.
    """
    contracts.shape("store_kv", "key", key, None, None, None)
    num_rows, heads, dim = key.shape
    contracts.shape("store_kv", "value", value, num_rows, heads, dim)
    contracts.shape("store_kv", "layer_kv", layer_kv, None, 2, heads, None, dim)
    contracts.dtype("store_kv", "key", key, (layer_kv.dtype,))
    contracts.dtype("store_kv", "value", value, (layer_kv.dtype,))
    contracts.indices("store_kv", "slot_mapping", slot_mapping, num_rows)
    num_slots = layer_kv.shape[0] * layer_kv.shape[3]
    contracts.within("store_kv", "slot_mapping", slot_mapping, num_slots, distinct=True)
    dispatch.call("store_kv", key.device.type, key, value, layer_kv, slot_mapping)


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
    """Causal attention over paged KV → (out [M, H, D], lse [M, H] fp32).

    query [M, H, D] is normed but not rotated: keys stand rotated at their log positions and are
    never rewritten, so the query's angle for a block is its visible position − the block's delta,
    and it is rotated once per distinct delta. layer_kv [num_blocks, 2, G, B, D] in query's dtype;
    block_tables [S, max_blocks], padded with any valid id; block_deltas the same shape (visible −
    log position), None where all are 0; context_lens [S] visible tokens with this step's rows; rows
    of sequence i are cu_seqlens[i] : cu_seqlens[i + 1], of no row too. Row j of n stands at visible
    position context_len − n + j and sees every cache index up to its own. H is a multiple of G;
    query head h reads KV head h // (H / G). Slots past the context and blocks that no table names
    may hold NaN. `lse` is log Σ exp(score): parts over disjoint keys join by `merge_attention`.
    """
    op = "paged_attention"
    contracts.shape(op, "query", query, None, None, None)
    num_rows, num_heads, dim = query.shape
    contracts.shape(op, "layer_kv", layer_kv, None, 2, None, None, dim)
    num_blocks, _, num_kv_heads, block_size, _ = layer_kv.shape
    if num_heads % num_kv_heads:
        raise InvalidArgument(
            op, "query heads", f"a multiple of {num_kv_heads} KV heads", num_heads
        )
    contracts.dtype(op, "query", query)
    contracts.dtype(op, "layer_kv", layer_kv, (query.dtype,))
    contracts.indices(op, "context_lens", context_lens, None)
    num_sequences = context_lens.shape[0]
    contracts.indices(op, "block_tables", block_tables, num_sequences, None)
    contracts.indices(op, "cu_seqlens", cu_seqlens, num_sequences + 1)
    contracts.shape(op, "inv_freq", inv_freq, dim // 2)
    contracts.dtype(op, "inv_freq", inv_freq, (torch.float64,))
    max_blocks = block_tables.shape[1]
    if block_deltas is not None:
        contracts.indices(op, "block_deltas", block_deltas, num_sequences, max_blocks)
    contracts.within(op, "block_tables", block_tables, num_blocks)
    contracts.sequences(op, num_rows, cu_seqlens, context_lens, max_blocks * block_size)
    result: tuple[torch.Tensor, torch.Tensor] = dispatch.call(
        op,
        query.device.type,
        query,
        layer_kv,
        block_tables,
        block_deltas,
        context_lens,
        cu_seqlens,
        inv_freq,
        scale,
    )
    return result


def merge_attention(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Parts over disjoint keys, outs [P, M, H, D] and lses [P, M, H] fp32 → (out, lse) over all.

    The one rule by which parts are joined: shards, split KV, a shared prefix. A part that saw no
    key has lse −∞ and may hold NaN; where no part saw one, out is 0 and lse −∞.
    """
    contracts.shape("merge_attention", "outs", outs, None, None, None, None)
    contracts.shape("merge_attention", "lses", lses, *outs.shape[:3])
    contracts.dtype("merge_attention", "outs", outs)
    contracts.dtype("merge_attention", "lses", lses, (torch.float32,))
    result: tuple[torch.Tensor, torch.Tensor] = dispatch.call(
        "merge_attention", outs.device.type, outs, lses
    )
    return result


def route(
    logits: torch.Tensor,
    top_k: int,
    renormalize: bool,
    scoring: Literal["softmax", "sigmoid"] = "softmax",
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 logits [M, E] → (weights [M, k] fp32, expert ids [M, k]), descending score.

    Ties go to the lowest expert index. `bias` [E] fp32 takes part in the choice and never in the
    weight (DeepSeek-V3's auxiliary-loss-free balancing). `renormalize` scales the chosen weights to
    sum to 1. Only fp32: bf16 logits tie where the model's do not, and other experts win.
    """
    contracts.shape("route", "logits", logits, None, None)
    contracts.dtype("route", "logits", logits, (torch.float32,))
    num_experts = logits.shape[1]
    if not 1 <= top_k <= num_experts:
        raise InvalidArgument("route", "top_k", f"within 1 … {num_experts}", top_k)
    if scoring not in _SCORINGS:
        raise InvalidArgument("route", "scoring", "one of " + ", ".join(_SCORINGS), repr(scoring))
    if bias is not None:
        contracts.shape("route", "bias", bias, num_experts)
        contracts.dtype("route", "bias", bias, (torch.float32,))
    result: tuple[torch.Tensor, torch.Tensor] = dispatch.call(
        "route", logits.device.type, logits, top_k, renormalize, scoring, bias
    )
    return result


def moe_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """x [M, K] → Σ_k weights[:, k] · down_e(swiglu(gate_up_e(x))), e = expert_ids[:, k].

    weights [M, k] fp32, expert_ids [M, k], gate_up [E, 2 I, K], down [E, K, I]; result [M, K] in
    x's dtype. Each of the three inner results is rounded to x's dtype. An expert without rows costs
    nothing and is not read. The sum over k is fp32 in the order of k.
    """
    op = "moe_experts"
    contracts.shape(op, "x", x, None, None)
    num_rows, width = x.shape
    contracts.shape(op, "gate_up", gate_up, None, None, width)
    num_experts, gate_up_width, _ = gate_up.shape
    contracts.shape(op, "down", down, num_experts, width, gate_up_width // 2)
    contracts.dtype(op, "x", x)
    contracts.dtype(op, "gate_up", gate_up, (x.dtype,))
    contracts.dtype(op, "down", down, (x.dtype,))
    contracts.indices(op, "expert_ids", expert_ids, num_rows, None)
    contracts.shape(op, "weights", weights, num_rows, expert_ids.shape[1])
    contracts.dtype(op, "weights", weights, (torch.float32,))
    contracts.within(op, "expert_ids", expert_ids, num_experts)
    out: torch.Tensor = dispatch.call(op, x.device.type, x, weights, expert_ids, gate_up, down)
    return out


def gather_blocks(pool: torch.Tensor, block_ids: torch.Tensor, out: torch.Tensor) -> None:
    """out [n, …] = pool[block_ids [n]]; device → staging."""
    contracts.indices("gather_blocks", "block_ids", block_ids, None)
    contracts.shape("gather_blocks", "out", out, block_ids.shape[0], *pool.shape[1:])
    contracts.dtype("gather_blocks", "out", out, (pool.dtype,))
    contracts.within("gather_blocks", "block_ids", block_ids, pool.shape[0])
    dispatch.call("gather_blocks", pool.device.type, pool, block_ids, out)


def scatter_blocks(pool: torch.Tensor, block_ids: torch.Tensor, source: torch.Tensor) -> None:
    """pool[block_ids [n]] = source [n, …]; staging → device. Ids are distinct."""
    contracts.indices("scatter_blocks", "block_ids", block_ids, None)
    contracts.shape("scatter_blocks", "source", source, block_ids.shape[0], *pool.shape[1:])
    contracts.dtype("scatter_blocks", "source", source, (pool.dtype,))
    contracts.within("scatter_blocks", "block_ids", block_ids, pool.shape[0], distinct=True)
    dispatch.call("scatter_blocks", pool.device.type, pool, block_ids, source)


def copy_blocks(
    pool: torch.Tensor, source_ids: torch.Tensor, destination_ids: torch.Tensor
) -> None:
    """pool[destination_ids[i]] = pool[source_ids[i]]; copy on write.

    Destinations are distinct, and none is a source.
    """
    contracts.indices("copy_blocks", "source_ids", source_ids, None)
    contracts.indices("copy_blocks", "destination_ids", destination_ids, source_ids.shape[0])
    contracts.within("copy_blocks", "source_ids", source_ids, pool.shape[0])
    contracts.within(
        "copy_blocks", "destination_ids", destination_ids, pool.shape[0], distinct=True
    )
    dispatch.call("copy_blocks", pool.device.type, pool, source_ids, destination_ids)


def fill_blocks(pool: torch.Tensor, block_ids: torch.Tensor, value: float) -> None:
    """pool[block_ids] = value; NaN-fills freed blocks, so that a stale read shows."""
    contracts.indices("fill_blocks", "block_ids", block_ids, None)
    contracts.within("fill_blocks", "block_ids", block_ids, pool.shape[0])
    dispatch.call("fill_blocks", pool.device.type, pool, block_ids, value)


for _module in (cpu_linear, cpu_elementwise, cpu_attention, cpu_experts, cpu_blocks):
    for _op, _implementation in _module.OPS.items():
        dispatch.register(_op, "reference", getattr(reference, _op))
        dispatch.register(_op, "cpu", _implementation)
dispatch.read_environment()
