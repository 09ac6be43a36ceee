"""The tool calls of a session and the one result of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moorage.sessions.errors import CallNotFound, ToolResultConflict
from moorage.sessions.store import CallRow
from moorage.tools_bridge.call import ToolCall

CANCELLED_CONTENT = "cancelled: the call was given up before a result came"
"""What the model reads for a call that nobody answered (case F15)."""

TOO_LONG_CONTENT = "error: the tool's result did not fit the context window and was dropped"
"""What the model reads in the next turn where a result was too long for the window."""


@dataclass(frozen=True)
class ResultInput:
    """A result as the client gave it."""

    call_id: str
    content: str
    is_error: bool


class OpenCalls:
    """call id -> call, over the session's life. Methods that change rows return them for the
    commit.
    """

    def __init__(self, rows: Sequence[CallRow]) -> None:
        self._rows = {row.call_id: row for row in rows}

    def open(self, turn: int, calls: Sequence[ToolCall]) -> list[CallRow]:
        """Announce calls."""
        rows = [CallRow(c.call_id, turn, c.index, c.name, c.arguments) for c in calls]
        return self._store(rows)

    def pending(self) -> list[CallRow]:
        """Calls without a result, in order."""
        return [row for row in self._rows.values() if row.content is None]

    def pending_ids(self) -> list[str]:
        """Their ids."""
        return [row.call_id for row in self.pending()]

    def unsent(self) -> list[CallRow]:
        """Answered calls whose results are not in the token log yet, in the order of the calls."""
        rows = [r for r in self._rows.values() if r.content is not None and not r.consumed]
        return sorted(rows, key=lambda row: (row.turn, row.index))

    def check(self, results: Sequence[ResultInput]) -> tuple[list[ResultInput], int]:
        """(results that are new, number of duplicates). Changes nothing.

        Raises CallNotFound, and ToolResultConflict where a call has another result: the first one
        stands.
        """
        new: dict[str, ResultInput] = {}
        num_duplicates = 0
        for i, result in enumerate(results):
            row = self._rows.get(result.call_id)
            if row is None:
                raise CallNotFound(
                    f"results[{i}] answers call {result.call_id[:80]!r}, which this session never"
                    " made",
                    field=f"results[{i}].call_id",
                )
            known = new.get(result.call_id) or (
                ResultInput(row.call_id, row.content, row.is_error)
                if row.content is not None
                else None
            )
            if known is None:
                new[result.call_id] = result
            elif known == result:
                num_duplicates += 1
            else:
                what = "was cancelled" if row.cancelled else "has another result already"
                raise ToolResultConflict(
                    f"results[{i}]: call {result.call_id} {what}, and the first result stands",
                    field=f"results[{i}]",
                )
        return list(new.values()), num_duplicates

    def answer(self, results: Sequence[ResultInput]) -> list[CallRow]:
        """Take results that `check` called new."""
        return self._store(
            [
                replace(self._rows[r.call_id], content=r.content, is_error=r.is_error)
                for r in results
            ]
        )

    def cancel_pending(self) -> list[CallRow]:
        """Answer what is open as cancelled."""
        return self._store(
            [
                replace(row, content=CANCELLED_CONTENT, is_error=True, cancelled=True)
                for row in self.pending()
            ]
        )

    def replace_unsent(self, content: str) -> list[CallRow]:
        """Put an error in the place of results that cannot be sent. Duplicates are then
        conflicts.
        """
        return self._store([replace(r, content=content, is_error=True) for r in self.unsent()])

    def consume(self) -> list[CallRow]:
        """All answered calls are in the token log now."""
        return self._store([replace(row, consumed=True) for row in self.unsent()])

    def _store(self, rows: list[CallRow]) -> list[CallRow]:
        self._rows.update((row.call_id, row) for row in rows)
        return rows
