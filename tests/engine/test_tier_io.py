"""Tier workers read and write device blocks in place: what becomes of the session meanwhile must not matter."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from engine_harness import EIGHT, TENANT, EngineHarness, first_turn, prompt

from moorage.engine import (
    FinishReason,
    Park,
    ParkCommitted,
    ParkDone,
    ParkPrepared,
    Release,
    Restore,
    RestoreDone,
    SamplingParams,
    pack_tokens,
)
from moorage.engine import loading as loading_module
from moorage.engine.kv_cache import KVCache, block_views
from moorage.prefix_cache.block import Lineage
from moorage.prefix_cache.frame import Geometry
from moorage.prefix_cache.host_store import HostStore, _Entry
from moorage.prefix_cache.load import LoadJob, run_load
from moorage.prefix_cache.park import ParkJob, run_park

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


def damage(store: HostStore, manifest: bytes, kind: str, draw: random.Random) -> bytes:
    """Harm one stored frame, or the manifest that is returned."""
    entries = list(store._entries.values())
    victim = draw.choice(entries)
    match kind:
        case "flip":
            at = draw.randrange(len(victim.data))
            flipped = victim.data[at] ^ 1 << draw.randrange(8)
            data = bytes(victim.data)
            victim.data = memoryview(data[:at] + bytes([flipped]) + data[at + 1 :])
        case "cut":
            victim.data = victim.data[: draw.randrange(len(victim.data))]
        case "swap":
            other = draw.choice([entry for entry in entries if entry is not victim])
            victim.data, other.data = other.data, victim.data
        case "lose":
            del store._entries[draw.choice(list(store._entries))]
        case _:
            at = draw.randrange(len(manifest))
            return (
                manifest[:at] + bytes([manifest[at] ^ 1 << draw.randrange(8)]) + manifest[at + 1 :]
            )
    return manifest


def test_fifty_kinds_of_damage_change_no_token(start_engine: Start, store: GatedStore) -> None:
    engine = start_engine(num_blocks=48)
    log = first_turn(engine, 600, 11)
    expected = start_engine().run("s", log, sampling=EIGHT).token_ids
    whole = engine.park("s", 1).manifest
    engine.run("filler", prompt(760, 99), sampling=SamplingParams(max_tokens=1))
    engine.engine.send(Release("filler", TENANT, None))
    recomputed = 0
    for seed in range(50):
        draw = random.Random(seed)
        kept = {slot: entry.data for slot, entry in store._entries.items()}
        manifest = damage(store, whole, ("flip", "cut", "swap", "lose", "manifest")[seed % 5], draw)
        session = f"s{seed}"
        back = engine.run(session, log, num_known=607, manifest=manifest, sampling=EIGHT)
        assert back.token_ids == expected, seed
        assert back.sources is not None
        assert back.sources.recomputed > 0
        assert back.sources.recomputed_reason
        recomputed += back.sources.recomputed
        engine.engine.send(Release(session, TENANT, None))
        engine.inspect()
        filler = prompt(760, seed)  # every block of the pool: nothing is found on the device
        engine.run("filler", filler, sampling=SamplingParams(max_tokens=1))
        engine.engine.send(Release("filler", TENANT, None))
        store._entries = {slot: _Entry(data, {"s"}) for slot, data in kept.items()}
    assert 0 < recomputed < 50 * 607


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_d11_special_values_come_back_bit_by_bit(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    geometry = Geometry(2, 1, 4, 8, name, 2)
    values = torch.tensor([1.0, -0.0, float("inf"), float("nan"), 1e-40, 3.0e38]).to(dtype)
    pool = values.repeat(3 * 2 * 2 * 4 * 8)[: 3 * 2 * 2 * 4 * 8].reshape(3, 2, 2, 1, 4, 8).clone()
    views = block_views(pool)
    assert [len(view) for view in views] == [geometry.block_bytes] * 3
    assert geometry.block_bytes == pool[0].numel() * dtype.itemsize
    tokens = pack_tokens(list(range(12)))
    job = ParkJob("s", 1, Lineage(TENANT, b"f"), tokens, (), views, 12, geometry, "host", (), 5.0)
    host = HostStore(1 << 20)
    done = run_park(job, {"host": host}, float("inf"))
    assert done.manifest is not None
    back = torch.zeros_like(pool)
    load = LoadJob(done.manifest, 0, tokens, block_views(back), geometry, 5.0)
    assert run_load(load, {"host": host}, float("inf")).miss is None
    assert torch.equal(back.view(torch.uint8), pool.view(torch.uint8))


def test_g12_a_store_that_is_stuck_slows_nobody_and_piles_up_no_copies(
    start_engine: Start, store: GatedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_engine(num_blocks=400)
    for number in range(10):
        first_turn(engine, 300, 100 + number, f"parked{number}")
    copied: list[int] = []
    gather = KVCache.gather

    def counting(self: KVCache, block_ids: Sequence[int]) -> torch.Tensor:
        copied.append(len(block_ids))
        return gather(self, block_ids)

    monkeypatch.setattr(KVCache, "gather", counting)
    store.shut()
    for number in range(10):
        engine.engine.send(Park(f"parked{number}", 1, "host"))
    assert store.entered.wait(30.0)
    going = [
        engine.submit(
            f"s{n}", prompt(40, n), sampling=SamplingParams(max_tokens=60, ignore_eos=True)
        )
        for n in range(3)
    ]
    for request in going:  # to their ends, while not one park is done
        assert len(engine.finish(request).token_ids) == 60
    assert copied == [1] * 10  # the tails; full blocks wait where they are
    store.gate.set()
    for _ in range(10):
        prepared = engine.event(ParkPrepared)
        assert isinstance(prepared, ParkPrepared)
        engine.engine.send(ParkCommitted(prepared.session_id, 1))
        engine.event(ParkDone)
    seen = engine.inspect()
    assert seen.locked_blocks + seen.in_use_blocks == 3 * 7  # 99 tokens each
