"""A stored frame into its place: verified, and copied no more often than it must be.

memory      checksum and copy go piece by piece, so that the second finds the bytes in the processor's cache
disk        the payload is read straight into the blocks and checksummed there
partly      (some blocks are on the device already, or a codec has to be undone) verify, then copy what is wanted
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from moorage.prefix_cache import codec
from moorage.prefix_cache.block import Bytes
from moorage.prefix_cache.errors import FrameMismatch, MismatchReason
from moorage.prefix_cache.frame import RAW, Geometry
from moorage.prefix_cache.frame_check import FrameExpectation, FrameHead, decode_frame, open_frame
from moorage.prefix_cache.store import UnreadFrame


class FrameGone(Exception):
    """The frame's bytes are no longer there."""


def place_frame(
    geometry: Geometry,
    expect: FrameExpectation,
    stored: Bytes | UnreadFrame,
    into: Sequence[memoryview | None],
) -> None:
    """Fill one buffer a block (None: not wanted). Raises FrameMismatch, FrameGone or StoreError; then the buffers
    hold zeros or what they held: nothing that was not verified stays.
    """
    wanted = [block for block in into if block is not None]
    try:
        _place(geometry, expect, stored, into, wanted)
    except BaseException:
        for block in wanted:
            np.frombuffer(block, np.uint8)[:] = 0
        raise


def _place(
    geometry: Geometry,
    expect: FrameExpectation,
    stored: Bytes | UnreadFrame,
    into: Sequence[memoryview | None],
    wanted: Sequence[memoryview],
) -> None:
    whole = geometry.codec == RAW and len(wanted) == len(into)
    num_bytes = expect.header.payload_bytes
    if not isinstance(stored, bytes | bytearray | memoryview):
        head_len = stored.size_bytes - num_bytes
        if whole and head_len > 0:
            head = memoryview(bytearray(head_len))
            if not stored.read([head, *wanted]):
                raise FrameGone
            FrameHead.parse(head, num_bytes).verify(wanted, expect)
            return
        data = memoryview(bytearray(stored.size_bytes))
        if not stored.read([data]):
            raise FrameGone
        stored = data
    if whole and len(stored) > num_bytes:
        opened, payload = open_frame(stored)
        if len(payload) != num_bytes:
            raise FrameMismatch(
                MismatchReason.GEOMETRY,
                f"{len(payload)} payload bytes, its codec makes {num_bytes}",
            )
        opened.verify(_copied(payload, wanted), expect)
        return
    _, payload = decode_frame(stored, expect)
    header = expect.header
    codec.decode(
        geometry, header.first_block, header.kind == "run", header.num_blocks, payload, into
    )


def _copied(payload: memoryview, into: Sequence[memoryview]) -> Iterator[memoryview]:
    """The payload's pieces; each is copied once its reader asks for the next. NumPy copies without the interpreter's
    lock."""
    source = np.frombuffer(payload, np.uint8)
    at = 0
    for block in into:
        end = at + len(block)
        yield payload[at:end]
        np.copyto(np.frombuffer(block, np.uint8), source[at:end])
        at = end
