"""How a frame's blocks are stored: as they are, or in 8 bits.

`raw` is exact. `int8` halves 16-bit KV: keys have a scale per channel, since a few channels of a key are far larger
than the others in every token, values one per token (after Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit
Quantization for KV Cache", 2024, https://arxiv.org/abs/2402.02750; here with 8 bits and a zero point of 0). A key's
scales cover `KEY_GROUP_BLOCKS` blocks. What attention leans on stays raw: the context's first block (its sinks) and the
last block of a private frame (the tail).

    payload   raw blocks, in order │ groups: key scales, keys, value scales, values; a scale is an fp32's upper half
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from moorage.prefix_cache.errors import FrameMismatch, InvalidInput, MismatchReason
from moorage.prefix_cache.geometry import INT8, RAW, Geometry

KEY_GROUP_BLOCKS = 4
"""64 tokens at the usual block size: with fewer, the keys' scales weigh more than the goal of 0.53 of raw allows."""
LEVELS = 127
Floats = NDArray[np.float32]
Scales = NDArray[np.uint16]


def raw_blocks(first_block: int, num_blocks: int, shared: bool) -> set[int]:
    """Which of a frame's blocks stay raw."""
    kept = {0} if first_block == 0 else set()
    return kept if shared else kept | {num_blocks - 1}


def coded_bytes(geometry: Geometry, first_block: int, num_blocks: int, shared: bool) -> int:
    """Bytes of a frame's payload; known without its content."""
    if geometry.codec == RAW:
        return num_blocks * geometry.block_bytes
    kept = raw_blocks(first_block, num_blocks, shared)
    total = len(kept) * geometry.block_bytes
    for group in _groups(num_blocks, kept):
        total += _group_bytes(geometry, len(group))
    return total


def encode(
    geometry: Geometry, first_block: int, shared: bool, blocks: Sequence[memoryview]
) -> tuple[memoryview, ...]:
    """The payload: the blocks' own memory for `raw`, one new buffer for `int8`.

    Raises InvalidInput where a value is not finite: 8 bits cannot say so.
    """
    if geometry.codec == RAW:
        return tuple(blocks)
    kept = raw_blocks(first_block, len(blocks), shared)
    buffer = bytearray(coded_bytes(geometry, first_block, len(blocks), shared))
    view = memoryview(buffer)
    at = 0
    for index in sorted(kept):
        view[at : at + geometry.block_bytes] = blocks[index]
        at += geometry.block_bytes
    for group in _groups(len(blocks), kept):
        values = np.stack([_to_float(blocks[index], geometry) for index in group])
        if not np.isfinite(values).all():
            raise InvalidInput(
                f"a value of block {first_block + group[0]} … {first_block + group[-1]} is not"
                " finite: park with codec raw"
            )
        for part in _quantise(values):
            size = part.nbytes
            view[at : at + size] = part.reshape(-1).view(np.uint8).data
            at += size
    return (view,)


def decode(
    geometry: Geometry,
    first_block: int,
    shared: bool,
    num_blocks: int,
    payload: memoryview,
    into: Sequence[memoryview | None],
) -> None:
    """Fill one buffer a block (None: not wanted). Raises FrameMismatch where the payload's length is another one."""
    expected = coded_bytes(geometry, first_block, num_blocks, shared)
    if len(payload) != expected:
        raise FrameMismatch(
            MismatchReason.GEOMETRY, f"{len(payload)} payload bytes, its codec makes {expected}"
        )
    size = geometry.block_bytes
    if geometry.codec == RAW:
        for index, target in enumerate(into):
            if target is not None:
                target[:] = payload[index * size : (index + 1) * size]
        return
    kept = raw_blocks(first_block, num_blocks, shared)
    at = 0
    for index in sorted(kept):
        target = into[index]
        if target is not None:
            target[:] = payload[at : at + size]
        at += size
    for group in _groups(num_blocks, kept):
        length = _group_bytes(geometry, len(group))
        if any(into[index] is not None for index in group):
            values = _dequantise(payload[at : at + length], geometry, len(group))
            for row, index in enumerate(group):
                target = into[index]
                if target is not None:
                    target[:] = _from_float(values[row], geometry)
        at += length


def _groups(num_blocks: int, kept: set[int]) -> Iterator[list[int]]:
    """Blocks that are coded together, in order."""
    coded = [index for index in range(num_blocks) if index not in kept]
    for start in range(0, len(coded), KEY_GROUP_BLOCKS):
        yield coded[start : start + KEY_GROUP_BLOCKS]


def _group_bytes(geometry: Geometry, num_blocks: int) -> int:
    heads = geometry.num_layers * geometry.num_kv_heads
    slots = heads * num_blocks * geometry.block_size
    return 2 * slots * geometry.head_dim + 2 * heads * geometry.head_dim + 2 * slots


def _quantise(values: Floats) -> Iterator[NDArray[np.int8] | Scales]:
    """values [blocks, layers, 2, heads, slots, dim] → key scales, keys, value scales, values."""
    keys, others = values[:, :, 0], values[:, :, 1]
    scale = _scales(np.abs(keys).max(axis=(0, 3), keepdims=True))
    yield scale
    yield np.rint(keys / _widen(scale)).astype(np.int8)
    scale = _scales(np.abs(others).max(axis=-1, keepdims=True))
    yield scale
    yield np.rint(others / _widen(scale)).astype(np.int8)


def _dequantise(payload: memoryview, geometry: Geometry, num_blocks: int) -> Floats:
    layers, heads = geometry.num_layers, geometry.num_kv_heads
    slots, dim = geometry.block_size, geometry.head_dim
    values = np.empty((num_blocks, layers, 2, heads, slots, dim), dtype=np.float32)
    at = 0

    def take(dtype: type, *shape: int) -> NDArray[np.generic]:
        nonlocal at
        count = int(np.prod(shape))
        found: NDArray[np.generic] = np.frombuffer(
            payload, dtype=dtype, count=count, offset=at
        ).reshape(shape)
        at += found.nbytes
        return found

    for kind, scale_shape in (
        (0, (1, layers, heads, 1, dim)),
        (1, (num_blocks, layers, heads, slots, 1)),
    ):
        scale = take(np.uint16, *scale_shape)
        coded = take(np.int8, num_blocks, layers, heads, slots, dim)
        np.multiply(coded, _widen(scale), out=values[:, :, kind])
    return values


def _scales(largest: Floats) -> Scales:
    """largest / LEVELS as the upper half of an fp32, rounded up so that no value exceeds LEVELS."""
    scale = np.where(largest > 0, largest / LEVELS, 1.0).astype(np.float32)
    return ((scale.view(np.uint32) + 0xFFFF) >> 16).astype(np.uint16)


def _widen(scale: NDArray[np.generic]) -> Floats:
    return (scale.astype(np.uint32) << 16).view(np.float32)


def _to_float(block: memoryview, geometry: Geometry) -> Floats:
    shape = (
        geometry.num_layers, 2, geometry.num_kv_heads, geometry.block_size, geometry.head_dim,
    )  # fmt: skip
    if geometry.dtype == "bfloat16":
        return _widen(np.frombuffer(block, dtype=np.uint16)).reshape(shape)
    return np.frombuffer(block, dtype=geometry.dtype).astype(np.float32).reshape(shape)


def _from_float(values: Floats, geometry: Geometry) -> memoryview:
    if geometry.dtype == "bfloat16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest, ties to even
        return rounded.astype(np.uint16).reshape(-1).view(np.uint8).data
    return np.ascontiguousarray(values.astype(geometry.dtype)).reshape(-1).view(np.uint8).data


__all__ = ["INT8", "coded_bytes", "decode", "encode", "raw_blocks"]
