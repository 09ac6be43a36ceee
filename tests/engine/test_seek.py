"""What no manifest names is found by its content: demoted runs, other sessions' runs, runs of an earlier process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_harness import EIGHT, TENANT, EngineHarness, first_turn, prompt

from moorage.engine import Namespace, TierConfig
from moorage.engine import loading as loading_module
from moorage.prefix_cache.errors import StoreUnavailable
from moorage.prefix_cache.host_store import HostStore

Start = Callable[..., EngineHarness]
RUN = 256
"""Tokens of a run of the demo model: 16 blocks of 16."""


def test_an_idle_session_that_gave_way_comes_back_from_host_memory(start_engine: Start) -> None:
    """The pool holds one of the two: nobody parked, so what eviction took must have been kept."""
    engine = start_engine(num_blocks=60)
    log = first_turn(engine, 700, 1, "one")
    first_turn(engine, 700, 2, "two")
    before = engine.engine.statistics().tokens_forwarded
    back = engine.run("one", log, num_known=707, sampling=EIGHT)
    forwarded = engine.engine.statistics().tokens_forwarded - before - 7  # decoding
    assert back.sources is not None
    assert back.sources.host > 0  # what the other turn did not need is on the device still
    assert back.sources.host + back.sources.device == 2 * RUN
    assert back.sources.recomputed == 707 - 2 * RUN
    assert "device memory was short" in back.sources.recomputed_reason
    assert forwarded == 708 - 2 * RUN
    alone = start_engine(num_blocks=200)
    assert back.token_ids == alone.run("one", log, sampling=EIGHT).token_ids


def test_without_demotion_it_is_computed_again(start_engine: Start) -> None:
    engine = start_engine(num_blocks=60, tiers=TierConfig(demote=False))
    log = first_turn(engine, 700, 1, "one")
    first_turn(engine, 700, 2, "two")
    back = engine.run("one", log, num_known=707, sampling=EIGHT)
    assert back.sources is not None and back.sources.host == 0
    assert engine.engine.statistics().runs_demoted == 0


def test_a_preempted_turn_loses_at_most_a_run_and_its_tail(start_engine: Start) -> None:
    """Two turns that do not fit together: the younger gives way in mid-decode and goes on where it was."""
    many = EIGHT.__class__(max_tokens=40, ignore_eos=True)
    alone = start_engine(num_blocks=200)
    expected = [alone.run(f"s{n}", prompt(520, n), sampling=many).token_ids for n in (1, 2)]
    engine = start_engine(num_blocks=68)  # 2 * 33 blocks of prompt, 3 short of both answers
    requests = [engine.submit(f"s{n}", prompt(520, n), sampling=many) for n in (1, 2)]
    outcomes = [engine.finish(request) for request in requests]
    assert [outcome.token_ids for outcome in outcomes] == expected
    statistics = engine.engine.statistics()
    assert statistics.num_preempted > 0
    again = statistics.tokens_forwarded - 2 * (520 + 39)
    assert again <= statistics.num_preempted * (RUN + 48)


def test_a_new_session_finds_the_shared_prompt_that_another_parked(start_engine: Start) -> None:
    engine = start_engine(num_blocks=200)
    first_turn(engine, 3 * RUN + 40, 5, "first")
    engine.park("first")
    shared = prompt(3 * RUN + 40, 5)[: 3 * RUN]
    second = engine.run("second", shared + prompt(50, 6), sampling=EIGHT)
    assert second.sources is not None
    assert (second.sources.host, second.sources.device, second.sources.new) == (3 * RUN, 0, 50)
    assert second.forwarded_to_first > 0
    other = engine.run(
        "third", shared + prompt(50, 6), namespace=Namespace("tenant-b", "default"), sampling=EIGHT
    )
    assert other.sources is not None and other.sources.new == 3 * RUN + 50
    assert other.token_ids == second.token_ids


def test_runs_on_disk_outlive_the_process_without_any_manifest(
    start_engine: Start, tmp_path: Path
) -> None:
    tiers = TierConfig(disk_dir=tmp_path, host_bytes=0)
    engine = start_engine(num_blocks=200, tiers=tiers)
    log = first_turn(engine, 3 * RUN, 5, "first")
    assert engine.park("first").tier == "disk"
    engine.close()
    engine = start_engine(num_blocks=200, tiers=tiers)
    found = engine.run("other", log, sampling=EIGHT)
    assert found.sources is not None and found.sources.disk == 3 * RUN


class CountingStore(HostStore):
    """Counts reads of frames, which wait for a gate; can be away."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.num_read = 0
        self.away = False

    def get(self, keys: Any, *arguments: Any) -> Any:
        self.num_read += len(keys)
        self.entered.set()
        assert self.gate.wait(30.0)
        return super().get(keys, *arguments)

    def contains(self, *arguments: Any) -> Any:
        if self.away:
            raise StoreUnavailable("away")
        return super().contains(*arguments)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> CountingStore:
    made = CountingStore(1 << 30)
    monkeypatch.setattr(loading_module, "HostStore", lambda max_bytes: made)
    return made


def test_one_read_serves_all_who_wait_for_the_same_prefix(
    start_engine: Start, store: CountingStore
) -> None:
    engine = start_engine(num_blocks=400)
    first_turn(engine, 4 * RUN + 40, 5, "first")
    engine.park("first")
    shared = prompt(4 * RUN + 40, 5)[: 4 * RUN]
    store.gate.clear()
    store.entered.clear()
    requests = [
        engine.submit(f"s{n}", shared + prompt(20, 10 + n), sampling=EIGHT) for n in range(6)
    ]
    assert store.entered.wait(30.0)
    elsewhere = engine.run("apart", prompt(30, 50), sampling=EIGHT)  # nobody else waits
    assert len(elsewhere.token_ids) == 8
    store.gate.set()
    sources = [engine.finish(request).sources for request in requests]
    assert store.num_read == 4
    assert sorted((s.host, s.device, s.new) for s in sources if s) == [
        *[(0, 4 * RUN, 20)] * 5,
        (4 * RUN, 0, 20),
    ]


def test_who_waits_for_a_load_that_is_given_up_loads_itself(
    start_engine: Start, store: CountingStore
) -> None:
    engine = start_engine(num_blocks=400)
    first_turn(engine, 2 * RUN + 40, 5, "first")
    engine.park("first")
    shared = prompt(2 * RUN + 40, 5)[: 2 * RUN]
    store.gate.clear()
    store.entered.clear()
    one = engine.submit("one", shared + prompt(20, 1), sampling=EIGHT)
    two = engine.submit("two", shared + prompt(20, 2), sampling=EIGHT)
    assert store.entered.wait(30.0)
    engine.abort(one)
    store.gate.set()
    second = engine.finish(two)
    assert second.sources is not None
    assert second.sources.host + second.sources.device == 2 * RUN
    assert second.sources.new == 20


def test_a_tier_that_cannot_be_asked_has_nothing(start_engine: Start, store: CountingStore) -> None:
    engine = start_engine(num_blocks=200)
    first_turn(engine, 2 * RUN, 5, "first")
    engine.park("first")
    store.away = True
    second = engine.run("second", prompt(2 * RUN, 5) + prompt(20, 1), sampling=EIGHT)
    assert second.sources is not None and second.sources.new == 2 * RUN + 20
    assert engine.inspect().in_use_blocks <= 2  # what was taken for the load went back


def test_another_sessions_damaged_run_is_a_miss(start_engine: Start, store: CountingStore) -> None:
    engine = start_engine(num_blocks=200)
    first_turn(engine, 3 * RUN, 5, "first")
    engine.park("first")
    shared = [slot for slot in store._entries if slot[2].shared]
    entry = store._entries[shared[1]]
    entry.data = memoryview(bytes(entry.data[:-1]) + bytes([entry.data[-1] ^ 1]))
    second = engine.run("second", prompt(3 * RUN, 5) + prompt(20, 1), sampling=EIGHT)
    assert second.sources is not None
    assert (second.sources.host, second.sources.new) == (RUN, 2 * RUN + 20)
    cold = start_engine(num_blocks=200, tiers=TierConfig(host_bytes=0))
    assert second.token_ids == cold.run("x", prompt(3 * RUN, 5) + prompt(20, 1)).token_ids
    assert TENANT.tenant == "tenant-a"
