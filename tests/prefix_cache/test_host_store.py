from __future__ import annotations

from typing import Any

import pytest

from moorage.prefix_cache.block import BlockHash, Namespace
from moorage.prefix_cache.errors import InvalidSessionId, StoreFull, StoreUnavailable
from moorage.prefix_cache.failpoints import Failpoint, installed
from moorage.prefix_cache.frame import Frame, FrameKey, encode_frame, frame_header, private_key
from moorage.prefix_cache.frame import run_key as key_of_run
from moorage.prefix_cache.host_store import HostStore

ACME, RIVAL = Namespace("acme", "prod"), Namespace("rival", "prod")


def frame(kit: Any, key: FrameKey, fill: int = 0, num_tokens: int = 8) -> tuple[FrameKey, Frame]:
    header = frame_header(
        key=key,
        geometry=kit.geometry,
        namespace=ACME,
        fingerprint=b"model-1",
        lineage_root=b"R" * 16,
        parent_hash=b"P" * 16,
        last_hash=b"L" * 16,
        token_digest=b"T" * 16,
        first_block=0,
        num_tokens=num_tokens,
        generation=1,
    )
    return key, encode_frame(header, [bytearray([fill]) * header.payload_bytes])


def run(kit: Any, name: int) -> tuple[FrameKey, Frame]:
    return frame(kit, key_of_run(BlockHash(bytes([name]) * 16), kit.geometry), name)


def own(kit: Any, session: str, generation: int, fill: int = 0) -> tuple[FrameKey, Frame]:
    return frame(kit, private_key(session, generation, 0, kit.geometry), fill)


def test_it_owns_its_bytes_and_shares_runs(kit: Any) -> None:
    store = HostStore(1 << 20)
    staging = bytearray(b"\5" * 256)
    key, _ = run(kit, 1)
    one = encode_frame(run(kit, 1)[1].header, [staging])
    whole = one.join()
    store.put([(key, one), own(kit, "a", 1)], "a", ACME, 1.0)
    staging[:] = bytes(256)
    store.put([run(kit, 1), own(kit, "b", 1)], "b", ACME, 1.0)
    assert store.get([key], "b", ACME, 1.0) == [whole]
    s = store.statistics()
    assert (s.frames, s.puts, s.hits, s.misses) == (3, 3, 1, 0)
    assert s.bytes == s.bytes_in == len(whole) + own(kit, "a", 1)[1].size_bytes * 2


def test_namespaces_and_sessions_are_walls(kit: Any) -> None:
    store = HostStore(1 << 20)
    shared, private = run(kit, 1), own(kit, "a", 1)
    store.put([shared, private], "a", ACME, 1.0)
    keys = [shared[0], private[0]]
    assert store.contains(keys, "a", ACME, 1.0) == [True, True]
    assert store.contains(keys, "b", ACME, 1.0) == [True, False]
    assert store.contains(keys, "a", RIVAL, 1.0) == [False, False]
    assert store.get(keys, "a", RIVAL, 1.0) == [None, None]
    store.delete(keys, "a", RIVAL, 1.0)
    store.drop(keys, "a", RIVAL, 1.0)
    assert store.contains(keys, "a", ACME, 1.0) == [True, True]


def test_unclaimed_runs_go_first_and_the_least_recently_used_of_them(kit: Any) -> None:
    size = run(kit, 1)[1].size_bytes
    store = HostStore(3 * size)
    for name, session in ((1, "a"), (2, "b"), (3, "c")):
        store.put([run(kit, name)], session, ACME, 1.0)
    runs = [run(kit, name)[0] for name in (1, 2, 3)]
    store.delete([runs[0]], "a", ACME, 1.0)
    store.delete([runs[1]], "b", ACME, 1.0)
    assert store.contains(runs, "a", ACME, 1.0) == [True, True, True]
    store.get([runs[0]], "x", ACME, 1.0)  # run 1 is used again: run 2 is the older now
    store.put([run(kit, 4)], "d", ACME, 1.0)
    assert store.contains(runs, "a", ACME, 1.0) == [True, False, True]
    store.put([run(kit, 5)], "d", ACME, 1.0)
    assert store.contains(runs, "a", ACME, 1.0) == [False, False, True]
    with pytest.raises(StoreFull, match="bytes short"):
        store.put([run(kit, 6)], "d", ACME, 1.0)
    assert store.contains(runs, "a", ACME, 1.0) == [False, False, True]


def test_a_put_may_not_evict_what_it_needs_itself(kit: Any) -> None:
    size = run(kit, 1)[1].size_bytes
    store = HostStore(2 * size)
    store.put([run(kit, 1), run(kit, 2)], "a", ACME, 1.0)
    store.delete([run(kit, 1)[0], run(kit, 2)[0]], "a", ACME, 1.0)
    store.put([run(kit, 1), run(kit, 3)], "b", ACME, 1.0)
    assert store.contains([run(kit, n)[0] for n in (1, 2, 3)], "b", ACME, 1.0) == [
        True,
        False,
        True,
    ]


def test_full_refuses_whole_and_changes_nothing(kit: Any) -> None:
    size = run(kit, 1)[1].size_bytes
    store = HostStore(3 * size)
    store.put([run(kit, 1), run(kit, 2)], "a", ACME, 1.0)
    before = store.statistics()
    with pytest.raises(StoreFull):
        store.put([run(kit, 1), run(kit, 3), run(kit, 4)], "b", ACME, 1.0)
    after = store.statistics()
    assert (after.frames, after.bytes, after.puts) == (before.frames, before.bytes, before.puts)
    assert after.failures == 1
    assert store.contains([run(kit, 3)[0]], "b", ACME, 1.0) == [False]
    with pytest.raises(StoreFull):
        HostStore(0).put([run(kit, 1)], "a", ACME, 1.0)


@pytest.mark.parametrize("failpoint", [Failpoint.HOST_BEFORE_FRAME, Failpoint.HOST_AFTER_FRAME])
@pytest.mark.parametrize("at", [0, 1])
def test_a_put_that_is_cut_off_leaves_the_store_as_it_was(
    kit: Any, failpoint: Failpoint, at: int
) -> None:
    store = HostStore(1 << 20)
    store.put([run(kit, 1), own(kit, "a", 1, fill=1)], "a", ACME, 1.0)
    old = store.get([own(kit, "a", 1)[0]], "a", ACME, 1.0)
    before = store.statistics()
    hits = [0]

    def cut(name: Failpoint) -> None:
        if name is failpoint:
            hits[0] += 1
            if hits[0] == at + 1:
                raise MemoryError("cut off")

    with installed(cut), pytest.raises(MemoryError):
        store.put([run(kit, 1), run(kit, 2), own(kit, "a", 1, fill=9)], "a", ACME, 1.0)
    after = store.statistics()
    assert (after.frames, after.bytes) == (before.frames, before.bytes)
    assert store.get([own(kit, "a", 1)[0]], "a", ACME, 1.0) == old
    store.delete([run(kit, 1)[0], own(kit, "a", 1)[0]], "a", ACME, 1.0)
    assert store.statistics().frames == 1  # run 1, unclaimed


def test_drop_removes_whoever_claims_it(kit: Any) -> None:
    store = HostStore(1 << 20)
    store.put([run(kit, 1)], "a", ACME, 1.0)
    store.put([run(kit, 1)], "b", ACME, 1.0)
    store.drop([run(kit, 1)[0], run(kit, 2)[0]], "b", ACME, 1.0)
    s = store.statistics()
    assert (s.frames, s.bytes) == (0, 0)


def test_closed_is_closed(kit: Any) -> None:
    store = HostStore(1 << 20)
    store.put([run(kit, 1)], "a", ACME, 1.0)
    store.close()
    with pytest.raises(StoreUnavailable):
        store.get([run(kit, 1)[0]], "a", ACME, 1.0)
    assert store.statistics().bytes == 0


@pytest.mark.parametrize(
    "session_id",
    ["", "../../etc/x", "a/b", "a\\b", "x" * 129, "x" * 10_000, "a\n", "{slot}", "a:b", "ä", "a b"],
)
def test_d16_session_ids_that_could_reach_elsewhere_are_refused(kit: Any, session_id: str) -> None:
    store = HostStore(1 << 20)
    key = run(kit, 1)[0]
    for call in (store.get, store.contains, store.delete, store.drop):
        with pytest.raises(InvalidSessionId) as caught:
            call([key], session_id, ACME, 1.0)
        assert len(str(caught.value)) < 200
    with pytest.raises(InvalidSessionId):
        store.put([run(kit, 1)], session_id, ACME, 1.0)
    assert store.statistics().frames == 0
