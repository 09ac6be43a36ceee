"""Tier workers read and write device blocks in place: what becomes of the session meanwhile must not matter."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_harness import EIGHT, TENANT, EngineHarness, first_turn, prompt

from moorage.engine import FinishReason, Park, Release, Restore, RestoreDone, pack_tokens
from moorage.engine import loading as loading_module
from moorage.prefix_cache.host_store import HostStore

Start = Callable[..., EngineHarness]


class GatedStore(HostStore):
    """A host store whose calls wait for a gate."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def _wait(self) -> None:
        self.entered.set()
        assert self.gate.wait(30.0)

    def put(self, *arguments: Any) -> None:
        self._wait()
        super().put(*arguments)

    def get(self, *arguments: Any) -> Any:
        found = super().get(*arguments)
        self._wait()  # the bytes are known; what is left is the copy into the device's blocks
        return found

    def shut(self) -> None:
        self.gate.clear()
        self.entered.clear()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[GatedStore]:
    made = GatedStore(1 << 30)
    monkeypatch.setattr(loading_module, "HostStore", lambda max_bytes: made)
    yield made
    made.gate.set()


def test_a_session_closed_while_it_parks_leaves_whole_frames(
    start_engine: Start, store: GatedStore
) -> None:
    engine = start_engine(num_blocks=64)
    log = first_turn(engine, 700, 1)
    store.shut()
    engine.engine.send(Park("s", 1, "host"))
    assert store.entered.wait(30.0)
    engine.engine.send(Release("s", TENANT, None))
    assert engine.inspect().locked_blocks == 44  # the worker's own hold: 707 tokens, full blocks
    engine.run("other", prompt(300, 2), sampling=EIGHT)  # takes every block that is free
    store.gate.set()
    log = log[:-1] + engine.run("again", log[:-1], sampling=EIGHT).token_ids
    parked = engine.park("again", 1, "host")  # finds the runs that the closed session wrote
    back = engine.run("again", log, num_known=714, manifest=parked.manifest, sampling=EIGHT)
    assert back.sources is not None and (back.sources.host, back.sources.recomputed) == (714, 0)
    assert back.token_ids == start_engine(num_blocks=64).run("s", log, sampling=EIGHT).token_ids
    engine.engine.send(Release("again", TENANT, parked.manifest))
    engine.engine.send(Release("other", TENANT, None))
    assert engine.inspect().locked_blocks == 0


def test_a_turn_aborted_while_its_kv_is_read_lets_no_worker_write_into_others_blocks(
    start_engine: Start, store: GatedStore
) -> None:
    engine = start_engine(num_blocks=64)
    log = first_turn(engine, 700, 3)
    manifest = engine.park("s").manifest
    store.shut()
    request = engine.submit("s", log, num_known=707, manifest=manifest, sampling=EIGHT)
    assert store.entered.wait(30.0)
    assert engine.abort(request).finish_reason is FinishReason.CANCELLED
    assert engine.inspect().in_use_blocks == 45  # still the load's
    other = prompt(400, 4)  # needs some of those blocks, and waits for them
    going = engine.submit("other", other, sampling=EIGHT)
    assert engine.inspect().in_use_blocks == 45
    assert engine.inspect().locked_blocks == 0
    assert engine.outcomes[going].token_ids == []
    store.gate.set()
    tokens = engine.finish(going).token_ids
    assert tokens == start_engine(num_blocks=64).run("o", other, sampling=EIGHT).token_ids
    back = engine.run("s", log, num_known=707, manifest=manifest, sampling=EIGHT)
    assert back.sources is not None and back.sources.recomputed == 0
    assert back.token_ids == start_engine(num_blocks=64).run("s", log, sampling=EIGHT).token_ids


def test_another_log_while_kv_is_read_is_not_taken_for_the_old_one(
    start_engine: Start, store: GatedStore
) -> None:
    engine = start_engine()
    log = first_turn(engine, 700, 5)
    manifest = engine.park("s").manifest
    engine.run("keeper", log[:65], sampling=EIGHT)  # so that the first blocks are on the device
    store.shut()
    engine.engine.send(Restore("s", TENANT, pack_tokens(log), manifest))
    assert store.entered.wait(30.0)
    changed = log[:100] + prompt(600, 6)
    request = engine.submit("s", changed, num_known=100, manifest=manifest, sampling=EIGHT)
    refused = engine.event(RestoreDone)
    assert isinstance(refused, RestoreDone) and refused.error is not None
    store.gate.set()
    tokens = engine.finish(request).token_ids
    assert tokens == start_engine().run("s", changed, sampling=EIGHT).token_ids


def test_a_load_that_finds_no_room_on_the_device_goes_through_staging_memory(
    start_engine: Start, store: GatedStore
) -> None:
    engine = start_engine(num_blocks=64)
    log = first_turn(engine, 700, 7)
    manifest = engine.park("s").manifest
    going = engine.submit("other", prompt(300, 8), sampling=EIGHT)
    engine.until_tokens(going, 1)
    request = engine.submit("s", log, num_known=707, manifest=manifest, sampling=EIGHT)
    tokens = engine.finish(request).token_ids
    engine.finish(going)
    assert tokens == start_engine(num_blocks=64).run("s", log, sampling=EIGHT).token_ids
