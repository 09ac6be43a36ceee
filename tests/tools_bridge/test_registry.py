"""Python functions as tools: schemas from hints, arguments by schema (case A17), canonical order (J10)."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from moorage.tools_bridge.call import (
    ToolCall,
    canonical_tool_json,
    parse_tool_schema,
    parse_tool_schemas,
)
from moorage.tools_bridge.errors import (
    ToolArgumentsError,
    ToolSchemaError,
    ToolSignatureError,
    UnknownTool,
)
from moorage.tools_bridge.registry import ToolRegistry, tool_from_function
from moorage.tools_bridge.schema import coerce_arguments


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: float
    y: float = 0.0


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    return expression


def test_the_plainest_function_gives_the_plainest_schema() -> None:
    schema = tool_from_function(calculator).schema
    assert (schema.name, schema.description) == ("calculator", "Evaluate an arithmetic expression.")
    assert schema.parameters == {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    }


def test_types_defaults_and_descriptions_become_schema() -> None:
    def order(
        count: int,
        unit: Literal["kg", "t"],
        colour: Colour,
        at: Point,
        tags: list[str],
        note: str | None = None,
    ) -> None:
        """Order something.

        More words that the model does not need.

        Args:
            count: How many.
            note (str): A remark.
        """

    parameters = tool_from_function(order).schema.parameters
    assert parameters["properties"] == {
        "count": {"type": "integer", "description": "How many."},
        "unit": {"type": "string", "enum": ["kg", "t"]},
        "colour": {"type": "string", "enum": ["red", "blue"]},
        "at": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
            "required": ["x"],
        },
        "tags": {"type": "array", "items": {"type": "string"}},
        "note": {"type": ["string", "null"], "description": "A remark."},
    }
    assert parameters["required"] == ["count", "unit", "colour", "at", "tags"]


def test_functions_that_no_model_can_call_are_refused_by_parameter() -> None:
    def star(*names: str) -> None: ...

    def bare(name) -> None: ...  # type: ignore[no-untyped-def]

    def odd(name: bytes) -> None: ...

    for function, words in (
        (star, "star(names)"),
        (bare, "bare(name) has no type"),
        (odd, "odd(name) has type"),
    ):
        with pytest.raises(ToolSignatureError) as caught:
            tool_from_function(function)
        assert words in str(caught.value)
    with pytest.raises(ToolSignatureError, match="calculator is there already"):
        ToolRegistry([calculator, calculator])


def test_a17_types_come_from_the_schema_and_not_from_a_guess() -> None:
    schema = parse_tool_schema(
        {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "zip": {"type": "string"},
                    "n": {"type": "integer"},
                    "b": {"type": "boolean"},
                    "s": {"type": ["string", "null"]},
                },
            },
        }
    )
    given = {"zip": "00501", "n": "5", "b": "True", "s": "4"}
    assert coerce_arguments(given, schema) == {"zip": "00501", "n": 5, "b": True, "s": "4"}
    assert coerce_arguments({"n": 5.0, "s": None, "zip": 501}, schema) == {
        "n": 5,
        "s": None,
        "zip": "501",
    }
    for bad, words in (
        ({"n": "five"}, "f.n is 'five' (str), expected integer"),
        ({"n": True}, "f.n is True"),
        ({"n": 5.5}, "f.n is 5.5"),
        ({"b": 1}, "f.b is 1"),
        ({"m": 1}, "f has no parameter m; parameters: zip, n, b, s"),
    ):
        with pytest.raises(ToolArgumentsError) as caught:
            coerce_arguments(bad, schema)
        assert words in str(caught.value)


def test_calls_to_nothing_or_with_broken_arguments_are_for_the_model_to_read() -> None:
    registry = ToolRegistry([calculator])
    with pytest.raises(UnknownTool, match="there is no tool 'rm'; tools: calculator"):
        registry.arguments(ToolCall("c", 0, "rm", "{}"))
    with pytest.raises(ToolArgumentsError, match="calculator needs expression"):
        registry.arguments(ToolCall("c", 0, "calculator", "{}"))
    with pytest.raises(ToolArgumentsError, match="are not JSON"):
        registry.arguments(ToolCall("c", 0, "calculator", "{"))


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ([], "tool"),
        ({}, "tool.name"),
        ({"name": "a b"}, "tool.name"),
        ({"name": "x" * 65}, "tool.name"),
        ({"type": "web", "function": {"name": "f"}}, "tool.type"),
        ({"name": "f", "description": 3}, "tool.description"),
        ({"name": "f", "parameters": []}, "tool.parameters"),
        ({"name": "f", "parameters": {"type": "string"}}, "tool.parameters.type"),
        ({"name": "f", "parameters": {"properties": []}}, "tool.parameters.properties"),
        (
            {"name": "f", "parameters": {"properties": {"a": {"type": "text"}}}},
            "tool.parameters.properties.a.type",
        ),
        ({"name": "f", "parameters": {"required": ["a"]}}, "tool.parameters.required"),
        ({"name": "f", "description": "x" * 70_000}, "tool"),
    ],
)
def test_malformed_schemas_name_the_field(schema: Any, path: str) -> None:
    with pytest.raises(ToolSchemaError) as caught:
        parse_tool_schema(schema)
    assert caught.value.path == path


def test_a_name_that_stands_twice_is_refused() -> None:
    with pytest.raises(ToolSchemaError, match=r"tools\[1\].name"):
        parse_tool_schemas([{"name": "f"}, {"name": "f"}])


def test_j10_the_same_tool_has_one_form_whatever_the_key_order() -> None:
    parameters = {
        "type": "object",
        "properties": {
            "b": {"type": "string", "enum": ["z", "a"]},
            "a": {"oneOf": [{"type": "null"}, {"type": "integer"}]},
        },
        "required": ["b", "a"],
        "additionalProperties": False,
    }
    shuffler = random.Random(1)
    forms = set()
    for _ in range(10):
        keys = list(parameters)
        shuffler.shuffle(keys)
        schema = parse_tool_schema(
            {"parameters": {key: parameters[key] for key in keys}, "name": "f", "description": "d"}
        )
        forms.add(repr(canonical_tool_json(schema)))
    assert len(forms) == 1
    form = canonical_tool_json(schema)["function"]["parameters"]
    assert list(form) == ["type", "properties", "required", "additionalProperties"]
    assert form["properties"]["b"]["enum"] == ["z", "a"]
    assert list(form["properties"]) == ["b", "a"]
