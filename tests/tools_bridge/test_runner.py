"""Running tools: whatever goes wrong is a result, but for cancellation; and the park policy's table."""

from __future__ import annotations

import threading

import anyio
import pytest

from moorage.tools_bridge.call import ToolCall
from moorage.tools_bridge.park_policy import ParkCosts, ParkPolicy, WaitKind, decide
from moorage.tools_bridge.registry import ToolRegistry
from moorage.tools_bridge.runner import RunnerLimits, ToolRunner, shorten


def call(name: str, arguments: str = "{}", index: int = 0) -> ToolCall:
    return ToolCall(f"call-{index}", index, name, arguments)


def double(number: int) -> int:
    """Double."""
    return 2 * number


async def describe() -> dict[str, object]:
    """Describe."""
    return {"name": "Ærø", "size": 2}


def broken() -> str:
    """Break."""
    raise RuntimeError("the disk is full")


def runner(*tools: object, **limits: object) -> ToolRunner:
    return ToolRunner(ToolRegistry(tools), RunnerLimits(**limits))  # type: ignore[arg-type]


def test_results_are_text_or_json_and_errors_are_results() -> None:
    async def scenario() -> None:
        tools = runner(double, describe, broken)
        results = await tools.run_all(
            [
                call("double", '{"number": "21"}', 0),
                call("describe", index=1),
                call("broken", index=2),
                call("rm", index=3),
            ]
        )
        assert [(r.call_id, r.content, r.is_error) for r in results] == [
            ("call-0", "42", False),
            ("call-1", '{"name": "Ærø", "size": 2}', False),
            ("call-2", "error: RuntimeError: the disk is full", True),
            ("call-3", "error: there is no tool 'rm'; tools: double, describe, broken", True),
        ]

    anyio.run(scenario)


def test_a_tool_past_its_deadline_is_an_error_result_sync_or_async() -> None:
    release = threading.Event()

    def stuck() -> str:
        """Never answers."""
        release.wait(30)
        return "late"

    async def hangs() -> str:
        """Never answers."""
        await anyio.sleep_forever()
        return "late"

    async def scenario() -> None:
        tools = runner(stuck, hangs, deadline_s=0.05)
        for name in ("stuck", "hangs"):
            result = await tools.run(call(name))
            assert (result.content, result.is_error) == (
                f"error: {name} did not answer within 0.05 s",
                True,
            )
        assert tools.num_abandoned_threads == 1

    try:
        anyio.run(scenario)
    finally:
        release.set()


def test_cancellation_reaches_the_coroutine_and_is_not_swallowed() -> None:
    seen: list[str] = []

    async def scenario() -> None:
        started = anyio.Event()

        async def patient() -> str:
            """Waits."""
            started.set()
            try:
                await anyio.sleep_forever()
            finally:
                seen.append("cleaned up")
            return ""

        async with anyio.create_task_group() as group:
            group.start_soon(runner(patient).run, call("patient"))
            await started.wait()
            group.cancel_scope.cancel()
        assert seen == ["cleaned up"]

    anyio.run(scenario)


def test_no_more_than_the_limit_run_at_once_and_results_keep_the_order() -> None:
    running = 0
    most = 0

    async def scenario() -> None:
        async def busy(number: int) -> int:
            """Counts."""
            nonlocal running, most
            running += 1
            most = max(most, running)
            await anyio.lowlevel.checkpoint()
            running -= 1
            return number

        calls = [call("busy", f'{{"number": {i}}}', i) for i in range(9)]
        results = await runner(busy, max_concurrency=3).run_all(calls)
        assert [result.content for result in results] == [str(i) for i in range(9)]
        assert most == 3

    anyio.run(scenario)


@pytest.mark.parametrize("text", ["x" * 5000, "é" * 3000, "😀" * 2000])
def test_long_results_keep_head_and_tail_cut_between_characters(text: str) -> None:
    cut = shorten(text, 1000)
    assert len(cut.encode()) <= 1000
    head, rest = cut.split("\n[… ")
    dropped, tail = rest.split(" bytes dropped …]\n")
    assert len((head + tail).encode()) + int(dropped) == len(text.encode())
    assert head and tail and set(head) == set(tail) == {text[0]}
    assert shorten("short", 1000) == "short"


@pytest.mark.parametrize(
    ("policy", "wait", "expected", "action"),
    [
        (ParkPolicy.ALWAYS, WaitKind.TOOLS, 0.0, "park"),
        (ParkPolicy.NEVER, WaitKind.HUMAN, 3600.0, "keep"),
        (ParkPolicy.AUTO, WaitKind.HUMAN, None, "park"),
        (ParkPolicy.AUTO, WaitKind.TOOLS, None, "keep"),
        (ParkPolicy.AUTO, WaitKind.TOOLS, 1.9, "keep"),
        (ParkPolicy.AUTO, WaitKind.TOOLS, 2.1, "park"),
    ],
)
def test_park_policy(
    policy: ParkPolicy, wait: WaitKind, expected: float | None, action: str
) -> None:
    decision = decide(policy, wait, expected_wait_s=expected, costs=ParkCosts(0.1, 0.1))
    assert decision.action == action
    assert decision.reason
