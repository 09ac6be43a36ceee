"""Hypothesis against a model of the truth: every slot's KV is a function of the tokens before it.

If the cache ever hands out a block too early, shares one wrongly or loses one, or a tier gives back other bytes than
were parked, some context reads KV that is not a function of its own tokens. The machine recounts the books and looks
at every open context after every step. Freed blocks are filled with NaN.
"""

from __future__ import annotations

import os
import struct
from typing import Any

import pytest
import xxhash
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from moorage.prefix_cache.block import Lineage, Namespace, pack_tokens
from moorage.prefix_cache.cache import CacheConfig, GroupConfig, PrefixCache
from moorage.prefix_cache.errors import OutOfBlocks, StoreError, StoreUnavailable
from moorage.prefix_cache.evicted_run import EvictedRun
from moorage.prefix_cache.frame import Geometry
from moorage.prefix_cache.host_store import HostStore
from moorage.prefix_cache.load import LoadJob, run_load
from moorage.prefix_cache.park import ParkJob, run_frame, run_park
from moorage.prefix_cache.parked_context import ParkedContext

NAN = struct.pack("<f", float("nan"))
NUM_BLOCKS = 12
LINEAGES = [Lineage(Namespace(tenant, "prod"), b"model-1") for tenant in ("acme", "rival")]
NUM_STEPS = int(os.environ.get("MOORAGE_STATEFUL_STEPS", "21000"))
"""Over all block sizes."""
STEPS_EACH = 50


class Context:
    def __init__(self, table: Any, lineage: int, tokens: list[int], computed: int) -> None:
        self.table, self.lineage, self.tokens, self.computed = table, lineage, tokens, computed


class Parked:
    def __init__(self, lineage: int, tokens: list[int], manifest: ParkedContext) -> None:
        self.lineage, self.tokens, self.manifest = lineage, tokens, manifest


class FailingStore(HostStore):
    """A host store that is away when it is told to be."""

    away = False

    def put(self, *arguments: Any) -> None:
        if self.away:
            raise StoreUnavailable("away")
        super().put(*arguments)

    def get(self, *arguments: Any) -> Any:
        if self.away:
            raise StoreUnavailable("away")
        return super().get(*arguments)


class CacheMachine(RuleBasedStateMachine):
    size = 4
    num_steps = num_demoted = num_found = 0
    """Over all runs of a class."""

    def __init__(self) -> None:
        super().__init__()
        # One layer, one head of 8 fp32: a slot's key and value are 64 bytes.
        self.geometry = Geometry(1, 1, self.size, 8, "float32", 2)
        self.block_bytes = self.geometry.block_bytes
        self.memory = bytearray(NAN * (NUM_BLOCKS * self.block_bytes // 4))
        config = CacheConfig(self.size, (GroupConfig("full", NUM_BLOCKS),), 2)
        self.cache = PrefixCache(config, self.poison, self.demote)
        self.contexts: list[Context] = []
        self.parked: dict[str, Parked] = {}
        self.store = FailingStore(3 * (2 * self.block_bytes + 400))
        self.generation = 0
        first = [0, 1, 0, 1, 0, 0] * max(1, self.size // 2)
        self.known: list[tuple[int, list[int]]] = [(0, first), (1, [0, 1])]
        """(lineage, tokens) that some context committed, or the seeds of the first ones."""

    # -- the device ----------------------------------------------------------------------------------

    def block(self, block_id: int) -> memoryview:
        start = block_id * self.block_bytes
        return memoryview(self.memory)[start : start + self.block_bytes]

    def poison(self, block_ids: Any) -> None:
        for block_id in block_ids:
            self.block(block_id)[:] = NAN * (self.block_bytes // 4)

    def slot(self, block_id: int, index: int) -> bytes:
        """Key and value of a slot, which lie apart in the block."""
        half = self.block_bytes // 2
        block = self.block(block_id)
        return bytes(block[index * 32 : index * 32 + 32]) + bytes(
            block[half + index * 32 : half + index * 32 + 32]
        )

    def truth(self, lineage: int, tokens: list[int], position: int) -> bytes:
        seen = bytes([lineage]) + pack_tokens(tokens[: position + 1])
        return b"".join(xxhash.xxh3_128_digest(seen, seed=part) for part in range(4))

    def compute(self, context: Context, end: int) -> None:
        """What the runner does: write KV for the tokens from `computed` on."""
        half = self.block_bytes // 2
        for position in range(context.computed, end):
            block = self.block(context.table.block_ids[position // self.size])
            index = position % self.size
            value = self.truth(context.lineage, context.tokens, position)
            block[index * 32 : index * 32 + 32] = value[:32]
            block[half + index * 32 : half + index * 32 + 32] = value[32:]
        context.computed = end

    def copy(self, moves: list[tuple[int, int]]) -> None:
        for source, destination in moves:
            self.block(destination)[:] = bytes(self.block(source))

    # -- what an engine does -------------------------------------------------------------------------

    def open(self, lineage: int, tokens: list[int]) -> Context:
        match = self.cache.match(LINEAGES[lineage], pack_tokens(tokens))
        table = self.cache.open(match)
        assert table.num_committed * self.size == match.num_tokens
        self.contexts.append(Context(table, lineage, tokens, match.num_tokens))
        return self.contexts[-1]

    def step(self, context: Context, end: int, *, commit: bool) -> None:
        try:
            self.cache.grow(context.table, end)
        except OutOfBlocks:
            return
        self.compute(context, end)
        if commit:
            self.cache.commit(context.table, pack_tokens(context.tokens), end)
            self.known.append((context.lineage, context.tokens[:end]))

    @precondition(lambda self: len(self.contexts) < 5)
    @rule(
        data=st.data(),
        more=st.lists(st.integers(0, 1), max_size=6),
        other_tenant=st.booleans(),
        at_once=st.booleans(),
    )
    def start(
        self, data: st.DataObject, more: list[int], other_tenant: bool, at_once: bool
    ) -> None:
        """A context that continues, or leaves midway, what some context committed before."""
        lineage, tokens = data.draw(st.sampled_from(self.known))
        cut = data.draw(st.integers(0, len(tokens)))
        lineage ^= other_tenant and not more
        context = self.open(lineage, tokens[:cut] + more)
        if at_once:
            self.step(context, len(context.tokens), commit=True)

    @precondition(lambda self: self.contexts)
    @rule(
        data=st.data(),
        more=st.lists(st.integers(0, 1), max_size=5),
        times=st.integers(1, 4),
        partly=st.booleans(),
        commit=st.booleans(),
    )
    def go_on(
        self, data: st.DataObject, more: list[int], times: int, partly: bool, commit: bool
    ) -> None:
        context = data.draw(st.sampled_from(self.contexts))
        context.tokens = context.tokens + more * times
        end = len(context.tokens)
        if partly:
            end = data.draw(st.integers(context.computed, end))
        self.step(context, end, commit=commit)

    @precondition(lambda self: self.contexts)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        context = data.draw(st.sampled_from(self.contexts))
        end = data.draw(st.integers(0, context.computed))
        try:
            moved = self.cache.truncate(context.table, end)
        except OutOfBlocks:
            return
        self.copy([moved] if moved is not None else [])
        context.tokens, context.computed = context.tokens[:end], end

    @precondition(lambda self: 0 < len(self.contexts) < 5)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.contexts))
        end = data.draw(st.integers(0, parent.computed))
        before = (list(parent.table.block_ids), parent.table.num_committed)
        try:
            table, moves = self.cache.fork(parent.table, end)
        except OutOfBlocks:
            return
        self.copy(moves)
        assert (parent.table.block_ids, parent.table.num_committed) == before
        shared = min(end // self.size, parent.table.num_committed)
        assert table.block_ids[:shared] == parent.table.block_ids[:shared]
        self.contexts.append(Context(table, parent.lineage, parent.tokens[:end], end))

    @precondition(lambda self: self.contexts)
    @rule(data=st.data(), discard=st.booleans())
    def leave(self, data: st.DataObject, discard: bool) -> None:
        context = data.draw(st.sampled_from(self.contexts))
        self.contexts.remove(context)
        (self.cache.discard if discard else self.cache.release)(context.table)

    @rule(num_blocks=st.integers(1, 6))
    def evict(self, num_blocks: int) -> None:
        evictable = self.cache.statistics().evictable
        assert self.cache.evict(num_blocks) == min(num_blocks, evictable)

    # -- tiers ---------------------------------------------------------------------------------------

    def demote(self, run: EvictedRun) -> None:
        """Eviction takes the run's last blocks: a copy stays in the store, where there is room."""
        blocks = [self.block(block_id) for block_id in run.block_ids]
        frame = run_frame(run, self.geometry, blocks)
        type(self).num_demoted += self.store.keep([frame], "-", run.lineage.namespace)

    @precondition(lambda self: len(self.contexts) < 5)
    @rule(data=st.data(), evict=st.booleans())
    def find(self, data: st.DataObject, evict: bool) -> None:
        """A context without a manifest: tree first, then whatever runs the store has of these tokens."""
        lineage, tokens = data.draw(st.sampled_from(self.known))
        self.cache.evict(NUM_BLOCKS if evict else 0)
        context = self.open(lineage, tokens)
        first, full = context.table.num_committed, len(tokens) // self.size
        try:
            self.cache.grow(context.table, full * self.size)
        except OutOfBlocks:
            return
        job = LoadJob(
            manifest=ParkedContext.empty(LINEAGES[lineage], "finder", self.geometry),
            first_block=first,
            token_ids=pack_tokens(tokens),
            blocks=[self.block(b) for b in context.table.block_ids[first:full]],
            geometry=self.geometry,
            deadline_s=5.0,
            seek=True,
        )
        done = run_load(job, {"host": self.store}, float("inf"))
        assert done.miss is None or self.store.away
        type(self).num_found += done.num_tokens
        context.computed = first * self.size + done.num_tokens
        self.cache.commit(context.table, pack_tokens(tokens), context.computed)
        assert self.cache.truncate(context.table, context.computed) is None

    @rule()
    def store_goes_away_or_comes_back(self) -> None:
        self.store.away = not self.store.away

    @precondition(lambda self: any(c.computed for c in self.contexts))
    @rule(data=st.data(), session=st.sampled_from(("s1", "s2", "s3")), stay=st.booleans())
    def park(self, data: st.DataObject, session: str, stay: bool) -> None:
        """A context's blocks go to the store, read in place; the session's old frames are let go."""
        context = data.draw(st.sampled_from([c for c in self.contexts if c.computed]))
        self.generation += 1
        size, computed = self.size, context.computed
        blocks: list[Any] = [self.block(b) for b in context.table.block_ids[: -(-computed // size)]]
        if computed % size:
            blocks[-1] = bytearray(blocks[-1])  # unused slots are cleared, in a copy of the tail
        job = ParkJob(
            session_id=session,
            generation=self.generation,
            lineage=LINEAGES[context.lineage],
            token_ids=pack_tokens(context.tokens),
            block_hashes=tuple(context.table.block_hashes),
            blocks=blocks,
            num_tokens=computed,
            geometry=self.geometry,
            tier="host",
            fall_back_to=(),
            deadline_s=5.0,
        )
        done = run_park(job, {"host": self.store}, float("inf"))
        if done.manifest is None:
            assert isinstance(done.error, StoreError)
            return
        old = self.parked.get(session)
        self.parked[session] = Parked(context.lineage, context.tokens[:computed], done.manifest)
        if old is not None:
            same = old.lineage == context.lineage
            keys = old.manifest.keys_by_tier(without=done.manifest if same else None)
            namespace = old.manifest.lineage.namespace
            self.store.delete(keys.get("host", ()), session, namespace, 5.0)
        if not stay:
            self.contexts.remove(context)
            self.cache.discard(context.table)

    @precondition(lambda self: self.parked and len(self.contexts) < 5)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=3))
    def resume(self, data: st.DataObject, more: list[int]) -> None:
        """Tree first, then the store, straight into device blocks; the rest would be computed."""
        parked = self.parked[data.draw(st.sampled_from(sorted(self.parked)))]
        context = self.open(parked.lineage, parked.tokens + more)
        context.computed = min(context.computed, len(parked.tokens))
        first = context.table.num_committed
        try:
            self.cache.grow(context.table, len(parked.tokens))
        except OutOfBlocks:
            return
        end = -(-len(parked.tokens) // self.size)
        job = LoadJob(
            manifest=parked.manifest,
            first_block=min(first, end),
            token_ids=pack_tokens(parked.tokens),
            blocks=[self.block(b) for b in context.table.block_ids[first:end]],
            geometry=self.geometry,
            deadline_s=5.0,
        )
        done = run_load(job, {"host": self.store}, float("inf"))
        assert (done.miss is None) == (
            done.num_tokens == max(0, len(parked.tokens) - first * self.size)
        )
        if done.miss is not None:
            assert self.store.away
        context.computed = first * self.size + done.num_tokens
        self.cache.commit(context.table, pack_tokens(context.tokens), context.computed)

    # -- after every step ----------------------------------------------------------------------------

    @invariant()
    def books_balance(self) -> None:
        type(self).num_steps += 1
        self.cache.check_integrity()

    @invariant()
    def every_context_reads_its_own_kv(self) -> None:
        for context in self.contexts:
            for position in range(context.computed):
                found = self.slot(
                    context.table.block_ids[position // self.size], position % self.size
                )
                assert found == self.truth(context.lineage, context.tokens, position)

    @invariant()
    def free_blocks_are_nan(self) -> None:
        for block_id in self.cache.free_block_ids():
            assert self.block(block_id) == NAN * (self.block_bytes // 4)

    def teardown(self) -> None:
        for context in self.contexts:
            self.cache.release(context.table)
        self.cache.evict(NUM_BLOCKS)
        assert self.cache.statistics().free == NUM_BLOCKS
        for session, parked in self.parked.items():
            keys = parked.manifest.keys_by_tier().get("host", ())
            self.store.delete(keys, session, parked.manifest.lineage.namespace, 5.0)
        assert all(slot[2].shared for slot in self.store._entries)
        assert len(self.store._unclaimed) == len(self.store._entries)


@pytest.mark.parametrize("size", [1, 4, 16])
def test_any_sequence_of_use_reads_the_kv_of_its_own_tokens(size: int) -> None:
    machine = type(f"CacheMachine{size}", (CacheMachine,), {"size": size})
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=NUM_STEPS * 3 // 2 // 3 // STEPS_EACH,  # not every example is full
            stateful_step_count=STEPS_EACH,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert machine.num_steps >= NUM_STEPS // 3  # type: ignore[attr-defined]
    assert machine.num_demoted >= 20 and machine.num_found >= 20  # type: ignore[attr-defined]
