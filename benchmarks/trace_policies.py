"""Orders of eviction for the trace replay: least recently used, and by the expected wait until the next use."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from trace_sim import TraceRequest

EDGES_S = np.array(
    [0, 1, 2, 3, 4, 6, 8, 11, 15, 20, 30, 45, 60, 90, 120, 180, 240, 360, 480, 960, 1920, 3840, 7680, 1e9]
)  # fmt: skip
"""Bounds of the idle times over which a rate of return is taken to be constant."""
MAX_TURNS = 8
LEARN_EVERY = 50
"""Requests between two looks at the statistics."""
PRIOR_S = 100.0
"""Seconds of exposure that the rate of all classes together weighs in each class."""
HORIZON = 2.0
"""Waits are cut at so many residence times of the cache: what is longer is a miss however long."""


class LeastRecentlyUsed:
    """By the time of last use; of equals the deepest, since replay takes leaves."""

    def start(self, requests: Sequence[TraceRequest], num_blocks: int) -> None:
        """See Policy."""
        del requests
        self._last_s = np.full(num_blocks, -np.inf)

    def used(self, index: int, request: TraceRequest) -> None:
        """See Policy."""
        del index
        self._last_s[list(request.path)] = request.at_s

    def order(self, leaves: NDArray[np.int64], now_s: float) -> NDArray[np.float64]:
        """See Policy."""
        del now_s
        return self._last_s[leaves]


class ExpectedWait:
    """The longest expected wait goes first; what a rewind or a compaction left behind goes before all.

    Contexts are put in classes by why they stopped and how many turns they have had. For each class the rate of return
    is learnt from the past alone, by idle time (returns over exposure, as in a life table). A context that has been
    idle for t waits E[min(T - t, horizon) | T > t] longer. The horizon follows the idle time of what is evicted.
    """

    def start(self, requests: Sequence[TraceRequest], num_blocks: int) -> None:
        """See Policy."""
        del requests
        bins = len(EDGES_S) - 1
        self._class = np.zeros(num_blocks, dtype=np.int64)
        self._last_s = np.full(num_blocks, -np.inf)
        self._dead = np.zeros(num_blocks, dtype=bool)
        self._returns = np.zeros((2 * (MAX_TURNS + 1), bins))
        self._exposure_s = np.zeros_like(self._returns)
        self._rate = np.full_like(self._returns, 0.01)
        self._open: dict[int, tuple[float, int, int]] = {}
        """last block of a context -> (time, class, turns)."""
        self._path: dict[int, tuple[int, ...]] = {}
        """session -> its last path."""
        self._residence_s = 60.0
        self._learn(0.0)

    def used(self, index: int, request: TraceRequest) -> None:
        """See Policy."""
        path, now_s = request.path, request.at_s
        if not path:
            return
        turns = 0
        for block in reversed(path):
            if block in self._open:
                since_s, old, turns = self._open.pop(block)
                self._count(old, now_s - since_s)
                turns += 1
                break
        kind = (request.stop == "end_turn") * (MAX_TURNS + 1) + min(turns, MAX_TURNS)
        self._open[path[-1]] = (now_s, kind, turns)
        ids = list(path)
        self._class[ids], self._last_s[ids] = kind, now_s
        self._dead[ids] = False
        if request.session >= 0:
            left = set(self._path.get(request.session, ())) - set(path)
            self._dead[list(left)] = True
            self._path[request.session] = path
        if index % LEARN_EVERY == 0:
            self._learn(now_s)

    def order(self, leaves: NDArray[np.int64], now_s: float) -> NDArray[np.float64]:
        """See Policy."""
        kind, idle_s = self._class[leaves], now_s - self._last_s[leaves]
        here = self._cumulative(kind, idle_s)
        wait_s = np.zeros(len(leaves))
        before_s = 0.0
        for after_s in np.linspace(0.02, 1, 16) ** 2 * HORIZON * max(5.0, self._residence_s):
            stays = np.exp(here - self._cumulative(kind, idle_s + after_s))
            wait_s += stays * (after_s - before_s)
            before_s = after_s
        order = np.where(self._dead[leaves], -np.inf, -wait_s)
        if len(leaves) > 1:
            evicted_s = float(idle_s[int(np.argmin(order))])
            self._residence_s += 0.02 * (min(evicted_s, 7200.0) - self._residence_s)
        return order

    def _count(self, kind: int, gap_s: float) -> None:
        """One return after `gap_s`."""
        end = int(np.searchsorted(EDGES_S, gap_s, side="right") - 1)
        self._exposure_s[kind, :end] += np.diff(EDGES_S)[:end]
        self._exposure_s[kind, end] += gap_s - EDGES_S[end]
        self._returns[kind, end] += 1

    def _learn(self, now_s: float) -> None:
        """Rates from all returns, and from all who have not returned yet."""
        exposure_s = self._exposure_s.copy()
        if self._open:
            idle_s = now_s - np.array([since for since, _, _ in self._open.values()])
            kinds = np.array([kind for _, kind, _ in self._open.values()])
            for index, width_s in enumerate(np.diff(EDGES_S)):
                np.add.at(exposure_s[:, index], kinds, np.clip(idle_s - EDGES_S[index], 0, width_s))
        pooled = (self._returns.sum(0) + 0.5) / (exposure_s.sum(0) + 50.0)
        self._rate = (self._returns + PRIOR_S * pooled) / (exposure_s + PRIOR_S)
        steps = np.cumsum(self._rate * np.minimum(np.diff(EDGES_S), 1e6), axis=1)
        self._sums = np.concatenate([np.zeros((len(steps), 1)), steps], axis=1)

    def _cumulative(
        self, kind: NDArray[np.int64], idle_s: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Integral of the rate over [0, idle)."""
        index = np.searchsorted(EDGES_S, idle_s, side="right") - 1
        return self._sums[kind, index] + (idle_s - EDGES_S[index]) * self._rate[kind, index]
