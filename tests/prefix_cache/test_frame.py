"""Frames: what is written is what is read, and nothing else is ever accepted (case D10)."""

from __future__ import annotations

import dataclasses
import random
import struct
from typing import Any

import msgpack
import pytest
import xxhash

from moorage.prefix_cache.block import BlockHash
from moorage.prefix_cache.errors import FrameMismatch, InvalidInput, MismatchReason
from moorage.prefix_cache.frame import (
    MAX_FRAME_BYTES,
    Frame,
    FrameHeader,
    FrameKey,
    Geometry,
    encode_frame,
    frame_header,
    private_key,
    run_blocks_for,
    run_key,
    split_blocks,
)
from moorage.prefix_cache.frame_check import FrameExpectation, decode_frame


def header_of(kit: Any, *, private: bool = False, **changes: Any) -> FrameHeader:
    geometry = changes.pop("geometry", kit.geometry)
    last = BlockHash(b"L" * 16)
    header = frame_header(
        key=private_key("s1", 3, 0, geometry) if private else run_key(last, geometry),
        geometry=geometry,
        namespace=kit.lineage.namespace,
        fingerprint=kit.lineage.fingerprint,
        lineage_root=kit.lineage.root,
        parent_hash=b"P" * 16,
        last_hash=last,
        token_digest=b"T" * 16,
        first_block=2,
        num_tokens=8,
        generation=3,
    )
    return dataclasses.replace(header, **changes)


def frame_of(kit: Any, **changes: Any) -> Frame:
    header = header_of(kit, **changes)
    return encode_frame(header, [bytes(range(256))[: header.payload_bytes]])


def reason_of(data: Any, expect: FrameExpectation) -> MismatchReason:
    with pytest.raises(FrameMismatch) as caught:
        decode_frame(data, expect)
    return caught.value.reason


def test_a_frame_comes_back_as_it_was(kit: Any) -> None:
    frame = frame_of(kit)
    header, payload = decode_frame(
        frame.join(), FrameExpectation(header_of(kit), checksum=frame.checksum)
    )
    assert header == header_of(kit) and header.key == run_key(BlockHash(b"L" * 16), kit.geometry)
    assert bytes(payload) == bytes(range(256))
    assert frame.size_bytes == len(frame.join())


def test_neither_way_copies_the_payload(kit: Any) -> None:
    staging = bytearray(256)
    frame = encode_frame(header_of(kit), split_blocks(staging, 128))
    staging[7] = 99
    assert frame.pieces[0][7] == 99
    assert frame.parts[1] is frame.pieces[0] and frame.parts[2] is frame.pieces[1]
    stored = bytearray(frame_of(kit).join())
    _, payload = decode_frame(stored, FrameExpectation(header_of(kit)))
    stored[-1] = 42
    assert payload[-1] == 42


def test_every_flipped_byte_is_a_mismatch(kit: Any) -> None:
    data = frame_of(kit).join()
    expect = FrameExpectation(header_of(kit))
    for at in range(len(data)):
        for mask in (0x01, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[at] ^= mask
            reason_of(damaged, expect)


def test_every_truncation_and_any_appendix_is_a_mismatch(kit: Any) -> None:
    data = frame_of(kit).join()
    expect = FrameExpectation(header_of(kit))
    for length in range(len(data)):
        assert reason_of(data[:length], expect) is MismatchReason.TRUNCATED
    assert reason_of(data + b"\0", expect) is MismatchReason.TRUNCATED


def test_noise_is_a_mismatch(kit: Any) -> None:
    rng = random.Random(7)
    expect = FrameExpectation(header_of(kit))
    for _ in range(2000):
        noise = rng.randbytes(rng.randrange(200))
        reason_of(noise, expect)
        reason_of(b"MRGF\1\0" + noise, expect)


def seal(body: bytes, payload: bytes = b"", version: int = 1) -> bytes:
    """A frame with a right checksum over whatever is in it."""
    lead = struct.pack("<4sHIQ", b"MRGF", version, len(body), len(payload))
    return lead + xxhash.xxh3_128(lead + body + payload).digest() + body + payload


@pytest.mark.parametrize(
    "value",
    [None, 7, "x", [], [1] * 22, {"a": 1}, [[]] * 22, [b"\xff" * 9] * 21 + [None]],
)
def test_a_sealed_but_malformed_header_is_a_mismatch(kit: Any, value: object) -> None:
    reason_of(seal(msgpack.packb(value)), FrameExpectation(header_of(kit)))


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\xdc\xff\xff", b"\xa5\xff\xff\xff\xff\xff"])
def test_a_sealed_header_that_is_no_msgpack_is_a_mismatch(kit: Any, body: bytes) -> None:
    assert reason_of(seal(body), FrameExpectation(header_of(kit))) is MismatchReason.HEADER


def test_d10_each_difference_is_refused_with_its_reason(kit: Any) -> None:
    big = dataclasses.replace(kit.geometry, block_size=8)
    cases: list[tuple[dict[str, Any], MismatchReason]] = [
        ({"tenant": "rival"}, MismatchReason.NAMESPACE),
        ({"namespace": "test"}, MismatchReason.NAMESPACE),
        ({"fingerprint": b"other checkpoint"}, MismatchReason.FINGERPRINT),
        ({"block_size": 32}, MismatchReason.GEOMETRY),
        ({"num_layers": 3}, MismatchReason.GEOMETRY),
        ({"num_kv_heads": 4}, MismatchReason.GEOMETRY),
        ({"head_dim": 1}, MismatchReason.GEOMETRY),
        ({"dtype": "float16"}, MismatchReason.DTYPE),
        ({"codec": "int8"}, MismatchReason.CODEC),
        ({"generation": 9}, MismatchReason.GENERATION),
        ({"lineage_root": b"R" * 16}, MismatchReason.LINEAGE),
        ({"parent_hash": b"Q" * 16}, MismatchReason.LINEAGE),
        ({"last_hash": b"M" * 16}, MismatchReason.LINEAGE),
        ({"token_digest": b"U" * 16}, MismatchReason.TOKENS),
        ({"first_block": 4}, MismatchReason.POSITION),
        ({"num_blocks": 1}, MismatchReason.POSITION),
        ({"num_tokens": 7}, MismatchReason.POSITION),
        ({"kind": "private"}, MismatchReason.KEY),
        ({"name": b"N" * 16}, MismatchReason.KEY),
        ({"layers": (0, 1)}, MismatchReason.KEY),
        ({"heads": (1, 2)}, MismatchReason.KEY),
        ({"geometry": big, "num_tokens": 16, "num_blocks": 2}, MismatchReason.GEOMETRY),
    ]
    for changes, reason in cases:
        wanted = header_of(kit, **changes)
        assert reason_of(frame_of(kit).join(), FrameExpectation(wanted)) is reason, changes
    values = [getattr(header_of(kit), f.name) for f in dataclasses.fields(FrameHeader)]
    format_2 = seal(msgpack.packb(values), bytes(range(256)), version=2)
    assert reason_of(format_2, FrameExpectation(header_of(kit))) is MismatchReason.VERSION
    assert {name for changes, _ in cases for name in changes} >= {
        f.name for f in dataclasses.fields(FrameHeader)
    } - {"payload_bytes"}


def test_another_frame_of_the_same_header_is_not_the_one_a_manifest_names(kit: Any) -> None:
    first = encode_frame(header_of(kit, private=True), [b"\1" * 256])
    second = encode_frame(header_of(kit, private=True), [b"\2" * 256])
    expect = FrameExpectation(header_of(kit, private=True), checksum=first.checksum)
    assert decode_frame(first.join(), expect)[1][0] == 1
    assert reason_of(second.join(), expect) is MismatchReason.CHECKSUM


def test_a_mismatch_tells_no_names(kit: Any) -> None:
    with pytest.raises(FrameMismatch) as caught:
        decode_frame(frame_of(kit).join(), FrameExpectation(header_of(kit, tenant="rival")))
    assert "acme" not in str(caught.value) and "rival" not in str(caught.value)


def test_payload_and_header_must_agree(kit: Any) -> None:
    with pytest.raises(InvalidInput, match="255 bytes, its header says 256"):
        encode_frame(header_of(kit), [bytes(128), bytes(127)])
    with pytest.raises(InvalidInput, match="not contiguous"):
        encode_frame(header_of(kit), [memoryview(bytes(512))[::2]])


@pytest.mark.parametrize(
    ("block_bytes", "run_blocks"),
    [(1, 16), (98_304, 16), (1 << 18, 8), (260_000, 16), (1 << 20, 2), (3 << 20, 1), (9 << 20, 1)],
)
def test_a_run_is_the_largest_power_of_two_that_fits(block_bytes: int, run_blocks: int) -> None:
    assert run_blocks_for(block_bytes) == run_blocks
    assert run_blocks == 1 or run_blocks * block_bytes < MAX_FRAME_BYTES


def test_geometry_counts_bytes_and_refuses_nonsense() -> None:
    assert Geometry(6, 2, 16, 32, "bfloat16", 16).block_bytes == 6 * 2 * 2 * 16 * 32 * 2
    for bad in (("int3", 1, "raw"), ("float32", 0, "raw"), ("float32", 1, "zip")):
        with pytest.raises(InvalidInput):
            Geometry(6, 2, 16, 32, bad[0], bad[1], bad[2])


@pytest.mark.parametrize(
    "parts",
    [
        ("run", b"short", "float32", "raw"),
        ("private", b"../../etc/x/1/0", "float32", "raw"),
        ("private", b"s1/1", "float32", "raw"),
        ("private", b"s1/-1/0", "float32", "raw"),
        ("private", b"s1/1/0\n", "float32", "raw"),
        ("run", b"L" * 16, "float32}:{x", "raw"),
        ("run", b"L" * 16, "float32", "../raw"),
    ],
)
def test_d16_a_key_that_could_reach_elsewhere_is_refused(parts: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidInput):
        FrameKey(*parts, layers=(0, 2), heads=(0, 1))
