"""The committer: every session's writes, gathered into one transaction at a time.

Writes are queued by the event loop and handed to the store's one writer thread. While a transaction
runs, what further steps produce gathers in the queue and becomes the next one, so the loop never
waits for the disk and the number of transactions adapts to its pace. Order is kept: a session's
callbacks run in the order of its writes, and only after they are durable. That is where "tokens
durable → event sent" is kept.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import structlog

from moorage.sessions.errors import MoorageError, StaleWrite, StoreUnavailable, as_moorage_error
from moorage.sessions.store import SessionStore, SessionWrite

_log = structlog.get_logger("moorage.sessions")

OnCommitted = Callable[[MoorageError | None], None]
"""Called on the event loop: None when durable, else why it is not."""


@dataclass(frozen=True)
class _Entry:
    write: SessionWrite
    on_committed: OnCommitted


class Committer:
    """Owned by the manager; `submit` from the event loop only."""

    def __init__(self, store: SessionStore, *, max_pending: int) -> None:
        self._store = store
        self._max_pending = max_pending
        self._queue: deque[_Entry] = deque()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="moorage-store")
        self.num_commits = 0
        """Transactions so far."""

    def submit(self, write: SessionWrite, on_committed: OnCommitted) -> None:
        """Queue a write. At the bound it is refused at once, through its callback (on the loop's
        next turn).
        """
        if len(self._queue) >= self._max_pending:
            error = StoreUnavailable(
                f"{len(self._queue)} writes wait for the session store, the bound is"
                f" {self._max_pending}",
                retry_after_s=1.0,
            )
            asyncio.get_running_loop().call_soon(on_committed, error)
            return
        self._queue.append(_Entry(write, on_committed))
        self._idle.clear()
        self._wake.set()

    async def run(self) -> None:
        """Commit until cancelled. Not cancel-safe in mid-commit by itself: `flush` first, then
        cancel.
        """
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                batch = list(self._queue)
                self._queue.clear()
                await self._commit(batch)
            self._idle.set()

    async def flush(self, timeout_s: float) -> None:
        """Wait until nothing is queued. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self._idle.wait()

    def close(self) -> None:
        """Stop the writer thread once its transaction ended."""
        self._executor.shutdown(wait=True)

    async def _commit(self, batch: list[_Entry]) -> None:
        loop = asyncio.get_running_loop()
        refused: list[tuple[list[_Entry], StaleWrite]] = []
        error: MoorageError | None = None
        while batch:
            try:
                writes = [entry.write for entry in batch]
                await loop.run_in_executor(self._executor, self._store.commit, writes)
                self.num_commits += 1
            except StaleWrite as stale:  # one session lost its row; the others must not suffer
                lost = [e for e in batch if e.write.row.session_id == stale.session_id]
                batch = [e for e in batch if e.write.row.session_id != stale.session_id]
                _log.warning(
                    "stale write refused", session_id=stale.session_id, reason=stale.message
                )
                refused.append((lost, stale))
                continue
            except (
                Exception
            ) as caught:  # whatever the store raised: these writes are not known durable
                _log.error("commit failed", writes=len(batch), error=type(caught).__name__)
                error = as_moorage_error(caught)
            break
        _call(batch, error)
        for lost, reason in refused:  # now what they lost against is durable and can be found
            _call(lost, reason)


def _call(entries: list[_Entry], error: MoorageError | None) -> None:
    for entry in entries:
        try:
            entry.on_committed(error)
        except Exception:  # a bug in one session's continuation must not stop the others' commits
            _log.exception("commit callback failed", session_id=entry.write.row.session_id)
