from __future__ import annotations

import contextlib
import dataclasses
import random
import struct
from typing import Any

import msgpack
import pytest
import xxhash

from moorage.prefix_cache.block import BlockHash, Lineage, Namespace
from moorage.prefix_cache.errors import ManifestMismatch, MismatchReason
from moorage.prefix_cache.frame import private_key, run_key
from moorage.prefix_cache.parked_context import FrameReference, ParkedContext


def manifest_of(kit: Any) -> ParkedContext:
    run = run_key(BlockHash(b"L" * 16), kit.geometry)
    tail = private_key("s1", 3, 1, kit.geometry)
    return ParkedContext(
        lineage=Lineage(Namespace("acme", "prod"), b"model-1", b"adapter"),
        session_id="s1",
        generation=3,
        geometry=kit.geometry,
        num_tokens=14,
        token_digest=b"T" * 16,
        frames=(
            FrameReference(run, "redis", 0, 2, 8, 500, b"a" * 16),
            FrameReference(tail, "redis", 2, 2, 6, 501, b"b" * 16),
        ),
    )


def reason_of(data: bytes) -> MismatchReason:
    with pytest.raises(ManifestMismatch) as caught:
        ParkedContext.from_bytes(data)
    return caught.value.reason


def test_a_manifest_comes_back_as_it_was(kit: Any) -> None:
    manifest = manifest_of(kit)
    again = ParkedContext.from_bytes(manifest.to_bytes())
    assert again == manifest
    assert (again.num_blocks, again.size_bytes, again.tiers) == (4, 1001, ("redis",))
    assert (again.dtype, again.block_size, again.run_blocks) == ("float32", 4, 2)
    assert len(manifest.to_bytes()) < 400


def test_every_flip_and_truncation_is_a_mismatch(kit: Any) -> None:
    data = manifest_of(kit).to_bytes()
    for at in range(len(data)):
        for mask in (0x01, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[at] ^= mask
            reason_of(bytes(damaged))
        assert reason_of(data[:at]) is MismatchReason.TRUNCATED
    assert reason_of(data + b"\0") is MismatchReason.TRUNCATED


def seal(value: object, version: int = 1) -> bytes:
    body = msgpack.packb(value)
    lead = struct.pack("<4sHI", b"MRGM", version, len(body))
    return lead + xxhash.xxh3_128(lead + body).digest() + body


def test_sealed_nonsense_is_a_mismatch(kit: Any) -> None:
    good = msgpack.unpackb(manifest_of(kit).to_bytes()[26:])
    rng = random.Random(3)
    for _ in range(500):
        value = msgpack.unpackb(msgpack.packb(good))
        target: Any = value
        while isinstance(target, list) and target:
            at = rng.randrange(len(target))
            if not isinstance(target[at], list) or rng.random() < 0.3:
                target[at] = rng.choice([None, -1, "x" * 200, b"", [], 1.5, {}, True])
                break
            target = target[at]
        with contextlib.suppress(ManifestMismatch):
            ParkedContext.from_bytes(seal(value))
    for value in (None, 1, [], [1] * 7, {"a": 1}, "x"):
        assert reason_of(seal(value)) is MismatchReason.HEADER
    assert reason_of(seal(good, version=2)) is MismatchReason.VERSION


def test_frames_that_do_not_join_up_are_refused(kit: Any) -> None:
    manifest = manifest_of(kit)
    run, tail = manifest.frames
    for frames in (
        (tail,),
        (run,),
        (run, run),
        (tail, run),
        (run, dataclasses.replace(tail, first_block=3)),
        (run, dataclasses.replace(tail, num_blocks=3)),
        (dataclasses.replace(run, num_tokens=7), tail),
    ):
        broken = dataclasses.replace(manifest, frames=frames)
        assert reason_of(broken.to_bytes()) is MismatchReason.INCONSISTENT


def test_d16_a_session_id_that_could_reach_elsewhere_is_refused(kit: Any) -> None:
    broken = dataclasses.replace(manifest_of(kit), session_id="../x")
    assert reason_of(broken.to_bytes()) is MismatchReason.SESSION


def test_keys_by_tier_leaves_out_what_a_newer_manifest_names(kit: Any) -> None:
    old = manifest_of(kit)
    new_tail = dataclasses.replace(old.frames[1], key=private_key("s1", 4, 1, kit.geometry))
    new = dataclasses.replace(old, generation=4, frames=(old.frames[0], new_tail))
    assert old.keys_by_tier() == {"redis": (old.frames[0].key, old.frames[1].key)}
    assert old.keys_by_tier(without=new) == {"redis": (old.frames[1].key,)}
