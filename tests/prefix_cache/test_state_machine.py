"""Hypothesis against a model: every block's KV is a function of the tokens before it, freed blocks
are poisoned.

If the cache ever hands out a block too early, shares one wrongly or loses one, some context reads
KV that is not a function of its own tokens. The machine looks at every open context after every
step.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moorage.prefix_cache.block import Lineage, Namespace, pack_tokens
from moorage.prefix_cache.cache import CacheConfig, GroupConfig, PrefixCache
from moorage.prefix_cache.errors import OutOfBlocks

SIZE = 2
POISON = ("poison",)
LINEAGES = [Lineage(Namespace(tenant, "prod"), b"model-1") for tenant in ("acme", "rival")]


class Context:
    def __init__(self, table: Any, lineage: int, tokens: list[int], computed: int) -> None:
        self.table, self.lineage, self.tokens, self.computed = table, lineage, tokens, computed


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.memory: list[Any] = [[POISON] * SIZE for _ in range(12)]
        self.cache = PrefixCache(CacheConfig(SIZE, (GroupConfig("full", 12),), 2), self.poison)
        self.contexts: list[Context] = []
        self.known: list[tuple[int, list[int]]] = [(0, [0, 1, 0, 1, 0, 0]), (1, [0, 1])]
        """(lineage, tokens) that some context committed, or the seeds of the first ones."""

    def poison(self, block_ids: Any) -> None:
        for block_id in block_ids:
            self.memory[block_id] = [POISON] * SIZE

    def compute(self, context: Context, end: int) -> None:
        """What the runner does: write KV for the tokens from `computed` on."""
        for position in range(context.computed, end):
            block_id = context.table.block_ids[position // SIZE]
            seen = (context.lineage, *context.tokens[: position + 1])
            self.memory[block_id][position % SIZE] = seen
        context.computed = end

    def open(self, lineage: int, tokens: list[int]) -> Context:
        match = self.cache.match(LINEAGES[lineage], pack_tokens(tokens))
        table = self.cache.open(match)
        assert table.num_committed * SIZE == match.num_tokens
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
        partly=st.booleans(),
        commit=st.booleans(),
    )
    def go_on(self, data: st.DataObject, more: list[int], partly: bool, commit: bool) -> None:
        context = data.draw(st.sampled_from(self.contexts))
        context.tokens = context.tokens + more
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
        if moved is not None:
            self.memory[moved[1]] = list(self.memory[moved[0]])
        context.tokens, context.computed = context.tokens[:end], end

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

    @invariant()
    def books_balance(self) -> None:
        self.cache.check_integrity()

    @invariant()
    def every_context_reads_its_own_kv(self) -> None:
        for context in self.contexts:
            for position in range(context.computed):
                block_id = context.table.block_ids[position // SIZE]
                seen = (context.lineage, *context.tokens[: position + 1])
                assert self.memory[block_id][position % SIZE] == seen

    @invariant()
    def free_blocks_are_poisoned(self) -> None:
        for block_id in self.cache.free_block_ids():
            assert self.memory[block_id] == [POISON] * SIZE

    def teardown(self) -> None:
        for context in self.contexts:
            self.cache.release(context.table)
        self.cache.evict(12)
        assert self.cache.statistics().free == 12


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
