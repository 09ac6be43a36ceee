"""A prefix cache over blocks, replayed against a trace: what is computed under which order of eviction.

A block is named by everything up to its end, so it is cached only while all before it are. A request finds its longest
cached prefix, computes the rest, and keeps it; blocks go leaf first. Nothing of a request goes while it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace."""

    at_s: float
    session: int
    """-1 where the trace does not say."""
    path: tuple[int, ...]
    """Block ids of its prompt, from the root."""
    stop: str
    """Why the model stopped: "tool_use", "end_turn"."""


class Policy(Protocol):
    """An order of eviction."""

    def start(self, requests: Sequence[TraceRequest], num_blocks: int) -> None:
        """Called once; only an oracle may look into the requests."""
        ...

    def used(self, index: int, request: TraceRequest) -> None:
        """The request's blocks were used now."""
        ...

    def order(self, leaves: NDArray[np.int64], now_s: float) -> NDArray[np.float64]:
        """One number a leaf; the smallest goes first."""
        ...


@dataclass(frozen=True)
class Replay:
    """What a replay counted, in blocks."""

    asked: int
    computed: int


def replay(
    requests: Sequence[TraceRequest], num_blocks: int, capacity: int, policy: Policy
) -> Replay:
    """Blocks asked for and computed over the whole trace, `capacity` blocks being kept."""
    cache = _Cache(num_blocks, capacity, policy)
    policy.start(requests, num_blocks)
    asked = computed = 0
    for index, request in enumerate(requests):
        asked += len(request.path)
        computed += cache.ask(request)
        policy.used(index, request)
    return Replay(asked, computed)


def live_blocks(requests: Sequence[TraceRequest]) -> int:
    """The working set: most blocks that were used and will be used again, over time."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, request in enumerate(requests):
        for block in request.path:
            first.setdefault(block, index)
            last[block] = index
    change = np.zeros(len(requests) + 1, dtype=np.int64)
    for block, index in first.items():
        if last[block] > index:
            change[index] += 1
            change[last[block]] -= 1
    return int(change.cumsum().max())


class _Cache:
    def __init__(self, num_blocks: int, capacity: int, policy: Policy) -> None:
        self._capacity = capacity
        self._policy = policy
        self._cached = np.zeros(num_blocks, dtype=bool)
        self._locked = np.zeros(num_blocks, dtype=bool)
        self._children = np.zeros(num_blocks, dtype=np.int32)
        self._parent = np.full(num_blocks, -1, dtype=np.int64)
        self._leaves = np.zeros(1024, dtype=np.int64)
        self._place: dict[int, int] = {}
        """leaf -> its index in `_leaves`."""
        self._used = 0

    def ask(self, request: TraceRequest) -> int:
        path = request.path
        if not path:
            return 0
        hit = 0
        while hit < len(path) and self._cached[path[hit]]:
            hit += 1
        kept = min(len(path), self._capacity)
        ids = np.array(path)
        self._locked[ids] = True
        self._make_room(self._used + max(0, kept - hit) - self._capacity, request.at_s)
        for index in range(hit, kept):
            block = path[index]
            self._cached[block] = True
            self._used += 1
            if index:
                self._parent[block] = path[index - 1]
                self._children[path[index - 1]] += 1
                self._drop_leaf(path[index - 1])
        if self._children[path[kept - 1]] == 0:
            self._add_leaf(path[kept - 1])
        self._locked[ids] = False
        return len(path) - hit

    def _make_room(self, short: int, now_s: float) -> None:
        while short > 0:
            leaves = self._leaves[: len(self._place)]
            order = self._policy.order(leaves, now_s)
            order = np.where(self._locked[leaves], np.inf, order)
            victim = int(np.argmin(order))
            if order[victim] == np.inf:
                raise RuntimeError("everything is locked: the capacity is below one request")
            level = order[victim]
            block = int(leaves[victim])
            while True:  # along the branch, while its next block is no better
                self._cached[block] = False
                self._drop_leaf(block)
                self._used -= 1
                short -= 1
                parent = int(self._parent[block])
                if parent < 0:
                    break
                self._children[parent] -= 1
                if self._children[parent]:
                    break
                self._add_leaf(parent)
                one = np.array([parent])
                if short <= 0 or self._locked[parent] or self._policy.order(one, now_s)[0] > level:
                    break
                block = parent

    def _add_leaf(self, block: int) -> None:
        if block in self._place:
            return
        if len(self._place) == len(self._leaves):
            self._leaves = np.concatenate([self._leaves, np.zeros_like(self._leaves)])
        self._leaves[len(self._place)] = block
        self._place[block] = len(self._place)

    def _drop_leaf(self, block: int) -> None:
        place = self._place.pop(block, None)
        if place is not None and place < len(self._place):
            last = int(self._leaves[len(self._place)])
            self._leaves[place] = last
            self._place[last] = place
