"""gRPC → session → tree → model → tier → back, on the shipped model and a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from redis_server import RedisServer

from moorage.sessions.client import Client, Sampling
from moorage.sessions.client_events import Resumed, ToolCallReady, TurnEnd
from moorage.sessions.errors import InvalidArgument, MoorageError, SessionNotFound
from moorage.sessions.server_process import ServerProcess

SHORT = Sampling(temperature=0.0, max_tokens=8, ignore_eos=True)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120):
            await scenario

    asyncio.run(bounded())


async def turn(session: Any, **how: Any) -> TurnEnd:
    events = [event async for event in session.generate(**how)]
    assert isinstance(events[-1], TurnEnd), events[-1]
    return events[-1]


def test_eight_sessions_decode_in_one_forward_pass_a_step(server: ServerProcess) -> None:
    async def scenario() -> None:
        async with Client(server.address) as client:
            sessions = [await client.create(park_policy="never") for _ in range(8)]
            long = Sampling(temperature=0.0, max_tokens=64, ignore_eos=True)
            before = (await client.inspect_engine()).engine
            ends = await asyncio.gather(
                *(
                    turn(s, prompt=f"Hello number {i}", sampling=long)
                    for i, s in enumerate(sessions)
                )
            )
            after = (await client.inspect_engine()).engine
            assert [end.usage.num_generated for end in ends] == [64] * 8
            assert after.largest_batch == 8
            passes = after.forward_passes - before.forward_passes
            # 8 × 64 tokens; alone they would take 512 passes. The sessions join within a few steps of each other.
            assert 64 <= passes < 64 + 30
            for session in sessions:
                await session.close()

    run(scenario())


def test_a_2k_context_is_one_or_two_nodes_and_a_divergence_one_split(
    own_server: ServerProcess,
) -> None:
    async def scenario() -> None:
        async with Client(own_server.address) as client:
            session = await client.create(park_policy="never")
            ids = [11 + (7 * i) % 2000 for i in range(2048)]
            await turn(session, token_ids=ids, sampling=SHORT)
            seen = (await client.inspect_engine()).inspection
            assert 1 <= seen.num_nodes <= 2
            assert seen.num_splits == 0
            other = await client.create(park_policy="never")
            await turn(other, token_ids=ids[:1000] + [5] * 400, sampling=SHORT)
            seen = (await client.inspect_engine()).inspection
            assert seen.num_splits == 1

    run(scenario())


def test_a_second_session_on_the_same_prefix_adds_its_suffix_and_at_most_one_run(
    own_server: ServerProcess, redis_server: RedisServer
) -> None:
    with redis_server.client() as store:

        def frames() -> set[bytes]:
            return set(store.keys("moorage:*"))

        async def scenario() -> None:
            async with Client(own_server.address) as client:
                ids = [11 + (5 * i) % 2000 for i in range(1000)]
                for number, suffix in enumerate(([20] * 30, [30] * 40)):
                    session = await client.create(park_policy="always", park_tier="redis")
                    before = frames()
                    await turn(session, token_ids=ids + suffix, sampling=SHORT)
                    async with asyncio.timeout(20):
                        while not (await session.get()).parked:  # the park follows the turn's end
                            await asyncio.sleep(0.02)
                    added = frames() - before
                    runs = [key for key in added if b":frame:" not in key]
                    # 1,037 and 1,047 tokens: 4 whole runs of 256 and a private rest. The first three runs hold shared
                    # tokens only, so the second session adds the fourth, which its suffix begins in, and its rest.
                    assert len(runs) == (4, 1)[number]
                    assert len(added) - len(runs) == 1

        run(scenario())


def test_j1_ids_that_the_tokenizer_would_not_write_are_kept(server: ServerProcess) -> None:
    async def scenario() -> None:
        async with Client(server.address) as client:
            session = await client.create(park_policy="always")
            # Single letters, which the tokenizer would merge: the ids of "b", "e", "r", "t", "h" one by one.
            letters = [ord(letter) - 33 + 9 for letter in "berth"]
            await turn(session, token_ids=letters, sampling=SHORT)
            first = (await session.get()).token_ids
            end = await turn(session, prompt="berth", sampling=SHORT)
            log = (await session.get()).token_ids
            assert tuple(letters) == first[: len(letters)]
            assert log[: len(first)] == first
            sources = end.usage.stretches[0].sources
            assert sources.recomputed == 0
            assert sources.host + sources.redis + sources.device == len(first) - 1

    run(scenario())


def test_d1_a_parked_session_survives_a_restart_with_its_kv(own_server: ServerProcess) -> None:
    async def scenario() -> None:
        async with Client(own_server.address) as client:
            session = await client.create(park_policy="never")
            ids = [11 + (3 * i) % 2000 for i in range(1300)]
            await turn(session, token_ids=ids, sampling=SHORT)
            parked = await session.park("redis")
            assert parked.tier == "redis"
            length = len((await session.get()).token_ids)
            await asyncio.to_thread(own_server.kill)
            await asyncio.to_thread(own_server.start)
            new = [21, 22, 23, 24, 25, 26, 27, 28]
            events = [event async for event in session.generate(token_ids=new, sampling=SHORT)]
            resumed = next(event for event in events if isinstance(event, Resumed))
            sources = resumed.sources
            assert (sources.redis, sources.recomputed, sources.new) == (length - 1, 0, 9)
            assert resumed.num_forwarded == 8 + 1

    run(scenario())


def test_unknown_sessions_and_bad_values_have_typed_errors_and_the_server_goes_on(
    server: ServerProcess,
) -> None:
    async def scenario() -> None:
        async with Client(server.address) as client:
            with pytest.raises(SessionNotFound, match="no-such-session"):
                await client.session("no-such-session").get()
            with pytest.raises(InvalidArgument, match="type"):
                await client.create(tool_schemas=[{"name": "f", "parameters": {"type": "string"}}])
            session = await client.create()
            with pytest.raises(MoorageError, match="4096"):
                await turn(session, token_ids=[11] * 4200, sampling=SHORT)
            with pytest.raises(
                InvalidArgument, match=r"tokens.ids\[0\] is 999999, allowed is 0 … 2559"
            ):
                await turn(session, token_ids=[999_999], sampling=SHORT)
            end = await turn(session, prompt="Hello.", sampling=SHORT)
            assert end.usage.num_generated == 8

    run(scenario())


def test_the_tool_loop_by_hand_over_events(server: ServerProcess) -> None:
    async def scenario() -> None:
        async with Client(server.address) as client:
            session = await client.create(
                system="You are a helpful assistant.",
                park_policy="always",
                tool_schemas=[
                    {
                        "name": "calculator",
                        "description": "Evaluate an arithmetic expression.",
                        "parameters": {
                            "type": "object",
                            "properties": {"expression": {"type": "string"}},
                            "required": ["expression"],
                        },
                    }
                ],
            )
            seen: list[Any] = []
            async for event in session.generate(
                "What is 17 * 23?", sampling=Sampling(temperature=0.0, max_tokens=64)
            ):
                seen.append(event)
                if isinstance(event, ToolCallReady):
                    assert (event.name, event.arguments) == (
                        "calculator",
                        '{"expression": "17 * 23"}',
                    )
                    assert await session.submit_tool_results({event.call_id: "391"}) == ()
                    # Delivered again: accepted once, answered the same.
                    assert await session.submit_tool_results({event.call_id: "391"}) == ()
            text = "".join(event.text for event in seen if type(event).__name__ == "TextDelta")
            assert "391" in text
            resumed = next(event for event in seen if isinstance(event, Resumed))
            assert resumed.sources.recomputed == 0

    run(scenario())
