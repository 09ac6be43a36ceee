"""Runs Python tools for calls: bounded in time, number and size. Whatever goes wrong becomes a result for the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.to_thread

from moorage.tools_bridge.call import ToolCall, ToolResult
from moorage.tools_bridge.errors import ToolError
from moorage.tools_bridge.registry import Tool, ToolRegistry


@dataclass(frozen=True)
class RunnerLimits:
    """Bounds of a runner."""

    max_concurrency: int = 8
    """Tools that run at once; further calls wait."""
    deadline_s: float = 300.0
    """Seconds that one call may take, its wait for a place included."""
    max_result_bytes: int = 256 * 1024
    """UTF-8 bytes of one result; a longer one keeps head and tail around a notice."""


class ToolRunner:
    """One runner per client or session. Cancel-safe: a cancelled call cancels its coroutine and counts nothing."""

    def __init__(self, registry: ToolRegistry, limits: RunnerLimits | None = None) -> None:
        self._registry = registry
        self._limits = limits or RunnerLimits()
        self._places = anyio.CapacityLimiter(self._limits.max_concurrency)
        self.num_abandoned_threads = 0
        """Sync tools that ran into their deadline: Python cannot stop a thread, so it runs on and its result is
        dropped.
        """

    async def run(self, call: ToolCall) -> ToolResult:
        """Run one call. Unknown tool, bad arguments, an exception and the deadline give error results; only
        cancellation is raised. Bounded by `limits.deadline_s`."""
        try:
            tool, arguments = self._registry.arguments(call)
        except ToolError as error:
            return ToolResult(call.call_id, f"error: {error}", is_error=True)
        try:
            with anyio.fail_after(self._limits.deadline_s):
                async with self._places:
                    value = await self._call(tool, arguments)
        except TimeoutError:
            if not tool.is_async:
                self.num_abandoned_threads += 1
            return ToolResult(
                call.call_id,
                f"error: {call.name} did not answer within {self._limits.deadline_s:g} s",
                is_error=True,
            )
        except Exception as error:  # whatever a tool raises is for the model to read
            return ToolResult(
                call.call_id, f"error: {type(error).__name__}: {error}", is_error=True
            )
        return ToolResult(call.call_id, shorten(_as_text(value), self._limits.max_result_bytes))

    async def run_all(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Run calls side by side under the limits; results in the order of the calls."""
        results: dict[int, ToolResult] = {}

        async def one(index: int, call: ToolCall) -> None:
            results[index] = await self.run(call)

        async with anyio.create_task_group() as group:
            for index, call in enumerate(calls):
                group.start_soon(one, index, call)
        return [results[index] for index in range(len(calls))]

    async def _call(self, tool: Tool, arguments: dict[str, Any]) -> Any:
        if tool.is_async:
            return await tool.function(**arguments)
        return await anyio.to_thread.run_sync(
            lambda: tool.function(**arguments), abandon_on_cancel=True
        )


def shorten(text: str, max_bytes: int) -> str:
    """`text`, or its head and tail around a notice with the number of bytes dropped; cut between characters."""
    data = text.encode("utf-8", "replace")
    if len(data) <= max_bytes:
        return text
    notice = f"\n[… {len(data) - max_bytes} bytes dropped …]\n"
    room = max(0, max_bytes - len(notice.encode()))
    head = data[: room - room // 3].decode("utf-8", "ignore")
    tail = data[len(data) - room // 3 :].decode("utf-8", "ignore") if room // 3 else ""
    return head + notice + tail


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)
