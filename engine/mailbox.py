"""The one way into the engine thread: a bounded queue of commands, and completions of tier I/O."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Generic, TypeVar

from moorage.engine.errors import EngineClosed, MailboxFull

C = TypeVar("C")


class Mailbox(Generic[C]):
    """Many senders, one receiver.

    Commands from outside are bounded (`put` refuses, it never waits, so it may be called from an event loop).
    Completions of the engine's own jobs are not refused: there are never more than jobs in flight, which are
    bounded where they start.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._items: deque[C] = deque()
        self._num_commands = 0
        self._ready = threading.Condition()
        self._closed = False

    def put(self, command: C) -> None:
        """Queue a command. Raises MailboxFull at the bound and EngineClosed after `close`."""
        with self._ready:
            if self._closed:
                raise EngineClosed("the engine is closed and takes no commands")
            if self._num_commands >= self._bound:
                raise MailboxFull(
                    f"{self._num_commands} commands wait for the engine, the bound is {self._bound}; retry shortly"
                )
            self._num_commands += 1
            self._items.append(command)
            self._ready.notify()

    def complete(self, completion: C) -> None:
        """Queue the completion of a job that the engine itself started; dropped after `close`."""
        with self._ready:
            if not self._closed:
                self._items.append(completion)
                self._ready.notify()

    def take_all(self, wait_s: float) -> list[C]:
        """Everything queued, in order; waits up to `wait_s` seconds for the first item."""
        deadline = time.monotonic() + wait_s
        with self._ready:
            while not self._items and not self._closed:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self._ready.wait(remaining):
                    break
            items = list(self._items)
            self._items.clear()
            self._num_commands = 0
            return items

    def close(self) -> None:
        """Refuse further commands and wake the receiver."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        with self._ready:
            return self._closed
