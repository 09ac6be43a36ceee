"""A circuit breaker around a tier: a store that fails again and again is left alone for a while.

    closed ── `failures` in a row ──▶ open ── after the pause ──▶ half open ── one call ─┬─ works ──▶ closed
      ▲                                ▲                                                 │
      │                                └──────────── fails, pause doubled ───────────────┘

While it is open every call fails at once with StoreUnavailable: a park falls back to the next tier, a load is a miss
and is computed. Only what says that the store is away counts (unavailable, timed out); a full store or a frame that is
refused does not. For frames only: the store of the sessions' truth has no breaker.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

import structlog

from moorage.prefix_cache.block import Bytes, Namespace
from moorage.prefix_cache.errors import InvalidInput, StoreTimeout, StoreUnavailable
from moorage.prefix_cache.frame import Frame, FrameKey
from moorage.prefix_cache.store import BlockStore, StoreStatistics, UnreadFrame

_log = structlog.get_logger("moorage.prefix_cache")


@dataclass(frozen=True)
class BreakerConfig:
    """When a store is given up for a while, and for how long."""

    failures: int = 3
    """In a row, until it opens."""
    first_pause_s: float = 1.0
    """Before the first probe; doubles with each probe that fails."""
    longest_pause_s: float = 30.0
    jitter: float = 0.2
    """Share of a pause that is drawn, so that replicas do not probe together."""

    def validate(self) -> None:
        """Raises InvalidInput naming the field, the value and the limit."""
        if self.failures < 1:
            raise InvalidInput(f"failures is {self.failures}, allowed is 1 or more")
        if not 0 < self.first_pause_s <= self.longest_pause_s:
            raise InvalidInput(
                f"first_pause_s is {self.first_pause_s}, allowed is above 0 and up to longest_pause_s"
                f" ({self.longest_pause_s})"
            )
        if not 0 <= self.jitter < 1:
            raise InvalidInput(f"jitter is {self.jitter}, allowed is 0 … 1 (exclusive)")


class BreakerState(StrEnum):
    """See the module."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass
class BreakerCounters:
    """Since the start."""

    opened: int = 0
    rejected: int = 0
    """Calls that were not tried."""
    probes: int = 0


class GuardedStore:
    """A BlockStore that hands every call on, unless its breaker is open. Thread-safe."""

    def __init__(
        self,
        store: BlockStore,
        config: BreakerConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`draw` gives numbers in [0, 1). Raises InvalidInput for settings out of range."""
        self.store = store
        self.config = config or BreakerConfig()
        self.config.validate()
        self.counters = BreakerCounters()
        self._clock = clock
        self._draw = draw
        self._lock = threading.Lock()
        self._failures = 0
        self._pause_s = self.config.first_pause_s
        self._probe_at: float | None = None
        """Clock time of the next probe; None while closed."""
        self._probing = False

    @property
    def tier(self) -> str:
        """Of the store behind it."""
        return self.store.tier

    @property
    def state(self) -> BreakerState:
        """What the next call will meet."""
        with self._lock:
            if self._probe_at is None:
                return BreakerState.CLOSED
            if self._probing or self._clock() < self._probe_at:
                return BreakerState.OPEN
            return BreakerState.HALF_OPEN

    def put(
        self,
        frames: Sequence[tuple[FrameKey, Frame]],
        session_id: str,
        namespace: Namespace,
        deadline_s: float,
    ) -> None:
        """See BlockStore."""
        with self._call():
            self.store.put(frames, session_id, namespace, deadline_s)

    def get(
        self,
        keys: Sequence[FrameKey],
        session_id: str,
        namespace: Namespace,
        deadline_s: float,
    ) -> list[Bytes | None]:
        """See BlockStore."""
        with self._call():
            return self.store.get(keys, session_id, namespace, deadline_s)

    def open(
        self,
        keys: Sequence[FrameKey],
        session_id: str,
        namespace: Namespace,
        deadline_s: float,
    ) -> list[Bytes | UnreadFrame | None]:
        """See BlockStore."""
        with self._call():
            return self.store.open(keys, session_id, namespace, deadline_s)

    def contains(
        self,
        keys: Sequence[FrameKey],
        session_id: str,
        namespace: Namespace,
        deadline_s: float,
    ) -> list[bool]:
        """See BlockStore."""
        with self._call():
            return self.store.contains(keys, session_id, namespace, deadline_s)

    def delete(
        self,
        keys: Sequence[FrameKey],
        session_id: str,
        namespace: Namespace,
        deadline_s: float,
    ) -> None:
        """See BlockStore."""
        with self._call():
            self.store.delete(keys, session_id, namespace, deadline_s)

    def drop(
        self,
        keys: Sequence[FrameKey],
        session_id: str,
        namespace: Namespace,
        deadline_s: float,
    ) -> None:
        """See BlockStore."""
        with self._call():
            self.store.drop(keys, session_id, namespace, deadline_s)

    def statistics(self) -> StoreStatistics:
        """Of the store behind it; calls that were rejected never reached it."""
        return self.store.statistics()

    def close(self) -> None:
        """See BlockStore."""
        self.store.close()

    @contextmanager
    def _call(self) -> Iterator[None]:
        self._admit()
        try:
            yield
        except (StoreUnavailable, StoreTimeout) as error:
            self._failed(error)
            raise
        except BaseException:
            self._answered()
            raise
        self._answered()

    def _admit(self) -> None:
        with self._lock:
            if self._probe_at is None:
                return
            left = self._probe_at - self._clock()
            if left > 0 or self._probing:
                self.counters.rejected += 1
                raise StoreUnavailable(
                    f"tier {self.tier} failed {self._failures} times in a row and is left alone; the next try is"
                    f" {'under way' if self._probing else f'in {left:.1f} s'}"
                )
            self._probing = True
            self.counters.probes += 1

    def _failed(self, error: Exception) -> None:
        with self._lock:
            self._failures += 1
            was_probe, self._probing = self._probing, False
            if self._failures < self.config.failures:
                return
            if was_probe:
                self._pause_s = min(2 * self._pause_s, self.config.longest_pause_s)
            elif self._probe_at is not None:
                return  # a call that began before it opened
            else:
                self.counters.opened += 1
                _log.warning("tier left alone", tier=self.tier, reason=type(error).__name__)
            jitter = self.config.jitter * (2 * self._draw() - 1)
            self._probe_at = self._clock() + self._pause_s * (1 + jitter)

    def _answered(self) -> None:
        with self._lock:
            if self._probe_at is not None:
                _log.info("tier is back", tier=self.tier)
            self._failures = 0
            self._pause_s = self.config.first_pause_s
            self._probe_at = None
            self._probing = False
