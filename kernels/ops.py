"""Every op: its contract, its argument checks, its public function.

Letters: `M` rows of a step (the query tokens of all sequences one after another), `H` query heads, `G` KV heads, `D` head
dim, `B` block size, `S` sequences, `E` experts, `K`, `N`, `I` widths. Index tensors are int64.

A KV pool is `[num_blocks, num_layers, 2, G, B, D]` (2 = key, value): block-major, so that one block is one contiguous
piece, head-major inside. A layer's view is `pool[:, layer]`: `[num_blocks, 2, G, B, D]`.

Tolerance of every op against `reference` in fp64, as max|a − b| / max|ref| (DESIGN section 6): fp32 1e-5; bf16 2⁻⁷ after
its rounding. On the CPU every op is deterministic: the result of a row is bit-equal whatever the rest of the batch and
however a prefill was cut into chunks. Checks here read shapes and dtypes only, never values.
"""

from __future__ import annotations

from typing import Literal

import torch

from moorage.kernels import dispatch, reference
from moorage.kernels.cpu import attention as cpu_attention
from moorage.kernels.cpu import blocks as cpu_blocks
from moorage.kernels.cpu import elementwise as cpu_elementwise
from moorage.kernels.cpu import experts as cpu_experts
from moorage.kernels.cpu import linear as cpu_linear
from moorage.kernels.errors import InvalidArgument

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _check(op: str, argument: str, tensor: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    """`None` in `shape` is any size."""
    got = tensor.shape
    if len(got) != len(shape) or any(
        want is not None and want != have for want, have in zip(shape, got, strict=True)
    ):
        wanted = "[" + ", ".join("·" if size is None else str(size) for size in shape) + "]"
        raise InvalidArgument(op, argument, f"of shape {wanted}", list(got))


def _check_dtype(
    op: str, argument: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]
) -> None:
    if tensor.dtype not in dtypes:
        raise InvalidArgument(op, argument, "one of " + ", ".join(map(str, dtypes)), tensor.dtype)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [M, K] · weight [N, K]ᵀ (+ bias [N]) → [M, N] in x's dtype; accumulates in fp32."""
    _check("linear", "x", x, (None, weight.shape[-1]))
    _check("linear", "weight", weight, (None, None))
    _check_dtype("linear", "x", x, _FLOATS)
    _check_dtype("linear", "weight", weight, (x.dtype,))
    if bias is not None:
        _check("linear", "bias", bias, (weight.shape[0],))
    out: torch.Tensor = dispatch.call("linear", x.device.type, x, weight, bias)
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., K] → x / sqrt(mean(x²) + eps) rounded to x's dtype, times weight [K]. fp32 inside."""
    _check("rms_norm", "weight", weight, (x.shape[-1],))
    _check_dtype("rms_norm", "x", x, _FLOATS)
    out: torch.Tensor = dispatch.call("rms_norm", x.device.type, x, weight, eps)
    return out


def apply_rope(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """x [M, heads, D] rotated (rotate-half) by positions [M] · inv_freq [D / 2]; angles in fp64, one rounding."""
    _check("apply_rope", "x", x, (None, None, 2 * inv_freq.shape[0]))
    _check("apply_rope", "positions", positions, (x.shape[0],))
    _check_dtype("apply_rope", "inv_freq", inv_freq, (torch.float64,))
    out: torch.Tensor = dispatch.call("apply_rope", x.device.type, x, positions, inv_freq)
    return out


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [M, 2 I] → silu(gate) · up [M, I]; gate is the first half; fp32 inside."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise InvalidArgument("swiglu", "gate_up", "of shape [M, 2 · I]", list(gate_up.shape))
    out: torch.Tensor = dispatch.call("swiglu", gate_up.device.type, gate_up)
    return out


def store_kv(
    key: torch.Tensor, value: torch.Tensor, layer_kv: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """key (rotated), value [M, G, D] → slots of layer_kv [num_blocks, 2, G, B, D]; slot = block · B + offset."""
    rows, heads, dim = key.shape
    _check("store_kv", "value", value, (rows, heads, dim))
    _check("store_kv", "layer_kv", layer_kv, (None, 2, heads, None, dim))
    _check("store_kv", "slot_mapping", slot_mapping, (rows,))
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

    query [M, H, D] is normed but not rotated: keys stand rotated at their log positions and are never rewritten, so the
    query's angle for a block is its visible position − the block's delta, and it is rotated once per distinct delta.
    layer_kv [num_blocks, 2, G, B, D]; block_tables [S, max_blocks] padded with any valid id; block_deltas the same shape
    (visible − log position), None where all are 0; context_lens [S] visible tokens with this step's rows; rows of
    sequence i are cu_seqlens[i] : cu_seqlens[i + 1]. Row j of n stands at visible position context_len − n + j and sees
    every index up to its own. H is a multiple of G; query head h reads KV head h // (H / G). Slots past the context and
    blocks that no table names may hold NaN. Parts over disjoint keys join by `merge_attention`.
    """
    rows, num_heads, dim = query.shape
    _check("paged_attention", "layer_kv", layer_kv, (None, 2, None, None, dim))
    if num_heads % layer_kv.shape[2]:
        raise InvalidArgument(
            "paged_attention", "query heads", f"a multiple of {layer_kv.shape[2]} KV heads", num_heads
        )
    num_sequences = context_lens.shape[0]
    _check("paged_attention", "block_tables", block_tables, (num_sequences, None))
    _check("paged_attention", "cu_seqlens", cu_seqlens, (num_sequences + 1,))
    _check("paged_attention", "inv_freq", inv_freq, (dim // 2,))
    if block_deltas is not None:
        _check("paged_attention", "block_deltas", block_deltas, tuple(block_tables.shape))
    result: tuple[torch.Tensor, torch.Tensor] = dispatch.call(
        "paged_attention",
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
    """Parts over disjoint keys, outs [P, M, H, D] and lses [P, M, H] → (out, lse) over all of them."""
    _check("merge_attention", "lses", lses, tuple(outs.shape[:-1]))
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
    """fp32 logits [M, E] → (weights [M, k] fp32, expert ids [M, k] int64), descending score.

    Ties go to the lowest expert index. `bias` [E] takes part in the choice and never in the weight (DeepSeek-V3's
    auxiliary-loss-free balancing). `renormalize` scales the chosen weights to sum to 1.
    """
    _check("route", "logits", logits, (None, None))
    _check_dtype("route", "logits", logits, (torch.float32, torch.float64))
    if not 1 <= top_k <= logits.shape[1]:
        raise InvalidArgument("route", "top_k", f"within 1 … {logits.shape[1]}", top_k)
    if bias is not None:
        _check("route", "bias", bias, (logits.shape[1],))
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
    """x [M, K] → Σ_k weights[:, k] · down_e(swiglu(gate_up_e(x))), e = expert_ids[:, k]; [M, K] in x's dtype.

    gate_up [E, 2 I, K], down [E, K, I]. An expert without rows costs nothing and is not read. The sum over k is fp32 in
    the order of k.
    """
    rows, width = x.shape
    num_experts = gate_up.shape[0]
    _check("moe_experts", "gate_up", gate_up, (None, None, width))
    _check("moe_experts", "down", down, (num_experts, width, gate_up.shape[1] // 2))
    _check("moe_experts", "expert_ids", expert_ids, (rows, None))
    _check("moe_experts", "weights", weights, tuple(expert_ids.shape))
    out: torch.Tensor = dispatch.call(
        "moe_experts", x.device.type, x, weights, expert_ids, gate_up, down
    )
    return out


def gather_blocks(pool: torch.Tensor, block_ids: torch.Tensor, out: torch.Tensor) -> None:
    """out [n, …] = pool[block_ids]; device → staging."""
    _check("gather_blocks", "out", out, (block_ids.shape[0], *pool.shape[1:]))
    dispatch.call("gather_blocks", pool.device.type, pool, block_ids, out)


def scatter_blocks(pool: torch.Tensor, block_ids: torch.Tensor, source: torch.Tensor) -> None:
    """pool[block_ids] = source [n, …]; staging → device. Ids are distinct."""
    _check("scatter_blocks", "source", source, (block_ids.shape[0], *pool.shape[1:]))
    dispatch.call("scatter_blocks", pool.device.type, pool, block_ids, source)


def copy_blocks(
    pool: torch.Tensor, source_ids: torch.Tensor, destination_ids: torch.Tensor
) -> None:
    """pool[destination_ids[i]] = pool[source_ids[i]]; the two sets are disjoint (copy on write)."""
    _check("copy_blocks", "destination_ids", destination_ids, (source_ids.shape[0],))
    dispatch.call("copy_blocks", pool.device.type, pool, source_ids, destination_ids)


def fill_blocks(pool: torch.Tensor, block_ids: torch.Tensor, value: float) -> None:
    """pool[block_ids] = value; NaN-fills freed blocks."""
    dispatch.call("fill_blocks", pool.device.type, pool, block_ids, value)


for _op in (
    "linear rms_norm apply_rope swiglu store_kv paged_attention merge_attention route moe_experts"
    " gather_blocks scatter_blocks copy_blocks fill_blocks"
).split():
    dispatch.register(_op, "reference", getattr(reference, _op))
for _module in (cpu_linear, cpu_elementwise, cpu_attention, cpu_experts, cpu_blocks):
    for _op, _implementation in _module.OPS.items():
        dispatch.register(_op, "cpu", _implementation)
dispatch.read_environment()
