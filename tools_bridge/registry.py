"""Python functions as tools: schemas from type hints, arguments checked against the schema."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Union

from moorage.tools_bridge.call import ToolCall, ToolSchema, parse_tool_schema
from moorage.tools_bridge.errors import (
    ToolArgumentsError,
    ToolSchemaError,
    ToolSignatureError,
    UnknownTool,
)

_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


@dataclass(frozen=True)
class Tool:
    """A callable with its schema."""

    schema: ToolSchema
    function: Callable[..., Any]
    """Sync or async; called with keyword arguments."""

    @property
    def is_async(self) -> bool:
        """Whether calling it gives a coroutine."""
        return inspect.iscoroutinefunction(self.function)


def tool_from_function(function: Callable[..., Any]) -> Tool:
    """A tool whose name, description and parameters are the function's own.

    The description is the docstring's first paragraph; a Google-style `Args:` section describes parameters; a
    parameter with a default is not required. Raises ToolSignatureError naming function and parameter.
    """
    name = getattr(function, "__name__", "")
    try:
        hints = typing.get_type_hints(function)
        signature = inspect.signature(function)
    except (TypeError, NameError, ValueError) as error:
        raise ToolSignatureError(
            f"{name or function!r}: its signature cannot be read: {error}"
        ) from error
    description, described = _docstring(function)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in signature.parameters.values():
        where = f"{name}({parameter.name})"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ToolSignatureError(
                f"{where} is {parameter.kind.description}: a model can only name its arguments"
            )
        if parameter.name not in hints:
            raise ToolSignatureError(f"{where} has no type: annotate it, the model reads the type")
        schema = _schema_of(hints[parameter.name], where)
        if parameter.name in described:
            schema["description"] = described[parameter.name]
        properties[parameter.name] = schema
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    try:
        checked = parse_tool_schema(
            {"name": name, "description": description, "parameters": parameters}, name or "tool"
        )
    except ToolSchemaError as error:
        raise ToolSignatureError(str(error)) from error
    return Tool(checked, function)


class ToolRegistry:
    """Tools by name, in the order given."""

    def __init__(self, tools: Iterable[Callable[..., Any] | Tool] = ()) -> None:
        """Raises ToolSignatureError for a function that cannot be a tool or a name that stands twice."""
        self._tools: dict[str, Tool] = {}
        for item in tools:
            self.add(item)

    def add(self, item: Callable[..., Any] | Tool) -> Tool:
        """One more tool."""
        tool = item if isinstance(item, Tool) else tool_from_function(item)
        if tool.schema.name in self._tools:
            raise ToolSignatureError(
                f"a tool named {tool.schema.name} is there already: rename one"
            )
        self._tools[tool.schema.name] = tool
        return tool

    @property
    def schemas(self) -> tuple[ToolSchema, ...]:
        """All schemas, in order."""
        return tuple(tool.schema for tool in self._tools.values())

    def find(self, name: str) -> Tool:
        """The tool of that name. Raises UnknownTool listing what there is."""
        if name not in self._tools:
            known = ", ".join(self._tools) or "none"
            raise UnknownTool(f"there is no tool {name!r}; tools: {known}")
        return self._tools[name]

    def arguments(self, call: ToolCall) -> tuple[Tool, dict[str, Any]]:
        """The tool and its checked arguments. Raises UnknownTool or ToolArgumentsError, both for the model to read."""
        tool = self.find(call.name)
        return tool, coerce_arguments(call.parse_arguments(), tool.schema)


def coerce_arguments(arguments: dict[str, Any], schema: ToolSchema) -> dict[str, Any]:
    """Arguments as the schema's types. Text becomes a number or boolean only where the schema asks for one
    (case A17).
    """
    properties: dict[str, Any] = schema.parameters.get("properties", {})
    missing = [name for name in schema.parameters.get("required", []) if name not in arguments]
    if missing:
        raise ToolArgumentsError(f"{schema.name} needs {', '.join(missing)}")
    unknown = [name for name in arguments if name not in properties]
    if unknown and schema.parameters.get("additionalProperties") is not True:
        raise ToolArgumentsError(
            f"{schema.name} has no parameter {', '.join(unknown)}; parameters: {', '.join(properties) or 'none'}"
        )
    return {
        name: coerce_value(value, properties.get(name, {}), f"{schema.name}.{name}")
        for name, value in arguments.items()
    }


def coerce_value(value: Any, schema: dict[str, Any], path: str) -> Any:
    """One value as its schema's type. Raises ToolArgumentsError naming path, value and type."""
    options = schema.get("anyOf")
    kinds = schema.get("type")
    if options is None and kinds is None:
        return value
    if options is None:
        kinds = kinds if isinstance(kinds, list) else [kinds]
        options = [{**schema, "type": kind} for kind in kinds]
    # A value that fits as it is wins over one that must be read from text.
    for attempt in (_exact, _from_text):
        for option in options:
            found, result = attempt(value, option, path)
            if found:
                allowed = option.get("enum")
                if allowed is not None and result not in allowed:
                    raise ToolArgumentsError(f"{path} is {value!r}, allowed are {allowed}")
                return result
    wanted = " or ".join(str(option.get("type")) for option in options)
    raise ToolArgumentsError(f"{path} is {value!r} ({type(value).__name__}), expected {wanted}")


def _exact(value: Any, schema: dict[str, Any], path: str) -> tuple[bool, Any]:
    kind = schema.get("type")
    if kind == "string":
        return isinstance(value, str), value
    if kind == "boolean":
        return isinstance(value, bool), value
    if kind == "null":
        return value is None, None
    if kind in ("integer", "number"):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if kind == "integer" and isinstance(value, float):
            return value.is_integer(), int(value) if value.is_integer() else value
        return number, value
    if kind == "array" and isinstance(value, list):
        items = schema.get("items", {})
        return True, [coerce_value(v, items, f"{path}[{i}]") for i, v in enumerate(value)]
    if kind == "object" and isinstance(value, dict):
        parts = schema.get("properties", {})
        return True, {k: coerce_value(v, parts.get(k, {}), f"{path}.{k}") for k, v in value.items()}
    return False, None


def _from_text(value: Any, schema: dict[str, Any], path: str) -> tuple[bool, Any]:
    del path
    kind = schema.get("type")
    if kind == "string" and isinstance(value, int | float) and not isinstance(value, bool):
        return True, str(value)
    if not isinstance(value, str):
        return False, None
    if kind == "integer" and re.fullmatch(r"[+-]?\d{1,32}", value):
        return True, int(value)
    if kind == "number" and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", value):
        return True, float(value)
    if kind == "boolean" and value.lower() in ("true", "false"):
        return True, value.lower() == "true"
    return False, None


def _schema_of(hint: Any, where: str) -> dict[str, Any]:
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    if hint is Any:
        return {}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in (list, dict):
        return {"type": "array" if hint is list else "object"}
    if origin is list:
        return {"type": "array", "items": _schema_of(arguments[0], where)}
    if origin is dict and arguments[0] is str:
        return {"type": "object"}
    if origin is Literal:
        return {**_enum_type(arguments), "enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return _union([_schema_of(part, where) for part in arguments])
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        values = [member.value for member in hint]
        return {**_enum_type(values), "enum": values}
    if dataclasses.is_dataclass(hint) or typing.is_typeddict(hint):
        fields = typing.get_type_hints(hint)
        return {
            "type": "object",
            "properties": {
                name: _schema_of(part, f"{where}.{name}") for name, part in fields.items()
            },
            "required": _required_fields(hint, fields),
        }
    raise ToolSignatureError(
        f"{where} has type {hint}: use str, int, float, bool, list, dict, Literal, an enum, a dataclass or"
        " a TypedDict, or a union of them"
    )


def _union(parts: list[dict[str, Any]]) -> dict[str, Any]:
    simple = [part["type"] for part in parts if set(part) == {"type"}]
    return {"type": simple} if len(simple) == len(parts) else {"anyOf": parts}


def _enum_type(values: Iterable[Any]) -> dict[str, Any]:
    kinds = {_SCALARS.get(type(value)) for value in values}
    kind = kinds.pop() if len(kinds) == 1 else None
    return {"type": kind} if kind is not None else {}


def _required_fields(hint: Any, fields: dict[str, Any]) -> list[str]:
    if typing.is_typeddict(hint):
        return [name for name in fields if name in hint.__required_keys__]
    return [
        field.name
        for field in dataclasses.fields(hint)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]


def _docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """(first paragraph, parameter → description)."""
    text = inspect.getdoc(function) or ""
    description = " ".join(text.split("\n\n")[0].split())
    described: dict[str, str] = {}
    section = re.search(r"^Args:\n((?:[ \t]+.*\n?)+)", text, re.MULTILINE)
    if section:
        for name, words in re.findall(
            r"^\s+(\w+)(?:\s*\([^)]*\))?:\s*(.+)$", section.group(1), re.MULTILINE
        ):
            described[name] = words.strip()
        if description.startswith("Args:"):
            description = ""
    return description, described
