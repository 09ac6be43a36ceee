"""Values against a JSON schema: what a model wrote becomes what the schema says, or an error.

Types come from the schema, never from how a value looks (case A17): "00501" stays text where text
is wanted and becomes a number only where a number is. A conversion happens where it loses nothing
(5.0 → 5, "5" → 5, 4 → "4"); everything else is an error that the model reads and can mend.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from moorage.tools_bridge.call import ToolSchema
from moorage.tools_bridge.errors import ToolArgumentsError

_INTEGER = re.compile(r"[+-]?[0-9]{1,32}")
_NUMBER = re.compile(r"[+-]?([0-9]{1,32}(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
_BOOLEANS = {"true": True, "false": False}
_MISFIT = object()
"""No value: the option does not fit."""


def coerce_arguments(arguments: Mapping[str, Any], schema: ToolSchema) -> dict[str, Any]:
    """The arguments of a call as the types of its tool's schema.

    An unknown name is an error unless the schema allows more (`additionalProperties`): a tool
    that runs without an argument the model meant does something else than it was asked. Raises
    ToolArgumentsError naming the path, the value and what is wanted.
    """
    return _object(arguments, schema.parameters, schema.name, closed=True)


def coerce_value(value: Any, schema: Mapping[str, Any] | bool, path: str) -> Any:
    """One value as its schema's type. Raises ToolArgumentsError naming path, value and type."""
    if isinstance(schema, bool):
        return value
    options = _options(schema)
    if not options:
        return _allowed(value, schema, path)
    misfit: ToolArgumentsError | None = None
    # A value that fits as it is wins over one that must be converted.
    for converts in (False, True):
        for option in options:
            try:
                found = _fit(value, option, path, converts)
            except ToolArgumentsError as error:
                misfit = error  # right outside, wrong inside: the most telling message
                continue
            if found is not _MISFIT:
                return found
    if misfit is not None:
        raise misfit
    wanted = " or ".join(_wanted(option) for option in options)
    kind = type(value).__name__
    raise ToolArgumentsError(f"{path} is {_shown(value)} ({kind}), expected {wanted}")


def _options(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The schemas of one type each, one of which must fit; empty where anything does."""
    parts = schema.get("anyOf") or schema.get("oneOf")
    if parts:
        options: list[Mapping[str, Any]] = []
        for part in parts:
            inner = [] if isinstance(part, bool) else _options(part)
            options += inner or [part if isinstance(part, Mapping) else {}]
        return options
    kind = schema.get("type")
    if isinstance(kind, list):
        return [{**schema, "type": one} for one in kind]
    return [] if kind is None else [schema]


def _fit(value: Any, schema: Mapping[str, Any], path: str, converts: bool) -> Any:
    if "type" not in schema:
        return _allowed(value, schema, path)
    found = _converted(value, schema["type"]) if converts else _exact(value, schema, path)
    return found if found is _MISFIT else _allowed(found, schema, path)


def _exact(value: Any, schema: Mapping[str, Any], path: str) -> Any:
    kind = schema["type"]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "array" and isinstance(value, list):
        items = schema.get("items", {})
        return [coerce_value(item, items, f"{path}[{i}]") for i, item in enumerate(value)]
    if kind == "object" and isinstance(value, dict):
        return _object(value, schema, path, closed=False)
    fits = (
        (kind == "string" and isinstance(value, str))
        or (kind == "boolean" and isinstance(value, bool))
        or (kind == "null" and value is None)
        or (kind == "number" and number and math.isfinite(value))
        or (kind == "integer" and number and isinstance(value, int))
    )
    return value if fits else _MISFIT


def _converted(value: Any, kind: str) -> Any:
    if isinstance(value, bool) or value is None:
        return _MISFIT
    if isinstance(value, float):
        return int(value) if kind == "integer" and value.is_integer() else _MISFIT
    if isinstance(value, int):
        # A float has lost its digits already (1.10 is 1.1); a whole number has not.
        return str(value) if kind == "string" else _MISFIT
    if not isinstance(value, str):
        return _MISFIT
    if kind in ("integer", "number") and _INTEGER.fullmatch(value):
        return int(value)
    if kind == "number" and _NUMBER.fullmatch(value) and math.isfinite(float(value)):
        return float(value)
    if kind == "boolean":
        return _BOOLEANS.get(value.lower(), _MISFIT)
    return _MISFIT


def _object(
    value: Mapping[str, Any], schema: Mapping[str, Any], path: str, *, closed: bool
) -> dict[str, Any]:
    properties: Mapping[str, Any] = schema.get("properties", {})
    missing = [name for name in schema.get("required", []) if name not in value]
    if missing:
        raise ToolArgumentsError(f"{path} needs {', '.join(missing)}")
    more = schema.get("additionalProperties", not closed)
    unknown = [name for name in value if name not in properties]
    if unknown and more is False:
        raise ToolArgumentsError(
            f"{path} has no parameter {', '.join(name[:80] for name in unknown)}; parameters:"
            f" {', '.join(properties) or 'none'}"
        )
    return {
        name: coerce_value(part, properties.get(name, more), f"{path}.{name}")
        for name, part in value.items()
    }


def _allowed(value: Any, schema: Mapping[str, Any], path: str) -> Any:
    """`value`, if the schema's enum has it; 1, 1.0 and True are different."""
    if "enum" not in schema:
        return value
    if any(type(value) is type(one) and value == one for one in schema["enum"]):
        return value
    raise ToolArgumentsError(f"{path} is {_shown(value)}, allowed are {_shown(schema['enum'])}")


def _wanted(option: Mapping[str, Any]) -> str:
    return str(option.get("type", "a value"))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:199] + "…"
