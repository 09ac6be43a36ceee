"""The disk tier: what was stored is there after a restart, room is made in order, and no file's end breaks anything."""

from __future__ import annotations

import errno
import os
import random
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moorage.prefix_cache import disk_segment
from moorage.prefix_cache.block import BlockHash, Namespace, pack_tokens
from moorage.prefix_cache.disk_store import RECORD_ROOM_BYTES, DiskConfig, DiskStore
from moorage.prefix_cache.errors import (
    InvalidInput,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
)
from moorage.prefix_cache.frame import (
    Frame,
    FrameKey,
    encode_frame,
    frame_header,
    private_key,
    run_key,
)

ACME, RIVAL = Namespace("acme", "prod"), Namespace("rival", "prod")
LOG = pack_tokens(range(100, 122))


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Callable[..., DiskStore]]:
    """Opens stores on one directory, each after the one before is closed."""
    opened: list[DiskStore] = []

    def make(**changes: Any) -> DiskStore:
        for store in opened:
            store.close()
        opened.append(DiskStore(DiskConfig(tmp_path / "kv", **changes)))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


def frame(kit: Any, key: FrameKey, fill: int) -> tuple[FrameKey, Frame]:
    header = frame_header(
        key=key, geometry=kit.geometry, namespace=ACME, fingerprint=b"model-1",
        lineage_root=b"R" * 16, parent_hash=b"P" * 16, last_hash=b"L" * 16, token_digest=b"T" * 16,
        first_block=0, num_tokens=8, generation=1,
    )  # fmt: skip
    return key, encode_frame(header, [bytearray([fill]) * header.payload_bytes])


def run(kit: Any, number: int) -> tuple[FrameKey, Frame]:
    return frame(kit, run_key(BlockHash(bytes([number]) * 16), kit.geometry), number)


def own(kit: Any, session: str, generation: int, fill: int = 0) -> tuple[FrameKey, Frame]:
    return frame(kit, private_key(session, generation, 0, kit.geometry), fill)


def held(
    store: DiskStore, *keys: FrameKey, session: str = "a", namespace: Namespace = ACME
) -> list[int | None]:
    """The last byte of each stored frame, which is its fill; None for a miss."""
    return [None if data is None else data[-1] for data in store.get(keys, session, namespace, 5.0)]


def test_frames_are_there_after_a_restart_and_claims_too(kit: Any, open_store: Any) -> None:
    store = open_store()
    store.put([run(kit, 1), own(kit, "a", 1, 7)], "a", ACME, 5.0)
    store.put([run(kit, 1), own(kit, "b", 1, 8)], "b", ACME, 5.0)
    store.delete([run(kit, 1)[0]], "a", ACME, 5.0)  # b still claims it
    store = open_store()
    assert held(store, run(kit, 1)[0], own(kit, "a", 1)[0]) == [1, 7]
    assert held(store, own(kit, "b", 1)[0], session="b") == [8]
    assert not store._index.unclaimed
    store.delete([run(kit, 1)[0], own(kit, "b", 1)[0]], "b", ACME, 5.0)
    store = open_store()
    assert list(store._index.unclaimed) == [(ACME, "", run(kit, 1)[0])]
    assert held(store, own(kit, "b", 1)[0], session="b") == [None]
    store.drop([run(kit, 1)[0]], "x", ACME, 5.0)
    assert held(open_store(), run(kit, 1)[0]) == [None]


def test_a_run_is_written_once_and_tenants_are_walls(kit: Any, open_store: Any) -> None:
    store = open_store()
    store.put([run(kit, 1)], "a", ACME, 5.0)
    for number in range(50):
        store.put([run(kit, 1)], f"s{number}", ACME, 5.0)
    assert store.statistics().puts == 1
    assert held(store, run(kit, 1)[0], namespace=RIVAL) == [None]
    assert held(open_store(), run(kit, 1)[0], namespace=RIVAL) == [None]


def test_room_is_made_from_garbage_first_and_then_from_what_nobody_claims(
    kit: Any, open_store: Any
) -> None:
    size = own(kit, "a", 1)[1].size_bytes + RECORD_ROOM_BYTES
    store = open_store(max_bytes=20 * size, segment_bytes=2 * size)
    store.put([run(kit, number) for number in range(1, 5)], "a", ACME, 5.0)
    for generation in range(1, 200):  # a session that parks again and again leaves only garbage
        store.put([own(kit, "a", generation, generation % 250)], "a", ACME, 5.0)
        if generation > 1:
            store.delete([own(kit, "a", generation - 1)[0]], "a", ACME, 5.0)
        assert store.file_bytes <= store.config.max_bytes + size
    assert store.num_evicted == 0
    assert held(store, *(run(kit, n)[0] for n in range(1, 5)), own(kit, "a", 199)[0]) == [
        1,
        2,
        3,
        4,
        199,
    ]
    store.delete([run(kit, 1)[0], run(kit, 2)[0]], "a", ACME, 5.0)
    assert held(store, run(kit, 1)[0]) == [1]  # used: now 2 is the oldest
    number = 0
    with pytest.raises(StoreFull, match="raise disk_bytes"):
        while True:
            store.put([own(kit, f"n{number}", 1, number)], f"n{number}", ACME, 5.0)
            number += 1
    assert store.num_evicted == 2
    assert number >= 12
    for reopened in (False, True):
        if reopened:
            store = open_store(max_bytes=20 * size, segment_bytes=2 * size)
        assert held(store, *(run(kit, n)[0] for n in range(1, 5))) == [None, None, 3, 4]
        for n in range(number):
            assert held(store, own(kit, f"n{n}", 1)[0], session=f"n{n}") == [n]
        assert held(store, own(kit, f"n{number}", 1)[0], session=f"n{number}") == [None]


def test_a_claim_survives_when_its_frame_is_moved_behind_it(kit: Any, open_store: Any) -> None:
    size = own(kit, "a", 1)[1].size_bytes + RECORD_ROOM_BYTES
    store = open_store(max_bytes=3 * size, segment_bytes=size)
    store.put([own(kit, "a", 1), run(kit, 1)], "a", ACME, 5.0)
    store.put([own(kit, "b", 1, 2), run(kit, 1)], "b", ACME, 5.0)  # the claim is in a later segment
    store.delete([own(kit, "a", 1)[0], run(kit, 1)[0]], "a", ACME, 5.0)
    for generation in range(2, 12):  # forces rewriting
        store.put([own(kit, "b", generation, generation)], "b", ACME, 5.0)
        store.delete([own(kit, "b", generation - 1)[0]], "b", ACME, 5.0)
    assert store.num_moved_bytes > 0
    store = open_store(max_bytes=3 * size, segment_bytes=size)
    assert held(store, run(kit, 1)[0], own(kit, "b", 11)[0], session="b") == [1, 11]
    assert not store._index.unclaimed
    store.delete([run(kit, 1)[0]], "b", ACME, 5.0)
    assert list(open_store()._index.unclaimed) == [(ACME, "", run(kit, 1)[0])]


def test_a_segment_cut_at_each_length_gives_whole_frames_or_misses(
    kit: Any, open_store: Any, tmp_path: Path
) -> None:
    store = open_store()
    store.put([run(kit, 1), own(kit, "a", 1, 7), run(kit, 2)], "a", ACME, 5.0)
    store.close()
    path = tmp_path / "kv" / "segment-00000001.kv"
    whole = path.read_bytes()
    keys = [run(kit, 1)[0], own(kit, "a", 1)[0], run(kit, 2)[0]]
    seen = set()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        found = held(open_store(), *keys)
        seen.add(tuple(found))
        assert found == [1, 7, 2][: sum(f is not None for f in found)] + [None] * found.count(None)
    assert seen == {(None,) * 3, (1, None, None), (1, 7, None), (1, 7, 2)}
    path.write_bytes(whole[:-3])
    store = open_store()  # the torn record is written over, and nothing before it is lost
    store.put([run(kit, 3)], "a", ACME, 5.0)
    assert held(open_store(), *keys, run(kit, 3)[0]) == [1, 7, None, 3]


def test_files_that_shrink_or_go_while_the_store_is_open_are_misses(
    kit: Any, open_store: Any, tmp_path: Path
) -> None:
    store = open_store()
    store.put([run(kit, 1), own(kit, "a", 1, 7)], "a", ACME, 5.0)
    path = tmp_path / "kv" / "segment-00000001.kv"
    os.truncate(path, path.stat().st_size - 1)
    assert held(store, run(kit, 1)[0], own(kit, "a", 1)[0]) == [1, None]
    path.unlink()
    store.put([own(kit, "a", 2, 8)], "a", ACME, 5.0)
    assert held(store, own(kit, "a", 2)[0]) == [8]  # the open file outlives its name
    assert held(open_store(), own(kit, "a", 2)[0]) == [None]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_is_full_or_broken_is_a_typed_error_and_loses_nothing(
    kit: Any, open_store: Any, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    store = open_store()
    store.put([run(kit, 1), own(kit, "a", 1, 7)], "a", ACME, 5.0)
    real = disk_segment.write_at
    left = [1]

    def failing(descriptor: int, parts: Any, at: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(code, os.strerror(code))
        return real(descriptor, [bytes(parts[0])[:5]], at)  # and a short write before it

    monkeypatch.setattr(disk_segment, "write_at", failing)
    with pytest.raises(StoreFull if code != errno.EIO else StoreUnavailable, match="disk"):
        store.put([run(kit, 2), own(kit, "a", 2, 8)], "a", ACME, 5.0)
    monkeypatch.setattr(disk_segment, "write_at", real)
    assert held(store, run(kit, 1)[0], own(kit, "a", 1)[0], own(kit, "a", 2)[0]) == [1, 7, None]
    store.put([run(kit, 2), own(kit, "a", 2, 9)], "a", ACME, 5.0)
    for reopened in (False, True):
        store = open_store() if reopened else store
        keys = [run(kit, 1)[0], run(kit, 2)[0], own(kit, "a", 1)[0], own(kit, "a", 2)[0]]
        assert held(store, *keys) == [1, 2, 7, 9]


def test_one_process_a_directory_and_no_links(kit: Any, open_store: Any, tmp_path: Path) -> None:
    store = open_store()
    with pytest.raises(StoreUnavailable, match="another process holds"):
        DiskStore(DiskConfig(tmp_path / "kv"))
    store.put([own(kit, "a", 1)], "a", ACME, 5.0)
    path = tmp_path / "kv" / "segment-00000001.kv"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    store.close()
    outside = tmp_path / "outside"
    path.rename(outside)
    path.symlink_to(outside)
    (tmp_path / "kv" / "notes.txt").write_text("not ours")
    assert held(open_store(), own(kit, "a", 1)[0]) == [None]
    assert (tmp_path / "kv" / "notes.txt").read_text() == "not ours"
    open_store().close()
    (tmp_path / "kv" / "lock").unlink()
    (tmp_path / "kv" / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreUnavailable):
        DiskStore(DiskConfig(tmp_path / "kv"))
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(InvalidInput, match="segment_bytes is 0"):
        DiskStore(DiskConfig(tmp_path / "new", segment_bytes=0))


def test_a_deadline_ends_a_put_and_a_closed_store_says_so(kit: Any, open_store: Any) -> None:
    store = open_store()
    with pytest.raises(StoreTimeout):
        store.put([own(kit, "a", 1)], "a", ACME, 0.0)
    assert held(store, own(kit, "a", 1)[0]) == [None]
    assert store.statistics().failures == 1
    store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        store.get([own(kit, "a", 1)[0]], "a", ACME, 1.0)


def test_random_use_with_restarts_equals_a_dictionary(kit: Any, open_store: Any) -> None:
    size = own(kit, "a", 1)[1].size_bytes + RECORD_ROOM_BYTES
    options = {"max_bytes": 60 * size, "segment_bytes": 3 * size}
    store = open_store(**options)
    draw = random.Random(5)
    private: dict[str, tuple[int, int]] = {}
    claims: dict[int, set[str]] = {}
    generation = 0
    for step in range(1500):
        session = f"s{draw.randrange(8)}"
        kind = draw.random()
        if kind < 0.5:
            generation += 1
            numbers = draw.sample(range(1, 12), 2)
            fill = draw.randrange(1, 250)
            frames = [*(run(kit, n) for n in numbers), own(kit, session, generation, fill)]
            store.put(frames, session, ACME, 5.0)
            if session in private:
                store.delete([own(kit, session, private[session][0])[0]], session, ACME, 5.0)
            private[session] = (generation, fill)
            for n in numbers:
                claims.setdefault(n, set()).add(session)
        elif kind < 0.75:
            n = draw.randrange(1, 12)
            store.delete([run(kit, n)[0]], session, ACME, 5.0)
            claims.get(n, set()).discard(session)
        elif kind < 0.97:
            if session in private:
                at, fill = private[session]
                assert held(store, own(kit, session, at)[0], session=session) == [fill]
        else:
            store = open_store(**options)
        for n, sessions in claims.items():
            if sessions:
                assert held(store, run(kit, n)[0]) == [n], step
    live = sum(entry.frame.record_bytes + sum(c.record_bytes for c in entry.claims.values())
               for entry in store._index.entries.values())  # fmt: skip
    assert sum(segment.live_bytes for segment in store._segments.values()) == live
    assert {s for (_, s, _), e in store._index.entries.items() if s} == set(private)
