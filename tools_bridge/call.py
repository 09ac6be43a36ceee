"""What a tool is, what a call is, what a result is; and the checks that stand between a client and a template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from moorage.tools_bridge.errors import ToolArgumentsError, ToolSchemaError

MAX_SCHEMA_BYTES = 64 * 1024
"""One tool's schema as JSON; every session carries it in its prompt."""
MAX_TOOLS = 256
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})


@dataclass(frozen=True)
class ToolSchema:
    """A tool as the model sees it."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of an object."""


@dataclass(frozen=True)
class ToolCall:
    """A complete call that the model wrote."""

    call_id: str
    """Stable: follows from session, turn and index, so that a replay gives the same id."""
    index: int
    """Position of the call in the reply: 0, 1, 2 …"""
    name: str
    arguments: str
    """JSON text of an object, exactly as the model wrote it."""

    def parse_arguments(self) -> dict[str, Any]:
        """The arguments as values. Raises ToolArgumentsError."""
        try:
            value = json.loads(self.arguments)
        except json.JSONDecodeError as error:
            raise ToolArgumentsError(
                f"the arguments of {self.name} are not JSON: {error}"
            ) from error
        if not isinstance(value, dict):
            raise ToolArgumentsError(
                f"the arguments of {self.name} are {type(value).__name__}, expected an object"
            )
        return value


@dataclass(frozen=True)
class ToolResult:
    """What a tool answered. An error is a result too: the model reads it."""

    call_id: str
    content: str
    is_error: bool = False


def parse_tool_schema(value: object, path: str = "tool") -> ToolSchema:
    """Check one schema, `{"type": "function", "function": {…}}` or the inner object alone.

    Raises ToolSchemaError with the field's path.
    """
    tool = _mapping(value, path)
    if "function" in tool:
        if tool.get("type", "function") != "function":
            raise ToolSchemaError(f"{path}.type", f"is {tool['type']!r}, supported is 'function'")
        tool, path = _mapping(tool["function"], f"{path}.function"), f"{path}.function"
    name = tool.get("name")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ToolSchemaError(
            f"{path}.name", f"is {_shown(name)}, expected 1 to 64 of A-Z a-z 0-9 _ -"
        )
    description = tool.get("description", "")
    if not isinstance(description, str):
        raise ToolSchemaError(
            f"{path}.description", f"is {type(description).__name__}, expected text"
        )
    parameters = dict(_mapping(tool.get("parameters", {}), f"{path}.parameters"))
    parameters.setdefault("type", "object")
    if parameters["type"] != "object":
        raise ToolSchemaError(
            f"{path}.parameters.type", f"is {_shown(parameters['type'])}, expected 'object'"
        )
    parameters.setdefault("properties", {})
    _check_schema(parameters, f"{path}.parameters", depth=0)
    try:
        size = len(json.dumps(parameters).encode()) + len(description.encode())
    except (TypeError, ValueError) as error:
        raise ToolSchemaError(f"{path}.parameters", f"is not JSON: {error}") from error
    if size > MAX_SCHEMA_BYTES:
        raise ToolSchemaError(path, f"has {size} bytes, allowed are {MAX_SCHEMA_BYTES}")
    return ToolSchema(name, description, parameters)


def parse_tool_schemas(values: Iterable[object]) -> tuple[ToolSchema, ...]:
    """Check a list of schemas; names must differ. Raises ToolSchemaError with the field's path."""
    schemas: list[ToolSchema] = []
    for index, value in enumerate(values):
        if index >= MAX_TOOLS:
            raise ToolSchemaError("tools", f"has more than {MAX_TOOLS} entries")
        schema = parse_tool_schema(value, f"tools[{index}]")
        if any(schema.name == other.name for other in schemas):
            raise ToolSchemaError(f"tools[{index}].name", f"{schema.name!r} stands there twice")
        schemas.append(schema)
    return tuple(schemas)


def canonical_tool_json(schema: ToolSchema) -> dict[str, Any]:
    """The one form in which a tool enters a prompt: fixed key order, so that the same tool is the same tokens.

    `type, properties, required` first; the order of properties, enum and required is meaning and stays.
    """
    return {
        "type": "function",
        "function": {
            "name": schema.name,
            "description": schema.description,
            "parameters": _ordered(schema.parameters),
        },
    }


_FIRST_KEYS = ("type", "description", "properties", "required", "items", "enum")


def _ordered(schema: object) -> Any:
    if not isinstance(schema, dict):
        return schema
    keys = [key for key in _FIRST_KEYS if key in schema]
    keys += sorted(key for key in schema if key not in _FIRST_KEYS)
    ordered: dict[str, Any] = {}
    for key in keys:
        value = schema[key]
        if key == "properties" and isinstance(value, dict):
            ordered[key] = {name: _ordered(part) for name, part in value.items()}
        elif key in ("items", "additionalProperties"):
            ordered[key] = _ordered(value)
        elif key in ("anyOf", "oneOf", "allOf") and isinstance(value, list):
            ordered[key] = [_ordered(part) for part in value]
        else:
            ordered[key] = value
    return ordered


def _check_schema(schema: Mapping[str, Any], path: str, depth: int) -> None:
    if depth > 16:
        raise ToolSchemaError(path, "is nested more than 16 deep")
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    for one in kinds:
        if one is not None and (not isinstance(one, str) or one not in _TYPES):
            raise ToolSchemaError(
                f"{path}.type", f"is {_shown(one)}, known are {', '.join(sorted(_TYPES))}"
            )
    properties = _mapping(schema.get("properties", {}), f"{path}.properties")
    for name, part in properties.items():
        if not isinstance(name, str) or not name:
            raise ToolSchemaError(
                f"{path}.properties", f"has the name {_shown(name)}, expected text"
            )
        _check_schema(
            _mapping(part, f"{path}.properties.{name}"), f"{path}.properties.{name}", depth + 1
        )
    required = schema.get("required", [])
    if not isinstance(required, list):
        raise ToolSchemaError(f"{path}.required", f"is {type(required).__name__}, expected a list")
    for name in required:
        if name not in properties:
            raise ToolSchemaError(f"{path}.required", f"names {_shown(name)}, which is no property")
    if isinstance(schema.get("items"), dict):
        _check_schema(schema["items"], f"{path}.items", depth + 1)


def _mapping(value: object, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ToolSchemaError(path, f"is {type(value).__name__}, expected an object")
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 48 else text[:45] + "…"
