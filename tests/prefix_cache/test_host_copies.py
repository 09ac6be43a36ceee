"""Host memory as a copy of what lives in a slower tier: asked first, never the truth, never in the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moorage.prefix_cache.block import pack_tokens
from moorage.prefix_cache.disk_store import DiskConfig, DiskStore
from moorage.prefix_cache.host_store import HostStore
from moorage.prefix_cache.tiers import TierWorkers

LOG = pack_tokens(range(100, 122))


@pytest.fixture
def both(tiers: Callable[..., Any], tmp_path: Path) -> Any:
    made = tiers(HostStore(1 << 20), DiskStore(DiskConfig(tmp_path / "kv")))
    made.workers.close(5.0)
    stores = [HostStore(1 << 20), DiskStore(DiskConfig(tmp_path / "kv"))]
    made.workers = TierWorkers(stores, made.done.put, num_workers=1, host_copies=True)
    return made


def reads(both: Any, tier: str) -> int:
    return int(both.workers.stores[tier].statistics().gets)


def test_what_is_parked_on_disk_is_read_from_host_memory(both: Any, kit: Any) -> None:
    manifest = both.park("s1", 1, LOG, "disk").manifest
    assert manifest.tiers == ("disk",)
    done, kv = both.load(manifest, LOG)
    assert (done.tokens_by_tier, done.miss) == ({"host": 22}, None)
    assert kv == kit.used(kit.kv(LOG, 22), 22)
    assert reads(both, "disk") == 0


def test_a_load_from_disk_leaves_copies_behind(both: Any, kit: Any) -> None:
    manifest = both.park("s1", 1, LOG, "disk").manifest
    host = both.workers.stores["host"]
    host.drop([ref.key for ref in manifest.frames[1:]], "s1", manifest.lineage.namespace, 1.0)
    done, kv = both.load(manifest, LOG)
    assert done.tokens_by_tier == {"host": 8, "disk": 14}
    assert kv == kit.used(kit.kv(LOG, 22), 22)
    assert both.load(manifest, LOG)[0].tokens_by_tier == {"host": 22}
    assert reads(both, "disk") == 2


def test_copies_give_way_to_what_lives_in_host_memory(both: Any, kit: Any) -> None:
    host = both.workers.stores["host"]
    manifest = both.park("s1", 1, LOG, "disk").manifest
    host.max_bytes = host.statistics().bytes
    other = pack_tokens(range(200, 222))
    own = both.park("s2", 1, other, "host").manifest  # needs the room of the copies
    assert own is not None
    assert (
        both.park("s3", 1, pack_tokens(range(300, 322)), "disk").error is None
    )  # no room: no copy
    assert both.load(own, other)[0].tokens_by_tier == {"host": 22}
    done, kv = both.load(manifest, LOG)
    assert (done.tokens_by_tier, done.miss) == ({"disk": 22}, None)
    assert kv == kit.used(kit.kv(LOG, 22), 22)
    assert host.statistics().bytes <= host.max_bytes


def test_a_copy_that_was_damaged_is_read_from_its_home(both: Any, kit: Any) -> None:
    manifest = both.park("s1", 1, LOG, "disk").manifest
    host = both.workers.stores["host"]
    for slot, entry in host._entries.items():
        if slot[2].shared:
            entry.data = memoryview(bytes(entry.data[:-1]) + bytes([entry.data[-1] ^ 1]))
    done, kv = both.load(manifest, LOG)
    assert (done.tokens_by_tier, done.miss) == ({"disk": 16, "host": 6}, None)
    assert kv == kit.used(kit.kv(LOG, 22), 22)
    assert both.load(manifest, LOG)[0].tokens_by_tier == {"host": 22}


def test_copies_of_a_private_frame_go_when_a_newer_one_comes(both: Any, kit: Any) -> None:
    host = both.workers.stores["host"]
    for generation in range(1, 30):
        manifest = both.park("s1", generation, LOG, "disk").manifest
        private = [slot for slot in host._entries if slot[1] == "s1"]
        assert [slot[2].parts[1] for slot in private] == [str(generation)]
    assert both.load(manifest, LOG)[0].tokens_by_tier == {"host": 22}
    assert host.statistics().frames == 3
