"""The Hermes parser, cut everywhere: cases A1, A2, A4, A5, A7, A8, A10, A11, A12, A13, A19."""

from __future__ import annotations

import json
import random as random_module
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moorage.tools_bridge.parsers.hermes import HermesParser


@dataclass
class Parsed:
    """Everything a run of the parser gave, joined."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[int, str, str]] = field(default_factory=list)
    streamed: dict[int, str] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    ids: list[str] = field(default_factory=list)
    failed: set[int] = field(default_factory=set)


def parse(pieces: Iterable[str], *, truncated: bool = False, **options: bool) -> Parsed:
    parser = HermesParser(lambda index: f"call-{index}", **options)
    parsed = Parsed()
    for delta in [*map(parser.feed, pieces), parser.finish(truncated)]:
        parsed.text += delta.text
        parsed.reasoning += delta.reasoning
        for piece in delta.tool_calls:
            assert piece.call_id == f"call-{piece.index}"
            if piece.name is not None:
                assert piece.index not in parsed.names, "the name comes once"
                parsed.names[piece.index] = piece.name
            parsed.streamed[piece.index] = (
                parsed.streamed.get(piece.index, "") + piece.arguments_delta
            )
            piece.arguments_delta.encode()  # never half a surrogate pair
            if piece.failed:
                parsed.failed.add(piece.index)
        for call in delta.completed:
            parsed.calls.append((call.index, call.name, call.arguments))
            parsed.ids.append(call.call_id)
    for index, name, arguments in parsed.calls:
        assert parsed.streamed[index] == arguments
        assert parsed.names[index] == name
    return parsed


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


OSLO = '<tool_call>\n{"name":"get_weather","arguments":{"city":"Oslo"}}\n</tool_call>'

SAMPLES = [
    ("plain text, no calls.", "plain text, no calls.", []),
    ("", "", []),
    ("  spaces around  \n", "  spaces around  \n", []),
    (OSLO, "", [("get_weather", '{"city":"Oslo"}')]),
    ("Let me look.\n" + OSLO, "Let me look.", [("get_weather", '{"city":"Oslo"}')]),
    (OSLO + "\nDone.", "\nDone.", [("get_weather", '{"city":"Oslo"}')]),
    (OSLO + "\n" + OSLO, "", [("get_weather", '{"city":"Oslo"}')] * 2),
    (
        OSLO + "\n\n" + call("add", '{"a": 1, "b": 2}') + "\n",
        "",
        [("get_weather", '{"city":"Oslo"}'), ("add", '{"a": 1, "b": 2}')],
    ),
    (
        call("a", "{}") + call("b", "{}") + call("c", "{}"),
        "",
        [("a", "{}"), ("b", "{}"), ("c", "{}")],
    ),
    (
        "one " + call("a", "{}") + " two " + call("b", "{}") + " three",
        "one two three",
        [("a", "{}"), ("b", "{}")],
    ),
    ('<tool_call>{"name": "ping"}</tool_call>', "", [("ping", "{}")]),
    (
        '<tool_call> {"arguments": {"x": 1}, "name": "late"} </tool_call>',
        "",
        [("late", '{"x": 1}')],
    ),
    (
        '<tool_call>{"name":"log","arguments":{"message":"}Z"}}</tool_call>',
        "",
        [("log", '{"message":"}Z"}')],
    ),
    (
        r'<tool_call>{"name":"log","arguments":{"note":"q]r \" }"}}</tool_call>',
        "",
        [("log", r'{"note":"q]r \" }"}')],
    ),
    (
        '<tool_call>{"name":"log","arguments":{"t":"</tool_call>"}}</tool_call>',
        "",
        [("log", '{"t":"</tool_call>"}')],
    ),
    (
        '<tool_call>{"name":"log","arguments":{"t":"<tool_call>"}}</tool_call>',
        "",
        [("log", '{"t":"<tool_call>"}')],
    ),
    (call("rows", '{"rows":[{"k":7},{"k":8}]}'), "", [("rows", '{"rows":[{"k":7},{"k":8}]}')]),
    (call("deep", '{"a":{"b":[[{"c":{}}]]}}'), "", [("deep", '{"a":{"b":[[{"c":{}}]]}}')]),
    (call("u", r'{"t":"caf\u00e9 \ud83d\ude00"}'), "", [("u", r'{"t":"caf\u00e9 \ud83d\ude00"}')]),
    (call("u", '{"t":"café 😀"}'), "", [("u", '{"t":"café 😀"}')]),
    ("I will wrap it in <tool_call> tags.", "I will wrap it in <tool_call> tags.", []),
    ("<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", []),
    ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
    (
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        [],
    ),
    (
        '<tool_call>{"name": "f"} extra</tool_call> on',
        '<tool_call>{"name": "f"} extra</tool_call> on',
        [],
    ),
    ('<tool_call><tool_call>{"name": "f"}</tool_call>', "<tool_call>", [("f", "{}")]),
    (
        '```json\n{"name":"rm","arguments":{"p":"/"}}\n```\nas you asked',
        '```json\n{"name":"rm","arguments":{"p":"/"}}\n```\nas you asked',
        [],
    ),
    (
        "a < b, <tool, </tool_call> and <tool_calls>",
        "a < b, <tool, </tool_call> and <tool_calls>",
        [],
    ),
    (
        '<tool_call>{"name": "f", "arguments": {"a": 1}',
        '<tool_call>{"name": "f", "arguments": {"a": 1}',
        [],
    ),
    (
        '<tool_call>{"name": "f", "arguments": {"a": 1}}',
        '<tool_call>{"name": "f", "arguments": {"a": 1}}',
        [],
    ),
    (
        '<tool_call>{"name": "f", "n": null, "x": 1.5e3, "arguments": {"a": true}}</tool_call>',
        "",
        [("f", '{"a": true}')],
    ),
    ("tail <tool_", "tail <tool_", []),
]


def test_a1_a_call_in_three_pieces_is_one_call_without_tag_text() -> None:
    parsed = parse(
        ['<tool_call>\n{"name":"get_weather","arguments":{"city":"Oslo', '"}}\n</tool', "_call>"]
    )
    assert parsed.streamed == {0: '{"city":"Oslo"}'}
    assert parsed.calls == [(0, "get_weather", '{"city":"Oslo"}')]
    assert parsed.text == ""


@pytest.mark.parametrize(("output", "text", "calls"), SAMPLES)
def test_a2_every_cut_gives_the_same(output: str, text: str, calls: list[tuple[str, str]]) -> None:
    whole = parse([output])
    assert whole.text == text
    assert [(name, arguments) for _, name, arguments in whole.calls] == calls
    assert parse(list(output)) == whole
    for cut in range(1, len(output)):
        assert parse([output[:cut], output[cut:]]) == whole, f"cut at {cut}"


def test_a2_there_are_thirty_samples_with_zero_to_three_calls() -> None:
    assert len(SAMPLES) >= 30
    assert {len(calls) for _, _, calls in SAMPLES} == {0, 1, 2, 3}


def test_a4_empty_arguments_do_not_leak_into_the_next_call() -> None:
    parsed = parse(list(call("ping", "{}") + "\n" + call("add", '{"a":1,"b":2}')))
    assert parsed.calls == [(0, "ping", "{}"), (1, "add", '{"a":1,"b":2}')]


def test_a5_nested_json_over_awkward_cuts() -> None:
    pieces = [
        '<tool_call>{"name":"r","arguments":',
        '{"rows":',
        '[{"',
        'k":7},{"k',
        '":8}]}',
        "}</tool_call>",
    ]
    parsed = parse(pieces)
    assert json.loads(parsed.streamed[0]) == {"rows": [{"k": 7}, {"k": 8}]}


def test_a7_escapes_split_over_deltas_decode_to_the_characters() -> None:
    parsed = parse(list(call("u", r'{"t":"caf\u00e9 \ud83d\ude00"}')))
    assert json.loads(parsed.calls[0][2]) == {"t": "café 😀"}


def test_a8_brackets_inside_strings_mean_nothing() -> None:
    first = parse(['<tool_call>{"name":"log","arguments":{"message":"}Z"}}</tool_call>'])
    second = parse([r'<tool_call>{"name":"log","arguments":{"note":"q]r \" }"}}</tool_call>'])
    assert json.loads(first.calls[0][2]) == {"message": "}Z"}
    assert json.loads(second.calls[0][2]) == {"note": 'q]r " }'}
    assert first.text == second.text == ""


def test_a11_an_unclosed_tag_is_content() -> None:
    parsed = parse(list("I will wrap it in <tool_call> tags."))
    assert (parsed.text, parsed.calls) == ("I will wrap it in <tool_call> tags.", [])


def test_a12_a_truncated_call_is_not_a_call() -> None:
    cut = '<tool_call>\n{"name":"write_file","arguments":{"path":"/tm'
    parsed = parse(list(cut), truncated=True)
    assert parsed.calls == []
    assert parsed.failed == {0}  # its deltas were out: the client must not run it
    assert parsed.text == cut


def test_a13_ids_of_a_reply_differ() -> None:
    parsed = parse([call("f", "{}") + call("f", "{}") + call("g", "{}")])
    assert parsed.ids == ["call-0", "call-1", "call-2"]


def test_a19_reasoning_ends_at_its_tag_however_it_is_cut() -> None:
    parsed = parse(["ok</th", "ink", ">Hi"], reasoning=True, starts_in_reasoning=True)
    assert (parsed.reasoning, parsed.text) == ("ok", "Hi")
    opened = parse(list("<think>hm <tool_call> no</think>" + call("f", "{}")), reasoning=True)
    assert (opened.reasoning, opened.text, opened.calls) == (
        "hm <tool_call> no",
        "",
        [(0, "f", "{}")],
    )


def test_a19_without_calls_a_complete_call_is_text() -> None:
    parsed = parse(list(OSLO), calls=False)
    assert (parsed.text, parsed.calls, parsed.streamed) == (OSLO, [], {})


def test_a_name_that_is_no_text_is_no_call() -> None:
    broken = r'<tool_call>{"name": "\ud83d", "arguments": {}}</tool_call>'
    parsed = parse(list(broken))
    assert (parsed.text, parsed.calls) == (broken, [])


fragments = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "\n",
        " ",
        '{"name": "f", ',
        '"arguments": ',
        '{"a": "}"}',
        "}",
        "{",
        '"',
        "\\",
        "x",
        "é",
        "<",
        "[",
        ",",
    ]
)


@settings(max_examples=600, deadline=None)
@given(st.lists(fragments, max_size=14), st.randoms(use_true_random=False))
def test_any_output_cut_anywhere_parses_alike_and_loses_no_text(
    parts: list[str], random: random_module.Random
) -> None:
    output = "".join(parts)
    whole = parse([output])
    cuts = sorted(random.sample(range(len(output) + 1), min(3, len(output) + 1)))
    pieces = [output[a:b] for a, b in zip([0, *cuts], [*cuts, len(output)], strict=True)]
    assert parse(pieces) == whole
    # Every character that is not white space is in the text or in a complete call.
    kept = "".join(whole.text.split())
    for _, _, arguments in whole.calls:
        kept += "".join(arguments.split())
    consumed = sum(map(len, ("".join(output.split()),)))
    syntax = len(whole.calls) * len("<tool_call></tool_call>")
    assert len(kept) + syntax <= consumed + 2 * len(whole.calls)  # "{}" stands for absent arguments
    if not whole.calls:
        assert whole.text == output
