"""Cancelling, overlapping turns, dropped streams: one terminal event a turn, and the session stays
usable.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest
from fake_engine import POISON, FakeEngine
from session_harness import Harbour, eventually, harbour, run
from test_tool_loop import SCHEMAS, calls_ready, kinds, start, two_calls

from moorage.engine import Abort, Release, Submit
from moorage.sessions.client import ClientSession
from moorage.sessions.client_events import Event, Failed, TextDelta, TurnEnd
from moorage.sessions.errors import EngineBusy, InternalError, SessionBusy, SessionClosed
from moorage.sessions.limits import Limits


def long_reply(prompt: str) -> str:
    return "x" * 2000


def reply_or_long(prompt: str) -> str:
    """A long reply to "long", else a short one."""
    return "x" * 2000 if "long<|im_end|>" in prompt.rsplit("<|im_start|>user", 1)[1] else "Yes."


def text_of(events: list[Event]) -> str:
    return "".join(e.text for e in events if isinstance(e, TextDelta))


def ends(events: list[Event]) -> list[Event]:
    return [e for e in events if isinstance(e, TurnEnd | Failed)]


async def idle(session: ClientSession) -> None:
    """Until the session is idle; the scenario's bound ends it otherwise."""
    while (await session.get()).state != "idle":
        await asyncio.sleep(0.002)


async def queued(engine: FakeEngine, number: int) -> None:
    """Until so many commands wait for a held engine."""
    await eventually(lambda: engine._mailbox.qsize() == number)


async def step(engine: FakeEngine, number: int) -> None:
    """Let a held engine take so many steps, and wait until it has."""
    target = engine.steps + number
    engine.allow(number)
    await eventually(lambda: engine.steps == target)


async def one_token(events: list[Event]) -> None:
    await eventually(lambda: bool(text_of(events)))


def test_cancel_ends_a_running_turn_once_and_is_acknowledged(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine(long_reply, held=True)
        async with harbour(tmp_path, engine) as h:
            session = await h.client.create(park_policy="never")
            events: list[Event] = []
            task = await start(session, "Hi", events)
            await queued(engine, 1)
            await step(engine, 6)
            await one_token(events)
            cancelling = asyncio.create_task(session.cancel())
            await queued(engine, 1)
            await step(engine, 1)  # one step is enough
            response = await cancelling
            await task
            assert response.was_running
            (end,) = ends(events)
            assert isinstance(end, TurnEnd)
            assert end.finish_reason == "cancelled"
            assert response.last_seq == end.last_seq
            assert not (await session.cancel()).was_running

    run(scenario())


def test_f1_a_dropped_stream_stops_the_engine_where_the_policy_says_cancel(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine(long_reply, held=True)
        async with harbour(tmp_path, engine) as h:
            session = await h.client.create(disconnect_policy="cancel", park_policy="never")
            events: list[Event] = []
            task = await start(session, "Hi", events)
            await queued(engine, 1)
            await step(engine, 5)
            await eventually(lambda: text_of(events) == "x" * 5)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await queued(engine, 1)  # the abort
            await step(engine, 1)
            await idle(session)
            replayed = [e async for e in session.attach(0)]
            (end,) = ends(replayed)
            assert isinstance(end, TurnEnd)
            assert end.finish_reason == "cancelled"
            assert text_of(replayed) == "x" * 5

    run(scenario())


def test_a_dropped_stream_goes_on_where_the_policy_says_continue(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harbour(tmp_path, FakeEngine(long_reply)) as h:
            session = await h.client.create()
            async with aclosing(session.generate("Hi")) as stream:
                async for event in stream:
                    if isinstance(event, TextDelta):
                        break
            events = [e async for e in session.attach(0)]
            assert text_of(events) == "x" * 2000
            assert len(ends(events)) == 1

    run(scenario())


def test_a_dropped_stream_is_suspended_and_parked_where_the_policy_says_park(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        engine = FakeEngine(long_reply, held=True)
        async with harbour(tmp_path, engine) as h:
            session = await h.client.create(disconnect_policy="park")
            seen: list[Event] = []
            task = await start(session, "Hi", seen)
            await queued(engine, 1)
            await step(engine, 4)
            await one_token(seen)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await queued(engine, 1)  # the abort
            engine.allow(None)
            while not (await session.get()).parked:
                await asyncio.sleep(0.002)
            info = await session.get()
            assert info.state == "running"
            assert len(engine.requests) == 1
            events = [e async for e in session.attach(0)]  # the same turn goes on
            assert text_of(events) == "x" * 2000
            assert kinds(events) == [
                "TurnStart", "InputAccepted", "Parked", "Resumed", "TurnEnd",
            ]  # fmt: skip
            assert len(engine.requests) == 2

    run(scenario())


def test_f2_a_request_whose_client_left_never_starts(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine(reply_or_long, max_running=1, held=True)
        async with harbour(tmp_path, engine) as h:
            a = await h.client.create()
            b = await h.client.create(disconnect_policy="cancel")
            events: list[Event] = []
            task_a = await start(a, "long", events)
            await queued(engine, 1)
            await step(engine, 2)
            await one_token(events)
            seen_b: list[Event] = []
            task_b = await start(b, "Hi", seen_b)
            await queued(engine, 1)
            await step(engine, 1)  # B stands in the queue now
            await eventually(lambda: len(engine.requests) == 2)
            task_b.cancel()
            await asyncio.gather(task_b, return_exceptions=True)
            await queued(engine, 1)
            engine.allow(None)
            await task_a
            await idle(b)
            assert text_of(events) == "x" * 2000
            assert text_of([e async for e in b.attach(0)]) == ""

    run(scenario())


def test_f3_cancelling_a_waiting_request_leaves_the_running_one_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine(reply_or_long, max_running=1, held=True)
        async with harbour(tmp_path, engine) as h:
            a, b = await h.client.create(), await h.client.create()
            events_a: list[Event] = []
            events_b: list[Event] = []
            task_a = await start(a, "long", events_a)
            await queued(engine, 1)
            await step(engine, 2)
            await one_token(events_a)
            task_b = await start(b, "Hi", events_b)
            await queued(engine, 1)
            await step(engine, 1)
            await eventually(lambda: len(engine.requests) == 2)
            cancelling = asyncio.create_task(b.cancel())
            await queued(engine, 1)
            await step(engine, 1)
            await cancelling
            await task_b
            engine.allow(None)
            await task_a
            assert text_of(events_a) == "x" * 2000
            assert text_of(events_b) == ""
            (end,) = ends(events_b)
            assert isinstance(end, TurnEnd)
            assert end.finish_reason == "cancelled"

    run(scenario())


async def _full_mailbox(h: Harbour) -> None:
    h.engine.hold()
    while not h.engine._mailbox.full():
        h.engine._mailbox.put_nowait(Abort("nobody"))


def test_f4_a_turn_cancelled_while_the_engine_is_full_leaves_the_session_free(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        engine = FakeEngine(lambda prompt: "Yes.", mailbox_len=4)
        async with harbour(tmp_path, engine) as h:
            session = await h.client.create()
            await _full_mailbox(h)
            events: list[Event] = []
            task = await start(session, "One", events)
            await eventually(lambda: "InputAccepted" in kinds(events))
            assert (await session.cancel()).was_running
            await task
            engine.allow(None)
            assert (await session.run("Two")).text == "Yes."
            assert len(engine.requests) == 1  # the cancelled one never got there

    run(scenario())


def test_f4_a_turn_that_waited_too_long_for_the_engine_fails_and_the_next_is_accepted(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        engine = FakeEngine(lambda prompt: "Yes.", mailbox_len=4)
        async with harbour(tmp_path, engine, limits=Limits(submit_wait_s=0.05)) as h:
            session = await h.client.create()
            await _full_mailbox(h)
            with pytest.raises(EngineBusy) as caught:
                await session.run("One")
            assert caught.value.retry_after_s > 0
            engine.allow(None)
            assert (await session.run("Two")).text == "Yes."

    run(scenario())


def test_f6_of_overlapping_turns_one_runs_and_the_history_is_not_interleaved(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        engine = FakeEngine(lambda prompt: "Yes.")
        async with harbour(tmp_path, engine) as h:
            session = await h.client.create(park_policy="never")

            async def attempt(name: str) -> str | None:
                try:
                    return (await session.run(name)).text
                except SessionBusy:
                    return None

            num_answers = 0
            for number in range(50):
                both = await asyncio.gather(attempt(f"a{number}"), attempt(f"b{number}"))
                assert any(both)
                num_answers += sum(answer is not None for answer in both)
                assert {answer for answer in both if answer is not None} == {"Yes."}
            info = await session.get()
            assert (info.state, info.turn) == ("idle", num_answers)
            history = engine.text(info.token_ids)
            assert history.count("<|im_start|>user") == num_answers
            assert history.count("assistant\nYes.<|im_end|>") == num_answers

    run(scenario())


def test_f6_two_generate_calls_at_once_give_one_stream_and_one_typed_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine(long_reply, held=True)
        async with harbour(tmp_path, engine) as h:
            session = await h.client.create()
            results = asyncio.gather(
                *(session.run(name) for name in ("a", "b", "c")), return_exceptions=True
            )
            await queued(engine, 1)
            engine.allow(None)
            found = await results
            assert sum(isinstance(r, SessionBusy) for r in found) == 2
            assert (await session.get()).turn == 1

    run(scenario())


def test_f9_a_reply_that_cannot_be_read_ends_its_stream_and_no_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        def model(prompt: str) -> str | list[int]:
            return [65, 66, POISON, *[67] * 500] if "poison" in prompt else "y" * 200

        engine = FakeEngine(model)
        async with harbour(tmp_path, engine) as h:
            bad = await h.client.create(park_policy="never")
            good = await h.client.create(park_policy="never")
            events: list[Event] = []
            task = await start(good, "Hi", events)
            async with asyncio.timeout(1.0):
                with pytest.raises(InternalError, match="could not be read"):
                    await bad.run("poison")
            await task
            assert text_of(events) == "y" * 200
            assert (await bad.get()).state == "idle"
            replayed = [e async for e in bad.attach(0)]
            assert isinstance(replayed[-1], Failed)
            assert text_of(replayed) == "AB"
            aborted = [c for c in engine.commands if isinstance(c, Abort)]
            assert len(aborted) == 1

    run(scenario())


def test_f10_cancel_after_the_end_twice_and_at_the_last_token(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine(lambda prompt: "Yes.")
        async with harbour(tmp_path, engine) as h:
            session = await h.client.create(park_policy="never")
            for _ in range(60):
                events: list[Event] = []
                task = await start(session, "Hi", events)
                await eventually(lambda: len(events) > 2)  # noqa: B023
                await asyncio.gather(session.cancel(), session.cancel())
                await task
                assert len(ends(events)) == 1
            everything = [e async for e in session.attach(0)]
            assert [e.turn for e in ends(everything)] == list(range(1, 61))

    run(scenario())


def test_f15_cancel_keeps_the_result_that_came_and_answers_the_other_call(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine(two_calls)
        async with harbour(tmp_path, engine) as h:
            session = await h.client.create(tool_schemas=SCHEMAS)
            events: list[Event] = []
            task = await start(session, "Go", events)
            first, second = await calls_ready(events, 2)
            await session.submit_tool_results({first.call_id: "one"})
            response = await session.cancel()
            await task
            assert list(response.cancelled_call_ids) == [second.call_id]
            assert len(ends(events)) == 1
            engine.model = lambda prompt: "Fine."
            assert (await session.run("Next")).text == "Fine."
            told = engine.text((await session.get()).token_ids).rsplit("</tool_call>", 1)[1]
            assert told.startswith("\n<|im_end|>\n<|im_start|>user\n<tool_response>\none\n")
            assert "<tool_response>\ncancelled: the call was given up" in told
            assert told.index("cancelled") < told.index("Next")

    run(scenario())


def test_cancel_pending_calls_does_both_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine(two_calls)
        async with harbour(tmp_path, engine) as h:
            session = await h.client.create(tool_schemas=SCHEMAS)
            events: list[Event] = []
            task = await start(session, "Go", events)
            await calls_ready(events, 2)
            engine.model = lambda prompt: "Fine."
            seen = [e async for e in session.generate("Next", cancel_pending_calls=True)]
            await task
            assert text_of(seen) == "Fine."

    run(scenario())


def test_close_ends_a_running_turn_and_frees_what_it_held(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine(long_reply, held=True)
        async with harbour(tmp_path, engine) as h:
            session = await h.client.create()
            events: list[Event] = []
            task = await start(session, "Hi", events)
            await queued(engine, 1)
            await step(engine, 3)
            await one_token(events)
            await session.close()
            engine.allow(None)
            await session.close()
            await task
            (end,) = ends(events)
            assert isinstance(end, TurnEnd)
            assert end.finish_reason == "cancelled"
            await eventually(lambda: any(isinstance(c, Release) for c in engine.commands))
            with pytest.raises(SessionClosed):
                await session.run("Hello?")
            assert text_of([e async for e in session.attach(0)]) == text_of(events)

    run(scenario())


def test_a_submit_reaches_the_engine_only_once_a_turn(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine(lambda prompt: "Yes.")
        async with harbour(tmp_path, engine) as h:
            session = await h.client.create()
            await session.run("One")
            await session.run("Two")
            assert sum(isinstance(c, Submit) for c in engine.commands) == 2

    run(scenario())


def test_a_stream_dropped_while_its_turn_is_cancelled_does_not_pause_the_turn(
    tmp_path: Path,
) -> None:
    """The policy says park, but the cancel came first: it is acknowledged and the session is free."""

    async def scenario() -> None:
        engine = FakeEngine(long_reply, held=True)
        async with harbour(tmp_path, engine) as h:
            session = await h.client.create(disconnect_policy="park", park_policy="never")
            seen: list[Event] = []
            task = await start(session, "Hi", seen)
            await queued(engine, 1)
            await step(engine, 4)
            await one_token(seen)
            cancel = asyncio.create_task(session.cancel())
            await queued(engine, 1)  # the abort
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await session.get()  # the server has seen the drop
            engine.allow(None)
            assert (await cancel).was_running
            info = await session.get()
            assert (info.state, info.parked) == ("idle", False)

    run(scenario())
