"""Which rows go into the next forward pass, and whose blocks give way when memory is short.

Policy: decodes first (one row each, they hold the most and need the least), then prefill chunks first come first
served within a priority, under one token budget. A generation is admitted when the pool can hold its next chunk
beside what runs. Where blocks are short the order of victims is: evictable tree leaves (inside `grow`), idle
contexts by last use (their full blocks stay findable until evicted), waiting generations that still hold KV of an
earlier turn, and the youngest running generation. Nobody takes from an older generation, so the oldest always gets
on. A victim loses KV only, never tokens: it is computed again from its log, and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from moorage.engine.context import Context, Generation, Phase
from moorage.engine.plan import SequencePlan, StepPlan
from moorage.prefix_cache.cache import PrefixCache
from moorage.prefix_cache.errors import OutOfBlocks


class Scheduler:
    """Owns the order of generations; contexts and blocks belong to the engine and the cache."""

    def __init__(
        self,
        cache: PrefixCache,
        contexts: dict[str, Context],
        *,
        token_budget: int,
        max_running: int,
        admit: Callable[[Context, Generation], Phase],
    ) -> None:
        """`admit` opens a context's blocks (tree match, tier load) and says in which phase that leaves it."""
        self._cache = cache
        self._contexts = contexts
        self._token_budget = token_budget
        self._max_running = max_running
        self._admit = admit
        self._waiting: list[Context] = []
        self._running: list[Context] = []
        self.num_preempted = 0

    @property
    def num_waiting(self) -> int:
        """Generations not yet in the batch, loading ones included."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Generations in the batch."""
        return len(self._running)

    def add(self, context: Context) -> None:
        """Queue a context whose generation was just set."""
        self._waiting.append(context)
        self._waiting.sort(key=_turn_order)

    def remove(self, context: Context) -> None:
        """Forget a context whose generation ended; unknown ones are ignored (it may have been in neither list)."""
        self._waiting = [other for other in self._waiting if other is not context]
        self._running = [other for other in self._running if other is not context]

    def generations(self) -> Iterable[Context]:
        """All contexts with a generation, running first."""
        return [*self._running, *self._waiting]

    def schedule(self, step: int) -> StepPlan | None:
        """The next forward pass, or None where nothing can run now."""
        budget = self._token_budget
        sequences: list[SequencePlan] = []
        planned: set[str] = set()
        decoding = [context for context in self._running if context.num_pending == 1]
        for context in decoding:
            if context in self._running and (sequence := self._plan_rows(context, 1, planned)):
                sequences.append(sequence)
                planned.add(context.session_id)
                budget -= 1
        self._start_waiting(budget)
        for context in list(self._running):
            if budget <= 0:
                break
            if context.session_id in planned or context not in self._running:
                continue
            num_rows = min(context.num_pending, budget)
            if sequence := self._plan_rows(context, num_rows, planned):
                sequences.append(sequence)
                planned.add(context.session_id)
                budget -= num_rows
        return StepPlan(step, tuple(sequences)) if sequences else None

    def _start_waiting(self, budget: int) -> None:
        """Move waiting generations into the batch, in order; one that cannot start blocks those behind it."""
        for context in list(self._waiting):
            generation = context.generation
            if generation is None or generation.phase is Phase.LOADING:
                continue
            if len(self._running) >= self._max_running or budget <= 0:
                return
            if generation.phase is Phase.WAITING:
                if not self._has_room(context):
                    return
                generation.phase = self._admit(context, generation)
            if generation.phase is Phase.RUNNING:
                self._waiting.remove(context)
                self._running.append(context)
                budget -= min(context.num_pending, budget)

    def _has_room(self, context: Context) -> bool:
        """Admission watermark: the whole log's blocks must be obtainable without taking from what runs."""
        statistics = self._cache.statistics()
        size = self._cache.config.block_size
        held = context.table.num_blocks if context.table else 0
        needed = -(-(context.num_tokens + 1) // size) - held
        obtainable = statistics.free + statistics.evictable
        if needed <= obtainable:
            return True
        takeable = sum(
            other.table.num_blocks
            for other in self._contexts.values()
            if other is not context
            and other.table is not None
            and (other.idle or self._may_be_taken(other, context))
        )
        # Blocks that several contexts share are counted for each: an optimistic bound; `_plan_rows` has the last word.
        return needed <= obtainable + takeable or not self._running

    def _plan_rows(self, context: Context, num_rows: int, planned: set[str]) -> SequencePlan | None:
        """Blocks and plan for the next `num_rows` tokens; None where the context itself had to give way."""
        generation = context.generation
        if generation is None:
            return None
        end = context.num_computed + num_rows
        if not self.make_room(context, end, planned):
            self._preempt(context)
            return None
        assert context.table is not None
        complete = end == context.num_tokens
        return SequencePlan(
            request_id=generation.request.request_id,
            token_ids=context.tokens(context.num_computed, end),
            first_position=context.num_computed,
            block_ids=tuple(context.table.block_ids),
            block_deltas=tuple(context.table.block_deltas),
            sampling=generation.request.sampling if complete else None,
        )

    def make_room(self, context: Context, num_tokens: int, planned: set[str]) -> bool:
        """Grow the context's table to `num_tokens` slots, taking blocks from idle contexts and then from the
        youngest generation that is not yet planned in this step. False where even that is not enough."""
        if context.table is None:
            return False
        while True:
            try:
                self._cache.grow(context.table, num_tokens)
            except OutOfBlocks:
                if not (
                    self._drop_idle(context)
                    or self._drop_waiting(context)
                    or self._preempt_youngest(context, planned)
                ):
                    return False
            else:
                return True

    def grow_gently(self, context: Context, num_tokens: int) -> bool:
        """The same without taking anything from what runs."""
        return self.make_room(context, num_tokens, {other.session_id for other in self._running})

    def _drop_idle(self, keep: Context) -> bool:
        idle = [
            other
            for other in self._contexts.values()
            if other is not keep and other.idle and other.table is not None
        ]
        if not idle:
            return False
        victim = min(idle, key=lambda other: other.last_used)
        self.drop_blocks(victim, "device memory was short while the session was idle")
        return True

    @staticmethod
    def _may_be_taken(other: Context, keep: Context) -> bool:
        """Whether a waiting generation behind `keep` holds blocks that nothing in flight needs."""
        return (
            other.generation is not None
            and other.generation.phase is Phase.WAITING
            and other.table is not None
            and other.loading is None
            and other.parking is None
            and _turn_order(other) > _turn_order(keep)
        )

    def _drop_waiting(self, keep: Context) -> bool:
        """Take the blocks of the youngest waiting generation behind `keep`; what loads or parks is left alone."""
        held = [other for other in self._waiting if self._may_be_taken(other, keep)]
        if not held:
            return False
        victim = max(held, key=_turn_order)
        self.drop_blocks(victim, "device memory was short while the turn waited for its start")
        return True

    def _preempt_youngest(self, keep: Context, planned: set[str]) -> bool:
        candidates = [
            other
            for other in self._running
            if other is not keep and other.session_id not in planned and other.table is not None
        ]
        if not candidates:
            return False
        youngest = max(candidates, key=_turn_order)
        if _turn_order(youngest) < _turn_order(keep):
            return False
        self._preempt(youngest)
        return True

    def _preempt(self, context: Context) -> None:
        """Out of the batch and back to the queue; its KV is computed again when there is room."""
        generation = context.generation
        if generation is None:
            return
        self.num_preempted += 1
        self.drop_blocks(context, "preempted: device memory was short")
        generation.phase = Phase.WAITING
        self.remove(context)
        self.add(context)

    def drop_blocks(self, context: Context, reason: str) -> None:
        """Release a context's blocks: full ones stay findable in the tree until evicted."""
        if context.table is not None:
            self._cache.release(context.table)
            context.table = None
            context.num_computed = 0
            context.lost_reason = reason


def _turn_order(context: Context) -> tuple[int, int]:
    generation = context.generation
    if generation is None:
        return (0, 0)
    return (generation.request.priority, generation.order)
