"""int8 frames: half the bytes, a bounded error, never taken for exact ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moorage.prefix_cache import codec
from moorage.prefix_cache.block import Lineage, Namespace, pack_tokens
from moorage.prefix_cache.errors import FrameMismatch, InvalidInput, MismatchReason
from moorage.prefix_cache.frame import split_blocks
from moorage.prefix_cache.geometry import Geometry
from moorage.prefix_cache.host_store import HostStore
from moorage.prefix_cache.load import LoadJob, MissReason, run_load
from moorage.prefix_cache.park import ParkJob, run_park

LINEAGE = Lineage(Namespace("acme", "prod"), b"model-1")
GEOMETRY = Geometry(4, 2, 16, 64, "bfloat16", 16, "int8")


def as_bf16(values: np.ndarray) -> np.ndarray:
    """To nearest, ties to even; the bits."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def as_float(data: Any, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, dtype).astype(np.float32)


def kv(geometry: Geometry, num_blocks: int, *, outliers: bool, seed: int = 1) -> bytes:
    """Random normal KV; with outliers, three channels of every key are fifty times larger."""
    shape = (
        num_blocks,
        geometry.num_layers,
        2,
        geometry.num_kv_heads,
        geometry.block_size,
        geometry.head_dim,
    )
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    if outliers:
        values[:, :, 0, :, :, [3, 17, 40]] *= 50.0
    if geometry.dtype == "bfloat16":
        return as_bf16(values).tobytes()
    return values.astype(geometry.dtype).tobytes()


def round_trip(geometry: Geometry, data: bytes, num_tokens: int) -> tuple[bytes, int]:
    """What comes back through a store, and the bytes that it held."""
    tokens = pack_tokens(range(num_tokens))
    blocks = split_blocks(bytearray(data), geometry.block_bytes)
    host = HostStore(1 << 30)
    job = ParkJob("s", 1, LINEAGE, tokens, (), blocks, num_tokens, geometry, "host", (), 9.0)
    done = run_park(job, {"host": host}, float("inf"))
    assert done.manifest is not None
    assert done.manifest.size_bytes == host.statistics().bytes
    back = bytearray(len(data))
    load = LoadJob(
        done.manifest, 0, tokens, split_blocks(back, geometry.block_bytes), geometry, 9.0
    )
    loaded = run_load(load, {"host": host}, float("inf"))
    assert (loaded.miss, loaded.num_tokens) == (None, num_tokens)
    return bytes(back), host.statistics().bytes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("outliers", [False, True])
def test_the_error_is_bounded_and_the_sinks_and_the_tail_are_exact(
    dtype: str, outliers: bool
) -> None:
    geometry = dataclasses.replace(GEOMETRY, dtype=dtype)
    num_blocks = 35  # two runs and a private frame of three blocks
    data = kv(geometry, num_blocks, outliers=outliers)
    back, _ = round_trip(geometry, data, num_blocks * 16)
    size = geometry.block_bytes
    assert back[:size] == data[:size]
    assert back[-size:] == data[-size:]
    assert back != data
    shape = (num_blocks, 4, 2, 2, 16, 64)
    before, after = (as_float(d, dtype).reshape(shape) for d in (data, back))
    for kind in (0, 1):
        first, second = before[:, :, kind], after[:, :, kind]
        plain = first[..., [0, 1, 2, 5]], second[..., [0, 1, 2, 5]]  # no outlier channel
        for a, b in ((first, second), plain):
            cosine = (a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum())
            assert cosine > 0.9999
        # Half a step of a scale that is at most 2**-8 too large, and the rounding of bf16.
        axis = (2, 3) if kind == 0 else -1
        largest = np.abs(first).max(axis=(0, *axis) if kind == 0 else axis, keepdims=True)
        assert (np.abs(first - second) <= largest * (0.5 / 127 * 1.01 + 2**-8)).all()


def test_a_long_context_takes_little_more_than_half() -> None:
    num_blocks = 256
    data = kv(GEOMETRY, num_blocks, outliers=True)
    _, stored = round_trip(GEOMETRY, data, num_blocks * 16)
    assert 0.50 < stored / len(data) <= 0.53


def test_lengths_follow_from_the_shape_alone() -> None:
    for num_blocks in range(1, 17):
        for first, shared in ((0, True), (0, False), (16, True), (16, False)):
            data = kv(GEOMETRY, num_blocks, outliers=False)
            blocks = split_blocks(data, GEOMETRY.block_bytes)
            parts = codec.encode(GEOMETRY, first, shared, blocks)
            expected = codec.coded_bytes(GEOMETRY, first, num_blocks, shared)
            assert sum(map(len, parts)) == expected
            into: list[memoryview | None] = [None] * num_blocks
            with pytest.raises(FrameMismatch) as caught:
                codec.decode(GEOMETRY, first, shared, num_blocks, parts[0][:-1], into)
            assert caught.value.reason is MismatchReason.GEOMETRY


def test_zeros_and_one_large_value_come_back() -> None:
    geometry = dataclasses.replace(GEOMETRY, dtype="float32")
    blocks = np.zeros((4, 4, 2, 2, 16, 64), dtype=np.float32)
    blocks[1, 2, 1, 0, 3, 5] = 3.0e38
    views = split_blocks(blocks.tobytes(), geometry.block_bytes)
    payload = codec.encode(geometry, 16, True, views)[0]
    back = np.zeros_like(blocks)
    into: list[memoryview | None] = list(split_blocks(back.data, geometry.block_bytes))
    codec.decode(geometry, 16, True, 4, payload, into)
    assert np.isfinite(back).all()
    assert back[1, 2, 1, 0, 3, 5] == pytest.approx(3.0e38, rel=0.01)
    assert np.count_nonzero(back) == 1


def test_what_is_not_finite_is_refused_with_the_way_out(tiers: Callable[..., Any]) -> None:
    geometry = dataclasses.replace(GEOMETRY, dtype="float32")
    values = np.frombuffer(kv(geometry, 3, outliers=False), np.float32).copy()
    values[geometry.block_bytes // 4 + 7] = np.inf
    tokens = pack_tokens(range(48))
    blocks = split_blocks(bytearray(values.tobytes()), geometry.block_bytes)
    one = tiers(HostStore(1 << 30))
    one.workers.park(ParkJob("s", 1, LINEAGE, tokens, (), blocks, 48, geometry, "host", (), 9.0))
    done = one.next()
    assert isinstance(done.error, InvalidInput)
    assert "codec raw" in str(done.error)
    assert one.workers.stores["host"].statistics().frames == 0


def test_an_exact_reader_never_uses_an_int8_frame_and_both_lie_side_by_side() -> None:
    raw = dataclasses.replace(GEOMETRY, codec="raw")
    data = kv(GEOMETRY, 17, outliers=False)
    tokens = pack_tokens(range(272))
    host = HostStore(1 << 30)

    def park(geometry: Geometry, session: str) -> Any:
        blocks = split_blocks(bytearray(data), geometry.block_bytes)
        job = ParkJob(session, 1, LINEAGE, tokens, (), blocks, 272, geometry, "host", (), 9.0)
        return run_park(job, {"host": host}, float("inf")).manifest

    coded, exact = park(GEOMETRY, "a"), park(raw, "b")
    back = bytearray(len(data))
    views = split_blocks(back, raw.block_bytes)
    refused = run_load(LoadJob(coded, 0, tokens, views, raw, 9.0), {"host": host}, float("inf"))
    assert (refused.num_tokens, refused.miss) == (0, MissReason.INCOMPATIBLE)
    assert "codec is int8" in refused.miss_detail
    assert back == bytes(len(data))
    done = run_load(LoadJob(exact, 0, tokens, views, raw, 9.0), {"host": host}, float("inf"))
    assert done.miss is None
    assert bytes(back) == data


@pytest.mark.parametrize(("name", "dtype"), [("zip", "bfloat16"), ("int8", "float8_e4m3fn")])
def test_other_codecs_are_refused(name: str, dtype: str) -> None:
    with pytest.raises(InvalidInput, match="codec"):
        Geometry(1, 1, 4, 8, dtype, 2, name)
