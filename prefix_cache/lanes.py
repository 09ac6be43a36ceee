"""A second thread for work that is copying and checksumming: both let other threads run meanwhile, and one core's
memory bandwidth is about half of what two have.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

WORTH_SHARING_BYTES = 1 << 20
"""Below it a hand-over to another thread (some 50 µs) costs more than it saves."""


class Lanes:
    """Runs tasks on the caller's thread and on helpers. Thread-safe; callers share the helpers."""

    def __init__(self, num_lanes: int | None = None) -> None:
        """`num_lanes`: threads for one call, the caller's included; by default two, or one on a single core."""
        self.num_lanes = min(2, os.cpu_count() or 1) if num_lanes is None else num_lanes
        self._helpers = (
            ThreadPoolExecutor(self.num_lanes - 1, "moorage-lane") if self.num_lanes > 1 else None
        )

    def run(self, tasks: Sequence[Callable[[], T]], num_bytes: int) -> list[T | Exception]:
        """Each task's result, in order, up to the first that raised, and what that was. Nothing behind it is begun;
        what had begun has ended on return. The tasks bound their time.

        A helper that is busy elsewhere costs nothing: the caller takes whatever nobody has taken.
        """
        results: list[T | Exception | None] = [None] * len(tasks)
        first_failed = [len(tasks)]
        numbers = itertools.count()  # `next` is one step: two threads never get the same number

        def take() -> None:
            while (number := next(numbers)) < min(first_failed):
                try:
                    results[number] = tasks[number]()
                except Exception as error:
                    results[number] = error
                    first_failed.append(number)

        helping: list[Future[None]] = []
        if self._helpers is not None and len(tasks) > 1 and num_bytes >= WORTH_SHARING_BYTES:
            helping = [self._helpers.submit(take) for _ in range(self.num_lanes - 1)]
        take()
        for future in helping:
            if not future.cancel():
                future.result()
        done = results[: min(first_failed) + 1]
        return [result for result in done if result is not None]

    def close(self) -> None:
        """Let the helpers go; what runs ends first."""
        if self._helpers is not None:
            self._helpers.shutdown(wait=False)
