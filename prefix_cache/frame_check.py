"""Whether stored bytes are the frame that was promised: lengths, checksum, and every field of the header.

The payload is looked at piece by piece, so that whoever copies it can do so while it is in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgpack  # type: ignore[import-untyped,unused-ignore]

from moorage.prefix_cache.block import Bytes
from moorage.prefix_cache.errors import FrameMismatch
from moorage.prefix_cache.errors import MismatchReason as Reason
from moorage.prefix_cache.frame import (
    FIELDS,
    HEADER_AT,
    ITEM_BYTES,
    LEAD,
    MAGIC,
    VERSION,
    FrameHeader,
    as_bytes_view,
    checksum_of,
)

# Which reason a differing field gives, in the order in which they are compared: the walls first.
_REASONS: tuple[tuple[str, Reason], ...] = (
    ("tenant", Reason.NAMESPACE),
    ("namespace", Reason.NAMESPACE),
    ("fingerprint", Reason.FINGERPRINT),
    ("block_size", Reason.GEOMETRY),
    ("num_layers", Reason.GEOMETRY),
    ("num_kv_heads", Reason.GEOMETRY),
    ("head_dim", Reason.GEOMETRY),
    ("dtype", Reason.DTYPE),
    ("codec", Reason.CODEC),
    ("generation", Reason.GENERATION),
    ("lineage_root", Reason.LINEAGE),
    ("first_block", Reason.POSITION),
    ("num_blocks", Reason.POSITION),
    ("num_tokens", Reason.POSITION),
    ("parent_hash", Reason.LINEAGE),
    ("last_hash", Reason.LINEAGE),
    ("token_digest", Reason.TOKENS),
    ("kind", Reason.KEY),
    ("name", Reason.KEY),
    ("layers", Reason.KEY),
    ("heads", Reason.KEY),
    ("payload_bytes", Reason.GEOMETRY),
)


@dataclass(frozen=True)
class FrameExpectation:
    """The header that the reader would have written, from its own token log; never from the stored
    bytes.
    """

    header: FrameHeader
    checksum: bytes | None = None
    """Of the very frame that a manifest names; None for run frames, which anyone may have
    written.
    """


@dataclass(frozen=True)
class FrameHead:
    """What stands before a frame's payload, not yet believed."""

    lead: memoryview
    checksum: bytes
    packed: memoryview
    payload_bytes: int
    """What is there, which is what the lead says."""

    @classmethod
    def parse(cls, head: memoryview, payload_bytes: int) -> FrameHead:
        """Of the bytes before a payload of `payload_bytes`. Raises FrameMismatch where it is none."""
        if len(head) < HEADER_AT:
            raise FrameMismatch(
                Reason.TRUNCATED, f"{len(head)} bytes, a frame has {HEADER_AT} or more"
            )
        magic, version, header_len, payload_len = LEAD.unpack_from(head)
        if magic != MAGIC:
            raise FrameMismatch(Reason.MAGIC, f"starts with {magic.hex()}, expected {MAGIC.hex()}")
        if version != VERSION:
            raise FrameMismatch(Reason.VERSION, f"version {version}, this build reads {VERSION}")
        found, total = len(head) + payload_bytes, HEADER_AT + header_len + payload_len
        if found != total or payload_bytes != payload_len:
            raise FrameMismatch(Reason.TRUNCATED, f"{found} bytes, its lengths add up to {total}")
        return cls(
            head[: LEAD.size], bytes(head[LEAD.size : HEADER_AT]), head[HEADER_AT:], payload_len
        )

    def verify(self, payload: Iterable[Bytes], expect: FrameExpectation) -> FrameHeader:
        """The header, where it and the payload are what was expected; the payload is read once, in order.

        Raises FrameMismatch, and nothing else, whatever the bytes are.
        """
        if self.checksum != checksum_of(self._summed(payload)):
            raise FrameMismatch(Reason.CHECKSUM, "header or payload changed since it was written")
        header = _unpack_header(self.packed)
        for name, reason in _REASONS:
            found, wanted = getattr(header, name), getattr(expect.header, name)
            if found != wanted:
                raise FrameMismatch(
                    reason, f"{name} differs from the expected one{_shown(found, wanted)}"
                )
        if header.payload_bytes != self.payload_bytes:
            raise FrameMismatch(
                Reason.GEOMETRY, f"{self.payload_bytes} payload bytes, {header.payload_bytes} said"
            )
        if expect.checksum is not None and expect.checksum != self.checksum:
            raise FrameMismatch(
                Reason.CHECKSUM, "a valid frame, but not the one the manifest names"
            )
        return header

    def _summed(self, payload: Iterable[Bytes]) -> Iterator[Bytes]:
        yield self.lead
        yield self.packed
        yield from payload


def open_frame(buffer: Bytes) -> tuple[FrameHead, memoryview]:
    """A stored frame's head and its payload, unverified. Raises FrameMismatch where it is none."""
    view = as_bytes_view(buffer)
    header_len = LEAD.unpack_from(view)[2] if len(view) >= HEADER_AT else 0
    at = min(HEADER_AT + header_len, len(view))
    return FrameHead.parse(view[:at], len(view) - at), view[at:]


def decode_frame(buffer: Bytes, expect: FrameExpectation) -> tuple[FrameHeader, memoryview]:
    """Verify a stored frame and return its header and a view of its payload.

    Raises FrameMismatch, and nothing else, whatever the bytes are.
    """
    head, payload = open_frame(buffer)
    return head.verify((payload,), expect), payload


def _shown(found: object, wanted: object) -> str:
    """Numbers and dtype names are shown; names of tenants, hashes and digests are not."""
    if isinstance(found, int) and isinstance(wanted, int):
        return f" ({found}, expected {wanted})"
    if found in ITEM_BYTES and wanted in ITEM_BYTES:
        return f" ({found}, expected {wanted})"
    return ""


def _unpack_header(packed: memoryview) -> FrameHeader:
    try:
        values: Any = msgpack.unpackb(packed, raw=False, use_list=False)
    except Exception as error:  # msgpack raises ValueError, TypeError and its own kinds
        raise FrameMismatch(Reason.HEADER, f"not msgpack: {type(error).__name__}") from error
    if not isinstance(values, tuple) or len(values) != len(FIELDS):
        raise FrameMismatch(Reason.HEADER, f"not an array of {len(FIELDS)} fields")
    return FrameHeader(*values)  # types are checked by comparing each field with the expected one
