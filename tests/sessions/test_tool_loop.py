"""The whole tool loop over real gRPC: calls, parks, results, resumes, and the numbers that go with
them.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest
from fake_engine import BLOCK, IM_END, TO, FakeEngine
from session_harness import Harbour, eventually, harbour, run

from moorage.sessions.client import Client, ClientSession, Sampling
from moorage.sessions.client_events import (
    Event,
    InputAccepted,
    Parked,
    Resumed,
    TextDelta,
    ToolCallReady,
    ToolResultAccepted,
    TurnEnd,
    TurnStart,
)
from moorage.sessions.errors import (
    CallNotFound,
    ContextTooLong,
    ToolResultConflict,
    ToolsPending,
)

SCHEMAS = [{"name": n, "description": n, "parameters": {"type": "object"}} for n in ("a", "b")]


def calculator(prompt: str) -> str:
    """Calls `add` once, then tells its result."""
    if "<tool_response>" not in prompt:
        call = '{"name": "add", "arguments": {"a": 2, "b": 3}}'
        return f"Let me see.\n<tool_call>\n{call}\n</tool_call>"
    result = prompt.rsplit("<tool_response>\n", 1)[1].partition("\n")[0]
    return f"The sum is {result}."


def two_calls(prompt: str) -> str:
    """Calls `a` and `b`, then repeats what came back."""
    if "<tool_response>" not in prompt:
        return "".join(
            f'<tool_call>\n{{"name": "{n}", "arguments": {{}}}}\n</tool_call>\n' for n in "ab"
        )
    parts = prompt.rsplit("<|im_start|>user", 1)[1].split("<tool_response>\n")[1:]
    return " and ".join(part.partition("\n")[0] for part in parts)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def start(session: ClientSession, prompt: str, events: list[Event]) -> asyncio.Task[None]:
    """Follow a turn in the background."""

    async def follow() -> None:
        async for event in session.generate(prompt):
            events.append(event)

    return asyncio.create_task(follow())


async def calls_ready(events: list[Event], number: int) -> list[ToolCallReady]:
    def found() -> list[ToolCallReady]:
        return [e for e in events if isinstance(e, ToolCallReady)]

    await eventually(lambda: len(found()) >= number)
    return found()


def kinds(events: list[Event]) -> list[str]:
    """Names of the structural events, in order."""
    return [type(e).__name__ for e in events if "Delta" not in type(e).__name__]


def test_session_run_does_the_whole_tool_loop(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harbour(tmp_path, FakeEngine(calculator)) as h:
            session = await h.client.create(system="Be brief.", tools=[add], park_policy="always")
            answer = await session.run("What is 2 + 3?")
            assert answer.text == "The sum is 5."
            assert (answer.finish_reason, answer.turn, answer.num_tool_calls) == ("stop", 1, 1)
            assert kinds(list(answer.events)) == [
                "TurnStart", "InputAccepted", "ToolCallReady", "Parked", "ToolResultAccepted",
                "InputAccepted", "Resumed", "TurnEnd",
            ] or kinds(list(answer.events)) == [
                "TurnStart", "InputAccepted", "ToolCallReady", "ToolResultAccepted", "Parked",
                "InputAccepted", "Resumed", "TurnEnd",
            ]  # fmt: skip

    run(scenario())


def test_a_park_waits_for_the_tool_and_the_resume_says_where_tokens_came_from(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with harbour(tmp_path, FakeEngine(calculator)) as h:
            session = await h.client.create(tools=[add], park_policy="always")
            events: list[Event] = []
            task = await start(session, "2 + 3?", events)
            (call,) = await calls_ready(events, 1)
            await eventually(lambda: any(isinstance(e, Parked) for e in events))
            info = await session.get(inspect=True)
            assert (info.state, info.parked) == ("waiting_tools", True)
            assert info.inspection is not None
            assert info.inspection.session_locked_blocks == 0
            assert [c.call_id for c in info.pending_calls] == [call.call_id]
            before = len(info.token_ids)
            await session.submit_tool_results({call.call_id: "5"})
            await task
            (parked,) = (e for e in events if isinstance(e, Parked))
            (resumed,) = (e for e in events if isinstance(e, Resumed))
            inputs = [e for e in events if isinstance(e, InputAccepted)]
            assert (parked.tier, parked.num_tokens) == ("host", before - 1)
            assert resumed.sources.host == before - 1
            assert resumed.sources.recomputed == 0
            assert resumed.num_forwarded == inputs[1].num_tokens + 1
            end = events[-1]
            assert isinstance(end, TurnEnd)
            assert [s.num_generated for s in end.usage.stretches] == [63, 14]
            assert end.usage.num_generated == 77
            assert end.usage.num_input == sum(e.num_tokens for e in inputs)

    run(scenario())


def test_a_turn_that_never_parked_finds_its_tokens_on_the_device(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harbour(tmp_path, FakeEngine(lambda prompt: "Yes.")) as h:
            session = await h.client.create(park_policy="never")
            first = await session.run("Hi")
            second = await session.run("And now?")
            (stretch,) = second.usage.stretches
            held = first.usage.num_input + first.usage.num_generated
            assert stretch.sources.device == held - 1
            assert stretch.num_forwarded == second.usage.num_input + 1
            assert not any(isinstance(e, Parked | Resumed) for e in second.events)

    run(scenario())


def test_results_come_in_any_order_and_partly(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harbour(tmp_path, FakeEngine(two_calls)) as h:
            session = await h.client.create(tool_schemas=SCHEMAS)
            events: list[Event] = []
            task = await start(session, "Go", events)
            first, second = await calls_ready(events, 2)
            assert (first.name, first.index, first.num_calls) == ("a", 0, 2)
            assert (second.name, second.index) == ("b", 1)
            assert await session.submit_tool_results({second.call_id: "two"}) == (first.call_id,)
            assert (await session.get()).state == "waiting_tools"
            assert await session.submit_tool_results({first.call_id: "one"}) == ()
            await task
            last = [e for e in events if isinstance(e, ToolResultAccepted)][-1]
            text = "".join(
                e.text for e in events if isinstance(e, TextDelta) and e.last_seq > last.last_seq
            )
            assert text == "one and two"

    run(scenario())


def test_a_duplicate_result_is_ok_and_another_one_conflicts(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harbour(tmp_path, FakeEngine(two_calls)) as h:
            session = await h.client.create(tool_schemas=SCHEMAS)
            events: list[Event] = []
            task = await start(session, "Go", events)
            first, second = await calls_ready(events, 2)
            await session.submit_tool_results({first.call_id: "one"})
            await session.submit_tool_results({first.call_id: "one"})
            with pytest.raises(ToolResultConflict, match="first result stands"):
                await session.submit_tool_results({first.call_id: "ONE", second.call_id: "two"})
            info = await session.get()
            assert [c.call_id for c in info.pending_calls] == [second.call_id]
            with pytest.raises(CallNotFound, match="never made"):
                await session.submit_tool_results({"call_unknown": "x"})
            with pytest.raises(ToolsPending, match=second.call_id):
                await session.run("Hello?")
            await session.submit_tool_results({second.call_id: "two"})
            await task
            await session.submit_tool_results({first.call_id: "one"})  # long after
            with pytest.raises(ToolResultConflict):
                await session.submit_tool_results({first.call_id: "ONE"})
            accepted = [e for e in events if isinstance(e, ToolResultAccepted)]
            assert [e.call_id for e in accepted] == [first.call_id, second.call_id]

    run(scenario())


def test_results_that_come_while_the_park_is_in_flight_wait_for_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine(calculator)
        async with harbour(tmp_path, engine) as h:
            session = await h.client.create(tools=[add], park_policy="always")
            engine.hold_parks = True
            events: list[Event] = []
            task = await start(session, "2 + 3?", events)
            (call,) = await calls_ready(events, 1)
            await session.submit_tool_results({call.call_id: "5"})
            await eventually(lambda: sum(isinstance(e, InputAccepted) for e in events) == 2)
            assert len(engine.requests) == 1  # not submitted while frames are being stored
            engine.release_parks()
            await task
            order = [k for k in kinds(events) if k in ("Parked", "Resumed")]
            assert order == ["Parked", "Resumed"]
            assert next(e for e in events if isinstance(e, Resumed)).sources.host > 0

    run(scenario())


def test_a_refused_park_leaves_the_kv_and_the_turn_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine(calculator)
        async with harbour(tmp_path, engine) as h:
            engine.refuse_parks = True
            session = await h.client.create(tools=[add], park_policy="always")
            answer = await session.run("2 + 3?")
            assert answer.text == "The sum is 5."
            assert "Parked" not in kinds(list(answer.events))
            resumed = next(e for e in answer.events if isinstance(e, Resumed))
            assert (resumed.sources.host, resumed.sources.recomputed) == (0, 0)
            assert resumed.sources.device > BLOCK

    run(scenario())


def write_file(prompt: str) -> str:
    """Begins a call that a small max_tokens cuts off; answers plainly the second time."""
    if prompt.count("<|im_start|>user") == 1:
        return '<tool_call>\n{"name": "a", "arguments": {"path": "/tmp/x"}}\n</tool_call>'
    return "All right."


def test_a12_a_truncated_call_ends_with_length_is_not_run_and_the_session_goes_on(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with harbour(tmp_path, FakeEngine(write_file)) as h:
            ran: list[str] = []

            def a(path: str) -> str:
                """Write."""
                ran.append(path)
                return "ok"

            session = await h.client.create(tools=[a])
            answer = await session.run("Write", sampling=Sampling(max_tokens=40))
            assert answer.finish_reason == "length"
            assert ran == []
            assert answer.text.startswith('<tool_call>\n{"name": "a", "arguments"')
            assert (await session.get()).pending_calls == ()
            again = await session.run("Never mind")
            assert (again.text, again.finish_reason) == ("All right.", "stop")
            # Cut right behind the closing tag: whole to the eye, and still not ended by the model.
            other = await h.client.create(tools=[a])
            length = len(h.engine.encode(write_file("<|im_start|>user"), allow_special=True))
            cut = await other.run("Write", sampling=Sampling(max_tokens=length))
            assert (cut.finish_reason, ran) == ("length", [])
            again = await other.run("Never mind")
            assert (again.text, again.finish_reason) == ("All right.", "stop")

    run(scenario())


def test_max_tokens_counts_over_the_tool_calls_of_a_turn(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harbour(tmp_path, FakeEngine(calculator)) as h:
            session = await h.client.create(tools=[add])
            answer = await session.run("2 + 3?", sampling=Sampling(max_tokens=68))
            assert (answer.finish_reason, answer.usage.num_generated) == ("length", 68)
            assert answer.text == "The s"

    run(scenario())


def test_the_seed_is_drawn_logged_and_kept_over_the_turn(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine(calculator)
        async with harbour(tmp_path, engine) as h:
            session = await h.client.create(tools=[add], sampling=Sampling(temperature=0.8))
            answer = await session.run("2 + 3?")
            seed = next(e.seed for e in answer.events if isinstance(e, TurnStart))
            assert [r.sampling.seed for r in engine.requests] == [seed, seed]
            assert {r.sampling.temperature for r in engine.requests} == {0.8}
            await session.run("Again", sampling=Sampling(seed=7, temperature=0.5))
            assert engine.requests[-1].sampling.seed == 7
            assert engine.requests[-1].sampling.temperature == 0.5

    run(scenario())


async def _token_ids(h: Harbour, session_id: str) -> tuple[int, ...]:
    return (await h.client.session(session_id).get()).token_ids


def test_events_join_to_the_log_and_are_numbered_without_a_gap(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harbour(tmp_path, FakeEngine(calculator)) as h:
            session = await h.client.create(tools=[add], park_policy="always")
            answer = await session.run("2 + 3?")
            joined = tuple(i for e in answer.events for i in e.token_ids)
            assert joined == await _token_ids(h, session.session_id)
            seqs = sorted({(e.first_seq, e.last_seq) for e in answer.events})
            assert seqs[0][0] == 1
            assert all(a[1] + 1 == b[0] for a, b in zip(seqs, seqs[1:], strict=False))

    run(scenario())


def test_attach_after_every_number_gives_exactly_the_rest(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harbour(tmp_path, FakeEngine(calculator)) as h:
            session = await h.client.create(tools=[add])
            live = list((await session.run("2 + 3?")).events)
            live += (await session.run("And again?")).events
            last = (await session.get()).last_seq
            for after in range(last + 1):
                rest = [e async for e in session.attach(after)]
                text = "".join(
                    e.text for e in live if isinstance(e, TextDelta) and e.first_seq > after
                )
                got = "".join(e.text for e in rest if isinstance(e, TextDelta))
                assert got == text, after
                ids = [i for e in live if e.first_seq > after for i in e.token_ids]
                assert [i for e in rest for i in e.token_ids] == ids, after
                if rest:
                    assert rest[0].first_seq == after + 1

    run(scenario())


def test_attach_in_the_middle_of_a_long_reply_knows_what_came_before(tmp_path: Path) -> None:
    async def scenario() -> None:
        def model(prompt: str) -> str:
            return "Let me think. " * 7 + calculator(prompt)

        async with harbour(tmp_path, FakeEngine(model)) as h:
            session = await h.client.create(tools=[add], park_policy="never")
            live = (await session.run("2 + 3?")).events
            (call,) = (e for e in live if isinstance(e, ToolCallReady))
            assert call.first_seq > 160  # the call lies across two rows of the log
            for after in (125, 140, 150, call.first_seq - 1):
                rest = [e async for e in session.attach(after)]
                text = "".join(e.text for e in rest if isinstance(e, TextDelta))
                assert text == "".join(
                    e.text for e in live if isinstance(e, TextDelta) and e.first_seq > after
                )

    run(scenario())


def test_h10_a_client_that_is_done_writing_gets_the_whole_generation(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harbour(tmp_path, FakeEngine(lambda prompt: "x" * 500)) as h:
            session = await h.client.create()
            events = [e async for e in session.generate("Hi", reconnect=False)]
            assert sum(len(e.text) for e in events if isinstance(e, TextDelta)) == 500
            assert isinstance(events[-1], TurnEnd)

    run(scenario())


def test_j1_injected_non_canonical_ids_are_kept_in_the_next_turn(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine(lambda prompt: [75, 121, 111, TO, IM_END])  # "Kyo" + "to"
        async with harbour(tmp_path, engine) as h:
            session = await h.client.create(park_policy="never")
            injected = [257, 10, TO, 116, 111]
            async with aclosing(session.generate(token_ids=injected)) as stream:
                text = "".join([e.text async for e in stream if isinstance(e, TextDelta)])
            assert text == "Kyoto"
            answer = await session.run("More")
            ids = await _token_ids(h, session.session_id)
            assert ids[:10] == (*injected, 75, 121, 111, TO, IM_END)
            (stretch,) = answer.usage.stretches
            assert stretch.num_forwarded == answer.usage.num_input + 1

    run(scenario())


def test_the_models_own_end_of_turn_is_not_written_twice(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine(lambda prompt: "Yes.")
        async with harbour(tmp_path, engine) as h:
            session = await h.client.create()
            await session.run("One")
            await session.run("Two", sampling=Sampling(max_tokens=2))
            await session.run("Three")
            ids = await _token_ids(h, session.session_id)
            assert engine.text(ids) == (
                "<|im_start|>user\nOne<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>"
                "\n<|im_start|>user\nTwo<|im_end|>\n<|im_start|>assistant\nYe<|im_end|>"
                "\n<|im_start|>user\nThree<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>"
            )

    run(scenario())


def test_a_result_that_does_not_fit_fails_the_turn_and_the_next_one_tells_the_model(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        seen: list[str] = []

        def model(prompt: str) -> str:
            seen.append(prompt)
            return calculator(prompt) if len(seen) == 1 else "Sorry."

        async with harbour(tmp_path, FakeEngine(model, context_len=1000)) as h:

            def add(a: int, b: int) -> str:
                """Add."""
                return "9" * 2000

            session = await h.client.create(tools=[add])
            with pytest.raises(ContextTooLong, match="the window is 1000"):
                await session.run("2 + 3?")
            assert (await session.get()).state == "idle"
            assert (await session.run("What happened?")).text == "Sorry."
            assert "did not fit the context window" in seen[-1]

    run(scenario())


def test_two_clients_of_one_session_see_the_same(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harbour(tmp_path, FakeEngine(calculator)) as h, Client(h.address) as other:
            session = await h.client.create(tools=[add])
            events: list[Event] = []
            task = await start(session, "2 + 3?", events)
            await calls_ready(events, 1)
            seen: list[Event] = []

            async def watch() -> None:
                async for event in other.session(session.session_id).attach(0):
                    seen.append(event)

            watching = asyncio.create_task(watch())
            (call,) = await calls_ready(seen, 1)
            await other.session(session.session_id).submit_tool_results({call.call_id: "5"})
            await asyncio.gather(task, watching)
            assert [i for e in seen for i in e.token_ids] == [
                i for e in events for i in e.token_ids
            ]
            assert seen[-1] == events[-1]

    run(scenario())
