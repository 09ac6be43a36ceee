"""The incremental JSON reader against Python's own: it accepts exactly the same calls."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moorage.tools_bridge.parsers.json_call import MAX_DEPTH, JsonCallReader

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda part: (
        st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=3), part, max_size=3)
    ),
    max_leaves=8,
)


def accepts(text: str) -> bool:
    """What the reader says of a whole text, fed char by char."""
    reader = JsonCallReader()
    for character in text:
        if reader.feed(character) == 0:
            return False
    return reader.done


def is_call(text: str) -> bool:
    """What Python's reader says, with the rules on top that make an object a call."""

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        return {"name twice": True, **dict(pairs)} if _twice(pairs) else dict(pairs)

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        value = json.loads(text, object_pairs_hook=once, parse_constant=refuse)
    except ValueError:
        return False
    if not isinstance(value, dict) or text[:1] not in "{ \t\n\r" or text[-1] != "}":
        return False
    name, arguments = value.get("name"), value.get("arguments", {})
    good_name = isinstance(name, str) and name != "" and name.isprintable()
    return good_name and isinstance(arguments, dict) and "name twice" not in value


def _twice(pairs: list[tuple[str, object]]) -> bool:
    names = [name for name, _ in pairs]
    return names.count("name") > 1 or names.count("arguments") > 1


@settings(deadline=None)
@given(arguments=st.dictionaries(st.text(max_size=4), VALUES, max_size=3), data=st.data())
def test_any_call_is_read_and_its_arguments_are_a_verbatim_slice(
    arguments: dict[str, object], data: st.DataObject
) -> None:
    indent = data.draw(st.sampled_from([None, 0, 2]))
    inside = json.dumps(arguments, ensure_ascii=data.draw(st.booleans()), indent=indent)
    text = '{ "x": [{"name": 1}], "name": "f", "arguments" :' + inside + ', "y": -1.5e-3 }'
    cut = data.draw(st.integers(0, len(text)))
    reader = JsonCallReader()
    slices = ""
    for piece in (text[:cut], text[cut:]):
        assert reader.feed(piece) == len(piece)
        slices += reader.new_arguments
    assert reader.done
    assert (reader.name, slices, reader.text) == ("f", inside, text)


@settings(max_examples=500, deadline=None)
@given(
    base=st.sampled_from(
        [
            '{"name": "f", "arguments": {"a": [1, -0.5e+7, true, null], "b": "x\\u00e9\\n"}}',
            '{"arguments": {}, "name": "g", "id": 0}',
            '{"name":"f","arguments":{"s":"\\\\","t":{"name":"x","name":"y"}}}',
        ]
    ),
    edits=st.lists(
        st.tuples(
            st.integers(0, 90), st.sampled_from([*'{}[]",:\\u0127eE+-. \ntfna\x01é', "", "1e"])
        ),
        max_size=3,
    ),
)
def test_it_accepts_what_python_accepts(base: str, edits: list[tuple[int, str]]) -> None:
    text = base
    for place, put in edits:
        at = place % len(text)
        text = text[:at] + put + text[at + (put == "") :]
    assert accepts(text) == is_call(text), text


@pytest.mark.parametrize(
    ("text", "num_consumed"),
    [
        ("x", 0),
        ('{"name": "f" "', 13),
        ('{"name": "f", }', 14),
        ('{"name": "f", "arguments": [', 27),
        ('{"name": tru', 9),
        ('{"x": 01}', 8),
        ('{"x": "\n', 7),
        ('{"x": "\\x', 8),
        ('{"x": "\\u00g', 11),
        ('{"x": [1}', 8),
        ("{}", 1),
    ],
)
def test_it_stops_at_the_first_wrong_character(text: str, num_consumed: int) -> None:
    reader = JsonCallReader()
    assert reader.feed(text) == num_consumed
    assert reader.broken
    assert reader.text == text[:num_consumed]


def test_it_stops_behind_the_object() -> None:
    reader = JsonCallReader()
    assert reader.feed('{"name":"f"} tail') == 12
    assert reader.done
    assert reader.feed("more") == 0


def test_nesting_is_bounded() -> None:
    def nested(depth: int) -> str:
        return '{"name": "f", "x": ' + "[" * depth + "]" * depth + "}"

    assert accepts(nested(MAX_DEPTH - 1))
    assert not accepts(nested(MAX_DEPTH))
