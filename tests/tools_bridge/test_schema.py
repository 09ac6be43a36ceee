"""Tool schemas that come from outside, and values against them."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.tools_bridge.call import ToolCall, canonical_tool_json, parse_tool_schema
from moorage.tools_bridge.errors import ToolArgumentsError, ToolSchemaError
from moorage.tools_bridge.schema import coerce_value


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return {"properties": {"a": schema}}


@pytest.mark.parametrize(
    ("parameters", "path"),
    [
        ({"required": [["a"]]}, "tool.parameters.required"),
        ({"required": "a"}, "tool.parameters.required"),
        ({"properties": {"a": {"enum": 3}}}, "tool.parameters.properties.a.enum"),
        ({"properties": {"a": {"items": "string"}}}, "tool.parameters.properties.a.items"),
        ({"properties": {"a": {"anyOf": {}}}}, "tool.parameters.properties.a.anyOf"),
        ({"properties": {"a": {"anyOf": [1]}}}, "tool.parameters.properties.a.anyOf[0]"),
        (
            {"properties": {"a": {"type": ["string", ["null"]]}}},
            "tool.parameters.properties.a.type",
        ),
        ({"additionalProperties": "no"}, "tool.parameters.additionalProperties"),
        ({"properties": {"a": {"default": float("nan")}}}, "tool.parameters"),
        ({"properties": {"a": {"default": "\ud83d"}}}, "tool.parameters"),
        ({"properties": {"a": {"default": object()}}}, "tool.parameters"),
        (nested(16), "tool.parameters.properties.a" + ".items" * 16),
    ],
)
def test_malformed_parameters_name_the_field(parameters: dict[str, Any], path: str) -> None:
    with pytest.raises(ToolSchemaError) as caught:
        parse_tool_schema({"name": "f", "parameters": parameters})
    assert caught.value.path == path
    assert str(caught.value).startswith(f"{path}: ")


def test_a_schema_at_the_limits_passes() -> None:
    parse_tool_schema({"name": "f", "parameters": nested(15)})
    description = "x" * (64 * 1024 - len('""') - len('{"type": "object", "properties": {}}'))
    parse_tool_schema({"name": "f", "description": description})
    with pytest.raises(ToolSchemaError, match="has 65537 bytes, allowed are 65536"):
        parse_tool_schema({"name": "f", "description": description + "x"})


def test_j10_a_property_named_like_a_keyword_keeps_its_place() -> None:
    parameters = {
        "properties": {"required": {"type": "string"}, "type": {"enum": [{"b": 1, "a": 2}]}},
        "type": "object",
    }
    form = canonical_tool_json(parse_tool_schema({"name": "f", "parameters": parameters}))
    assert list(form["function"]["parameters"]["properties"]) == ["required", "type"]
    inner = form["function"]["parameters"]["properties"]["type"]["enum"][0]
    assert list(inner) == ["a", "b"]


MISFIT = "no value"
OBJECT = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": {"type": "string"},
}


@pytest.mark.parametrize(
    ("value", "schema", "result"),
    [
        ("00501", {"type": "string"}, "00501"),
        (501, {"type": "string"}, "501"),
        (1.5, {"type": "string"}, MISFIT),  # 1.50 is 1.5 by now
        (True, {"type": "string"}, MISFIT),
        (None, {"type": "string"}, MISFIT),
        ("5", {"type": "integer"}, 5),
        ("-05", {"type": "integer"}, -5),
        ("٥", {"type": "integer"}, MISFIT),
        (" 5", {"type": "integer"}, MISFIT),
        ("5.0", {"type": "integer"}, MISFIT),
        (5.0, {"type": "integer"}, 5),
        (5.5, {"type": "integer"}, MISFIT),
        (True, {"type": "integer"}, MISFIT),
        ("5", {"type": "number"}, 5),
        ("5e-1", {"type": "number"}, 0.5),
        ("1e999", {"type": "number"}, MISFIT),
        ("nan", {"type": "number"}, MISFIT),
        (5, {"type": "number"}, 5),
        ("False", {"type": "boolean"}, False),
        ("yes", {"type": "boolean"}, MISFIT),
        (0, {"type": "boolean"}, MISFIT),
        ("null", {"type": ["string", "null"]}, "null"),
        (None, {"type": ["string", "null"]}, None),
        ("4", {"type": ["integer", "string"]}, "4"),
        ([1, "2"], {"type": "array", "items": {"type": "integer"}}, [1, 2]),
        ([1, "x"], {"type": "array", "items": {"type": "integer"}}, MISFIT),
        ("[1]", {"type": "array"}, MISFIT),
        ({"n": "1", "m": 2}, OBJECT, {"n": 1, "m": "2"}),
        ({"m": "x"}, OBJECT, MISFIT),
        ({"n": 1, "x": 1}, {**OBJECT, "additionalProperties": False}, MISFIT),
        ("b", {"enum": ["a", "b"]}, "b"),
        (1, {"enum": [True, 1.0]}, MISFIT),
        ("2", {"type": "integer", "enum": [1, 2]}, 2),
        ("c", {"anyOf": [{"type": "string", "enum": ["a"]}, {"type": "null"}]}, MISFIT),
        ("c", {"anyOf": [{"type": "string", "enum": ["a"]}, {"type": "string"}]}, "c"),
        ([3], {"anyOf": [{"oneOf": [{"type": "null"}]}, {"type": "array"}]}, [3]),
        ({"any": 1}, {"anyOf": [{"type": "null"}, {}]}, {"any": 1}),
        ("anything", True, "anything"),
    ],
)
def test_a17_a_value_becomes_what_the_schema_says_or_an_error(
    value: Any, schema: Any, result: Any
) -> None:
    if result == MISFIT:
        with pytest.raises(ToolArgumentsError, match=r"f\.x"):
            coerce_value(value, schema, "f.x")
        return
    found = coerce_value(value, schema, "f.x")
    assert found == result
    assert type(found) is type(result)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ('{"a": NaN}', "NaN is no JSON number"),
        ('{"a": 1e999}', "not JSON"),
        ('{"a": ' + "9" * 5000 + "}", "not JSON"),
        ('{"a": ' + "[" * 100_000 + "}", "not JSON"),
        (r'{"a": "\ud83d"}', "half of a surrogate pair"),
        ("[1]", "of type list, expected an object"),
    ],
)
def test_arguments_that_no_tool_should_see_are_a_typed_error(arguments: str, words: str) -> None:
    with pytest.raises(ToolArgumentsError, match=words):
        ToolCall("c1", 0, "f", arguments).parse_arguments()
