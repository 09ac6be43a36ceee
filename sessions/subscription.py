"""One attached stream: a bounded buffer between a session that must not wait and a reader that may
be slow.

    live ──offer──▶ [ buffer, bounded ] ──events()──▶ reader
                         │ full: merge consecutive deltas
                         │ cannot merge: forget the buffer, serve from the log until caught up
    log ───replay────────┘

Events are numbered and the log holds them all, so forgetting costs a read and never an event.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

from moorage.sessions.errors import MoorageError
from moorage.sessions.event_projector import merge_deltas
from moorage.sessions.proto import sessions_pb2 as pb

Replay = Callable[[int], Awaitable[tuple[list[pb.Event], int]]]
"""first seq wanted -> (events from it on, last seq they reach), read from the log."""

TERMINAL = ("turn_end", "failed")


class Subscription:
    """Made by `Session.subscribe`; `offer` and `end` are the session's, `events` is the
    reader's.
    """

    def __init__(
        self,
        *,
        after_seq: int,
        head: Callable[[], int],
        replay: Replay,
        max_events: int,
        merge_tokens: int,
        end_turn: int | None,
        end_seq: int | None,
    ) -> None:
        """`head`: last published seq. The stream ends after the terminal event of `end_turn`, or at
        `end_seq`.
        """
        self._next_seq = after_seq + 1
        self._head = head
        self._replay = replay
        self._max_events = max_events
        self._merge_tokens = merge_tokens
        self._end_turn = end_turn
        self._end_seq = end_seq
        self._buffer: deque[pb.Event] = deque()
        self._wake = asyncio.Event()
        self._from_log = head() >= self._next_seq
        self._ended = False
        self._error: MoorageError | None = None
        self.num_replays = 0
        """Times the log was read for this stream."""
        self.largest_buffer = 0
        """Most events that the buffer ever held."""

    def offer(self, event: pb.Event) -> None:
        """A durable event, in order. Never waits.

        One that lies before the stream's start is passed over: a turn may begin, and its stream be
        attached, while the end of the turn before is still on its way to the disk.
        """
        if event.last_seq < self._next_seq:
            return
        if not self._from_log:
            if len(self._buffer) < self._max_events:
                self._buffer.append(event)
                self.largest_buffer = max(self.largest_buffer, len(self._buffer))
            elif not self._merge_into_last(event):
                self._buffer.clear()
                self._from_log = True
        self._wake.set()

    def end(self, error: MoorageError | None = None) -> None:
        """No further event will come; what is buffered is still read (an error is
        raised after it).
        """
        self._ended = True
        self._error = error
        self._wake.set()

    async def events(self) -> AsyncIterator[pb.Event]:
        """The stream. Raises the error that ended it. Cancel-safe; wait bounded by the caller's
        deadline.
        """
        while not self._finished():
            if self._from_log:
                events, reached = await self._read_log()
                for event in events:
                    self._next_seq = event.last_seq + 1
                    yield event
                    if self._ends_stream(event):
                        return
                self._next_seq = reached + 1
                if self._next_seq > self._head():  # no await since the check: live from here on
                    self._from_log = False
            elif self._buffer:
                event = self._buffer.popleft()
                self._next_seq = event.last_seq + 1
                yield event
                if self._ends_stream(event):
                    return
            elif self._ended:
                if self._error is not None:
                    raise self._error
                return
            else:
                self._wake.clear()
                await self._wake.wait()

    async def _read_log(self) -> tuple[list[pb.Event], int]:
        self.num_replays += 1
        self._buffer.clear()
        return await self._replay(self._next_seq)

    def _finished(self) -> bool:
        return self._end_seq is not None and self._next_seq > self._end_seq

    def _ends_stream(self, event: pb.Event) -> bool:
        return (
            self._end_turn is not None
            and event.turn >= self._end_turn
            and event.WhichOneof("kind") in TERMINAL
        )

    def _merge_into_last(self, event: pb.Event) -> bool:
        merged = pb.Event()
        merged.CopyFrom(self._buffer[-1])  # other streams hold the same object
        if not merge_deltas(merged, event, self._merge_tokens):
            return False
        self._buffer[-1] = merged
        return True
