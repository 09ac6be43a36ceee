"""Memory for frames, used again and again: a page that is touched for the first time costs several times the bytes
that fill it (measured: 16 MiB take 12 ms fresh and 1.7 ms warm).

    take(n) ─▶ a slot of n's size class ─▶ a view of it … the last view dies ─▶ the slot is free again

A slot is given back by the garbage of its view, not by a call: whoever still reads a frame that a store has let go of
reads what was there.
"""

from __future__ import annotations

import mmap
import threading
import weakref

import numpy as np
from numpy.typing import NDArray

STEP_BYTES = 64 << 10
"""Size classes are multiples of this; smaller pieces are left to the interpreter's own allocator."""
CHUNK_BYTES = 32 << 20
"""What is asked of the system at once."""
PAGE_BYTES = 4096

KEPT_BYTES = 64 << 20
"""Free memory that is kept for what comes; beyond it a chunk without a user goes back to the system."""

Slot = NDArray[np.uint8]


class _Chunk:
    """Slots of one size class in one piece of memory."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_slots = max(CHUNK_BYTES // size, 1)
        pages = mmap.mmap(-1, self.num_slots * size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(pages, dtype=np.uint8)
        self.free: list[Slot] = [
            memory[at : at + size] for at in range((self.num_slots - 1) * size, -1, -size)
        ]

    @property
    def num_bytes(self) -> int:
        """Of the whole chunk."""
        return self.num_slots * self.size


class BufferPool:
    """Thread-safe."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self.kept_bytes = kept_bytes
        self._lock = threading.RLock()  # a finaliser may run inside `take`
        self._chunks: dict[int, list[_Chunk]] = {}
        """size class -> its chunks."""
        self._free_bytes = 0
        self.num_bytes = 0
        """Held of the system's memory."""

    def take(self, num_bytes: int) -> memoryview:
        """Writable memory whose content is whatever was there before."""
        if num_bytes < STEP_BYTES:
            return memoryview(bytearray(num_bytes))
        size = -(-num_bytes // STEP_BYTES) * STEP_BYTES
        with self._lock:
            chunks = self._chunks.setdefault(size, [])
            chunk = next((one for one in chunks if one.free), None)
            if chunk is None:
                chunk = _Chunk(size)
                chunks.append(chunk)
                self.num_bytes += chunk.num_bytes
                self._free_bytes += chunk.num_bytes
            slot = chunk.free.pop()
            self._free_bytes -= size
        part = slot[:num_bytes]
        weakref.finalize(part, self._give, chunk, slot)
        return part.data

    def warm(self, num_bytes: int, total_bytes: int) -> None:
        """Touch about `total_bytes` of slots for pieces of `num_bytes` ahead of their use; takes a second for 1 GiB.
        They are kept as far as `kept_bytes` goes."""
        pieces = [self.take(num_bytes) for _ in range(total_bytes // max(num_bytes, STEP_BYTES))]
        for piece in pieces:
            np.frombuffer(piece, dtype=np.uint8)[::PAGE_BYTES] = 0

    def _give(self, chunk: _Chunk, slot: Slot) -> None:
        with self._lock:
            chunk.free.append(slot)
            self._free_bytes += chunk.size
            if len(chunk.free) == chunk.num_slots and self._free_bytes > self.kept_bytes:
                self._chunks[chunk.size].remove(chunk)
                self.num_bytes -= chunk.num_bytes
                self._free_bytes -= chunk.num_bytes


def copy_into(target: memoryview, parts: tuple[bytes | memoryview, ...]) -> memoryview:
    """One part behind the other, which fill it; returns it."""
    at = 0
    for part in parts:
        target[at : at + len(part)] = part
        at += len(part)
    return target
