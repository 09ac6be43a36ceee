"""Logical blocks: packed token ids, the chained hash that names a block, and the table of one
context.

A block's hash names everything its KV depends on: model (fingerprint), tenant (namespace), adapter
(extra key) and every token up to its end. It is logical: dtype, codec and layer or head ranges are
not in it (they belong to the frame key), so that a context parked at one parallel layout is found
at another.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, NewType, TypeAlias

from moorage.prefix_cache.errors import InvalidInput

if TYPE_CHECKING:
    from moorage.prefix_cache.radix_tree import Lock

BlockId = NewType("BlockId", int)
"""Index of a block in its group's device pool."""
BlockHash = NewType("BlockHash", bytes)
"""16 bytes; equal hash means equal model, tenant, adapter and tokens up to the block's end."""
TokenIds: TypeAlias = bytes
"""Packed little-endian int32, `TOKEN_BYTES` a token. Functions here take any bytes-like object."""
Bytes: TypeAlias = bytes | bytearray | memoryview

TOKEN_BYTES = 4
HASH_BYTES = 16
"""128 bits: with 2**48 blocks the chance of one collision is below 2**-32; tokens are compared
besides.
"""


def pack_tokens(token_ids: Iterable[int]) -> TokenIds:
    """Ids as packed int32. Raises InvalidInput for anything outside [0, 2**31)."""
    try:
        packed = array("i", token_ids)
    except (OverflowError, TypeError) as error:
        raise InvalidInput(f"token ids must be integers in [0, 2**31): {error}") from error
    if packed and min(packed) < 0:
        raise InvalidInput(f"token id {min(packed)} is negative; allowed is [0, 2**31)")
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(token_ids: Bytes) -> list[int]:
    """The inverse of `pack_tokens`. Raises InvalidInput where the length is not whole tokens."""
    num_tokens_in(token_ids)
    unpacked = array("i")
    unpacked.frombytes(token_ids)
    if sys.byteorder == "big":
        unpacked.byteswap()
    return unpacked.tolist()


def num_tokens_in(token_ids: Bytes) -> int:
    """Number of packed tokens. Raises InvalidInput where the length is not whole tokens."""
    num_bytes = len(token_ids)
    if num_bytes % TOKEN_BYTES:
        raise InvalidInput(
            f"{num_bytes} bytes are not whole tokens of {TOKEN_BYTES} bytes: use pack_tokens"
        )
    return num_bytes // TOKEN_BYTES


@dataclass(frozen=True)
class Namespace:
    """A wall: nothing in any tier is shared over it. Built only by authentication."""

    tenant: str
    name: str

    @cached_property
    def digest(self) -> str:
        """32 hex digits that may stand in a key, whatever characters the names hold."""
        return _digest(b"moorage.ns", self.tenant.encode(), self.name.encode()).hex()


@dataclass(frozen=True)
class Lineage:
    """The root of a hash chain. Two contexts share blocks only where all three fields are equal."""

    namespace: Namespace
    fingerprint: bytes
    """Of weights, config, numerics profile and run size; opaque here."""
    extra_key: bytes = b""
    """Of an adapter or whatever else changes KV; the whole id, never a shortened one."""

    @cached_property
    def root(self) -> BlockHash:
        """What the first block's hash chains from. Fields are length-prefixed, so they cannot run
        together.
        """
        return BlockHash(
            _digest(
                b"moorage.root",
                self.namespace.tenant.encode(),
                self.namespace.name.encode(),
                self.fingerprint,
                self.extra_key,
            )
        )


def _digest(person: bytes, *fields: bytes) -> bytes:
    state = blake2b(digest_size=HASH_BYTES, person=person)
    for field in fields:
        state.update(len(field).to_bytes(8, "little"))
        state.update(field)
    return state.digest()


def hash_block(parent: BlockHash, token_ids: Bytes) -> BlockHash:
    """BLAKE2b-128 of parent and tokens: the same in every process, on every machine (no
    `hash()`).
    """
    state = _BLOCK_STATE.copy()  # half the time of a new one
    state.update(parent)
    state.update(token_ids)
    return BlockHash(state.digest())


_BLOCK_STATE = blake2b(digest_size=HASH_BYTES, person=b"moorage.block")


def digest_tokens(token_ids: Bytes) -> bytes:
    """16 bytes that name token ids alone, independent of the chain: the second check of a frame's
    content.
    """
    return blake2b(token_ids, digest_size=HASH_BYTES, person=b"moorage.tokens").digest()


def hash_chain(parent: BlockHash, token_ids: Bytes, block_size: int) -> Iterator[BlockHash]:
    """Hashes of the whole blocks of `token_ids`, chained from `parent`; about 0.7 µs a block."""
    view = memoryview(token_ids)
    block_bytes = block_size * TOKEN_BYTES
    for start in range(0, len(view) - block_bytes + 1, block_bytes):
        parent = hash_block(parent, view[start : start + block_bytes])
        yield parent


class BlockTable:
    """What one context holds on the device; made by `PrefixCache.open`, dead after `release` or
    `discard`.

        block_ids    [ 7  3  9  4 | 11  2 ]
                      committed      private
                      in the tree,   in use,
                      locked by us   seen by no one else

    Readers may look at every field; only the cache writes them. Identity is its equality.
    """

    def __init__(self, lineage: Lineage, lock: Lock) -> None:
        self.lineage = lineage
        self.block_ids: list[BlockId] = []
        """Block `i` holds tokens `[i * block_size, (i + 1) * block_size)`."""
        self.block_hashes: list[BlockHash] = []
        """Of the committed blocks; `len(block_hashes) == num_committed`."""
        self.block_deltas: list[int] = []
        """Visible position − log position, per block; 0 until a compression shifts the window."""
        self.lock: Lock | None = lock
        """Protects the committed blocks from eviction; None once the table is dead."""

    @property
    def num_committed(self) -> int:
        """Leading blocks that are in the tree and locked by this table; the rest is private (in
        use).
        """
        return len(self.block_hashes)

    @property
    def num_blocks(self) -> int:
        """All blocks, committed and private."""
        return len(self.block_ids)

    @property
    def released(self) -> bool:
        """Whether the table is dead."""
        return self.lock is None
