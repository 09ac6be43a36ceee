"""The client's side of tools: Python functions, their schemas, and running a call."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from moorage.sessions.proto import sessions_pb2 as pb
from moorage.tools_bridge.call import ToolCall
from moorage.tools_bridge.registry import ToolRegistry
from moorage.tools_bridge.runner import ToolRunner


class ToolBox:
    """Functions that `run` calls. Raises ToolSignatureError for one that has no schema."""

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        self._functions = tuple(functions)
        self._registry = ToolRegistry(self._functions)
        self._runner = ToolRunner(self._registry)

    def extended(self, functions: Sequence[Callable[..., Any]]) -> ToolBox:
        """This box with more functions."""
        return ToolBox((*self._functions, *functions)) if functions else self

    def schemas(self) -> list[pb.ToolSchema]:
        """The schemas, in the order of the functions."""
        return [
            pb.ToolSchema(
                name=schema.name,
                description=schema.description,
                parameters_json=json.dumps(schema.parameters, ensure_ascii=False),
            )
            for schema in self._registry.schemas
        ]

    async def run(self, call_id: str, index: int, name: str, arguments: str) -> pb.ToolResult:
        """One call. Whatever goes wrong in the tool is a result for the model; cancellation
        propagates.
        """
        result = await self._runner.run(ToolCall(call_id, index, name, arguments))
        return pb.ToolResult(
            call_id=result.call_id, content=result.content, is_error=result.is_error
        )
