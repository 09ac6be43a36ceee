"""Runs Python tools for calls, bounded in time, number and size. Whatever a tool does wrong becomes
a result for the model.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import functools
import inspect
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.to_thread

from moorage.tools_bridge.call import ToolCall, ToolResult
from moorage.tools_bridge.errors import ToolConfigError, ToolError, TooManyAbandoned
from moorage.tools_bridge.registry import Tool, ToolRegistry

MIN_RESULT_BYTES = 256
"""Smallest `max_result_bytes`: the notice of what was dropped must fit, and something beside it."""


@dataclass(frozen=True)
class RunnerLimits:
    """Bounds of a runner. Raises ToolConfigError for one that makes no sense."""

    max_concurrency: int = 8
    """Tools that run at once; further calls wait."""
    deadline_s: float = 300.0
    """Seconds that one call may take, its wait for a place included, where neither the call nor the
    tool has a deadline of its own."""
    max_result_bytes: int = 256 * 1024
    """UTF-8 bytes of one result; a longer one keeps head and tail around a notice."""

    def __post_init__(self) -> None:
        if self.max_concurrency < 1:
            raise ToolConfigError(f"max_concurrency is {self.max_concurrency}, expected at least 1")
        if not self.deadline_s > 0:
            raise ToolConfigError(f"deadline_s is {self.deadline_s}, expected more than 0")
        if self.max_result_bytes < MIN_RESULT_BYTES:
            raise ToolConfigError(
                f"max_result_bytes is {self.max_result_bytes}, expected at least {MIN_RESULT_BYTES}"
            )


class ToolRunner:
    """Runs the calls of one client or session; used from one event loop.

    Python cannot stop a thread. A sync tool that passes its deadline, or whose call is cancelled,
    is abandoned: its thread runs on, its result is dropped. At most `max_concurrency` such threads
    may be alive; until one ends, calls of sync tools get an error result at once. A process ends
    only when its abandoned threads have ended. Tools that may hang should be `async def`, which are
    cancelled and leave nothing behind; one that blocks its event loop cannot be timed at all.
    """

    def __init__(self, registry: ToolRegistry, limits: RunnerLimits | None = None) -> None:
        self._registry = registry
        self._limits = limits or RunnerLimits()
        self._places = anyio.CapacityLimiter(self._limits.max_concurrency)
        self._threads = anyio.CapacityLimiter(self._limits.max_concurrency)
        self._abandoned = _Abandoned()

    @property
    def num_abandoned_threads(self) -> int:
        """Sync tools abandoned so far, whether their threads have ended or not."""
        return self._abandoned.num_ever

    @property
    def num_abandoned_alive(self) -> int:
        """Of these, the ones whose threads still run."""
        return self._abandoned.num_alive

    async def run(self, call: ToolCall, deadline_s: float | None = None) -> ToolResult:
        """Run one call, within `deadline_s`, else the tool's deadline, else the default.

        An unknown tool, arguments that do not fit, an exception and the deadline give error
        results. Cancel-safe: only cancellation is raised; it cancels a coroutine and abandons a
        thread. A coroutine that swallows its cancellation delays both.
        """
        try:
            tool, arguments = self._registry.arguments(call)
        except ToolError as error:
            return self._failure(call, str(error))
        except Exception as error:  # a dataclass that checks its own fields
            return self._failure(call, _described(error))
        limit_s = next(
            s for s in (deadline_s, tool.deadline_s, self._limits.deadline_s) if s is not None
        )
        with anyio.move_on_after(limit_s):
            async with self._places:
                return await self._outcome(call, tool, arguments)
        return self._failure(call, f"{call.name} did not answer within {limit_s:g} s")

    async def run_all(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Run calls side by side under the limits; results in the order of the calls.

        Cancel-safe like `run`; each call has its own deadline, so this ends when the last one does.
        """
        results: dict[int, ToolResult] = {}

        async def one(index: int, call: ToolCall) -> None:
            results[index] = await self.run(call)

        async with anyio.create_task_group() as group:
            for index, call in enumerate(calls):
                group.start_soon(one, index, call)
        return [results[index] for index in range(len(calls))]

    async def _outcome(self, call: ToolCall, tool: Tool, arguments: dict[str, Any]) -> ToolResult:
        """What the tool gave or raised, as a result."""
        try:
            if tool.is_async:
                value = await tool.function(**arguments)
            else:
                value = await self._in_thread(functools.partial(tool.function, **arguments))
                if inspect.isawaitable(value):  # a plain function that hands out a coroutine
                    value = await value
            return ToolResult(call.call_id, shorten(_as_text(value), self._limits.max_result_bytes))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Nobody cancelled this call: the tool awaited something that was cancelled.
            return self._failure(call, f"{call.name} was cancelled from within")
        except ToolError as error:
            return self._failure(call, str(error))
        except (Exception, SystemExit) as error:  # whatever it is, the model reads it
            return self._failure(call, _described(error))

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        """Run a sync tool. Cancellation abandons its thread. Raises TooManyAbandoned."""
        if self._abandoned.num_alive >= self._limits.max_concurrency:
            raise TooManyAbandoned(
                f"{self._abandoned.num_alive} earlier calls still run past their deadlines, and"
                f" {self._limits.max_concurrency} is the limit: try again later"
            )
        job = _ThreadJob(function, self._abandoned)
        try:
            await anyio.to_thread.run_sync(job.run, abandon_on_cancel=True, limiter=self._threads)
        finally:
            job.leave()
        return job.result()

    def _failure(self, call: ToolCall, message: str) -> ToolResult:
        text = shorten(f"error: {message}", self._limits.max_result_bytes)
        return ToolResult(call.call_id, text, is_error=True)


class _Abandoned:
    """Count of threads that nobody waits for; the lock is shared with the threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_ever = 0
        self.num_alive = 0


class _ThreadJob:
    """One sync call. It ends once and is left once, in either order, and the count is right."""

    def __init__(self, function: Callable[[], Any], abandoned: _Abandoned) -> None:
        self._function = function
        self._abandoned = abandoned
        self._started = self._ended = self._left = False
        self._value: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """In the thread. Keeps what is raised: SystemExit or a stray CancelledError must not reach
        the event loop as if it were its own.
        """
        with self._abandoned.lock:
            if self._left:
                return
            self._started = True
        try:
            self._value = self._function()
        except BaseException as error:
            self._error = error
        finally:
            with self._abandoned.lock:
                self._ended = True
                if self._left:
                    self._abandoned.num_alive -= 1

    def leave(self) -> None:
        """On the event loop: nobody waits any more."""
        with self._abandoned.lock:
            self._left = True
            if self._started and not self._ended:
                self._abandoned.num_ever += 1
                self._abandoned.num_alive += 1

    def result(self) -> Any:
        """What the function returned or raised."""
        if self._error is None:
            return self._value
        if isinstance(self._error, Exception | SystemExit):
            raise self._error
        raise RuntimeError(_described(self._error)) from self._error


def shorten(text: str, max_bytes: int) -> str:
    """`text` as valid Unicode, or its head and tail around a notice with the bytes dropped.

    Two thirds head, one third tail: results begin with what they are and end with how it went. Cut
    between characters; never longer than `max_bytes` of UTF-8 (at least MIN_RESULT_BYTES).
    """
    data = text.encode("utf-8", "replace")  # half a surrogate pair cannot be sent
    if len(data) <= max_bytes:
        return data.decode()
    # The notice is measured at its longest, so that the number in it can be exact.
    room = max_bytes - len(_notice(len(data)).encode())
    tail_len = room // 3
    head = data[: room - tail_len].decode("utf-8", "ignore")
    tail = data[len(data) - tail_len :].decode("utf-8", "ignore")
    num_dropped = len(data) - len(head.encode()) - len(tail.encode())
    return head + _notice(num_dropped) + tail


def _notice(num_dropped: int) -> str:
    return f"\n[… {num_dropped} bytes dropped …]\n"


def _as_text(value: Any) -> str:
    """Text as it is, anything else as JSON. Raises TypeError or ValueError for what is no JSON."""
    if isinstance(value, str):
        return str(value)
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_as_json)


def _as_json(value: Any) -> Any:
    """What JSON does not know: records as objects, sets as lists, other things by their text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    return str(value)


def _described(error: BaseException) -> str:
    """Type and message, no traceback: paths and code are not the model's business."""
    try:
        message = str(error)
    except Exception:  # a broken __str__ must not take the call down
        message = ""
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
