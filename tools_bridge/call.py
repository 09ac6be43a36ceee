"""What a tool, a call and a result are, and the checks between a client and a template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from moorage.tools_bridge.errors import ToolArgumentsError, ToolSchemaError

MAX_SCHEMA_BYTES = 64 * 1024
"""One tool as JSON, in UTF-8 bytes; every session that offers it carries it in its prompt."""
MAX_TOOLS = 256
"""Tools of one session."""
MAX_DEPTH = 16
"""Schemas inside schemas."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_UNIONS = ("anyOf", "oneOf", "allOf")


@dataclass(frozen=True)
class ToolSchema:
    """A tool as the model sees it. `parse_tool_schema` makes one that is checked."""

    name: str
    """1 to 64 of `A-Z a-z 0-9 _ -`."""
    description: str
    """For the model; may be empty."""
    parameters: dict[str, Any]
    """JSON schema of an object."""


@dataclass(frozen=True)
class ToolCall:
    """A complete call that the model wrote."""

    call_id: str
    """Stable: follows from session, turn and index, so that a replay gives the same id."""
    index: int
    """Position of the call in the reply: 0, 1, 2 …, never the tool's place in the request."""
    name: str
    """As the model wrote it; it need not be a tool that exists."""
    arguments: str
    """JSON text of an object, exactly as the model wrote it."""

    def parse_arguments(self) -> dict[str, Any]:
        """The arguments as values.

        Raises ToolArgumentsError for what is no JSON object, and for JSON that Python reads but no
        tool should see: NaN, infinities, numbers of thousands of digits, half a surrogate pair.
        """
        try:
            value = json.loads(self.arguments, parse_constant=_refuse_constant)
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError as error:
            raise ToolArgumentsError(
                f"the arguments of {self.name} hold half of a surrogate pair: write the character"
                " itself or both halves"
            ) from error
        except (ValueError, RecursionError) as error:
            raise ToolArgumentsError(
                f"the arguments of {self.name} are not JSON: {error}"
            ) from error
        if not isinstance(value, dict):
            raise ToolArgumentsError(
                f"the arguments of {self.name} are of type {type(value).__name__}, expected an"
                " object"
            )
        return value


@dataclass(frozen=True)
class ToolResult:
    """What a tool answered. An error is a result too: the model reads it."""

    call_id: str
    """Of the call that this answers."""
    content: str
    """Valid Unicode, without a lone surrogate."""
    is_error: bool = False
    """The tool failed, or was not run; `content` says why."""


def parse_tool_schema(value: object, path: str = "tool") -> ToolSchema:
    """Check one schema, `{"type": "function", "function": {…}}` or the inner object alone.

    Checked is what a template renders and what `schema.py` relies on; other JSON-schema keywords
    pass as they are. Raises ToolSchemaError with the field's path. Cost: linear in the schema.
    """
    tool = _mapping(value, path)
    if "function" in tool:
        if tool.get("type", "function") != "function":
            raise ToolSchemaError(
                f"{path}.type", f"is {_shown(tool['type'])}, supported is 'function'"
            )
        tool, path = _mapping(tool["function"], f"{path}.function"), f"{path}.function"
    name = tool.get("name")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ToolSchemaError(
            f"{path}.name", f"is {_shown(name)}, expected 1 to 64 of A-Z a-z 0-9 _ -"
        )
    description = tool.get("description", "")
    if not isinstance(description, str):
        raise ToolSchemaError(
            f"{path}.description", f"is of type {type(description).__name__}, expected text"
        )
    parameters = dict(_mapping(tool.get("parameters", {}), f"{path}.parameters"))
    parameters.setdefault("type", "object")
    if parameters["type"] != "object":
        raise ToolSchemaError(
            f"{path}.parameters.type", f"is {_shown(parameters['type'])}, expected 'object'"
        )
    parameters.setdefault("properties", {})
    _check_schema(parameters, f"{path}.parameters", depth=0)
    size = _json_bytes(description, f"{path}.description")
    size += _json_bytes(parameters, f"{path}.parameters")
    if size > MAX_SCHEMA_BYTES:
        raise ToolSchemaError(
            path, f"has {size} bytes, allowed are {MAX_SCHEMA_BYTES}: shorten its descriptions"
        )
    return ToolSchema(name, description, parameters)


def parse_tool_schemas(values: Iterable[object]) -> tuple[ToolSchema, ...]:
    """Check a list of schemas; names must differ.

    Raises ToolSchemaError with the field's path, which begins with `tools[index]`.
    """
    schemas: list[ToolSchema] = []
    names: set[str] = set()
    for index, value in enumerate(values):
        if index >= MAX_TOOLS:
            raise ToolSchemaError("tools", f"has more than {MAX_TOOLS} entries, which is the limit")
        schema = parse_tool_schema(value, f"tools[{index}]")
        if schema.name in names:
            raise ToolSchemaError(
                f"tools[{index}].name", f"{schema.name!r} stands there twice: rename one"
            )
        names.add(schema.name)
        schemas.append(schema)
    return tuple(schemas)


def canonical_tool_json(schema: ToolSchema) -> dict[str, Any]:
    """The one form in which a tool enters a prompt, so that the same tool is the same tokens.

    Keys have a fixed order: `type, description, properties, required, items, enum`, then the rest
    by name. The order of lists (enum, required, oneOf) is meaning and stays; so does the declared
    order of properties, because a model writes arguments in the order it reads them.
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
_NAMED_SCHEMAS = ("properties", "$defs", "definitions", "patternProperties")


def _ordered(schema: object) -> Any:
    """A schema, or a JSON value inside one, with its keys in order at any depth."""
    if isinstance(schema, list | tuple):
        return [_ordered(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    keys = [key for key in _FIRST_KEYS if key in schema]
    keys += sorted(key for key in schema if key not in _FIRST_KEYS)
    ordered: dict[str, Any] = {}
    for key in keys:
        part = schema[key]
        if key in _NAMED_SCHEMAS and isinstance(part, Mapping):
            # These keys are names: a property called "type" must not jump the queue.
            names = part if key == "properties" else sorted(part)
            ordered[key] = {name: _ordered(part[name]) for name in names}
        else:
            ordered[key] = _ordered(part)
    return ordered


def _check_schema(schema: Mapping[str, Any], path: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ToolSchemaError(path, f"is nested more than {MAX_DEPTH} deep, which is the limit")
    kind = schema.get("type")
    for one in kind if isinstance(kind, list) else [] if kind is None else [kind]:
        if not isinstance(one, str) or one not in _TYPES:
            raise ToolSchemaError(
                f"{path}.type", f"is {_shown(one)}, known are {', '.join(sorted(_TYPES))}"
            )
    properties = _mapping(schema.get("properties", {}), f"{path}.properties")
    for name, part in properties.items():
        if not isinstance(name, str) or not name:
            raise ToolSchemaError(f"{path}.properties", f"has the name {_shown(name)}, not text")
        _check_part(part, f"{path}.properties.{name}", depth)
    _check_required(schema.get("required", []), properties, f"{path}.required")
    if "enum" in schema:
        _list(schema["enum"], f"{path}.enum")
    if "items" in schema:
        _check_part(schema["items"], f"{path}.items", depth)
    if "additionalProperties" in schema:
        _check_part(schema["additionalProperties"], f"{path}.additionalProperties", depth)
    for key in _UNIONS:
        for index, part in enumerate(_list(schema.get(key, []), f"{path}.{key}")):
            _check_part(part, f"{path}.{key}[{index}]", depth)


def _check_part(part: object, path: str, depth: int) -> None:
    if not isinstance(part, bool):  # true and false are schemas too: anything, nothing
        _check_schema(_mapping(part, path), path, depth + 1)


def _check_required(required: object, properties: Mapping[str, Any], path: str) -> None:
    for name in _list(required, path):
        if not isinstance(name, str) or name not in properties:
            raise ToolSchemaError(path, f"names {_shown(name)}, which is no property")


def _mapping(value: object, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ToolSchemaError(path, f"is of type {type(value).__name__}, expected an object")
    return value


def _list(value: object, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise ToolSchemaError(path, f"is of type {type(value).__name__}, expected a list")
    return value


def _json_bytes(value: object, path: str) -> int:
    try:
        return len(json.dumps(value, ensure_ascii=False, allow_nan=False).encode())
    except UnicodeEncodeError as error:
        raise ToolSchemaError(path, "holds half of a surrogate pair, which is no text") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolSchemaError(path, f"is not JSON: {error}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 48 else text[:45] + "…"
