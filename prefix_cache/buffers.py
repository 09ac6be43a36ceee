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

Slot = NDArray[np.uint8]


class BufferPool:
    """Thread-safe. It never gives memory back to the system: its size is the most that was in use at once, by class."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[Slot]] = {}
        """size class -> slots that nobody looks at."""
        self.num_bytes = 0
        """Asked of the system so far."""

    def take(self, num_bytes: int) -> memoryview:
        """Writable memory whose content is whatever was there before."""
        if num_bytes < STEP_BYTES:
            return memoryview(bytearray(num_bytes))
        size = -(-num_bytes // STEP_BYTES) * STEP_BYTES
        with self._lock:
            free = self._free.setdefault(size, [])
            if not free:
                free.extend(self._new_slots(size))
            slot = free.pop()
        part = slot[:num_bytes]
        weakref.finalize(part, self._give, size, slot)
        return part.data

    def warm(self, num_bytes: int, total_bytes: int) -> None:
        """Touch about `total_bytes` of slots for pieces of `num_bytes` ahead of their use; takes a second for 1 GiB."""
        pieces = [self.take(num_bytes) for _ in range(total_bytes // max(num_bytes, STEP_BYTES))]
        for piece in pieces:
            np.frombuffer(piece, dtype=np.uint8)[::PAGE_BYTES] = 0

    def _new_slots(self, size: int) -> list[Slot]:
        length = max(CHUNK_BYTES // size, 1) * size
        chunk = np.frombuffer(mmap.mmap(-1, length), dtype=np.uint8)
        self.num_bytes += length
        return [chunk[at : at + size] for at in range(length - size, -1, -size)]

    def _give(self, size: int, slot: Slot) -> None:
        with self._lock:
            self._free[size].append(slot)


def copy_into(target: memoryview, parts: tuple[bytes | memoryview, ...]) -> memoryview:
    """One part behind the other, which fill it; returns it."""
    at = 0
    for part in parts:
        target[at : at + len(part)] = part
        at += len(part)
    return target
