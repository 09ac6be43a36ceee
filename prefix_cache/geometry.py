"""Shape of a group's KV blocks in bytes, and how many of them one shared frame covers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from moorage.prefix_cache.errors import InvalidInput

Range: TypeAlias = tuple[int, int]
"""Half-open."""

RAW = "raw"
"""The codec that stores the device's bytes as they are."""
INT8 = "int8"
"""8 bits a number, see codec.py. Never read by who asks for raw: what follows would not be exact."""
CODECS = (RAW, INT8)
MAX_FRAME_BYTES = 4 << 20
"""Largest frame, header included: values of 1 to 4 MiB were the optimum of a loopback Redis."""
HEADER_ROOM_BYTES = 4 << 10
"""What a header may take of that; names in a namespace are the only part without a fixed length."""
MAX_RUN_BLOCKS = 16

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1}
"""dtype name -> bytes of one element."""


@dataclass(frozen=True)
class Geometry:
    """Shape of one group's KV blocks, and how many of them a shared frame covers."""

    num_layers: int
    num_kv_heads: int
    block_size: int
    """Tokens per block."""
    head_dim: int
    dtype: str
    """A key of ITEM_BYTES: "bfloat16", "float32", …"""
    run_blocks: int
    """Blocks of a run frame; see `run_blocks_for`."""
    codec: str = RAW

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise InvalidInput(f"dtype is {self.dtype!r}, allowed are {', '.join(ITEM_BYTES)}")
        if self.codec not in CODECS:
            raise InvalidInput(f"codec is {self.codec!r}, allowed are {', '.join(CODECS)}")
        if self.codec == INT8 and self.dtype not in ("bfloat16", "float16", "float32"):
            raise InvalidInput(f"codec int8 takes no KV of dtype {self.dtype}: use raw")
        sizes = (
            self.num_layers,
            self.num_kv_heads,
            self.block_size,
            self.head_dim,
            self.run_blocks,
        )
        if min(sizes) < 1:
            raise InvalidInput(f"every size of {self} must be 1 or more")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: [num_layers, 2, num_kv_heads, block_size, head_dim]."""
        return self.num_layers * 2 * self.num_kv_heads * self.block_size * self.token_head_bytes

    @property
    def token_head_bytes(self) -> int:
        """Bytes of one token in one head of one layer's key (or value)."""
        return self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def layers(self) -> Range:
        """All layers, half-open."""
        return (0, self.num_layers)

    @property
    def heads(self) -> Range:
        """All KV heads, half-open."""
        return (0, self.num_kv_heads)


def run_blocks_for(block_bytes: int) -> int:
    """The largest power of two up to 16 whose frame, header included, fits MAX_FRAME_BYTES; at
    least 1.
    """
    run = MAX_RUN_BLOCKS
    while run > 1 and run * block_bytes + HEADER_ROOM_BYTES > MAX_FRAME_BYTES:
        run //= 2
    return run
