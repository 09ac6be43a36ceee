"""Paged attention on the CPU in fixed tiles, with online softmax (Milakov, Gimelshein 2018; Dao et al. 2022).

    query tile   TILE_ROWS = 16 rows: 16 / (H / G) queries × the query heads of one KV head
    key tile     TILE_KEYS = 128 cache indices, aligned at index 0

Every product has the shape [16, D] × [D, 128] or [16, 128] × [128, D], whatever the batch, the chunk or the context; a
key tile that a row may not see adds exactly nothing (weights exp(−inf) = 0, rescaling exp(0) = 1). So a row's bits depend
on its own query and the keys up to its position alone, in decode as in any chunk of a prefill. Scores, softmax and sums
are fp32. Sequences whose rows fit one query tile (decodes) run together; a longer one runs by itself over all its tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moorage.kernels import reference

TILE_ROWS = 16
TILE_KEYS = 128
NEGATIVE_INFINITY = float("-inf")


@dataclass(frozen=True)
class _Tiles:
    """Query tiles that run together: `T` tiles, each of `queries` positions of one sequence."""

    query: torch.Tensor
    """[T, G, TILE_ROWS, D] in query dtype, not rotated; zero rows pad."""
    positions: torch.Tensor
    """[T, queries] visible position of each query; −1 pads."""
    tables: torch.Tensor
    """[T, max_blocks] block ids."""
    deltas: torch.Tensor | None
    """[T, max_blocks]."""
    one_sequence: bool
    """All tiles read the same keys, which are then loaded once."""


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
    rows, num_heads, dim = query.shape
    num_kv_heads = layer_kv.shape[2]
    group = num_heads // num_kv_heads
    if group > TILE_ROWS or TILE_KEYS % layer_kv.shape[3]:
        return _by_reference(
            query, layer_kv, block_tables, block_deltas, context_lens, cu_seqlens, inv_freq, scale
        )
    queries = TILE_ROWS // group
    out = torch.empty((rows, num_heads, dim), dtype=torch.float32)
    lse = torch.empty((rows, num_heads), dtype=torch.float32)
    bounds = cu_seqlens.tolist()
    short = [i for i in range(len(bounds) - 1) if 0 < bounds[i + 1] - bounds[i] <= queries]
    long = [i for i in range(len(bounds) - 1) if bounds[i + 1] - bounds[i] > queries]
    for batch in ([short] if short else []) + [[index] for index in long]:
        tile_rows, positions, sequences = _tile_rows(batch, bounds, context_lens.tolist(), queries)
        padded = torch.cat((query, query.new_zeros((1, num_heads, dim))))[tile_rows]
        index = torch.tensor(sequences)
        tiles = _Tiles(
            query=padded.reshape(-1, queries, num_kv_heads, group, dim)
            .transpose(1, 2)
            .reshape(-1, num_kv_heads, queries * group, dim),
            positions=positions,
            tables=block_tables[index],
            deltas=None if block_deltas is None else block_deltas[index],
            one_sequence=len(batch) == 1,
        )
        tile_out, tile_lse = _attend(tiles, layer_kv, inv_freq, scale, group)
        chosen = tile_rows.reshape(-1)
        real = chosen < rows
        out[chosen[real]] = (
            tile_out.reshape(-1, num_kv_heads, queries, group, dim)
            .transpose(1, 2)
            .reshape(-1, num_heads, dim)[real]
        )
        lse[chosen[real]] = (
            tile_lse.reshape(-1, num_kv_heads, queries, group)
            .transpose(1, 2)
            .reshape(-1, num_heads)[real]
        )
    return out.to(query.dtype), lse


def _tile_rows(
    batch: list[int], bounds: list[int], context_lens: list[int], queries: int
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Row of each tile's queries (the row after the last pads), their positions, and each tile's sequence.

    Tiles come in descending order of their last position, so that those a key tile concerns are a prefix.
    """
    tiles: list[tuple[list[int], list[int], int]] = []
    for sequence in batch:
        first, end = bounds[sequence], bounds[sequence + 1]
        offset = context_lens[sequence] - end
        for start in range(first, end, queries):
            rows = list(range(start, min(start + queries, end)))
            missing = queries - len(rows)
            tiles.append(
                (
                    rows + [bounds[-1]] * missing,
                    [row + offset for row in rows] + [-1] * missing,
                    sequence,
                )
            )
    tiles.sort(key=lambda tile: -max(tile[1]))
    return (
        torch.tensor([tile[0] for tile in tiles]),
        torch.tensor([tile[1] for tile in tiles]),
        [tile[2] for tile in tiles],
    )


def _attend(
    tiles: _Tiles, layer_kv: torch.Tensor, inv_freq: torch.Tensor, scale: float, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, G, R, D] fp32, lse [T, G, R]) with R = rows of a tile; the rest of the 16 rows is padding."""
    num_tiles, num_kv_heads, used_rows, dim = tiles.query.shape
    size = layer_kv.shape[3]
    row_positions = tiles.positions.repeat_interleave(group, dim=1)  # [T, R]
    last = tiles.positions.max(dim=1).values.tolist()
    rotated = {0: _rotate(tiles, row_positions, 0, inv_freq, scale)}
    maxima = torch.full((num_tiles, num_kv_heads, TILE_ROWS, 1), NEGATIVE_INFINITY)
    sums = torch.zeros((num_tiles, num_kv_heads, TILE_ROWS, 1))
    out = torch.zeros((num_tiles, num_kv_heads, TILE_ROWS, dim))
    row_limits = torch.nn.functional.pad(row_positions, (0, TILE_ROWS - used_rows), value=-1)
    for start in range(0, last[0] + 1, TILE_KEYS):
        active = sum(1 for position in last if position >= start)
        blocks = slice(start // size, (start + TILE_KEYS) // size)
        loaded = 1 if tiles.one_sequence else active
        keys, values = _load(tiles.tables[:loaded, blocks], layer_kv)
        indices = torch.arange(start, start + TILE_KEYS)
        newest = tiles.positions[:loaded].max(dim=1).values
        values.masked_fill_((indices[None] > newest[:, None])[:, None, :, None], 0.0)
        keys, values = (part.expand(active, -1, -1, -1) for part in (keys, values))
        scores = _scores(tiles, rotated, keys, active, blocks, row_positions, inv_freq, scale, size)
        scores.masked_fill_(
            (indices[None, None] > row_limits[:active, :, None])[:, None], NEGATIVE_INFINITY
        )
        before = maxima[:active]
        now = torch.maximum(before, scores.max(dim=-1, keepdim=True).values)
        safe = torch.where(now == NEGATIVE_INFINITY, torch.zeros(()), now)
        weights = torch.exp(scores - safe)
        rescale = torch.exp(before - safe)
        sums[:active] = sums[:active] * rescale + weights.sum(-1, keepdim=True)
        out[:active] = out[:active] * rescale + _product(weights, values)
        maxima[:active] = now
    lse = (maxima + torch.log(sums)).squeeze(-1)
    return (out / sums)[:, :, :used_rows], lse[:, :, :used_rows]


def _load(tables: torch.Tensor, layer_kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one key tile per query tile, fp32 [T, G, TILE_KEYS, D]; short tables are zero-filled."""
    num_tiles, num_blocks = tables.shape
    _, _, heads, size, dim = layer_kv.shape
    kv = layer_kv[tables.reshape(-1)].reshape(num_tiles, num_blocks, 2, heads, size, dim)
    kv = kv.permute(2, 0, 3, 1, 4, 5).float().reshape(2, num_tiles, heads, num_blocks * size, dim)
    if num_blocks * size < TILE_KEYS:
        kv = torch.nn.functional.pad(kv, (0, 0, 0, TILE_KEYS - num_blocks * size))
    return kv[0], kv[1]


def _scores(
    tiles: _Tiles,
    rotated: dict[int, torch.Tensor],
    keys: torch.Tensor,
    active: int,
    blocks: slice,
    row_positions: torch.Tensor,
    inv_freq: torch.Tensor,
    scale: float,
    size: int,
) -> torch.Tensor:
    """[T, G, 16, TILE_KEYS]; the query is rotated once per distinct delta and each key column takes its own."""
    transposed = keys.transpose(-1, -2)
    if tiles.deltas is None:
        return _product(rotated[0][:active], transposed)
    deltas = tiles.deltas[:active, blocks].repeat_interleave(size, dim=1)
    deltas = torch.nn.functional.pad(deltas, (0, TILE_KEYS - deltas.shape[1]))
    scores = torch.zeros((*keys.shape[:2], TILE_ROWS, TILE_KEYS))
    for delta in torch.unique(deltas).tolist():
        if delta not in rotated:
            rotated[delta] = _rotate(tiles, row_positions, delta, inv_freq, scale)
        part = _product(rotated[delta][:active], transposed)
        scores = torch.where((deltas == delta)[:, None, None], part, scores)
    return scores


def _rotate(
    tiles: _Tiles, row_positions: torch.Tensor, delta: int, inv_freq: torch.Tensor, scale: float
) -> torch.Tensor:
    """The tiles' queries at the angle visible position − delta, scaled: fp32 [T, G, TILE_ROWS, D], zero-padded."""
    num_tiles, heads, rows, dim = tiles.query.shape
    by_row = tiles.query.transpose(1, 2).reshape(num_tiles * rows, heads, dim)
    turned = reference.rotate(by_row, row_positions.reshape(-1) - delta, inv_freq) * scale
    turned = turned.reshape(num_tiles, rows, heads, dim).transpose(1, 2)
    return torch.nn.functional.pad(turned, (0, 0, 0, TILE_ROWS - rows)).contiguous()


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Batched products of one fixed shape."""
    shape = left.shape[:2]
    product = torch.bmm(left.reshape(-1, *left.shape[2:]), right.reshape(-1, *right.shape[2:]))
    return product.reshape(*shape, *product.shape[1:])


def _by_reference(*args: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes that do not tile (more than 16 query heads per KV head, block sizes that do not divide 128)."""
    return reference.paged_attention(*args)  # type: ignore[arg-type]


OPS = {"paged_attention": paged_attention}
