"""The oracle of the trace replay: Belady's order over blocks with closed prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from trace_sim import TraceRequest

NEVER = 1e18


class Belady:
    """Evicts what is used again last.

    L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", 1966. A prefix is used whenever
    what stands behind it is, so its next use is never later: the block that is used last is always a leaf, and the
    order that is optimal for single blocks keeps prefixes closed by itself.
    """

    def start(self, requests: Sequence[TraceRequest], num_blocks: int) -> None:
        """See Policy. Looks into the future."""
        following: dict[int, float] = {}
        self._next: list[list[float]] = [[] for _ in requests]
        for index in range(len(requests) - 1, -1, -1):
            path = requests[index].path
            self._next[index] = [following.get(block, NEVER) for block in path]
            following.update((block, float(index)) for block in path)
        self._use = np.full(num_blocks, NEVER)

    def used(self, index: int, request: TraceRequest) -> None:
        """See Policy."""
        self._use[list(request.path)] = self._next[index]

    def order(self, leaves: NDArray[np.int64], now_s: float) -> NDArray[np.float64]:
        """See Policy."""
        del now_s
        return -self._use[leaves]
