"""The manifest of a parked context: which frames hold its KV, in order. Opaque bytes to the session
store.

It is written last, in the session's own transaction, and names every frame with its length and
checksum: whoever reads an old manifest gets the old frames or a miss, never a mix with new ones. It
holds no token and no text.

Bytes: magic "MRGM", version (2), body length (4), XXH3-128 over these and the body (16), msgpack
body.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, cast

import msgpack  # type: ignore[import-untyped,unused-ignore]
import xxhash

from moorage.prefix_cache.block import Bytes, Lineage, Namespace, digest_tokens
from moorage.prefix_cache.errors import InvalidInput, ManifestMismatch
from moorage.prefix_cache.errors import MismatchReason as Reason
from moorage.prefix_cache.frame import FrameKey, Geometry, as_bytes_view
from moorage.prefix_cache.store import validate_session_id

MAGIC = b"MRGM"
VERSION = 1

_LEAD = struct.Struct("<4sHI")
_CHECKSUM_BYTES = 16
_BODY_AT = _LEAD.size + _CHECKSUM_BYTES


@dataclass(frozen=True)
class FrameReference:
    """One frame of a parked context."""

    key: FrameKey
    tier: str
    """Which store has it: "host", "redis", …"""
    first_block: int
    num_blocks: int
    num_tokens: int
    size_bytes: int
    """Of the whole frame as written by this park."""
    checksum: bytes
    """Of the frame as this park wrote it; binding for private frames only, since anyone may write a
    run.
    """


@dataclass(frozen=True)
class ParkedContext:
    """A parked context: its lineage, its shape and its frames, contiguous from block 0."""

    lineage: Lineage
    session_id: str
    generation: int
    geometry: Geometry
    num_tokens: int
    token_digest: bytes
    """`digest_tokens` of all covered tokens."""
    frames: tuple[FrameReference, ...]
    version: int = VERSION

    @classmethod
    def empty(cls, lineage: Lineage, session_id: str, geometry: Geometry) -> ParkedContext:
        """Of a session that parked nothing: what a load starts from that only seeks shared runs."""
        return cls(lineage, session_id, 0, geometry, 0, digest_tokens(b""), ())

    @property
    def dtype(self) -> str:
        """dtype of the stored KV."""
        return self.geometry.dtype

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.geometry.block_size

    @property
    def run_blocks(self) -> int:
        """Blocks per run frame."""
        return self.geometry.run_blocks

    @property
    def num_blocks(self) -> int:
        """Blocks that the frames cover."""
        return -(-self.num_tokens // self.geometry.block_size)

    @property
    def size_bytes(self) -> int:
        """Bytes of all frames, shared ones included."""
        return sum(frame.size_bytes for frame in self.frames)

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers that hold its frames, sorted."""
        return tuple(sorted({frame.tier for frame in self.frames}))

    def keys_by_tier(self, without: ParkedContext | None = None) -> dict[str, tuple[FrameKey, ...]]:
        """tier -> this context's keys, less those that `without` still names: what a DeleteJob
        takes.
        """
        kept = {(ref.tier, ref.key) for ref in without.frames} if without is not None else set()
        keys: dict[str, list[FrameKey]] = {}
        for ref in self.frames:
            if (ref.tier, ref.key) not in kept:
                keys.setdefault(ref.tier, []).append(ref.key)
        return {tier: tuple(found) for tier, found in keys.items()}

    def to_bytes(self) -> bytes:
        """Checksummed bytes; about 100 a frame."""
        space = self.lineage.namespace
        shape = self.geometry
        body = _pack(
            [
                [space.tenant, space.name, self.lineage.fingerprint, self.lineage.extra_key],
                self.session_id,
                self.generation,
                [
                    shape.num_layers,
                    shape.num_kv_heads,
                    shape.block_size,
                    shape.head_dim,
                    shape.dtype,
                    shape.run_blocks,
                    shape.codec,
                ],
                self.num_tokens,
                self.token_digest,
                [_pack_reference(ref) for ref in self.frames],
            ]
        )
        lead = _LEAD.pack(MAGIC, VERSION, len(body))
        return b"".join((lead, _checksum(lead, body), body))

    @classmethod
    def from_bytes(cls, data: Bytes) -> ParkedContext:
        """The inverse. Raises ManifestMismatch, and nothing else, whatever the bytes are."""
        view = as_bytes_view(data)
        if len(view) < _BODY_AT:
            raise ManifestMismatch(
                Reason.TRUNCATED, f"{len(view)} bytes, at least {_BODY_AT} needed"
            )
        magic, version, body_len = _LEAD.unpack_from(view)
        if magic != MAGIC:
            raise ManifestMismatch(Reason.MAGIC, f"starts with {magic.hex()}, not {MAGIC.hex()}")
        if version != VERSION:
            raise ManifestMismatch(Reason.VERSION, f"version {version}, this build reads {VERSION}")
        if len(view) != _BODY_AT + body_len:
            raise ManifestMismatch(Reason.TRUNCATED, f"{len(view)} bytes of {_BODY_AT + body_len}")
        body = view[_BODY_AT:]
        if view[_LEAD.size : _BODY_AT] != _checksum(view[: _LEAD.size], body):
            raise ManifestMismatch(Reason.CHECKSUM, "changed since it was written")
        try:
            context = _unpack(msgpack.unpackb(body, raw=False, use_list=False))
        except (ValueError, TypeError, KeyError, IndexError, InvalidInput) as error:
            raise ManifestMismatch(Reason.HEADER, f"malformed: {type(error).__name__}") from error
        except msgpack.UnpackException as error:
            raise ManifestMismatch(Reason.HEADER, "not msgpack") from error
        context.check()
        return context

    def check(self) -> None:
        """Raises ManifestMismatch where the frames do not join up to `num_tokens` from block 0."""
        try:
            validate_session_id(self.session_id)
        except InvalidInput as error:
            raise ManifestMismatch(Reason.SESSION, str(error)) from error
        block = tokens = 0
        size = self.geometry.block_size
        for index, ref in enumerate(self.frames):
            last = index == len(self.frames) - 1
            whole = ref.num_tokens == ref.num_blocks * size
            if (
                ref.first_block != block
                or ref.num_blocks < 1
                or ref.num_blocks != -(-ref.num_tokens // size)
                or not (whole or last)
            ):
                raise ManifestMismatch(
                    Reason.INCONSISTENT,
                    f"frame {index} covers {ref.num_tokens} tokens from block {ref.first_block} on,"
                    f" expected to start at block {block}",
                )
            block += ref.num_blocks
            tokens += ref.num_tokens
        if tokens != self.num_tokens:
            raise ManifestMismatch(
                Reason.INCONSISTENT, f"frames cover {tokens} tokens of {self.num_tokens}"
            )


def _pack(value: object) -> bytes:
    return cast("bytes", msgpack.packb(value, use_bin_type=True))


def _pack_reference(ref: FrameReference) -> list[object]:
    key = ref.key
    return [
        [key.kind, key.name, key.dtype, key.codec, key.layers, key.heads],
        ref.tier,
        ref.first_block,
        ref.num_blocks,
        ref.num_tokens,
        ref.size_bytes,
        ref.checksum,
    ]


def _unpack(body: Any) -> ParkedContext:
    lineage, session_id, generation, shape, num_tokens, token_digest, frames = body
    tenant, name, fingerprint, extra_key = lineage
    references: list[FrameReference] = []
    for (kind, key_name, dtype, codec, layers, heads), *rest in frames:
        tier, first_block, num_blocks, frame_tokens, size_bytes, checksum = rest
        if kind not in ("run", "private"):
            raise ValueError(f"frame kind {kind!r}")
        key = FrameKey(
            kind,
            _typed(key_name, bytes),
            _typed(dtype, str),
            _typed(codec, str),
            (_typed(layers[0], int), _typed(layers[1], int)),
            (_typed(heads[0], int), _typed(heads[1], int)),
        )
        references.append(
            FrameReference(
                key,
                _typed(tier, str),
                _typed(first_block, int),
                _typed(num_blocks, int),
                _typed(frame_tokens, int),
                _typed(size_bytes, int),
                _typed(checksum, bytes),
            )
        )
    num_layers, num_kv_heads, block_size, head_dim, kv_dtype, run_blocks, kv_codec = shape
    return ParkedContext(
        lineage=Lineage(
            Namespace(_typed(tenant, str), _typed(name, str)),
            _typed(fingerprint, bytes),
            _typed(extra_key, bytes),
        ),
        session_id=_typed(session_id, str),
        generation=_typed(generation, int),
        geometry=Geometry(
            _typed(num_layers, int),
            _typed(num_kv_heads, int),
            _typed(block_size, int),
            _typed(head_dim, int),
            _typed(kv_dtype, str),
            _typed(run_blocks, int),
            _typed(kv_codec, str),
        ),
        num_tokens=_typed(num_tokens, int),
        token_digest=_typed(token_digest, bytes),
        frames=tuple(references),
    )


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{type(value).__name__} where {kind.__name__} belongs")
    return value


def _checksum(*parts: Bytes) -> bytes:
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.digest()
