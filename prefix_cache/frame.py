"""Frames: the unit in which KV leaves the device, self-describing and checksummed.

    log       |bbbb|bbbb|bbbb|bbbb|bbbb|bbbb|bb··|     b = slot with KV, · = slot without a token
    frames    [ run, shared      ][ private      ]     4 blocks a run
                key: last hash      key: session / generation / index

A run frame covers an aligned run of `run_blocks` full blocks counted from the lineage root and is
named by the hash of its last block, so that a shared prefix is stored once whoever parks it. What
is left, a partial run and the partial tail, is one private frame with its length and generation.

Bytes of a frame (little-endian):

    0   magic "MRGF"      4
    4   version           2
    6   header length     4      msgpack array, the fields of FrameHeader in their order
    10  payload length    8
    18  checksum          16     XXH3-128 over bytes [0, 18), header and payload
    34  header, then payload: [blocks, layers, 2, kv heads, block_size, head_dim], head-major, raw

The checksum guards against decay and cut values, not against someone who can write to the store:
who can, owns the tier. XXH3 runs at memory speed (about 10 GB/s a core), a cryptographic digest
would cost more than the copy.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal, TypeAlias, cast

import msgpack  # type: ignore[import-untyped,unused-ignore]
import numpy as np
import xxhash

from moorage.prefix_cache.block import HASH_BYTES, BlockHash, Bytes, Namespace
from moorage.prefix_cache.errors import InvalidInput
from moorage.prefix_cache.geometry import (
    CODECS,
    ITEM_BYTES,
    MAX_FRAME_BYTES,
    RAW,
    Geometry,
    Range,
    run_blocks_for,
)

__all__ = [
    "ITEM_BYTES",
    "MAX_FRAME_BYTES",
    "RAW",
    "Frame",
    "FrameHeader",
    "FrameKey",
    "Geometry",
    "encode_frame",
    "frame_header",
    "private_key",
    "run_blocks_for",
    "run_key",
    "split_blocks",
]

MAGIC = b"MRGF"
VERSION = 1
_PRIVATE = re.compile(rb"([A-Za-z0-9_-]{1,128})/([0-9]{1,20})/([0-9]{1,10})")
LEAD = struct.Struct("<4sHIQ")
CHECKSUM_BYTES = 16
HEADER_AT = LEAD.size + CHECKSUM_BYTES

FrameKind: TypeAlias = Literal["run", "private"]


@dataclass(frozen=True)
class FrameKey:
    """What a frame is stored under, within a namespace."""

    kind: FrameKind
    name: bytes
    """Run: the 16-byte hash of its last block. Private: "session/generation/index"."""
    dtype: str
    codec: str
    layers: Range
    heads: Range

    def __post_init__(self) -> None:
        """Raises InvalidInput for a part that could reach another key; keys also come from stored
        manifests.
        """
        whole = (
            len(self.name) == HASH_BYTES if self.kind == "run" else _PRIVATE.fullmatch(self.name)
        )
        if not whole:
            raise InvalidInput(f"{self.name[:48]!r} names no {self.kind} frame")
        if self.dtype not in ITEM_BYTES or self.codec not in CODECS:
            raise InvalidInput(f"no frames are stored as {self.dtype[:32]!r}, {self.codec[:32]!r}")

    @property
    def shared(self) -> bool:
        """Whether other sessions may use this frame."""
        return self.kind == "run"

    @property
    def parts(self) -> tuple[str, str, str]:
        """(session id, generation, index) of a private frame."""
        session_id, generation, index = self.name.decode().split("/")
        return session_id, generation, index

    @property
    def field(self) -> str:
        """Which part of the layers and heads, as text: `L0-6:H0-2` (half-open)."""
        return f"L{self.layers[0]}-{self.layers[1]}:H{self.heads[0]}-{self.heads[1]}"


def run_key(last_hash: BlockHash, geometry: Geometry) -> FrameKey:
    """Key of a shared frame over all layers and heads."""
    return FrameKey(
        "run", bytes(last_hash), geometry.dtype, geometry.codec, geometry.layers, geometry.heads
    )


def private_key(session_id: str, generation: int, index: int, geometry: Geometry) -> FrameKey:
    """Key of a session's own frame; a new generation never writes over an old one."""
    name = f"{session_id}/{generation}/{index}".encode()
    return FrameKey(
        "private", name, geometry.dtype, geometry.codec, geometry.layers, geometry.heads
    )


@dataclass(frozen=True)
class FrameHeader:
    """Everything that a frame claims about its payload. The field order is the wire order."""

    fingerprint: bytes
    tenant: str
    namespace: str
    lineage_root: bytes
    parent_hash: bytes
    """Of the block before the first; the lineage root at position 0."""
    last_hash: bytes
    """Of the last full block; the parent's where there is none."""
    token_digest: bytes
    """`digest_tokens` of the covered token ids."""
    first_block: int
    """Blocks before this frame, from the lineage root."""
    num_blocks: int
    num_tokens: int
    """Covered tokens; less than num_blocks * block_size in a partial tail."""
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    codec: str
    generation: int
    """Of the park that wrote it; 0 in a run frame, which belongs to no session."""
    kind: str
    name: bytes
    layers: Range
    heads: Range
    payload_bytes: int

    @property
    def key(self) -> FrameKey:
        """The key that this header belongs to."""
        kind: FrameKind = "run" if self.kind == "run" else "private"
        return FrameKey(kind, self.name, self.dtype, self.codec, self.layers, self.heads)


FIELDS = tuple(field.name for field in fields(FrameHeader))
"""On the wire, in this order."""


class Frame:
    """A frame to be written: its header and views of the payload, which is not copied.

    Payload and checksum are computed where the bytes are first asked for: a run frame that a store
    has already is neither read nor coded. The blocks must stay unchanged until then and while they
    are written.
    """

    def __init__(self, header: FrameHeader, make: Callable[[], tuple[memoryview, ...]]) -> None:
        """`make` gives the payload's pieces, of `header.payload_bytes` together."""
        self.header = header
        self._make = make
        self._packed = cast(
            "bytes", msgpack.packb([getattr(header, name) for name in FIELDS], use_bin_type=True)
        )

    @cached_property
    def pieces(self) -> tuple[memoryview, ...]:
        """The payload, in order."""
        return self._make()

    @cached_property
    def checksum(self) -> bytes:
        """Over everything but itself."""
        return checksum_of((self._lead, self._packed, *self.pieces))

    @property
    def _lead(self) -> bytes:
        return LEAD.pack(MAGIC, VERSION, len(self._packed), self.header.payload_bytes)

    @property
    def parts(self) -> tuple[bytes | memoryview, ...]:
        """What to write, in order."""
        return (b"".join((self._lead, self.checksum, self._packed)), *self.pieces)

    @property
    def size_bytes(self) -> int:
        """Bytes of all parts; costs no checksum."""
        return HEADER_AT + len(self._packed) + self.header.payload_bytes

    def write_into(self, target: memoryview) -> None:
        """Fill a buffer of `size_bytes`. Each piece is checksummed where it was copied to, while it is in the
        processor's cache; NumPy copies without the interpreter's lock."""

        def copied() -> Iterator[Bytes]:
            yield self._lead
            yield self._packed
            at = HEADER_AT + len(self._packed)
            for piece in self.pieces:
                written = target[at : at + len(piece)]
                np.copyto(np.frombuffer(written, np.uint8), np.frombuffer(piece, np.uint8))
                yield written
                at += len(piece)

        checksum = checksum_of(copied())
        head = b"".join((self._lead, checksum, self._packed))
        target[: len(head)] = head
        self.__dict__["checksum"] = checksum  # of the very bytes that were written

    def join(self) -> bytes:
        """One bytes object: the only copy of the payload on its way out; made by the store that
        needs it.
        """
        return b"".join(self.parts)


def as_bytes_view(buffer: Bytes) -> memoryview:
    """A flat byte view of a contiguous buffer. Raises InvalidInput for a strided one."""
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise InvalidInput("the payload is not contiguous: gather whole blocks first")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def split_blocks(payload: Bytes, block_bytes: int) -> list[memoryview]:
    """Views of the whole blocks of a contiguous buffer."""
    view = as_bytes_view(payload)
    return [
        view[at : at + block_bytes] for at in range(0, len(view) - block_bytes + 1, block_bytes)
    ]


def encode_frame(header: FrameHeader, pieces: Sequence[Bytes]) -> Frame:
    """The frame of a payload that lies in one or more buffers, usually one a block.

    Raises InvalidInput where header and payload lengths differ, or a buffer is not contiguous.
    """
    views = tuple(as_bytes_view(piece) for piece in pieces)
    num_bytes = sum(map(len, views))
    if num_bytes != header.payload_bytes:
        raise InvalidInput(
            f"the payload has {num_bytes} bytes, its header says {header.payload_bytes}"
        )
    return Frame(header, lambda: views)


def checksum_of(parts: Iterable[Bytes]) -> bytes:
    """Of the parts, one behind the other."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.digest()


def frame_header(
    *,
    key: FrameKey,
    geometry: Geometry,
    namespace: Namespace,
    fingerprint: bytes,
    lineage_root: bytes,
    parent_hash: bytes,
    last_hash: bytes,
    token_digest: bytes,
    first_block: int,
    num_tokens: int,
    generation: int,
    payload_bytes: int | None = None,
) -> FrameHeader:
    """The header of `num_tokens` tokens from `first_block` on; writer and reader both make theirs
    here.
    """
    num_blocks = -(-num_tokens // geometry.block_size)
    return FrameHeader(
        fingerprint=fingerprint,
        tenant=namespace.tenant,
        namespace=namespace.name,
        lineage_root=lineage_root,
        parent_hash=parent_hash,
        last_hash=last_hash,
        token_digest=token_digest,
        first_block=first_block,
        num_blocks=num_blocks,
        num_tokens=num_tokens,
        block_size=geometry.block_size,
        num_layers=geometry.num_layers,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        dtype=key.dtype,
        codec=key.codec,
        generation=0 if key.shared else generation,
        kind=key.kind,
        name=key.name,
        layers=key.layers,
        heads=key.heads,
        payload_bytes=num_blocks * geometry.block_bytes if payload_bytes is None else payload_bytes,
    )
