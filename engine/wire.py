"""Border messages as msgpack, so that the engine may live in another process.

A dataclass becomes a map with its class name under `$`; tuples become arrays and come back as tuples.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from typing import Any, cast

import msgpack

from moorage.engine import output, plan, request
from moorage.engine.errors import WireError
from moorage.prefix_cache.block import Namespace

_CLASSES: dict[str, type[Any]] = {
    cls.__name__: cls
    for module in (request, output, plan)
    for cls in vars(module).values()
    if isinstance(cls, type)
    and cls.__module__ == module.__name__
    and (dataclasses.is_dataclass(cls) or issubclass(cls, StrEnum))
} | {"Namespace": Namespace}


def to_wire(message: object) -> bytes:
    """Pack one border message. Raises WireError for anything that is not one."""
    if type(message).__name__ not in _CLASSES:
        raise WireError(f"{type(message).__name__} is not a border message")
    return cast("bytes", msgpack.packb(_plain(message), use_bin_type=True))


def from_wire(data: bytes) -> object:
    """Unpack what `to_wire` packed. Raises WireError for bytes that are not a border message."""
    try:
        plain = msgpack.unpackb(data, raw=False, strict_map_key=True)
        return _typed(plain)
    except WireError:
        raise
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise WireError(f"{len(data)} bytes are not a border message: {error}") from error


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"$": type(value).__name__, **fields}
    if isinstance(value, StrEnum):
        return {"$": type(value).__name__, "value": value.value}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def _typed(value: object) -> object:
    if isinstance(value, list):
        return tuple(_typed(item) for item in value)
    if not isinstance(value, dict):
        return value
    name = value.pop("$", None)
    cls = _CLASSES.get(name) if isinstance(name, str) else None
    if cls is None:
        raise WireError(f"unknown border message {name!r}")
    if issubclass(cls, StrEnum):
        return cls(value["value"])
    return cls(**{key: _typed(item) for key, item in value.items()})
