"""Tool schemas as the client sends them → the canonical form that the template renders and the
store keeps.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from moorage.sessions.errors import InvalidArgument
from moorage.sessions.proto import sessions_pb2 as pb
from moorage.tools_bridge.call import canonical_tool_json, parse_tool_schemas
from moorage.tools_bridge.errors import ToolSchemaError


def canonical_tools(tools: Iterable[pb.ToolSchema], limit: int) -> tuple[dict[str, Any], ...]:
    """Checked schemas in a form that depends on their meaning alone (case J10).

    Keys have a fixed order. Properties come with the required ones first, in the order of
    `required`, then the optional ones by name: JSON objects have no order, so whoever built the
    schema must not decide our tokens. Lists (enum, required, oneOf) have a meaning and keep theirs.
    Raises InvalidArgument with the field's path.
    """
    values: list[object] = []
    for i, tool in enumerate(tools):
        if i >= limit:
            raise InvalidArgument(
                f"tools has more than {limit} entries, which is the limit", field="tools"
            )
        path = f"tools[{i}].parameters_json"
        try:
            parameters = json.loads(tool.parameters_json or "{}")
        except ValueError as error:
            raise InvalidArgument(f"{path} is not JSON: {error}", field=path) from error
        values.append(
            {"name": tool.name, "description": tool.description, "parameters": parameters}
        )
    try:
        schemas = parse_tool_schemas(values)
    except ToolSchemaError as error:
        raise InvalidArgument(str(error), field=error.path) from error
    return tuple(_with_ordered_properties(canonical_tool_json(schema)) for schema in schemas)


def _with_ordered_properties(value: Any) -> Any:
    """`value` with every `properties` mapping ordered as above, at any depth."""
    if isinstance(value, list):
        return [_with_ordered_properties(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    ordered = {key: _with_ordered_properties(part) for key, part in value.items()}
    properties = ordered.get("properties")
    if isinstance(properties, dict):
        required = value.get("required")
        first = [n for n in required if n in properties] if isinstance(required, list) else []
        rest = sorted(name for name in properties if name not in first)
        ordered["properties"] = {name: properties[name] for name in [*first, *rest]}
    return ordered
