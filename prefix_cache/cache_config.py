"""What a cache is given and what it reports: sizes, and counts of blocks."""

from __future__ import annotations

from dataclasses import dataclass

from moorage.prefix_cache.errors import InvalidInput


@dataclass(frozen=True)
class GroupConfig:
    """One group of layers that share a pool layout (full attention; later sliding window, latent,
    state).
    """

    name: str
    """Unit: none. "full" is the only one for now."""
    num_blocks: int
    """Blocks in the group's device pool; at least 1."""


@dataclass(frozen=True)
class CacheConfig:
    """Sizes of one cache."""

    block_size: int
    """Tokens per block, 1 … 1024; the engine's default is 16."""
    groups: tuple[GroupConfig, ...]
    """Exactly one for now: every logical block has one block id."""
    run_blocks: int
    """Blocks of one shared frame; a power of two. Part of the fingerprint, here for those who
    park.
    """

    def validate(self) -> None:
        """Raises InvalidInput naming the field, the value and the limit."""
        if not 1 <= self.block_size <= 1024:
            raise InvalidInput(f"block_size is {self.block_size}, allowed is 1 … 1024")
        if self.run_blocks < 1 or self.run_blocks & (self.run_blocks - 1):
            raise InvalidInput(f"run_blocks is {self.run_blocks}, allowed are powers of two")
        if len(self.groups) != 1:
            raise InvalidInput(f"{len(self.groups)} groups are given, exactly 1 is served for now")


@dataclass(frozen=True)
class CacheStatistics:
    """Blocks by owner, and counters since construction."""

    free: int
    evictable: int
    """In the tree, held by no table."""
    locked: int
    """In the tree, held by at least one table."""
    in_use: int
    """Private to one table."""
    total: int
    num_nodes: int
    num_splits: int
    hit_tokens: int
    """Tokens that `open` found in the tree."""
    miss_tokens: int
    """Tokens that were asked for and not found."""
    num_evicted: int
    """Blocks evicted."""
