"""The streams that are attached to one session."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from moorage.sessions.errors import MoorageError, SequenceOutOfRange, StateError
from moorage.sessions.event_projector import EventProjector, merge_deltas
from moorage.sessions.ledger import Ledger
from moorage.sessions.proto import sessions_pb2 as pb
from moorage.sessions.services import SessionServices
from moorage.sessions.subscription import Subscription
from moorage.sessions.token_log import LogRow, from_row


class Streams:
    """Event loop only. Publishing never waits for a reader."""

    def __init__(self, services: SessionServices, ledger: Ledger) -> None:
        self._services = services
        self._ledger = ledger
        self._attached: set[Subscription] = set()
        ledger.publish = self._publish

    def __len__(self) -> int:
        return len(self._attached)

    def attach(
        self, after_seq: int, *, end_turn: int | None = None, end_seq: int | None = None
    ) -> Subscription:
        """A stream of the events behind `after_seq`, up to the end of `end_turn` or to `end_seq`.

        Raises SequenceOutOfRange, and StateError at the bound of streams.
        """
        last = self._ledger.log.last_seq
        if after_seq > last:
            raise SequenceOutOfRange(
                f"after_seq is {after_seq}, the session's last event is {last}", field="after_seq"
            )
        limit = self._services.limits.max_streams_per_session
        if len(self._attached) >= limit:
            raise StateError(
                f"session {self._ledger.session_id} has {limit} streams, which is the limit: drop"
                " one"
            )
        subscription = Subscription(
            after_seq=after_seq,
            head=lambda: self._ledger.published_seq,
            replay=self._replay,
            max_events=self._services.limits.subscriber_events,
            merge_tokens=self._services.limits.merge_tokens,
            end_turn=end_turn,
            end_seq=end_seq,
        )
        self._attached.add(subscription)
        return subscription

    def detach(self, subscription: Subscription) -> None:
        """Forget a stream; nothing where it is forgotten already."""
        self._attached.discard(subscription)

    def end(self, error: MoorageError | None = None) -> None:
        """End every stream, after what is buffered, with `error` or in peace."""
        for subscription in tuple(self._attached):
            subscription.end(error)

    def _publish(self, event: pb.Event) -> None:
        for subscription in tuple(self._attached):
            subscription.offer(event)

    async def _replay(self, first_seq: int) -> tuple[list[pb.Event], int]:
        """Events from `first_seq` to the head, read and projected on a worker thread."""
        head = self._ledger.published_seq
        projector = self._ledger.new_projector()
        store, session_id = self._services.store, self._ledger.session_id
        limit = self._services.limits.merge_tokens

        def read() -> list[pb.Event]:
            start = store.turn_start(session_id, first_seq)
            rows = store.log_rows(session_id, start, head)
            return project_rows(projector, rows, first_seq, head, limit)

        return await asyncio.to_thread(read), head


def project_rows(
    projector: EventProjector,
    rows: Sequence[LogRow],
    first_seq: int,
    last_seq: int,
    merge_tokens: int,
) -> list[pb.Event]:
    """Events of first_seq … last_seq, both included; `rows` begin at a turn's start.

    Consecutive deltas are merged up to `merge_tokens` tokens. Pure: no I/O.
    """
    events: list[pb.Event] = []
    for row in rows:
        for record in from_row(row):
            if record.seq > last_seq:
                return events
            event = projector.project(record)
            merged = bool(events) and merge_deltas(events[-1], event, merge_tokens)
            if record.seq >= first_seq and not merged:
                events.append(event)
    return events
