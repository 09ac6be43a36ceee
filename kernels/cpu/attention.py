"""Paged attention on the CPU, softmax over fixed key tiles.

    sequences of equal row count ── keys, values of their blocks, fp32 [U, tiles, G, T, D], once
      └─ a block of rows ── scores of all key tiles at once, [U, tiles, G, R, T]
           maximum over what a row may see → exp → sum and product per key tile, folded in order

A key tile is `T` cache indices aligned at index 0. A product is always [R, D] × [D, T] or
[R, T] × [T, D] under a plan in which a row's bits do not depend on R; tiles are folded one after
another from index 0; a tile that a row may not see adds exactly nothing, its weights being
exp(−inf) = 0. So a row's bits depend on its own query and the keys up to its position, in decode
as in any chunk of a prefill, alone as in any batch. Scores, weights and sums are fp32.

Two passes, not online softmax: the maximum is exact in any order, so nothing is rescaled. The price
is scores kept for a block of rows, at most MAX_SCORES. The query is rotated once per distinct block
delta, and each key column takes the scores of its own delta, which equals a merge of the parts by
(out, lse) without the second rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from moorage.kernels import reference
from moorage.kernels.cpu import determinism

TILE_KEYS = 128
"""Cache indices of a key tile, rounded to whole blocks."""
MAX_SCORES = 1 << 20
"""Scores held at once (4 MiB): what stays near the core is faster than fewer calls."""
ROWS_AT_ONCE = 256
"""Rows (queries × query heads of a KV head) of a block in a long prefill; the fastest measured."""
MAX_LOADED = 1 << 20
"""Elements of the fp32 keys of sequences that run together (4 MiB); twice that costs up to three times a sequence."""


@dataclass(frozen=True)
class _Context:
    """Keys and values of `U` sequences that run together, fp32; `C` tiles of `T` keys."""

    keys: torch.Tensor
    """[U, C, G, T, D]."""
    values: torch.Tensor
    """[U, C, G, T, D]; zero from the sequence's context length on."""
    deltas: torch.Tensor | None
    """[U, C · T] of every key; None where all are 0."""


@dataclass(frozen=True)
class _Geometry:
    """What the steps of one call share."""

    inv_freq: torch.Tensor
    scale: float
    num_kv_heads: int
    group: int
    """Query heads per KV head."""
    head_dim: int
    tile: int


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
    """See `ops.paged_attention`."""
    num_rows, num_heads, dim = query.shape
    _, _, num_kv_heads, block_size, _ = layer_kv.shape
    geometry = _Geometry(
        inv_freq=inv_freq,
        scale=scale,
        num_kv_heads=num_kv_heads,
        group=num_heads // num_kv_heads,
        head_dim=dim,
        tile=block_size * max(1, TILE_KEYS // block_size),
    )
    out = torch.empty_like(query)
    lse = torch.empty((num_rows, num_heads), dtype=torch.float32)
    bounds, lens = cu_seqlens.tolist(), context_lens.tolist()
    for sequences in _run_together(bounds, lens, geometry):
        context = _load(sequences, lens, layer_kv, block_tables, block_deltas, geometry.tile)
        first_row, num_queries = bounds[sequences[0]], _length(bounds, sequences[0])
        for start, end in _row_blocks(num_queries, lens[sequences[0]], geometry):
            # Rows of the step, and their visible positions: [U, end − start].
            rows = torch.tensor([range(bounds[s] + start, bounds[s] + end) for s in sequences])
            positions = rows + torch.tensor([[lens[s] - bounds[s + 1]] for s in sequences])
            if len(sequences) == 1:
                span = slice(first_row + start, first_row + end)
                part, part_lse = _attend(query[span][None], positions, context, geometry)
                out[span], lse[span] = part[0], part_lse[0]
            else:
                part, part_lse = _attend(query[rows], positions, context, geometry)
                out[rows], lse[rows] = part.to(out.dtype), part_lse
    return out, lse


def _length(bounds: list[int], sequence: int) -> int:
    return bounds[sequence + 1] - bounds[sequence]


def _run_together(bounds: list[int], lens: list[int], geometry: _Geometry) -> Iterator[list[int]]:
    """Sequences in groups of equal row count, longest context first, within MAX_LOADED.

    Decodes come out as few groups; a prefill chunk of more rows than ROWS_AT_ONCE is alone.
    """
    order = sorted(
        (s for s in range(len(lens)) if _length(bounds, s)),
        key=lambda s: (_length(bounds, s), lens[s]),
        reverse=True,
    )
    together: list[int] = []
    for sequence in order:
        if together:
            longest, rows = lens[together[0]], _length(bounds, together[0])
            padded = -(-longest // geometry.tile) * geometry.tile * geometry.num_kv_heads
            count = len(together) + 1
            if (
                rows != _length(bounds, sequence)
                or rows * geometry.group > ROWS_AT_ONCE
                or count * padded * geometry.head_dim > MAX_LOADED
                or count * padded * rows * geometry.group > MAX_SCORES
            ):
                yield together
                together = []
        together.append(sequence)
    if together:
        yield together


def _row_blocks(
    num_queries: int, context_len: int, geometry: _Geometry
) -> Iterator[tuple[int, int]]:
    keys = -(-context_len // geometry.tile) * geometry.tile * geometry.num_kv_heads
    rows = min(ROWS_AT_ONCE, MAX_SCORES // keys)
    step = max(1, rows // geometry.group)
    for start in range(0, num_queries, step):
        yield start, min(start + step, num_queries)


def _load(
    sequences: list[int],
    lens: list[int],
    layer_kv: torch.Tensor,
    block_tables: torch.Tensor,
    block_deltas: torch.Tensor | None,
    tile: int,
) -> _Context:
    """The sequences' keys and values up to the longest context, in whole tiles."""
    _, _, heads, size, dim = layer_kv.shape
    num_tiles = -(-lens[sequences[0]] // tile)
    num_blocks = num_tiles * tile // size
    tables = _columns(block_tables, sequences, num_blocks)
    blocks = layer_kv.index_select(0, tables.reshape(-1))
    kv = torch.empty((2, len(sequences), num_tiles, heads, tile, dim))
    kv.view(2, len(sequences), num_tiles, heads, tile // size, size, dim).copy_(
        blocks.view(len(sequences), num_tiles, tile // size, 2, heads, size, dim).permute(
            3, 0, 1, 4, 2, 5, 6
        )
    )
    # Unused slots may hold NaN, and 0 · NaN is NaN: a weight of 0 does not hide them.
    for values, sequence in zip(kv[1], sequences, strict=True):
        full, rest = divmod(lens[sequence], tile)
        if full < num_tiles:
            values[full, :, rest:].zero_()
            values[full + 1 :].zero_()
    deltas = None
    if block_deltas is not None:
        deltas = _columns(block_deltas, sequences, num_blocks).repeat_interleave(size, dim=1)
    return _Context(kv[0], kv[1], deltas)


def _columns(table: torch.Tensor, sequences: list[int], num_columns: int) -> torch.Tensor:
    """Rows of a [S, max_blocks] table, cut or filled with 0 to `num_columns`."""
    rows = table[sequences, :num_columns]
    missing = num_columns - rows.shape[1]
    return torch.nn.functional.pad(rows, (0, missing)) if missing > 0 else rows


def _attend(
    query: torch.Tensor, positions: torch.Tensor, context: _Context, geometry: _Geometry
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [U, n, H, D], positions [U, n] → (out [U, n, H, D] fp32, lse [U, n, H])."""
    num_units, num_queries = positions.shape
    heads, group, dim, tile = (
        geometry.num_kv_heads,
        geometry.group,
        geometry.head_dim,
        geometry.tile,
    )
    num_tiles = int(positions.max()) // tile + 1
    keys, values = context.keys[:, :num_tiles], context.values[:, :num_tiles]
    scores = _scores(query, positions, keys, context.deltas, geometry)
    first_masked = (int(positions.min()) + 1) // tile
    if first_masked < num_tiles:
        indices = torch.arange(first_masked * tile, num_tiles * tile)
        hidden = indices.view(-1, 1, tile) > positions.view(num_units, 1, num_queries, 1)
        scores.view(num_units, num_tiles, heads, num_queries, group, tile)[
            :, first_masked:
        ].masked_fill_(hidden[:, :, None, :, None], float("-inf"))
    maxima = scores.amax(-1).amax(1)
    weights = scores.sub_(maxima[:, None, :, :, None]).exp_()
    sums_by_tile = weights.sum(-1)
    outs_by_tile = _product(weights, values)
    sums, out = sums_by_tile[:, 0], outs_by_tile[:, 0]
    for index in range(1, num_tiles):
        sums += sums_by_tile[:, index]
        out += outs_by_tile[:, index]
    out = out.div_(sums[..., None]).view(num_units, heads, num_queries, group, dim)
    lse = maxima.add_(sums.log()).view(num_units, heads, num_queries, group)
    return (
        out.transpose(1, 2).reshape(num_units, num_queries, heads * group, dim),
        lse.transpose(1, 2).reshape(num_units, num_queries, heads * group),
    )


def _scores(
    query: torch.Tensor,
    positions: torch.Tensor,
    keys: torch.Tensor,
    deltas: torch.Tensor | None,
    geometry: _Geometry,
) -> torch.Tensor:
    """[U, C, G, R, T], not masked; R = n · group, queries outermost."""
    num_units, num_tiles, _, tile, _ = keys.shape
    transposed = keys.transpose(-1, -2)
    if deltas is None:
        return _product(_rotated(query, positions, num_tiles, geometry), transposed)
    by_tile = deltas[:, : num_tiles * tile].view(num_units, num_tiles, 1, 1, tile)
    first, *others = torch.unique(by_tile).tolist()
    scores = _product(_rotated(query, positions - first, num_tiles, geometry), transposed)
    for delta in others:
        turned = _rotated(query, positions - delta, num_tiles, geometry)
        scores = torch.where(by_tile == delta, _product(turned, transposed), scores)
    return scores


def _rotated(
    query: torch.Tensor, angles: torch.Tensor, num_tiles: int, geometry: _Geometry
) -> torch.Tensor:
    """Queries at `angles` [U, n], scaled, fp32 [U, C, G, n · group, D], the same for every tile."""
    num_units, num_queries, num_heads, dim = query.shape
    turned = reference.rotate(
        query.reshape(-1, num_heads, dim), angles.reshape(-1), geometry.inv_freq
    ).mul_(geometry.scale)
    return (
        turned.view(num_units, 1, num_queries, geometry.num_kv_heads, geometry.group, dim)
        .transpose(2, 3)
        .expand(-1, num_tiles, -1, -1, -1, -1)
        .reshape(num_units, num_tiles, geometry.num_kv_heads, num_queries * geometry.group, dim)
    )


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left [..., R, K] × right [..., K, N] → [..., R, N]; rows independent of R and of the batch."""
    transposed = right.stride(-1) != 1
    product = _by_columns if transposed else _by_rows
    plan = determinism.find_plan(
        "attention scores" if transposed else "attention values",
        product,
        left.dtype,
        right.shape[-2],
        right.shape[-1],
        torch.get_num_threads(),
        batches=(1, 2, 7),
    )
    return determinism.run(plan, product, left, right.transpose(-1, -2))


def _by_columns(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [..., R, K] × weight [..., N, K]ᵀ with weight stored by rows of K, as keys are."""
    return _batched(x, weight.transpose(-1, -2))


def _by_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same with weight stored by columns, as values are; made so where it is not."""
    right = weight.transpose(-1, -2)
    return _batched(x, right if right.is_contiguous() else right.contiguous())


def _batched(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    shape = left.shape[:-1]
    product = torch.bmm(left.reshape(-1, *left.shape[-2:]), right.reshape(-1, *right.shape[-2:]))
    return product.view(*shape, right.shape[-1])


def merge_attention(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.merge_attention`. Parts are folded in order, so that a row's bits are its own."""
    maxima = lses.amax(0) if lses.shape[0] else lses.new_full(lses.shape[1:], float("-inf"))
    safe = torch.where(maxima == float("-inf"), 0.0, maxima)
    sums = torch.zeros_like(safe)
    out = torch.zeros(outs.shape[1:], dtype=lses.dtype)
    for part, part_lse in zip(outs, lses, strict=True):
        weight = torch.exp(part_lse - safe)
        sums += weight
        # A part that saw no key has weight 0; what it holds must not leak (0 · NaN).
        out += torch.where(weight[..., None] > 0, part.to(lses.dtype), 0.0) * weight[..., None]
    out = torch.where(sums[..., None] > 0, out / sums[..., None], 0.0)
    return out.to(outs.dtype), safe + torch.log(sums)


OPS = {"paged_attention": paged_attention, "merge_attention": merge_attention}
