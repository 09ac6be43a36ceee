"""What the prefix cache's tests share: small literal contexts, fake KV, a collector of
completions.
"""

from __future__ import annotations

import hashlib
import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from moorage.prefix_cache.block import Lineage, Namespace, TokenIds, pack_tokens
from moorage.prefix_cache.cache import CacheConfig, GroupConfig, PrefixCache
from moorage.prefix_cache.frame import Geometry, split_blocks
from moorage.prefix_cache.park import ParkDone, ParkJob
from moorage.prefix_cache.parked_context import ParkedContext
from moorage.prefix_cache.store import BlockStore
from moorage.prefix_cache.tiers import LoadDone, LoadJob, TierWorkers

LINEAGE = Lineage(Namespace("acme", "prod"), b"model-1")
GEOMETRY = Geometry(
    num_layers=2, num_kv_heads=1, block_size=4, head_dim=2, dtype="float32", run_blocks=2
)
"""A block is 2 layers × key and value × 1 head × 4 tokens × 2 floats = 128 bytes; a run is 8
tokens.
"""


def make_cache(num_blocks: int = 8, block_size: int = 4, **options: Any) -> PrefixCache:
    return PrefixCache(
        CacheConfig(block_size, (GroupConfig("full", num_blocks),), run_blocks=2), **options
    )


def fake_kv(
    token_ids: TokenIds, num_tokens: int, geometry: Geometry = GEOMETRY, salt: bytes = b""
) -> bytearray:
    """KV whose every block is a function of the tokens up to its end, as real KV is; the unused
    slots are 0xEE.
    """
    out = bytearray()
    size, slot = geometry.block_size, geometry.token_head_bytes
    for block in range(-(-num_tokens // size)):
        kv = bytearray(b"\xee" * geometry.block_bytes)
        used = min(size, num_tokens - block * size)
        for strip in range(geometry.num_layers * 2 * geometry.num_kv_heads):
            for index in range(used):
                seen = bytes(token_ids[: (block * size + index + 1) * 4])
                value = hashlib.sha256(salt + bytes([strip]) + seen).digest()
                at = (strip * size + index) * slot
                kv[at : at + slot] = (value * (slot // 32 + 1))[:slot]
        out += kv
    return out


def used_kv(kv: bytes | bytearray, num_tokens: int, geometry: Geometry = GEOMETRY) -> bytes:
    """`kv` with the slots beyond `num_tokens` at zero: what parking keeps."""
    out = bytearray(kv)
    size, slot = geometry.block_size, geometry.token_head_bytes
    if used := num_tokens % size:
        last = len(out) - geometry.block_bytes
        for strip in range(geometry.num_layers * 2 * geometry.num_kv_heads):
            start = last + (strip * size + used) * slot
            out[start : last + (strip + 1) * size * slot] = bytes((size - used) * slot)
    return bytes(out)


@dataclass
class Tiers:
    """Workers over given stores, with synchronous calls for tests."""

    stores: Sequence[BlockStore]
    geometry: Geometry = GEOMETRY
    lineage: Lineage = LINEAGE
    workers: TierWorkers = field(init=False)
    done: queue.Queue[Any] = field(default_factory=queue.Queue)

    def __post_init__(self) -> None:
        self.workers = TierWorkers(self.stores, self.done.put, num_workers=1, queue_len=8)

    def next(self) -> Any:
        return self.done.get(timeout=20)

    def park(
        self,
        session_id: str,
        generation: int,
        token_ids: TokenIds,
        tier: str,
        *,
        fall_back: bool = False,
        deadline_s: float = 10.0,
        salt: bytes = b"",
    ) -> ParkDone:
        num_tokens = len(token_ids) // 4
        job = ParkJob(
            session_id=session_id,
            generation=generation,
            lineage=self.lineage,
            token_ids=token_ids,
            block_hashes=(),
            blocks=split_blocks(
                fake_kv(token_ids, num_tokens, self.geometry, salt), self.geometry.block_bytes
            ),
            num_tokens=num_tokens,
            geometry=self.geometry,
            tier=tier,
            fall_back_to=("host",) if fall_back else (),
            deadline_s=deadline_s,
        )
        self.workers.park(job)
        done: ParkDone = self.next()
        return done

    def load(
        self,
        manifest: ParkedContext,
        token_ids: TokenIds,
        *,
        first_block: int = 0,
        num_blocks: int | None = None,
        geometry: Geometry | None = None,
        deadline_s: float = 10.0,
    ) -> tuple[LoadDone, bytes]:
        if num_blocks is None:
            num_blocks = manifest.num_blocks - first_block
        block_bytes = (geometry or self.geometry).block_bytes
        destination = bytearray(num_blocks * block_bytes)
        job = LoadJob(
            manifest=manifest,
            first_block=first_block,
            token_ids=token_ids,
            blocks=split_blocks(destination, block_bytes),
            geometry=geometry or self.geometry,
            deadline_s=deadline_s,
        )
        self.workers.load(job)
        done: LoadDone = self.next()
        return done, bytes(destination)


@pytest.fixture
def tiers() -> Iterator[Callable[..., Tiers]]:
    """A maker of `Tiers`; whatever it made is closed at the end."""
    made: list[Tiers] = []

    def make(*stores: BlockStore, **options: Any) -> Tiers:
        made.append(Tiers(stores, **options))
        return made[-1]

    yield make
    for one in made:
        one.workers.close(5.0)


@pytest.fixture
def kit() -> Any:
    """The helpers above, for test modules (which cannot import a conftest)."""

    class Kit:
        lineage = LINEAGE
        geometry = GEOMETRY
        cache = staticmethod(make_cache)
        kv = staticmethod(fake_kv)

        @staticmethod
        def blocks(token_ids: TokenIds, num_tokens: int) -> list[memoryview]:
            return split_blocks(fake_kv(token_ids, num_tokens, GEOMETRY), GEOMETRY.block_bytes)

        used = staticmethod(used_kv)

        @staticmethod
        def log(*token_ids: int) -> TokenIds:
            return pack_tokens(token_ids)

        @staticmethod
        def fill(cache: PrefixCache, token_ids: TokenIds, lineage: Lineage = LINEAGE) -> Any:
            """A table that has computed and committed `token_ids`."""
            table = cache.open(cache.match(lineage, token_ids))
            cache.grow(table, len(token_ids) // 4)
            cache.commit(table, token_ids, len(token_ids) // 4)
            return table

    return Kit
