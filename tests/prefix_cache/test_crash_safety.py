"""Case D5: a park of version 2 is cut off after every single write; version 1, version 2 or a miss,
never a mix.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis_server import RedisServer

from moorage.prefix_cache.block import pack_tokens
from moorage.prefix_cache.disk_store import DiskConfig, DiskStore
from moorage.prefix_cache.failpoints import Failpoint, installed
from moorage.prefix_cache.host_store import HostStore
from moorage.prefix_cache.load import MissReason
from moorage.prefix_cache.parked_context import ParkedContext
from moorage.prefix_cache.redis_store import RedisConfig, RedisStore

ROOT = Path(__file__).parents[2]
OLD = pack_tokens(range(100, 122))  # two runs and a private piece of 6
NEW = OLD[: 18 * 4] + pack_tokens(range(500, 514))  # rewound to 18, then 32 tokens: four runs
NEW_TAIL = NEW + pack_tokens([1, 2, 3])


class CutOff(Exception):
    """What a failpoint raises here: no StoreError, so nothing may treat it as an expected fault."""


@pytest.fixture(params=["host", "disk", "redis"])
def one_tier(request: Any, tiers: Callable[..., Any], tmp_path: Path) -> Any:
    if request.param == "host":
        return tiers(HostStore(1 << 20)), "host"
    if request.param == "disk":
        return tiers(DiskStore(DiskConfig(tmp_path / "kv", segment_bytes=2000))), "disk"
    url = request.getfixturevalue("redis_url")
    return tiers(RedisStore(RedisConfig(url, pipeline_bytes=1))), "redis"


def versions(number: int) -> tuple[bytes, bytes]:
    """Logs of versions 1 and 2 with a first token of their own, so that no round finds another's
    runs.
    """
    first = pack_tokens([number])
    return first + OLD[4:], first + NEW_TAIL[4:]


def count_hits(tiers: Any, tier: str) -> int:
    """Failpoints that a park of version 2 passes when version 1 is stored."""
    old, new = versions(999)
    tiers.park("probe", 1, old, tier)
    hits: list[Failpoint] = []
    with installed(hits.append):
        assert tiers.park("probe", 2, new, tier).error is None
    return len(hits)


def assert_whole_or_miss(tiers: Any, kit: Any, manifest: Any, log: bytes, salt: bytes) -> int:
    """Loads, checks that every loaded byte is `log`'s own; returns the number of tokens."""
    loaded, kv = tiers.load(manifest, log)
    whole = kit.used(kit.kv(log, len(log) // 4, salt=salt), len(log) // 4)
    num_bytes = -(-loaded.num_tokens // 4) * 128
    assert kv == whole[:num_bytes] + bytes(len(kv) - num_bytes)
    assert (loaded.miss is None) == (loaded.num_tokens == len(log) // 4)
    return int(loaded.num_tokens)


def test_d5_a_fault_after_every_single_write(one_tier: Any, kit: Any) -> None:
    tiers, tier = one_tier
    hits = count_hits(tiers, tier)
    # Before and after the put, and each frame that is new: the two shared runs are there.
    assert hits == 2 + 2 * 3, tier
    for cut in range(hits):
        session = f"s{cut}"
        base, new = versions(cut)
        old_manifest = tiers.park(session, 1, base, tier).manifest
        left = [cut]

        def fault(name: Failpoint, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise CutOff(name)

        with installed(fault):
            done = tiers.park(session, 2, new, tier)
        assert done.manifest is None and "CutOff" in str(done.error)
        assert assert_whole_or_miss(tiers, kit, old_manifest, base, b"") == 22
        # A manifest that claims version 2 all the same (the session store committed, we lost
        # frames):
        complete = tiers.park("other", cut + 1, new, tier).manifest
        assert assert_whole_or_miss(tiers, kit, complete, new, b"") == 35
        assert assert_whole_or_miss(tiers, kit, old_manifest, base, b"") == 22


def test_d5_frames_written_over_by_the_same_generation_are_a_miss_not_a_mix(
    one_tier: Any, kit: Any
) -> None:
    tiers, tier = one_tier
    first = tiers.park("s1", 1, OLD, tier).manifest
    # A park that sessions never committed, then another of the same generation, with other KV in
    # its private frame.
    second = tiers.park("s1", 1, OLD, tier, salt=b"other numerics").manifest
    assert first.frames[2].key == second.frames[2].key
    loaded, kv = tiers.load(first, OLD)
    assert (loaded.num_tokens, loaded.miss) == (16, MissReason.DAMAGED)
    assert "not the one the manifest names" in loaded.miss_detail
    assert kv[: 16 * 32] == bytes(kit.kv(OLD, 16))


def test_d5_an_old_manifest_after_a_newer_park_is_whole(one_tier: Any, kit: Any) -> None:
    tiers, tier = one_tier
    old = tiers.park("s1", 1, OLD, tier).manifest
    new = tiers.park("s1", 2, NEW_TAIL, tier).manifest
    assert assert_whole_or_miss(tiers, kit, old, OLD, b"") == 22
    assert assert_whole_or_miss(tiers, kit, new, NEW_TAIL, b"") == 35


def test_c12_a_constant_hash_never_loads_another_prompt(
    one_tier: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def constant(parent: bytes, token_ids: Any, block_size: int) -> list[bytes]:
        return [b"\7" * 16] * (len(token_ids) // 4 // block_size)

    monkeypatch.setattr("moorage.prefix_cache.park.hash_chain", constant)
    tiers, tier = one_tier
    tiers.park("s1", 1, OLD[: 8 * 4], tier)
    other = pack_tokens(range(8))
    manifest = tiers.park("s2", 1, other, tier).manifest  # its run "exists" already
    loaded, kv = tiers.load(manifest, other)
    assert (loaded.num_tokens, loaded.miss) == (0, MissReason.OTHER_CONTENT)
    assert "token_digest" in loaded.miss_detail
    assert kv == bytes(len(kv))


CHILD = """
import os, queue, signal, sys
from moorage.prefix_cache.block import Lineage, Namespace, pack_tokens
from moorage.prefix_cache.disk_store import DiskConfig, DiskStore
from moorage.prefix_cache.failpoints import installed
from moorage.prefix_cache.frame import Geometry
from moorage.prefix_cache.redis_store import RedisConfig, RedisStore
from moorage.prefix_cache.tiers import ParkJob, TierWorkers

url, cut = sys.argv[1], int(sys.argv[2])
geometry = Geometry(2, 1, 4, 2, "float32", 2)
lineage = Lineage(Namespace("acme", "prod"), b"model-1")
done = queue.Queue()
workers = TierWorkers([RedisStore(RedisConfig(url, pipeline_bytes=1))], done.put, num_workers=1)

def park(generation, token_ids, fill):
    blocks = [bytearray([fill]) * geometry.block_bytes for _ in range(-(-len(token_ids) // 4))]
    workers.park(ParkJob("s1", generation, lineage, pack_tokens(token_ids), (), blocks,
                         len(token_ids), geometry, "redis", (), 10.0))
    return done.get(timeout=20).manifest

sys.stdout.buffer.write(park(1, range(22), 1).to_bytes())
sys.stdout.buffer.flush()
left = [cut]

def kill(name):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)

with installed(kill):
    park(2, [*range(18), *range(500, 517)], 2)
"""


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 4, 5])
def test_d5_a_process_killed_between_writes_leaves_the_old_version_whole(
    redis_url: str, redis_server: RedisServer, tiers: Callable[..., Any], cut: int
) -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHILD, redis_url, str(cut)],
        env=os.environ | {"PYTHONPATH": str(ROOT / ".src")},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()
    manifest = ParkedContext.from_bytes(child.stdout)
    one = tiers(RedisStore(RedisConfig(redis_url)))
    loaded, kv = one.load(manifest, pack_tokens(range(22)))
    assert (loaded.num_tokens, loaded.miss) == (22, None)
    assert set(kv) == {0, 1}  # 0 in the slots beyond the end
