"""The whole tool loop over real gRPC."""

from __future__ import annotations

from pathlib import Path

from fake_engine import FakeEngine
from session_harness import harbour, run


def calculator(prompt: str) -> str:
    """Calls `add` once, then tells its result."""
    if "<tool_response>" not in prompt:
        return (
            'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
        )
    return "The sum is " + prompt.rsplit("<tool_response>\n", 1)[1].split("\n")[0] + "."


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def test_session_run_does_the_whole_tool_loop(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harbour(tmp_path, FakeEngine(calculator)) as h:
            session = await h.client.create(system="Be brief.", tools=[add], park_policy="always")
            answer = await session.run("What is 2 + 3?")
            for e in answer.events:
                print(e)
            assert answer.text == "The sum is 5."

    run(scenario())
