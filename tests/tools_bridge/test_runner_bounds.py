"""The runner's bounds: time, threads and size, and what a badly behaved tool cannot do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import anyio
import pytest

from moorage.tools_bridge.call import ToolCall, ToolResult
from moorage.tools_bridge.errors import ToolConfigError
from moorage.tools_bridge.registry import ToolRegistry, tool
from moorage.tools_bridge.runner import MIN_RESULT_BYTES, RunnerLimits, ToolRunner, shorten


def call(name: str, arguments: str = "{}") -> ToolCall:
    return ToolCall("call-1", 0, name, arguments)


def result_of(function: Callable[..., Any], arguments: str = "{}", **limits: Any) -> ToolResult:
    """One call of one tool."""
    registry = ToolRegistry([function])
    runner = ToolRunner(registry, RunnerLimits(**limits))
    return asyncio.run(runner.run(call(registry.schemas[0].name, arguments)))


def failing(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def failing_async(error: BaseException) -> Callable[[], Awaitable[None]]:
    async def fail() -> None:
        raise error

    return fail


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize("make", [failing, failing_async])
@pytest.mark.parametrize(
    ("error", "content"),
    [
        (ValueError("no such key"), "error: ValueError: no such key"),
        (KeyError(), "error: KeyError"),
        (Unprintable(), "error: Unprintable"),
        # The tool's own time-out is not ours.
        (TimeoutError("the socket"), "error: TimeoutError: the socket"),
        (SystemExit(3), "error: SystemExit: 3"),
    ],
)
def test_whatever_a_tool_raises_is_an_error_result(
    make: Callable[[BaseException], Callable[[], Any]], error: BaseException, content: str
) -> None:
    assert result_of(make(error)) == ToolResult("call-1", content, is_error=True)


def test_a_cancellation_that_nobody_asked_for_is_an_error_result() -> None:
    assert result_of(failing_async(asyncio.CancelledError())).content == (
        "error: fail was cancelled from within"
    )
    assert result_of(failing(asyncio.CancelledError())).content == (
        "error: RuntimeError: CancelledError"
    )


def test_a_dataclass_that_refuses_its_values_is_an_error_result() -> None:
    @dataclass
    class Share:
        percent: int

        def __post_init__(self) -> None:
            if self.percent > 100:
                raise ValueError("a share is at most 100")

    def give(share: Share) -> str:
        return "given"

    give.__annotations__["share"] = Share
    assert result_of(give, '{"share": {"percent": 101}}') == ToolResult(
        "call-1", "error: ValueError: a share is at most 100", is_error=True
    )


@dataclass
class Row:
    key: str
    size: int


@pytest.mark.parametrize(
    ("value", "content"),
    [
        ("as it is", "as it is"),
        ("half \ud83d pair", "half ? pair"),
        (None, "null"),
        ([1, 2.5, True], "[1, 2.5, true]"),
        ([Row("Ærø", 2)], '[{"key": "Ærø", "size": 2}]'),
        ({"b", "a"}, '["a", "b"]'),
    ],
)
def test_values_become_text(value: Any, content: str) -> None:
    def give() -> Any:
        return value

    assert result_of(give) == ToolResult("call-1", content, is_error=False)


def test_a_value_that_is_no_json_is_an_error_result() -> None:
    circular: list[Any] = []
    circular.append(circular)
    for value in (circular, {(1, 2): 3}, float("nan")):

        def give(found: Any = value) -> Any:
            return found

        give.__annotations__["found"] = Any
        result = result_of(give)
        assert result.is_error
        assert result.content.startswith(("error: ValueError", "error: TypeError"))


def test_a_plain_function_may_hand_out_a_coroutine() -> None:
    async def later(number: int) -> int:
        return number + 1

    def now(number: int) -> Any:
        return later(number)

    assert result_of(now, '{"number": 4}').content == "5"


def test_the_calls_deadline_beats_the_tools_which_beats_the_runners() -> None:
    @tool(deadline_s=0.02)
    async def hang() -> None:
        await asyncio.Event().wait()

    runner = ToolRunner(ToolRegistry([hang]), RunnerLimits(deadline_s=60))
    assert "within 0.02 s" in asyncio.run(runner.run(call("hang"))).content
    assert "within 0.01 s" in asyncio.run(runner.run(call("hang"), deadline_s=0.01)).content


def test_waiting_for_a_place_counts_towards_the_deadline() -> None:
    num_started = 0

    async def hang() -> None:
        nonlocal num_started
        num_started += 1
        await asyncio.Event().wait()

    async def scenario() -> None:
        limits = RunnerLimits(max_concurrency=1, deadline_s=0.05)
        runner = ToolRunner(ToolRegistry([hang]), limits)
        results = await runner.run_all([call("hang"), call("hang")])
        assert [r.content for r in results] == ["error: hang did not answer within 0.05 s"] * 2

    asyncio.run(scenario())
    assert num_started in (1, 2)  # the second may get the place in the moment that both end


def test_abandoned_threads_are_bounded_and_counted_until_they_end() -> None:
    release, ended = threading.Event(), threading.Semaphore(0)

    def hang() -> None:
        release.wait(60)
        ended.release()

    def quick() -> str:
        return "here"

    async def scenario() -> None:
        limits = RunnerLimits(max_concurrency=2, deadline_s=0.05)
        runner = ToolRunner(ToolRegistry([hang, quick]), limits)
        await runner.run_all([call("hang")] * 2)
        assert (runner.num_abandoned_threads, runner.num_abandoned_alive) == (2, 2)
        refused = await runner.run(call("quick"), deadline_s=60)
        assert refused == ToolResult(
            "call-1",
            "error: 2 earlier calls still run past their deadlines, and 2 is the limit: try again"
            " later",
            is_error=True,
        )
        release.set()
        for _ in range(2):
            assert ended.acquire(timeout=10)
        with anyio.fail_after(10):
            while runner.num_abandoned_alive:
                await anyio.lowlevel.checkpoint()
        assert (await runner.run(call("quick"), deadline_s=60)).content == "here"
        assert runner.num_abandoned_threads == 2

    try:
        asyncio.run(scenario())
    finally:
        release.set()


@pytest.mark.parametrize("native", [True, False])
def test_cancellation_leaves_a_thread_behind_and_is_not_swallowed(native: bool) -> None:
    release = threading.Event()

    async def scenario() -> None:
        loop, started = asyncio.get_running_loop(), asyncio.Event()

        def hang() -> None:
            loop.call_soon_threadsafe(started.set)
            release.wait(60)

        runner = ToolRunner(ToolRegistry([hang]))
        if native:
            task = asyncio.create_task(runner.run(call("hang")))
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            async with anyio.create_task_group() as group:
                group.start_soon(runner.run, call("hang"))
                await started.wait()
                group.cancel_scope.cancel()
        assert (runner.num_abandoned_threads, runner.num_abandoned_alive) == (1, 1)
        release.set()

    try:
        asyncio.run(scenario())
    finally:
        release.set()


def test_a_native_cancellation_reaches_an_async_tool() -> None:
    cleaned_up = []

    async def scenario() -> None:
        started = asyncio.Event()

        async def patient() -> None:
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                cleaned_up.append(True)

        task = asyncio.create_task(ToolRunner(ToolRegistry([patient])).run(call("patient")))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert cleaned_up == [True]


@pytest.mark.parametrize("max_bytes", [256, 257, 258, 259, 260, 1000])
@pytest.mark.parametrize("text", ["x" * 1001, "é" * 3000, "a😀" * 2000])
def test_a_long_result_is_cut_between_characters_and_the_count_is_right(
    text: str, max_bytes: int
) -> None:
    cut = shorten(text, max_bytes)
    assert len(cut.encode()) <= max_bytes
    head, rest = cut.split("\n[… ")
    dropped, tail = rest.split(" bytes dropped …]\n")
    assert text.startswith(head)
    assert text.endswith(tail)
    assert head
    assert tail
    assert len(head.encode()) + len(tail.encode()) + int(dropped) == len(text.encode())


def test_an_error_message_is_bounded_too() -> None:
    content = result_of(failing(ValueError("x" * 100_000)), max_result_bytes=500).content
    assert content.startswith("error: ValueError: xxx")
    assert len(content.encode()) <= 500


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_concurrency": 0}, "max_concurrency is 0"),
        ({"deadline_s": 0.0}, "deadline_s is 0.0"),
        ({"deadline_s": float("nan")}, "deadline_s is nan"),
        ({"max_result_bytes": MIN_RESULT_BYTES - 1}, "max_result_bytes is 255"),
    ],
)
def test_limits_that_make_no_sense_are_refused(limits: dict[str, Any], words: str) -> None:
    with pytest.raises(ToolConfigError, match=words):
        RunnerLimits(**limits)
