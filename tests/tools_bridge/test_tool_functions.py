"""Python functions as tools: what their hints and docstrings say, and the values they are given."""

from __future__ import annotations

import enum
import functools
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, Optional, TypedDict

import pytest

from moorage.tools_bridge.call import ToolCall
from moorage.tools_bridge.errors import ToolArgumentsError, ToolSignatureError
from moorage.tools_bridge.registry import Tool, ToolRegistry, tool, tool_from_function


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: float
    y: float = 0.0
    colour: Colour = Colour.RED
    tags: list[str] = field(default_factory=list)


@dataclass
class Node:
    child: Node | None


class Options(TypedDict):
    depth: int
    point: NotRequired[Point]


class Pair(TypedDict):
    left: Point


def python_arguments(function: Any, arguments: str) -> dict[str, Any]:
    """What the function would be called with."""
    registry = ToolRegistry([function])
    name = registry.schemas[0].name
    return registry.arguments(ToolCall("c1", 0, name, arguments))[1]


def property_of(hint: Any) -> dict[str, Any]:
    """The schema of one parameter of that type."""

    def probe(x: Any) -> None: ...

    probe.__annotations__["x"] = hint
    found = tool_from_function(probe).schema.parameters["properties"]["x"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (str, {"type": "string"}),
        (int, {"type": "integer"}),
        (float, {"type": "number"}),
        (bool, {"type": "boolean"}),
        (Any, {}),
        (list, {"type": "array"}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (dict, {"type": "object"}),
        (dict[str, Any], {"type": "object"}),
        (dict[str, int], {"type": "object", "additionalProperties": {"type": "integer"}}),
        (Optional[int], {"type": ["integer", "null"]}),  # noqa: UP045 - the old spelling too
        (int | str, {"type": ["integer", "string"]}),
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
        (Literal["a", 1], {"enum": ["a", 1]}),
        (Colour, {"type": "string", "enum": ["red", "blue"]}),
        (
            Colour | None,
            {"anyOf": [{"type": "string", "enum": ["red", "blue"]}, {"type": "null"}]},
        ),
        (
            Pair,
            {
                "type": "object",
                "properties": {
                    "left": {
                        "type": "object",
                        "properties": {
                            "x": {"type": "number"},
                            "y": {"type": "number"},
                            "colour": {"type": "string", "enum": ["red", "blue"]},
                            "tags": {"type": "array", "items": {"type": "string"}},
                        },
                        "required": ["x"],
                    }
                },
                "required": ["left"],
            },
        ),
    ],
)
def test_hints_become_schemas(hint: Any, schema: dict[str, Any]) -> None:
    assert property_of(hint) == schema


@pytest.mark.parametrize(
    "hint", [bytes, dict[int, str], set[str], tuple[int, str], Node, object, Literal[b"x"]]
)
def test_hints_that_json_cannot_express_are_refused_by_parameter(hint: Any) -> None:
    with pytest.raises(ToolSignatureError, match=r"^probe\(x\)"):
        property_of(hint)


def test_values_arrive_as_the_types_of_the_hints() -> None:
    def draw(
        points: list[Point], options: Options, by_name: dict[str, Colour], label: Colour | None
    ) -> None: ...

    given = python_arguments(
        draw,
        """{"points": [{"x": 1}, {"x": "2.5", "colour": "blue", "tags": ["a"]}],
            "options": {"depth": 3.0, "point": {"x": 0}}, "by_name": {"k": "red"}, "label": null}""",
    )
    assert given == {
        "points": [Point(1), Point(2.5, colour=Colour.BLUE, tags=["a"])],
        "options": {"depth": 3, "point": Point(0)},
        "by_name": {"k": Colour.RED},
        "label": None,
    }


def test_a_union_takes_the_member_that_fits() -> None:
    def find(where: Point | Options | str) -> None: ...

    assert python_arguments(find, '{"where": {"x": 1}}') == {"where": Point(1)}
    assert python_arguments(find, '{"where": {"depth": 1}}') == {"where": {"depth": 1}}
    assert python_arguments(find, '{"where": "x"}') == {"where": "x"}


def test_an_unknown_field_of_a_dataclass_is_the_models_mistake() -> None:
    def draw(point: Point) -> None: ...

    with pytest.raises(ToolArgumentsError, match=r"draw\(point\) has no field z; fields: x, y"):
        python_arguments(draw, '{"point": {"x": 1, "z": 2}}')


def test_the_decorator_keeps_the_function_and_overrides_what_it_is_told() -> None:
    @tool
    def double(number: int) -> int:
        """Double a number."""
        return 2 * number

    @tool(name="treble-it", description="Three times.", deadline_s=2.5)
    async def treble(number: int) -> int:
        """Not shown."""
        return 3 * number

    assert (double.schema.name, double.schema.description) == ("double", "Double a number.")
    assert double(4) == 8
    assert not double.is_async
    assert (treble.schema.name, treble.schema.description) == ("treble-it", "Three times.")
    assert treble.deadline_s == 2.5
    assert treble.is_async
    assert [schema.name for schema in ToolRegistry([double, treble]).schemas] == [
        "double",
        "treble-it",
    ]


def test_methods_partials_and_callable_objects_are_functions_too() -> None:
    class Store:
        def get(self, key: str) -> str:
            """Read."""
            return key

        async def __call__(self, key: str) -> str:
            return key

    def power(base: int, exponent: int) -> int:
        """Raise."""
        return int(base**exponent)

    assert list(tool_from_function(Store().get).schema.parameters["properties"]) == ["key"]
    called = tool_from_function(Store())
    assert (called.schema.name, called.is_async) == ("Store", True)
    square = tool_from_function(functools.partial(power, exponent=2), name="square")
    assert square.schema.parameters["required"] == ["base"]
    assert square.schema.description == "Raise."


@pytest.mark.parametrize(
    ("documentation", "description", "described"),
    [
        (None, "", {}),
        ("One line.", "One line.", {}),
        ("Two\n    lines.\n\n    More.", "Two lines.", {}),
        ("Do.\n    Args:\n        a: The a.", "Do.", {"a": "The a."}),
        ("Args:\n        a: The a.", "", {"a": "The a."}),
        (
            """Do.

            Args:
                a (int, optional): The a,
                    note: over two lines.
                b: The b.

                c:
                    Below.

            Returns:
                b: not this.
            """,
            "Do.",
            {"a": "The a, note: over two lines.", "b": "The b.", "c": "Below."},
        ),
    ],
)
def test_docstrings_describe_the_tool_and_its_parameters(
    documentation: str | None, description: str, described: dict[str, str]
) -> None:
    def probe(a: int, b: int, c: int) -> None: ...

    probe.__doc__ = documentation
    schema = tool_from_function(probe).schema
    found = schema.parameters["properties"]
    assert schema.description == description
    assert {n: p["description"] for n, p in found.items() if "description" in p} == described


def positional_only(a: int, /) -> None: ...
def keywords(**names: str) -> None: ...
def unreadable(a: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (positional_only, r"positional_only\(a\) is positional-only"),
        (keywords, r"keywords\(names\) is variadic keyword"),
        (unreadable, "unreadable: its signature cannot be read: name 'Missing'"),
        (lambda: None, "<lambda>.name"),
    ],
)
def test_functions_that_no_model_can_call_are_refused(function: Any, words: str) -> None:
    with pytest.raises(ToolSignatureError, match=words):
        tool_from_function(function)


def test_a_deadline_must_be_a_time() -> None:
    with pytest.raises(ToolSignatureError, match="deadline_s is 0"):
        tool(deadline_s=0)(positional_only)


def test_a_tool_with_a_schema_of_its_own_can_be_given() -> None:
    made = tool_from_function(Colour.RED.value.upper, name="shout")
    other = Tool(made.schema, lambda: "RED", deadline_s=1.0)
    assert ToolRegistry([other]).find("shout") is other


def test_the_tools_bridge_needs_no_torch() -> None:
    code = (
        "import sys, moorage.tools_bridge.runner, moorage.tools_bridge.park_policy,"
        " moorage.tools_bridge.parsers.hermes; print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "False"
