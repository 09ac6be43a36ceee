"""Frame memory is used again, and never while somebody reads it."""

from __future__ import annotations

import threading

from moorage.prefix_cache.buffers import CHUNK_BYTES, STEP_BYTES, BufferPool, copy_into


def test_a_slot_comes_back_with_the_last_view_of_it() -> None:
    pool = BufferPool()
    first = pool.take(STEP_BYTES)
    first[:4] = b"abcd"
    part = first[:4].toreadonly()
    del first
    other = pool.take(STEP_BYTES)
    other[:4] = b"WXYZ"
    assert bytes(part) == b"abcd"
    del part
    again = pool.take(STEP_BYTES)
    assert bytes(again[:4]) == b"abcd"  # the same memory: nobody looks at it any more
    assert pool.num_bytes == CHUNK_BYTES


def test_sizes_share_slots_of_their_class_and_small_ones_take_none() -> None:
    pool = BufferPool()
    held = [pool.take(n) for n in (1, STEP_BYTES - 1, STEP_BYTES, STEP_BYTES + 1, 3 * STEP_BYTES)]
    assert [len(view) for view in held] == [
        1,
        STEP_BYTES - 1,
        STEP_BYTES,
        STEP_BYTES + 1,
        3 * STEP_BYTES,
    ]
    assert len(pool._chunks) == 3
    large = pool.take(CHUNK_BYTES + 1)
    assert len(large) == CHUNK_BYTES + 1


def test_ten_thousand_pieces_in_turn_take_one_chunk() -> None:
    pool = BufferPool()
    for number in range(10_000):
        piece = pool.take(STEP_BYTES)
        piece[0] = number % 256
    assert pool.num_bytes == CHUNK_BYTES


def test_memory_that_nobody_needs_goes_back_to_the_system() -> None:
    pool = BufferPool(kept_bytes=CHUNK_BYTES)
    for number in range(1, 6):  # classes that come and go, as frames grow
        held = [
            pool.take(number * STEP_BYTES) for _ in range(2 * CHUNK_BYTES // (number * STEP_BYTES))
        ]
        assert pool.num_bytes >= 2 * CHUNK_BYTES * 0.9
        del held
        assert pool.num_bytes <= 2 * CHUNK_BYTES
    assert pool._free_bytes == pool.num_bytes


def test_threads_never_share_a_slot() -> None:
    pool = BufferPool()
    wrong: list[int] = []

    def use(number: int) -> None:
        for _ in range(300):
            piece = pool.take(STEP_BYTES)
            copy_into(piece[:8], (bytes([number]) * 5, bytes([number]) * 3))
            if bytes(piece[:8]) != bytes([number]) * 8:
                wrong.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert wrong == []


def test_warmed_memory_is_there_for_the_first_frames() -> None:
    pool = BufferPool()
    pool.warm(STEP_BYTES + 10, 40 * STEP_BYTES)
    before = pool.num_bytes
    held = [pool.take(STEP_BYTES + 10) for _ in range(30)]
    assert (len(held), pool.num_bytes) == (30, before)
