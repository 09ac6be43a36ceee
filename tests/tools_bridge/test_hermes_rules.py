"""The rules of the Hermes parser beyond the known faults: what streams when, white space, failed
calls, and that no text is lost whatever a model writes.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reply_reader import Reply, call_text, read

from moorage.tools_bridge.errors import ParserFinished
from moorage.tools_bridge.parsers.hermes import HermesParser
from moorage.tools_bridge.parsers.json_call import JsonCallReader

ADD = call_text("add", '{"a": 1, "b": 2}')
PING = call_text("ping", "{}")
CALLS = {"add": '{"a": 1, "b": 2}', "ping": "{}"}


def test_a1_arguments_stream_before_the_call_is_complete() -> None:
    parser = HermesParser(lambda index: f"call-{index}")
    first = parser.feed('<tool_call>\n{"name":"get_weather","arguments":{"city":"Oslo')
    assert [(p.name, p.arguments_delta) for p in first.tool_calls] == [
        ("get_weather", '{"city":"Oslo')
    ]
    assert first.completed == []
    second = parser.feed('"}}\n</tool')
    assert [(p.name, p.arguments_delta) for p in second.tool_calls] == [(None, '"}')]
    assert second.completed == []
    assert [call.arguments for call in parser.feed("_call>").completed] == ['{"city":"Oslo"}']


def test_arguments_before_the_name_wait_for_it() -> None:
    parser = HermesParser(lambda index: f"call-{index}")
    assert parser.feed('<tool_call>{"arguments": {"x": 1}, ').tool_calls == []
    delta = parser.feed('"name": "f"')
    assert [(p.name, p.arguments_delta) for p in delta.tool_calls] == [("f", '{"x": 1}')]


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        (f"Let me add.\n\n{ADD}", "Let me add.", ["add"]),
        (f"{ADD}\n\nDone. \n", "\n\nDone. \n", ["add"]),
        (f"\n{ADD}\n \n", "", ["add"]),
        (f"Before {ADD} after", "Before after", ["add"]),
        (f"One:\n{PING} two: {ADD}", "One: two:", ["ping", "add"]),
        (f"{ADD}{PING}\n\n\n{ADD}\nbye", "\nbye", ["add", "ping", "add"]),
        (f"Use <tool_call> tags: {ADD}", "Use <tool_call> tags:", ["add"]),
        (f"Use \n<tool_call> tags.\n{ADD}", "Use \n<tool_call> tags.", ["add"]),
        # No-break space and line separator are no JSON and no format: they are content.
        (f"a\u00a0{PING}\u2028", "a\u00a0\u2028", ["ping"]),
        # An unclosed call before a whole one is text; the whole one runs.
        (f'<tool_call>{{"name": "f"}}{ADD}', '<tool_call>{"name": "f"}', ["add"]),
    ],
)
def test_white_space_around_calls_is_format_and_elsewhere_content(
    text: str, content: str, names: list[str]
) -> None:
    whole = read([text])
    assert whole.text == content
    assert whole.calls == [(index, name, CALLS[name]) for index, name in enumerate(names)]
    assert read(text) == whole
    for cut in range(1, len(text)):
        assert read([text[:cut], text[cut:]]) == whole, f"cut at {cut}"


@pytest.mark.parametrize(
    "inside",
    [
        '{"name": "", "arguments": {}}',
        '{"name": "a\\nb", "arguments": {}}',
        '{"name": 7, "arguments": {}}',
        '{"name": "f", "arguments": null}',
        '{"name": "f", "arguments": "{}"}',
        '{"name": "f", "name": "g"}',
        '{"name": "f", "n\\u0061me": "g"}',
        '{"name": "f", "arguments": {}, "arguments": {}}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": "line\nbreak"}}',
        '{"name": "f", "arguments": {"a": 1,}}',
        '{"name": "f", "arguments": {"a": [1}}}',
        '{"name": "f", "arguments": ' + '{"a":' * 200 + "1" + "}" * 200 + "}",
        "{'name': 'f'}",
        '```json\n{"name": "f"}\n```',
        '[{"name": "f"}]',
        "",
    ],
)
def test_what_is_no_call_is_content_to_the_last_character(inside: str) -> None:
    text = f"So: <tool_call>\n{inside}\n</tool_call> and on"
    whole = read([text])
    assert (whole.text, whole.completed) == (text, [])
    assert read(text) == whole


def test_a10_fenced_json_is_content_byte_for_byte() -> None:
    text = 'Do not run this:\n```json\n{"name":"rm","arguments":{"p":"/"}}\n```\n  Really. \n'
    for pieces in ([text], list(text)):
        assert read(pieces) == Reply(text=text)


@pytest.mark.parametrize("truncated", [True, False])
@pytest.mark.parametrize("num_left_out", [1, 2, 12, 13, 14])
def test_a12_only_the_closing_mark_completes_a_call(num_left_out: int, truncated: bool) -> None:
    text = ADD[:-num_left_out]
    for pieces in ([text], list(text)):
        reply = read(pieces, truncated=truncated)
        assert reply.completed == []
        assert reply.streamed[0].failed
        assert reply.text == text


def test_a13_ids_are_unique_in_the_session_stable_in_a_call_and_the_same_in_a_replay() -> None:
    def ids(turn: int, text: str) -> list[str]:
        parser = HermesParser(lambda index: f"s7/{turn}/{index}")
        seen: dict[int, set[str]] = {}
        for piece in text:
            for delta in parser.feed(piece).tool_calls:
                seen.setdefault(delta.index, set()).add(delta.call_id)
        assert all(len(one) == 1 for one in seen.values())
        return [next(iter(seen[index])) for index in sorted(seen)]

    first = ids(0, f"{ADD}\n{PING}\n{ADD}")
    assert first == ["s7/0/0", "s7/0/1", "s7/0/2"]
    assert ids(1, ADD) == ["s7/1/0"]
    assert ids(0, f"{ADD}\n{PING}\n{ADD}") == first


def test_a13_the_index_of_a_failed_call_is_not_used_again() -> None:
    reply = read([f'<tool_call>{{"name": "f", "arguments": {{"a": 1}}}} oops\n{ADD}'])
    assert reply.streamed[0].failed
    assert reply.calls == [(1, "add", '{"a": 1, "b": 2}')]
    assert reply.text == '<tool_call>{"name": "f", "arguments": {"a": 1}} oops'


def test_a19a_white_space_around_reasoning_marks_is_format() -> None:
    text = "Well, <think>\nFirst. \n Then <tool_call>.\n</think>\n\nHi\n" + ADD + "\nBye"
    whole = read([text], reasoning=True)
    assert whole.reasoning == "First. \n Then <tool_call>."
    assert whole.text == "Well, Hi\nBye"
    assert whole.calls == [(0, "add", '{"a": 1, "b": 2}')]
    for cut in range(len(text)):
        assert read([text[:cut], text[cut:]], reasoning=True) == whole, f"cut at {cut}"


def test_a19a_a_call_directly_after_reasoning_does_not_eat_the_text_behind_it() -> None:
    reply = read([f"<think>hm</think>{ADD}\n\nDone."], reasoning=True)
    assert (reply.reasoning, reply.text) == ("hm", "\n\nDone.")


def test_a19a_unfinished_reasoning_stays_reasoning() -> None:
    for pieces in (["A <think>hm \n</thi"], list("A <think>hm \n</thi")):
        reply = read(pieces, reasoning=True, truncated=True)
        assert (reply.text, reply.reasoning) == ("A ", "hm \n</thi")


def test_held_back_is_only_what_may_begin_a_mark() -> None:
    parser = HermesParser(lambda index: f"call-{index}")
    assert parser.feed("a <tool").text == "a"
    assert parser.feed("box> b").text == " <toolbox> b"
    assert parser.feed("<<tool_call").text == "<"
    assert parser.feed("s").text == "<tool_calls"
    assert parser.feed("<tool_call>\n{").text == ""
    assert parser.feed("x").text == "<tool_call>\n{x", "no call: given back at once"


def test_a_finished_parser_refuses_more_and_reset_begins_anew() -> None:
    parser = HermesParser(lambda index: f"a{index}", reasoning=True, starts_in_reasoning=True)
    parser.feed(f"</think>{ADD}<tool_call>{{")
    parser.finish(truncated=True)
    with pytest.raises(ParserFinished):
        parser.feed("x")
    with pytest.raises(ParserFinished):
        parser.finish(truncated=False)
    parser.reset(lambda index: f"b{index}")
    delta = parser.feed(f"again</think>{PING}")
    assert delta.reasoning == "again"
    assert [(c.call_id, c.index) for c in delta.completed] == [("b0", 0)]
    assert parser.finish(truncated=False).text == ""


def explains(source: str, reply: Reply) -> bool:
    """Whether `reply` accounts for every character of `source` (without white space): its text, and
    whole calls, marks included, that say exactly what was completed, in order.
    """
    text = "".join(reply.text.split())
    compact = "".join(source.split())
    todo, seen = [(0, 0, 0)], set()
    while todo:
        state = todo.pop()
        if state in seen:
            continue
        seen.add(state)
        at, text_at, call_at = state
        if (at, text_at, call_at) == (len(compact), len(text), len(reply.completed)):
            return True
        if text[text_at : text_at + 1] == compact[at : at + 1] != "":
            todo.append((at + 1, text_at + 1, call_at))
        if call_at < len(reply.completed) and compact.startswith("<tool_call>{", at):
            call = reply.completed[call_at]
            end = compact.find("</tool_call>", at)
            while end >= 0:
                try:
                    value = json.loads(compact[at + len("<tool_call>") : end])
                except ValueError:
                    value = None
                said = "".join(call.arguments.split())
                if (
                    isinstance(value, dict)
                    and value.get("name") == call.name
                    and json.loads(said) == value.get("arguments", {})
                ):
                    todo.append((end + len("</tool_call>"), text_at, call_at + 1))
                end = compact.find("</tool_call>", end + 1)
    return False


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<tool",
        "_call>",
        "<",
        ADD,
        PING,
        '<tool_call>{"name": "f", "arguments": {"a": "',
        '{"name": "f", ',
        '"arguments": ',
        '{"a": "</tool_call>"}',
        '"name": "g"',
        "{",
        "}",
        '"',
        "\\",
        "\\u12",
        "[1, 2]",
        ", ",
        "\n",
        " \t",
        "é😀",
        "word",
    ]
)


@settings(max_examples=400, deadline=None)
@given(parts=st.lists(FRAGMENTS, max_size=12), data=st.data())
def test_whatever_a_model_writes_is_read_alike_in_any_pieces_and_accounted_for(
    parts: list[str], data: st.DataObject
) -> None:
    source = "".join(parts)
    whole = read([source])
    assert explains(source, whole)
    assert read(source) == whole
    cuts = sorted(data.draw(st.lists(st.integers(0, len(source)), max_size=6)))
    pieces = [source[a:b] for a, b in zip([0, *cuts], [*cuts, len(source)], strict=True)]
    assert read(pieces) == whole


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(st.one_of(FRAGMENTS, st.sampled_from(["<think>", "</think>"])), max_size=10),
    starts=st.booleans(),
)
def test_with_reasoning_too_any_pieces_read_alike(parts: list[str], starts: bool) -> None:
    source = "".join(parts)
    whole = read([source], reasoning=True, starts_in_reasoning=starts)
    assert read(source, reasoning=True, starts_in_reasoning=starts) == whole


@settings(max_examples=200, deadline=None)
@given(
    prose=st.lists(st.text(alphabet="ab <>/{}\n", max_size=12), min_size=2, max_size=5),
    values=st.lists(
        st.dictionaries(st.text(max_size=4), st.text(max_size=8), max_size=3),
        min_size=4,
        max_size=4,
    ),
    escaped=st.booleans(),
)
def test_calls_between_prose_come_out_as_they_went_in(
    prose: list[str], values: list[dict[str, str]], escaped: bool
) -> None:
    calls = [json.dumps(value, ensure_ascii=escaped) for value in values[: len(prose) - 1]]
    source = prose[0]
    for arguments, text in zip(calls, prose[1:], strict=True):
        source += call_text("f", arguments) + text
    reply = read(source)
    assert reply.calls == [(i, "f", arguments) for i, arguments in enumerate(calls)]
    assert [call.parse_arguments() for call in reply.completed] == values[: len(calls)]
    assert "".join(reply.text.split()) == "".join("".join(prose).split())


def test_a_call_that_fails_is_not_read_a_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 opening marks, each of which may begin a call: reading the rest of the reply once for
    each would be 34 million characters.
    """
    num_read = 0
    feed = JsonCallReader.feed

    def counting(reader: JsonCallReader, piece: str) -> int:
        nonlocal num_read
        consumed = feed(reader, piece)
        num_read += consumed
        return consumed

    monkeypatch.setattr(JsonCallReader, "feed", counting)
    for piece in ('<tool_call>{"a":{', '<tool_call>{"a":"', '<tool_call>{"name": "f"} '):
        num_read = 0
        reply = read([piece] * 2000, truncated=True)
        assert reply.text == piece * 2000
        assert num_read <= len(piece) * 2000
