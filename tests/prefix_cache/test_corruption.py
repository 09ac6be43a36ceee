"""Every way in which stored bytes can be wrong is a typed miss, and no wrong byte reaches the device."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moorage.prefix_cache.block import Lineage, Namespace, pack_tokens
from moorage.prefix_cache.disk_store import DiskConfig, DiskStore
from moorage.prefix_cache.errors import ManifestMismatch
from moorage.prefix_cache.host_store import HostStore
from moorage.prefix_cache.load import LoadJob, MissReason, run_load
from moorage.prefix_cache.parked_context import ParkedContext
from moorage.prefix_cache.redis_store import RedisConfig, RedisStore

LOG = pack_tokens(range(100, 122))  # two runs of 8 and a private frame of 6
OTHER = pack_tokens(range(500, 522))
NAN = b"\xff\xff\xff\x7f"


class Stored:
    """One parked context in a store whose bytes a test may change at will."""

    def __init__(self, tiers: Any, kit: Any, tier: str) -> None:
        self.tiers, self.kit, self.tier = tiers, kit, tier
        self.manifest = tiers.park("s1", 1, LOG, tier).manifest
        self.store = tiers.workers.stores[tier]
        self.good = [
            bytes(data)
            for data in self.store.get(
                [ref.key for ref in self.manifest.frames], "s1", kit.lineage.namespace, 5.0
            )
        ]

    def load(self, frames: list[bytes | None], **changes: Any) -> tuple[Any, bytes]:
        """A load that reads these bytes instead; the destination is NaN before."""
        block_bytes = self.kit.geometry.block_bytes
        memory = bytearray(NAN * (6 * block_bytes // 4))
        job = LoadJob(
            manifest=changes.get("manifest", self.manifest),
            first_block=0,
            token_ids=LOG,
            blocks=[
                memoryview(memory)[at : at + block_bytes]
                for at in range(0, 6 * block_bytes, block_bytes)
            ],
            geometry=self.kit.geometry,
            deadline_s=10.0,
        )
        keys = [ref.key for ref in self.manifest.frames]

        class Other(HostStore):
            tier = self.tier  # type: ignore[assignment]

            def get(self, asked: Any, *rest: Any) -> Any:
                return [frames[keys.index(key)] for key in asked]

        done = run_load(job, {self.tier: Other(0)}, float("inf"))
        return done, bytes(memory)

    def assert_miss_at(self, frame: int, frames: list[bytes | None], **changes: Any) -> MissReason:
        """Everything before the frame arrived, nothing of it stays and nothing behind it was written."""
        done, memory = self.load(frames, **changes)
        ref = self.manifest.frames[frame]
        size = self.kit.geometry.block_bytes
        whole = self.kit.used(self.kit.kv(LOG, 22), 22)
        good = ref.first_block * size
        assert done.miss is not None
        assert done.num_tokens == ref.first_block * 4
        bad = good + ref.num_blocks * size
        assert memory[:good] == whole[:good]
        assert memory[good:bad] in (bytes(bad - good), NAN * ((bad - good) // 4))
        assert memory[bad:] == NAN * ((6 * size - bad) // 4)
        reason: MissReason = done.miss
        return reason


@pytest.fixture(params=["host", "disk", "redis"])
def stored(request: Any, tiers: Callable[..., Any], kit: Any, tmp_path: Path) -> Stored:
    match request.param:
        case "host":
            store: Any = HostStore(1 << 20)
        case "disk":
            store = DiskStore(DiskConfig(tmp_path / "kv"))
        case _:
            store = RedisStore(RedisConfig(request.getfixturevalue("redis_url")))
    return Stored(tiers(store), kit, request.param)


def test_what_was_stored_is_read_back_from_each_tier(stored: Stored) -> None:
    done, memory = stored.load(list(stored.good))
    assert (done.num_tokens, done.miss) == (22, None)
    assert memory == stored.kit.used(stored.kit.kv(LOG, 22), 22)


@pytest.mark.parametrize("frame", [0, 2])
def test_every_flipped_byte_of_a_frame_is_a_miss(stored: Stored, frame: int) -> None:
    if stored.tier != "host" and frame == 0:
        frame = 1
    draw = random.Random(frame)
    good = stored.good[frame]
    reasons = set()
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 1 << draw.randrange(8)
        frames: list[bytes | None] = list(stored.good)
        frames[frame] = bytes(bad)
        reasons.add(stored.assert_miss_at(frame, frames))
    assert reasons == {MissReason.DAMAGED, MissReason.INCOMPATIBLE}  # magic or checksum; version


def test_every_length_of_a_frame_is_a_miss(stored: Stored) -> None:
    good = stored.good[1]
    for length in range(len(good)):
        frames: list[bytes | None] = [stored.good[0], good[:length], stored.good[2]]
        assert stored.assert_miss_at(1, frames) is MissReason.DAMAGED
    for extra in (b"\0", good):
        frames = [stored.good[0], good + extra, stored.good[2]]
        assert stored.assert_miss_at(1, frames) is MissReason.DAMAGED
    assert stored.assert_miss_at(1, [stored.good[0], None, stored.good[2]]) is MissReason.NOT_STORED


def test_swapped_values_are_other_content(stored: Stored) -> None:
    first, second, private = stored.good
    assert stored.assert_miss_at(0, [second, first, private]) is MissReason.OTHER_CONTENT
    assert stored.assert_miss_at(1, [first, first, private]) is MissReason.OTHER_CONTENT
    assert stored.assert_miss_at(1, [first, private, second]) is MissReason.OTHER_CONTENT


def variants(stored: Stored) -> Iterator[tuple[str, list[bytes]]]:
    """Sound frames of another tenant, name, model and adapter, and of another session's park."""
    mine = stored.kit.lineage
    space = mine.namespace
    for name, lineage in (
        ("tenant", Lineage(Namespace("rival", space.name), mine.fingerprint)),
        ("namespace", Lineage(Namespace(space.tenant, "test"), mine.fingerprint)),
        ("model", Lineage(space, b"model-2")),
        ("adapter", Lineage(space, mine.fingerprint, b"adapter-1")),
    ):
        stored.tiers.lineage = lineage
        manifest = stored.tiers.park("s1", 1, LOG, stored.tier).manifest
        keys = [ref.key for ref in manifest.frames]
        found = stored.store.get(keys, "s1", lineage.namespace, 5.0)
        yield name, [bytes(data) for data in found]
    stored.tiers.lineage = mine


def test_frames_of_another_tenant_model_or_adapter_are_refused(stored: Stored) -> None:
    for name, frames in variants(stored):
        for frame in range(3):
            swapped: list[bytes | None] = list(stored.good)
            swapped[frame] = frames[frame]
            reason = stored.assert_miss_at(frame, swapped)
            wanted = MissReason.INCOMPATIBLE if name == "model" else MissReason.OTHER_CONTENT
            if name == "adapter" and frame == 2:  # a private frame is named by session
                wanted = MissReason.LOG_DIFFERS
            assert reason is wanted, (name, frame)


def test_every_flipped_byte_and_every_length_of_a_manifest_is_refused(stored: Stored) -> None:
    good = stored.manifest.to_bytes()
    assert ParkedContext.from_bytes(good) == stored.manifest
    draw = random.Random(3)
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 1 << draw.randrange(8)
        with pytest.raises(ManifestMismatch):
            ParkedContext.from_bytes(bytes(bad))
        with pytest.raises(ManifestMismatch):
            ParkedContext.from_bytes(good[:at])
    with pytest.raises(ManifestMismatch):
        ParkedContext.from_bytes(good + b"\0")
