"""Fresh inputs for every op: odd sizes, empty batches, boundaries, NaN wherever nothing may be read."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moorage.kernels import reference
from moorage.kernels.equivalence import OpCase

NAN = float("nan")


def op_cases(dtype: torch.dtype, seed: int) -> Iterator[OpCase]:
    """All ops on random inputs of one dtype; the same seed gives the same cases."""
    generator = torch.Generator().manual_seed(seed)
    yield from _linear_cases(dtype, generator)
    yield from _row_cases(dtype, generator)
    yield from _attention_cases(dtype, generator)
    yield from _merge_cases(dtype, generator)
    yield from _route_cases(generator)
    yield from _expert_cases(dtype, generator)
    yield from _block_cases(dtype, generator)


def inverse_frequencies(head_dim: int, theta: float = 10_000.0) -> torch.Tensor:
    """fp64 [head_dim / 2]: theta^(−2i / head_dim) (Su et al. 2021)."""
    return theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)


def _random(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def _linear_cases(dtype: torch.dtype, generator: torch.Generator) -> Iterator[OpCase]:
    for rows, width, outputs in (
        (0, 8, 5),
        (1, 1, 1),
        (1, 256, 96),
        (3, 31, 7),
        (17, 130, 33),
        (70, 4096, 5),
    ):
        x, weight = (
            _random(generator, dtype, rows, width),
            _random(generator, dtype, outputs, width),
        )
        yield OpCase("linear", f"[{rows}, {width}] · [{outputs}, {width}]", (x, weight, None))
    bias = _random(generator, dtype, 12)
    yield OpCase(
        "linear",
        "with a bias",
        (_random(generator, dtype, 5, 20), _random(generator, dtype, 12, 20), bias),
    )


def _row_cases(dtype: torch.dtype, generator: torch.Generator) -> Iterator[OpCase]:
    for shape in ((0, 16), (1, 33), (65, 256), (3, 5, 24)):
        weight = _random(generator, dtype, shape[-1])
        yield OpCase(
            "rms_norm", str(list(shape)), (_random(generator, dtype, *shape) * 3, weight, 1e-6)
        )
    yield OpCase(
        "rms_norm",
        "a row of zeros",
        (torch.zeros(2, 8, dtype=dtype), torch.ones(8, dtype=dtype), 1e-6),
    )
    for rows, inner in ((0, 4), (1, 48), (37, 7), (64, 384)):
        yield OpCase(
            "swiglu", f"[{rows}, 2 · {inner}]", (_random(generator, dtype, rows, 2 * inner) * 2,)
        )
    extreme = torch.tensor([[-120.0, -30.0, 0.0, 30.0, 120.0, 1.0, 1.0, 1.0, 1.0, 1.0]]).to(dtype)
    yield OpCase("swiglu", "gates from −120 to 120", (extreme,))
    for rows, heads, dim in ((0, 2, 8), (1, 1, 2), (9, 3, 40)):
        positions = torch.randint(0, 1_000_000, (rows,), generator=generator)
        x = _random(generator, dtype, rows, heads, dim)
        yield OpCase(
            "apply_rope", f"[{rows}, {heads}, {dim}]", (x, positions, inverse_frequencies(dim))
        )


def paged_kv(
    generator: torch.Generator,
    dtype: torch.dtype,
    lens: tuple[int, ...],
    geometry: tuple[int, int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(layer_kv, block tables) of sequences with `lens` tokens; geometry is (G, B, D).

    Blocks are scattered, keys rotated at their positions; every other slot and block holds NaN, block 0 too, which
    pads the tables. The view is strided, as a layer's view of a pool is.
    """
    heads, size, dim = geometry
    counts = [-(-length // size) for length in lens]
    order = (torch.randperm(sum(counts) + 3, generator=generator) + 1).tolist()
    pool = torch.full((len(order) + 1, 3, 2, heads, size, dim), NAN, dtype=dtype)
    layer_kv = pool[:, 1]
    tables = torch.zeros((len(lens), max(counts) + 1), dtype=torch.int64)
    for sequence, (length, count) in enumerate(zip(lens, counts, strict=True)):
        blocks = [order.pop() for _ in range(count)]
        tables[sequence, :count] = torch.tensor(blocks)
        slots = torch.tensor([blocks[i // size] * size + i % size for i in range(length)])
        key = _random(generator, dtype, length, heads, dim)
        key = reference.apply_rope(key, torch.arange(length), inverse_frequencies(dim))
        reference.store_kv(key, _random(generator, dtype, length, heads, dim), layer_kv, slots)
    return layer_kv, tables


def _attention_cases(dtype: torch.dtype, generator: torch.Generator) -> Iterator[OpCase]:
    shapes = (
        # (H, G, B, D), context lengths, rows of each
        ((8, 2, 16, 32), (41, 1, 17), (41, 1, 12)),
        ((4, 4, 16, 64), (300, 128, 129, 5), (1, 1, 1, 1)),
        ((6, 2, 4, 40), (130, 9, 127), (70, 0, 2)),
        ((5, 1, 1, 8), (20, 3), (3, 3)),
        ((34, 1, 48, 16), (101, 97), (5, 1)),
        ((2, 1, 256, 6), (260, 256), (4, 4)),
    )
    for index, ((heads, kv_heads, size, dim), lens, rows) in enumerate(shapes):
        layer_kv, tables = paged_kv(generator, dtype, lens, (kv_heads, size, dim))
        query = _random(generator, dtype, sum(rows), heads, dim)
        shared = (
            torch.tensor(lens),
            torch.tensor([0, *rows]).cumsum(0),
            inverse_frequencies(dim),
            dim**-0.5,
        )
        shape = f"H {heads}, G {kv_heads}, B {size}, D {dim}"
        yield OpCase("paged_attention", shape, (query, layer_kv, tables, None, *shared))
        if index % 2 == 0:
            deltas = torch.randint(-3, 1, tables.shape, generator=generator) * 36
            yield OpCase(
                "paged_attention", f"{shape}, deltas", (query, layer_kv, tables, deltas, *shared)
            )
    none = torch.zeros(0, dtype=torch.int64)
    layer_kv, _ = paged_kv(generator, dtype, (3,), (2, 4, 8))
    yield OpCase(
        "paged_attention",
        "no sequence",
        (
            _random(generator, dtype, 0, 4, 8),
            layer_kv,
            none.view(0, 1),
            None,
            none,
            torch.zeros(1, dtype=torch.int64),
            inverse_frequencies(8),
            1.0,
        ),
    )


def _merge_cases(dtype: torch.dtype, generator: torch.Generator) -> Iterator[OpCase]:
    for parts, rows in ((1, 3), (4, 5), (2, 0)):
        outs = _random(generator, dtype, parts, rows, 3, 10)
        lses = torch.randn((parts, rows, 3), generator=generator) * 4
        yield OpCase("merge_attention", f"{parts} parts, {rows} rows", (outs, lses))
    outs, lses = _random(generator, dtype, 3, 4, 2, 6), torch.randn((3, 4, 2), generator=generator)
    outs[1, 2], lses[1, 2] = NAN, -torch.inf
    outs[:, 3], lses[:, 3] = NAN, -torch.inf
    yield OpCase("merge_attention", "parts without keys", (outs, lses))


def _route_cases(generator: torch.Generator) -> Iterator[OpCase]:
    for rows, experts, top_k in ((0, 8, 2), (1, 1, 1), (33, 60, 4), (5, 7, 7)):
        logits = torch.randn((rows, experts), generator=generator) * 3
        bias = torch.randn((experts,), generator=generator)
        for scoring in ("softmax", "sigmoid"):
            name = f"{rows} rows, {top_k} of {experts}, {scoring}"
            yield OpCase("route", name, (logits, top_k, True, scoring, None))
            yield OpCase("route", f"{name}, bias", (logits, top_k, False, scoring, bias))


def _expert_cases(dtype: torch.dtype, generator: torch.Generator) -> Iterator[OpCase]:
    for rows, width, inner, experts, top_k in (
        (0, 16, 8, 4, 2),
        (1, 33, 7, 5, 3),
        (70, 64, 48, 8, 2),
    ):
        x = _random(generator, dtype, rows, width)
        weights = torch.rand((rows, top_k), generator=generator)
        ids = torch.rand((rows, experts - 1), generator=generator).argsort(-1)[:, :top_k]
        gate_up = _random(generator, dtype, experts, 2 * inner, width) * width**-0.5
        down = _random(generator, dtype, experts, width, inner) * inner**-0.5
        gate_up[-1], down[-1] = NAN, NAN  # no row chooses the last one: it must not even be read
        name = f"{rows} rows, {top_k} of {experts}"
        yield OpCase("moe_experts", name, (x, weights, ids, gate_up, down), slack=2.0)


def _block_cases(dtype: torch.dtype, generator: torch.Generator) -> Iterator[OpCase]:
    pool = _random(generator, dtype, 7, 3, 2, 2, 4, 6)
    pool[3] = NAN
    for ids in ([], [6], [5, 0, 3]):
        blocks = torch.tensor(ids, dtype=torch.int64)
        staging = _random(generator, dtype, len(ids), *pool.shape[1:])
        name = f"blocks {ids}"
        yield OpCase("gather_blocks", name, (pool, blocks, staging), writes=2, keeps_rounding=True)
        yield OpCase("scatter_blocks", name, (pool, blocks, staging), writes=0, keeps_rounding=True)
        yield OpCase(
            "copy_blocks", name, (pool, blocks, (blocks + 1) % 7), writes=0, keeps_rounding=True
        )
        yield OpCase("fill_blocks", name, (pool, blocks, NAN), writes=0, keeps_rounding=True)
    for slots in ([], [27], [0, 13, 6, 22]):
        mapping = torch.tensor(slots, dtype=torch.int64)
        key, value = _random(generator, dtype, 2, len(slots), 2, 6)
        yield OpCase(
            "store_kv",
            f"slots {slots}",
            (key, value, pool[:, 1], mapping),
            writes=2,
            keeps_rounding=True,
        )
