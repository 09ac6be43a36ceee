"""Python type hints → JSON schema, and checked JSON values → the Python values the hints ask for.

Known are str, int, float, bool, None, Any, list, dict with text keys, Literal, enums, dataclasses,
TypedDicts and unions of them. Everything else is refused when the tool is made, with the function
and the parameter named: a schema that says less than the function needs would fail when it runs.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal, Union

from moorage.tools_bridge.errors import ToolArgumentsError, ToolSignatureError

_SCALARS: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
}
Convert = Callable[[Any], Any]
"""A value that fits the schema → the Python value."""


@dataclasses.dataclass(frozen=True)
class HintSchema:
    """What one hint means."""

    schema: dict[str, Any]
    """The JSON schema of the hint."""
    convert: Convert | None
    """None where JSON's own value is the Python value."""
    fits: Callable[[Any], bool]
    """Whether a checked value is of this member of a union."""


def read_hint(hint: Any, where: str, outer: tuple[Any, ...] = ()) -> HintSchema:
    """Schema and conversion of a hint; `outer` are the classes that it stands in.

    Raises ToolSignatureError, which names `where`, for a hint that JSON cannot express and for a
    class that contains itself.
    """
    if hint is Any:
        return HintSchema({}, None, lambda _: True)
    if isinstance(hint, type) and hint in _SCALARS:
        return HintSchema({"type": _SCALARS[hint]}, None, _scalar_test(hint))
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is list or origin is list:
        return _list(arguments, where, outer)
    if hint is dict or (origin is dict and arguments[0] is str):
        return _dict(arguments, where, outer)
    if origin is Literal:
        _check_json_scalars(arguments, where)
        return HintSchema(_enum_schema(arguments), None, lambda value: _is_one_of(value, arguments))
    if origin in (Union, types.UnionType):
        return _union([read_hint(part, where, outer) for part in arguments])
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        values = [member.value for member in hint]
        _check_json_scalars(values, where)
        return HintSchema(_enum_schema(values), hint, lambda value: _is_one_of(value, values))
    if typing.is_typeddict(hint) or (isinstance(hint, type) and dataclasses.is_dataclass(hint)):
        return _record(hint, where, outer)
    raise ToolSignatureError(
        f"{where} has type {hint}: use str, int, float, bool, list, dict with text keys,"
        " Literal, an enum, a dataclass, a TypedDict, or a union of them"
    )


def _list(arguments: tuple[Any, ...], where: str, outer: tuple[Any, ...]) -> HintSchema:
    if not arguments:
        return HintSchema({"type": "array"}, None, lambda value: isinstance(value, list))
    item = read_hint(arguments[0], f"{where}[]", outer)
    convert = item.convert
    return HintSchema(
        {"type": "array", "items": item.schema},
        None if convert is None else lambda value: [convert(part) for part in value],
        lambda value: isinstance(value, list) and all(item.fits(part) for part in value),
    )


def _dict(arguments: tuple[Any, ...], where: str, outer: tuple[Any, ...]) -> HintSchema:
    part = read_hint(arguments[1] if arguments else Any, f"{where}{{}}", outer)
    schema: dict[str, Any] = {"type": "object"}
    if part.schema:
        schema["additionalProperties"] = part.schema
    convert = part.convert
    return HintSchema(
        schema,
        None if convert is None else lambda value: {k: convert(v) for k, v in value.items()},
        lambda value: isinstance(value, dict) and all(part.fits(v) for v in value.values()),
    )


def _record(hint: Any, where: str, outer: tuple[Any, ...]) -> HintSchema:
    """A dataclass or a TypedDict."""
    if hint in outer:
        raise ToolSignatureError(f"{where} contains its own type {hint.__name__}: use dict there")
    try:
        hints = typing.get_type_hints(hint)
    except (NameError, TypeError) as error:
        raise ToolSignatureError(
            f"{where}: the types of {hint.__name__} cannot be read: {error}"
        ) from error
    if typing.is_typeddict(hint):
        names = list(hints)
        required = _required_keys(hint, names)
        build: Callable[..., Any] = dict
    else:
        fields = [field for field in dataclasses.fields(hint) if field.init]
        names = [field.name for field in fields]
        required = [
            field.name
            for field in fields
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        ]
        build = hint
    parts = {name: read_hint(hints[name], f"{where}.{name}", (*outer, hint)) for name in names}
    schema = {
        "type": "object",
        "properties": {name: part.schema for name, part in parts.items()},
        "required": required,
    }

    def convert(value: dict[str, Any]) -> Any:
        # Checked here: `additionalProperties` would say it to the model at the price of tokens.
        unknown = [name for name in value if name not in parts]
        if unknown:
            raise ToolArgumentsError(
                f"{where} has no field {', '.join(unknown)}; fields: {', '.join(parts) or 'none'}"
            )
        return build(**{name: _apply(parts[name], part) for name, part in value.items()})

    def fits(value: Any) -> bool:
        return (
            isinstance(value, dict)
            and set(required) <= set(value) <= set(parts)
            and all(parts[name].fits(part) for name, part in value.items())
        )

    return HintSchema(schema, convert, fits)


def _required_keys(hint: Any, names: Sequence[str]) -> list[str]:
    """Keys that a TypedDict must have. `__required_keys__` alone does not see `NotRequired` where
    annotations are text (`from __future__ import annotations`).
    """
    marked = typing.get_type_hints(hint, include_extras=True)
    required = []
    for name in names:
        mark = typing.get_origin(marked[name])
        if mark is typing.Required or (
            mark is not typing.NotRequired and name in hint.__required_keys__
        ):
            required.append(name)
    return required


def _union(parts: Sequence[HintSchema]) -> HintSchema:
    simple = [part.schema["type"] for part in parts if set(part.schema) == {"type"}]
    schema: dict[str, Any] = (
        {"type": simple}
        if len(simple) == len(parts)
        else {"anyOf": [part.schema for part in parts]}
    )

    def convert(value: Any) -> Any:
        for part in parts:
            if part.fits(value):
                return _apply(part, value)
        return value

    plain = all(part.convert is None for part in parts)
    return HintSchema(
        schema, None if plain else convert, lambda value: any(part.fits(value) for part in parts)
    )


def _apply(part: HintSchema, value: Any) -> Any:
    return value if part.convert is None else part.convert(value)


def _scalar_test(hint: type) -> Callable[[Any], bool]:
    if hint is float:
        return lambda value: type(value) in (int, float)
    return lambda value: type(value) is hint


def _enum_schema(values: Sequence[Any]) -> dict[str, Any]:
    kinds = {_SCALARS[type(value)] for value in values}
    kind = {"type": kinds.pop()} if len(kinds) == 1 else {}
    return {**kind, "enum": list(values)}


def _check_json_scalars(values: Sequence[Any], where: str) -> None:
    for value in values:
        if type(value) not in _SCALARS:
            raise ToolSignatureError(
                f"{where} allows {value!r}, which JSON cannot express: use text, numbers or booleans"
            )


def _is_one_of(value: Any, values: Sequence[Any]) -> bool:
    return any(type(value) is type(one) and value == one for one in values)
