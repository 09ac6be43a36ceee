"""Frames and small helpers for the tests of the Redis tier."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import redis

from moorage.prefix_cache.block import BlockHash, Namespace
from moorage.prefix_cache.errors import StoreError
from moorage.prefix_cache.frame import (
    Frame,
    FrameKey,
    Geometry,
    encode_frame,
    frame_header,
    private_key,
    run_key,
)

ACME, RIVAL = Namespace("acme", "prod"), Namespace("rival", "prod")
SMALL = Geometry(2, 1, 4, 2, "float32", run_blocks=2)
"""128 bytes a block, 256 bytes a run."""
BIG = Geometry(16, 2, 16, 64, "float32", run_blocks=2)
"""256 KiB a block, 512 KiB a run."""
HUGE = Geometry(16, 2, 16, 64, "float32", run_blocks=16)
"""256 KiB a block, 4 MiB a run."""

SLACK_S = 5.0
"""What a busy machine may add to a bound; a missing bound takes 30 seconds or for ever."""

T = TypeVar("T")


def frame(key: FrameKey, geometry: Geometry, fill: int = 0) -> tuple[FrameKey, Frame]:
    """A frame of this key whose payload is `fill` everywhere."""
    header = frame_header(
        key=key,
        geometry=geometry,
        namespace=ACME,
        fingerprint=b"model-1",
        lineage_root=b"R" * 16,
        parent_hash=b"P" * 16,
        last_hash=b"L" * 16,
        token_digest=b"T" * 16,
        first_block=0,
        num_tokens=geometry.run_blocks * geometry.block_size,
        generation=1,
    )
    return key, encode_frame(header, [bytearray([fill]) * header.payload_bytes])


def run(name: int, fill: int | None = None, geometry: Geometry = SMALL) -> tuple[FrameKey, Frame]:
    """A shared frame whose hash is `name` sixteen times."""
    key = run_key(BlockHash(bytes([name]) * 16), geometry)
    return frame(key, geometry, name if fill is None else fill)


def own(
    session_id: str, generation: int = 1, fill: int = 0, geometry: Geometry = SMALL
) -> tuple[FrameKey, Frame]:
    """A private frame."""
    return frame(private_key(session_id, generation, 0, geometry), geometry, fill)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """The block ends within so many seconds, the slack of a busy machine added."""
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds + SLACK_S


def eventually(call: Callable[[], T], deadline_s: float = 30.0) -> T:
    """What the call gives, once the store is well again; each try pauses by itself."""
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            return call()
        except StoreError:
            if time.monotonic() > deadline:
                raise


def num_connections(client: redis.Redis) -> int:
    """Connections that the server counts, this client's own left out."""
    mine = client.client_id()
    return sum(1 for entry in client.client_list(_type="normal") if int(entry["id"]) != mine)
