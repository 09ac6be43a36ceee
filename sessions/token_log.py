"""The token log: a session's truth, as records with one sequence number each.

A record is a token or a structural event. What a client sees is derived from records alone
(`event_projector.py`), so a replay equals the live stream by construction. Text is never stored: it
is decoded from the ids again.

Stored form: one row per structural record; the tokens of a stretch share rows of up to
`TOKENS_PER_ROW` packed ids. The last row of tokens is written again with every step that adds to
it: at most 512 bytes, and a reader never sees half a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, TypeAlias, cast

import msgpack

from moorage.engine import pack_tokens, unpack_tokens
from moorage.sessions.errors import InternalError

TOKENS_PER_ROW = 128
"""Bound of a token row: rewriting it costs half a page of SQLite at most; a 4K context is 32 rows.
"""

TOKEN_BYTES = 4


@dataclass(frozen=True)
class _Record:
    kind: ClassVar[str] = ""
    seq: int
    """The record's sequence number; 1 is the session's first."""
    turn: int
    """Turn that it belongs to; 1 is the first."""


@dataclass(frozen=True)
class InputRecord(_Record):
    """Tokens that were not generated."""

    kind: ClassVar[str] = "input"
    position: int
    """Log position of the first of them."""
    packed_ids: bytes
    source: str
    """One of messages, tokens, tool_results."""


@dataclass(frozen=True)
class TokenRecord(_Record):
    """One generated token."""

    kind: ClassVar[str] = "token"
    position: int
    token_id: int


@dataclass(frozen=True)
class TurnStartRecord(_Record):
    """What is needed to continue or repeat the turn exactly."""

    kind: ClassVar[str] = "turn_start"
    sampling: dict[str, Any]
    """field of `SamplingParams` -> value, the drawn seed included."""
    num_prompt: int
    """Log length at the turn's start."""
    num_input: int
    """Tokens of the turn's first input."""
    deadline_s: float
    """0: none."""
    idempotency_key: str


@dataclass(frozen=True)
class ToolCallRecord(_Record):
    """A complete call that the turn waits for."""

    kind: ClassVar[str] = "tool_call"
    call_id: str
    index: int
    name: str
    arguments: str
    """JSON text as the model wrote it."""
    num_calls: int


@dataclass(frozen=True)
class ToolResultRecord(_Record):
    """The one result of a call."""

    kind: ClassVar[str] = "tool_result"
    call_id: str
    content: str
    is_error: bool
    cancelled: bool
    """Nobody gave a result: the turn was cancelled."""


@dataclass(frozen=True)
class ParkedRecord(_Record):
    """The manifest was committed in the same transaction."""

    kind: ClassVar[str] = "parked"
    tier: str
    num_tokens: int
    num_bytes: int
    duration_s: float
    degraded: str


@dataclass(frozen=True)
class ResumedRecord(_Record):
    """KV was in place again."""

    kind: ClassVar[str] = "resumed"
    sources: dict[str, Any]
    """field of `TokensBySource` -> value."""
    num_forwarded: int
    restore_s: float
    queue_s: float
    ttft_s: float


@dataclass(frozen=True)
class TurnEndRecord(_Record):
    """The turn is over; the session is idle."""

    kind: ClassVar[str] = "turn_end"
    finish_reason: str
    usage: bytes
    """A packed protobuf `Usage`."""


@dataclass(frozen=True)
class FailedRecord(_Record):
    """The turn ended with an error; the session is idle and usable."""

    kind: ClassVar[str] = "failed"
    error: bytes
    """A packed protobuf `ErrorDetail`."""
    usage: bytes


Record: TypeAlias = (
    InputRecord
    | TokenRecord
    | TurnStartRecord
    | ToolCallRecord
    | ToolResultRecord
    | ParkedRecord
    | ResumedRecord
    | TurnEndRecord
    | FailedRecord
)

_STRUCTURAL: dict[str, type[Any]] = {
    cls.kind: cls
    for cls in (
        TurnStartRecord,
        ToolCallRecord,
        ToolResultRecord,
        ParkedRecord,
        ResumedRecord,
        TurnEndRecord,
        FailedRecord,
    )
}


@dataclass(frozen=True)
class LogRow:
    """One stored row: a structural record, an input, or consecutive tokens of one stretch."""

    first_seq: int
    last_seq: int
    turn: int
    kind: str
    position: int
    """Log position of the first token; 0 for structural records."""
    payload: bytes


def to_row(record: Record) -> LogRow:
    """The row of any record but a token, whose row `TokenLog` grows."""
    if isinstance(record, TokenRecord):
        return LogRow(
            record.seq,
            record.seq,
            record.turn,
            "token",
            record.position,
            pack_tokens([record.token_id]),
        )
    if isinstance(record, InputRecord):
        payload = _pack([record.source, record.packed_ids])
        return LogRow(record.seq, record.seq, record.turn, "input", record.position, payload)
    values = {k: v for k, v in asdict(record).items() if k not in ("seq", "turn")}
    return LogRow(record.seq, record.seq, record.turn, record.kind, 0, _pack(values))


def _pack(value: object) -> bytes:
    return cast(bytes, msgpack.packb(value))


def from_row(row: LogRow) -> list[Record]:
    """The records of a row, in order. Raises InternalError for a row that this version
    cannot read.
    """
    if row.kind == "token":
        ids = unpack_tokens(row.payload)
        if len(ids) != row.last_seq - row.first_seq + 1:
            raise InternalError(
                f"log row {row.first_seq}: {len(ids)} tokens for {row.first_seq} … {row.last_seq}"
            )
        return [
            TokenRecord(row.first_seq + i, row.turn, row.position + i, token_id)
            for i, token_id in enumerate(ids)
        ]
    if row.kind == "input":
        source, packed = msgpack.unpackb(row.payload)
        return [InputRecord(row.first_seq, row.turn, row.position, packed, source)]
    cls = _STRUCTURAL.get(row.kind)
    if cls is None:
        raise InternalError(f"log row {row.first_seq} has the unknown kind {row.kind!r}")
    values = msgpack.unpackb(row.payload)
    known = {f.name for f in fields(cls)}
    record: Record = cls(
        seq=row.first_seq, turn=row.turn, **{k: v for k, v in values.items() if k in known}
    )
    return [record]


class TokenLog:
    """The log in memory: all packed ids, the next sequence number, and the rows not yet handed to
    the store.

    Touched by the event loop alone. `take_rows` gives the rows that the next commit must write; the
    last token row stays open and is given again when it has grown.
    """

    def __init__(self, packed_ids: bytes = b"", next_seq: int = 1) -> None:
        self._ids = bytearray(packed_ids)
        self._next_seq = next_seq
        self._rows: list[LogRow] = []
        self._open: LogRow | None = None

    @property
    def num_tokens(self) -> int:
        """Length of the log, in tokens."""
        return len(self._ids) // TOKEN_BYTES

    @property
    def last_seq(self) -> int:
        """Sequence number of the last record; 0 for an empty log."""
        return self._next_seq - 1

    @property
    def packed_ids(self) -> bytes:
        """The whole log, packed."""
        return bytes(self._ids)

    def ids(self) -> list[int]:
        """The whole log."""
        return unpack_tokens(bytes(self._ids))

    @property
    def last_id(self) -> int | None:
        """The last token, None for an empty log."""
        return unpack_tokens(bytes(self._ids[-TOKEN_BYTES:]))[0] if self._ids else None

    def take_seq(self) -> int:
        """The next sequence number, taken."""
        seq = self._next_seq
        self._next_seq += 1
        return seq

    def input(self, turn: int, ids: Sequence[int], source: str) -> InputRecord:
        """Append input tokens."""
        packed = pack_tokens(ids)
        record = InputRecord(self.take_seq(), turn, self.num_tokens, packed, source)
        self._ids += packed
        self.add(record)
        return record

    def token(self, turn: int, token_id: int) -> TokenRecord:
        """Append a generated token to the open row, or open another."""
        record = TokenRecord(self.take_seq(), turn, self.num_tokens, token_id)
        packed = pack_tokens([token_id])
        self._ids += packed
        row = self._open
        if (
            row is not None
            and row.last_seq == record.seq - 1
            and len(row.payload) < TOKENS_PER_ROW * TOKEN_BYTES
        ):
            grown = LogRow(
                row.first_seq, record.seq, turn, "token", row.position, row.payload + packed
            )
            if self._rows and self._rows[-1] is row:
                self._rows[-1] = grown
            else:
                self._rows.append(grown)
        else:
            grown = to_row(record)
            self._rows.append(grown)
        self._open = grown
        return record

    def add(self, record: Record) -> None:
        """Append a structural record whose `seq` came from `take_seq`."""
        self._open = None
        self._rows.append(to_row(record))

    def take_rows(self) -> tuple[LogRow, ...]:
        """Rows to write since the last call."""
        rows = tuple(self._rows)
        self._rows.clear()
        return rows
