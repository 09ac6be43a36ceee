"""Lanes: results in order, nothing begun behind a fault, and everything ended on return."""

from __future__ import annotations

import threading
from collections.abc import Callable

from moorage.prefix_cache.lanes import WORTH_SHARING_BYTES, Lanes

MUCH = WORTH_SHARING_BYTES


def test_results_come_in_order_and_two_threads_share_the_work() -> None:
    lanes = Lanes(2)
    both = threading.Barrier(2, timeout=30.0)
    seen: set[int] = set()

    def meet(number: int) -> Callable[[], int]:
        def task() -> int:
            both.wait()  # ends only where two threads are at work
            seen.add(threading.get_ident())
            return number

        return task

    assert lanes.run([meet(number) for number in range(8)], MUCH) == list(range(8))
    assert len(seen) == 2
    lanes.close()


def test_little_work_stays_on_the_callers_thread() -> None:
    lanes = Lanes(2)
    idents = lanes.run([threading.get_ident] * 5, MUCH - 1)
    assert idents == [threading.get_ident()] * 5
    lanes.close()


def test_the_first_fault_ends_the_results_and_nothing_behind_it_begins() -> None:
    begun: list[int] = []

    def task(number: int) -> Callable[[], int]:
        def run() -> int:
            begun.append(number)
            if number == 2:
                raise ValueError("two")
            return number

        return run

    *before, fault = Lanes(1).run([task(number) for number in range(6)], MUCH)
    assert before == [0, 1]
    assert isinstance(fault, ValueError)
    assert begun == [0, 1, 2]


def test_a_busy_helper_delays_nobody() -> None:
    lanes = Lanes(2)
    gate, entered = threading.Event(), threading.Event()

    def stuck() -> int:
        entered.set()
        assert gate.wait(30.0)
        return 0

    first = threading.Thread(target=lambda: lanes.run([stuck, stuck], MUCH))
    first.start()
    assert entered.wait(30.0)
    assert lanes.run([lambda: 7, lambda: 8, lambda: 9], MUCH) == [7, 8, 9]
    gate.set()
    first.join(30.0)
    lanes.close()
