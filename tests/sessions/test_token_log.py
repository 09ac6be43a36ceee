"""Records, their rows, and the events they project to."""

from __future__ import annotations

import pytest
from fake_engine import CALL, END_CALL, IM_END, POISON, FakeEngine

from moorage.sessions.call_parsers import parser_factory
from moorage.sessions.errors import InternalError
from moorage.sessions.event_projector import EventProjector, merge_deltas
from moorage.sessions.proto import sessions_pb2 as pb
from moorage.sessions.streams import project_rows
from moorage.sessions.token_log import (
    TOKENS_PER_ROW,
    LogRow,
    Record,
    TokenLog,
    ToolCallRecord,
    TurnEndRecord,
    TurnStartRecord,
    from_row,
    to_row,
)

ENGINE = FakeEngine(lambda prompt: "")
SAMPLING = {"temperature": 0.0, "seed": 7, "stop": []}


def projector() -> EventProjector:
    return EventProjector("s-1", ENGINE.decode_stream, parser_factory("s-1"))


def turn(ids: list[int], end: Record | None = None) -> list[Record]:
    """A turn start, an input of three tokens, the given tokens, and perhaps an end."""
    log = TokenLog()
    records: list[Record] = [TurnStartRecord(log.take_seq(), 1, SAMPLING, 3, 3, 0.0, "")]
    records.append(log.input(1, [72, 105, 10], "messages"))
    records += [log.token(1, token_id) for token_id in ids]
    return [*records, end] if end is not None else records


def encode(text: str) -> list[int]:
    return ENGINE.encode(text, allow_special=True)


def test_tokens_share_a_row_up_to_its_bound_and_the_open_row_grows() -> None:
    log = TokenLog()
    log.input(1, [1, 2], "tokens")
    log.token(1, 10)
    first = log.take_rows()
    assert [(r.kind, r.first_seq, r.last_seq, r.position) for r in first] == [
        ("input", 1, 1, 0), ("token", 2, 2, 2),
    ]  # fmt: skip
    log.token(1, 11)
    assert [(r.first_seq, r.last_seq, r.position) for r in log.take_rows()] == [(2, 3, 2)]
    for token_id in range(TOKENS_PER_ROW):
        log.token(1, token_id)
    rows = log.take_rows()
    assert [(r.first_seq, r.last_seq) for r in rows] == [
        (2, 1 + TOKENS_PER_ROW), (2 + TOKENS_PER_ROW, 3 + TOKENS_PER_ROW),
    ]  # fmt: skip
    assert log.ids() == [1, 2, 10, 11, *range(TOKENS_PER_ROW)]
    assert (log.num_tokens, log.last_seq, log.last_id) == (132, 131, 127)


def test_a_structural_record_closes_the_token_row() -> None:
    log = TokenLog()
    log.token(1, 5)
    log.add(ToolCallRecord(log.take_seq(), 1, "c", 0, "f", "{}", 1))
    log.token(1, 6)
    assert [(r.kind, r.first_seq) for r in log.take_rows()] == [
        ("token", 1), ("tool_call", 2), ("token", 3),
    ]  # fmt: skip


def test_records_survive_their_rows() -> None:
    records = turn([65, 66], TurnEndRecord(5, 1, "stop", b"\x08\x01"))
    assert [r for record in records for r in from_row(to_row(record))] == records


def test_every_record_is_one_event_and_ranges_have_no_gap() -> None:
    events = [projector().project(r) for r in turn(encode("Hello"))]
    assert [(e.first_seq, e.last_seq) for e in events] == [(n, n) for n in range(1, 8)]


def test_multi_byte_text_waits_for_its_last_token() -> None:
    p = projector()
    events = [p.project(r) for r in turn(list("é!".encode()))]
    assert [e.delta.text for e in events[2:]] == ["", "é", "!"]


def test_b3_a_character_cut_off_comes_with_the_end_of_the_turn() -> None:
    p = projector()
    end = TurnEndRecord(4, 1, "length", b"")
    events = [p.project(r) for r in turn([0xF0], end)]
    assert events[2].delta.text == ""
    assert events[3].turn_end.tail.text == "\ufffd"


CALLS = encode('Hm\n<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>\n<tool_call>\n')
CALLS += encode('{"name": "b", "arguments": {}}\n</tool_call>')


def test_calls_complete_at_the_end_of_the_stretch_with_stable_ids() -> None:
    found = []
    for _ in range(2):
        p = projector()
        for record in turn([*CALLS, IM_END]):
            p.project(record)
        found.append(p.close_stretch(truncated=False))
    assert [(c.index, c.name, c.arguments) for c in found[0]] == [
        (0, "a", '{"x": 1}'), (1, "b", "{}"),
    ]  # fmt: skip
    assert [c.call_id for c in found[0]] == [c.call_id for c in found[1]]
    assert len({c.call_id for c in found[0]}) == 2


def test_a12_a_truncated_call_is_text_and_never_complete() -> None:
    p = projector()
    cut = encode('<tool_call>\n{"name": "write_file", "arguments": {"path": "/tm')
    events = [p.project(r) for r in turn(cut)]
    assert p.close_stretch(truncated=True) == ()
    end = p.project(TurnEndRecord(events[-1].last_seq + 1, 1, "length", b""))
    text = "".join(e.delta.text for e in events) + end.turn_end.tail.text
    assert text == '<tool_call>\n{"name": "write_file", "arguments": {"path": "/tm'


def test_a13_ids_differ_over_the_stretches_of_a_turn_and_over_turns() -> None:
    new_parser = parser_factory("s-1")
    one = encode('<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    ids = set()
    for number, before in ((1, 0), (1, 1), (1, 2), (2, 0)):
        parser = new_parser(number, before)
        text = ENGINE.text(one)
        ids |= {call.call_id for call in parser.feed(text).completed}
    assert len(ids) == 4


def test_f9_a_decoder_that_raises_is_a_fault_of_the_turn_and_the_same_in_a_replay() -> None:
    for _ in range(2):
        p = projector()
        events = [p.project(r) for r in turn([65, POISON, 66])]
        assert p.fault is not None
        assert [(list(e.token_ids), e.delta.text) for e in events[2:]] == [
            ([65], "A"), ([POISON], ""), ([66], ""),
        ]  # fmt: skip
        assert p.close_stretch(truncated=False) == ()


def test_a_replay_from_any_sequence_number_is_the_live_suffix() -> None:
    log = TokenLog()
    records: list[Record] = [TurnStartRecord(log.take_seq(), 1, SAMPLING, 1, 1, 0.0, "")]
    log.add(records[0])
    records.append(log.input(1, [72], "messages"))
    records += [log.token(1, t) for t in [*encode("né "), CALL, *encode("no json"), END_CALL, 33]]
    p = projector()
    live = [p.project(r) for r in records]
    rows = log.take_rows()
    for first in range(1, len(live) + 1):
        replayed = project_rows(projector(), rows, first, len(live), merge_tokens=1)
        assert replayed == live[first - 1 :], first
    merged = project_rows(projector(), rows, 3, len(live), merge_tokens=1000)
    assert [(e.first_seq, e.last_seq) for e in merged] == [(3, len(live))]
    assert merged[0].delta.text == "".join(e.delta.text for e in live)


def test_merging_stops_at_its_bound_and_at_structural_events() -> None:
    def delta(seq: int, text: str) -> pb.Event:
        return pb.Event(
            turn=1, first_seq=seq, last_seq=seq, token_ids=[seq], delta=pb.Delta(text=text)
        )

    first = delta(4, "a")
    assert merge_deltas(first, delta(5, "b"), 2)
    assert (first.first_seq, first.last_seq, first.delta.text) == (4, 5, "ab")
    assert not merge_deltas(first, delta(6, "c"), 2)
    assert not merge_deltas(first, delta(7, "gap"), 10)
    assert not merge_deltas(first, pb.Event(turn=1, first_seq=6, parked=pb.Parked()), 10)


def test_a_row_of_a_newer_version_is_an_error_that_names_it() -> None:
    with pytest.raises(InternalError, match="unknown kind 'forked'"):
        from_row(LogRow(3, 3, 1, "forked", 0, b""))
